"""Labels of files and the classes they become: names, data.label_map, regions, and the map that unexpected ones need.

data.label_map makes a file's labels classes as they are read, and these its labels again as they are written.
"""

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from unet3d.base.errors import UserError
from unet3d.base.types import Regions
from unet3d.config import data_rules
from unet3d.config.data_rules import MAX_LABEL, checked_regions, label_sources, refuse_blank
from unet3d.config.schema import Data
from unet3d.data.texts import is_plain, shown, shown_names

LONGEST_LINE = 400  # letters about the values of classes
IGNORED = ("ignore", "ignored")  # names of what nobody means to learn
LISTED = 20  # labels in a message: more are no classes, but the voxels of an image
Relabel = Mapping[int, int] | None  # Maps every label that a file may hold to the new one; None: as stored.


class WrongLabels(UserError):
    """An error about labels that are no classes; `options` may make them some. Built by `wrong_labels`.

    Pickle and data workers build it again from its text alone.

    `labels` are those of a label map but 0, where they are whole numbers; `alone` is the message without the remedy.
    """

    alone = ""
    options: Sequence[str] = ()
    labels: frozenset[int] = frozenset()


def wrong_labels(
    message: str, remedy: str, options: Sequence[str] = (), labels: frozenset[int] = frozenset()
) -> WrongLabels:
    """Return the error for such labels, with the options that help."""
    error = WrongLabels(f"{message}; {remedy}{f', or add {shlex.join(options)}' if options else ''}")
    error.alone = message
    error.options = options
    error.labels = labels
    return error


def class_names(names: Mapping[int, str], ignore: int | None, where: object) -> tuple[str, ...]:
    """Return class names by label value, without the ignored one, which must be above all the others.

    Raises UserError.
    """
    labelled = {value: name for value, name in names.items() if value != ignore}
    if ignore is not None and labelled and ignore < max(labelled):
        raise UserError(f"{where}: {ignore} is the label to ignore; it must be above all others ({max(labelled)})")
    if ignore is not None and ignore > MAX_LABEL:
        raise UserError(f"{where}: {shown(ignore)} is the label to ignore; the highest possible is {MAX_LABEL}")
    classes = in_sequence(labelled, "labels", where, _words(_sources({*labelled}, 1, None)))
    refuse_blank(classes, f"{where}: labels")
    data_rules.refuse_background(classes, f"{where}: labels")
    if len(classes) < 2 or len({*classes}) < len(classes):
        remedy = "give the background and one class or more, each its own name"
        raise UserError(f"{where}: labels {shown(list(classes))}; {remedy}")
    return classes


def in_sequence(names: Mapping[int, str], what: str, where: object, options: Sequence[str] = ()) -> tuple[str, ...]:
    """Return names by number: 0, 1, 2 ... Else raises WrongLabels, with the options that help."""
    if not names or sorted(names) != list(range(len(names))):
        numbers = f"{where}: {what} are numbered {shown(sorted(names))}"
        raise wrong_labels(numbers, "number them 0, 1, 2 ... without a gap", options)
    refuse_odd_names(names, what, where)
    return tuple(names[number] for number in sorted(names))


def refuse_odd_names(names: Mapping[int, Any], what: str, where: object) -> None:
    """Raise UserError for a name that is not one line of text."""
    for name in names.values():
        if not is_plain(name):
            raise UserError(f"{where}: {what}: {shown(name)} is not a name; give one line of text")


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
    background = dict.fromkeys([0, *(old for old in names if old != ignore)], 0)
    if data.classes:
        return dict(enumerate(data.classes)), background | relabel
    in_order = [names[label] for label in sorted(names) if label != ignore]
    new_names = {0: names.get(0, "background")}
    unknown = []
    for new, olds in sources.items():
        named = [names[old] for old in olds if old in names]
        has_name = not named and new < len(in_order)  # The label in this place of dataset.json names it.
        if new:
            unknown += [] if has_name else [old for old in olds if old not in names]
            new_names[new] = in_order[new] if has_name else "+".join(named)
    if unknown:
        known = shown_names(sorted(names))
        what = f"dataset.json names no label {min(unknown)}, only {known}"
        raise UserError(f"{option}: {what}; name the new classes in data.classes")
    return new_names, background | relabel


