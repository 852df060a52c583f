"""Each layout read from real files, one clear refusal for each way that it can be wrong, and the splits."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from guards import no, without, yes
from nifti_files import WARNING, checked, decathlon, errors, holds, image, label, rewrite, told, write
from promises import promise
from training import face

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.config import compose
from unet3d.config.schema import Data, Phantom
from unet3d.data import texts
from unet3d.data.cases import Case, DatasetInfo, read_dataset
from unet3d.data.layouts.generated import phantom_outline
from unet3d.data.prepare import prepare_data
from unet3d.data.splits import split, unused
from unet3d.data.volume import read_grid


def refusal(data: Data) -> str:
    with pytest.raises(UserError) as caught:
        read_dataset(data)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_decathlon_layout(tmp_path: Path) -> None:
    cases = tuple(Case(n, (tmp_path / f"imagesTr/{n}.nii.gz",), tmp_path / f"labelsTr/{n}.nii.gz") for n in "ab")
    found = read_dataset(decathlon(tmp_path, ("b", "a")))
    assert found == DatasetInfo("Small", ("CT",), cases, classes=("background", "organ", "tumour"))


def test_decathlon_with_an_ignored_label_and_a_case_without_one(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    labels, data.ignore = {"0": "background", "2": "unlabelled", "1": "organ"}, 2
    rewrite(tmp_path, labels=labels, training=[{"image": "imagesTr/a.nii"}])
    dataset = read_dataset(data)
    assert (dataset.classes, dataset.ignore) == (("background", "organ"), 2)
    assert dataset.cases == (Case("a", (tmp_path / "imagesTr/a.nii",), None),)


def test_modalities_are_ordered_by_number(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    rewrite(tmp_path, modality={str(n): f"m{n}" for n in reversed(range(11))})
    assert read_dataset(data).channels == tuple(f"m{n}" for n in range(11))


ENTRY = {"image": "./imagesTr/a.nii.gz", "label": "./labelsTr/a.nii.gz"}
TWIN = {"image": "./imagesTr/twin.nii.gz"}
OUTSIDE = "data.allow_outside=true"


@promise("data sets", "dataset.json is bounded in ...")
@promise("Data", "nnU-Net v1's layout, Decathlon's ...")
@promise("Data", "dataset.json with paths that ...")
@promise("Data", "dataset.json with thousands of ...")
@without("unet3d.data.layouts.stored.is_plain", yes, only="odd name")
@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"training": []}, []),
        ({"training": None}, ['"training"', "list"]),
        ({"training": {}}, ['"training"', "list"]),
        ({"training": ["./imagesTr/a.nii.gz"]}, ['"training"', '"image"', '"label"']),
        ({"training": [{"label": "x.nii"}]}, ['"training"', '"image"', '"label"']),
        ({"training": [TWIN, TWIN]}, ["twin"]),
        ({"training": [TWIN, {"image": "./imagesTr/twin.nii"}]}, ["twin"]),
        ({"training": [{"image": "imagesTr/\x1b[2J.nii"}]}, [r"'imagesTr/\x1b[2J.nii'", OUTSIDE]),
        ({"training": [{"image": "a" * 5000 + ".nii"}]}, ["aaa.nii'", OUTSIDE]),
        ({"training": [{"image": "imagesTr/\ud800.nii"}]}, [r"'imagesTr/\ud800.nii'", OUTSIDE]),
        ({"training": [{"image": "\u202ea.nii"}]}, [r"'\u202ea.nii'", OUTSIDE]),
        ({"labels": None}, ['"labels"', "object"]),
        ({"labels": {"0": "background", "2": "organ"}}, ["[0, 2]", "data.label_map={1:2}"]),
        ({"labels": {"1": "organ", "2": "tumour"}}, ["[1, 2]"]),
        ({"labels": {"background": 0, "organ": 1}}, ["'background': 0", '{"0": ']),
        ({"labels": {"0": "background"}}, ["['background']"]),
        ({"labels": {"0": "background", "1": "organ", "2": "organ"}}, ["['background', 'organ', 'organ']"]),
        ({"labels": {"0": "background", "1": "or\rgan"}}, ["labels", r"'or\rgan'"]),
        ({"labels": {"0": "background", "1": "organ "}}, ["labels", "'organ '", "write 'organ'"]),
        ({"labels": {"0": "background", "1": ""}}, ["labels", "'' is blank"]),
        ({"training": [{"image": ".\\imagesTr\\a.nii.gz"}]}, ["backslashes", "write /"]),
        ({"labels": {"0": "background", "1": "a", "01": "b"}}, ["labels", "'01': 'b'", "'1': 'a'"]),
        ({"modality": None}, ['"modality"', "object"]),
        ({"modality": {"1": "CT"}}, ["modality", "[1]"]),
        ({"modality": {"0": {"a": 1}}}, ["modality", "{'a': 1}"]),
        ({"modality": None, "channel_names": {"0": "CT"}}, ["data=nnunet"]),
        ({"name": ["a"]}, ['"name"', "['a']"]),
        ({"name": "a" * 10**6}, ['"name"', " 1,000,000 ", " 250 "]),
        ({"labels": {"0": "background", "1": "a" * 10**6}}, ['"labels"', " 1,000,000 ", " 250 "]),
        pytest.param({"name": "a\nb"}, ['"name"', r"'a\nb'"], id="odd name"),
    ],
)
def test_a_wrong_dataset_json_is_refused(tmp_path: Path, changes: dict, parts: list[str]) -> None:
    data = decathlon(tmp_path)
    rewrite(tmp_path, **changes)
    text = refusal(data)
    assert told([text], [[str(tmp_path / "dataset.json"), *parts]]) and len(text) < 1000


# of a data set that could be read, but for the name that is there twice
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
        (b"{", "Expecting"),  # json's word
        (b"[1]", "{...}"),
        (b"\xff\x00", "utf-8"),
        (b"[" * 100_000, "recursion"),
        (REPEATED, "JSON"),
        (b"{}" + b" " * texts.MAX_BYTES, "16,777,216"),
    ],
    ids=["cut", "list", "binary", "deep", "repeated", "large"],
)
def test_unreadable_json_is_refused_with_its_path(tmp_path: Path, content: bytes, part: str) -> None:
    (tmp_path / "dataset.json").write_bytes(content)
    assert told([refusal(Data(format="decathlon", root=str(tmp_path)))], [[f"{tmp_path / 'dataset.json'}: ", part]])


@pytest.mark.parametrize("layout", ["decathlon", "nnunet"])
def test_a_folder_without_dataset_json_is_refused(tmp_path: Path, layout: str) -> None:
    text = refusal(Data(format=layout, root=str(tmp_path)))
    assert told([text], [[f"{tmp_path / 'dataset.json'}: ", "data/README.md"]])


@promise("Data", "dataset.json with paths that ...")
def test_json_that_is_a_pipe_or_a_device_is_refused_at_once(tmp_path: Path) -> None:
    where = tmp_path / "dataset.json"
    os.mkfifo(where)
    assert told([refusal(Data(format="decathlon", root=str(tmp_path)))], [[f"{where}: "]])
    where.unlink()
    where.symlink_to("/dev/zero")
    text = refusal(Data(format="decathlon", root=str(tmp_path), allow_outside=True))
    assert told([text], [[f"{where}: "]]) and f"{texts.MAX_BYTES:,}" not in text, "it is not even read"


@promise("data sets", "paths in dataset.json, and links, do not leave `data.root`, unless `data.allow_outside=true`")
@promise(
    "Data",
    "dataset.json with paths that lead outside, repeated ids, nothing, or bad JSON; a pipe or device in its place",
    "refused; paths outside are read with `data.allow_outside=true`",
)
@pytest.mark.parametrize("kind", ["image", "label"])
@pytest.mark.parametrize(
    "name",
    [
        *[
            "../x.nii.gz",
            "imagesTr/../../x.nii.gz",
            "imagesTr/../imagesTr/a.nii.gz",
            "/etc/x.nii.gz",
            "{root}/a.nii",
            "a\x00b",
        ],
        7,
        None,
    ],
)
def test_a_path_that_leaves_the_folder_is_refused(tmp_path: Path, kind: str, name: Any) -> None:
    data = decathlon(tmp_path)
    name = name.replace("{root}", str(tmp_path)) if isinstance(name, str) else name
    rewrite(tmp_path, training=[ENTRY | {kind: name}])
    text = refusal(data)
    assert told([text], [[f"{tmp_path / 'dataset.json'}: {name!r} ", str(tmp_path), OUTSIDE]])


@promise("data sets", "paths in dataset.json, and ...")
@promise("Data", "dataset.json with paths that ...")
@without("unet3d.data.layouts.stored.leaves", no, only="link")
@pytest.mark.parametrize("name", ["../elsewhere/x.nii.gz", "{outside}/x.nii.gz", "link/x.nii.gz"])
def test_a_path_out_of_the_root_is_read_only_with_allow_outside(tmp_path: Path, name: str) -> None:
    data = decathlon(tmp_path / "set")
    write(tmp_path / "elsewhere" / "x.nii.gz", image())
    (tmp_path / "set" / "link").symlink_to(tmp_path / "elsewhere")
    name = name.replace("{outside}", str(tmp_path / "elsewhere"))
    b = {"image": "imagesTr/b.nii.gz", "label": "labelsTr/b.nii.gz"}
    rewrite(tmp_path / "set", training=[ENTRY | {"image": name}, b])
    assert OUTSIDE in refusal(data)
    data.allow_outside = True
    assert [case.id for case in read_dataset(data).cases] == ["b", "x"] and checked(data) == []


def test_links_that_stay_inside_and_a_linked_root_are_read(tmp_path: Path) -> None:
    data = decathlon(tmp_path / "set")
    (tmp_path / "set" / "linked").symlink_to(tmp_path / "set" / "imagesTr")
    rewrite(tmp_path / "set", training=[ENTRY | {"image": "linked/a.nii.gz"}])
    assert read_dataset(data).cases[0].id == "a"
    (tmp_path / "link").symlink_to(tmp_path / "set")
    assert len(read_dataset(Data(format="decathlon", root=str(tmp_path / "link"))).cases) == 1


@promise("data sets", "paths in dataset.json, and ...")
@without("unet3d.data.cases.leaves", no, only="label-")
@pytest.mark.parametrize("layout", ["folders", "nnunet"])
@pytest.mark.parametrize("linked", ["image", "label", "folder", "dataset.json"])
def test_a_link_out_of_the_root_is_refused_in_every_layout(tmp_path: Path, layout: str, linked: str) -> None:
    root, names = tmp_path / "set", ("imagesTr", "labelsTr") if layout == "nnunet" else ("images", "labels")
    for name in "ab":
        write(root / names[0] / f"{name}_0000.nii.gz", image())
        write(root / names[1] / f"{name}.nii.gz", label())
    data = Data(format=layout, root=str(root), classes=None if layout == "nnunet" else ["background", "x", "y"])
    content = {"channel_names": {"0": "T1"}, "labels": {"background": 0, "x": 1, "y": 2}, "file_ending": ".nii.gz"}
    (root / "dataset.json").write_text(json.dumps(content))
    assert len(read_dataset(data).cases) == 2
    where = {"image": f"{names[0]}/b_0000.nii.gz", "label": f"{names[1]}/b.nii.gz", "folder": names[0]}
    moved = root / where.get(linked, linked)
    shutil.move(moved, tmp_path / "elsewhere")
    moved.symlink_to(tmp_path / "elsewhere")
    if (layout, linked) != ("folders", "dataset.json"):  # which that layout does not read
        assert told([refusal(data)], [[str(moved), f" {root};", OUTSIDE]])
        data.allow_outside = True
    assert len(read_dataset(data).cases) == 2


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").symlink_to(tmp_path / "dataset.json")
    text = refusal(Data(format="decathlon", root=str(tmp_path)))
    assert told([text], [[f"{tmp_path / 'dataset.json'}: ", OUTSIDE]])


def nnunet(root: Path, **changes: Any) -> Data:
    """Two labelled cases and one without a label, of two channels."""
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


def test_nnunet_layout(tmp_path: Path) -> None:
    dataset = read_dataset(nnunet(tmp_path))
    assert (dataset.name, dataset.channels) == (tmp_path.name, ("T1", "T2"))
    assert (dataset.classes, dataset.ignore) == (("background", "organ"), 2)
    assert [case.id for case in dataset.cases] == ["a", "b_0001", "c"]
    assert dataset.cases[1].images == tuple(tmp_path / f"imagesTr/b_0001_{c:04d}.nii.gz" for c in range(2))
    maps = [tmp_path / "labelsTr/a.nii.gz", tmp_path / "labelsTr/b_0001.nii.gz", None]
    assert [case.label for case in dataset.cases] == maps


@promise("data sets", "dataset.json is bounded in ...")
@promise("Data", "dataset.json with paths that ...")
@promise(
    "Data",
    "dataset.json with thousands of channels, a name of a million letters, such ids in a split; a case "
    "that lacks many files; thousands of problems",
    "bounded lines: one for the data set, at most 11 a case, 1,001 in all",
)
@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"labels": {"background": 0, "whole": [1, 2], "core": 2}}, ['"regions_class_order"', "[1, 2]"]),
        ({"labels": {"background": 0, "ignore": 1, "organ": 2}}, [": 1 ", "(2)"]),
        ({"labels": {"background": 0, "organ": 1, "ignore": 65536}}, ["65536", "65535"]),
        ({"labels": {"background": 0, "organ": 1, "tumour": 1}}, ["'organ': 1", "'tumour': 1"]),
        ({"labels": {"background": 0, "organ": 2}}, ["[0, 2]", "data.label_map={1:2}"]),
        ({"labels": {"0": "background", "1": "organ"}}, ['{"background": 0, "organ": 1}']),
        ({"labels": {"background": 0, " ": 1}}, ["' ' is blank"]),
        ({"labels": {"organ": 0, "Background": 1}}, ["label 1 is called Background", "swap"]),
        *(({"labels": {"background": 0, "organ": value}}, ["'organ'"]) for value in (True, "1", 1.0, ["1"])),
        ({"labels": {"background": 0, "organ": 10**400}}, ["labels"]),
        ({"channel_names": None}, ['"channel_names"', "object"]),
        ({"channel_names": {str(n): "MR" for n in range(50_000)}}, ['"channel_names"', " 50,000 ", " 3 cases", " 6;"]),
        ({"labels": {"background": 0, "a" * 10**6: 1}}, ['"labels"', " 1,000,000 ", " 250 "]),
        ({"file_ending": ".png"}, ['"file_ending"', "'.png'", ".nii.gz"]),
        ({"file_ending": "nii.gz"}, ['"file_ending"', "'nii.gz'; write '.nii.gz' or '.nii'"]),
        ({"file_ending": "*.nii.gz"}, ['"file_ending"', "'*.nii.gz'; write '.nii.gz' or '.nii'"]),
        ({"file_ending": None}, ['"file_ending"', "string"]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_nnunet_json_is_refused(tmp_path: Path, changes: dict, parts: list[str]) -> None:
    text = refusal(nnunet(tmp_path, **changes))
    assert told([text], [[str(tmp_path / "dataset.json"), *parts]]) and len(text) < 500


@promise(
    "Data",
    "nnU-Net v1's layout, Decathlon's read as nnU-Net's, backslashes in paths",
    "refused with what to write",
)
@pytest.mark.parametrize("layout", ["decathlon", "nnunet"])
def test_the_layout_of_nnunet_v1_is_named_with_what_to_write(tmp_path: Path, layout: str) -> None:
    decathlon(tmp_path)
    for path in [*(tmp_path / "imagesTr").iterdir()]:
        path.rename(path.with_name(path.name.replace(".nii", "_0000.nii")))
    text = refusal(Data(format=layout, root=str(tmp_path)))
    labels = '"labels": {"background": 0, "organ": 1, "tumour": 2}'
    parts = ["nnU-Net v1", '"channel_names": {"0": "CT"}', labels, '"file_ending": ".nii.gz"', "data=nnunet"]
    assert told([text], [[f"{tmp_path / 'dataset.json'}: ", *parts]])


@promise("Data", "nnU-Net v1's layout, Decathlon's ...")
def test_decathlons_layout_is_named_where_it_is_read_as_nnunets(tmp_path: Path) -> None:
    decathlon(tmp_path)
    assert refusal(Data(format="nnunet", root=str(tmp_path))).endswith("read it with data=decathlon")


@promise(
    "Data",
    "JSON and tables with a byte order mark or in UTF-16, semicolons, capital heads, names with endings; a list of "
    "splits",
    "read",
)
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_json_with_a_byte_order_mark_is_read(tmp_path: Path, encoding: str) -> None:
    """As PowerShell writes it."""
    data = decathlon(tmp_path)
    before = read_dataset(data)
    path = tmp_path / "dataset.json"
    path.write_text(path.read_text(), encoding=encoding)
    assert read_dataset(data) == before
    (tmp_path / "s.json").write_text(json.dumps({"train": ["a"], "val": ["b"]}), encoding=encoding)
    train, val = split(before, Data(split=str(tmp_path / "s.json")))
    assert [case.id for case in (*train, *val)] == ["a", "b"]


@promise("Data", "dataset.json with thousands of ...")
def test_a_case_without_its_many_channels_is_a_few_lines(tmp_path: Path) -> None:
    data = nnunet(tmp_path, channel_names={str(n): "MR" for n in range(300)})
    lines = [line for line in checked(data, full=False) if line.startswith("c: ")]
    assert len(lines) == 11 and " 288 " in lines[-1]


def test_two_values_to_ignore_are_refused(tmp_path: Path) -> None:
    data = nnunet(tmp_path)
    data.ignore = 255
    assert holds(refusal(data), ["data.ignore=255", f"{tmp_path / 'dataset.json'} ", " 2;"])
    rewrite(tmp_path, labels={"background": 0, "organ": 1})
    assert read_dataset(data).ignore == 255


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    data = nnunet(tmp_path)
    os.rename(tmp_path / "labelsTr", tmp_path / "labels")
    assert told([refusal(data)], [[f"{tmp_path / 'labelsTr'}: ", "data.root"]])


def folders(root: Path, images: list[str], labels: list[str], shape: tuple[int, ...] = (6, 5, 4)) -> Data:
    for name in images:
        write(root / "images" / name, image(shape))
    for name in labels:
        write(root / "labels" / name, label())
    return Data(format="folders", root=str(root), classes=["background", "organ", "tumour"], ignore=255)


def test_folders_match_names_whatever_their_ending(tmp_path: Path) -> None:
    images = ["a.nii", "a_2019.nii", "b_0000.nii.gz", "scan_2019.nii", "x_2019.nii", "x_2020.nii"]
    dataset = read_dataset(folders(tmp_path, images, ["a.nii.gz", "b.nii", "scan_2019.nii"]))
    assert (dataset.name, dataset.channels, dataset.ignore) == (tmp_path.name, ("channel_0",), 255)
    assert dataset.classes == ("background", "organ", "tumour")
    assert [(case.id, case.images[0].name, case.label and case.label.name) for case in dataset.cases] == [
        ("a", "a.nii", "a.nii.gz"),
        ("a_2019", "a_2019.nii", None),
        ("b", "b_0000.nii.gz", "b.nii"),
        ("scan_2019", "scan_2019.nii", "scan_2019.nii"),
        ("x_2019", "x_2019.nii", None),
        ("x_2020", "x_2020.nii", None),
    ]


def laid_out(layout: str, root: Path) -> Data:
    names = ["a.nii", "b.nii"]
    return {"decathlon": decathlon, "nnunet": nnunet, "folders": lambda _: folders(root, names, names)}[layout](root)


@promise("Data", ".NII.GZ; volumes of other formats; NIfTI files that no case has", "read; one warning that names them")
@pytest.mark.parametrize("layout", ["decathlon", "nnunet", "folders"])
def test_endings_in_upper_case_are_read_in_every_layout(tmp_path: Path, layout: str) -> None:
    data = laid_out(layout, tmp_path)
    before = [case.id for case in read_dataset(data).cases]
    for path in tmp_path.glob("*/a*.nii*"):
        path.rename(path.with_name(path.name.replace(".nii", ".NII").replace(".gz", ".Gz")))
    if layout == "decathlon":
        text = checked(data, full=False)
        assert told(text[:1], [["a: ", "a.nii.gz: no such file, but a.NII.Gz is there"]])
        content = (tmp_path / "dataset.json").read_text()
        (tmp_path / "dataset.json").write_text(content.replace("/a.nii.gz", "/a.NII.Gz"))
    dataset = read_dataset(data)
    assert [case.id for case in dataset.cases] == before
    assert not errors([line for line in checked(data) if "a: " in line]) and dataset.cases[0].label is not None


@promise("Data", ".NII.GZ; volumes of other ...")
@pytest.mark.parametrize("layout", ["decathlon", "nnunet", "folders"])
def test_volumes_that_are_left_out_are_named_once(
    tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = laid_out(layout, tmp_path)
    images = read_dataset(data).cases[0].images[0].parent
    for name in ("x.nrrd", "y.MHA", "z.hdr", "z.img", "._w.mgz", "notes.txt", "v.dcm"):
        (images / name).touch()
    parts = ["1 .nrrd (", "/x.nrrd)", "1 .mha (", "/y.MHA)", "1 .hdr/.img pair (", "1 .dcm (", "to .nii.gz"]
    (line,) = [line for line in checked(data, full=False) if "not read" in line]
    assert holds(line, parts) and line.startswith(WARNING) and "txt" not in line and "mgz" not in line
    if layout == "nnunet":  # a third channel of two
        shutil.copy(images / "a_0001.nii.gz", images / "a_0002.nii.gz")
        assert read_dataset(data).left_out[0].endswith(f"1 ({images / 'a_0002.nii.gz'})")


@promise("what is printed and written", "names and values from ...")
def test_what_a_run_says_of_names_cannot_command_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a file that is left out, and of a folder whose cases show no class of a name."""
    data = folders(tmp_path / "ev\x1b[31mil", ["a.nii", "b.nii", "c.nii"], ["a.nii", "b.nii", "c.nii"])
    images = tmp_path / "ev\x1b[31mil" / "images"
    for seed, path in enumerate(sorted(images.iterdir())):
        write(path, image(seed=seed))
    (images / "x\x1b[2J.mha").touch()
    prepare_data(replace(data, classes=["background", "one", "two", "three"]))
    printed = capsys.readouterr()
    assert r"x\x1b[2J.mha" in printed.err and r"ev\x1b[31mil: three in no training case" in printed.err
    assert "\x1b" not in printed.out + printed.err


