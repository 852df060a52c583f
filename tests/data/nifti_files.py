"""Small NIfTI files and data sets for the tests of this folder."""

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from unet3d.base.errors import UserError
from unet3d.config.schema import Data
from unet3d.data import nifti, restore
from unet3d.data.cases import Case, read_dataset
from unet3d.data.check import check_cases

# Axes towards left, posterior, superior, as most scanners store them; voxels of 1 x 1.5 x 2.5 mm.
LPS = np.array([[-1, 0, 0, 10], [0, -1.5, 0, 20], [0, 0, 2.5, -30], [0, 0, 0, 1]], float)
WARNING = "warning: "  # begins a line of what a run starts despite
SHIFTED, FLIPPED, NOISY = LPS + np.eye(4, k=3), LPS @ np.diag([-1, 1, 1, 1]), LPS + 1e-6
QUATERN = ["quatern_b", "quatern_c", "quatern_d"]


def write(path: Path, voxels: np.ndarray, affine: np.ndarray = LPS) -> Path:
    """Save the voxels as they are to a .nii or .nii.gz file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nib.Nifti1Image(voxels, affine, dtype=voxels.dtype)
    image.header.set_xyzt_units("mm")
    nib.save(image, path)
    return path


def doubtful_places(path: Path) -> Path:
    """Give a file a sform of 1 mm beside its qform and pixdim, as ACDC's have it."""
    stored = nib.load(path)
    header = stored.header.copy()
    header.set_qform(stored.affine, code=1)
    header.set_sform(np.diag([-1, -1, 1, 1]), code=2)
    nib.save(type(stored)(np.asanyarray(stored.dataobj), None, header), path)
    return path


def save_labels(path: Path, labels: np.ndarray, like: Path) -> None:
    """Write labels on the grid of another file."""
    restore.save_image(path, restore.image_like(labels, nifti.open_image("a", like)))


def write_header(path: Path, field: str, *values: float | str) -> Path:
    """Change one field in the header of a file, numbers or words of them; `quatern` has three."""
    content = path.read_bytes()
    is_packed = path.name.endswith(".gz")
    if is_packed:
        content = gzip.decompress(content)
    header = nib.Nifti1Header(content[:348], check=False)
    if field == "quatern":
        for name, value in zip(QUATERN, values, strict=True):
            header[name] = value
    else:
        header[field] = np.reshape(values, header[field].shape)
    content = header.binaryblock + content[348:]
    path.write_bytes(gzip.compress(content) if is_packed else content)
    return path


def image(shape: tuple[int, ...] = (6, 5, 4), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(100, 20, shape).astype(np.float32)


def label(shape: tuple[int, ...] = (6, 5, 4), classes: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, shape).astype(np.uint8)


def changed(voxels: np.ndarray, value: float) -> np.ndarray:
    """The voxels as float64 with one of them replaced."""
    voxels = voxels.astype(np.float64)
    voxels[1, 2, 3] = value
    return voxels


def case(folder: Path, image_voxels: np.ndarray, label_voxels: np.ndarray, name: str = "a") -> Case:
    """One case with its two files."""
    return Case(
        name,
        (write(folder / "imagesTr" / f"{name}.nii.gz", image_voxels),),
        write(folder / "labelsTr" / f"{name}.nii.gz", label_voxels),
    )


def decathlon(
    root: Path, names: tuple[str, ...] = ("a", "b", "c", "d"), shape: tuple[int, int, int] = (6, 5, 4)
) -> Data:
    """A sound data set of background and two classes in Decathlon's layout."""
    for seed, name in enumerate(names):
        case(root, image(shape, seed), label(shape, seed=seed), name)
    content = {
        "name": "Small",
        "modality": {"0": "CT"},
        "labels": {"0": "background", "1": "organ", "2": "tumour"},
        "training": [{"image": f"./imagesTr/{n}.nii.gz", "label": f"./labelsTr/{n}.nii.gz"} for n in names],
    }
    (root / "dataset.json").write_text(json.dumps(content))
    return Data(format="decathlon", root=str(root))


def nnunet(root: Path, **changes: Any) -> Data:
    """Two labelled cases and one without a label, of two channels, in nnU-Net's layout."""
    for name in ("b_0001", "a"):
        write(root / "labelsTr" / f"{name}.nii.gz", label())
    for name in ("b_0001", "a", "c"):
        for channel in range(2):
            write(root / "imagesTr" / f"{name}_{channel:04d}.nii.gz", image())
    (root / "imagesTr" / "._a_0000.nii.gz").write_bytes(b"Mac")
    channels, labels = {"0": "T1", "1": "T2"}, {"organ": 1, "background": 0, "ignore": 2}
    content = {"channel_names": channels, "labels": labels, "numTraining": 3, "file_ending": ".nii.gz"}
    (root / "dataset.json").write_text(json.dumps(content))
    rewrite(root, **changes)
    return Data(format="nnunet", root=str(root))


def folders(root: Path, images: str, labels: str, shape: tuple[int, ...] = (6, 5, 4)) -> Data:
    """Two folders with files of these names, which commas separate."""
    for folder, names, voxels in (("images", images, image(shape)), ("labels", labels, label())):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for name in names.split(",") if names else ():
            write(root / folder / name, voxels)
    return Data(format="folders", root=str(root), classes=["background", "organ", "tumour"], ignore=255)


def refusal(data: Data) -> str:
    """Return what is said of a data set that cannot be read: one line of a bounded length."""
    with pytest.raises(UserError) as caught:
        read_dataset(data)
    text = str(caught.value)
    assert text.isprintable() and len(text) < 1000
    return text


def rewrite(root: Path, **changes: Any) -> None:
    """Change fields of dataset.json; None removes one."""
    path = root / "dataset.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def checked(data: Data, full: bool = True) -> list[str]:
    """Every line of the check of a data set, problems before warnings."""
    dataset = read_dataset(data)
    found = check_cases(dataset, dataset.cases, data, voxels=full)
    return [*found.problems, *(f"{WARNING}{line}" for line in found.warnings)]


def told(lines: Sequence[str], wanted: Sequence[Sequence[str]]) -> bool:
    """Return whether each line, in this order, begins with the first part of its own of `wanted` and holds the rest."""
    if len(lines) != len(wanted):
        return False
    pairs = zip(lines, wanted, strict=True)
    return all(line.startswith(start) and holds(line[len(start) :], rest) for line, (start, *rest) in pairs)


def holds(text: str, parts: Iterable[str]) -> bool:
    """Return whether all parts are in the text."""
    return all(part in text for part in parts)


def errors(lines: list[str]) -> list[str]:
    """Those that keep a run from starting."""
    return [line for line in lines if not line.startswith(WARNING)]
