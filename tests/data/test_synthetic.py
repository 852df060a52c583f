"""The generated data sets: the same for everyone, never half there; a phantom that is hard enough, and a real brain."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from nifti_files import checked, told
from promises import promise
from scipy import ndimage

from unet3d.base.errors import UserError
from unet3d.config import compose
from unet3d.config.rules import check
from unet3d.config.schema import Data, Phantom
from unet3d.data.cases import read_dataset
from unet3d.data.layouts import generated as synthetic
from unet3d.data.layouts.generated import GeneratedCase

SMALL = Phantom(cases=2, shape=[16, 20, 18])
LARGE = (64, 64, 32)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (contents(synthetic.ensure_phantom(SMALL, tmp_path / name)) for name in "ab")
    assert sorted(first) == [
        "dataset.json",
        *(f"{kind}Tr/phantom_{n:03d}.nii.gz" for kind in ("images", "labels") for n in range(2)),
    ]
    assert first == second
    assert first["imagesTr/phantom_000.nii.gz"] != first["imagesTr/phantom_001.nii.gz"]


def test_what_is_there_is_used_and_other_options_get_their_own_folder(tmp_path: Path) -> None:
    folder = synthetic.ensure_phantom(SMALL, tmp_path)
    (folder / "mark").touch()
    others = [
        Phantom(cases=3, shape=[16, 20, 18]),
        Phantom(cases=2, shape=[18, 20, 16]),
        Phantom(cases=2, shape=[16, 20, 18], seed=1),
    ]
    made = [synthetic.ensure_phantom(options, tmp_path) for options in others]
    assert len({folder, *made}) == 4
    assert synthetic.ensure_phantom(SMALL, tmp_path) == folder
    assert (folder / "mark").exists()
    seeds = [contents(where)["imagesTr/phantom_000.nii.gz"] for where in (folder, made[2])]
    assert seeds[0] != seeds[1]


def test_more_cases_begin_with_the_same_ones(tmp_path: Path) -> None:
    two, three = (contents(synthetic.ensure_phantom(Phantom(n, [16, 16, 16]), tmp_path)) for n in (2, 3))
    del two["dataset.json"]
    assert two.items() < three.items()


CASES = [(name, np.zeros((2, 2, 2), np.int16), np.zeros((2, 2, 2), np.uint8), np.eye(4)) for name in "ab"]


@promise(
    "Data",
    "SIGKILL while a data set is generated; two containers that generate it, with equal process numbers",
    "files are written whole, dataset.json last; the next finishes; several write the same bytes",
)
def test_a_generation_that_stops_half_way_is_no_data_set_and_begins_again(tmp_path: Path) -> None:
    def stopped() -> Iterator[GeneratedCase]:
        yield CASES[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthetic.write_dataset(tmp_path / "set", {}, stopped())
    assert [*contents(tmp_path)] == ["set/imagesTr/a.nii.gz", "set/labelsTr/a.nii.gz"]
    assert len(contents(synthetic.write_dataset(tmp_path / "set", {}, CASES))) == 5


@promise("Data", "SIGKILL while a data ...")
@pytest.mark.parametrize("is_stopped", [False, True])
def test_two_containers_do_not_disturb_each_other(tmp_path: Path, is_stopped: bool) -> None:
    """Both make the same data set on one disk; the second begins and ends, or is stopped, as the first is at work."""

    def stopped() -> Iterator[GeneratedCase]:
        yield CASES[0]
        raise KeyboardInterrupt

    def interrupted() -> Iterator[GeneratedCase]:
        yield CASES[0]
        if is_stopped:
            with pytest.raises(KeyboardInterrupt):
                synthetic.write_dataset(tmp_path / "set", {}, stopped())
        else:
            synthetic.write_dataset(tmp_path / "set", {}, CASES)
        yield CASES[1]

    assert len(contents(synthetic.write_dataset(tmp_path / "set", {}, interrupted()))) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_folder_that_cannot_be_written_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"/file/v\d+-2x16x20x18-seed0: .*\(Not a directory\); .*data\.root"):
        synthetic.ensure_phantom(SMALL, tmp_path / "file")


def test_the_files_are_what_scanners_write(tmp_path: Path) -> None:
    folder = synthetic.ensure_phantom(SMALL, tmp_path)
    entry = json.loads((folder / "dataset.json").read_text())["training"][1]
    image, label = nib.load(folder / entry["image"]), nib.load(folder / entry["label"])
    assert image.shape == label.shape == (16, 20, 18)
    assert nib.aff2axcodes(image.affine) == tuple("LPS")
    assert image.header.get_zooms() == (1.0, 1.0, 2.5)
    assert (image.get_data_dtype(), label.get_data_dtype()) == (np.int16, np.uint8)
    assert np.allclose(nib.affines.apply_affine(image.affine, (np.array(image.shape) - 1) / 2), 0)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [LARGE, (16, 16, 16), (24, 96, 16)])
def test_every_class_is_there_and_the_order_of_sizes_holds(cases: list, shape: tuple[int, ...]) -> None:
    others = (synthetic.draw_phantom(np.random.default_rng([7, seed]), shape) for seed in range(4))
    for _, label in cases if shape == LARGE else others:
        shares = np.bincount(label.ravel(), minlength=4) / label.size
        assert len(shares) == 4
        assert 0.8 < shares[0] < 0.95
        assert 0.08 < shares[1] < 0.18
        assert min(shares[2:]) > 0.002


@pytest.fixture(scope="module")
def cases() -> list[tuple[np.ndarray, np.ndarray]]:
    return [synthetic.draw_phantom(np.random.default_rng([0, n]), LARGE) for n in range(8)]


def test_lesions_and_vessels_lie_inside_the_organ(cases: list) -> None:
    for _, label in cases:
        grown = ndimage.binary_dilation(label > 1, structure=np.ones((3, 3, 1)))
        assert (label[grown] > 0).mean() > 0.999


def test_balls_stay_where_there_is_room_and_apart() -> None:
    rng = np.random.default_rng(3)
    points = np.stack(np.meshgrid(*(np.linspace(-1, 1, 40),) * 3, indexing="ij"))
    points += 0.3 * np.sin(3 * points[[1, 2, 0]])  # stretched, so that a ball of this radius does not fit as a ball
    free = np.zeros(points.shape[1:], bool)
    free[5:20, 5:35, 5:35] = True
    balls = synthetic.place_balls(rng, points, free, np.array([0.2, 0.3, 0.25]))
    assert len(balls) > 1
    assert not (np.array(balls) < 0).any(0)[~free].any()
    assert (np.array(balls) < 0).sum(0).max() == 1


def test_no_classifier_of_single_voxels_solves_it(cases: list) -> None:
    """Not even the one that knows how often each class has each intensity, whatever weight it gives the rare ones."""
    bins = [np.digitize(image, np.linspace(0, 2, 200)) for image, _ in cases]
    labels = [label for _, label in cases]
    counts, _, _ = np.histogram2d(np.ravel(labels), np.ravel(bins), bins=(np.arange(5), np.arange(202)))
    for power in (0, 0.25, 0.5, 0.75, 1):
        choice = (counts * counts.sum(1, keepdims=True) ** -power).argmax(0)
        assert mean_dice([choice[b] for b in bins], labels) < 0.6


def test_the_tones_outside_the_organ_are_those_inside(cases: list) -> None:
    """Most voxels as dark as a lesion, or as bright as a vessel, are background; not counting air and its border."""
    dark = bright = lesion = vessel = 0
    for image, label in cases:
        core = np.s_[8:-8, 8:-8, :]
        image, label = image[core], label[core]
        bright += ((image > 0.95) & (label == 0)).sum()
        vessel += (label == 2).sum()
        low, high = np.quantile(image[label == 3], (0.2, 0.8))
        dark += ((image > low) & (image < high) & (label == 0)).sum()
        lesion += (label == 3).sum()
    assert bright > vessel
    assert dark > lesion / 2


def mean_dice(found: list[np.ndarray], truth: list[np.ndarray]) -> float:
    scores = [
        2 * ((p == k) & (t == k)).sum() / ((p == k).sum() + (t == k).sum())
        for p, t in zip(found, truth, strict=True)
        for k in (1, 2, 3)
    ]
    return float(np.mean(scores))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The brain, which takes seconds: tests of it are slow ones."""
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_image_is_the_template_to_the_last_level(
    voxels: tuple[np.ndarray, np.ndarray], template: nib.Nifti1Image
) -> None:
    assert np.abs(voxels[0] / synthetic.LEVELS - np.asarray(template.dataobj)).max() < 1e-6