@promise("Data", ".NII.GZ; volumes of other ...")
def test_a_data_set_of_another_format_is_named(tmp_path: Path) -> None:
    data = folders(tmp_path, ["a.nii"], ["a.nii"])
    for folder in ("images", "labels"):
        (tmp_path / folder / "a.nii").rename(tmp_path / folder / "a.hdr")
        (tmp_path / folder / "a.img").touch()
        where = f"{tmp_path / 'labels'}"
        parts = (
            ["no image of that name", "1 .hdr/.img pair"] if folder == "images" else ["lists no case", "1 .hdr/.img"]
        )
        assert told([refusal(data)], [[where, *parts]])


@promise(
    "Data",
    "two files of one name; label maps named as channels; another `file_ending`",
    "refused with the name to give; read with a warning",
)
@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("imagesTr/a_0000.nii.gz", "imagesTr/a_0000.nii", ["/imagesTr: a_0000.nii and a_0000.nii.gz", " two "]),
        ("labelsTr/a.nii.gz", "labelsTr/a.NII.GZ", ["/labelsTr: a.NII.GZ and a.nii.gz", " two "]),
    ],
)
def test_two_files_of_one_name_are_refused(tmp_path: Path, old: str, new: str, parts: list[str]) -> None:
    data = nnunet(tmp_path)
    shutil.copy(tmp_path / old, tmp_path / new)
    assert holds(refusal(data), parts)


