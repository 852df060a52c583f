"""data.label_map: labels of files become others where they are read; what does not fit names the map that would."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from guards import without
from nifti_files import changed, checked, decathlon, errors, holds, image, label, told, write
from promises import promise
from tables import says, table

from unet3d.base.errors import UserError
from unet3d.config import compose
from unet3d.config.schema import Data
from unet3d.data.cache import key_of
from unet3d.data.cases import read_dataset
from unet3d.data.check import check_cases, summary
from unet3d.data.labels import class_names, options_for, written_values, written_words
from unet3d.data.prepare import CaseReader, prepare_data
from unet3d.data.splits import split
from unet3d.run.training_state import fingerprint


def folders(root: Path, values: list[int], classes: str) -> Data:
    """A data set without a dataset.json whose label maps hold these values."""
    for name in "abcd":
        write(root / "labels" / f"{name}.nii.gz", np.array(values, np.int16)[label(classes=len(values))])
        write(root / "images" / f"{name}.nii.gz", image(seed=ord(name)))
    return Data(format="folders", root=str(root), classes=classes.split())


def prepared(data: Data) -> tuple[np.ndarray, tuple[str, ...]]:
    """The first case's labels as training sees them, and the classes."""
    found = prepare_data(data)
    return found.read(found.train[0]).label.numpy(), found.dataset.classes


@pytest.mark.parametrize(
    ("label_map", "becomes", "names"),
    [
        ({1: [1, 2]}, [0, 1, 1], "background organ+tumour"),
        ({1: 2, 2: 1}, [0, 2, 1], "background tumour organ"),
        ({1: 2}, [0, 0, 1], "background tumour"),
    ],
)
def test_labels_are_merged_swapped_and_left_out_with_their_names(
    tmp_path: Path, label_map: dict, becomes: list[int], names: str
) -> None:
    data = decathlon(tmp_path)
    stored, _ = prepared(data)
    mapped, classes = prepared(replace(data, label_map=label_map))
    assert np.array_equal(mapped, np.array(becomes)[stored])
    assert classes == tuple(names.split())
    if len(classes) == 2:
        assert prepared(replace(data, label_map=label_map, classes=["air", "body"]))[1] == ("air", "body")


def test_labels_are_merged_before_they_are_resampled(tmp_path: Path) -> None:
    """Of a voxel that is a third 1, a third 2 and a bit more 0, most is foreground once 1 and 2 are one class."""
    data = decathlon(tmp_path)
    voxels = np.zeros((6, 5, 4), np.uint8)
    voxels[0::3], voxels[1::3] = 1, 2
    for name in "abcd":
        write(tmp_path / f"labelsTr/{name}.nii.gz", voxels)
    merged, _ = prepared(replace(data, spacing=[3.0, 4.5, 7.5], label_map={1: [1, 2]}))
    assert merged.all()


