"""Data sets that are made here rather than found: in Decathlon's layout, and complete or not there at all."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

from unet3d.data import nifti
from unet3d.errors import UserError


@dataclass(frozen=True, eq=False)
class Made:
    """One case: `image` and `label` (X, Y, Z), stored in their types, and the `affine` (4, 4) of both, to mm."""

    name: str
    image: np.ndarray
    label: np.ndarray
    affine: np.ndarray


def ensure(folder: Path, about: Mapping[str, Any], cases: Iterable[Made]) -> Path:
    """`folder`, which is written as a whole from `cases` where it is absent; else none of them is asked for.

    `about` begins its dataset.json: name, modality, labels. Raises UserError where it cannot be written.
    """
    if folder.is_dir():
        return folder
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # left behind by a killed process that had the same number
    try:
        _write(temporary, about, cases)
        os.rename(temporary, folder)
    except OSError as error:
        if not folder.is_dir():  # else another process was faster, and its bytes are the same
            raise UserError(
                f"{folder}: cannot be generated ({error}); name a folder to write to in data.root"
            ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _write(folder: Path, about: Mapping[str, Any], cases: Iterable[Made]) -> None:
    entries = []
    for case in cases:
        entry = {kind: f"{kind}sTr/{case.name}.nii.gz" for kind in ("image", "label")}
        for kind, voxels in (("image", case.image), ("label", case.label)):
            (folder / entry[kind]).parent.mkdir(parents=True, exist_ok=True)
            nifti.replace(folder / entry[kind], _volume(voxels, case.affine))
        entries.append(entry)
    content = {**about, "numTraining": len(entries), "training": entries}
    (folder / "dataset.json").write_text(json.dumps(content, indent=1), encoding="utf-8")


def _volume(voxels: np.ndarray, affine: np.ndarray) -> nib.Nifti1Image:
    image = nib.Nifti1Image(voxels, affine)
    image.header.set_xyzt_units("mm")
    return image
