"""Regions of a data set: of nnU-Net's dataset.json, or of data.regions, first by the files' labels, then by classes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from unet3d.base.errors import UserError
from unet3d.base.types import Regions
from unet3d.config.data_rules import checked_regions, refuse_blank, refuse_hidden
from unet3d.config.schema import Data
from unet3d.data.dataset_json import DatasetJson, refuse_odd_names, shown
from unet3d.data.labels import Relabel


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


def has_regions(values: Mapping[str, Any]) -> bool:
    """Return whether labels {name: label or list of labels} overlap, as nnU-Net decides: any has several."""
    return any(isinstance(value, list) and len(value) != 1 for value in values.values())


def read_regions(about: DatasetJson) -> tuple[dict[int, str], NamedRegions] | None:
    """Return the labels' names and the regions of a dataset.json; None where its labels do not overlap.

    Raises UserError.
    """
    values = about.field("labels", dict)
    if not has_regions(values):
        return None
    others: dict[int, str] = {}  # the background, and the label to ignore
    labels_of = {}
    for name, value in values.items():
        is_background = type(value) is int and value == 0
        if name == "ignore" and type(value) is not int:
            raise about.error(f'"ignore" is {shown(value)}; give one integer, above all other labels')
        if is_background or name == "ignore":
            others[value] = name
        else:
            labels_of[name] = value
    if 0 not in others:
        raise about.error('"labels" has no background; add "background": 0')
    about.refuse_long("labels", labels_of)
    order = about.content.get("regions_class_order")
    named = NamedRegions(
        tuple(labels_of),
        checked_regions(labels_of, order, about.where, '"regions_class_order"'),
    )
    names = named.label_names()
    both = sorted(names.keys() & others.keys())
    if both:
        raise about.error(f"{both[0]} is the label to ignore, and in a region; give it a label of its own")
    return names | others, named


def asked_regions(data: Data) -> NamedRegions | None:
    """Return data.regions; None where it is not set. Raises UserError."""
    if data.regions is None:
        return None
    option = f"data.regions={data.regions}"
    regions = checked_regions(data.regions, data.regions_class_order, option, "data.regions_class_order")
    return NamedRegions(tuple(data.regions), regions)


def as_classes(
    named: NamedRegions,
    classes: tuple[str, ...],
    relabel: Relabel,
    where: str,
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
    refuse_hidden(named.names, of_classes, where)
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
