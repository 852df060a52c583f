"""A real brain that needs no download: the MNI152 T1 template with gray and white matter, which nilearn carries.

Many healthy heads averaged on a grid of 1 mm: skull-stripped, in ICBM 152 (2009a, non-linear) space, and mirrored, so
that its left half is its right half voxel by voxel. The labels are two probability maps, divided; nobody drew them.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from unet3d.data import generated
from unet3d.errors import UserError

ROOT = Path("data/mni152")
VERSION = 1  # goes up with every change of what is made
CLASSES = ("background", "gray", "white")
LEVELS = 255  # nilearn divides 8-bit voxels, whose largest value this is, by it


def ensure(parent: Path) -> Path:
    """The data set's folder below `parent`: complete, or made as a whole.

    Raises UserError where it is absent and nilearn is too, or where it cannot be written.
    """
    about = {
        "name": "MNI152",
        "description": "ICBM 152 template 2009a, non-linear, symmetric, without skull; as nilearn has it",
        "reference": "McConnell Brain Imaging Centre, Montreal Neurological Institute, McGill University",
        "modality": {"0": "T1"},
        "labels": {str(value): name for value, name in enumerate(CLASSES)},
    }
    return generated.ensure(parent / f"v{VERSION}", about, _cases())


def labels(gray: np.ndarray, white: np.ndarray) -> np.ndarray:
    """Labels uint8 (X, Y, Z): the likeliest of neither (0), gray (1) and white matter (2); in a tie the first of them.

    Takes the two maps in 1 / LEVELS. Neither is what they leave over: outside of the brain, and fluid inside of it.
    """
    assert (gray + white).max() <= LEVELS, "two shares of one voxel"
    likeliest: np.ndarray = np.stack([LEVELS - gray - white, gray, white]).argmax(0)
    return likeliest.astype(np.uint8)


def _cases() -> Iterator[generated.Made]:
    """The one case, its voxels as nilearn's files store them, 0 to LEVELS."""
    try:
        from nilearn import datasets  # takes a second, and only the first run needs it
    except ImportError as error:
        raise UserError(
            f"data=mni152 is made from nilearn's template, but {error}; install it: "
            'python -m pip install -c constraints.txt -e ".[brain]"'
        ) from error
    template = datasets.load_mni152_template(resolution=1)
    gray, white = datasets.load_mni152_gm_template(resolution=1), datasets.load_mni152_wm_template(resolution=1)
    # Shares of the largest voxel in float32; times that voxel's value they are the stored integers again.
    image, *maps = (np.rint(LEVELS * np.asarray(each.dataobj)).astype(np.int16) for each in (template, gray, white))
    yield generated.Made("mni152", image, labels(*maps), template.affine)
