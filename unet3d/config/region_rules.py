"""Rules of regions, which come from data.regions, from a dataset.json, or from the options of a network."""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from unet3d.base.errors import UserError
from unet3d.base.regions import Regions

MAX_LABEL = 65535  # label maps are uint16 at most
MAX_SHOWN = 10  # regions in a message


def checked_regions(labels_of: Mapping[Any, Any], order: Any, where: object, order_name: str) -> Regions:
    """Return the regions {name: label or labels}, drawn in `order`, which stands at `where` under `order_name`.

    Raises UserError.
    """
    regions = []
    for name, labels in labels_of.items():
        regions.append(_checked_labels(name, labels, where))
    if not regions:
        raise UserError(f"{where}: no region; give one or more, each a name and its labels")
    example = [labels[0] for labels in regions]
    if order is None:
        problem = f"{order_name} is missing: it says which label each region is drawn as, one after the other"
        raise UserError(f"{where}: {problem}; add it, e.g. {example}")
    if not isinstance(order, list) or len(order) != len(regions):
        problem = f"{order_name} is {reprlib.repr(order)}, but there are {len(regions)} regions"
        raise UserError(f"{where}: {problem}; give a label for each, e.g. {example}")
    for name, labels, drawn in zip(labels_of, regions, order, strict=True):
        if type(drawn) is not int or drawn not in labels:
            problem = f"{order_name} draws region {reprlib.repr(name)} as {reprlib.repr(drawn)}"
            raise UserError(f"{where}: {problem}; give one of its labels, {reprlib.repr(list(labels))}")
    return Regions(tuple(regions), tuple(order))


def refuse_blank(names: Iterable[str], where: object) -> None:
    """Raise UserError for a name that a table would show as nothing, or as another: blank, or with blanks around it."""
    for name in names:
        if not name.strip():
            raise UserError(f"{where}: {reprlib.repr(name)} is blank; give it a name")
        if name != name.strip():
            raise UserError(f"{where}: {reprlib.repr(name)} has blanks around it; write {reprlib.repr(name.strip())}")


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
    inner, outer = (reprlib.repr(names[number]) for number in hidden)
    order = sorted(range(len(names)), key=lambda number: -len(regions.labels[number]))
    drawn = ", ".join(f"{names[number]} as {regions.drawn[number]}" for number in order[:MAX_SHOWN])
    problem = f"region {outer} is drawn over {inner}: no label map will show {inner}"
    raise UserError(f"{where}: {problem}; list outer regions first, and their labels in that order, e.g. {drawn}")


def _checked_labels(name: Any, labels: Any, where: object) -> tuple[int, ...]:
    """Return the labels of a region in ascending order. Raises UserError."""
    region = f"{where}: region {reprlib.repr(name)}"
    values = labels if isinstance(labels, list) else [labels]
    if not values:
        raise UserError(f"{region} has no label; list one or more")
    if any(type(value) is not int for value in values):  # JSON's true would count as 1
        raise UserError(f"{region} is {reprlib.repr(labels)}; give a label, or a list of labels, as in [1, 2, 3]")
    if 0 in values:
        raise UserError(f"{region} holds 0, the background, which no region has, and which is not scored; leave 0 out")
    if min(values) < 0 or max(values) > MAX_LABEL:
        raise UserError(f"{region} is {reprlib.repr(labels)}; labels are whole numbers from 1 to {MAX_LABEL}")
    return tuple(sorted({*values}))
