"""Every fault of a data set is listed at once, with case and path; a sound data set gets no line."""

import gzip
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from guards import without
from nifti_files import (
    FLIPPED,
    LPS,
    NOISY,
    SHIFTED,
    WARNING,
    case,
    changed,
    checked,
    decathlon,
    doubtful_places,
    errors,
    holds,
    image,
    label,
    rewrite,
    told,
    write,
    write_header,
)
from promises import promise
from training import face, train

from unet3d.base.errors import UserError
from unet3d.config import compose
from unet3d.config.schema import Data, Phantom
from unet3d.data import nifti
from unet3d.data.cases import read_dataset
from unet3d.data.check import check_cases, mostly_padding, read_grids, summary
from unet3d.data.nifti import OpenFile
from unet3d.data.prepare import prepare_data
from unet3d.data.splits import split
from unet3d.run.training_state import DatasetFingerprint, fingerprint, refuse_other_data

PAGE = b"<!DOCTYPE html>" + b"not found " * 100


@pytest.mark.parametrize("full", [False, True])
def test_the_phantom_has_no_problem(tmp_path: Path, full: bool) -> None:
    assert checked(Data(root=str(tmp_path), phantom=Phantom(cases=3, shape=[16, 16, 16])), full) == []


def damaged(root: Path) -> tuple[Data, list[list[str]]]:
    """A data set with a fault in every case, and for each fault how its line begins and what it holds."""
    data = decathlon(root, tuple("abcdefg"))
    images, labels = (
        {name: root / folder / f"{name}.nii.gz" for name in "abcdefg"} for folder in ("imagesTr", "labelsTr")
    )
    images["a"].unlink()
    labels["a"].write_bytes(b"")
    write(images["b"], np.full((6, 5, 4), np.nan, np.float32))
    write(labels["b"], np.full((6, 5, 4), 7, np.uint8))
    write(labels["c"], label((6, 5, 3)))
    write(images["d"], image((6, 5, 4, 2)))
    case(root, image((20, 20, 20)), label((20, 20, 20)), "e")
    images["e"].write_bytes(images["e"].read_bytes()[:-9])
    images["f"].write_bytes(PAGE)
    labels["f"].write_bytes(gzip.compress(PAGE))
    images["g"].write_bytes(images["g"].read_bytes()[:30])
    return data, [
        [f"a: {images['a']}: "],
        [f"a: {labels['a']}: "],
        [f"b: {images['b']}: 120 ", "NaN"],
        [f"b: {labels['b']}: 120 ", " 7;", " 0 ", " 2;"],
        [f"c: {labels['c']}: ", "(6, 5, 3)", "(6, 5, 4)", str(images["c"])],
        [f"d: {images['d']}: ", " 2 ", " 1 ", "(CT)"],
        [f"e: {images['e']}: ", "end-of-stream"],
        [f"f: {images['f']}: ", "gzip"],
        [f"f: {labels['f']}: ", "NIfTI-1", "NIfTI-2"],
        [f"g: {images['g']}: ", "NIfTI", "end-of-stream"],
    ]


def of_headers(lines: list[list[str]]) -> list[list[str]]:
    """Return those of the lines of `damaged` that headers alone show."""
    return [line for line in lines if line[0][0] not in "be"]


@promise("Data", "a file that is truncated, empty, missing, or a web page called .nii.gz", "listed; exit 2")
def test_all_problems_of_all_cases_are_listed_at_once(tmp_path: Path) -> None:
    data, lines = damaged(tmp_path)
    assert told(errors(checked(data)), lines)
    assert told(checked(data, full=False), of_headers(lines))


@promise(
    "Data",
    "labels, in dataset.json or `data.label_map`, that make no classes",
    "`check-data` lists them; a run is refused",
)
@pytest.mark.parametrize(
    ("words", "changes", "said"),
    [
        (["data.label_map={1:[1,9]}"], {}, "data.label_map={{1: [1, 9]}}: "),
        ([], {"labels": {"0": "background", "1": "organ", "4": "tumour"}}, "{json}: labels are numbered [0, 1, 4]; "),
        (["data.ignore=1"], {}, "{json}: 1 is the label to ignore"),
    ],
)
def test_labels_that_make_no_classes_are_listed_with_all_other_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], changes: dict[str, Any], said: str
) -> None:
    data, lines = damaged(tmp_path)
    rewrite(tmp_path, **changes)
    assert face("check-data", "data=decathlon", f"data.root={data.root}", *words) == 2
    out = capsys.readouterr().out.splitlines()
    others = [line for line in lines if " 7;" not in line]  # a label that may be a class
    assert all(is_there(line, out) for line in [[said.format(json=tmp_path / "dataset.json")], *others])
    assert out[-1].startswith(f"{len(others) + 1} problems") and is_there(["classes: unknown"], out)
    with pytest.raises(UserError, match=f"^{re.escape(said.format(json=tmp_path / 'dataset.json'))}"):
        read_dataset(compose.compose(["data=decathlon", f"data.root={data.root}", *words]).data)


