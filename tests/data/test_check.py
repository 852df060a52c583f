"""Every fault of a data set is listed at once, with case and path; a sound data set gets no line."""

import gzip
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from nifti_files import (
    FLIPPED,
    LPS,
    NOISY,
    SHIFTED,
    case,
    changed,
    checked,
    decathlon,
    errors,
    image,
    label,
    rewrite,
    write,
    write_header,
)
from training import face, train

from unet3d import build, compose
from unet3d.config import Config, Data, Phantom
from unet3d.data import nifti
from unet3d.data.cases import read_dataset, split
from unet3d.data.check import WARNING, suitable_options, summary, unsuitable_patch
from unet3d.errors import UserError
from unet3d.run.resume import DatasetFingerprint, fingerprint, refuse_other_data

PAGE = b"<!DOCTYPE html>" + b"not found " * 100


@pytest.mark.parametrize("full", [False, True])
def test_the_phantom_has_no_problem(tmp_path: Path, full: bool) -> None:
    assert checked(Data(root=str(tmp_path), phantom=Phantom(cases=3, shape=[16, 16, 16])), full) == []


AXES = "the axes x, y, z of size, spacing and data.patch run right, anterior, superior (RAS)"


def damaged(root: Path) -> tuple[Data, list[str]]:
    """A data set with a fault in every case, and the line for each fault."""
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
    resample, end = (
        "resample it onto the image's grid",
        "Compressed file ended before the end-of-stream marker was reached",
    )
    return data, [
        f"a: {images['a']}: no such file; restore it or remove the case",
        f"a: {labels['a']}: is empty; replace the file",
        f"b: {images['b']}: 120 voxels are NaN or infinite; give them a value, e.g. the background's",
        f"b: {labels['b']}: 120 voxels have the label 7; allowed are 0 to 2; relabel them",
        f"c: {labels['c']}: has (6, 5, 3) voxels, not the (6, 5, 4) of {images['c']}; {resample}",
        f"d: {images['d']}: has 2 channels, the data set 1 (CT); make them agree",
        f"e: {images['e']}: damaged ({end}); replace the file",
        f"f: {images['f']}: is not gzip-compressed despite its name; rename or replace it",
        f"f: {labels['f']}: not readable as NIfTI (no NIfTI-1 or NIfTI-2 header); replace the file",
        f"g: {images['g']}: not readable as NIfTI ({end}); replace the file",
    ]


def test_all_problems_of_all_cases_are_listed_at_once(tmp_path: Path) -> None:
    data, lines = damaged(tmp_path)
    assert errors(checked(data)) == lines
    assert checked(data, full=False) == [line for line in lines if line[0] not in "be"], "headers alone show these"


def test_check_data_and_a_run_list_every_problem_and_end_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, lines = damaged(tmp_path / "set")
    words = ["data=decathlon", f"data.root={data.root}"]
    assert face("check-data", *words) == 2
    out = capsys.readouterr().out.splitlines()
    assert out[-1].startswith(f"{len(lines)} problems, ") and not {*lines} - {*out}
    done = train(tmp_path, *words, "device=cpu")
    assert done.code == 2 and "Traceback" not in done.err
    assert all(line in done.err for line in lines if line[0] not in "be"), "headers are read before anything else"


@pytest.mark.parametrize("intensity", ["zscore", "ct"])
def test_a_run_lists_all_that_is_damaged_beneath_sound_headers(tmp_path: Path, intensity: str) -> None:
    """For CT, while the scale is measured."""
    data = decathlon(tmp_path)
    data.intensity = intensity
    paths = [tmp_path / f"imagesTr/{name}.nii.gz" for name in "ab"]
    paths[0].write_bytes(paths[0].read_bytes()[:-1])
    write(paths[1], np.full((6, 5, 4), np.nan, np.float32))
    with pytest.raises(UserError) as caught:
        build.data(Config(data=data))
    assert [line.split(": ")[:2] for line in str(caught.value).splitlines()] == [[p.name[0], str(p)] for p in paths]


def test_the_quick_pass_reads_no_voxel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = decathlon(tmp_path)
    monkeypatch.setattr(nifti, "read_array", lambda *_: 1 / 0)
    assert checked(data, full=False) == []
    with pytest.raises(ZeroDivisionError):
        checked(data, full=True)


