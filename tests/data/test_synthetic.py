"""The generated data sets: the same for everyone, never half there; a phantom that is hard enough, and a real brain."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from nifti_files import checked, told
from promises import promise

from unet3d.base.errors import UserError
from unet3d.config import compose
from unet3d.config.rules import check
from unet3d.config.schema import Phantom
from unet3d.data.cases import read_dataset
from unet3d.data.layouts import generated
from unet3d.data.layouts.generated import GeneratedCase, draw_phantom, ensure_mni152, ensure_phantom, write_dataset

SHAPE = [16, 20, 18]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_phantom_is_the_same_for_everyone_and_is_made_once(tmp_path: Path) -> None:
    two, again = (contents(ensure_phantom(Phantom(2, SHAPE), tmp_path / name)) for name in "ab")
    assert two == again
    assert two["imagesTr/phantom_000.nii.gz"] != two["imagesTr/phantom_001.nii.gz"]
    others = [Phantom(3, SHAPE), Phantom(2, [18, 20, 16]), Phantom(2, SHAPE, seed=1)]
    three, turned, reseeded = (ensure_phantom(options, tmp_path / "a") for options in others)
    about = two.pop("dataset.json")
    assert two.items() < contents(three).items(), "more cases begin with the same ones"
    assert about == contents(turned)["dataset.json"]
    assert contents(reseeded)["imagesTr/phantom_000.nii.gz"] != two["imagesTr/phantom_000.nii.gz"]
    (three / "mark").touch()
    assert (ensure_phantom(Phantom(3, SHAPE), tmp_path / "a") / "mark").exists()


def test_its_voxels_change_only_with_its_version(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    folder = ensure_phantom(Phantom(1, SHAPE), tmp_path)
    image, label = (nib.load(folder / f"{part}Tr/phantom_000.nii.gz") for part in ("images", "labels"))
    lines = [f"version {generated.PHANTOM_VERSION}: of shape and seed, the voxels of each class and their mean tone"]
    lines.append(f"{image.get_data_dtype()} {label.get_data_dtype()} {image.affine.tolist()}")
    for shape in ((64, 64, 32), (16, 16, 16), (24, 96, 16)):
        for seed in range(4):
            image, label = draw_phantom(np.random.default_rng([7, seed]), shape)
            tones = [f"{count} {image[label == k].mean():.3f}" for k, count in enumerate(np.bincount(label.ravel()))]
            lines.append(f"{shape} {seed}: {', '.join(tones)}")
    golden("phantom.txt", "\n".join(lines) + "\n")


def test_no_classifier_of_single_voxels_solves_it() -> None:
    """Not even the one that knows how often each class has each intensity, whatever weight it gives the rare ones."""
    cases = [draw_phantom(np.random.default_rng([0, n]), (64, 64, 32)) for n in range(8)]
    bins = np.array([np.digitize(image, np.linspace(0, 2, 200)) for image, _ in cases])
    labels = np.array([label for _, label in cases])
    counts, _, _ = np.histogram2d(labels.ravel(), bins.ravel(), bins=(np.arange(5), np.arange(202)))
    for power in (0, 0.25, 0.5, 0.75, 1):
        found = (counts * counts.sum(1, keepdims=True) ** -power).argmax(0)[bins]
        both = [((found == k) & (labels == k)).sum() for k in (1, 2, 3)]
        dice = [2 * both[k - 1] / ((found == k).sum() + (labels == k).sum()) for k in (1, 2, 3)]
        assert np.mean(dice) < 0.65


CASES = [(name, np.zeros((2, 2, 2), np.int16), np.zeros((2, 2, 2), np.uint8), np.eye(4)) for name in "ab"]


def stopped() -> Iterator[GeneratedCase]:
    yield CASES[0]
    raise KeyboardInterrupt


@promise(
    "Data",
    "SIGKILL while a data set is generated; two containers that generate it, with equal process numbers",
    "files are written whole, dataset.json last; the next finishes; several write the same bytes",
)
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_generation_that_stops_begins_again_and_two_do_not_disturb_each_other(
    tmp_path: Path, is_stopped: bool
) -> None:
    """Both make the same data set on one disk; the second begins and ends, or is stopped, as the first is at work."""

    def interrupted() -> Iterator[GeneratedCase]:
        yield CASES[0]
        if is_stopped:
            with pytest.raises(KeyboardInterrupt):
                write_dataset(tmp_path / "set", {}, stopped())
            assert [*contents(tmp_path)] == ["set/imagesTr/a.nii.gz", "set/labelsTr/a.nii.gz"]
        else:
            write_dataset(tmp_path / "set", {}, CASES)
        yield CASES[1]

    assert len(contents(write_dataset(tmp_path / "set", {}, interrupted()))) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_folder_that_cannot_be_written_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"/file/v\d+-2x16x20x18-seed0: .*\(Not a directory\); .*data\.root"):
        ensure_phantom(Phantom(2, SHAPE), tmp_path / "file")


def test_a_brains_label_is_the_likeliest_of_neither_gray_and_white() -> None:
    gray, white = (np.array(row, np.int16) for row in ([0, 100, 100, 40, 120, 128, 85], [0, 90, 110, 30, 127, 127, 85]))
    assert generated.mni152_labels(gray, white).tolist() == [0, 1, 2, 0, 2, 1, 0]


def test_a_brain_is_made_once_below_the_current_folder_and_is_one_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a small template: the whole one takes seconds."""
    from nilearn import datasets

    levels = np.random.default_rng(0).integers(0, generated.LEVELS // 2, (8, 9, 7))
    small = nib.Nifti1Image(levels / generated.LEVELS, np.eye(4))
    for name in ("load_mni152_template", "load_mni152_gm_template", "load_mni152_wm_template"):
        monkeypatch.setattr(datasets, name, lambda resolution: small)
    monkeypatch.chdir(tmp_path)
    config = compose.compose(["data=mni152"])
    check(config)
    dataset = read_dataset(config.data)
    assert (dataset.channels, dataset.classes) == (("T1",), ("background", "gray", "white"))
    folder = Path(f"data/mni152/v{generated.MNI152_VERSION}")
    assert dataset.cases[0].images == (folder / "imagesTr/mni152.nii.gz",)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "nilearn", None)
        assert told(checked(config.data), [["MNI152: 1 ", "data.semi=true"]]), "once made it needs no nilearn"
    monkeypatch.setattr(generated, "MNI152_VERSION", generated.MNI152_VERSION + 1)
    assert contents(ensure_mni152(tmp_path)) == contents(folder), "another version is made beside it"


