"""A held-out image that training sees, too, is found by its voxels; a resumed run finds files that changed."""

import gzip
import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from guards import without
from nifti_files import case, checked, decathlon, errors, image, label, rewrite, told, write
from promises import promise

from unet3d.base.errors import UserError
from unet3d.config.schema import Data
from unet3d.data import nifti
from unet3d.data.cases import read_dataset
from unet3d.data.prepare import prepare_data
from unet3d.data.splits import split
from unet3d.run.training_state import DatasetFingerprint, fingerprint, refuse_other_data


def none(*_: object) -> tuple[()]:
    """Find nothing."""
    return ()


def held_out(root: Path, **options: object) -> tuple[Data, Path, Path]:
    """A data set with its split, the image of case1, which is learned from, and that of case3, which is held out."""
    data = replace(decathlon(root, ("case1", "case2", "case3", "case4")), cache_root=str(root / "cache"), **options)
    train, val = split(read_dataset(data), data)
    return data, train[0].images[0], val[0].images[0]


def refuse_twin(data: Data, unseen: Path) -> None:
    """Assert that the check and a run name the twins."""
    wanted = [f"case3: {unseen}: ", " case1;"]
    assert told(errors(checked(data)), [wanted])
    with pytest.raises(UserError) as caught:
        prepare_data(data)
    assert told([str(caught.value)], [wanted])


def voxels(stored: nib.Nifti1Image) -> np.ndarray:
    return np.asanyarray(stored.dataobj)


STORED: dict[str, Callable[[nib.Nifti1Image], nib.Nifti1Image]] = {
    "packed": lambda stored: stored,  # compressed otherwise
    "turned": lambda stored: stored.as_reoriented(np.array([[1, 1], [0, -1], [2, 1]])),
    "moved": lambda stored: nib.Nifti1Image(stored.get_fdata(), stored.affine + 50 * np.eye(4, k=3)),
    "unsaid": lambda stored: nib.Nifti1Image(voxels(stored).transpose(2, 0, 1)[::-1, :, ::-1], stored.affine),
}


@promise("Data", "a training image among ...")
@without("unet3d.data.prepare.leaks", none, only="off-turned")
@without("unet3d.data.check.leaks", none, only="off-turned")
@pytest.mark.parametrize(
    ("cache", "kind"),
    [
        *(("memory", kind) for kind in ("moved", "unsaid")),
        *(("disk", kind) for kind in ("moved", "turned", "link")),
        *(("off", kind) for kind in ("packed", "turned", "unsaid")),
    ],
)
def test_a_held_out_image_that_is_learned_from_is_refused(tmp_path: Path, cache: str, kind: str) -> None:
    """By its voxels, wherever cases are kept and whatever the file."""
    data, seen, unseen = held_out(tmp_path, cache=cache)
    for folder in ("imagesTr", "labelsTr"):
        found, other = (tmp_path / folder / path.name for path in (seen, unseen))
        if kind == "link":
            other.unlink()
            other.symlink_to(found)
        else:
            other.write_bytes(gzip.compress(STORED[kind](nib.load(found)).to_bytes(), 1))
    refuse_twin(data, unseen)
    data.semi, data.sparse = True, [2, 2, 2]
    assert len(prepare_data(data).val) == 4, "other slices of the same images are scored on purpose"


@promise(
    "Data",
    "a training image among the held-out ones: by id, link or voxels, however compressed, typed, placed, "
    "oriented, or with other channel order",
    "refused, and by `check-data`; axes that the header does not say, and other channels first, are not "
    "found with `data.cache=disk`, nor in a run that resamples with `data.cache=memory`",
)
@pytest.mark.parametrize(("cache", "intensity"), [("memory", "zscore"), ("off", "none")])
def test_the_same_channels_in_another_order_are_the_same_image(tmp_path: Path, cache: str, intensity: str) -> None:
    data, seen, unseen = held_out(tmp_path, cache=cache, intensity=intensity)
    rewrite(tmp_path, modality={"0": "T1", "1": "T2"})
    for number, path in enumerate(sorted((tmp_path / "imagesTr").iterdir())):
        write(path, image((6, 5, 4, 2), seed=number))
    prepare_data(data)  # no two of them are the same
    write(unseen, voxels(nib.load(seen))[::-1, :, :, ::-1])
    refuse_twin(data, unseen)


@promise("Data", "two held-out and training images that only normalisation makes equal", "two images")
@pytest.mark.parametrize("kind", ["scaled", "planes", "histogram"])
def test_what_only_a_rule_or_a_digest_makes_equal_are_two_images(tmp_path: Path, kind: str) -> None:
    data, seen, unseen = held_out(tmp_path, intensity="zscore")
    first = image((6, 4, 4)).round()
    second = first * 2 + 10
    if kind == "planes":  # along each axis those of one have the sums of the other's
        first = (np.indices(first.shape).sum(0) % 2 * [1, 0, 0, 1]).astype(np.float32)
        second = first[::-1] * 2
    elif kind == "histogram":
        second = np.random.default_rng(0).permutation(first.ravel()).reshape(first.shape)
    for path, array in ((seen, first), (unseen, second)):
        write(path, array)
        write(tmp_path / "labelsTr" / path.name, label(first.shape))
    assert errors(checked(data)) == []
    for data.cache in ("memory", "disk", "off"):
        assert "case3" in [case.id for case in prepare_data(data).val]


