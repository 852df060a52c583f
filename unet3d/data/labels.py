"""data.label_map: a file's labels become classes as they are read, and these its labels again as they are written.

And the map that unexpected labels need.
"""

from collections.abc import Collection, Mapping, Sequence
from textwrap import shorten

from unet3d.base.errors import UserError
from unet3d.config.data_rules import MAX_LABEL, label_sources
from unet3d.config.schema import Data

LONGEST_LINE = 400  # letters about the values of classes
LISTED = 20  # labels in a message: more are no classes, but the voxels of an image
Relabel = Mapping[int, int] | None  # from a file's label to the new one, of all that may occur; None: as stored


def relabelling(names: Mapping[int, str], ignore: int | None, data: Data) -> tuple[dict[int, str], Relabel]:
    """The class names by new label, and the new label of each that the files may hold. Raises UserError.

    `names` are those of the files' labels. A label that has a name here and is not in the map becomes background.
    """
    if data.label_map is None:
        return dict(names), None
    sources = label_sources(data.label_map)
    relabel = {old: new for new, olds in sources.items() for old in olds}
    if ignore in relabel:
        raise UserError(f"data.label_map={data.label_map}: {ignore} is the label to ignore, which stays as it is")
    if ignore is not None and ignore <= max(sources):
        what = f"the label to ignore, {ignore}, must be above the new labels, which run to {max(sources)}"
        raise UserError(f"data.label_map={data.label_map}: {what}; store it as a higher one")
    if data.classes:
        new_names = dict(enumerate(data.classes))
    else:
        if unknown := sorted(old for old, new in relabel.items() if new and old not in names):
            known = shorten(", ".join(map(str, sorted(names))), 2_000, placeholder=" ...")
            what = f"dataset.json names no label {unknown[0]}, only {known}"
            raise UserError(f"data.label_map={data.label_map}: {what}; name the new classes in data.classes")
        new_names = {new: "+".join(names[old] for old in olds) for new, olds in sources.items() if new}
        new_names[0] = names.get(0, "background")
    return new_names, dict.fromkeys([0, *(old for old in names if old != ignore)], 0) | relabel


def written_values(data: Data, classes: int) -> tuple[int, ...]:
    """The value of each class in label maps that are written: the files' own, where the class is one of their labels.

    A class of several labels has its number. So has every class where that number would be another's label.
    """
    sources = {} if data.label_map is None else label_sources(data.label_map)
    own = {new: olds[0] for new, olds in sources.items() if new and len(olds) == 1}
    values = tuple(own.get(number, number) for number in range(classes))
    return values if len(set(values)) == classes else tuple(range(classes))


def written_words(data: Data, names: Sequence[str]) -> str:
    """What label maps hold, as `0 background, 1 core+edema (in the files 1, 2), 4 enhancing`."""
    sources = {} if data.label_map is None else label_sources(data.label_map)
    words = []
    for number, value in enumerate(written_values(data, len(names))):
        olds = sources.get(number, [value]) if number else [value]
        known = "" if olds == [value] else f" (in the files {', '.join(map(str, olds))})"
        words.append(f"{value} {names[number]}{known}")
    return shorten(", ".join(words), LONGEST_LINE, placeholder=" ...")


def proposal(found: Collection[int], classes: int, relabel: Relabel = None) -> str:
    """The option that makes these labels of files fit so many classes; "" where they are no classes."""
    others = sorted({*found} - {*(range(classes) if relabel is None else relabel)})
    if not others or not _are_classes(others):
        return ""
    if relabel is not None:
        olds = {new: sorted(old for old in relabel if relabel[old] == new) for new in range(classes)}
        return as_option(olds | {0: sorted([*olds[0], *others])})
    absent = [label for label in range(1, classes) if label not in found]
    if len(others) > len(absent):  # more labels than classes
        option = numbered(everything := {*range(1, classes), *others})
        return option and f"{option} and {len(everything) + 1} names in data.classes"
    return as_option(
        {label: label for label in range(1, classes)} | dict(zip(absent[-len(others) :], others, strict=True))
    )


def numbered(found: Collection[int]) -> str:
    """The option that makes these labels 1, 2, 3 ..., without 0; "" where they are no classes."""
    others = sorted({*found} - {0})
    return as_option(dict(enumerate(others, 1))) if others and _are_classes(others) else ""


def _are_classes(found: Sequence[int]) -> bool:
    return len(found) <= LISTED and found[0] >= 0 and found[-1] <= MAX_LABEL


def as_option(sources: Mapping[int, int | list[int]]) -> str:
    """The option as it is written on a command line, in quotes: a shell expands braces."""
    plain = {new: olds[0] if isinstance(olds, list) and len(olds) == 1 else olds for new, olds in sources.items()}
    return f"'data.label_map={plain}'".replace(" ", "")