def test_a_split_that_cannot_be_made_is_listed_with_the_rest(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    (tmp_path / "imagesTr/a.nii.gz").unlink()
    data.split = str(tmp_path / "split.json")
    assert [line.split(": ")[0] for line in checked(data)] == ["a", data.split]


@pytest.mark.parametrize(
    ("voxels", "ignore", "what"),
    [
        *(
            (changed(label(), value), None, f"1 voxels have the label {value:g}; allowed are 0 to 2")
            for value in (7, -1)
        ),
        *(
            (changed(label(), value), None, f"1 voxels have the label {value:g}")
            for value in (255, 1.5, np.nan, np.inf, 0.9999, 1.001)
        ),
        (changed(label(), 254), 255, "1 voxels have the label 254; allowed are 0 to 2 and 255 (ignored)"),
        (
            np.stack([label() == k for k in range(3)], -1).astype(np.uint8),
            None,
            "has shape (6, 5, 4, 3); a label map is",
        ),
        (changed(label(), 255), 255, None),
        (label().astype(np.float64), None, None),
    ],
    ids=["7", "-1", "255", "1.5", "nan", "inf", "0.9999", "1.001", "254", "one-hot", "ignored", "float"],
)
def test_a_label_map_holds_classes_and_the_ignored_value(
    tmp_path: Path, voxels: np.ndarray, ignore: int | None, what: str | None
) -> None:
    data = decathlon(tmp_path)
    data.ignore, data.nonfinite = ignore, "zero"  # which concerns intensities alone
    path = write(tmp_path / "labelsTr/a.nii.gz", voxels)
    lines = errors(checked(data))
    assert bool(lines) == bool(what) and all(line.startswith(f"a: {path}: {what}") for line in lines[:1])
    if what:
        with pytest.raises(UserError) as caught:
            build.data(Config(data=data))
        assert str(caught.value).startswith(lines[0])  # and names a map that suits the file


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("voxels", "where", "what", "accepted"),
    [
        (label((6, 5, 3)), LPS, "has (6, 5, 3) voxels, not the (6, 5, 4) of", False),
        (label(), SHIFTED, "lies up to 1 voxels away from", True),
        (label(), FLIPPED, "lies up to 10 voxels away from", True),
        (label(), NOISY, None, True),
    ],
    ids=["size", "shifted", "flipped", "rounded"],
)
def test_a_label_map_elsewhere_is_an_error_or_by_choice_a_warning(
    tmp_path: Path, voxels: np.ndarray, where: np.ndarray, what: str | None, accepted: bool, full: bool
) -> None:
    data = decathlon(tmp_path)
    path = write(tmp_path / "labelsTr/a.nii.gz", voxels, where)
    line = f"a: {path}: {what} {tmp_path / 'imagesTr/a.nii.gz'}; resample it onto the image's grid"
    assert checked(data, full) == ([line] if what else [])
    data.affine_check = "warn"
    assert checked(data, full) == ([WARNING * accepted + line] if what else [])


