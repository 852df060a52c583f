"""data.label_map: labels of files become others where they are read; what does not fit names the map that would."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from guards import without
from nifti_files import changed, checked, decathlon, errors, holds, image, label, rewrite, told, write
from promises import promise

from unet3d.base.errors import UserError
from unet3d.config import compose
from unet3d.config.data_rules import label_sources
from unet3d.config.schema import Data
from unet3d.data.cache import key_of
from unet3d.data.cases import read_dataset
from unet3d.data.check import check_cases, summary
from unet3d.data.labels import class_names, options_for, written_values, written_words
from unet3d.data.prepare import CaseReader, prepare_data
from unet3d.data.splits import split
from unet3d.run.training_state import fingerprint

Dataset = Callable[[Path], Data]


def nnunet(root: Path, **labels: int) -> Data:
    for name in "abcd":
        write(root / "labelsTr" / f"{name}.nii.gz", np.array([0, 1, 2, 4], np.uint8)[label(classes=4)])
        write(root / "imagesTr" / f"{name}_0000.nii.gz", image(seed=ord(name)))
    content = {"channel_names": {"0": "T1"}, "file_ending": ".nii.gz", "labels": labels}
    (root / "dataset.json").write_text(json.dumps(content))
    return Data(format="nnunet", root=str(root))


def folders(root: Path, values: tuple[int, ...], classes: list[str]) -> Data:
    for name in "abcd":
        write(root / "labels" / f"{name}.nii.gz", np.array(values, np.int16)[label(classes=len(values))])
        write(root / "images" / f"{name}.nii.gz", image(seed=ord(name)))
    return Data(format="folders", root=str(root), classes=classes)


def prepared(data: Data) -> tuple[np.ndarray, tuple[str, ...]]:
    """The first case's labels as training sees them, and the classes."""
    found = prepare_data(data)
    return found.read(found.train[0]).label.numpy(), found.dataset.classes