def test_a_label_is_the_likeliest_of_neither_gray_and_white() -> None:
    gray, white = (np.array(row, np.int16) for row in ([0, 100, 100, 40, 120, 128, 85], [0, 90, 110, 30, 127, 127, 85]))
    assert synthetic.mni152_labels(gray, white).tolist() == [0, 1, 2, 0, 2, 1, 0]


def test_maps_that_claim_more_than_the_voxel_are_refused() -> None:
    with pytest.raises(AssertionError):
        synthetic.mni152_labels(np.array([200], np.int16), np.array([56], np.int16))


@pytest.mark.slow
def test_the_labels_look_like_a_brain(voxels: tuple[np.ndarray, np.ndarray]) -> None:
    """An adult's: amounts (litres), the tones of a T1 image, each matter in one piece, white further in than gray."""
    image, label = voxels
    voxels = np.bincount(label.ravel())
    assert len(voxels) == 3
    litres = voxels / 1e6
    assert 0.8 < litres[1] < 1.3 and 0.45 < litres[2] < 0.8
    assert image[label > 0].min() > 0, "the skull is off: all matter has a signal"
    white, gray = np.median(image[label == 2]), np.median(image[label == 1])
    fluid = np.median(image[(label == 0) & (image > 0)])
    assert white > gray + 30 > fluid + 60
    for value in (1, 2):
        pieces = np.bincount(ndimage.label(label == value)[0].ravel())[1:]
        assert pieces.max() > 0.99 * pieces.sum()
    coarse = label[::2, ::2, ::2]
    below = ndimage.distance_transform_edt(coarse > 0)  # in 2 mm, from what is no matter
    assert below[coarse == 2].mean() > 1.5 * below[coarse == 1].mean()