def test_without_nilearn_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nilearn", None)
    command = r'python -m pip install -c constraints\.txt -e "\.\[brain\]"'
    with pytest.raises(UserError, match=rf"\Adata=mni152 .*nilearn.*: {command}\Z"):
        ensure_mni152(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_brain_is_nilearns_template_and_looks_like_one(tmp_path: Path) -> None:
    """An adult's: amounts (litres), the tones of a T1 image, white further in than gray.

    Left is right mirrored: a slice across x whose mirror image was learned from must not be scored.
    """
    from nilearn import datasets

    template = datasets.load_mni152_template(resolution=1)
    folder = ensure_mni152(tmp_path)
    image, label = (nib.load(folder / f"{kind}Tr/mni152.nii.gz") for kind in ("images", "labels"))
    for stored, kind in ((image, np.int16), (label, np.uint8)):
        assert np.array_equal(stored.affine, template.affine)
        assert stored.header.get_zooms() == (1, 1, 1)
        assert stored.header.get_xyzt_units()[0] == "mm"
        assert stored.get_data_dtype() == kind
    voxels, classes = np.asanyarray(image.dataobj), np.asanyarray(label.dataobj)
    assert np.abs(voxels / generated.LEVELS - np.asarray(template.dataobj)).max() < 1e-6
    _, gray, white = np.bincount(classes.ravel()) / 1e6
    assert 0.8 < gray < 1.3
    assert 0.45 < white < 0.8
    assert np.median(voxels[classes == 2]) > np.median(voxels[classes == 1]) + 30
    assert np.array_equal(voxels, voxels[::-1])
    assert np.array_equal(classes, classes[::-1])
