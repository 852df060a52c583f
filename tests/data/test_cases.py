"""Each layout read from real files, one clear refusal for each way that it can be wrong, and the splits."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nifti_files import checked, decathlon, image, label, rewrite, write

from unet3d.config import Data, Phantom
from unet3d.data import dataset_json
from unet3d.data.cases import Case, DatasetInfo, read_dataset, split
from unet3d.errors import UserError


def refusal(data: Data) -> str:
    with pytest.raises(UserError) as caught:
        read_dataset(data)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_decathlon_layout(tmp_path: Path) -> None:
    cases = tuple(Case(n, (tmp_path / f"imagesTr/{n}.nii.gz",), tmp_path / f"labelsTr/{n}.nii.gz") for n in "ab")
    found = read_dataset(decathlon(tmp_path, ("b", "a")))
    assert found == DatasetInfo("Small", ("CT",), ("background", "organ", "tumour"), None, cases)


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


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"training": []}, "lists no case; there must be at least two with labels"),
        ({"training": None}, '"training" is missing or no JSON list'),
        ({"training": {}}, '"training" is missing or no JSON list'),
        ({"training": ["./imagesTr/a.nii.gz"]}, 'is not {"image": path, "label": path}'),
        ({"training": [{"label": "x.nii"}]}, 'is not {"image": path, "label": path}'),
        ({"training": [ENTRY, ENTRY]}, "two cases are called a; rename one of them"),
        ({"training": [ENTRY, {"image": "./imagesTr/a.nii"}]}, "two cases are called a"),
        ({"training": [{"image": "imagesTr/\x1b[2J.nii"}]}, r"'imagesTr/\x1b[2J.nii' is not a path inside"),
        ({"training": [{"image": "a" * 5000 + ".nii"}]}, "aaa.nii' is not a path inside"),
        ({"training": [{"image": "imagesTr/\ud800.nii"}]}, r"'imagesTr/\ud800.nii' is not a path inside"),
        ({"training": [{"image": "\u202ea.nii"}]}, r"'\u202ea.nii' is not a path inside"),
        ({"labels": None}, '"labels" is missing or no JSON object'),
        ({"labels": {"0": "background", "2": "organ"}}, "labels are numbered [0, 2]"),
        ({"labels": {"1": "organ", "2": "tumour"}}, "labels are numbered [1, 2]"),
        ({"labels": {"background": 0, "organ": 1}}, "the keys must be numbers"),
        ({"labels": {"0": "background"}}, "give the background and one class or more"),
        ({"labels": {"0": "background", "1": "organ", "2": "organ"}}, "each its own name"),
        ({"labels": {"0": "background", "1": "or\rgan"}}, r"labels: 'or\rgan' is not a name; give one line of text"),
        ({"labels": {"0": "background", "1": "a", "01": "b"}}, "a number occurs twice, give each name its own"),
        ({"modality": None}, '"modality" is missing'),
        ({"modality": {"1": "CT"}}, "modality are numbered [1]"),
        ({"modality": {"0": {"a": 1}}}, "modality: {'a': 1} is not a name; give one line of text"),
        ({"modality": None, "channel_names": {"0": "CT"}}, "read it with data=nnunet"),
        ({"name": ["a"]}, "\"name\" is ['a']; give one line of text"),
        ({"name": "a\nb"}, r""""name" is 'a\nb'; give one line of text"""),
    ],
)
def test_a_wrong_dataset_json_is_refused(tmp_path: Path, changes: dict, what: str) -> None:
    data = decathlon(tmp_path)
    rewrite(tmp_path, **changes)
    text = refusal(data)
    assert text.startswith(str(tmp_path / "dataset.json")) and what in text


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"{", "not readable as JSON"),
        (b"[1]", "holds no JSON object"),
        (b"\xff\xfe", "not readable as JSON"),
        (b"[" * 100_000, "not readable as JSON"),
        (b'{"labels": {"0": "liver"}, "labels": {}}', "a name occurs twice in one object"),
        (b"{}" + b" " * dataset_json.MAX_BYTES, "is larger than 16,777,216 bytes"),
    ],
    ids=["cut", "list", "binary", "deep", "repeated", "large"],
)
def test_unreadable_json_is_refused_with_its_path(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "dataset.json").write_bytes(content)
    text = refusal(Data(format="decathlon", root=str(tmp_path)))
    assert text.startswith(f"{tmp_path / 'dataset.json'}: ") and what in text


@pytest.mark.parametrize("layout", ["decathlon", "nnunet"])
def test_a_folder_without_dataset_json_is_refused(tmp_path: Path, layout: str) -> None:
    assert f"{tmp_path / 'dataset.json'}: no such file" in refusal(Data(format=layout, root=str(tmp_path)))


def test_json_that_is_a_pipe_or_a_device_is_refused_at_once(tmp_path: Path) -> None:
    where = tmp_path / "dataset.json"
    os.mkfifo(where)
    assert "is not a file; replace it" in refusal(Data(format="decathlon", root=str(tmp_path)))
    where.unlink()
    where.symlink_to("/dev/zero")
    text = refusal(Data(format="decathlon", root=str(tmp_path), allow_outside=True))
    assert "is not a file; replace it" in text


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
    assert f"{name!r} is not a path inside {tmp_path}" in refusal(data)


@pytest.mark.parametrize("name", ["../elsewhere/x.nii.gz", "{outside}/x.nii.gz", "link/x.nii.gz"])
def test_a_path_out_of_the_root_is_read_only_with_allow_outside(tmp_path: Path, name: str) -> None:
    data = decathlon(tmp_path / "set")
    write(tmp_path / "elsewhere" / "x.nii.gz", image())
    (tmp_path / "set" / "link").symlink_to(tmp_path / "elsewhere")
    name = name.replace("{outside}", str(tmp_path / "elsewhere"))
    b = {"image": "imagesTr/b.nii.gz", "label": "labelsTr/b.nii.gz"}
    rewrite(tmp_path / "set", training=[ENTRY | {"image": name}, b])
    assert "data.allow_outside=true" in refusal(data)
    data.allow_outside = True
    assert [case.id for case in read_dataset(data).cases] == ["b", "x"] and checked(data) == []


def test_links_that_stay_inside_and_a_linked_root_are_read(tmp_path: Path) -> None:
    data = decathlon(tmp_path / "set")
    (tmp_path / "set" / "linked").symlink_to(tmp_path / "set" / "imagesTr")
    rewrite(tmp_path / "set", training=[ENTRY | {"image": "linked/a.nii.gz"}])
    assert read_dataset(data).cases[0].id == "a"
    (tmp_path / "link").symlink_to(tmp_path / "set")
    assert len(read_dataset(Data(format="decathlon", root=str(tmp_path / "link"))).cases) == 1


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
        assert f"is a link out of {root}; put the file there, or set data.allow_outside=true" in refusal(data)
        data.allow_outside = True
    assert len(read_dataset(data).cases) == 2


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").symlink_to(tmp_path / "dataset.json")
    assert "dataset.json: is a link out of" in refusal(Data(format="decathlon", root=str(tmp_path)))


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


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"labels": {"background": 0, "whole": [1, 2], "core": 2}}, "regions are not supported"),
        ({"labels": {"background": 0, "ignore": 1, "organ": 2}}, "1 is the label to ignore; it must be above all"),
        ({"labels": {"background": 0, "organ": 1, "ignore": 65536}}, "ignore; the highest possible is 65535"),
        ({"labels": {"background": 0, "organ": 1, "tumour": 1}}, "two names share a value"),
        ({"labels": {"background": 0, "organ": 2}}, "labels are numbered [0, 2]"),
        *(({"labels": {"background": 0, "organ": value}}, ": label") for value in (True, "1", 1.0, [1, 2], 10**400)),
        ({"channel_names": None}, '"channel_names" is missing'),
        ({"file_ending": ".png"}, "\"file_ending\" is '.png'; convert the volumes"),
        ({"file_ending": None}, '"file_ending" is missing'),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_nnunet_json_is_refused(tmp_path: Path, changes: dict, what: str) -> None:
    text = refusal(nnunet(tmp_path, **changes))
    assert text.startswith(str(tmp_path / "dataset.json")) and what in text and len(text) < 500


def test_two_values_to_ignore_are_refused(tmp_path: Path) -> None:
    data = nnunet(tmp_path)
    data.ignore = 255
    assert "data.ignore=255, but" in refusal(data)
    rewrite(tmp_path, labels={"background": 0, "organ": 1})
    assert read_dataset(data).ignore == 255


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    data = nnunet(tmp_path)
    os.rename(tmp_path / "labelsTr", tmp_path / "labels")
    assert f"{tmp_path / 'labelsTr'}: no such folder" in refusal(data)


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


@pytest.mark.parametrize(
    ("images", "labels", "what"),
    [
        (["a.nii"], ["a.nii", "b.nii"], "labels/b.nii: no image of that name"),
        (["a.nii"], ["a.nii", "b.nii", "c.nii", "d.nii"], "; nor of c, d; add it"),
        (["a.nii"], ["a.nii", "a.nii.gz"], "two cases are called a"),
        (["a_0000.nii", "a_0002.nii"], ["a.nii"], "a case's channels are called a_0000, a_0001 and so on"),
        (["a_0000.nii", "a_0002.nii"], ["a.nii"], "images/a_0001 is missing beside "),
        (["a_0000.nii", "a_0000.nii.gz"], ["a.nii"], "images/a_0001 is missing beside "),
        (["b.nii", "a_0001.nii", "a_0002.nii"], ["a.nii", "b.nii"], "labels/a.nii: a_0000 is missing in "),
        ([f"{'a' * 249}.nii"], [f"{'a' * 249}.nii"], "a name of 249 letters: the name of its label map, with .nii.gz,"),
        ([f"{'ä' * 125}.nii"], [f"{'ä' * 125}.nii"], "a name of 125 letters: the name of its label map, with .nii.gz,"),
        (["a\x1b[2J.nii"], ["a\x1b[2J.nii"], "cannot name a case; rename its files"),
        ([], ["a.nii"], "images: no such folder"),
    ],
)
def test_folders_that_do_not_match_are_refused(tmp_path: Path, images: list, labels: list, what: str) -> None:
    assert what in refusal(folders(tmp_path, images, labels))


def test_a_name_that_leaves_room_for_its_ending_is_read(tmp_path: Path) -> None:
    for name in ("a" * 240, "a" * 248):
        assert read_dataset(folders(tmp_path / name[:241], [f"{name}.nii"], [f"{name}.nii"])).cases[0].id == name


def test_a_channel_that_is_missing_is_named_by_check_and_run(tmp_path: Path) -> None:
    """The number of channels is that of most cases."""
    channels = [f"{name}_{c:04d}.nii" for name in "abc" for c in range(3 if name != "a" else 2)]
    data = folders(tmp_path / "folders", channels, ["a.nii", "b.nii", "c.nii"])
    path = tmp_path / "folders/images/a_0000.nii"
    what = "has 2 channels, the data set 3 (channel_0, channel_1, channel_2): a_0002 is missing; make them agree"
    assert checked(data, full=False) == [f"a: {path}: {what}"]
    data = nnunet(tmp_path / "nnunet")
    absent = tmp_path / "nnunet/imagesTr/a_0001.nii.gz"
    absent.unlink()
    line = f"a: {absent}: a_0001 is missing; restore it or remove the case"
    assert line in checked(data, full=False) and line in checked(data)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    for name in ("images", "labels"):
        (tmp_path / name).mkdir()
    assert "labels: lists no case" in refusal(folders(tmp_path, [], []))


@pytest.mark.parametrize("ignore", [0, 1])
def test_an_ignored_label_among_the_classes_is_refused(tmp_path: Path, ignore: int) -> None:
    data = folders(tmp_path, ["a.nii"], ["a.nii"])
    data.ignore = ignore
    assert f"data.classes: {ignore} is the label to ignore" in refusal(data)


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


IDS = [f"case_{n:03d}" for n in range(13)]


def parts(ids: list[str], data: Data) -> tuple[list[str], list[str]]:
    """The ids in train and val, of a data set that also has a case without a label."""
    cases = [Case(name, (Path(name),), Path(name)) for name in ids] + [Case("unlabelled", (Path("u"),), None)]
    train, val = split(DatasetInfo("T", ("CT",), ("background", "organ"), None, tuple(cases)), data)
    return [case.id for case in train], [case.id for case in val]


def listed(folder: Path, content: dict) -> Data:
    (folder / "s.json").write_text(json.dumps(content))
    return Data(split=str(folder / "s.json"), fold=0, folds=5, val_fraction=0.4)


# [val.tolist() for _, val in KFold(5, shuffle=True, random_state=12345).split(range(n))], scikit-learn 1.9.1
FOLDS_OF_13 = [[0, 7, 9], [3, 6, 10], [8, 11, 12], [1, 4], [2, 5]]
FIRST_OF_260 = [[9, 10, 16, 18], [1, 14, 15, 17], [2, 4, 8, 13], [0, 3, 6, 12], [5, 7, 11, 23]]


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


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ({"train": IDS[:2]}, '"val" must list one case id or more'),
        ({"train": [], "val": IDS[:1]}, '"train" must list one case id or more'),
        ({"train": "case_001", "val": IDS[:1]}, '"train" must list'),
        ({"train": ["case_1", 7], "val": IDS[:1]}, '"train" names case_1, 7: no labelled case'),
        ({"train": IDS[:1], "val": ["unlabelled"]}, '"val" names unlabelled: no labelled case'),
        ({"train": [f"x{n}" for n in range(7)], "val": IDS[:1]}, "x0, x1, x2, x3, x4 and 2 more: no labelled case"),
        ({"train": IDS[:2], "val": IDS[1:3]}, 'case_001 in both "train" and "val"'),
        ({"train": [IDS[0], IDS[0]], "val": IDS[1:2]}, '"train" names case_000 more than once'),
    ],
)
def test_a_split_file_that_cannot_be_followed_is_refused(tmp_path: Path, content: dict, what: str) -> None:
    with pytest.raises(UserError) as caught:
        parts(IDS, listed(tmp_path, content))
    assert str(caught.value).startswith(f"{tmp_path / 's.json'}: ") and what in str(caught.value)


@pytest.mark.parametrize(
    ("ids", "data", "what"),
    [
        (IDS, Data(fold=0, folds=14), r"data.folds=14 is more than the 13 labelled cases"),
        (["a"], Data(), "T: 1 labelled cases; training and validation need one each"),
        (["a", "b"], Data(split="no.json"), r"no\.json: no such file"),
    ],
)
def test_a_split_that_cannot_be_made_is_refused(ids: list[str], data: Data, what: str) -> None:
    with pytest.raises(UserError, match=what):
        parts(ids, data)
