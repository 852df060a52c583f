"""The layout of the Medical Segmentation Decathlon: dataset.json lists the files, several channels are one 4D image."""

from pathlib import Path
from typing import Any

from unet3d.base.errors import UserError
from unet3d.config.schema import Data
from unet3d.data import nifti
from unet3d.data.cases import Case, DatasetInfo, layout, sorted_cases, with_classes
from unet3d.data.dataset_json import DatasetJson, shown
from unet3d.data.labels import asked_regions, in_sequence


@layout(lists_files=True)
def decathlon(root: Path, data: Data) -> DatasetInfo:
    """Return the data set of `root`/dataset.json. Raises UserError."""
    about = DatasetJson(root, data.allow_outside)
    if "channel_names" in about.content and "modality" not in about.content:
        raise UserError(f"{about.where} is in nnU-Net's format; read it with data=nnunet")
    cases = sorted_cases((_case(about, entry) for entry in about.field("training", list)), about.where)
    about.refuse_version_1(cases[0].images[0])
    channels = in_sequence(about.numbered("modality"), "modality", about.where)
    names = about.numbered("labels")
    dataset = DatasetInfo(about.title, channels, cases, data.ignore, announced=about.announced)
    return with_classes(dataset, names, data, about.where, asked_regions(data))


def _case(about: DatasetJson, entry: Any) -> Case:
    """Return the case of an entry in "training". Raises UserError."""
    if not isinstance(entry, dict) or "image" not in entry:
        raise about.error(f'{shown(entry)} in "training" is not {{"image": path, "label": path}}')
    image = about.path(entry["image"])
    label = about.path(entry["label"]) if "label" in entry else None
    return Case(nifti.stem(image), (image,), label)
