"""A made brain of four channels in nnU-Net's layout, whose tumour has regions: whole, core in it, enhancing in that."""

import json
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

SHAPE = (22, 20, 18)
AFFINE = np.diag([1.0, 1.0, 1.5, 1.0])
CHANNELS = {"0": "T1", "1": "T1ce", "2": "T2", "3": "FLAIR"}
LABELS: dict[str, Any] = {"background": 0, "whole_tumor": [1, 2, 3], "tumor_core": [2, 3], "enhancing": 3}
ORDER = [1, 2, 3]
NAMES = ("whole_tumor", "tumor_core", "enhancing")
HELD = ((1, 2, 3), (2, 3), (3,))  # labels of each region
# What each channel shows in brain, edema, core and enhancing tumour.
CONTRAST = ((1.0, 0.8, 0.5, 0.6), (1.0, 0.9, 0.6, 2.0), (1.0, 1.8, 1.6, 1.3), (1.0, 2.2, 1.5, 1.4))


def make_brain(root: Path, cases: int = 4, ignore: int | None = None, **changes: Any) -> Path:
    """Write a data set with `changes` in its dataset.json; with `ignore`, a slab of each case has that label."""
    for folder in ("imagesTr", "labelsTr"):
        (root / folder).mkdir(parents=True)
    for number in range(cases):
        label, channels = _case(number)
        if ignore is not None:
            label[:3] = ignore
        for channel, voxels in enumerate(channels):
            path = root / "imagesTr" / f"brain_{number}_{channel:04d}.nii.gz"
            nib.save(nib.Nifti1Image(voxels, AFFINE), path)
        nib.save(nib.Nifti1Image(label, AFFINE), root / "labelsTr" / f"brain_{number}.nii.gz")
    labels = LABELS if ignore is None else LABELS | {"ignore": ignore}
    content = {
        "channel_names": CHANNELS,
        "labels": labels,
        "regions_class_order": ORDER,
        "numTraining": cases,
        "file_ending": ".nii.gz",
    }
    content |= changes
    kept = {name: value for name, value in content.items() if value is not None}
    (root / "dataset.json").write_text(json.dumps(kept))
    return root


def _case(number: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return labels X Y Z, uint8, and four channels, float32."""
    rng = np.random.default_rng(number)
    centre = np.array(SHAPE) / 2 + rng.uniform(-2, 2, 3)
    grid = np.moveaxis(np.indices(SHAPE), 0, -1)
    distance = np.linalg.norm(grid - centre, axis=-1)
    label = np.zeros(SHAPE, np.uint8)
    for value, radius in ((1, 7), (2, 5), (3, 3)):
        label[distance < radius + rng.uniform(-0.5, 0.5)] = value
    channels = []
    for intensities in CONTRAST:
        voxels = np.array(intensities)[label] + rng.normal(0, 0.1, SHAPE)
        channels.append(voxels.astype(np.float32))
    return label, channels