def test_a_fourth_axis_must_match_the_channels(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    write(tmp_path / "imagesTr/a.nii.gz", image((6, 5, 4, 1)))
    assert checked(data) == []


def odd(path: Path, kind: str) -> None:
    stored, slanted = nib.Nifti1Image(image(), LPS), LPS.copy()
    slanted[0, 1] = 0.5
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


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("sheared", "its grid is sheared; it is used as if its axes were at right angles"),
        ("unplaced", "neither sform nor qform is set: which side is left is a guess; set one"),
        ("twofold", "sform and qform differ; the sform is used"),
        ("bent", "its qform is no rotation; the sform is used"),
        ("metres", "lengths are in meter; they are taken for mm, in data.spacing and in distances"),
        ("yards", "lengths are in a unit of code 7; they are taken for mm, in data.spacing and in distances"),
    ],
)
def test_odd_headers_are_warned_of_with_the_rule_that_is_followed(
    tmp_path: Path, kind: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = decathlon(tmp_path)
    path = tmp_path / "imagesTr/a.nii.gz"
    odd(path, kind)
    write(tmp_path / "labelsTr/a.nii.gz", label(), nib.load(path).affine)
    assert [line for line in checked(data) if "imagesTr" in line] == [f"{WARNING}a: {path}: {what}"]
    is_of_units = kind in ("metres", "yards")
    assert checked(data, full=False) == [f"{WARNING}a: {path}: {what}"] * is_of_units, "a run starts all the same"
    build.data(Config(data=data))
    assert capsys.readouterr().err.count(what) == is_of_units
    if kind == "twofold":
        ready = build.data(Config(data=data))
        assert np.array_equal(ready.read.raw(ready.train[0]).image[0], image()[::-1, ::-1]), "the sform's LPS, turned"


def test_a_case_without_a_label_is_warned_of(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    path = tmp_path / "dataset.json"
    content = json.loads(path.read_text())
    del content["training"][0]["label"]
    path.write_text(json.dumps(content))
    start = f"{WARNING}a: {tmp_path / 'imagesTr/a.nii.gz'}: has no label map"
    assert [line.split(";")[0] for line in checked(data)] == [start]


def test_a_case_and_a_part_without_a_class_are_warned_of(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    paths = {name: tmp_path / f"labelsTr/{name}.nii.gz" for name in "abcd"}
    write(paths["a"], np.zeros((6, 5, 4), np.uint8))
    for name in "bd":
        write(paths[name], label(classes=2))
    lines = [
        f"{WARNING}a: {paths['a']}: has no foreground",
        f"{WARNING}Small: tumour in no train case; its score will mean nothing there",
    ]
    assert checked(data) == lines
    write(paths["c"], label(classes=2))
    assert checked(data) == [*lines, f"{WARNING}Small: tumour in no val case; its score will mean nothing there"]


def test_a_training_part_without_any_foreground_is_an_error(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    data.ignore = 3
    for name in "abd":
        write(tmp_path / f"labelsTr/{name}.nii.gz", label(classes=1) + 3 * (label(classes=2) > 0).astype(np.uint8))
    what = "no foreground in any training case; there is nothing to learn, check the label maps"
    assert errors(checked(data)) == [f"Small: {what}"]


def held_out(tmp_path: Path) -> tuple[Data, Path, Path]:
    """A data set with its split, one training image and the one held out."""
    data = decathlon(tmp_path)
    train, val = split(read_dataset(data), data)
    return data, train[0].images[0], val[0].images[0]


def link_by_a_folder(link: Path, target: Path) -> None:
    (link.parent.parent / "other").symlink_to(target.parent)
    link.symlink_to(link.parent.parent / "other" / target.name)


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to, link_by_a_folder])
@pytest.mark.parametrize("full", [False, True])
def test_a_link_from_val_to_train_is_an_error(tmp_path: Path, full: bool, link: Callable[[Path, Path], None]) -> None:
    data, seen, unseen = held_out(tmp_path)
    unseen.unlink()
    link(unseen, seen)
    assert checked(data, full) == [f"c: {unseen}: is held out, but training sees the same image as a; remove one"]


def test_the_same_voxels_in_train_and_val_are_an_error_whatever_the_files(tmp_path: Path) -> None:
    data, seen, unseen = held_out(tmp_path)
    stored = nib.load(seen)
    write(unseen, np.asanyarray(stored.dataobj).astype(np.float64), stored.affine)
    assert seen.read_bytes() != unseen.read_bytes()
    assert checked(data, full=False) == []
    assert checked(data) == [f"c: {unseen}: is held out, but training sees the same image as a; remove one"]


@pytest.mark.parametrize(("cache", "level"), [("memory", 9), ("memory", 1), ("disk", 9), ("disk", 1), ("off", 9)])
def test_a_run_refuses_a_held_out_image_that_it_learns_from(tmp_path: Path, cache: str, level: int) -> None:
    """By its voxels where they are kept, whatever the compression; else by the bytes of its file."""
    data, seen, unseen = held_out(tmp_path)
    data.cache, data.cache_root = cache, str(tmp_path / "cache")
    content = gzip.decompress(seen.read_bytes())
    seen.write_bytes(gzip.compress(content, 9))
    unseen.write_bytes(gzip.compress(content, level))
    with pytest.raises(UserError) as caught:
        build.data(Config(data=data))
    assert str(caught.value) == f"c: {unseen}: is held out, but training sees the same image as a; remove one"
    data.semi, data.sparse = True, [2, 2, 2]
    assert len(build.data(Config(data=data)).val) == 4, "other slices of the same images are scored on purpose"


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
    content[50_000] ^= 1
    path.write_bytes(content)


def grounds(data: Data) -> DatasetFingerprint:
    return fingerprint(build.data(Config(data=data)), None)


def test_images_whose_samples_agree_are_compared_as_a_whole(tmp_path: Path) -> None:
    data = large(tmp_path)
    shutil.copy(tmp_path / "imagesTr/a.nii", tmp_path / "imagesTr/c.nii")
    with pytest.raises(UserError, match="training sees the same image as a"):
        build.data(Config(data=data))
    change_unsampled(tmp_path / "imagesTr/c.nii")
    build.data(Config(data=data))


def test_a_resumed_run_refuses_images_and_labels_that_changed(tmp_path: Path) -> None:
    data = decathlon(tmp_path / "set")
    before = grounds(data)
    shutil.copytree(tmp_path / "set", tmp_path / "moved", copy_function=shutil.copyfile)
    data.root = str(tmp_path / "moved")
    refuse_other_data(before, grounds(data))
    a, b = (tmp_path / f"moved/labelsTr/{name}.nii.gz" for name in "ab")
    swapped = b.read_bytes(), a.read_bytes()
    a.write_bytes(swapped[0]), b.write_bytes(swapped[1])
    end = "changed since the run began; put the old files back, or start a new run"
    with pytest.raises(UserError) as caught:
        refuse_other_data(before, grounds(data))
    assert str(caught.value) == f"resume: labels of a, b {end}"
    write(tmp_path / "moved/imagesTr/c.nii.gz", image(seed=9))
    with pytest.raises(UserError) as caught:
        refuse_other_data(before, grounds(data))
    assert str(caught.value) == f"resume: images of c, labels of a, b {end}"
    older = grounds(data)
    del older["files"]
    refuse_other_data(older, grounds(data))


def test_bytes_between_the_sampled_ones_are_compared_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a file that was written since is warned of, unless the checksum at its end settles it."""
    data, before = large(tmp_path), {}
    for data.fingerprint in ("sample", "full"):
        before[data.fingerprint] = grounds(data)
    for path in (tmp_path / "imagesTr/a.nii", tmp_path / "labelsTr/d.nii.gz"):
        assert path.stat().st_size > 2**16
        os.utime(path, ns=(0, 0))
    refuse_other_data(before["full"], grounds(data))
    assert capsys.readouterr().err == "", "all bytes are the same"
    change_unsampled(tmp_path / "imagesTr/b.nii")
    os.utime(tmp_path / "imagesTr/b.nii", ns=(0, 0))
    with pytest.raises(UserError, match="resume: images of b changed since the run began"):
        refuse_other_data(before["full"], grounds(data))
    what = "times changed, and a sample of the bytes is the same; a run with data.fingerprint=full compares all"
    refuse_other_data(before["sample"], grounds(data))
    assert capsys.readouterr().err == f"warning: resume: files of a, b: {what}\n"
    data.fingerprint = "sample"
    refuse_other_data(before["full"], grounds(data))
    assert what in capsys.readouterr().err


@pytest.mark.parametrize("place", [100, -1])
def test_both_ends_of_a_large_file_are_always_compared(tmp_path: Path, place: int) -> None:
    data = large(tmp_path)
    before, path = grounds(data), tmp_path / "imagesTr/b.nii"
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="resume: images of b changed since the run began"):
        refuse_other_data(before, grounds(data))


def test_a_copy_within_train_is_no_leak(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    shutil.copy(tmp_path / "imagesTr/a.nii.gz", tmp_path / "imagesTr/b.nii.gz")
    assert checked(data) == []


def test_cases_that_cannot_be_read_are_not_taken_for_each_other(tmp_path: Path) -> None:
    data, seen, unseen = held_out(tmp_path)
    seen.unlink(), unseen.unlink()
    assert [line.split(": ")[2] for line in checked(data)] == ["no such file; restore it or remove the case"] * 2


def test_the_summary_is_plain(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    write(tmp_path / "imagesTr/b.nii.gz", image((8, 9, 7)), np.diag([1, 1, 3, 1]))
    dataset = read_dataset(data)
    assert summary(dataset, *split(dataset, data)) == [
        "Small: 4 cases: 3 train, 1 val, 0 without labels",
        "channels: CT",
        "classes: 0 background, 1 organ, 2 tumour",
        f"orientation: 3 LPS, 1 RAS; {AXES}",
        "size x, y, z (voxels): 6 x 5 x 4 (median), from 6 x 5 x 4 to 8 x 9 x 7",
        "spacing x, y, z (mm): 1 x 1.5 x 2.5 (median), from 1 x 1 x 2.5 to 1 x 1.5 x 3",
    ]


def test_the_summary_survives_files_that_cannot_be_read(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    data.ignore = 255
    dataset = read_dataset(data)
    shutil.rmtree(tmp_path / "imagesTr")
    lines = summary(dataset, *split(dataset, data))
    assert lines[2] == "classes: 0 background, 1 organ, 2 tumour; 255 is ignored"
    wanted = [f"orientation: unknown; {AXES}", "size x, y, z (voxels): unknown", "spacing x, y, z (mm): unknown"]
    assert lines[3:] == wanted


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], "data.spacing=[1.2,1.0,3.0] model.kernels=auto model.strides=auto data.patch=[80,72,12]"),
        (["data.spacing=[1,1,1]"], ""),
        (["data.spacing=[1,1,3]", "model.kernels=auto", "model.strides=auto"], ""),
        (["model=cicek2016", "data.patch=[108,108,108]"], ""),
        (["model.path=own.nets:mine"], ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_options_that_suit_are_named_and_then_there_are_none(tmp_path: Path, words: list[str], options: str) -> None:
    data = decathlon(tmp_path)
    for name, mm in zip("abcd", (2, 3, 3, 3.3), strict=True):
        write(tmp_path / f"imagesTr/{name}.nii.gz", np.zeros((80, 72, 12), np.uint8), np.diag([1.2, 1, mm, 1]))
    given, cases = ["data=decathlon", f"data.root={data.root}", "model.features=[4,8,16]"], read_dataset(data).cases
    given = [word for word in given if not (words and words[0] == "model=cicek2016" and "features" in word)]
    assert " ".join(suitable_options(compose.compose([*given, *words]), cases)) == options
    if options:
        assert suitable_options(compose.compose([*given, *words, *options.split()]), cases) == []


def test_a_dry_run_says_that_a_patch_does_not_suit(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    given = ["data=decathlon", f"data.root={data.root}", "data.patch=[32,32,32]", "model=unet_tiny", "dry_run=true"]
    ended = train(tmp_path, *given)
    assert ended.code == 0 and "warning: data.patch=[32, 32, 32]: volumes of 6x5x4 voxels" in ended.err


@pytest.mark.parametrize(
    ("shape", "words", "advice"),
    [
        (
            (80, 72, 8),
            ["data.patch=[64,64,32]"],
            "fill 25% of it, the rest is padding; data.patch=[80,72,8] suits them",
        ),
        ((300, 300, 9), ["data.patch=[64,64,32]"], "28% of it, the rest is padding; data.patch=[88,88,16] suits them"),
        ((35, 51, 35), ["data.patch=[64,64,64]"], "24% of it, the rest is padding; data.patch=[40,56,40] suits them"),
        ((17, 17, 17), ["data.patch=[64,64,64]"], "2% of it, the rest is padding; data.patch=[16,16,16] suits them"),
        (
            (35, 51, 35),
            ["data.patch=[96,96,96]", "model.features=[2,4,8,16,32]"],
            "7% of it, the rest is padding; data.patch=[32,48,32] suits them",
        ),
        ((64, 64, 32), ["model=cicek2016", "data.patch=[108,108,108]"], None),
        ((35, 51, 35), ["data.patch=[40,56,40]"], None),
        (
            (80, 72, 5),
            ["data.patch=[64,64,32]", "model.features=[4,8,16,32]"],
            "16% of it, the rest is padding; data.patch=[80,72,8]",
        ),
        (
            (40, 40, 8),
            ["data.patch=[116,116,116]", "model.padding=valid", "model.features=[4,8,16]"],
            "fill 3% of its output of 76x76x76, the rest is padding; give a smaller one",
        ),
        ((40, 40, 8), ["data.patch=[64,64,64]", "model.path=own.nets:mine"], "the rest is padding; give a smaller one"),
        ((80, 72, 8), ["data.patch=[64,64,32]", "data.spacing=[1,1,0.25]"], None),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_patch_that_is_mostly_padding_is_said_with_one_that_suits(
    tmp_path: Path, shape: tuple[int, int, int], words: list[str], advice: str | None
) -> None:
    data = decathlon(tmp_path)
    for name in "abcd":
        write(tmp_path / f"imagesTr/{name}.nii.gz", np.zeros(shape, np.uint8), np.eye(4))
    config = compose.compose(["data=decathlon", f"data.root={tmp_path}", *words])
    line = unsuitable_patch(config, read_dataset(config.data).cases)
    assert (line is None) == (advice is None) and (advice or "") in (line or "")
    if found := re.search(r"data.patch=\[[\d,]+\] suits", line or ""):
        other = compose.compose([*words, "data=decathlon", f"data.root={data.root}", found.group().split()[0]])
        assert unsuitable_patch(other, read_dataset(config.data).cases) is None
        assert math.prod(other.data.patch) <= math.prod(config.data.patch)


def test_check_data_and_a_run_say_that_a_patch_does_not_suit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["data.patch=[32,32,32]", "data.phantom.shape=[16,20,16]", "data.phantom.cases=4", "model=unet_tiny"]
    wanted = "warning: data.patch=[32, 32, 32]: volumes of 16x20x16 voxels, the median in training, fill 16% of it"
    assert face("check-data", *given, f"data.root={tmp_path / 'p'}") == 0
    found = capsys.readouterr().out
    assert wanted in found and "no problems, 1 warning" in found
    ended = train(
        tmp_path, *given, f"data.root={tmp_path / 'p'}", "steps=1", "model.features=[2,4]", "batch=1", "workers=0"
    )
    assert ended.code == 0 and wanted in ended.err
