"""Damaged files and impossible voxels, told with case and path by the check, the command and a run's start."""

import dataclasses
import gzip
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from nifti_files import LPS, decathlon, errors, image, label, told, write, write_header
from training import train

from unet3d import build, compose
from unet3d.cli import main
from unet3d.config import Config, Data
from unet3d.data import nifti
from unet3d.data.cases import read_dataset
from unet3d.data.check import WARNING
from unet3d.data.nifti import ValidationRules
from unet3d.data.preprocess import CaseReader, Intensity
from unet3d.errors import UserError
from unet3d.train import checkpoint

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = b"<!DOCTYPE html>" + b"not found " * 100


def packed(path: Path, level: int = 9) -> bytes:
    """What a .nii.gz of an image of 20^3 voxels holds."""
    return gzip.compress(write(path.with_name("plain.nii"), image((20, 20, 20))).read_bytes(), level)


def six_bad_files(root: Path) -> dict[Path, str]:
    """A data set in which six files are damaged: what is said of each."""
    decathlon(root, tuple("abcdefg"))
    images = {name: root / f"imagesTr/{name}.nii.gz" for name in "abcdefg"}
    write(root / "labelsTr/a.nii.gz", label((20, 20, 20)))
    write(images["a"], image((20, 20, 20)))
    images["a"].write_bytes(images["a"].read_bytes()[:-1000])
    images["b"].write_bytes(b"")
    images["c"].write_bytes(PAGE)
    images["d"].unlink()
    images["e"].write_bytes(images["e"].read_bytes()[:30])
    (root / "labelsTr/f.nii.gz").write_bytes(gzip.compress(PAGE))
    return {
        images["a"]: "damaged",
        images["b"]: "is empty",
        images["c"]: "is not gzip-compressed",
        images["d"]: "no such file",
        images["e"]: "not readable as NIfTI",
        root / "labelsTr/f.nii.gz": "not readable as NIfTI",
    }


def test_d1_truncated_files_are_listed_with_case_and_path(tmp_path: Path) -> None:
    bad = six_bad_files(tmp_path)
    lines = told(Data(format="decathlon", root=str(tmp_path)))
    assert [line.split(": ")[:2] for line in lines] == [[path.name[0], str(path)] for path in bad]
    assert all(what in line for line, what in zip(lines, bad.values(), strict=True))
    assert len({*bad.values()}) == 5, "they are told apart"


def test_d1_a_file_that_cannot_be_opened_is_listed(tmp_path: Path) -> None:
    """Whatever the system says: here the name is too long for it; it might be permissions."""
    with pytest.raises(UserError, match=r"^a: .*aaa\.nii: cannot be opened \(File name too long\); mend that or take"):
        nifti.open_image("a", tmp_path / f"{'a' * 300}.nii")


