"""Options of the data at odds with each other, and names and regions that cannot be, wherever they come from."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from reprlib import repr as brief
from typing import Any

from unet3d.base.errors import UserError
from unet3d.base.types import Regions
from unet3d.config.schema import Data, names_classes

MAX_LABEL = 65535  # label maps are uint16 at most
MAX_SHOWN = 10  # regions in a message


def check_data(data: Data) -> None:
    """Raise UserError for the first option that another does not allow."""
    if len(set(data.augment.mirror)) != len(data.augment.mirror):
        raise UserError(f"data.augment.mirror={data.augment.mirror}: name each axis once")
    for name, index, count in (("fold", data.fold, data.folds), ("sparse_fold", data.sparse_fold, data.sparse_folds)):
        if index is not None and index >= count:
            raise UserError(f"data.{name}={index}: with data.{name}s={count} it runs from 0 to {count - 1}")
    if not names_classes(data) and not data.classes and data.regions is None:
        raise UserError(f"data.classes is not set: data={data.format} needs the class names, e.g. [background,organ]")
    if data.label_map is not None:
        count = len(label_sources(data.label_map).keys() | {0})
        if data.classes and len(data.classes) != count:
            problem = f"makes {count} classes, background with them, but data.classes has {len(data.classes)} names"
            raise UserError(f"data.label_map={data.label_map}: {problem}; make them agree")
    example = "give names and labels, as in 'data.regions={whole:[1,2,3],core:[2,3],rim:3}'"
    check_regions("data.regions", data.regions, data.regions_class_order, dict, example)
    if data.regions is not None and data.classes:
        problem = "names the classes, so that data.classes has nothing to name; leave it unset"
        raise UserError(f"data.regions={data.regions}: {problem}")
    for name, counts in (("sparse", data.sparse), ("scored", data.scored)):
        if counts is not None and not any(counts):
            raise UserError(f"data.{name}={counts}: give numbers of slices across x, y and z, not all 0")
    if data.semi and data.sparse is None:
        raise UserError("data.semi=true needs slices to learn from: add data.sparse=[yz,xz,xy], e.g. [5,5,3]")
    if data.semi and (data.fold is not None or data.split is not None):
        raise UserError("data.semi=true learns from slices of every case; set data.fold and data.split to null")
    if data.sparse_fold is None:
        return
    if not data.semi or data.sparse is None:
        raise UserError("data.sparse_fold needs data.semi=true: no other run scores a part of the slices")
    if data.format == "mni152" and data.sparse[0]:
        reason = "mni152 is its own mirror image across x: data.sparse_fold scores mirror images of learned slices"
        raise UserError(f"data.sparse={data.sparse}: {reason}; take none across x, e.g. data.sparse=[0,6,12]")
    if max(data.sparse) < data.sparse_folds:
        raise UserError(f"data.sparse={data.sparse}: too few slices for data.sparse_folds={data.sparse_folds}")


def check_classes_of_new_run(data: Data) -> None:
    """Raise UserError for names that are blank, and regions that no label map can show.

    Runs and checkpoints that have such classes are still read.
    """
    refuse_blank(data.classes or (), f"data.classes={data.classes}")
    refuse_background(data.classes or (), f"data.classes={data.classes}")
    if data.regions is None:
        return
    option = f"data.regions={data.regions}"
    names = [str(name) for name in data.regions]
    refuse_blank(names, option)
    if data.label_map is None:  # With a label map, names are those of other labels.
        regions = checked_regions(data.regions, data.regions_class_order, option, "data.regions_class_order")
        refuse_hidden(names, regions, option)


def check_regions(option: str, regions: Any, order: Any, kind: type, example: str) -> None:
    """Raise UserError for regions, the value of this option, that are not of this kind, or that cannot be."""
    order_name = f"{option}_class_order"
    labels_of = dict(enumerate(regions, start=1)) if isinstance(regions, list) else regions
    if isinstance(regions, kind):
        checked_regions(labels_of, order, f"{option}={regions}", order_name)
    elif regions is not None:
        raise UserError(f"{option}={regions}: {example}")
    elif order is not None:
        raise UserError(f"{order_name} is set, but {option} is not; give both, or neither")


def label_sources(label_map: Any) -> dict[int, list[int]]:
    """Return `{1: [1, 2], 2: 4}` as `{1: [1, 2], 2: [4]}`. Raises UserError for anything else."""
    option = f"data.label_map={label_map}"
    example = "give each new label those of the files, as in 'data.label_map={1:[1,2],2:4}'"
    if not isinstance(label_map, dict) or not label_map:
        raise UserError(f"{option}: {example}")
    sources = {new: list(olds) if isinstance(olds, list) else [olds] for new, olds in label_map.items()}
    labels = [old for olds in sources.values() for old in olds]
    if not all(type(label) is int and 0 <= label <= MAX_LABEL for label in (*sources, *labels)):
        raise UserError(f"{option}: labels are whole numbers from 0 to {MAX_LABEL}; {example}")
    classes = sorted(sources.keys() - {0})
    if not classes or classes != list(range(1, len(classes) + 1)):
        raise UserError(f"{option}: number the new labels 1, 2, 3 ... without a gap; 0 may be there")
    if not all(sources.values()):
        raise UserError(f"{option}: a new label has none of the files; {example}")
    label, times = Counter(labels).most_common(1)[0]
    if times > 1:
        raise UserError(f"{option}: {label} is there twice; it can become one label only")
    return sources


def checked_regions(labels_of: Mapping[Any, Any], order: Any, where: object, order_name: str) -> Regions:
    """Return the regions {name: label or labels}, drawn in `order`, which stands at `where` under `order_name`.

    Raises UserError.
    """
    regions = [_checked_labels(name, labels, where) for name, labels in labels_of.items()]
    if not regions:
        raise UserError(f"{where}: no region; give one or more, each a name and its labels")
    example = [labels[0] for labels in regions]
    if order is None:
        problem = f"{order_name} is missing: it says which label each region is drawn as, one after the other"
        raise UserError(f"{where}: {problem}; add it, e.g. {example}")
    if not isinstance(order, list) or len(order) != len(regions):
        problem = f"{order_name} is {brief(order)}, but there are {len(regions)} regions"
        raise UserError(f"{where}: {problem}; give a label for each, e.g. {example}")
    for name, labels, drawn in zip(labels_of, regions, order, strict=True):
        if type(drawn) is not int or drawn not in labels:
            problem = f"{order_name} draws region {brief(name)} as {brief(drawn)}"
            raise UserError(f"{where}: {problem}; give one of its labels, {brief(list(labels))}")
    return Regions(tuple(regions), tuple(order))


def refuse_blank(names: Iterable[str], where: object) -> None:
    """Raise UserError for a name that a table would show as nothing, or as another: blank, or with blanks around it."""
    for name in names:
        if not name.strip():
            raise UserError(f"{where}: {brief(name)} is blank; give it a name")
        if name != name.strip():
            raise UserError(f"{where}: {brief(name)} has blanks around it; write {brief(name.strip())}")


def refuse_background(names: Sequence[str], where: object) -> None:
    """Raise UserError for a class that is called background but is not the first."""
    for number, name in enumerate(names):
        if number and name.casefold() == "background":
            raise UserError(f"{where}: label {number} is called {name}, but 0 is the background; swap the names")


def refuse_hidden(names: Sequence[str], regions: Regions, where: object) -> None:
    """Raise UserError where a region of these names is drawn over by a later one, and so in no label map."""
    hidden = regions.hidden()
    if hidden is None:
        return
    inner, outer = (brief(names[number]) for number in hidden)
    order = sorted(range(len(names)), key=lambda number: -len(regions.labels[number]))
    drawn = ", ".join(f"{names[number]} as {regions.drawn[number]}" for number in order[:MAX_SHOWN])
    problem = f"region {outer} is drawn over {inner}: no label map will show {inner}"
    raise UserError(f"{where}: {problem}; list outer regions first, and their labels in that order, e.g. {drawn}")


def _checked_labels(name: Any, labels: Any, where: object) -> tuple[int, ...]:
    """Return the labels of a region in ascending order. Raises UserError."""
    region = f"{where}: region {brief(name)}"
    values = labels if isinstance(labels, list) else [labels]
    if not values:
        raise UserError(f"{region} has no label; list one or more")
    if any(type(value) is not int for value in values):  # JSON's true would count as 1
        raise UserError(f"{region} is {brief(labels)}; give a label, or a list of labels, as in [1, 2, 3]")
    if 0 in values:
        raise UserError(f"{region} holds 0, the background, which no region has, and which is not scored; leave 0 out")
    if min(values) < 0 or max(values) > MAX_LABEL:
        raise UserError(f"{region} is {brief(labels)}; labels are whole numbers from 1 to {MAX_LABEL}")
    return tuple(sorted({*values}))
