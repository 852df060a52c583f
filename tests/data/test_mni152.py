"""The real brain: nilearn's voxels as they are, labels that look like a brain's, and nothing half there."""

import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from scipy import ndimage

from unet3d import compose
from unet3d.checks import check
from unet3d.config import Data
from unet3d.data import synthetic
from unet3d.data.cases import read_dataset
from unet3d.data.check import check_cases
from unet3d.errors import UserError


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mni152")
    synthetic.ensure_mni152(folder)
    return folder


@pytest.fixture(scope="module")
def template() -> nib.Nifti1Image:
    from nilearn import datasets  # seconds to load

    return datasets.load_mni152_template(resolution=1)


@pytest.fixture(scope="module")
def pair(root: Path) -> tuple[nib.Nifti1Image, nib.Nifti1Image]:
    """The image and the label map, as files."""
    (case,) = read_dataset(Data(format="mni152", root=str(root))).cases
    assert case.label is not None
    return nib.load(case.images[0]), nib.load(case.label)


@pytest.fixture(scope="module")
def voxels(pair: tuple[nib.Nifti1Image, nib.Nifti1Image]) -> tuple[np.ndarray, np.ndarray]:
    image, label = pair
    return np.asanyarray(image.dataobj), np.asanyarray(label.dataobj)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_image_and_labels_lie_on_one_grid_of_1_mm(
    pair: tuple[nib.Nifti1Image, nib.Nifti1Image], template: nib.Nifti1Image
) -> None:
    image, label = pair
    assert image.shape == label.shape == (197, 233, 189)
    assert np.array_equal(image.affine, label.affine)
    assert np.array_equal(image.affine, template.affine)
    for stored, kind in ((image, np.int16), (label, np.uint8)):
        assert stored.header.get_zooms() == (1, 1, 1)
        assert stored.header.get_xyzt_units()[0] == "mm"
        assert stored.get_data_dtype() == kind


def test_the_image_is_the_template_to_the_last_level(
    voxels: tuple[np.ndarray, np.ndarray], template: nib.Nifti1Image
) -> None:
    assert np.abs(voxels[0] / synthetic.LEVELS - np.asarray(template.dataobj)).max() < 1e-6


def test_a_label_is_the_likeliest_of_neither_gray_and_white() -> None:
    gray, white = (np.array(row, np.int16) for row in ([0, 100, 100, 40, 120, 128, 85], [0, 90, 110, 30, 127, 127, 85]))
    assert synthetic.mni152_labels(gray, white).tolist() == [0, 1, 2, 0, 2, 1, 0]


def test_maps_that_claim_more_than_the_voxel_are_none_of_ours() -> None:
    with pytest.raises(AssertionError, match="two shares"):
        synthetic.mni152_labels(np.array([200], np.int16), np.array([56], np.int16))


def test_the_labels_look_like_a_brain(voxels: tuple[np.ndarray, np.ndarray]) -> None:
    """An adult's: amounts (litres), the tones of a T1 image, each matter in one piece, white further in than gray."""
    image, label = voxels
    assert np.unique(label).tolist() == [0, 1, 2]
    litres = np.bincount(label.ravel()) / 1e6
    assert 0.8 < litres[1] < 1.3 and 0.45 < litres[2] < 0.8
    assert image[label > 0].min() > 0, "the skull is off: all matter has a signal"
    white, gray = np.median(image[label == 2]), np.median(image[label == 1])
    fluid = np.median(image[(label == 0) & (image > 0)])
    assert white > gray + 30 > fluid + 60
    for value in (1, 2):
        pieces = np.bincount(ndimage.label(label == value)[0].ravel())[1:]
        assert pieces.max() > 0.99 * pieces.sum()
    below = ndimage.distance_transform_edt(label > 0)  # mm from what is no matter
    assert below[label == 2].mean() > 1.5 * below[label == 1].mean()


def test_left_is_right_mirrored(voxels: tuple[np.ndarray, np.ndarray]) -> None:
    """Which is why a slice across x whose mirror image was learned from must not be scored."""
    for array in voxels:
        assert np.array_equal(array, array[::-1])
        assert not np.array_equal(array, array[:, ::-1])


def test_made_again_it_has_the_same_bytes(root: Path, tmp_path: Path) -> None:
    synthetic.ensure_mni152(tmp_path)
    assert contents(tmp_path) == contents(root)
    assert [*contents(tmp_path)] == [
        f"v{synthetic.MNI152_VERSION}/{name}"
        for name in ("dataset.json", "imagesTr/mni152.nii.gz", "labelsTr/mni152.nii.gz")
    ]


def test_another_version_is_made_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"v{synthetic.MNI152_VERSION}").mkdir()
    monkeypatch.setattr(synthetic, "VERSION", synthetic.MNI152_VERSION + 1)
    assert contents(synthetic.ensure_mni152(tmp_path))


def test_without_nilearn_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nilearn", None)
    with pytest.raises(
        UserError, match=r'nilearn.*; install it: python -m pip install -c constraints.txt -e "\.\[brain\]"'
    ) as told:
        synthetic.ensure_mni152(tmp_path)
    assert "\n" not in str(told.value)
    assert not list(tmp_path.iterdir())


def test_once_made_it_needs_no_nilearn(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nilearn", None)
    assert synthetic.ensure_mni152(root) == root / f"v{synthetic.MNI152_VERSION}"


def test_it_lies_below_the_current_folder_and_needs_no_root(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose.compose(["data=mni152"])
    check(config)
    (tmp_path / synthetic.MNI152_ROOT).parent.mkdir()
    (tmp_path / synthetic.MNI152_ROOT).symlink_to(root)
    (case,) = read_dataset(config.data).cases
    assert case.images[0] == Path(f"data/mni152/v{synthetic.MNI152_VERSION}/imagesTr/mni152.nii.gz")


def test_nothing_is_said_against_it_but_that_it_is_alone(root: Path) -> None:
    data = Data(format="mni152", root=str(root))
    task = read_dataset(data)
    assert (task.channels, task.classes) == (("T1",), ("background", "gray", "white"))
    (line,) = check_cases(task, task.cases, data, full=True)
    assert line.startswith("MNI152: 1 labelled cases; training and validation need one each")