@promise("Data", "two files of one ...")
def test_label_maps_that_are_called_as_channels_are_refused(tmp_path: Path) -> None:
    data = nnunet(tmp_path)
    for name in ("a", "b_0001"):
        path = tmp_path / f"labelsTr/{name}.nii.gz"
        path.rename(path.with_name(f"{name}_0000.nii.gz"))
    parts = ["without _0000", "rename it to a.nii.gz", "1 more"]
    assert told([refusal(data)], [[f"{tmp_path / 'labelsTr/a_0000.nii.gz'}: ", *parts]])
    data = folders(tmp_path / "f", ["a.nii", "b.nii"], ["a_0000.nii", "b.nii"])
    assert holds(refusal(data), ["/labels/a_0000.nii: ", "its case, a,"])
    data = folders(tmp_path / "g", ["a_0000.nii", "a_0001.nii"], ["a_0000.nii"])
    assert holds(refusal(data), ["/labels/a_0000.nii: ", "rename it to a.nii"])
    names = [f"case_{number:04d}.nii" for number in range(3)]
    numbered = read_dataset(folders(tmp_path / "h", names, names[::2]))
    assert [case.id for case in numbered.cases] == ["case_0000", "case_0001", "case_0002"]


@promise("Data", "two files of one ...")
def test_files_that_end_otherwise_than_dataset_json_says_are_read(tmp_path: Path) -> None:
    data = nnunet(tmp_path, file_ending=".nii")
    dataset = read_dataset(data)
    assert len(dataset.cases) == 3 and not errors(checked(data, full=False))
    assert holds(dataset.left_out[0], [str(tmp_path / "dataset.json"), "'.nii'", " 8 files "])


