"""data.label_map: a file's labels become classes as they are read, and these its labels again as they are written.

And the map that unexpected labels need.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from textwrap import shorten

from unet3d.base.errors import UserError
from unet3d.base.types import Regions
from unet3d.config.data_rules import MAX_LABEL, label_sources
from unet3d.config.schema import Data

LONGEST_LINE = 400  # letters about the values of classes
MAX_NAMES = 2_000  # letters of the labels that dataset.json names
IGNORED = ("ignore", "ignored")  # names of what nobody means to learn
LISTED = 20  # labels in a message: more are no classes, but the voxels of an image
Relabel = Mapping[int, int] | None  # from a file's label to the new one, of all that may occur; None: as stored


def relabelling(names: Mapping[int, str], ignore: int | None, data: Data) -> tuple[dict[int, str], Relabel]:
    """Return the class names by new label, and the new label of each that the files may hold. Raises UserError.

    `names` name the files' labels. A label that has a name here and is not in the map becomes background.
    """
    if data.label_map is None:
        return dict(names), None
    option = f"data.label_map={data.label_map}"
    sources = label_sources(data.label_map)
    relabel = {old: new for new, olds in sources.items() for old in olds}
    if ignore in relabel:
        raise UserError(f"{option}: {ignore} is the label to ignore, which stays as it is")
    if ignore is not None and ignore <= max(sources):
        what = f"the label to ignore, {ignore}, must be above the new labels, which run to {max(sources)}"
        raise UserError(f"{option}: {what}; store it as a higher one")
    if data.classes:
        new_names = dict(enumerate(data.classes))
    else:
        in_order = [names[label] for label in sorted(names) if label != ignore]
        unknown = []
        for new, olds in sources.items():
            unnamed = [old for old in olds if old not in names]
            has_name = len(unnamed) == len(olds) and new < len(in_order)  # that of dataset.json's label in this place
            unknown += [] if has_name or not new else unnamed
        if unknown:
            known = shorten(
                ", ".join(map(str, sorted(names))),
                MAX_NAMES,
                placeholder=" ...",
            )
            what = f"dataset.json names no label {min(unknown)}, only {known}"
            raise UserError(f"{option}: {what}; name the new classes in data.classes")
        new_names = {}
        for new, olds in sources.items():
            if new:
                new_names[new] = "+".join(names[old] for old in olds if old in names) or in_order[new]
        new_names[0] = names.get(0, "background")
    background = dict.fromkeys([0, *(old for old in names if old != ignore)], 0)
    return new_names, background | relabel


def written_values(data: Data, classes: int) -> tuple[int, ...]:
    """Return the value of each class in label maps that are written; 0 for background.

    A class of one label is written as that label, a class of several as its class number. If two classes would then
    share a value, all classes are written as their numbers.
    """
    numbers = tuple(range(classes))
    if data.label_map is None:
        return numbers
    label_of = dict[int, int]()
    for new, olds in label_sources(data.label_map).items():
        if new and len(olds) == 1:
            label_of[new] = olds[0]
    values = tuple(label_of.get(number, number) for number in numbers)
    if len(set(values)) < classes:
        return numbers
    return values


def region_words(data: Data, names: Sequence[str], regions: Regions) -> str:
    """Return what label maps of regions hold, as `0 background, then 1 for whole, 2 over it for core`."""
    values = written_values(data, regions.label_count)
    words = [f"0 {names[0]}"]
    for name, label in zip(names[1:], regions.drawn, strict=True):
        words.append(f"{values[label]} for {name}")
    drawn = ", later ones over earlier ones" if len(regions.drawn) > 1 else ""
    return shorten(", ".join(words), LONGEST_LINE, placeholder=" ...") + drawn


def written_words(data: Data, names: Sequence[str]) -> str:
    """Return what label maps hold, as `0 background, 1 core+edema (in the files 1, 2), 4 enhancing`."""
    sources = {} if data.label_map is None else label_sources(data.label_map)
    words = list[str]()
    for number, value in enumerate(written_values(data, len(names))):
        olds = [value]
        if number:
            olds = sources.get(number, [value])
        word = f"{value} {names[number]}"
        if olds != [value]:
            word += f" (in the files {', '.join(map(str, olds))})"
        words.append(word)
    return shorten(", ".join(words), LONGEST_LINE, placeholder=" ...")


def proposal(occurring: Collection[int], classes: int, relabel: Relabel = None) -> str:
    """Return the option that makes these labels of a file fit `classes`; "" for what cannot, or where others decide."""
    sources = _sources(occurring, classes, relabel)
    if not sources or (relabel is not None and 0 not in sources):  # a class that is not in this file may be in others
        return ""
    more = relabel is None and len(sources) >= classes
    return as_option(sources) + (f" and {len(sources) + 1} names in data.classes" if more else "")


def options_for(occurring: Collection[int], classes: int, relabel: Relabel, names: Sequence[str]) -> tuple[str, ...]:
    """Return the options that make these labels of files classes, as plain words; () for what cannot be classes.

    `names` are of the classes, and those that are added have the labels' numbers; without them none can be added.
    """
    sources = _sources(occurring, classes, relabel)
    if not sources:
        return ()
    option = as_option(sources).strip("'")
    if relabel is not None or len(sources) < classes:
        return (option,)
    if not names:
        return ()
    known = dict(enumerate(names))
    words = [names[0]]
    for olds in sources.values():
        words.append(known.get(olds, f"label_{olds}") if isinstance(olds, int) else "+".join(map(str, olds)))
    return option, f"data.classes=[{','.join(words)}]"


def likely_ignored(classes: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each class that is learned although its name says that it is not."""
    for number, name in enumerate(classes):
        if name.casefold() in IGNORED:
            remedy = f"to leave its voxels out, set data.ignore={number}, or call it ignore in nnU-Net's dataset.json"
            yield f"{name} is learned and scored as a class; {remedy}"