def written_values(data: Data, classes: int) -> tuple[int, ...]:
    """Return the value of each class in label maps that are written; 0 for background.

    A class of one label is written as that label, a class of several as its class number. If two classes would then
    share a value, all classes are written as their numbers.
    """
    values = list(range(classes))
    for new, olds in label_sources(data.label_map).items() if data.label_map is not None else ():
        if 0 < new < classes and len(olds) == 1:
            values[new] = olds[0]
    return tuple(values if len({*values}) == classes else range(classes))


def written_words(data: Data, names: Sequence[str], regions: Regions | None) -> str:
    """Return what label maps hold, as `0 background, 1 core+edema (in the files 1, 2), 4 enhancing`.

    Of regions, as `0 background, 1 for whole, 2 for core, later ones over earlier ones`.
    """
    if regions is not None:
        values = written_values(data, regions.label_count)
        words = [f"{values[label]} for {name}" for name, label in zip(names[1:], regions.drawn, strict=True)]
        drawn = ", later ones over earlier ones" if len(words) > 1 else ""
        return shown_names([f"0 {names[0]}", *words], LONGEST_LINE) + drawn
    sources = {} if data.label_map is None else label_sources(data.label_map)
    words = []
    for number, value in enumerate(written_values(data, len(names))):
        olds = sources.get(number, [value]) if number else [value]
        in_files = "" if olds == [value] else f" (in the files {', '.join(map(str, olds))})"
        words.append(f"{value} {names[number]}{in_files}")
    return shown_names(words, LONGEST_LINE)


def options_for(occurring: Collection[int], classes: int, relabel: Relabel, names: Sequence[str]) -> tuple[str, ...]:
    """Return the options that make these labels of files classes, as plain words; () for what cannot be classes.

    `names` are of the classes, and those that are added have the labels' numbers; without them none can be added.
    """
    sources = _sources({*occurring}, classes, relabel)
    if sources and (relabel is not None or len(sources) < classes):
        return _words(sources)
    if not sources or not names:
        return ()
    known = dict(enumerate(names))
    words = [known.get(old, f"label_{old}") for olds in sources.values() for old in olds]
    return *_words(sources), f"data.classes=[{','.join([names[0], *words])}]"


