"""The voxels of one file as what they must be, finite intensities or labels that are classes, and what may be let pass.

Every UserError names the case and the file.
"""

from dataclasses import dataclass
from pathlib import Path

import nibabel as nib
import numpy as np

from unet3d.config import Data
from unet3d.data import nifti

ROUNDING = 1e-3  # how far a label may lie from a whole number


@dataclass(frozen=True)
class Leniency:
    """What is wrong with a case but taken all the same: data.nonfinite=zero, data.affine_check=warn."""

    nonfinite: bool = False
    affine: bool = False

    @classmethod
    def of(cls, data: Data) -> "Leniency":
        """As the options say."""
        return cls(data.nonfinite == "zero", data.affine_check == "warn")


STRICT = Leniency()


def read_image(case: str, path: Path, image: nib.Nifti1Image, leniency: Leniency = STRICT) -> tuple[np.ndarray, int]:
    """Voxels as float32 (C, X, Y, Z), and how many of them were not finite and became 0."""
    with np.errstate(over="ignore"):  # becomes infinite, which is refused below
        array = nifti.read_array(case, path, image).astype(np.float32, copy=False)
    bad = int(array.size - np.count_nonzero(np.isfinite(array)))
    if bad and not leniency.nonfinite:
        raise nifti.problem(case, path, f"{bad} voxels are NaN or infinite; give them a value, e.g. the background's")
    if bad:
        array = np.where(np.isfinite(array), array, np.float32(0))
    return array[np.newaxis] if array.ndim == 3 else np.moveaxis(array, -1, 0), bad


def replacement(count: int) -> str:
    """What is said of voxels that data.nonfinite=zero has replaced."""
    return f"{count} voxels are NaN or infinite and count as 0 (data.nonfinite=zero)"


def read_label(case: str, path: Path, image: nib.Nifti1Image, classes: int, ignore: int | None) -> np.ndarray:
    """Voxels as uint8 or uint16 (X, Y, Z), every one a class or `ignore`."""
    array = nifti.read_array(case, path, image)
    if not np.issubdtype(array.dtype, np.integer):
        whole = np.rint(array)  # 255 scaled by 1/255 is not quite 1
        array = np.where(np.isclose(array, whole, rtol=0, atol=ROUNDING), whole, array)
    bad = ~((array >= 0) & (array < classes) & (array == np.rint(array)))
    if ignore is not None:
        bad &= array != ignore
    if bad.any():
        values = ", ".join(f"{value:g}" for value in np.unique(array[bad])[:5].tolist())
        allowed = f"0 to {classes - 1}" + ("" if ignore is None else f" and {ignore} (ignored)")
        raise nifti.problem(
            case, path, f"{bad.sum()} voxels have the label {values}; allowed are {allowed}; relabel them"
        )
    return array.astype(label_kind(max(classes - 1, ignore or 0)), copy=False)


def label_kind(highest: int) -> type[np.uint8] | type[np.uint16]:
    """The smallest type that holds the labels 0 .. highest."""
    return np.uint8 if highest < 256 else np.uint16
