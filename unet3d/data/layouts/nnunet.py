"""nnU-Net's raw layout: imagesTr/<case>_<channel>, one file a channel, and labelsTr/<case>; labels may be regions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unet3d.base.errors import UserError
from unet3d.base.files import NIFTI_ENDINGS
from unet3d.config.data_rules import checked_regions
from unet3d.config.schema import Data
from unet3d.data import nifti
from unet3d.data.cases import Case, DatasetInfo, inside, layout, sorted_cases, with_classes
from unet3d.data.dataset_json import DatasetJson, shown
from unet3d.data.file_names import by_stem, refuse_channel_names, shown_files, volumes_in, without_channel
from unet3d.data.labels import NamedRegions, asked_regions, in_sequence

# Times the files that are there: where dataset.json asks for more, its channels are wrong, not the files.
MAX_ABSENT = 10


@layout(by_channel=True)
def nnunet(root: Path, data: Data) -> DatasetInfo:
    """Return the data set of `root`/dataset.json and of the files beside it. Raises UserError."""
    about = DatasetJson(root, data.allow_outside)
    if "modality" in about.content and "channel_names" not in about.content:
        for path in volumes_in(root / "imagesTr"):
            about.refuse_version_1(path.with_name(f"{without_channel(nifti.stem(path))}.nii.gz"))
        raise UserError(f"{about.where} is in Decathlon's format; read it with data=decathlon")
    ending = _file_ending(about)
    channels = in_sequence(about.numbered("channel_names"), "channel_names", about.where)
    regions = asked_regions(data)
    own = _own_regions(about)
    if own is None:
        values = about.by_value("labels")
    elif regions is not None:
        remedy = f"{about.where} has regions of its own; leave data.regions unset"
        raise UserError(f"data.regions={data.regions}, but {remedy}")
    else:
        values, regions = own
    ignore = next((value for value, name in values.items() if name == "ignore"), data.ignore)
    if data.ignore not in (None, ignore):
        raise UserError(f"data.ignore={data.ignore}, but {about.where} says {ignore}; leave data.ignore unset")
    dataset = DatasetInfo(about.title, channels, (), ignore, announced=about.announced)
    dataset = with_classes(dataset, values, data, about.where, regions)
    cases = inside(_cases(root, ending, len(channels), about), (root,), data.allow_outside)
    others = [path for case in cases for path in case.files if nifti.ending(path).lower() != ending.lower()]
    notes = list[str]()
    if others:
        what = f'"file_ending" is {shown(ending)}, but {len(others)} files end otherwise, and are read all the same'
        notes.append(f"{about.where}: {what} ({shown_files(others)})")
    return dataset._replace(cases=cases, left_out=tuple(notes))


def _file_ending(about: DatasetJson) -> str:
    """Return the ending that dataset.json says volumes have. Raises UserError for one that is not NIfTI's."""
    ending: str = about.field("file_ending", str)
    if ending.lower() in NIFTI_ENDINGS:
        return ending
    if f".{ending.lower()}" in NIFTI_ENDINGS:
        remedy = f"write it with its dot, {shown(f'.{ending}')}"
    elif ending.lower().endswith(("gz", "nii")):
        remedy = f"write {' or '.join(map(shown, NIFTI_ENDINGS))}"
    else:
        remedy = f"convert the volumes to {' or '.join(NIFTI_ENDINGS)}"
    raise about.error(f'"file_ending" is {shown(ending)}; {remedy}')


def _cases(root: Path, ending: str, channels: int, about: DatasetJson) -> tuple[Case, ...]:
    """Return every case with a label or an image; a missing file is reported when it is opened. Raises UserError."""
    images = root / "imagesTr"
    maps = by_stem(volumes_in(root / "labelsTr"))
    present = by_stem(volumes_in(images))
    refuse_channel_names(maps, present)
    names = {*maps, *map(without_channel, present)}
    wanted = len(names) * channels
    if wanted > MAX_ABSENT * (len(present) + 100):
        what = f"{channels:,} channels, which are {wanted:,} files of {len(names):,} cases"
        raise about.error(f'"channel_names" has {what}, but {images} holds {len(present):,}; make them agree')
    cases = list[Case]()
    for name in names:
        stems = [f"{name}_{channel:04d}" for channel in range(channels)]
        files = tuple(present.get(stem, images / f"{stem}{ending}") for stem in stems)
        cases.append(Case(name, files, maps.get(name)))
    return sorted_cases(cases, images)


def has_regions(values: Mapping[str, Any]) -> bool:
    """Return whether labels {name: label or list of labels} overlap, as nnU-Net decides: any has several."""
    return any(isinstance(value, list) and len(value) != 1 for value in values.values())


def _own_regions(about: DatasetJson) -> tuple[dict[int, str], NamedRegions] | None:
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
    regions = checked_regions(labels_of, order, about.where, '"regions_class_order"')
    named = NamedRegions(tuple(labels_of), regions)
    names = named.label_names()
    both = sorted(names.keys() & others.keys())
    if both:
        raise about.error(f"{both[0]} is the label to ignore, and in a region; give it a label of its own")
    return names | others, named