def test_folders_with_several_channels(tmp_path: Path) -> None:
    dataset = read_dataset(folders(tmp_path, ["a_0001.nii", "a_0000.nii"], ["a.nii"]))
    assert dataset.channels == ("channel_0", "channel_1")
    assert [path.name for path in dataset.cases[0].images] == ["a_0000.nii", "a_0001.nii"]
    assert read_dataset(folders(tmp_path / "4d", ["a.nii"], ["a.nii"], (6, 5, 4, 3))).channels[2] == "channel_2"


def test_folders_that_the_command_line_puts_outside_are_read(tmp_path: Path) -> None:
    data = folders(tmp_path / "set", ["a.nii", "b.nii"], ["a.nii", "b.nii"])
    shutil.move(tmp_path / "set" / "images", tmp_path / "elsewhere")
    for data.images in ("../elsewhere", str(tmp_path / "elsewhere")):
        assert len(read_dataset(data).cases) == 2


@promise("data sets", "a case whose label map no file name could hold is refused before work begins")
@promise("data sets", "dataset.json is bounded in ...")
@promise("Data", "case ids that no file name can hold", "refused at the start")
@without("unet3d.data.cases.MAX_NAME", 10**6, only="long name")
@without("unet3d.data.cases.is_plain", yes, only="odd name")
@pytest.mark.parametrize(
    ("images", "labels", "parts"),
    [
        (["a.nii"], ["a.nii", "b.nii"], ["/labels/b.nii: ", "/images"]),
        (["a.nii"], ["a.nii", "b.nii", "c.nii", "d.nii"], ["/labels/b.nii: ", " c, d;"]),
        (["twin.nii"], ["twin.nii", "twin.nii.gz"], ["/labels: ", "twin"]),
        (["a_0000.nii", "a_0002.nii"], ["a.nii"], ["a: ", "/images/a_0001 ", "/images/a_0002.nii", "a_0000, a_0001"]),
        (["a_0000.nii", "a_0000.nii.gz"], ["a.nii"], ["/images: a_0000.nii and a_0000.nii.gz ", " two "]),
        (["b.nii", "a_0001.nii", "a_0002.nii"], ["a.nii", "b.nii"], ["/labels/a.nii: a_0000 ", "/images"]),
        pytest.param([f"{'a' * 249}.nii"], [f"{'a' * 249}.nii"], ["249", ".nii.gz", "255"], id="long name"),
        ([f"{'ä' * 125}.nii"], [f"{'ä' * 125}.nii"], ["125", ".nii.gz", "255"]),
        pytest.param(["a\x1b[2J.nii"], ["a\x1b[2J.nii"], ["/labels: ", r"'a\x1b[2J'"], id="odd name"),
        ([], ["a.nii"], ["/images: ", "data.root"]),
    ],
)
def test_folders_that_do_not_match_are_refused(
    tmp_path: Path, images: list[str], labels: list[str], parts: list[str]
) -> None:
    assert holds(refusal(folders(tmp_path, images, labels)), parts)