def test_a_copy_within_train_and_cases_that_cannot_be_read_are_no_twins(tmp_path: Path) -> None:
    data, seen, unseen = held_out(tmp_path)
    shutil.copy(seen, tmp_path / "imagesTr/case2.nii.gz")
    assert checked(data) == []
    seen.unlink()
    unseen.unlink()
    assert told(checked(data), [[f"case1: {seen}: "], [f"case3: {unseen}: "]])


@promise("Data", "a training image among ...")
def test_images_of_sizes_that_are_in_one_part_alone_are_not_read_to_compare_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cache, and without a scale to measure, nothing is read before the first step."""
    data, _, _ = held_out(tmp_path, cache="off", intensity="zscore")
    case(tmp_path, image((7, 5, 4)), label((7, 5, 4)), "case3")
    monkeypatch.setattr(nifti, "read_array", lambda *_: 1 / 0)
    prepare_data(data)
    case(tmp_path, image((4, 6, 5), seed=9), label((4, 6, 5)), "case3")
    with pytest.raises(ZeroDivisionError):
        prepare_data(data)


def large(root: Path) -> Data:
    """A data set of which a fingerprint samples the files: images of 1.5 MB, not compressed, maps of 80 kB."""
    data, shape, entries = decathlon(root), (96, 64, 64), []
    for seed, name in enumerate("abcd"):
        entries.append({"image": f"imagesTr/{name}.nii", "label": f"labelsTr/{name}.nii.gz"})
        write(root / entries[-1]["image"], image(shape, seed))
        write(root / entries[-1]["label"], label(shape, seed=seed))
    rewrite(root, training=entries)
    return replace(data, intensity="zscore", cache="off")


BETWEEN = 50_001  # the place of a voxel's byte between two sampled blocks, which begin 100 kB apart


def change(path: Path, place: int) -> None:
    """Change a bit of the byte in this place."""
    content = bytearray(path.read_bytes())
    content[place] ^= 16
    path.write_bytes(content)


def fingerprint_of(data: Data) -> DatasetFingerprint:
    return fingerprint(prepare_data(data), None)


def of_nothing(*_: object) -> object:
    """Take the hash of no byte for that of all of a file."""
    return hashlib.sha256()


@promise("Data", "a training image among ...")
@without("unet3d.data.prepare.leaks", none)
def test_images_whose_samples_agree_are_compared_as_a_whole(tmp_path: Path) -> None:
    data, path = large(tmp_path), tmp_path / "imagesTr/c.nii"
    shutil.copy(tmp_path / "imagesTr/a.nii", path)
    with pytest.raises(UserError, match=r"^c: .*c\.nii: .* a;"):
        prepare_data(data)
    change(path, BETWEEN)
    prepare_data(data)


@promise("Resume", "images or labels that ...")
def test_a_resumed_run_refuses_images_and_labels_that_changed(tmp_path: Path) -> None:
    data = decathlon(tmp_path / "set")
    before = fingerprint_of(data)
    data.root = str(tmp_path / "moved")
    shutil.copytree(tmp_path / "set", data.root, copy_function=shutil.copyfile)
    refuse_other_data(before, fingerprint_of(data))
    a, b, other = (tmp_path / f"moved/labelsTr/{name}.nii.gz" for name in ("a", "b", "other"))
    a.rename(other), b.rename(a), other.rename(b)
    with pytest.raises(UserError, match=r"^resume: labels .*\ba, b\b"):
        refuse_other_data(before, fingerprint_of(data))
    write(tmp_path / "moved/imagesTr/c.nii.gz", image(seed=9))
    with pytest.raises(UserError, match=r"^resume: images .*\bc, labels .*\ba, b\b"):
        refuse_other_data(before, fingerprint_of(data))


@promise("Resume", "images or labels that ...")
@without("hashlib.file_digest", of_nothing)
@without("unet3d.data.cache.BLOCKS", 1)
def test_bytes_of_large_files_are_compared_by_samples_or_on_request_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that was written since is warned of, unless all bytes or the checksum at its end settle it."""
    data, before, path = large(tmp_path), {}, tmp_path / "imagesTr/b.nii"
    for data.fingerprint in ("sample", "full"):
        before[data.fingerprint] = fingerprint_of(data)
    for other in (tmp_path / "imagesTr/a.nii", tmp_path / "labelsTr/d.nii.gz"):
        assert other.stat().st_size > 2**16
        os.utime(other, ns=(0, 0))
    refuse_other_data(before["full"], fingerprint_of(data))
    assert capsys.readouterr().err == "", "all bytes are the same"
    change(path, BETWEEN)
    with pytest.raises(UserError, match=r"^resume: images .*\bb\b"):
        refuse_other_data(before["full"], fingerprint_of(data))
    for kind, data.fingerprint in (("full", "sample"), ("sample", "full")):
        refuse_other_data(before[kind], fingerprint_of(data))
        line = ["warning: resume: ", " a, b:", "data.fingerprint=full"]
        assert told(capsys.readouterr().err.splitlines(), [line])
    for place in (100, -1):
        change(path, place)
        with pytest.raises(UserError, match=r"^resume: images .*\bb\b"):
            refuse_other_data(before["sample"], fingerprint_of(data))
        change(path, place)
