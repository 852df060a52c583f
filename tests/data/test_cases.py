"""Each layout read from real files, and one clear refusal for each way it can be wrong."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nifti_files import decathlon, image, label, write

from unet3d.config import Data, Phantom
from unet3d.data.cases import Case, DatasetInfo, read_dataset, split
from unet3d.errors import UserError


def rewrite(root: Path, **changes: Any) -> None:
    """Change fields of dataset.json; None removes one."""
    path = root / "dataset.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def refusal(data: Data) -> str:
    with pytest.raises(UserError) as caught:
        read_dataset(data)
    return str(caught.value)


def test_decathlon(tmp_path: Path) -> None:
    data = decathlon(tmp_path, ("b", "a"))
    assert read_dataset(data) == DatasetInfo(
        name="Small",
        channels=("CT",),
        classes=("background", "organ", "tumour"),
        ignore=None,
        cases=tuple(
            Case(n, (tmp_path / f"imagesTr/{n}.nii.gz",), tmp_path / f"labelsTr/{n}.nii.gz") for n in ("a", "b")
        ),
    )


def test_decathlon_with_an_ignored_label_and_a_case_without_one(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    rewrite(
        tmp_path, labels={"0": "background", "2": "unlabelled", "1": "organ"}, training=[{"image": "imagesTr/a.nii"}]
    )
    data.ignore = 2
    task = read_dataset(data)
    assert (task.classes, task.ignore) == (("background", "organ"), 2)
    assert task.cases == (Case("a", (tmp_path / "imagesTr/a.nii",), None),)


def test_modalities_are_ordered_by_number(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    rewrite(tmp_path, modality={str(n): f"m{n}" for n in reversed(range(11))})
    assert read_dataset(data).channels == tuple(f"m{n}" for n in range(11))


ENTRY = {"image": "./imagesTr/a.nii.gz", "label": "./labelsTr/a.nii.gz"}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"training": []}, "lists no case"),
        ({"training": None}, '"training" is missing or no JSON list'),
        ({"training": {}}, '"training" is missing or no JSON list'),
        ({"training": ["./imagesTr/a.nii.gz"]}, 'is not {"image": path, "label": path}'),
        ({"training": [{"label": "x.nii"}]}, 'is not {"image": path, "label": path}'),
        ({"training": [ENTRY, ENTRY]}, "two cases are called a"),
        ({"training": [ENTRY, {"image": "./imagesTr/a.nii"}]}, "two cases are called a"),
        ({"labels": None}, '"labels" is missing or no JSON object'),
        ({"labels": {"0": "background", "2": "organ"}}, "labels are numbered [0, 2]"),
        ({"labels": {"1": "organ", "2": "tumour"}}, "labels are numbered [1, 2]"),
        ({"labels": {"background": 0, "organ": 1}}, "the keys must be numbers"),
        ({"labels": {"0": "background"}}, "give the background and one class or more"),
        ({"labels": {"0": "background", "1": "organ", "2": "organ"}}, "each its own name"),
        ({"modality": None}, '"modality" is missing'),
        ({"modality": {"1": "CT"}}, "modality are numbered [1]"),
        ({"modality": None, "channel_names": {"0": "CT"}}, "read it with data=nnunet"),
    ],
)
def test_a_wrong_dataset_json_is_refused(tmp_path: Path, changes: dict, what: str) -> None:
    data = decathlon(tmp_path)
    rewrite(tmp_path, **changes)
    said = refusal(data)
    assert said.startswith(str(tmp_path / "dataset.json"))
    assert what in said


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_unreadable_json_is_refused_with_its_path(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "dataset.json").write_bytes(content)
    assert refusal(Data(format="decathlon", root=str(tmp_path))).startswith(f"{tmp_path / 'dataset.json'}: ")


@pytest.mark.parametrize("layout", ["decathlon", "nnunet"])
def test_a_folder_without_dataset_json_is_refused(tmp_path: Path, layout: str) -> None:
    assert f"{tmp_path / 'dataset.json'}: no such file" in refusal(Data(format=layout, root=str(tmp_path)))


@pytest.mark.parametrize("kind", ["image", "label"])
@pytest.mark.parametrize(
    "name",
    [
        "../x.nii.gz",
        "imagesTr/../../x.nii.gz",
        "imagesTr/../imagesTr/a.nii.gz",
        "/etc/x.nii.gz",
        "{root}/a.nii",
        "a\0b",
        7,
        None,
    ],
)
def test_a_path_that_leaves_the_folder_is_refused(tmp_path: Path, kind: str, name: Any) -> None:
    data = decathlon(tmp_path)
    name = name.replace("{root}", str(tmp_path)) if isinstance(name, str) else name
    rewrite(tmp_path, training=[ENTRY | {kind: name}])
    assert f"{name!r} is no path inside {tmp_path}" in refusal(data)


def test_a_link_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    data = decathlon(tmp_path / "set")
    write(tmp_path / "elsewhere" / "a.nii.gz", image())
    linked = tmp_path / "set" / "linked"
    linked.symlink_to(tmp_path / "elsewhere")
    rewrite(tmp_path / "set", training=[ENTRY | {"image": "linked/a.nii.gz"}])
    assert "'linked/a.nii.gz' is no path inside" in refusal(data)
    linked.unlink()
    linked.symlink_to(tmp_path / "set" / "imagesTr")
    assert read_dataset(data).cases[0].id == "a"


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    decathlon(tmp_path / "set")
    (tmp_path / "link").symlink_to(tmp_path / "set")
    assert len(read_dataset(Data(format="decathlon", root=str(tmp_path / "link"))).cases) == 4


def nnunet(root: Path, **changes: Any) -> Data:
    """Two labelled cases and one without a label, of two channels."""
    for name in ("b_0001", "a"):
        write(root / "labelsTr" / f"{name}.nii.gz", label())
    for name in ("b_0001", "a", "c"):
        for channel in range(2):
            write(root / "imagesTr" / f"{name}_{channel:04d}.nii.gz", image())
    (root / "imagesTr" / "._a_0000.nii.gz").write_bytes(b"Mac")
    content = {
        "channel_names": {"0": "T1", "1": "T2"},
        "labels": {"organ": 1, "background": 0, "ignore": 2},
        "numTraining": 3,
        "file_ending": ".nii.gz",
    }
    (root / "dataset.json").write_text(json.dumps(content))
    rewrite(root, **changes)
    return Data(format="nnunet", root=str(root))


def test_nnunet(tmp_path: Path) -> None:
    task = read_dataset(nnunet(tmp_path))
    assert (task.name, task.channels, task.classes, task.ignore) == (
        tmp_path.name,
        ("T1", "T2"),
        ("background", "organ"),
        2,
    )
    assert [case.id for case in task.cases] == ["a", "b_0001", "c"]
    assert task.cases[1].images == tuple(tmp_path / f"imagesTr/b_0001_{c:04d}.nii.gz" for c in range(2))
    assert [case.label for case in task.cases] == [
        tmp_path / "labelsTr/a.nii.gz",
        tmp_path / "labelsTr/b_0001.nii.gz",
        None,
    ]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"labels": {"background": 0, "whole": [1, 2], "core": 2}}, "regions are not supported"),
        (
            {"labels": {"background": 0, "ignore": 1, "organ": 2}},
            "1 is the label to ignore; it must be above all others",
        ),
        ({"labels": {"background": 0, "organ": 1, "tumour": 1}}, "two names share a value"),
        ({"labels": {"background": 0, "organ": 2}}, "labels are numbered [0, 2]"),
        ({"channel_names": None}, '"channel_names" is missing'),
        ({"file_ending": ".png"}, "\"file_ending\" is '.png'; convert the volumes"),
        ({"file_ending": None}, '"file_ending" is missing'),
    ],
)
def test_a_wrong_nnunet_json_is_refused(tmp_path: Path, changes: dict, what: str) -> None:
    said = refusal(nnunet(tmp_path, **changes))
    assert said.startswith(str(tmp_path / "dataset.json"))
    assert what in said


def test_two_answers_to_what_is_ignored_are_refused(tmp_path: Path) -> None:
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
    data = folders(
        tmp_path,
        ["a.nii", "a_2019.nii", "b_0000.nii.gz", "scan_2019.nii", "x_2019.nii", "x_2020.nii"],
        ["a.nii.gz", "b.nii", "scan_2019.nii"],
    )
    task = read_dataset(data)
    assert (task.name, task.channels, task.ignore) == (tmp_path.name, ("channel_0",), 255)
    assert task.classes == ("background", "organ", "tumour")
    assert [(case.id, case.images[0].name, case.label and case.label.name) for case in task.cases] == [
        ("a", "a.nii", "a.nii.gz"),
        ("a_2019", "a_2019.nii", None),
        ("b", "b_0000.nii.gz", "b.nii"),
        ("scan_2019", "scan_2019.nii", "scan_2019.nii"),
        ("x_2019", "x_2019.nii", None),
        ("x_2020", "x_2020.nii", None),
    ]


def test_folders_with_several_channels(tmp_path: Path) -> None:
    data = folders(tmp_path, ["a_0001.nii", "a_0000.nii"], ["a.nii"])
    task = read_dataset(data)
    assert task.channels == ("channel_0", "channel_1")
    assert [path.name for path in task.cases[0].images] == ["a_0000.nii", "a_0001.nii"]
    assert read_dataset(folders(tmp_path / "4d", ["a.nii"], ["a.nii"], (6, 5, 4, 3))).channels[2] == "channel_2"


@pytest.mark.parametrize(
    ("images", "labels", "what"),
    [
        (["a.nii"], ["a.nii", "b.nii"], "labels/b.nii: no image of that name"),
        (["a.nii"], ["a.nii", "b.nii", "c.nii", "d.nii"], "; nor of c, d; add it"),
        (["a.nii"], ["a.nii", "a.nii.gz"], "two cases are called a"),
        ([], ["a.nii"], "images: no such folder"),
    ],
)
def test_folders_that_do_not_match_are_refused(tmp_path: Path, images: list, labels: list, what: str) -> None:
    assert what in refusal(folders(tmp_path, images, labels))


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
    task = read_dataset(data)
    assert task.classes == ("background", "organ", "vessel", "lesion")
    assert [case.id for case in task.cases] == ["phantom_000", "phantom_001"]
    assert all(path.is_file() for case in task.cases for path in (*case.images, case.label))
    assert {path.parts[:2] for path in task.cases[0].images} == {("data", "phantom")}
    data.root = "mine"
    assert read_dataset(data).cases[0].images[0].parts[0] == "mine"


def task_of(*labelled: str) -> DatasetInfo:
    cases = [Case(name, (Path(name),), Path(name)) for name in labelled] + [Case("unlabelled", (Path("u"),), None)]
    return DatasetInfo("T", ("CT",), ("background", "organ"), None, tuple(cases))


def ids(cases: tuple[Case, ...]) -> list[str]:
    return [case.id for case in cases]


def test_a_split_file_goes_before_the_fold_and_the_fold_before_the_share(tmp_path: Path) -> None:
    task = task_of(*"abcde")
    (tmp_path / "split.json").write_text('{"train": ["a"], "val": ["e", "b"]}')
    data = Data(split=str(tmp_path / "split.json"), fold=0, folds=5, val_fraction=0.4)
    assert [ids(part) for part in split(task, data)] == [["a"], ["b", "e"]]
    data.split = None
    assert len(split(task, data)[1]) == 1
    data.fold = None
    assert ids(split(task, data)[1]) == ["b", "d"]


def test_the_split_depends_on_the_ids_alone() -> None:
    names = [f"{n}" for n in np.random.default_rng(0).permutation(40)]
    for data in (Data(fold=2), Data()):
        first, again = (split(task_of(*order), data) for order in (names, sorted(names)))
        assert [ids(part) for part in first] == [ids(part) for part in again]


def test_what_has_no_label_is_in_no_part_and_cannot_be_listed(tmp_path: Path) -> None:
    task = task_of("a", "b")
    assert [ids(part) for part in split(task, Data())] == [["a"], ["b"]]
    (tmp_path / "split.json").write_text('{"train": ["a"], "val": ["unlabelled"]}')
    with pytest.raises(UserError, match=r'split.json: "val" names unlabelled: no labelled case'):
        split(task, Data(split=str(tmp_path / "split.json")))


def test_one_labelled_case_cannot_be_split() -> None:
    with pytest.raises(UserError, match="T: 1 labelled cases; training and validation need one each"):
        split(task_of("a"), Data())


def test_a_split_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no\.json: no such file"):
        split(task_of("a", "b"), Data(split=str(tmp_path / "no.json")))