def test_a_case_cannot_be_named_like_a_warning(tmp_path: Path) -> None:
    names = ["warning: a.nii", "b.nii"]
    with pytest.raises(UserError, match=r"'warning: a' cannot name a case"):
        read_dataset(folders(tmp_path, names, names))


def test_a_name_that_leaves_room_for_its_ending_is_read(tmp_path: Path) -> None:
    for name in ("a" * 240, "a" * 248):
        assert read_dataset(folders(tmp_path / name[:241], [f"{name}.nii"], [f"{name}.nii"])).cases[0].id == name


def test_a_channel_that_is_missing_is_named_by_check_and_run(tmp_path: Path) -> None:
    """The number of channels is that of most cases."""
    channels = [f"{name}_{c:04d}.nii" for name in "abc" for c in range(3 if name != "a" else 2)]
    data = folders(tmp_path / "folders", channels, ["a.nii", "b.nii", "c.nii"])
    path = tmp_path / "folders/images/a_0000.nii"
    parts = [" 2 ", " 3 ", "(channel_0, channel_1, channel_2)", "a_0002"]
    assert told(checked(data, full=False), [[f"a: {path}: ", *parts]])
    data = nnunet(tmp_path / "nnunet")
    absent = tmp_path / "nnunet/imagesTr/a_0001.nii.gz"
    absent.unlink()
    for full in (False, True):
        assert [line for line in checked(data, full) if line.startswith(f"a: {absent}: a_0001 ")]


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    for name in ("images", "labels"):
        (tmp_path / name).mkdir()
    assert told([refusal(folders(tmp_path, [], []))], [[f"{tmp_path / 'labels'}: "]])