def test_d1_an_uncompressed_file_is_found_truncated_by_its_header(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    content = (tmp_path / "dataset.json").read_text()
    (tmp_path / "dataset.json").write_text(content.replace("imagesTr/a.nii.gz", "imagesTr/a.nii"))
    path = write(tmp_path / "imagesTr/a.nii", image())
    path.write_bytes(path.read_bytes()[:-1])
    expected = [f"a: {path}: claims 832 bytes but holds 831 at most: truncated; replace the file"]
    assert told(data, full=False) == expected and errors(told(data)) == expected


def test_d1_check_data_and_train_list_all_and_end_with_2(tmp_path: Path) -> None:
    bad = six_bad_files(tmp_path / "set")
    words = ["data=decathlon", f"data.root={tmp_path / 'set'}"]
    command = [sys.executable, "-m", "unet3d", "check-data", *words]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    trained = train(tmp_path, *words, "device=cpu")
    assert checked.returncode == trained.code == 2
    lines = checked.stdout.splitlines()
    assert lines[-1] == "6 problems, 0 warnings" and all(sum(str(path) in line for line in lines) == 1 for path in bad)
    said = trained.err
    assert all(str(path) in said for path in bad if bad[path] != "damaged"), "headers are read before anything else"
    assert "Traceback" not in checked.stderr + said


def test_d1_a_run_lists_all_that_is_damaged_beneath_sound_headers(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    paths = [tmp_path / f"imagesTr/{name}.nii.gz" for name in "ab"]
    for path in paths:
        path.write_bytes(path.read_bytes()[:-1])
    data.intensity = "zscore"
    with pytest.raises(UserError) as caught:
        build.data(Config(data=data))
    assert [line.split(": ")[:2] for line in str(caught.value).splitlines()] == [[p.name[0], str(p)] for p in paths]


def test_d2_a_flipped_byte_is_found_by_the_full_read(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    path = write(tmp_path / "imagesTr/a.nii.gz", image((20, 20, 20)))
    write(tmp_path / "labelsTr/a.nii.gz", label((20, 20, 20)))
    content = bytearray(packed(path, level=0))  # stored, so that the flip changes a voxel and nothing else
    content[-100] ^= 1
    path.write_bytes(content)
    assert told(data, full=False) == []
    (line,) = told(data)
    assert line.startswith(f"a: {path}: damaged (CRC check failed")


def test_d4_a_run_lists_every_case_whose_voxels_are_not_finite_also_where_they_settle_the_scale(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    for name in "ab":
        stored = image()
        stored[0, 0, 0] = np.nan
        write(tmp_path / f"imagesTr/{name}.nii.gz", stored)
    data.intensity = "ct"
    with pytest.raises(UserError) as caught:
        build.data(Config(data=data))
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == ["a", "b"]


@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
def test_d3_a_header_that_claims_terabytes_is_refused_before_memory_is_taken(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = decathlon(tmp_path)
    (tmp_path / "dataset.json").write_text((tmp_path / "dataset.json").read_text().replace("a.nii.gz", f"a{ending}"))
    plain = write(tmp_path / "x.nii", image())
    write_header(plain, "dim", (3, 32767, 32767, 32767, 1, 1, 1, 1))
    path = tmp_path / f"imagesTr/a{ending}"
    path.write_bytes(plain.read_bytes() if ending == ".nii" else gzip.compress(plain.read_bytes()))
    write(tmp_path / f"labelsTr/a{ending}", label())
    for full in (False, True):
        assert any(
            line.startswith(f"a: {path}: claims 35,181,150,961,663 voxels, more than") for line in told(data, full)
        )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_d4_voxels_that_are_not_finite_are_an_error_or_counted_and_zero(
    tmp_path: Path, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    data = decathlon(tmp_path)
    stored = image()
    stored[1, 2, 3] = stored[0, 0, 0] = value
    path = write(tmp_path / "imagesTr/a.nii.gz", stored)
    assert told(data) == [f"a: {path}: 2 voxels are NaN or infinite; give them a value, e.g. the background's"]
    with pytest.raises(UserError, match=r"a: .* 2 voxels are NaN or infinite"):
        build.data(Config(data=data))
    data.nonfinite = "zero"
    said = "2 voxels are NaN or infinite and count as 0 (data.nonfinite=zero)"
    assert told(data) == [f"{WARNING}a: {path}: {said}"]
    ready = build.data(Config(data=data))
    assert capsys.readouterr().err.count(f"{WARNING}a: {said}\n") == 1, "once, though CT is read twice"
    volume = ready.read.raw(ready.train[0])
    stored[1, 2, 3] = stored[0, 0, 0] = 0
    assert volume.replaced == 2 and np.array_equal(volume.image[0], stored[::-1, ::-1])


def test_d4_predict_follows_the_runs_choice_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = compose.compose(["model=unet_tiny", "model.features=[4,8]", "data.patch=[16,16,16]"])
    config.model.in_channels, config.model.classes = 1, 3
    state = {
        **{"model_options": dataclasses.asdict(config.model), "intensity": [dataclasses.asdict(Intensity("zscore"))]},
        **{"model": build.model(config.model, 0).state_dict(), "average": {}},
        **{"classes": ["background", "a", "b"], "channels": ["MR"]},
    }
    stored = image()
    stored[1, 2, 3] = np.nan
    path = write(tmp_path / "a.nii.gz", stored)
    for config.data.nonfinite, code, said in (
        ("error", 2, f"error: a: {path}: 1 voxels are NaN or infinite; give them a value, e.g. the background's\n"),
        ("zero", 0, "warning: a: 1 voxels are NaN or infinite and count as 0 (data.nonfinite=zero)\n"),
    ):
        checkpoint.save_snapshot(tmp_path / "s.pt", state | {"config": compose.to_plain(config)})
        words = ["predict", str(tmp_path / "s.pt"), str(path), "-o", str(tmp_path / "out"), "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["unet3d", *words])
        assert main.main() == code and capsys.readouterr().err == said
    assert (tmp_path / "out" / "a.nii.gz").exists()


def of_label(value: float) -> Callable[[], np.ndarray]:
    def voxels() -> np.ndarray:
        changed = label().astype(np.float32)
        changed[1, 2, 3] = value
        return changed

    return voxels


@pytest.mark.parametrize(
    ("value", "ignore", "allowed"),
    [
        (7, None, "0 to 2"),
        (-1, None, "0 to 2"),
        (255, None, "0 to 2"),
        (7, 255, "0 to 2 and 255 (ignored)"),
        (255, 255, None),
    ],
)
def test_d5_a_label_that_is_no_class_is_an_error_unless_it_is_ignored(
    tmp_path: Path, value: int, ignore: int | None, allowed: str | None
) -> None:
    data = decathlon(tmp_path)
    data.ignore = ignore
    path = write(tmp_path / "labelsTr/a.nii.gz", of_label(value)())
    expected = [f"a: {path}: 1 voxels have the label {value}; allowed are {allowed}; relabel them"] if allowed else []
    assert told(data) == expected


def test_d6_a_mask_that_is_scaled_to_almost_one_is_a_mask(tmp_path: Path) -> None:
    """255 stored as a byte with a slope of 1/255 in float32."""
    stored = nib.Nifti1Image((label(classes=2) * 255).astype(np.uint8), LPS)
    stored.header.set_slope_inter(1 / 255, 0)
    nib.save(stored, tmp_path / "a.nii.gz")
    raw = bytearray(gzip.decompress((tmp_path / "a.nii.gz").read_bytes()))
    raw[112:120] = struct.pack("<2f", 1 / 255, 0)  # nibabel rescales what it saves
    raw[352:] = (label(classes=2) * 255).astype(np.uint8).tobytes("F")
    (tmp_path / "a.nii.gz").write_bytes(gzip.compress(bytes(raw)))
    found = nifti.read_label("a", tmp_path / "a.nii.gz", nifti.open_image("a", tmp_path / "a.nii.gz"), 2, None)
    assert np.array_equal(found, label(classes=2))


@pytest.mark.parametrize("value", [1.5, np.nan, np.inf])
def test_d6_labels_that_are_no_integers_are_an_error(tmp_path: Path, value: float) -> None:
    data = decathlon(tmp_path)
    data.nonfinite = "zero"  # speaks of intensities alone
    path = write(tmp_path / "labelsTr/a.nii.gz", of_label(value)())
    assert told(data) == [f"a: {path}: 1 voxels have the label {value:g}; allowed are 0 to 2; relabel them"]


def test_d6_integral_floats_are_labels(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    write(tmp_path / "labelsTr/a.nii.gz", label().astype(np.float64))
    assert told(data) == []
    read = (
        CaseReader(read_dataset(data), None, leniency=ValidationRules.of(data)).raw(read_dataset(data).cases[0]).label
    )
    assert read is not None and read.dtype == np.uint8 and np.array_equal(read[::-1, ::-1], label())


def test_d6_a_one_hot_label_map_is_an_error_with_a_hint(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    path = write(tmp_path / "labelsTr/a.nii.gz", np.stack([label() == k for k in range(3)], -1).astype(np.uint8))
    for full in (False, True):
        (line, *_) = errors(told(data, full))
        assert line.startswith(f"a: {path}: has shape (6, 5, 4, 3)") and "one-hot's argmax" in line