@promise("Data", "a file that is ...")
@pytest.mark.slow
def test_check_data_and_a_run_list_every_problem_and_end_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, lines = damaged(tmp_path / "set")
    words = ["data=decathlon", f"data.root={data.root}"]
    assert face("check-data", *words) == 2
    out = capsys.readouterr().out.splitlines()
    assert out[-1].startswith(f"{len(lines)} ") and all(is_there(line, out) for line in lines)
    done = train(tmp_path, *words, "device=cpu")
    assert done.code == 2 and "Traceback" not in done.err
    printed = done.err.removeprefix("error: ").splitlines()
    assert all(is_there(line, printed) for line in of_headers(lines)), "headers are read before anything else"


def is_there(line: list[str], printed: list[str]) -> bool:
    """Return whether one of the printed lines is this one of `damaged`."""
    return any(told([other], [line]) for other in printed)


@promise("Data", "a file that is ...")
@pytest.mark.parametrize("intensity", ["zscore", "ct"])
def test_a_run_lists_all_that_is_damaged_beneath_sound_headers(tmp_path: Path, intensity: str) -> None:
    """For CT, while the scale is measured."""
    data = decathlon(tmp_path)
    data.intensity = intensity
    paths = [tmp_path / f"imagesTr/{name}.nii.gz" for name in "ab"]
    paths[0].write_bytes(paths[0].read_bytes()[:-1])
    write(paths[1], np.full((6, 5, 4), np.nan, np.float32))
    with pytest.raises(UserError) as caught:
        prepare_data(data)
    assert [line.split(": ")[:2] for line in str(caught.value).splitlines()] == [[p.name[0], str(p)] for p in paths]


def test_the_quick_pass_reads_no_voxel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = decathlon(tmp_path)
    monkeypatch.setattr(nifti, "read_array", lambda *_: 1 / 0)
    assert checked(data, full=False) == []
    with pytest.raises(ZeroDivisionError):
        checked(data, full=True)


@promise("Data", "dataset.json with thousands of ...")
def test_a_thousand_problems_are_listed_and_the_others_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = decathlon(tmp_path)
    rewrite(tmp_path, training=[{"image": f"imagesTr/x{n}.nii", "label": f"imagesTr/y{n}.nii"} for n in range(600)])
    with pytest.raises(UserError) as caught:
        prepare_data(data)
    lines = str(caught.value).splitlines()
    assert len(lines) == 1001 and lines[-1] == "and 200 more"
    assert face("check-data", "data=decathlon", f"data.root={tmp_path}") == 2
    assert "1200 problems" in capsys.readouterr().out


def test_a_split_that_cannot_be_made_is_listed_with_the_rest(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    (tmp_path / "imagesTr/a.nii.gz").unlink()
    data.split = str(tmp_path / "split.json")
    assert [line.split(": ")[0] for line in checked(data)] == ["a", data.split]


def unchecked(file: OpenFile, values: object) -> np.ndarray:
    """Return labels whatever they are."""
    return nifti.read_array(file).astype(np.uint8)


WRONG = (7, -1, 255, 1.5, np.nan, np.inf, 0.9999, 1.001)
ONE_HOT = np.stack([label() == k for k in range(3)], -1).astype(np.uint8)


@promise(
    "Data",
    "labels above the classes, negative, 255 without `data.ignore`, fractions, one-hot",
    "refused; 255 with `data.ignore=255` and whole floats are read",
)
@without("unet3d.data.check.read_classes", unchecked, only="254")
@pytest.mark.parametrize(
    ("voxels", "ignore", "parts"),
    [
        *((changed(label(), value), None, ["1 ", f" {value:g};", " 0 ", " 2;"]) for value in WRONG),
        (changed(label(), 254), 255, ["1 ", " 254;", " 0 ", " 2 ", " 255 "]),
        (ONE_HOT, None, ["", "(6, 5, 4, 3)", "X,Y,Z"]),
        (changed(label(), 255), 255, None),
        (label().astype(np.float64), None, None),
    ],
    ids=[*map(str, WRONG), "254", "one-hot", "ignored", "float"],
)
def test_a_label_map_holds_classes_and_the_ignored_value(
    tmp_path: Path, voxels: np.ndarray, ignore: int | None, parts: list[str] | None
) -> None:
    data = decathlon(tmp_path)
    data.ignore, data.nonfinite = ignore, "zero"  # which concerns intensities alone
    path = write(tmp_path / "labelsTr/a.nii.gz", voxels)
    lines = errors(checked(data))
    assert bool(lines) == bool(parts)
    if parts:
        start, *rest = parts
        assert told(lines[:1], [[f"a: {path}: {start}", *rest]])
        with pytest.raises(UserError) as caught:
            prepare_data(data)
        fault, _, remedy = lines[0].partition("; correct the file, or add 'data.label_map=")
        assert str(caught.value).startswith(fault) and bool(remedy) == ("'data.label_map=" in str(caught.value))


OTHER_AXES = LPS @ np.array([[1, 0, 0, 0], [0, -1, 0, 4], [0, 0, 1, 0], [0, 0, 0, 1]])  # the grid of LPS, 5 voxels in y
TURNED = LPS[:, [1, 0, 2, 3]]


@promise(
    "Data",
    "a label map of another size, flipped or shifted, or with other axes on the same grid",
    "an error with the remedy; with `data.affine_check=warn` a shift or flip is a warning; rounding is none",
)
@without("unet3d.data.volume.SAME_GRID", math.inf, only="shifted-False")
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("voxels", "where", "parts", "accepted"),
    [
        (label((6, 5, 3)), LPS, ["(6, 5, 3)", "(6, 5, 4)"], False),
        (label(), SHIFTED, [" 1 "], True),
        (label(), FLIPPED, [" 10 "], True),
        (label(), OTHER_AXES, ["LAS", "LPS", "reorient it to LPS"], True),
        (label((5, 6, 4)), TURNED, ["PLS", "LPS", "reorient it to LPS"], False),
        (label(), NOISY, None, True),
    ],
    ids=["size", "shifted", "flipped", "other axes", "turned", "rounded"],
)
def test_a_label_map_elsewhere_is_an_error_or_by_choice_a_warning(
    tmp_path: Path, voxels: np.ndarray, where: np.ndarray, parts: list[str] | None, accepted: bool, full: bool
) -> None:
    data = decathlon(tmp_path)
    path = write(tmp_path / "labelsTr/a.nii.gz", voxels, where)
    for data.affine_check, start in (("error", ""), ("warn", WARNING * accepted)):
        line = [f"{start}a: {path}: ", *(parts or []), str(tmp_path / "imagesTr/a.nii.gz")]
        assert told(checked(data, full), [line] if parts else [])