@pytest.mark.parametrize("ignore", [0, 1])
def test_an_ignored_label_among_the_classes_is_refused(tmp_path: Path, ignore: int) -> None:
    data = folders(tmp_path, ["a.nii"], ["a.nii"])
    data.ignore = ignore
    assert told([refusal(data)], [[f"data.classes: {ignore} "]])


def test_the_phantom_is_generated_below_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = Data(phantom=Phantom(cases=2, shape=[16, 16, 16]))
    dataset = read_dataset(data)
    assert dataset.classes == ("background", "organ", "vessel", "lesion")
    assert [case.id for case in dataset.cases] == ["phantom_000", "phantom_001"]
    assert all(path.is_file() for case in dataset.cases for path in (*case.images, case.label))
    assert {path.parts[:2] for path in dataset.cases[0].images} == {("data", "phantom")}
    data.root = "mine"
    assert read_dataset(data).cases[0].images[0].parts[0] == "mine"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["data.phantom.shape=[16,18,20]", "model.kernels=auto", "model.strides=auto"],
        ["data.spacing=[1,1,5]", "model.kernels=auto", "model.strides=auto"],
        ["data.label_map={1:[1,2]}", "data.root=mine"],
    ],
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


def test_memory_is_predicted_without_the_phantom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What would need less is left out: its schedules take seconds to find."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("unet3d.cli.memory_answers.remedies.single_techniques", lambda asked: [])
    words = ["data=phantom", "model=unet_tiny", "data.patch=[16,16,16]", "model.features=[4,8]"]
    assert face("memory", *words) == 0
    assert list(tmp_path.iterdir()) == [] and "peak" in capsys.readouterr().out
    assert face("memory", *words, "data.fold=0", "data.folds=99") == 2
    assert "data.folds=99" in capsys.readouterr().err