def test_an_ignored_label_stays_ignored_and_above_the_new_ones(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    write(tmp_path / "labelsTr/a.nii.gz", changed(label(), 255).astype(np.uint8))
    data = replace(data, label_map={1: [1, 2]}, ignore=255)
    dataset = read_dataset(data)
    found = CaseReader(dataset, None).read_volume(dataset.cases[0]).label
    assert np.unique(found).tolist() == [0, 1, 255]
    assert np.count_nonzero(found == 255) == 1
    assert errors(checked(data)) == []
    with pytest.raises(UserError, match=r"^data\.label_map=\{1: \[1, 255\]\}: 255 "):
        read_dataset(replace(data, label_map={1: [1, 255]}))
    with pytest.raises(UserError, match=r"^data\.label_map=\{1: 1, 2: 2, 3: 4\}: .*\b3, .*\b3;"):
        read_dataset(replace(data, label_map={1: 1, 2: 2, 3: 4}, ignore=3))


def as_written(data: Data, option: str) -> Data:
    """The data with an option as a message writes it, by way of the command line."""
    words = [f"data={data.format}", f"data.root={data.root}", f"data.classes=[{','.join(data.classes)}]"]
    return compose.compose([option.strip("'"), *words]).data


@pytest.mark.parametrize(
    ("values", "classes", "option"),
    [
        ([0, 255], "air organ", "'data.label_map={1:255}'"),
        ([0, 1, 2, 4], "air x y z", "'data.label_map={1:1,2:2,3:4}'"),
    ],
)
def test_check_data_proposes_a_map_that_then_has_no_problem(
    tmp_path: Path, values: list[int], classes: str, option: str
) -> None:
    """Once for all files, not for each."""
    data = folders(tmp_path, values, classes)
    held = ", ".join(map(str, values))
    wanted = [f"{tmp_path.name}: ", " 4 cases ", f" {held}: add {option} ", f"{tmp_path / 'labels' / 'a.nii.gz'}: "]
    assert told(errors(checked(data)), [wanted])
    with pytest.raises(UserError, match=re.escape(f" {option}")):
        prepared(data)
    mapped = as_written(data, option)
    assert checked(mapped) == []
    dataset = read_dataset(mapped)
    headers = check_cases(dataset, dataset.cases, mapped).headers
    assert "0 air" in summary(dataset, *split(dataset, mapped), headers)[2]


def test_a_dataset_json_of_labels_with_a_gap_is_refused_with_the_map(tmp_path: Path) -> None:
    names = {0: "background", 1: "core", 2: "edema", 4: "enhancing"}
    with pytest.raises(UserError, match=re.escape("[0, 1, 2, 4]; number them")) as caught:
        class_names(names, None, "dataset.json")
    assert str(caught.value).endswith(" 'data.label_map={1:1,2:2,3:4}'")


def proposal(data: Data) -> str:
    """Return the one line of a check that proposes a map."""
    (line,) = [line for line in checked(data) if "add " in line]
    return line


def test_the_map_that_is_proposed_holds_the_labels_of_all_files(tmp_path: Path) -> None:
    """One file has 1 and 4, another 2: alone, the first would give 4 the place of 2."""
    data = folders(tmp_path, [0, 1, 4], "air x y")
    write(tmp_path / "labels" / "b.nii.gz", label() // 2 * 2)
    wanted = [" 0, 1, 2, 4: ", "'data.label_map={1:1,2:2,3:4}' 'data.classes=[air,x,y,label_4]'"]
    assert holds(proposal(data), wanted)


@pytest.mark.parametrize(
    ("label_map", "option"),
    [
        ({1: 1, 2: 2, 3: 5}, "'data.label_map={1:1,2:2,3:4}'"),
        ({1: 1, 2: 2}, "'data.label_map={0:[0,4],1:1,2:2}'"),
        ({1: [1, 2]}, "'data.label_map={0:[0,4],1:[1,2]}'"),
    ],
    ids=["typo", "nobody's", "merged"],
)
def test_a_label_that_a_map_misses_is_a_class_s_if_that_has_none_in_all_files_else_background(
    tmp_path: Path, label_map: dict, option: str
) -> None:
    data = folders(tmp_path, [0, 1, 2, 4], " ".join(["air", "x", "y", "z"][: len(label_map) + 1]))
    assert option in proposal(replace(data, label_map=label_map))
    assert errors(checked(replace(as_written(data, option)))) == []


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


def test_a_map_is_not_added_to_that_of_a_file(tmp_path: Path) -> None:
    """Hydra adds the keys of a command line to those of a YAML file."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "own.yaml").write_text("# @package _global_\ndata:\n  label_map: {1: [1, 2], 2: 4}\n")
    given = [compose.search_path(str(tmp_path)), "experiment=own"]
    assert compose.compose(given).data.label_map == {1: [1, 2], 2: 4}
    with pytest.raises(UserError, match=r"^data\.label_map=\{1:1\}: .*data\.label_map=null"):
        compose.compose([*given, "data.label_map={1:1}"])
    last = ["data.label_map={1:1,2:2}", "data.label_map=null", "data.label_map={1:1}"]
    assert compose.compose([*given, *last]).data.label_map == {1: 1}


@pytest.mark.parametrize(
    ("words", "refusal"),
    table("""
    {}            | 'data.label_map={1:[1,2],2:4}'
    [1,2]         | 'data.label_map={1:[1,2],2:4}'
    {0:3}         |  1, 2, 3
    {1:1,3:2}     |  1, 2, 3
    {1:[]}        | 'data.label_map={1:[1,2],2:4}'
    {1:[1,2],2:2} | : 2
    {1:1.5}       |  0 ... 65535;
    {1:true}      |  0 ... 65535;
    {1:[[1]]}     |  0 ... 65535;
    {1:-1}        |  0 ... 65535;
    {1:65536}     |  0 ... 65535;
    {organ:1}     | organ ... 65535
    {-1:1}        | -1 ... 65535
    {1:[1,2]} data.classes=[a,b,c] | data.classes ... 3
"""),
)
def test_a_map_that_is_none_is_refused(words: str, refusal: str) -> None:
    with pytest.raises(UserError, match=r"^data\.label_map=") as caught:
        compose.compose(f"data.label_map={words}".split())
    assert says(str(caught.value), refusal)


def test_a_map_of_labels_without_a_name_needs_names(tmp_path: Path) -> None:
    data = decathlon(tmp_path)
    with pytest.raises(UserError, match=r"^data\.label_map=\{1: \[1, 9\]\}: .*\b9\b.*\b0, 1, 2;.*data\.classes"):
        read_dataset(replace(data, label_map={1: [1, 9]}))
    names = read_dataset(data).classes
    assert read_dataset(replace(data, label_map={1: 1, 2: 4})).classes == names, "files that dataset.json misstates"


def test_a_resumed_run_keeps_its_map(tmp_path: Path) -> None:
    words = ["data.label_map={1:[1,2],2:4}"]
    config = compose.compose(words)
    assert compose.from_plain(compose.to_plain(config)) == config
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
    data = replace(decathlon(tmp_path), cache="disk", cache_root=str(tmp_path / "cache"))
    maps = (None, {1: [1, 2]}, {1: 1, 2: 2}, {1: 2, 2: 1})
    found = [prepare_data(replace(data, label_map=label_map)) for label_map in maps]
    assert len({ready.read.key(ready.train[0]) for ready in found}) == 4
    assert [fingerprint(ready, None)["classes"][1:] for ready in found[1:]] == [
        ["organ+tumour"],
        ["organ", "tumour"],
        ["tumour", "organ"],
    ]


@promise("Prediction", "labels that are not ...")
@pytest.mark.parametrize(
    ("label_map", "values", "words"),
    [
        (None, (0, 1, 2), "0 air, 1 a, 2 b"),
        ({0: [0, 7], 1: 1, 2: 4}, (0, 1, 4), "0 air, 1 a, 4 b"),
        ({1: [1, 2], 2: 4}, (0, 1, 4), "0 air, 1 a (in the files 1, 2), 4 b"),
        ({1: [2, 3], 2: 1}, (0, 1, 2), "0 air, 1 a (in the files 2, 3), 2 b (in the files 1)"),
        ({0: 1, 1: 0, 2: 2}, (0, 1, 2), "0 air, 1 a (in the files 0), 2 b"),
    ],
)
def test_classes_are_written_as_labels_of_the_files_unless_one_would_be_two(
    label_map: dict | None, values: tuple[int, ...], words: str
) -> None:
    data = Data(label_map=label_map)
    assert written_values(data, 3) == values
    assert written_words(data, ("air", "a", "b"), None) == words