def test_labels_are_merged_swapped_and_left_out_with_their_names(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    stored, _ = prepared(data)
    merged, names = prepared(replace(data, label_map={1: [1, 2]}))
    assert np.array_equal(merged, (stored > 0).astype(merged.dtype)) and names == ("background", "organ+tumour")
    swapped, names = prepared(replace(data, label_map={1: 2, 2: 1}))
    assert np.array_equal(swapped, np.array([0, 2, 1])[stored]) and names == ("background", "tumour", "organ")
    single, names = prepared(replace(data, label_map={1: 2}))
    assert np.array_equal(single, stored == 2) and names == ("background", "tumour")
    named, names = prepared(replace(data, label_map={1: [1, 2]}, classes=["air", "body"]))
    assert np.array_equal(named, merged) and names == ("air", "body")


def test_labels_are_merged_before_they_are_resampled(tmp_path: Path) -> None:
    """Of a voxel that is a third 1, a third 2 and a bit more 0, most is foreground once 1 and 2 are one class."""
    data = decathlon(tmp_path)
    voxels = np.zeros((6, 5, 4), np.uint8)
    voxels[0::3], voxels[1::3] = 1, 2
    for name in "abcd":
        write(tmp_path / f"labelsTr/{name}.nii.gz", voxels)
    coarse = replace(data, spacing=[3.0 * size for size in _spacing(data)])
    merged, _ = prepared(replace(coarse, label_map={1: [1, 2]}))
    assert merged.all()


def _spacing(data: Data) -> tuple[float, float, float]:
    dataset = read_dataset(data)
    return CaseReader(dataset, None).read_volume(dataset.cases[0]).grid.spacing


def test_an_ignored_label_stays_ignored(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    voxels = changed(label(), 255).astype(np.uint8)
    write(tmp_path / "labelsTr/a.nii.gz", voxels)
    data = replace(data, label_map={1: [1, 2]}, ignore=255)
    dataset = read_dataset(data)
    found = CaseReader(dataset, None).read_volume(dataset.cases[0]).label
    assert found is not None and sorted(np.unique(found).tolist()) == [0, 1, 255]
    assert np.count_nonzero(found == 255) == 1 and errors(checked(data)) == []
    with pytest.raises(UserError, match=r"^data\.label_map=\{1: \[1, 255\]\}: 255 "):
        read_dataset(replace(data, label_map={1: [1, 255]}))


def test_an_ignored_label_that_a_new_one_would_be_taken_for_is_refused(tmp_path: Path) -> None:
    data = folders(tmp_path, (0, 1, 2, 3, 4), ["air", "a", "b", "c"])
    read_dataset(replace(data, label_map={1: 1, 2: [2, 3]}, ignore=4, classes=["air", "a", "b"]))
    with pytest.raises(UserError, match=r"^data\.label_map=\{1: 1, 2: 2, 3: 4\}: .*\b3, .*\b3;"):
        read_dataset(replace(data, label_map={1: 1, 2: 2, 3: 4}, ignore=3))


def test_brats_labels_of_every_layout(tmp_path: Path) -> None:
    data = nnunet(tmp_path / "n", background=0, core=1, edema=2, enhancing=4)
    with pytest.raises(UserError) as caught:
        read_dataset(data)
    option = "'data.label_map={1:1,2:2,3:4}'"
    assert told([str(caught.value)], [[f"{tmp_path / 'n' / 'dataset.json'}: ", "[0, 1, 2, 4]", f" {option}"]])
    mapped = _as_written(data, option)
    labels, names = prepared(mapped)
    assert sorted(np.unique(labels).tolist()) == [0, 1, 2, 3] and names == ("background", "core", "edema", "enhancing")
    assert errors(checked(mapped)) == []
    root = _decathlon_of_brats(tmp_path / "d")
    rewrite(root, labels={"0": "background", "1": "c", "2": "e", "4": "n"})
    _, names = prepared(Data(format="decathlon", root=str(root), label_map={1: [1, 4], 2: 2}))
    assert names == ("background", "c+n", "e")


def _decathlon_of_brats(root: Path) -> Path:
    decathlon(root)
    for name in "abcd":
        write(root / f"labelsTr/{name}.nii.gz", np.array([0, 1, 2, 4], np.uint8)[label(classes=4)])
    return root


def _as_written(data: Data, option: str) -> Data:
    """The data with an option as a message writes it, by way of the command line."""
    config = compose.compose([option.strip("'"), f"data={data.format}", f"data.root={data.root}", *_classes(data)])
    return config.data


def _classes(data: Data) -> list[str]:
    return [f"data.classes=[{','.join(data.classes)}]"] if data.classes else []


def proposals(lines: list[str]) -> list[str]:
    """Return the problems that name a map."""
    return [line for line in errors(lines) if "data.label_map=" in line]


@pytest.mark.parametrize(
    ("values", "classes", "option"),
    [
        ((0, 255), ["air", "organ"], "'data.label_map={1:255}'"),
        ((0, 128, 255), ["air", "organ", "tumour"], "'data.label_map={1:128,2:255}'"),
        ((0, 1, 2, 4), ["air", "x", "y", "z"], "'data.label_map={1:1,2:2,3:4}'"),
    ],
)
def test_check_data_proposes_a_map_that_then_has_no_problem(
    tmp_path: Path, values: tuple[int, ...], classes: list[str], option: str
) -> None:
    data = folders(tmp_path, values, classes)
    lines = checked(data)
    held = ", ".join(map(str, values))
    # once for all files, not for each
    wanted = [f"{tmp_path.name}: ", " 4 cases ", f" {held}: add {option} ", f"{tmp_path / 'labels' / 'a.nii.gz'}: "]
    assert told(errors(lines), [wanted])
    with pytest.raises(UserError, match=re.escape(f" {option}")):
        prepared(data)
    mapped = _as_written(data, option)
    dataset = read_dataset(mapped)
    headers = check_cases(dataset, dataset.cases, mapped).headers
    assert checked(mapped) == [] and "0 air" in summary(dataset, *split(dataset, mapped), headers)[2]


def test_the_map_that_is_proposed_holds_the_labels_of_all_files(tmp_path: Path) -> None:
    """One file has 1 and 4, another 2: alone, the first would give 4 the place of 2."""
    data = folders(tmp_path, (0, 1, 4), ["air", "x", "y"])
    write(tmp_path / "labels" / "b.nii.gz", label() // 2 * 2)
    (line,) = proposals(checked(data))
    assert holds(line, [" 0, 1, 2, 4: ", "'data.label_map={1:1,2:2,3:4}' 'data.classes=[air,x,y,label_4]'"])


def test_a_label_that_a_map_misses_is_a_class_s_if_that_has_none_in_all_files(tmp_path: Path) -> None:
    """As where dataset.json has a typo; else nobody's."""
    data = replace(nnunet(tmp_path, background=0, one=1, two=2, three=5), label_map={1: 1, 2: 2, 3: 5})
    (line,) = [line for line in checked(data) if "add" in line]
    assert "'data.label_map={1:1,2:2,3:4}'" in line
    for name in "bcd":
        write(tmp_path / "labelsTr" / f"{name}.nii.gz", label())
    write(tmp_path / "labelsTr" / "a.nii.gz", np.array([0, 1, 4], np.uint8)[label()])
    data = replace(data, label_map={1: 1, 2: 2}, classes=["background", "one", "two"])
    (line,) = [line for line in checked(data) if "add" in line]
    assert "'data.label_map={0:[0,4,5],1:1,2:2}'" in line


def test_labels_that_neither_map_nor_names_know_are_an_error(tmp_path: Path) -> None:
    data = replace(folders(tmp_path, (0, 1, 2, 7), ["air", "x"]), label_map={1: [1, 2]})
    lines = checked(data)
    assert holds(errors(lines)[0], [" 7;", " 0, 1, 2)", " add 'data.label_map={0:[0,7],1:[1,2]}' "])
    assert errors(checked(replace(data, label_map={0: [0, 7], 1: [1, 2]}))) == []


@without("unet3d.data.labels.LISTED", 10**6)
@without("unet3d.data.labels.MAX_LABEL", 10**6)
def test_what_is_no_class_gets_no_proposal() -> None:
    for labels in ({-1, 1}, range(1, 200), {70000}, {1}):
        assert options_for(labels, 2, None, ["air", "a"]) == ()
    for value in (-3, 99999):
        with pytest.raises(UserError, match=r"without a gap$"):
            class_names({0: "air", value: "a"}, None, "dataset.json")
    names = [f"c{n}" for n in range(15)]
    assert not options_for({*range(1, 15), *range(20, 28)}, 15, None, names), "too many to list"
    assert options_for({*range(1, 15), 20}, 15, None, names)


def test_a_proposal_holds_all_labels_of_a_file(tmp_path: Path) -> None:
    data = folders(tmp_path, (0, 1), ["air", *(f"c{n}" for n in range(1, 40))])
    held = np.array([0, *range(1, 11), *range(50, 66)], np.uint8)
    write(tmp_path / "labels" / "a.nii.gz", held[np.arange(6 * 5 * 4) % len(held)].reshape(6, 5, 4))
    (line,) = proposals(checked(data))
    assert holds(line, ["24:50,", "39:65}"])


@pytest.mark.parametrize("key", ["organ", "-1"])
def test_a_key_that_is_no_label_is_said_so(key: str) -> None:
    with pytest.raises(UserError, match=rf"^data\.label_map=.*{key}.*: .*\b0\b.*\b65535\b"):
        compose.compose([f"data.label_map={{{key}:1}}"])


def test_a_map_is_not_added_to_that_of_a_file(tmp_path: Path) -> None:
    """Hydra adds the keys of a command line to those of a YAML file."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "own.yaml").write_text("# @package _global_\ndata:\n  label_map: {1: [1, 2], 2: 4}\n")
    given = [compose.search_path(str(tmp_path)), "experiment=own"]
    assert compose.compose(given).data.label_map == {1: [1, 2], 2: 4}
    assert compose.compose([*given, "data.label_map={1:1,2:2}"]).data.label_map == {1: 1, 2: 2}
    with pytest.raises(UserError, match=r"^data\.label_map=\{1:1\}: .*data\.label_map=null"):
        compose.compose([*given, "data.label_map={1:1}"])
    last = ["data.label_map={1:1,2:2}", "data.label_map=null", "data.label_map={1:1}"]
    assert compose.compose([*given, *last]).data.label_map == {1: 1}


def test_names_that_are_to_be_joined_are_text(tmp_path: Path) -> None:
    data = replace(decathlon(tmp_path), label_map={1: [1, 0]})
    rewrite(tmp_path, labels={"0": "air", "1": 5})
    with pytest.raises(UserError, match=r"dataset\.json: labels: 5 "):
        read_dataset(data)


EXAMPLE = "'data.label_map={1:[1,2],2:4}'"


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ({}, [EXAMPLE]),
        ([1, 2], [EXAMPLE]),
        ({0: 3}, [" 1, 2, 3 "]),
        ({1: 1, 3: 2}, [" 1, 2, 3 "]),
        ({1: []}, [EXAMPLE]),
        ({1: [1, 2], 2: 2}, [": 2 "]),
        *(({1: old}, [" 0 ", " 65535;", EXAMPLE]) for old in (1.5, True, [[1]], -1, 65536, "x")),
    ],
)
def test_a_map_that_is_none_is_refused_from_a_command_line_and_from_a_file(value: Any, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        label_sources(value)
    assert told([str(caught.value)], [[f"data.label_map={value}", *parts]])
    with pytest.raises(UserError) as caught:
        compose.from_plain({"data": {"label_map": value}})
    assert holds(str(caught.value), ["data.label_map=", *parts])


def test_names_of_a_map(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    with pytest.raises(UserError, match=r"^data\.label_map=\{1: \[1, 9\]\}: .*\b9\b.*\b0, 1, 2;.*data\.classes"):
        read_dataset(replace(data, label_map={1: [1, 9]}))
    assert read_dataset(replace(data, label_map={1: [1, 9]}, classes=["a", "b"])).classes == ("a", "b")
    names = read_dataset(data).classes
    assert read_dataset(replace(data, label_map={1: 1, 2: 4})).classes == names, "files that dataset.json misstates"
    with pytest.raises(UserError, match=r"^data\.label_map=.*: .*\b2\b.*data\.classes .*\b3\b"):
        compose.compose(["data.label_map={1:[1,2]}", "data.classes=[a,b,c]"])


def test_the_map_goes_through_yaml_json_and_a_checkpoint_and_a_resumed_run_keeps_it(tmp_path: Path) -> None:
    words = ["data.label_map={1:[1,2],2:4}"]
    config = compose.compose(words)
    assert config.data.label_map == {1: [1, 2], 2: 4}
    plain = compose.to_plain(config)
    for values in (plain, json.loads(json.dumps(plain)), yaml.safe_load(compose.to_yaml(config))):
        assert compose.from_plain(values) == config
    (tmp_path / "config.yaml").write_text(compose.to_yaml(config))
    for changes in (["optim.lr=0.1"], words):
        assert compose.resumed(tmp_path, compose.compose_tree(changes)).data == config.data
    for other in ("{1:[1,2]}", "null"):
        with pytest.raises(UserError, match=r"^resume: .*\bdata\.label_map: .*2: 4"):
            compose.resumed(tmp_path, compose.compose_tree([f"data.label_map={other}"]))


def blind_to_options(hashes: object, *_: object) -> str:
    """Name a case on disk by its files alone."""
    return key_of(hashes)


@without("unet3d.data.prepare.key_of", blind_to_options)
def test_what_is_cached_and_what_a_run_rests_on_differ_by_the_map(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    keys, grounds = set(), []
    for label_map in (None, {1: [1, 2]}, {1: 1, 2: 2}, {1: 2, 2: 1}):
        mapped = replace(data, label_map=label_map, cache="disk", cache_root=str(tmp_path / "c"))
        found = prepare_data(mapped)
        keys.add(found.read.key(found.train[0]))
        grounds.append(fingerprint(found, None)["classes"])
    assert len(keys) == 4
    assert grounds[1:] == [
        ["background", "organ+tumour"],
        ["background", "organ", "tumour"],
        ["background", "tumour", "organ"],
    ]


@promise("Prediction", "labels that are not ...")
@pytest.mark.parametrize(
    ("label_map", "values", "words"),
    [
        (None, (0, 1, 2), "0 air, 1 a, 2 b"),
        ({0: [0, 7], 1: 1, 2: 4}, (0, 1, 4), "0 air, 1 a, 4 b"),
        ({1: 2, 2: 1}, (0, 2, 1), "0 air, 2 a, 1 b"),
        ({1: [1, 2], 2: 4}, (0, 1, 4), "0 air, 1 a (in the files 1, 2), 4 b"),
        ({1: [2, 3], 2: 1}, (0, 1, 2), "0 air, 1 a (in the files 2, 3), 2 b (in the files 1)"),
        ({0: 1, 1: 0, 2: 2}, (0, 1, 2), "0 air, 1 a (in the files 0), 2 b"),
    ],
)
def test_classes_are_written_as_labels_of_the_files_unless_one_would_be_two(
    label_map: dict | None, values: tuple[int, ...], words: str
) -> None:
    data = Data(label_map=label_map)
    assert written_values(data, 3) == values and written_words(data, ("air", "a", "b"), None) == words
