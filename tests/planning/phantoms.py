"""Three kinds of data as a planner sees them: thin-sliced MR, large CT, four-channel brain; and fingerprints alone."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import nibabel as nib
import numpy as np

from unet3d.planning.fingerprint import ChannelIntensity, Fingerprint


class Kind(NamedTuple):
    """A kind of data: the size of its volumes and what is in them."""

    shape: tuple[int, int, int]  # voxels
    spacing: tuple[float, float, float]  # mm
    channels: tuple[str, ...]
    classes: tuple[str, ...]
    air: int  # intensity around the body
    tissue: int  # within


KINDS = {
    "mr": Kind((320, 320, 20), (0.7, 0.7, 5.0), ("T2",), ("background", "gland"), 0, 300),
    "ct": Kind((512, 512, 400), (0.8, 0.8, 1.0), ("CT",), ("background", "liver", "tumour"), -1000, 60),
    "brain": Kind(
        (138, 169, 138),
        (1.0, 1.0, 1.0),
        ("FLAIR", "T1", "T1gd", "T2"),
        ("background", "oedema", "core", "enhancing"),
        0,
        500,
    ),
}


def write_data_set(folder: Path, kind: Kind, cases: int, scale: float = 1.0, small: int = 0) -> Path:
    """Write a data set of a kind in the Decathlon's layout, of volumes `scale` times as long; return its folder.

    `small`: how many more cases it has, the last ones, a quarter as long.
    """
    affine = np.diag([*kind.spacing, 1.0])
    (folder / "imagesTr").mkdir(parents=True)
    (folder / "labelsTr").mkdir()
    rng = np.random.default_rng(0)
    training = []
    for number in range(cases + small):
        share = scale if number < cases else scale / 4
        x, y, z = (max(4, round(share * length)) for length in kind.shape)
        sizes = (x, y, z - 1 + number % 3)  # whose median is the kind's
        image, label = _volume(kind, sizes, rng)
        name = f"case_{number:03d}.nii.gz"
        nib.save(nib.Nifti1Image(image, affine), folder / "imagesTr" / name)
        nib.save(nib.Nifti1Image(label, affine), folder / "labelsTr" / name)
        training.append({"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"})
    about = {
        "name": "phantoms",
        "modality": {str(index): channel for index, channel in enumerate(kind.channels)},
        "labels": {str(value): name for value, name in enumerate(kind.classes)},
        "training": training,
    }
    (folder / "dataset.json").write_text(json.dumps(about))
    return folder


def _volume(kind: Kind, sizes: Sequence[int], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return an image (X, Y, Z, or with channels X, Y, Z, C) of a body with nested boxes, and its labels.

    Each plane has noise of its own, so that no two cases are equal and files compress well.
    """
    planes = rng.integers(-20, 20, (1, 1, sizes[2])).astype(np.int16)
    image = np.full(sizes, kind.air, np.int16)
    label = np.zeros(sizes, np.uint8)
    body = tuple(slice(length // 8, length - length // 8) for length in sizes)
    image[body] = kind.tissue + planes[:, :, body[2]]
    corner = [length // 4 + int(rng.integers(0, max(1, length // 8))) for length in sizes]
    for value in range(1, len(kind.classes)):
        half = [max(1, length // 8 // value) for length in sizes]
        box = tuple(slice(start, start + 2 * size) for start, size in zip(corner, half, strict=True))
        image[box] += np.int16(100 * value)
        label[box] = value
    if len(kind.channels) > 1:
        image = np.stack([image + np.int16(10 * channel) for channel in range(len(kind.channels))], axis=-1)
    return image, label


def fingerprint(kind: Kind, cases: int = 100) -> Fingerprint:
    """Return the fingerprint of so many equal cases of a kind, without any file."""
    held_out = cases // 5
    extent = [length * mm / 3 for length, mm in zip(kind.shape, kind.spacing, strict=True)]
    percentiles = (kind.air, 0, kind.tissue)
    channels = [ChannelIntensity(name, percentiles, 0, 1, (1, 1), is_ct_like=kind.air < 0) for name in kind.channels]
    return Fingerprint(
        name="phantoms",
        training_cases=cases - held_out,
        held_out=[(kind.shape, kind.spacing)] * held_out,
        sampled_cases=20,
        shapes=[kind.shape] * cases,
        spacings=[kind.spacing] * cases,
        classes=[(name, 1 / len(kind.classes), 1.0) for name in kind.classes],
        model={"in_channels": len(kind.channels), "classes": len(kind.classes)},
        channels=channels,
        ordered_axes=(),
        cut_axes=(),
        foreground=(extent[0], extent[1], extent[2]),
    )