def likely_ignored(classes: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each class that is learned although its name says that it is not."""
    for number, name in enumerate(classes):
        if name.casefold() in IGNORED:
            remedy = f"to leave its voxels out, set data.ignore={number}, or call it ignore in nnU-Net's dataset.json"
            yield f"{name} is learned and scored as a class; {remedy}"


def _sources(occurring: Set[int], classes: int, relabel: Relabel) -> dict[int, list[int]]:
    """Return the labels of files for each new one, as `relabel` has them; {} for what cannot be classes.

    Labels that it misses take the places of classes of which none occurs, or are background; without a map, new ones.
    """
    olds_of = {number: [number] for number in range(classes)}
    if relabel is not None:
        olds_of = {number: [old for old, new in relabel.items() if new == number] for number in range(classes)}
    others = sorted(occurring - {old for olds in olds_of.values() for old in olds})
    if not others or not _are_classes(others):
        return {}
    absent = [number for number in range(1, classes) if occurring.isdisjoint(olds_of[number])]
    if len(others) == len(absent) or (relabel is None and len(others) < len(absent)):
        # A label is rather called otherwise than one that nobody means.
        places = dict(zip(absent[-len(others) :], others, strict=True))
        return {number: [places[number]] if number in places else olds_of[number] for number in range(1, classes)}
    if relabel is not None:
        return olds_of | {0: sorted([*olds_of[0], *others])}
    everything = sorted({*range(1, classes), *others})
    return {number: [old] for number, old in enumerate(everything, 1)} if _are_classes(everything) else {}


def _are_classes(labels: Sequence[int]) -> bool:
    """Return whether sorted labels can be classes: there are few, and none is too low or too high."""
    return len(labels) <= LISTED and labels[0] >= 0 and labels[-1] <= MAX_LABEL


def _words(sources: Mapping[int, Sequence[int]]) -> tuple[str, ...]:
    """Return data.label_map of these sources as a word; () for no sources."""
    plain = {new: olds[0] if len(olds) == 1 else list(olds) for new, olds in sources.items()}
    return (f"data.label_map={plain}".replace(" ", ""),) if sources else ()


def as_option(sources: Mapping[int, Sequence[int]]) -> str:
    """Return the option the way a command line takes it, in quotes: a shell expands braces; "" for no sources."""
    return shlex.join(_words(sources))


class NamedRegions(NamedTuple):
    """Regions of the files' labels, and their names."""

    names: tuple[str, ...]
    regions: Regions

    def label_names(self) -> dict[int, str]:
        """Return a name for each label: the name of a region of this label alone, or the label's number."""
        names = {label: f"label {label}" for labels in self.regions.labels for label in labels}
        for name, labels in zip(self.names, self.regions.labels, strict=True):
            if len(labels) == 1:
                names[labels[0]] = name
        return names


def asked_regions(data: Data) -> NamedRegions | None:
    """Return data.regions; None where it is not set. Raises UserError."""
    if data.regions is None:
        return None
    option = f"data.regions={data.regions}"
    regions = checked_regions(data.regions, data.regions_class_order, option, "data.regions_class_order")
    return NamedRegions(tuple(data.regions), regions)


def as_classes(
    named: NamedRegions, classes: tuple[str, ...], relabel: Relabel, where: object
) -> tuple[tuple[str, ...], Regions]:
    """Return the background's name and the regions', and the regions by the numbers of these `classes`.

    `classes` name what the files' labels become by `relabel`. Raises UserError for regions that do not fit them.
    """
    refuse_odd_names(dict(enumerate(named.names)), "regions", where)
    refuse_blank(named.names, f"{where}: regions")
    names = (classes[0], *named.names)
    if len({*names}) < len(names):
        raise UserError(f"{where}: regions {shown(list(names))}; give each its own name, and another than background's")
    numbers = {number: number for number in range(len(classes))} if relabel is None else relabel
    regions = []
    drawn = []
    for name, labels, drawn_as in zip(named.names, named.regions.labels, named.regions.drawn, strict=True):
        unknown = [label for label in labels if label not in numbers]
        if unknown:
            problem = f"region {shown(name)} has the label {unknown[0]}, which the data set does not name"
            raise UserError(f"{where}: {problem}; leave it out")
        if not numbers[drawn_as]:
            problem = f"region {shown(name)} is drawn as {drawn_as}, which data.label_map makes background"
            raise UserError(f"{where}: {problem}; draw it as another of its labels")
        regions.append(tuple(sorted({numbers[label] for label in labels} - {0})))
        drawn.append(numbers[drawn_as])
    lone = sorted({*range(1, len(classes))}.difference(*regions))
    if lone:
        problem = f"label {shown(classes[lone[0]])} is in no region"
        raise UserError(f"{where}: {problem}; add it to one, or to 0 of data.label_map")
    of_classes = Regions(tuple(regions), tuple(drawn))
    data_rules.refuse_hidden(named.names, of_classes, where)
    return names, of_classes


def misread(dataset_names: Sequence[str], regions: Regions) -> Iterator[str]:
    """Yield a sentence for each label that is drawn so that label maps show another region than those that hold it.

    `dataset_names` are the background's and the regions'.
    """
    drawn = regions.shown_as()
    for name, labels in zip(dataset_names[1:], regions.labels, strict=True):
        for label, shown_as in drawn.items():
            is_held = label in labels
            if is_held == (shown_as in labels):
                continue
            effect = f"do not show {shown(name)} there" if is_held else f"show {shown(name)} there too"
            yield f"label {label} is drawn as {shown_as}: label maps {effect}; change regions_class_order if they can"