def test_a_fourth_axis_must_match_the_channels(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    write(tmp_path / "imagesTr/a.nii.gz", image((6, 5, 4, 1)))
    assert checked(data) == []


def odd(path: Path, kind: str) -> None:
    stored, slanted = nib.Nifti1Image(image(), LPS), LPS.copy()
    slanted[0, 1] = 0.1
    if kind == "sheared":
        stored.set_sform(slanted, code=1)
        stored.set_qform(None, code=0)
    elif kind == "unplaced":
        stored.set_sform(None, code=0)
        stored.set_qform(None, code=0)
    elif kind == "twofold":
        stored.set_qform(FLIPPED, code=1)
    elif kind != "bent":
        stored.header["xyzt_units"] = {"metres": 1, "yards": 0xFF}[kind]
    nib.save(stored, path)
    if kind == "bent":  # b, c, d of a unit quaternion have squares that sum to 1 at most
        write_header(write_header(path, "qform_code", 1), "quatern", 0.6, 0.6, 0.6)


@promise("Data", "sheared grids, sform beside qform, lengths not in mm", "a warning with the rule followed")
@without("unet3d.data.nifti.SHEAR", 2.0, only="sheared")
@without("unet3d.data.nifti.MM", range(8), only="yards")
@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("sheared", ["sheared"]),
        ("unplaced", ["sform", "qform"]),
        ("twofold", ["sform and qform place voxels up to 10 mm apart", "LPS and RPS", "data.affine="]),
        ("bent", ["qform", "sform"]),
        ("metres", ["meter", "mm", "data.spacing"]),
        ("yards", [" 7;", "mm", "data.spacing"]),
    ],
    ids=["sheared", "unplaced", "twofold", "bent", "metres", "yards"],
)
def test_odd_headers_are_warned_of_with_the_rule_that_is_followed(
    tmp_path: Path, kind: str, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    data = decathlon(tmp_path)
    path = tmp_path / "imagesTr/a.nii.gz"
    odd(path, kind)
    write(tmp_path / "labelsTr/a.nii.gz", label(), nib.load(path).affine)
    wanted = [f"{WARNING}a: {path}: ", *parts]
    assert told([line for line in checked(data) if "imagesTr" in line], [wanted])
    is_told = kind in ("metres", "yards", "unplaced")
    assert told(checked(data, full=False), [wanted] * is_told), "a run starts all the same"
    prepare_data(data)
    assert told(capsys.readouterr().err.splitlines(), [wanted] * is_told)
    if kind == "twofold":
        ready = prepare_data(data)
        assert np.array_equal(ready.read.read_volume(ready.train[0]).image[0], image()[::-1, ::-1]), (
            "the sform's LPS, turned"
        )


@promise(
    "Data",
    "voxel sizes of sform and pixdim that differ by more than 1 %",
    "every command warns once, with both, the one taken and the number of files, unless `data.affine` decides",
)
@without("unet3d.data.nifti.SAME_SIZE", 10.0)
def test_files_that_state_two_voxel_sizes_are_one_warning_or_a_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = decathlon(tmp_path)
    for path in tmp_path.glob("*/*.nii.gz"):
        doubtful_places(path)
    parts = [
        "1 x 1 x 1 mm by its sform",
        "1 x 1.5 x 2.5 mm by its qform and pixdim",
        "sform is taken",
        "(8 such files)",
    ]
    wanted = [[f"{WARNING}a: {tmp_path / 'imagesTr/a.nii.gz'}: ", *parts, "data.affine="]]
    assert told(checked(data), wanted) and told(checked(data, full=False), wanted)
    assert prepare_data(data).spacing == (1, 1, 1)
    assert told(capsys.readouterr().err.splitlines(), wanted)
    for data.affine, spacing in (("sform", (1, 1, 1)), ("qform", (1, 1.5, 2.5)), ("pixdim", (1, 1.5, 2.5))):
        assert checked(data) == [] and prepare_data(data).spacing == pytest.approx(spacing)
    write_header(tmp_path / "imagesTr/b.nii.gz", "qform_code", 0)
    write_header(tmp_path / "labelsTr/b.nii.gz", "qform_code", 0)
    data.affine = "qform"
    parts = ["by its sform", "mm by its pixdim", "sform is taken", "(2 such files)"]
    assert told(checked(data), [[f"{WARNING}b: {tmp_path / 'imagesTr/b.nii.gz'}: ", *parts]]), "it has no qform"


@promise(
    "Data",
    "a label map that lies elsewhere by its sform alone; a sform or qform that maps no volume",
    "an error that names a `data.affine` that works",
)
def test_headers_alone_put_a_label_map_elsewhere(tmp_path: Path) -> None:
    """As where a program has read the image by its qform."""
    data = decathlon(tmp_path)
    for name in "abcd":
        doubtful_places(tmp_path / f"imagesTr/{name}.nii.gz")
    lines = errors(checked(data))
    assert len(lines) == 4 and all("by their qform both have one grid: add data.affine=qform" in line for line in lines)
    data.affine = "qform"
    assert checked(data) == []


@promise(
    "Data",
    "images without a label map, cases that a split leaves out, another `numTraining`, a class called Ignore",
    "counted or named in one warning",
)
def test_a_case_without_a_label_is_warned_of(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    path = tmp_path / "dataset.json"
    content = json.loads(path.read_text())
    del content["training"][0]["label"]
    path.write_text(json.dumps(content))
    line = [f"{WARNING}Small: 1 of 4 cases have no label map: not used (a);"]
    assert told(checked(data), [[f"{WARNING}a: {tmp_path / 'imagesTr/a.nii.gz'}: "], line])
    assert told(checked(data, full=False), [line])


@promise("Data", "images without a label ...")
def test_another_number_of_cases_than_dataset_json_announces_is_warned_of(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    for number, lines in ((4, []), ("4", []), (99, [[f"{WARNING}Small: numTraining is 99, but 4 cases "]])):
        rewrite(tmp_path, numTraining=number)
        assert told(checked(data), lines)


@promise("Data", "images without a label ...")
def test_a_class_that_is_called_ignore_but_learned_is_warned_of(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    rewrite(tmp_path, labels={"0": "background", "1": "organ", "2": "Ignore"})
    for full in (False, True):
        assert told(checked(data, full), [[f"{WARNING}Small: Ignore is learned ", "data.ignore=2"]])
    data.ignore = 2
    assert checked(data) == []


@promise(
    "Data",
    "a case, a part or all of training without a class, also by ignoring, resampling or slices; held-out "
    "cases without a voxel to score",
    "a warning, a warning with the class, an error; undefined scores are n/a, a 0 for want of the class has a note",
)
def test_a_case_and_a_part_without_a_class_are_warned_of(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    paths = {name: tmp_path / f"labelsTr/{name}.nii.gz" for name in "abcd"}
    write(paths["a"], np.zeros((6, 5, 4), np.uint8))
    for name in "bd":
        write(paths[name], label(classes=2))
    lines = [[f"{WARNING}a: {paths['a']}: "], [f"{WARNING}Small: tumour ", " training ", " held-out ones;"]]
    assert told(checked(data), lines)
    write(paths["c"], label(classes=2))
    lines[1][2] = " leave the class out"
    assert told(checked(data), [*lines, [f"{WARNING}Small: tumour ", " held-out "]])


@promise("Data", "a case, a part ...")
def test_a_training_part_without_any_foreground_is_an_error(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    data.ignore = 3
    for name in "abd":
        write(tmp_path / f"labelsTr/{name}.nii.gz", label(classes=1) + 3 * (label(classes=2) > 0).astype(np.uint8))
    assert told(errors(checked(data)), [["Small: "]])


@promise("Data", "a case, a part ...")
def test_a_file_that_is_a_cases_image_and_label_is_read_as_both(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    paths = [f"./labelsTr/{name}.nii.gz" for name in "abcd"]
    rewrite(tmp_path, training=[{"image": path, "label": path} for path in paths])
    assert checked(data) == []
    for path in paths:
        write(tmp_path / path, label(classes=1))
    assert told(errors(checked(data)), [["c: ", " is held out"], ["Small: "]])


@promise("Data", "a case, a part ...")
@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("held out", ["tumour in no training case, ", " held-out ones;"]),
        ("absent", ["tumour in no training case, ", " check the label maps,"]),
        ("resampled", ["tumour in no training case at data.spacing=[4, 4, 4], ", " finer data.spacing"]),
        ("sparse", ["tumour in no slice that is learned from, ", " held-out ones;"]),
        ("ignored", ["every held-out voxel is ignored: ", " no best.pt;"]),
        ("healthy", ["no foreground in any held-out case: ", " 0, or n/a"]),
        ("empty", ["no foreground in any training case; nothing to learn"]),
        ("sound", []),
    ],
)
def test_a_run_says_which_classes_it_cannot_learn_or_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, wanted: list[str]
) -> None:
    """Before its first step. Case c is held out."""
    data = decathlon(tmp_path)
    data.cache, data.cache_root = "disk" if kind in ("held out", "sparse") else "memory", str(tmp_path / "cache")
    data.intensity, data.ignore = "zscore", 9
    organ = np.zeros((6, 5, 4), np.uint8)
    organ[:4] = 1
    rare, held_out = organ.copy(), organ.copy()
    rare[5, 4, 3] = 2
    if kind == "sparse":
        data.sparse = [1, 0, 0]
    if kind == "resampled":
        data.spacing = [4, 4, 4]
    if kind in ("ignored", "healthy"):
        held_out[:] = 9 if kind == "ignored" else 0
    elif kind != "absent":
        held_out = rare
    learned = {"held out": organ, "absent": organ, "empty": np.zeros_like(organ)}.get(kind, rare)
    for name in "abcd":
        write(tmp_path / f"labelsTr/{name}.nii.gz", held_out if name == "c" else learned)
    if kind == "empty":
        with pytest.raises(UserError, match=r"^Small: no foreground in any training case; there is nothing to learn"):
            prepare_data(data)
        return
    prepare_data(data)
    lines = capsys.readouterr().err.splitlines()
    assert told(lines, [[f"{WARNING}Small: {wanted[0]}", *wanted[1:]]] if wanted else [])
    if kind == "resampled":
        line = [f"{WARNING}Small: {wanted[0]}", "all voxels are lost by resampling; give a finer data.spacing"]
        assert told(checked(data)[:1], [line])


def test_check_data_names_the_plan_that_its_data_need(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = decathlon(tmp_path)
    words = ["data=decathlon", f"data.root={data.root}"]
    for path in (tmp_path / "labelsTr").iterdir():
        write(path, np.array([0, 1, 4], np.uint8)[label()])
    option = "'data.label_map={1:1,2:4}'"
    assert face("check-data", *words, "data.patch=[8,8,4]", "model=unet_tiny") == 2
    out = capsys.readouterr().out
    assert f"\nnext: python -m unet3d plan {' '.join(words)} {option}\n" in out and "\n1 problem," in out
    rewrite(tmp_path, labels={"0": "background", "1": "organ", "4": "tumour"})
    assert face("check-data", *words) == 2
    assert f"\nnext: python -m unet3d plan {' '.join(words)} {option}\n" in capsys.readouterr().out
    (tmp_path / "imagesTr" / "a.nii.gz").unlink()
    assert face("check-data", *words) == 2
    assert "next: " not in capsys.readouterr().out, "no plan mends that"


def none(*_: object) -> tuple[()]:
    """Find nothing."""
    return ()


def held_out(tmp_path: Path) -> tuple[Data, Path, Path]:
    """A data set with its split, the image of case1, which is learned from, and that of case3, which is held out."""
    data = decathlon(tmp_path, ("case1", "case2", "case3", "case4"))
    train, val = split(read_dataset(data), data)
    return data, train[0].images[0], val[0].images[0]


def link_by_a_folder(link: Path, target: Path) -> None:
    (link.parent.parent / "other").symlink_to(target.parent)
    link.symlink_to(link.parent.parent / "other" / target.name)


@promise("Data", "a training image among ...")
@without("unet3d.data.check.leaks", none, only="symlink_to")
@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to, link_by_a_folder])
def test_a_link_from_val_to_train_is_an_error(tmp_path: Path, link: Callable[[Path, Path], None]) -> None:
    data, seen, unseen = held_out(tmp_path)
    unseen.unlink()
    link(unseen, seen)
    wanted = [f"case3: {unseen}: ", " case1;"]
    assert told(checked(data), [wanted])
    with pytest.raises(UserError) as caught:
        prepare_data(data)
    assert told([str(caught.value)], [wanted])


@promise("Data", "a training image among ...")
@without("unet3d.data.check.leaks", none)
def test_the_same_voxels_in_train_and_val_are_an_error_whatever_the_files(tmp_path: Path) -> None:
    data, seen, unseen = held_out(tmp_path)
    stored = nib.load(seen)
    write(unseen, np.asanyarray(stored.dataobj).astype(np.float64), stored.affine)
    assert seen.read_bytes() != unseen.read_bytes()
    assert checked(data, full=False) == []
    assert told(checked(data), [[f"case3: {unseen}: ", " case1;"]])


def packed(stored: nib.Nifti1Image) -> nib.Nifti1Image:
    return stored  # compressed otherwise


def turned(stored: nib.Nifti1Image) -> nib.Nifti1Image:
    return stored.as_reoriented(np.array([[1, 1], [0, -1], [2, 1]]))


def as_doubles(stored: nib.Nifti1Image) -> nib.Nifti1Image:
    return nib.Nifti1Image(stored.get_fdata(), stored.affine)


def moved(stored: nib.Nifti1Image) -> nib.Nifti1Image:
    return nib.Nifti1Image(np.asanyarray(stored.dataobj), stored.affine + 50 * np.eye(4, k=3))


def turned_unsaid(stored: nib.Nifti1Image) -> nib.Nifti1Image:
    voxels = np.asanyarray(stored.dataobj)
    return nib.Nifti1Image(np.ascontiguousarray(voxels.transpose(2, 0, 1)[::-1, :, ::-1]), stored.affine)


def mirrored_unsaid(stored: nib.Nifti1Image) -> nib.Nifti1Image:
    return nib.Nifti1Image(np.ascontiguousarray(np.asanyarray(stored.dataobj)[::-1]), stored.affine)


SAID = [packed, turned, as_doubles, moved]
UNSAID = [turned_unsaid, mirrored_unsaid]


@promise("Data", "a training image among ...")
@without("unet3d.data.prepare.leaks", none, only="off-turned")
@pytest.mark.parametrize(
    ("cache", "stored"),
    [
        *((cache, stored) for cache in ("memory", "disk", "off") for stored in SAID),
        *((cache, stored) for cache in ("memory", "off") for stored in UNSAID),
    ],
)
def test_a_run_refuses_a_held_out_image_that_it_learns_from(
    tmp_path: Path, cache: str, stored: Callable[[nib.Nifti1Image], nib.Nifti1Image]
) -> None:
    """By its voxels, wherever cases are kept and whatever the file; so does the check."""
    data, seen, unseen = held_out(tmp_path)
    data.cache, data.cache_root = cache, str(tmp_path / "cache")
    for kind in ("imagesTr", "labelsTr"):
        found, other = (tmp_path / kind / path.name for path in (seen, unseen))
        other.write_bytes(gzip.compress(stored(nib.load(found)).to_bytes(), 1))
    wanted = [f"case3: {unseen}: ", " case1;"]
    with pytest.raises(UserError) as caught:
        prepare_data(data)
    assert told([str(caught.value)], [wanted])
    assert told(checked(data), [wanted])
    data.semi, data.sparse = True, [2, 2, 2]
    assert len(prepare_data(data).val) == 4, "other slices of the same images are scored on purpose"


@promise(
    "Data",
    "a training image among the held-out ones: by id, link or voxels, however compressed, typed, placed, "
    "oriented, or with other channel order",
    "refused, and by `check-data`; axes that the header does not say, and other channels first, are not "
    "found with `data.cache=disk`, nor in a run that resamples with `data.cache=memory`",
)
@pytest.mark.parametrize("intensity", ["zscore", "none"])
@pytest.mark.parametrize("cache", ["memory", "off"])
def test_the_same_channels_in_another_order_are_the_same_image(tmp_path: Path, cache: str, intensity: str) -> None:
    data, seen, unseen = held_out(tmp_path)
    data.cache, data.intensity = cache, intensity
    rewrite(tmp_path, modality={"0": "T1", "1": "T2"})
    for number, path in enumerate(sorted((tmp_path / "imagesTr").iterdir())):
        write(path, image((6, 5, 4, 2), seed=number))
    prepare_data(data)  # no two of them are the same
    write(unseen, np.asanyarray(nib.load(seen).dataobj)[::-1, :, :, ::-1])
    wanted = [f"case3: {unseen}: ", " case1;"]
    with pytest.raises(UserError) as caught:
        prepare_data(data)
    assert told([str(caught.value)], [wanted])
    assert told(errors(checked(data)), [wanted])


@promise("Data", "two held-out and training images that only normalisation makes equal", "two images")
def test_what_only_a_rule_or_a_digest_makes_equal_are_two_images(tmp_path: Path) -> None:
    data, seen, unseen = held_out(tmp_path)
    data.intensity, data.cache_root = "zscore", str(tmp_path / "cache")
    voxels = image((6, 4, 4)).round()
    parity = (np.indices(voxels.shape).sum(0) % 2).astype(np.float32)
    for path in (seen, unseen):
        write(tmp_path / "labelsTr" / path.name, label((6, 4, 4)))
    corners = parity * np.array([1, 0, 0, 1])  # of it and of its opposite, planes along each axis hold equal values
    for first, second in ((voxels, voxels * 2 + 10), (parity, parity * 3 + 1), (corners, corners[::-1] * 2)):
        write(seen, first.astype(np.float32)), write(unseen, second.astype(np.float32))
        for data.cache in ("memory", "disk", "off"):
            prepare_data(data)
        assert errors(checked(data)) == []


def test_the_same_values_elsewhere_are_another_image(tmp_path: Path) -> None:
    """As of images whose intensities were made to have one histogram."""
    data, seen, unseen = held_out(tmp_path)
    data.cache = "off"
    voxels = np.asanyarray(nib.load(seen).dataobj)
    write(unseen, np.random.default_rng(0).permutation(voxels.ravel()).reshape(voxels.shape))
    assert "case3" in [case.id for case in prepare_data(data).val]


@promise("Data", "a training image among ...")
def test_images_of_sizes_that_are_in_one_part_alone_are_not_read_to_compare_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cache, and without a scale to measure, nothing is read before the first step."""
    data, _, _ = held_out(tmp_path)
    data.cache, data.intensity = "off", "zscore"
    case(tmp_path, image((7, 5, 4)), label((7, 5, 4)), "case3")
    monkeypatch.setattr(nifti, "read_array", lambda *_: 1 / 0)
    prepare_data(data)
    case(tmp_path, image((4, 6, 5), seed=9), label((4, 6, 5)), "case3")
    with pytest.raises(ZeroDivisionError):
        prepare_data(data)


def large(root: Path) -> Data:
    """A data set of which a fingerprint samples the files: images of 1.5 MB, not compressed, maps of 80 kB."""
    data, shape = decathlon(root), (96, 64, 64)
    for seed, name in enumerate("abcd"):
        write(root / f"imagesTr/{name}.nii", image(shape, seed))
        write(root / f"labelsTr/{name}.nii.gz", label(shape, seed=seed))
    names = [(f"imagesTr/{name}.nii", f"labelsTr/{name}.nii.gz") for name in "abcd"]
    rewrite(root, training=[{"image": scan, "label": labels} for scan, labels in names])
    data.intensity, data.cache = "zscore", "off"
    return data


def change_unsampled(path: Path) -> None:
    """One bit of a voxel between two sampled blocks, which begin 100 kB apart."""
    content = bytearray(path.read_bytes())
    content[50_001] ^= 16
    path.write_bytes(content)


def fingerprint_of(data: Data) -> DatasetFingerprint:
    return fingerprint(prepare_data(data), None)


def of_nothing(*_: object) -> object:
    """Take the hash of no byte for that of all of a file."""
    return hashlib.sha256()


@promise("Data", "a training image among ...")
@without("unet3d.data.prepare.leaks", none)
def test_images_whose_samples_agree_are_compared_as_a_whole(tmp_path: Path) -> None:
    data = large(tmp_path)
    shutil.copy(tmp_path / "imagesTr/a.nii", tmp_path / "imagesTr/c.nii")
    with pytest.raises(UserError, match=r"^c: .*c\.nii: .* a;"):
        prepare_data(data)
    change_unsampled(tmp_path / "imagesTr/c.nii")
    prepare_data(data)


@promise("Resume", "images or labels that ...")
def test_a_resumed_run_refuses_images_and_labels_that_changed(tmp_path: Path) -> None:
    data = decathlon(tmp_path / "set")
    before = fingerprint_of(data)
    shutil.copytree(tmp_path / "set", tmp_path / "moved", copy_function=shutil.copyfile)
    data.root = str(tmp_path / "moved")
    refuse_other_data(before, fingerprint_of(data))
    a, b = (tmp_path / f"moved/labelsTr/{name}.nii.gz" for name in "ab")
    swapped = b.read_bytes(), a.read_bytes()
    a.write_bytes(swapped[0]), b.write_bytes(swapped[1])
    with pytest.raises(UserError, match=r"^resume: labels .*\ba, b\b"):
        refuse_other_data(before, fingerprint_of(data))
    write(tmp_path / "moved/imagesTr/c.nii.gz", image(seed=9))
    with pytest.raises(UserError, match=r"^resume: images .*\bc, labels .*\ba, b\b"):
        refuse_other_data(before, fingerprint_of(data))


@promise("Resume", "images or labels that ...")
@without("hashlib.file_digest", of_nothing)
def test_bytes_between_the_sampled_ones_are_compared_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a file that was written since is warned of, unless the checksum at its end settles it."""
    data, before = large(tmp_path), {}
    for data.fingerprint in ("sample", "full"):
        before[data.fingerprint] = fingerprint_of(data)
    for path in (tmp_path / "imagesTr/a.nii", tmp_path / "labelsTr/d.nii.gz"):
        assert path.stat().st_size > 2**16
        os.utime(path, ns=(0, 0))
    refuse_other_data(before["full"], fingerprint_of(data))
    assert capsys.readouterr().err == "", "all bytes are the same"
    change_unsampled(tmp_path / "imagesTr/b.nii")
    os.utime(tmp_path / "imagesTr/b.nii", ns=(0, 0))
    with pytest.raises(UserError, match=r"^resume: images .*\bb\b"):
        refuse_other_data(before["full"], fingerprint_of(data))
    line = ["warning: resume: ", " a, b:", "data.fingerprint=full"]
    refuse_other_data(before["sample"], fingerprint_of(data))
    assert told(capsys.readouterr().err.splitlines(), [line])
    data.fingerprint = "sample"
    refuse_other_data(before["full"], fingerprint_of(data))
    assert told(capsys.readouterr().err.splitlines(), [line])


@promise("Resume", "images or labels that ...")
@without("unet3d.data.cache.BLOCKS", 1, only="--1")
@pytest.mark.parametrize("place", [100, -1])
def test_both_ends_of_a_large_file_are_always_compared(tmp_path: Path, place: int) -> None:
    data = large(tmp_path)
    before, path = fingerprint_of(data), tmp_path / "imagesTr/b.nii"
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"^resume: images .*\bb\b"):
        refuse_other_data(before, fingerprint_of(data))


def test_a_copy_within_train_is_no_leak(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    shutil.copy(tmp_path / "imagesTr/a.nii.gz", tmp_path / "imagesTr/b.nii.gz")
    assert checked(data) == []


def test_cases_that_cannot_be_read_are_not_taken_for_each_other(tmp_path: Path) -> None:
    data, seen, unseen = held_out(tmp_path)
    seen.unlink(), unseen.unlink()
    assert told(checked(data), [[f"case1: {seen}: "], [f"case3: {unseen}: "]])


def test_the_summary_is_plain(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    write(tmp_path / "imagesTr/b.nii.gz", image((8, 9, 7)), np.diag([1, 1, 3, 1]))
    dataset = read_dataset(data)
    wanted = [
        ["Small: 4 ", " 3 train", " 1 val", " 0 "],
        ["channels: CT"],
        ["classes: 0 background, 1 organ, 2 tumour"],
        ["orientation: 3 LPS, 1 RAS", "x, y, z", "data.patch", "RAS"],
        ["size x, y, z (voxels): 6 x 5 x 4 ", " 6 x 5 x 4 ", " 8 x 9 x 7"],
        ["spacing x, y, z (mm): 1 x 1.5 x 2.5 ", " 1 x 1 x 2.5 ", " 1 x 1.5 x 3"],
    ]
    assert told(summary(dataset, *split(dataset, data), check_cases(dataset, dataset.cases, data).headers), wanted)


def test_the_summary_survives_files_that_cannot_be_read(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    data.ignore = 255
    dataset = read_dataset(data)
    shutil.rmtree(tmp_path / "imagesTr")
    lines = summary(dataset, *split(dataset, data), check_cases(dataset, dataset.cases, data).headers)
    names = ("orientation: ", "size x, y, z (voxels): ", "spacing x, y, z (mm): ")
    wanted = [["classes: 0 background, 1 organ, 2 tumour", " 255 "], *([name, "unknown"] for name in names)]
    assert told(lines[2:], wanted)


def test_a_dry_run_says_that_a_patch_does_not_suit(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    given = ["data=decathlon", f"data.root={data.root}", "data.patch=[32,32,32]", "model=unet_tiny", "dry_run=true"]
    ended = train(tmp_path, *given)
    lines = [line for line in ended.err.splitlines() if line.startswith(f"{WARNING}data.patch")]
    assert ended.code == 0 and told(lines, [[f"{WARNING}data.patch=[32, 32, 32]: ", "6x5x4"]])


VALID = ["data.patch=[116,116,116]", "model.padding=valid", "model.features=[4,8,16]"]


@without("unet3d.data.check.MIN_PATCH_FILL", 0.0, only="(80, 72, 8)-['data.patch=[64,64,32]']")
@pytest.mark.parametrize(
    ("shape", "words", "parts"),
    [
        ((80, 72, 8), ["data.patch=[64,64,32]"], [" 25% ", "80x72x8"]),
        ((64, 64, 32), ["model=cicek2016", "data.patch=[108,108,108]"], None),
        ((35, 51, 35), ["data.patch=[40,56,40]"], None),
        ((40, 40, 8), VALID, [" 3% ", "76x76x76"]),
        ((40, 40, 8), ["data.patch=[64,64,64]", "model.path=own.nets:mine"], [" 5% "]),
        ((80, 72, 8), ["data.patch=[64,64,32]", "data.spacing=[1,1,0.25]"], None),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_patch_that_is_mostly_padding_is_said(
    tmp_path: Path, shape: tuple[int, int, int], words: list[str], parts: list[str] | None
) -> None:
    decathlon(tmp_path)
    for name in "abcd":
        write(tmp_path / f"imagesTr/{name}.nii.gz", np.zeros(shape, np.uint8), np.eye(4))
    config = compose.compose(["data=decathlon", f"data.root={tmp_path}", *words])
    line = mostly_padding(
        config.model, config.data.patch, read_grids(read_dataset(config.data).cases, config.data.spacing)
    )
    assert (line is None) == (parts is None) and holds(line or "", parts or [])


def test_check_data_and_a_run_say_that_a_patch_does_not_suit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["data.patch=[32,32,32]", "data.phantom.shape=[16,20,16]", "data.phantom.cases=4", "model=unet_tiny"]
    given.append(f"data.root={tmp_path / 'p'}")
    wanted = [f"{WARNING}data.patch=[32, 32, 32]: ", "16x20x16", " 16% "]
    assert face("check-data", *given) == 0
    found = capsys.readouterr().out.splitlines()
    assert told([line for line in found if line.startswith(WARNING)], [wanted]) and " 1 " in found[-1]
    ended = train(tmp_path, *given, "steps=1", "model.features=[2,4]", "batch=1", "workers=0")
    lines = [line for line in ended.err.splitlines() if line.startswith(f"{WARNING}data.patch")]
    assert ended.code == 0 and told(lines, [wanted])