IDS = [f"case_{n:03d}" for n in range(13)]


def parts(ids: list[str], data: Data) -> tuple[list[str], list[str]]:
    """The ids in train and val, of a data set that also has a case without a label."""
    cases = [Case(name, (Path(name),), Path(name)) for name in ids] + [Case("unlabelled", (Path("u"),), None)]
    train, val = split(DatasetInfo("T", ("CT",), tuple(cases), classes=("background", "organ")), data)
    return [case.id for case in train], [case.id for case in val]


def listed(folder: Path, content: dict | list) -> Data:
    (folder / "s.json").write_text(json.dumps(content))
    return Data(split=str(folder / "s.json"), fold=0, folds=5, val_fraction=0.4)


# [val.tolist() for _, val in KFold(5, shuffle=True, random_state=12345).split(range(n))], scikit-learn 1.9.1
FOLDS_OF_13 = [[0, 7, 9], [3, 6, 10], [8, 11, 12], [1, 4], [2, 5]]
FIRST_OF_260 = [[9, 10, 16, 18], [1, 14, 15, 17], [2, 4, 8, 13], [0, 3, 6, 12], [5, 7, 11, 23]]


@without("unet3d.data.splits.FOLD_SEED", 0, only="2")
@pytest.mark.parametrize("fold", range(5))
def test_folds_are_those_of_scikit_learn(fold: int) -> None:
    train, val = parts(IDS, Data(fold=fold))
    assert val == [IDS[n] for n in FOLDS_OF_13[fold]] and sorted(train + val) == IDS
    _, val = parts([f"{n:03d}" for n in range(260)], Data(fold=fold))
    assert len(val) == 52 and [int(name) for name in val[:4]] == FIRST_OF_260[fold]


def test_the_share_is_spread_evenly() -> None:
    train, val = parts(IDS, Data(val_fraction=0.25))
    assert val == ["case_002", "case_006", "case_010"] and sorted(train + val) == IDS


@pytest.mark.parametrize(("count", "share", "held_out"), [(2, 0.01, 1), (2, 0.9, 1), (10, 0.9, 9), (1000, 0.5, 500)])
def test_each_part_of_a_share_has_a_case(count: int, share: float, held_out: int) -> None:
    train, val = parts([f"{n:04d}" for n in range(count)], Data(val_fraction=share))
    assert len(val) == len({*val}) == held_out and len(train) == count - held_out


