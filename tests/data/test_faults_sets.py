"""Data sets whose parts do not fit: nothing to learn, cases in both parts, paths that leave, files that change."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from nifti_files import decathlon, errors, image, label, told, write

from unet3d import build
from unet3d.config import Config, Data
from unet3d.data.cases import read_dataset, split
from unet3d.data.check import WARNING
from unet3d.errors import UserError


def test_d9_a_case_and_a_part_without_a_class_are_warned_of(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    paths = {name: tmp_path / f"labelsTr/{name}.nii.gz" for name in "abcd"}
    write(paths["a"], np.zeros((6, 5, 4), np.uint8))
    for name in "bd":
        write(paths[name], label(classes=2))
    lines = [
        f"{WARNING}a: {paths['a']}: has no foreground",
        f"{WARNING}Small: tumour in no train case; its score will mean nothing there",
    ]
    assert told(data) == lines
    write(paths["c"], label(classes=2))
    assert told(data) == [*lines, f"{WARNING}Small: tumour in no val case; its score will mean nothing there"]


def test_d9_a_training_part_without_any_foreground_is_an_error(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    data.ignore = 3
    for name in "abd":
        write(tmp_path / f"labelsTr/{name}.nii.gz", label(classes=1) + 3 * (label(classes=2) > 0).astype(np.uint8))
    assert errors(told(data)) == [
        "Small: no foreground in any training case; there is nothing to learn, check the label maps"
    ]


def held_out(tmp_path: Path) -> tuple[Data, Path, Path]:
    """A data set with its split, one training image and the one held out."""
    data = decathlon(tmp_path)
    train, val = split(read_dataset(data), data)
    return data, train[0].images[0], val[0].images[0]


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
@pytest.mark.parametrize("full", [False, True])
def test_d12_a_link_from_val_to_train_is_told(tmp_path: Path, full: bool, link: Callable[[Path, Path], None]) -> None:
    data, seen, unseen = held_out(tmp_path)
    unseen.unlink()
    link(unseen, seen)
    assert told(data, full) == [f"c: {unseen}: is held out, but training sees the same image as a; take one out"]


@pytest.mark.parametrize("full", [False, True])
def test_d12_one_path_under_two_names_is_told(tmp_path: Path, full: bool) -> None:
    data, seen, unseen = held_out(tmp_path)
    unseen.unlink()
    (tmp_path / "again").symlink_to(seen.parent)
    shutil.copy(seen, unseen)
    (seen.parent / "c.nii.gz").unlink()
    (seen.parent / "c.nii.gz").symlink_to(tmp_path / "again" / seen.name)
    assert [line[0] for line in told(data, full)] == ["c"]


def test_d12_the_same_voxels_in_train_and_val_are_told_whatever_the_files(tmp_path: Path) -> None:
    data, seen, unseen = held_out(tmp_path)
    stored = nib.load(seen)
    write(unseen, np.asanyarray(stored.dataobj).astype(np.float64), stored.affine)
    assert seen.read_bytes() != unseen.read_bytes()
    assert told(data, full=False) == []
    assert [line.split(";")[0] for line in told(data)] == [
        f"c: {unseen}: is held out, but training sees the same image as a"
    ]


def test_d12_a_copy_within_train_is_no_leak(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    shutil.copy(tmp_path / "imagesTr/a.nii.gz", tmp_path / "imagesTr/b.nii.gz")
    assert told(data) == []


def test_d12_cases_that_cannot_be_read_are_not_taken_for_each_other(tmp_path: Path) -> None:
    data, seen, unseen = held_out(tmp_path)
    seen.unlink(), unseen.unlink()
    assert [line.split(": ")[2] for line in told(data)] == ["no such file; restore it or take the case out"] * 2


def entry(image_name: Any, label_name: Any = "labelsTr/a.nii.gz") -> dict[str, Any]:
    return {"image": image_name, "label": label_name}


def rewrite(root: Path, **changes: Any) -> None:
    path = root / "dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", ["../elsewhere/x.nii.gz", "{outside}/x.nii.gz", "link/x.nii.gz"])
def test_d13_a_path_that_leaves_the_root_is_refused_unless_it_may(tmp_path: Path, name: str) -> None:
    data = decathlon(tmp_path / "set")
    write(tmp_path / "elsewhere" / "x.nii.gz", image())
    (tmp_path / "set" / "link").symlink_to(tmp_path / "elsewhere")
    name = name.replace("{outside}", str(tmp_path / "elsewhere"))
    rewrite(tmp_path / "set", training=[entry(name), entry("imagesTr/b.nii.gz", "labelsTr/b.nii.gz")])
    with pytest.raises(UserError, match=r"is no path inside .*data\.allow_outside=true") as caught:
        read_dataset(data)
    assert str(caught.value).startswith(f"{tmp_path / 'set' / 'dataset.json'}: ")
    data.allow_outside = True
    assert [case.id for case in read_dataset(data).cases] == ["b", "x"] and told(data) == []


@pytest.mark.parametrize("layout", ["folders", "nnunet"])
@pytest.mark.parametrize("linked", ["image", "label", "folder", "dataset.json"])
def test_d13_a_link_out_of_the_root_is_refused_in_every_layout(tmp_path: Path, layout: str, linked: str) -> None:
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
    if (layout, linked) == ("folders", "dataset.json"):
        assert len(read_dataset(data).cases) == 2, "it is not read"
        return
    with pytest.raises(
        UserError, match=rf"is a link out of {root}; put the file there, or set data\.allow_outside=true"
    ):
        read_dataset(data)
    data.allow_outside = True
    assert len(read_dataset(data).cases) == 2


def test_d13_a_folder_that_the_command_line_puts_elsewhere_is_read(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / "set" / "labels" / f"{name}.nii", label())
        write(tmp_path / "elsewhere" / f"{name}.nii", image())
    for images in ("../elsewhere", str(tmp_path / "elsewhere")):
        data = Data(format="folders", root=str(tmp_path / "set"), images=images, classes=["background", "x", "y"])
        assert len(read_dataset(data).cases) == 2


ENTRY = entry("imagesTr/a.nii.gz")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ({"training": [ENTRY, ENTRY]}, "two cases are called a; rename one of them"),
        ({"training": []}, "lists no case; there must be at least two with labels"),
        ({"training": None}, '"training" is missing or no JSON list'),
        ({"training": [entry("imagesTr/\x1b[2J.nii")]}, r"'imagesTr/\x1b[2J.nii' is no path inside"),
        ({"training": [entry("a" * 5000 + ".nii")]}, "aaa.nii' is no path inside"),
        ({"training": [entry("imagesTr/\ud800.nii")]}, r"'imagesTr/\ud800.nii' is no path inside"),
        ({"training": [entry("\u202ea.nii")]}, r"'\u202ea.nii' is no path inside"),
        ({"name": ["a"]}, "\"name\" is ['a']; give one line of text"),
        ({"name": "a\nb"}, r'"name" is \'a\nb\'; give one line of text'.replace("\\'", "'")),
        ({"modality": {"0": {"a": 1}}}, "modality: {'a': 1} is no name; give one line of text"),
        ({"labels": {"0": "background", "1": "or\rgan"}}, r"labels: 'or\rgan' is no name; give one line of text"),
        ({"labels": {"0": "background", "1": "a", "01": "b"}}, "a number occurs twice, give each name its own"),
    ],
)
def test_d13_a_dataset_json_that_cannot_be_meant_is_refused(tmp_path: Path, content: dict, what: str) -> None:
    data = decathlon(tmp_path)
    rewrite(tmp_path, **content)
    with pytest.raises(UserError) as caught:
        read_dataset(data)
    said = str(caught.value)
    assert said.startswith(f"{tmp_path / 'dataset.json'}: ") and what in said and said.isprintable()


def test_d13_json_that_says_two_things_or_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, where = decathlon(tmp_path), tmp_path / "dataset.json"
    sound = where.read_text()
    where.write_text('{"labels": {"0": "liver", "1": "spleen"}, ' + sound[1:])
    with pytest.raises(UserError, match="a name occurs twice in one object"):
        read_dataset(data)
    where.write_text(sound)
    monkeypatch.setattr("unet3d.data.dataset_json.MAX_BYTES", len(sound) - 1)
    with pytest.raises(UserError, match=f"is larger than {len(sound) - 1} bytes"):
        read_dataset(data)


def test_d13_a_pipe_or_a_device_in_the_place_of_json_is_not_waited_for(tmp_path: Path) -> None:
    data, where = decathlon(tmp_path), tmp_path / "dataset.json"
    data.allow_outside = True
    where.unlink()
    os.mkfifo(where)
    with pytest.raises(UserError, match="is no file; replace it"):
        read_dataset(data)
    where.unlink()
    where.symlink_to("/dev/zero")
    with pytest.raises(UserError, match="is no file; replace it"):
        read_dataset(data)


@pytest.mark.parametrize("value", [True, "1", 1.0, [1, 2], 10**400], ids=lambda value: str(value)[:9])
def test_d13_a_label_of_nnunet_is_one_small_integer(tmp_path: Path, value: Any) -> None:
    (tmp_path / "dataset.json").write_text(
        json.dumps(
            {"channel_names": {"0": "CT"}, "labels": {"background": 0, "x": value}, "file_ending": ".nii"},
        )
    )
    with pytest.raises(UserError) as caught:
        read_dataset(Data(format="nnunet", root=str(tmp_path)))
    assert str(caught.value).startswith(f"{tmp_path / 'dataset.json'}: label") and len(str(caught.value)) < 500


def test_d13_an_ignored_label_that_no_label_map_can_hold_is_refused(tmp_path: Path) -> None:
    """65536 would come out of uint16 as 0."""
    labels = {"background": 0, "x": 1, "ignore": 65536}
    (tmp_path / "dataset.json").write_text(
        json.dumps({"channel_names": {"0": "CT"}, "labels": labels, "file_ending": ".nii"})
    )
    with pytest.raises(UserError, match="65536 is the label to ignore; the highest there can be is 65535"):
        read_dataset(Data(format="nnunet", root=str(tmp_path)))


def test_d13_a_file_name_that_would_command_the_terminal_is_refused(tmp_path: Path) -> None:
    for folder, make in (("images", image), ("labels", label)):
        write(tmp_path / folder / "a\x1b[2J.nii", make())
    with pytest.raises(UserError, match="is no name for a case; rename its files") as caught:
        read_dataset(Data(format="folders", root=str(tmp_path), classes=["background", "x", "y"]))
    assert str(caught.value).isprintable()


def test_d14_a_file_that_changed_is_seen_by_the_next_run(tmp_path: Path) -> None:
    """Prepared cases are kept in memory alone; there is nothing on disk that could be stale."""
    data = decathlon(tmp_path)
    data.intensity = "none"
    before = sorted(tmp_path.rglob("*"))
    first = build.data(Config(data=data))
    old = first.read(first.train[0]).image
    write(tmp_path / "imagesTr/a.nii.gz", image(seed=9))
    assert first.read(first.train[0]).image is old
    second = build.data(Config(data=data))
    assert np.array_equal(second.read(second.train[0]).image[0], image(seed=9)[::-1, ::-1])
    data.spacing = [1.0, 1.0, 1.0]
    third = build.data(Config(data=data))
    assert third.read(third.train[0]).image.shape == (1, 6, 8, 10)
    assert sorted(tmp_path.rglob("*")) == before