@pytest.mark.slow
def test_left_is_right_mirrored(voxels: tuple[np.ndarray, np.ndarray]) -> None:
    """Which is why a slice across x whose mirror image was learned from must not be scored."""
    for array in voxels:
        assert np.array_equal(array, array[::-1])
        assert not np.array_equal(array, array[:, ::-1])


def test_another_version_is_made_beside_it_and_has_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a small template: the whole one takes seconds."""
    from nilearn import datasets

    levels = np.random.default_rng(0).integers(0, synthetic.LEVELS // 2, (8, 9, 7))
    small = nib.Nifti1Image(levels / synthetic.LEVELS, np.eye(4))
    for name in ("load_mni152_template", "load_mni152_gm_template", "load_mni152_wm_template"):
        monkeypatch.setattr(datasets, name, lambda resolution: small)
    first = synthetic.ensure_mni152(tmp_path)
    monkeypatch.setattr(synthetic, "MNI152_VERSION", synthetic.MNI152_VERSION + 1)
    second = synthetic.ensure_mni152(tmp_path)
    assert first != second and contents(first) == contents(second)
    assert [*contents(first)] == ["dataset.json", "imagesTr/mni152.nii.gz", "labelsTr/mni152.nii.gz"]


def test_without_nilearn_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nilearn", None)
    command = r'python -m pip install -c constraints\.txt -e "\.\[brain\]"'
    with pytest.raises(UserError, match=rf"^data=mni152 .*nilearn.*: {command}$") as caught:
        synthetic.ensure_mni152(tmp_path)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_once_made_it_needs_no_nilearn(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nilearn", None)
    assert synthetic.ensure_mni152(root) == root / f"v{synthetic.MNI152_VERSION}"


@pytest.mark.slow
def test_it_lies_below_the_current_folder_and_needs_no_root(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose.compose(["data=mni152"])
    check(config)
    (tmp_path / "data/mni152").parent.mkdir()
    (tmp_path / "data/mni152").symlink_to(root)
    (case,) = read_dataset(config.data).cases
    assert case.images[0] == Path(f"data/mni152/v{synthetic.MNI152_VERSION}/imagesTr/mni152.nii.gz")


@pytest.mark.slow
def test_its_only_problem_is_that_it_is_one_case(root: Path) -> None:
    data = Data(format="mni152", root=str(root))
    dataset = read_dataset(data)
    assert (dataset.channels, dataset.classes) == (("T1",), ("background", "gray", "white"))
    (line,) = checked(data)
    assert told([line], [["MNI152: 1 ", "data.semi=true"]])