def _sources(occurring: Collection[int], classes: int, relabel: Relabel) -> dict[int, int | list[int]]:
    """Return the labels of files for each new one, {} for what cannot be classes."""
    known = range(classes) if relabel is None else relabel
    others = sorted({*occurring} - {*known})
    if not others or not _are_classes(others):
        return {}
    if relabel is not None:
        return _mapped(others, {*occurring}, classes, relabel)
    labels = range(1, classes)
    absent = [label for label in labels if label not in occurring]
    if len(others) > len(absent):  # more labels than classes
        everything = sorted({*labels, *others})
        return dict(enumerate(everything, 1)) if _are_classes(everything) else {}
    sources = dict[int, int | list[int]](zip(labels, labels, strict=True))
    for new, old in zip(absent[-len(others) :], others, strict=True):
        sources[new] = old
    return sources


def _mapped(
    others: Sequence[int], occurring: Set[int], classes: int, relabel: Mapping[int, int]
) -> dict[int, int | list[int]]:
    """Return the labels of files for each new one, as a map has them.

    `others` are for classes of which none of the labels occurs, if these are as many, or else for the background.
    """
    sources = dict[int, int | list[int]]()
    olds_of = {number: [old for old, new in relabel.items() if new == number] for number in range(classes)}
    absent = [number for number in range(1, classes) if occurring.isdisjoint(olds_of[number])]
    if len(others) == len(absent):  # rather a label that is called otherwise than one that nobody means
        sources.update((number, olds_of[number]) for number in range(1, classes))
        sources.update(zip(absent, others, strict=True))
        return sources
    for number in range(classes):
        sources[number] = sorted([*olds_of[number], *(others if number == 0 else ())])
    return sources


def numbered(labels: Collection[int]) -> str:
    """Return the option that makes these labels 1, 2, 3 ..., without 0; "" for what cannot be classes."""
    others = sorted({*labels} - {0})
    if not others or not _are_classes(others):
        return ""
    sources = dict(enumerate(others, 1))
    return as_option(sources)


def _are_classes(labels: Sequence[int]) -> bool:
    """Return whether sorted labels can be classes: there are few, and none is too low or too high."""
    return len(labels) <= LISTED and labels[0] >= 0 and labels[-1] <= MAX_LABEL


def as_option(sources: Mapping[int, int | list[int]]) -> str:
    """Return the option as it is written on a command line, in quotes: a shell expands braces."""
    plain = dict[int, int | list[int]]()
    for new, olds in sources.items():
        if isinstance(olds, list) and len(olds) == 1:
            plain[new] = olds[0]
        else:
            plain[new] = olds
    return f"'data.label_map={plain}'".replace(" ", "")
