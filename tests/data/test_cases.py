"""Each layout read from real files, and one clear refusal for each way that it can be wrong."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from guards import no, unchanged, without, yes
from nifti_files import (
    WARNING,
    checked,
    decathlon,
    errors,
    folders,
    holds,
    image,
    label,
    nnunet,
    refusal,
    rewrite,
    told,
    write,
)
from promises import promise
from tables import table
from training import ROOT, face

from unet3d import build
from unet3d.config import compose
from unet3d.config.schema import Data
from unet3d.data import texts
from unet3d.data.cases import Case, DatasetInfo, read_dataset
from unet3d.data.layouts.generated import phantom_outline
from unet3d.data.prepare import prepare_data
from unet3d.data.splits import split
from unet3d.data.volume import read_grid

OUTSIDE = "data.allow_outside=true"
ENTRY = {"image": "./imagesTr/a.nii.gz", "label": "./labelsTr/a.nii.gz"}


@promise("Data", "JSON and tables with ...")
def test_decathlons_layout(tmp_path: Path) -> None:
    """Cases are sorted by name, channels by number, and a class may be ignored."""
    data = decathlon(tmp_path, ("b", "a"))
    cases = tuple(Case(n, (tmp_path / f"imagesTr/{n}.nii.gz",), tmp_path / f"labelsTr/{n}.nii.gz") for n in "ab")
    assert read_dataset(data) == DatasetInfo("Small", ("CT",), cases, classes=("background", "organ", "tumour"))
    path = tmp_path / "dataset.json"
    for encoding in ("utf-8-sig", "utf-16"):  # as PowerShell writes it
        path.write_text(path.read_text(), encoding=encoding)
        assert read_dataset(data).cases == cases
        path.write_text(path.read_text(encoding=encoding))
    rewrite(tmp_path, modality={str(n): f"m{n}" for n in reversed(range(11))}, training=[{"image": "imagesTr/a.nii"}])
    rewrite(tmp_path, labels={"0": "background", "2": "unlabelled", "1": "organ"})
    channels, cases = tuple(f"m{n}" for n in range(11)), (Case("a", (tmp_path / "imagesTr/a.nii",), None),)
    found = read_dataset(replace(data, ignore=2))
    assert found == DatasetInfo("Small", channels, cases, ignore=2, classes=("background", "organ"))


def test_nnunets_layout(tmp_path: Path) -> None:
    dataset = read_dataset(nnunet(tmp_path))
    assert (dataset.name, dataset.channels) == (tmp_path.name, ("T1", "T2"))
    assert (dataset.classes, dataset.ignore) == (("background", "organ"), 2)
    assert [case.id for case in dataset.cases] == ["a", "b_0001", "c"]
    assert dataset.cases[1].images == tuple(tmp_path / f"imagesTr/b_0001_{c:04d}.nii.gz" for c in range(2))
    maps = [tmp_path / "labelsTr/a.nii.gz", tmp_path / "labelsTr/b_0001.nii.gz", None]
    assert [case.label for case in dataset.cases] == maps


def test_folders_match_names_whatever_their_ending(tmp_path: Path) -> None:
    images = "a.nii,a_2019.nii,b_0000.nii.gz,scan_2019.nii,x_2019.nii,x_2020.nii"
    dataset = read_dataset(folders(tmp_path / "one", images, "a.nii.gz,b.nii,scan_2019.nii"))
    assert (dataset.name, dataset.channels, dataset.ignore) == ("one", ("channel_0",), 255)
    assert dataset.classes == ("background", "organ", "tumour")
    assert [(case.id, case.images[0].name, case.label and case.label.name) for case in dataset.cases] == [
        ("a", "a.nii", "a.nii.gz"),
        ("a_2019", "a_2019.nii", None),
        ("b", "b_0000.nii.gz", "b.nii"),
        ("scan_2019", "scan_2019.nii", "scan_2019.nii"),
        ("x_2019", "x_2019.nii", None),
        ("x_2020", "x_2020.nii", None),
    ]
    numbered = read_dataset(folders(tmp_path / "numbered", "c_0000.nii,c_0001.nii,c_0002.nii", "c_0000.nii,c_0002.nii"))
    assert [case.id for case in numbered.cases] == ["c_0000", "c_0001", "c_0002"]


def test_folders_with_several_channels(tmp_path: Path) -> None:
    dataset = read_dataset(folders(tmp_path, "a_0001.nii,a_0000.nii", "a.nii"))
    assert dataset.channels == ("channel_0", "channel_1")
    assert [path.name for path in dataset.cases[0].images] == ["a_0000.nii", "a_0001.nii"]
    assert read_dataset(folders(tmp_path / "4d", "a.nii", "a.nii", (6, 5, 4, 3))).channels[2] == "channel_2"


WRONG = r"""
decathlon | {"training": []} | lists no case
decathlon | {"training": null} | "training" | list
decathlon | {"training": ["./imagesTr/a.nii.gz"]} | "training" | "image" | "label"
decathlon | {"training": [{"label": "x.nii"}]} | "training" | "image" | "label"
decathlon | {"training": [{"image": "a.nii.gz"}, {"image": "b/a.nii"}]} | called a
decathlon | {"training": [{"image": "imagesTr/\u001b[2J.nii"}]} | 'imagesTr/\x1b[2J.nii' | data.allow_outside=true
decathlon | {"training": [{"image": "imagesTr/\ud800.nii"}]} | 'imagesTr/\ud800.nii' | data.allow_outside=true
decathlon | {"training": [{"image": "LONG"}]} | aaa' | data.allow_outside=true
decathlon | {"training": [{"image": ".\\imagesTr\\a.nii.gz"}]} | backslashes | write /
decathlon | {"training": [{"image": "../x.nii.gz"}]} | '../x.nii.gz' | ROOT; | data.allow_outside=true
decathlon | {"training": [{"image": "imagesTr/../imagesTr/a.nii.gz"}]} | a path inside ROOT; | data.allow_outside=true
decathlon | {"training": [{"image": "ROOT/a.nii"}]} | 'ROOT/a.nii' | data.allow_outside=true
decathlon | {"training": [{"image": "a.nii", "label": "/etc/x.nii"}]} | '/etc/x.nii' | data.allow_outside=true
decathlon | {"training": [{"image": 7}]} | 7 is not a path | data.allow_outside=true
decathlon | {"labels": null} | "labels" | object
decathlon | {"labels": {"0": "background", "2": "organ"}} | [0, 2] | data.label_map={1:2}
decathlon | {"labels": {"background": 0, "organ": 1}} | 'background': 0 | {"0":
decathlon | {"labels": {"0": "background"}} | ['background']
decathlon | {"labels": {"0": "background", "1": "organ", "2": "organ"}} | ['background', 'organ', 'organ']
decathlon | {"labels": {"0": "background", "1": "or\rgan"}} | labels | 'or\rgan'
decathlon | {"labels": {"0": "background", "1": "organ "}} | labels | 'organ ' | write 'organ'
decathlon | {"labels": {"0": "background", "1": ""}} | labels | '' is blank
decathlon | {"labels": {"0": "background", "1": "a", "01": "b"}} | labels | '01': 'b' | '1': 'a'
decathlon | {"labels": {"0": "background", "1": "LONG"}} | "labels" | 1,000,000 | 250
decathlon | {"modality": {"1": "CT"}} | modality | [1]
decathlon | {"modality": {"0": {"a": 1}}} | modality | {'a': 1}
decathlon | {"modality": null, "channel_names": {"0": "CT"}} | data=nnunet
decathlon | {"name": ["a"]} | "name" | ['a']
decathlon | {"name": "LONG"} | "name" | 1,000,000 | 250
decathlon | {"name": "a\nb"} | "name" | 'a\nb'
nnunet | {"labels": {"background": 0, "whole": [1, 2], "core": 2}} | "regions_class_order" | [1, 2]
nnunet | {"labels": {"background": 0, "ignore": 1, "organ": 2}} | 1 is the label to ignore | (2)
nnunet | {"labels": {"background": 0, "organ": 1, "ignore": 65536}} | 65536 | 65535
nnunet | {"labels": {"background": 0, "organ": 1, "tumour": 1}} | 'organ': 1 | 'tumour': 1
nnunet | {"labels": {"0": "background", "1": "organ"}} | {"background": 0, "organ": 1}
nnunet | {"labels": {"organ": 0, "Background": 1}} | label 1 is called Background | swap
nnunet | {"labels": {"background": 0, "organ": true}} | 'organ'
nnunet | {"labels": {"background": 0, "organ": ["1"]}} | 'organ'
nnunet | {"labels": {"background": 0, "LONG": 1}} | "labels" | 1,000,000 | 250
nnunet | {"channel_names": null} | "channel_names" | object
nnunet | {"file_ending": "nii.gz"} | "file_ending" | 'nii.gz'; write '.nii.gz' or '.nii'
nnunet | {"file_ending": null} | "file_ending" | string
"""


@promise("data sets", "dataset.json is bounded in ...")
@promise("data sets", "paths in dataset.json, and links, do not leave `data.root`, unless `data.allow_outside=true`")
@promise("Data", "nnU-Net v1's layout, Decathlon's ...")
@promise("Data", "dataset.json with thousands of ...")
@promise(
    "Data",
    "dataset.json with paths that lead outside, repeated ids, nothing, or bad JSON; a pipe or device in its place",
    "refused; paths outside are read with `data.allow_outside=true`",
)
@without("unet3d.data.layouts.stored.is_plain", yes, only='"name": "a')
@pytest.mark.parametrize(("layout", "changes", "parts"), table(WRONG, 2))
def test_a_wrong_dataset_json_is_refused(tmp_path: Path, layout: str, changes: str, parts: list[str]) -> None:
    data = {"decathlon": decathlon, "nnunet": nnunet}[layout](tmp_path)
    rewrite(tmp_path, **json.loads(changes.replace("ROOT", str(tmp_path)).replace("LONG", "a" * 10**6)))
    wanted = [part.replace("ROOT", str(tmp_path)) for part in parts]
    assert told([refusal(data)], [[str(tmp_path / "dataset.json"), *wanted]])


# A data set that could be read, but for the name that is there twice.
REPEATED = b"""{"name": "a", "name": "b", "modality": {"0": "CT"}, "labels": {"0": "background", "1": "organ"},
"training": [{"image": "a.nii"}]}"""


@promise(
    "data sets",
    "dataset.json is bounded in size, its names in length, and what is said of it in lines; its names cannot "
    "command a terminal",
)
@promise("Data", "dataset.json with paths that ...")
@without("unet3d.data.texts.MAX_BYTES", 2**25, only="large")
@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "data/README.md"),
        (b"{", "Expecting"),  # json's word
        (b"[1]", "{...}"),
        (b"\xff\x00", "utf-8"),
        (b"[" * 100_000, "recursion"),
        (REPEATED, "JSON"),
        (b"{}" + b" " * texts.MAX_BYTES, "16,777,216"),
    ],
    ids=["absent", "cut", "list", "binary", "deep", "repeated", "large"],
)
def test_unreadable_json_is_refused_with_its_path(tmp_path: Path, content: bytes | None, part: str) -> None:
    if content is not None:
        (tmp_path / "dataset.json").write_bytes(content)
    assert told([refusal(Data(format="decathlon", root=str(tmp_path)))], [[f"{tmp_path / 'dataset.json'}: ", part]])


@promise("Data", "dataset.json with paths that ...")
@pytest.mark.parametrize("target", [None, "/dev/zero", "dataset.json"], ids=["pipe", "device", "circle"])
def test_json_that_is_no_file_is_refused_at_once(tmp_path: Path, target: str | None) -> None:
    where = tmp_path / "dataset.json"
    if target is None:
        os.mkfifo(where)
    else:
        where.symlink_to(target)
    text = refusal(Data(format="decathlon", root=str(tmp_path), allow_outside=target == "/dev/zero"))
    assert told([text], [[f"{where}: "]])
    assert f"{texts.MAX_BYTES:,}" not in text, "it is not even read"


@promise("data sets", "paths in dataset.json, and ...")
@promise("Data", "dataset.json with paths that ...")
@without("unet3d.data.layouts.stored.leaves", no, only="link")
@pytest.mark.parametrize("name", ["{outside}/x.nii.gz", "link/x.nii.gz"])
def test_a_path_out_of_the_root_is_read_only_with_allow_outside(tmp_path: Path, name: str) -> None:
    data, outside = decathlon(tmp_path / "set"), tmp_path / "elsewhere"
    write(outside / "x.nii.gz", image())
    (tmp_path / "set" / "link").symlink_to(outside)
    b = {"image": "imagesTr/b.nii.gz", "label": "labelsTr/b.nii.gz"}
    rewrite(tmp_path / "set", training=[ENTRY | {"image": name.replace("{outside}", str(outside))}, b])
    assert OUTSIDE in refusal(data)
    data.allow_outside = True
    assert [case.id for case in read_dataset(data).cases] == ["b", "x"]
    assert checked(data) == []


def test_links_that_stay_inside_and_a_linked_root_are_read(tmp_path: Path) -> None:
    decathlon(tmp_path / "set")
    (tmp_path / "set" / "linked").symlink_to(tmp_path / "set" / "imagesTr")
    rewrite(tmp_path / "set", training=[ENTRY | {"image": "linked/a.nii.gz"}])
    (tmp_path / "link").symlink_to(tmp_path / "set")
    assert read_dataset(Data(format="decathlon", root=str(tmp_path / "link"))).cases[0].id == "a"


@promise("data sets", "paths in dataset.json, and ...")
@without("unet3d.data.cases.leaves", no, only="labelsTr")
@pytest.mark.parametrize("linked", ["images/a.nii", "imagesTr", "labelsTr/a.nii.gz", "dataset.json"])
def test_a_link_out_of_the_root_is_refused_in_every_layout(tmp_path: Path, linked: str) -> None:
    root = tmp_path / "set"
    data = folders(root, "a.nii,b.nii", "a.nii,b.nii") if linked == "images/a.nii" else nnunet(root)
    found = read_dataset(data)
    shutil.move(root / linked, tmp_path / "elsewhere")
    (root / linked).symlink_to(tmp_path / "elsewhere")
    assert told([refusal(data)], [[str(root / linked), f" {root};", OUTSIDE]])
    data.allow_outside = True
    assert read_dataset(data) == found


@promise(
    "Data",
    "nnU-Net v1's layout, Decathlon's read as nnU-Net's, backslashes in paths",
    "refused with what to write",
)
@pytest.mark.parametrize("layout", ["decathlon", "nnunet"])
def test_the_layout_of_nnunet_v1_is_named_with_what_to_write(tmp_path: Path, layout: str) -> None:
    nnunet(tmp_path, channel_names=None, modality={"0": "CT"}, training=[ENTRY])
    rewrite(tmp_path, labels={"0": "background", "1": "organ"})
    parts = ["nnU-Net v1", '"channel_names": {"0": "CT"}', '"labels": {"background": 0, "organ": 1}']
    text = refusal(Data(format=layout, root=str(tmp_path)))
    assert told([text], [[f"{tmp_path / 'dataset.json'}: ", *parts, '"file_ending": ".nii.gz"', "data=nnunet"]])


@promise("Data", "nnU-Net v1's layout, Decathlon's ...")
def test_decathlons_layout_is_named_where_it_is_read_as_nnunets(tmp_path: Path) -> None:
    decathlon(tmp_path)
    assert refusal(Data(format="nnunet", root=str(tmp_path))).endswith("read it with data=decathlon")


@promise(
    "Data",
    "dataset.json with thousands of channels, a name of a million letters, such ids in a split; a case "
    "that lacks many files; thousands of problems",
    "bounded lines: one for the data set, at most 11 a case, 1,001 in all",
)
def test_channels_that_no_file_has_are_a_few_lines(tmp_path: Path) -> None:
    data = nnunet(tmp_path, channel_names={str(n): "MR" for n in range(300)})
    lines = [line for line in checked(data, full=False) if line.startswith("c: ")]
    assert len(lines) == 11 and " 288 " in lines[-1]
    rewrite(tmp_path, channel_names={str(n): "MR" for n in range(50_000)})
    assert holds(refusal(data), ['dataset.json: "channel_names"', " 50,000 ", " 3 cases", " 6;"])


def test_two_values_to_ignore_are_refused(tmp_path: Path) -> None:
    data = replace(nnunet(tmp_path), ignore=255)
    assert holds(refusal(data), ["data.ignore=255", f"{tmp_path / 'dataset.json'} ", " 2;"])
    rewrite(tmp_path, labels={"background": 0, "organ": 1})
    assert read_dataset(data).ignore == 255


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    data = nnunet(tmp_path)
    os.rename(tmp_path / "labelsTr", tmp_path / "labels")
    assert told([refusal(data)], [[f"{tmp_path / 'labelsTr'}: ", "data.root"]])


@promise("Data", ".NII.GZ; volumes of other formats; NIfTI files that no case has", "read; one warning that names them")
def test_endings_in_upper_case_are_read(tmp_path: Path) -> None:
    data = nnunet(tmp_path)
    before = [case.id for case in read_dataset(data).cases]
    for path in tmp_path.glob("*/[ab]*.nii*"):
        path.rename(path.with_name(path.name.replace(".nii", ".NII").replace(".gz", ".Gz")))
    assert [case.id for case in read_dataset(data).cases] == before
    assert not errors([line for line in checked(data) if "a: " in line])
    data, path = decathlon(tmp_path / "listed"), tmp_path / "listed/imagesTr/a.nii.gz"
    path.rename(path.with_suffix(".Gz"))
    assert told(checked(data, full=False), [[f"a: {path}: no such file, but a.nii.Gz is there"]])


@promise("Data", ".NII.GZ; volumes of other ...")
def test_volumes_that_are_left_out_are_named_once(tmp_path: Path) -> None:
    data, images = nnunet(tmp_path), tmp_path / "imagesTr"
    for name in ("x.nrrd", "y.MHA", "z.hdr", "z.img", "._w.mgz", "notes.txt", "v.dcm", "a_0002.nii"):
        (images / name).touch()
    nifti, other = read_dataset(data).left_out
    assert nifti.endswith(f"are not read: 1 ({images / 'a_0002.nii'})")
    assert holds(
        other, ["1 .nrrd (", "/x.nrrd)", "1 .mha (", "/y.MHA)", "1 .hdr/.img pair (", "1 .dcm (", "to .nii.gz"]
    )
    assert "txt" not in other and "mgz" not in other
    assert {f"{WARNING}{tmp_path.name}: {line}" for line in (nifti, other)} <= {*checked(data, full=False)}
    decathlon(tmp_path / "listed", ("a", "b"))
    rewrite(tmp_path / "listed", training=[ENTRY])
    assert read_dataset(Data("decathlon", str(tmp_path / "listed"))).left_out == (), (
        "of these, dataset.json is the list"
    )


@promise("what is printed and written", "names and values from ...")
@without("unet3d.base.errors.escaped", unchanged)
def test_what_a_run_says_of_them_cannot_command_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = decathlon(tmp_path / "set")
    (tmp_path / "set" / "imagesTr" / "x\x1b[2J.mha").touch()
    prepare_data(data)
    error = capsys.readouterr().err
    assert r"x\x1b[2J.mha" in error
    assert "\x1b" not in error


@promise("Data", ".NII.GZ; volumes of other ...")
def test_a_data_set_of_another_format_is_named(tmp_path: Path) -> None:
    data = folders(tmp_path, "a.nii", "a.nii")
    for folder, what in (("images", "no image of that name"), ("labels", "lists no case")):
        (tmp_path / folder / "a.nii").rename(tmp_path / folder / "a.hdr")
        (tmp_path / folder / "a.img").touch()
        assert told([refusal(data)], [[str(tmp_path / "labels"), what, "1 .hdr/.img pair"]])


@promise("Data", "two files of one ...")
def test_label_maps_that_are_called_as_channels_are_refused(tmp_path: Path) -> None:
    data = nnunet(tmp_path)
    for name in ("a", "b_0001"):
        path = tmp_path / f"labelsTr/{name}.nii.gz"
        path.rename(path.with_name(f"{name}_0000.nii.gz"))
    parts = ["without _0000", "rename it to a.nii.gz", "1 more"]
    assert told([refusal(data)], [[f"{tmp_path / 'labelsTr/a_0000.nii.gz'}: ", *parts]])


@promise("Data", "two files of one ...")
def test_files_that_end_otherwise_than_dataset_json_says_are_read(tmp_path: Path) -> None:
    data = nnunet(tmp_path, file_ending=".nii")
    assert not errors(checked(data, full=False))
    dataset = read_dataset(data)
    assert len(dataset.cases) == 3 and holds(dataset.left_out[0], ["dataset.json", "'.nii'", " 8 files "])


def test_folders_that_the_command_line_puts_outside_are_read(tmp_path: Path) -> None:
    data = folders(tmp_path / "set", "a.nii,b.nii", "a.nii,b.nii")
    shutil.move(tmp_path / "set" / "images", tmp_path / "elsewhere")
    for data.images in ("../elsewhere", str(tmp_path / "elsewhere")):
        assert len(read_dataset(data).cases) == 2


UNMATCHED = r"""
 |  | /labels: lists no case
a.nii | a.nii,b.nii,c.nii,d.nii | /labels/b.nii: | /images | c, d;
twin.nii | twin.nii,twin.NII.GZ | /labels: twin.NII.GZ and twin.nii | two
a_0000.nii,a_0000.nii.gz | a.nii | /images: a_0000.nii and a_0000.nii.gz | two
a_0000.nii,a_0002.nii | a.nii | a: | /images/a_0001 | /images/a_0002.nii | a_0000, a_0001
b.nii,a_0001.nii,a_0002.nii | a.nii,b.nii | /labels/a.nii: a_0000 is missing | /images
a.nii,b.nii | a_0000.nii,b.nii | /labels/a_0000.nii: | its case, a,
a_0000.nii,a_0001.nii | a_0000.nii | /labels/a_0000.nii: | rename it to a.nii
warning: a.nii,b.nii | b.nii | 'warning: a' cannot name a case
a\x1b[2J.nii | a\x1b[2J.nii | /labels: | 'a\x1b[2J'
"""


@promise("data sets", "dataset.json is bounded in ...")
@promise(
    "Data",
    "two files of one name; label maps named as channels; another `file_ending`",
    "refused with the name to give; read with a warning",
)
@without("unet3d.data.cases.is_plain", yes, only="x1b")
@pytest.mark.parametrize(("images", "labels", "parts"), table(UNMATCHED, 2))
def test_folders_that_do_not_match_are_refused(tmp_path: Path, images: str, labels: str, parts: list[str]) -> None:
    images, labels = (names.replace(r"\x1b", "\x1b") for names in (images, labels))
    assert holds(refusal(folders(tmp_path, images, labels)), parts)


@promise("data sets", "a case whose label map no file name could hold is refused before work begins")
@promise("Data", "case ids that no file name can hold", "refused at the start")
@without("unet3d.data.cases.MAX_NAME", 10**6)
@pytest.mark.parametrize("name", ["a" * 249, "ä" * 125], ids=["letters", "bytes"])
def test_a_name_must_leave_room_for_its_ending(tmp_path: Path, name: str) -> None:
    data = folders(tmp_path / "long", f"{name}.nii", f"{name}.nii")
    assert holds(refusal(data), [f" {len(name)} letters", ".nii.gz", "255"])
    data = folders(tmp_path / "short", f"{name[1:]}.nii", f"{name[1:]}.nii")
    assert read_dataset(data).cases[0].id == name[1:]


def test_a_channel_that_is_missing_is_named(tmp_path: Path) -> None:
    """The number of channels is that of most cases."""
    channels = "a_0000.nii,a_0001.nii,b_0000.nii,b_0001.nii,b_0002.nii,c_0000.nii,c_0001.nii,c_0002.nii"
    data = folders(tmp_path / "folders", channels, "a.nii,b.nii,c.nii")
    parts = [" 2 ", " 3 ", "(channel_0, channel_1, channel_2)", "a_0002"]
    assert told(checked(data, full=False), [[f"a: {tmp_path / 'folders/images/a_0000.nii'}: ", *parts]])
    data, absent = nnunet(tmp_path / "nnunet"), tmp_path / "nnunet/imagesTr/a_0001.nii.gz"
    absent.unlink()
    for full in (False, True):
        assert [line for line in checked(data, full) if line.startswith(f"a: {absent}: a_0001 ")]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["data.phantom.shape=[16,18,20]", "data.spacing=[1,1,5]", "model.kernels=auto", "model.strides=auto"],
        ["data.label_map={1:[1,2]}", "data.root=mine"],
    ],
    ids=["plain", "auto", "mapped"],
)
def test_the_phantom_is_known_before_it_is_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose.compose(["data.phantom.shape=[16,16,16]", "data.phantom.cases=2", *words])
    options = build.model_config_from_headers(config)
    outline = phantom_outline(config.data)
    assert list(tmp_path.iterdir()) == []
    dataset = read_dataset(config.data)
    first, *_ = split(dataset, config.data)[0]
    spacing = read_grid(first, config.data.spacing).spacing
    assert outline == dataset and options == build.model_options(config, dataset, spacing)
    assert all(path.is_relative_to(config.data.root or "data/phantom") for path in first.files)
    assert checked(config.data) == []


@pytest.mark.slow
def test_a_prediction_of_memory_generates_no_phantom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["data=phantom", "model=unet_tiny", "data.patch=[16,16,16]", "model.features=[4,8]"]
    assert face("memory", *words, "--below", "1GiB") == 0
    assert "peak" in capsys.readouterr().out
    assert face("memory", *words, "data.fold=0", "data.folds=99") == 2
    assert "data.folds=99" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_layout_of_the_docs_is_a_file_and_nothing_else(tmp_path: Path) -> None:
    """That of docs/extending.md, put into a copy of the package."""
    for name in ("unet3d", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    text = (ROOT / "docs/extending.md").read_text()
    ((place, code),) = re.findall(r"```python\n# (unet3d/data/layouts/\w+\.py)\n(.*?)```", text, re.S)
    (tmp_path / place).write_text(code)
    for number, name in enumerate("ab"):
        write(tmp_path / "set" / name / "image.nii.gz", image((12, 12, 12), number))
        write(tmp_path / "set" / name / "label.nii.gz", label((12, 12, 12), seed=number))
    command = [sys.executable, "-m", "unet3d", "check-data", "data.format=case_folders", "data.root=set"]
    command += ["data.patch=[16,16,16]", "data.classes=[background,organ,tumour]"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert holds(done.stdout, ["set: 2 cases: 1 train, 1 val, 0 without labels", "no problems"])