def test_the_split_depends_on_the_ids_alone() -> None:
    names = [f"{n}" for n in np.random.default_rng(0).permutation(40)]
    for data in (Data(fold=2), Data()):
        assert parts(names, data) == parts(sorted(names), data)


def test_a_split_file_goes_before_the_fold_and_the_fold_before_the_share(tmp_path: Path) -> None:
    data = listed(tmp_path, {"train": ["a"], "val": ["e", "b"]})
    assert parts([*"abcde"], data) == (["a"], ["b", "e"]), "it may leave cases out"
    data.split = None
    assert len(parts([*"abcde"], data)[1]) == 1
    data.fold = None
    assert parts([*"abcde"], data)[1] == ["b", "d"]


@promise("Data", "JSON and tables with ...")
def test_of_a_list_of_splits_that_of_the_fold_is_taken(tmp_path: Path) -> None:
    """As of nnU-Net's splits_final.json."""
    splits = [{"train": IDS[fold + 1 :], "val": [IDS[fold]]} for fold in range(3)]
    data = listed(tmp_path, splits)
    data.folds = 3
    for data.fold in range(3):
        assert parts(IDS, data) == (IDS[data.fold + 1 :], [IDS[data.fold]])
    for data.fold, data.folds, wanted in ((None, 5, "data.fold, from 0 to 2"), (1, 5, "add data.folds=3")):
        with pytest.raises(UserError, match=f"a list of 3 splits.*{wanted}"):
            parts(IDS, data)
    data = listed(tmp_path, splits[:1])
    data.fold = None
    assert parts(IDS, data)[1] == IDS[:1]
    compose.compose(["data.fold=0", f"data.split={data.split}"])


def test_a_split_may_name_files_and_numbers(tmp_path: Path) -> None:
    data = listed(tmp_path, {"train": ["imagesTr/12_0000.nii.gz", "13.nii"], "val": [14, " 15 "]})
    assert parts(["12", "13", "14", "15"], data) == (["12", "13"], ["14", "15"])


@promise("Data", "images without a label ...")
def test_cases_that_a_split_leaves_out_are_counted(tmp_path: Path) -> None:
    dataset = read_dataset(decathlon(tmp_path))
    data = listed(tmp_path, {"train": ["a"], "val": ["c"]})
    lines = list(unused(dataset, data, *split(dataset, data)))
    idle = [f"data.fold=0 does nothing beside data.split={data.split}"]
    assert told(lines, [idle, [f"{data.split}: 2 of 4 ", "not used (b, d)"]])


@promise("Data", "a training image among ...")
@promise("Data", "dataset.json with thousands of ...")
@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ([], ["holds no split;", '{"train": [ids], "val": [ids]}']),
        ([1], ["entry 0 ", " 1;"]),
        ({"training": IDS[:2]}, ['"train" ', "['training']"]),
        ({"train": IDS[:2]}, ['"val" ', '{"train": [ids], "val": [ids]}']),
        ({"train": [], "val": IDS[:1]}, ['"train" ', '{"train": [ids], "val": [ids]}']),
        ({"train": "case_001", "val": IDS[:1]}, ['"train" ', '{"train": [ids], "val": [ids]}']),
        ({"train": ["case_1", 7], "val": IDS[:1]}, ['"train" ', "case_1, 7"]),
        ({"train": IDS[:1], "val": ["unlabelled"]}, ['"val" ', "unlabelled"]),
        ({"train": IDS[:1], "val": ["x" * 10**6] * 3}, ['"val" ', "xxx...xxx"]),
        ({"train": [f"x{n}" for n in range(7)], "val": IDS[:1]}, ['"train" ', "x0, x1, x2, x3, x4 ", " 2 "]),
        ({"train": IDS[:2], "val": IDS[1:3]}, ["case_001 ", '"train"', '"val"']),
        ({"train": [IDS[0], IDS[0]], "val": IDS[1:2]}, ['"train" ', "case_000"]),
    ],
)
def test_a_split_file_that_cannot_be_followed_is_refused(
    tmp_path: Path, content: dict | list, wanted: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        parts(IDS, listed(tmp_path, content))
    start, *rest = wanted
    assert told([str(caught.value)], [[f"{tmp_path / 's.json'}: {start}", *rest]]) and len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("ids", "data", "wanted"),
    [
        (IDS, Data(fold=0, folds=14), r"^data\.folds=14 .*\b13\b.*data\.folds=13$"),
        (["a"], Data(), r"^T: 1 .*data\.semi=true"),
        (["a", "b"], Data(split="no.json"), r"^no\.json: .*data/README\.md"),
        (["a", "b"], Data(split="splits_final.pkl"), r"^data\.split=splits_final\.pkl: a pickle .*JSON"),
    ],
)
def test_a_split_that_cannot_be_made_is_refused(ids: list[str], data: Data, wanted: str) -> None:
    with pytest.raises(UserError, match=wanted):
        parts(ids, data)
