"""Every fault of a data set is told at once, with case and path, and a sound one gets not a word."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from nifti_files import case, decathlon, errors, image, label, told, write

from unet3d.config import Data, Phantom
from unet3d.data.cases import read_dataset, split
from unet3d.data.check import WARNING, summary


@pytest.mark.parametrize("full", [False, True])
def test_nothing_is_said_against_the_phantom(tmp_path: Path, full: bool) -> None:
    assert told(Data(root=str(tmp_path), phantom=Phantom(cases=3, shape=[16, 16, 16])), full) == []


def test_all_problems_of_all_cases_are_told_at_once(tmp_path: Path) -> None:
    data = decathlon(tmp_path, tuple("abcdef"))
    images, labels = tmp_path / "imagesTr", tmp_path / "labelsTr"
    (images / "a.nii.gz").unlink()
    (labels / "a.nii.gz").write_bytes(b"")
    write(images / "b.nii.gz", np.full((6, 5, 4), np.nan, np.float32))
    write(labels / "b.nii.gz", np.full((6, 5, 4), 7, np.uint8))
    write(labels / "c.nii.gz", label((6, 5, 3)))
    write(images / "d.nii.gz", image((6, 5, 4, 2)))
    case(tmp_path, image((20, 20, 20)), label((20, 20, 20)), "e")
    (images / "e.nii.gz").write_bytes((images / "e.nii.gz").read_bytes()[:-9])
    assert errors(told(data)) == [
        f"a: {images / 'a.nii.gz'}: no such file; restore it or take the case out",
        f"a: {labels / 'a.nii.gz'}: is empty; replace the file",
        f"b: {images / 'b.nii.gz'}: 120 voxels are NaN or infinite; give them a value, e.g. the background's",
        f"b: {labels / 'b.nii.gz'}: 120 voxels have the label 7; allowed are 0 to 2; relabel them",
        f"c: {labels / 'c.nii.gz'}: has (6, 5, 3) voxels, not the (6, 5, 4) of {images / 'c.nii.gz'}; "
        "resample it onto the image's grid",
        f"d: {images / 'd.nii.gz'}: has 2 channels, the data set 1 (CT); make them agree",
        f"e: {images / 'e.nii.gz'}: damaged (Compressed file ended before the end-of-stream marker was reached); "
        "replace the file",
    ]
    assert [line[0] for line in told(data, full=False)] == list("aacd"), "headers alone show these"


def test_the_quick_pass_reads_no_voxel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = decathlon(tmp_path)

    def never(*arguments: object) -> None:
        raise AssertionError("voxels are read")

    monkeypatch.setattr("unet3d.data.nifti.read_array", never)
    assert told(data, full=False) == []
    with pytest.raises(AssertionError, match="voxels are read"):
        told(data, full=True)


def test_a_split_that_cannot_be_made_is_told_with_the_rest(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    (tmp_path / "imagesTr/a.nii.gz").unlink()
    data.split = str(tmp_path / "split.json")
    lines = told(data)
    assert [line.split(": ")[0] for line in lines] == ["a", data.split]


def test_a_case_without_a_label_is_warned_of(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    path = tmp_path / "dataset.json"
    content = json.loads(path.read_text())
    del content["training"][0]["label"]
    path.write_text(json.dumps(content))
    assert [line.split(";")[0] for line in told(data)] == [
        f"{WARNING}a: {tmp_path / 'imagesTr/a.nii.gz'}: has no label map"
    ]


def test_the_summary_is_plain(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    write(tmp_path / "imagesTr/b.nii.gz", image((8, 9, 7)), np.diag([1, 1, 3, 1]))
    task = read_dataset(data)
    assert summary(task, *split(task, data)) == [
        "Small: 4 cases: 3 train, 1 val, 0 without labels",
        "channels: CT",
        "classes: 0 background, 1 organ, 2 tumour",
        "size (voxels): 6 x 5 x 4 (median), from 6 x 5 x 4 to 8 x 9 x 7",
        "spacing (mm): 1 x 1.5 x 2.5 (median), from 1 x 1 x 2.5 to 1 x 1.5 x 3",
    ]


def test_the_summary_survives_files_that_cannot_be_read(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    data.ignore = 255
    task = read_dataset(data)
    shutil.rmtree(tmp_path / "imagesTr")
    lines = summary(task, *split(task, data))
    assert lines[2] == "classes: 0 background, 1 organ, 2 tumour; 255 is ignored"
    assert lines[3:] == ["size (voxels): unknown", "spacing (mm): unknown"]
