"""Networks given away, alone or several as one, and scored on labelled cases."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml
from guards import no, without
from promises import promise
from tables import cells
from training import TINY, face, numbers, train

import unet3d
from unet3d import build
from unet3d.base.errors import CheckpointError, NotSaved, UserError
from unet3d.config import compose
from unet3d.config.schema import LAYOUTS, Model
from unet3d.data.cases import Case
from unet3d.report.held_out import SCORES_TITLE
from unet3d.run import checkpoint, predict, predicted_files, publish

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose averaged weights were scored, and predicted with mirroring."""
    place = tmp_path_factory.mktemp("finished")
    ended = train(place, *TINY, "optim.average=0.5", "inference.mirror=true", f"hydra.run.dir={place / 'run'}")
    assert ended.code == 0, ended.err
    return place / "run"


@pytest.fixture
def last(finished: Path) -> Path:
    return finished / "checkpoints" / "last.pt"


@pytest.fixture
def other(last: Path, tmp_path: Path) -> Path:
    """A checkpoint of the same kind with other weights."""
    state = checkpoint.load_checkpoint(last)
    for weights in (state["model"], state["average"]):
        for name in weights:
            weights[name] = weights[name] * 1.5 + 0.01
    checkpoint.save_checkpoint(tmp_path / "other.pt", state)
    return tmp_path / "other.pt"


def change(path: Path, keys: str, value: Any) -> None:
    """Set `key.key ...` of a checkpoint; `...` removes it."""
    state = inner = checkpoint.load_checkpoint(path)
    *groups, name = keys.split(".")
    for key in groups:
        inner = inner[key]
    inner[name] = value
    if value is ...:
        del inner[name]
    checkpoint.save_checkpoint(path, state)


def image(path: Path, *shape: int, affine: Any = None) -> Path:
    path.parent.mkdir(exist_ok=True)
    nib.save(nib.Nifti1Image(np.zeros(shape, np.float32), np.eye(4) if affine is None else affine), path)
    return path


def options(finished: Path, *more: str) -> list[str]:
    return [*TINY, f"data.root={finished.parent / 'data' / 'phantom'}", *more]


def labels(path: Path) -> np.ndarray:
    return np.asanyarray(nib.load(path).dataobj)


# --- several networks in one file


@promise("Prediction", "the module of a file of several networks", "their mean")
@pytest.mark.slow
def test_networks_published_as_one_give_the_mean_of_their_logits(last: Path, other: Path, tmp_path: Path) -> None:
    """Also those that were validated with other numbers of windows at once."""
    change(other, "config.inference.batch", 3)
    paths = (last, other, tmp_path / "both.pt")
    publish.publish([last, other], tmp_path / "both.pt")
    tile = torch.randn(1, 1, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    predictors = [predict.load(path, "cpu").segmenter.predictor for path in paths]
    assert [predictor.batch for predictor in predictors] == [1, 3, 1]
    with torch.no_grad():
        one, two, mean = (predictor.window_logits(tile) for predictor in predictors)
        assert (one - two).abs().max() > 0.1
        torch.testing.assert_close(mean, (one + two) / 2)
        one, two, mean = (unet3d.load(path, "cpu").module(tile) for path in paths)  # which alone does not mirror
        torch.testing.assert_close(mean, (one + two) / 2)
    publish.publish([tmp_path / "both.pt", last], tmp_path / "three.pt")  # what is published can be joined again
    assert len(predict.load(tmp_path / "three.pt", "cpu").segmenter.predictor.models) == 3


DIFFERENCES = """
model_options.features     | [8, 8]                    | model.features
classes                    | [a, b, c, d]              | classes
config.data.spacing        | [2.0, 2.0, 2.0]           | data.spacing
config.data.patch          | [16, 16, 32]              | data.patch
config.data.affine         | qform                     | data.affine
config.data.augment.mirror | [0]                       | data.augment.mirror
config.data.label_map      | {1: 2, 2: 1, 3: 3}        | data.label_map
config.inference.mirror    | false                     | inference.mirror
intensity                  | [{kind: none, low: 0.0, high: 0.0, mean: 0.0, std: 1.0}] | intensity
"""


@promise("Prediction", "`score` with a `data.label_map` ...")
@pytest.mark.parametrize(("keys", "value", "option"), cells(DIFFERENCES))
def test_networks_that_see_images_differently_are_not_published_as_one(
    last: Path, other: Path, tmp_path: Path, keys: str, value: str, option: str
) -> None:
    change(other, keys, yaml.safe_load(value))
    with pytest.raises(UserError, match=rf"other\.pt: .*last\.pt.*\b{re.escape(option)}\b"):
        publish.publish([last, other], tmp_path / "both.pt")
    assert not (tmp_path / "both.pt").exists()


# A part of a checkpoint | what stands there.
WRONG = """
others        | 7
others        | [ab]
others        | [{}]
others        | [{x: 1}]
others        | {a: 1}
average       | 7
average       | [7]
average       | ab
average       | {x: 1}
channels      | removed
step          | removed
model_options | removed
largest       | 7
largest       | [organ]
largest       | [0]
largest       | [1, 1]
largest       | [4]
largest       | [true]
"""


@promise("checkpoints and run folders", "post-processing in a file is numbers of its classes")
@without("unet3d.run.checkpoint._refuse_contradictions", no, only="largest-[0]")
@pytest.mark.parametrize(("name", "value"), cells(WRONG))
def test_a_checkpoint_of_wrong_or_missing_parts_is_refused(other: Path, tmp_path: Path, name: str, value: str) -> None:
    change(other, name, ... if value == "removed" else yaml.safe_load(value))
    if name == "others":
        change(other, "splits", [{}, {}])
    with pytest.raises(CheckpointError, match=rf"other\.pt: .*{name if value == 'removed' else ''}"):
        publish.publish([other], tmp_path / "both.pt")


@promise(
    "checkpoints and run folders",
    "a small file in which one set of numbers stands for many weights or networks is refused before a network is built",
)
@pytest.mark.parametrize("kind", ["aliased", "expanded"])
def test_a_small_file_that_describes_many_or_large_networks_takes_no_memory(
    last: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    state = checkpoint.load_checkpoint(last)
    names = ("config", "model_options", "classes", "channels", "intensity", "step", "model")
    kept = {name: state[name] for name in names} | {"average": {}}
    if kind == "aliased":
        kept |= {"others": [state["model"]] * 9, "splits": [{}] * 10}
    else:
        kept["model_options"] = kept["model_options"] | {"features": [64, 128]}
        with torch.device("meta"):
            shapes = build.model(Model(**kept["model_options"]), 0).state_dict()
        kept["model"] = {name: torch.zeros(()).expand(value.shape) for name, value in shapes.items()}
    checkpoint.save_checkpoint(tmp_path / "bomb.pt", kept)
    monkeypatch.setattr(torch.nn.Module, "to", lambda *_: pytest.fail("memory is taken"))
    with pytest.raises(CheckpointError, match=r"bomb\.pt: "):
        predict.load(tmp_path / "bomb.pt", "cpu")


# --- the command score


@pytest.mark.slow
def test_a_checkpoint_scores_as_its_run_did_and_says_of_which_weights(
    last: Path, finished: Path, tmp_path: Path, capsys: Capture
) -> None:
    publish.publish([last], tmp_path / "net.pt")
    assert face("score", tmp_path / "net.pt", "-o", tmp_path / "out", *options(finished)) == 0
    assert (tmp_path / "out" / "scores.csv").read_bytes() == (finished / "scores.csv").read_bytes()
    printed = capsys.readouterr()
    assert (
        printed.err == "" and "HD95 (mm)" in printed.out and str(tmp_path / "net.pt") in printed.out.replace("\n", "")
    )
    publish.publish([last, last], tmp_path / "both.pt")
    for path, part in ((last, "step 4, average of the weights"), (tmp_path / "both.pt", "mean of 2 networks")):
        title = publish.score(path, compose.compose(options(finished)), tmp_path / path.stem)
        assert title == f"{SCORES_TITLE}, {path} ({part})"


def test_what_is_there_is_not_scored_over(finished: Path, last: Path) -> None:
    before = (finished / "scores.csv").read_bytes()
    with pytest.raises(UserError, match=re.escape(str(finished / "scores.csv"))):
        publish.score(last, compose.compose(options(finished)), finished)
    assert (finished / "scores.csv").read_bytes() == before


def warnings_of(path: Path, capsys: Capture, *words: str) -> str:
    """What `score` prints on stderr before it finds no place for its scores."""
    (path.parent / "file").touch()
    with pytest.raises(NotSaved, match=r"scores\.csv: .*Not a directory"):
        publish.score(path, compose.compose(words), path.parent / "file" / "out")
    return capsys.readouterr().err


# What is changed in a checkpoint | to what | the options of the data | the warning.
DOUBTS = r"""
config.data.fold         | 1                  |                          | 1 of 1 networks .* another split
config.data.split        | /some/split.json   |                          | 1 of 1 networks .* another split
config.data.val_fraction | 0.5                |                          | 1 of 1 networks .* another split
config.data.folds        | 4                  |                          | nothing
config.data.label_map    | {1: 2, 2: 1, 3: 3} |                          | \{1:2,2:1,3:3\}.*\{1:1,2:2,3:3\}
config.data.label_map | null | data.label_map={1:2,2:1,3:3} data.classes=[background,organ,vessel,lesion] | 2:2.*2:1
config.data.label_map    | null               | data.label_map={1:1,2:[2],3:3} | nothing
config.data.affine       | qform              | data.affine=sform        | data\.affine=qform.*sform
config.data.affine       | qform              |                          | nothing
fingerprint              | 7                  |                          | nothing
fingerprint              | {training cases: 7} |                         | nothing
fingerprint              | {training cases: [other]} |                   | nothing
fingerprint              | {training cases: [other, CASE]} |             | from 1 of the 1 cases that are scored: CASE
"""


@promise(
    "Prediction",
    "`score` with a `data.label_map` of equal class names and other labels; publishing networks with different ones",
    "one warning with both maps; refused",
)
@pytest.mark.slow
@pytest.mark.parametrize(("keys", "value", "words", "line"), cells(DOUBTS))
def test_data_that_may_be_others_than_in_training_are_warned_of(
    other: Path, finished: Path, capsys: Capture, keys: str, value: str, words: str, line: str
) -> None:
    (case,) = [path.name.removesuffix(".nii.gz") for path in (finished / "predictions").iterdir()]
    change(other, keys, yaml.safe_load(value.replace("CASE", case)))
    found = warnings_of(other, capsys, *options(finished, *words.split()))
    wanted = line.replace("CASE", case)
    assert found == "" if line == "nothing" else re.fullmatch(rf"warning: \S+other\.pt: .*{wanted}.*\n", found)


def test_of_several_networks_each_split_is_compared_and_none_names_a_file(
    last: Path, other: Path, finished: Path, tmp_path: Path, capsys: Capture
) -> None:
    change(other, "config.data.split", "/somewhere/split.json")
    publish.publish([last, other], tmp_path / "both.pt")
    assert b"somewhere" not in (tmp_path / "both.pt").read_bytes()
    assert "both.pt: 1 of 2 networks" in warnings_of(tmp_path / "both.pt", capsys, *options(finished))


def two_channels(path: Path) -> None:
    """Make a checkpoint one of a network that takes two channels."""
    state = checkpoint.load_checkpoint(path)
    state["model_options"]["in_channels"], state["intensity"] = 2, state["intensity"] * 2
    first = next(name for name, value in state["model"].items() if value.dim() == 5 and value.shape[1] == 1)
    for weights in (state["model"], state["average"]):
        weights[first] = weights[first].repeat(1, 2, 1, 1, 1)
    checkpoint.save_checkpoint(path, state | {"channels": ["T1", "T2"], "seen": None})


def test_data_that_a_network_is_not_for_is_not_scored(last: Path, other: Path, finished: Path, tmp_path: Path) -> None:
    semi = compose.compose(options(finished, "data.sparse=[3,3,3]", "data.semi=true"))
    with pytest.raises(UserError, match=r"data\.semi\b"):
        publish.score(last, semi, tmp_path / "out")
    background, first, second, *rest = checkpoint.load_checkpoint(other)["classes"]
    change(other, "classes", [background, second, first, *rest])
    with pytest.raises(UserError, match=rf"background, {second}, {first}.*background, {first}, {second}"):
        publish.score(other, compose.compose(options(finished)), tmp_path / "out")
    two_channels(other)
    with pytest.raises(UserError, match=r"other\.pt: .*\b2 channels.*\b1\b"):
        publish.score(other, compose.compose(options(finished)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_channels_of_other_names_are_warned_of(other: Path, finished: Path, tmp_path: Path, capsys: Capture) -> None:
    (source,) = finished.parent.glob("data/phantom/*/")
    root = shutil.copytree(source, tmp_path / "set")
    manifest = json.loads((root / "dataset.json").read_text())
    (root / "dataset.json").write_text(json.dumps(manifest | {"modality": {"0": "T2", "1": "T1"}}))
    for path in root.glob("imagesTr/*.nii.gz"):
        stored = nib.load(path)
        nib.save(nib.Nifti1Image(np.stack([stored.get_fdata(dtype=np.float32)] * 2, -1), stored.affine), path)
    two_channels(other)
    found = warnings_of(other, capsys, "data=decathlon", f"data.root={root}", "device=cpu")
    assert re.search(r"other\.pt: .*T1, T2.*T2, T1", found)


@promise(
    "Prediction",
    "`score` without the label map, classes or layout of the network",
    "they are the checkpoint's, and a line says so",
)
@pytest.mark.slow
def test_scores_are_of_labels_as_the_network_learned_them(
    other: Path, finished: Path, tmp_path: Path, capsys: Capture
) -> None:
    """The layout, classes and label map of the checkpoint, where neither the command nor its plan names others."""
    learned = {"format": "decathlon", "label_map": {1: [1, 2, 3]}, "classes": ["background", "all"]}
    for name, value in learned.items():
        change(other, f"config.data.{name}", value)
    (root,) = finished.parent.glob("data/phantom/*/")
    (tmp_path / "plan.yaml").write_text("options: {data: {format: decathlon, label_map: null}}\n")
    for more, taken in (([], True), (["data.label_map=null"], False), ([f"plan={tmp_path / 'plan.yaml'}"], False)):
        words = (f"data.root={root}", "device=cpu", *more, "-o", tmp_path / f"scores{len(str(more))}")
        assert face("score", other, *words) == (2 if taken else 0)
        printed = capsys.readouterr()
        assert ("data.label_map={1:[1,2,3]}" in printed.out) == taken
        assert not taken or re.search(r"other\.pt: .*\bbackground, all\b", printed.err)


# --- predictions


@promise(
    "Prediction",
    "labels that are not 0, 1, 2 ... (a network that learned 0, 1, 4 by `data.label_map`)",
    "label maps hold the files' values, of a class of several its number; the last line says which",
)
def test_label_maps_hold_the_values_of_the_files_that_the_network_learned_from(
    last: Path, finished: Path, tmp_path: Path, capsys: Capture
) -> None:
    net = shutil.copy(last, tmp_path / "net.pt")
    change(net, "config.data.label_map", {1: 500, 2: [2, 5], 3: 4})
    (numbered,) = (finished / "predictions").iterdir()
    (path,) = finished.parent.glob(f"data/phantom/*/imagesTr/{numbered.name}")
    assert face("predict", net, path, "-o", tmp_path / "out", "--device", "cpu") == 0
    end = capsys.readouterr().out.splitlines()[-1]
    assert end.startswith("1 label map written")
    assert "0 background, 500 organ, 2 vessel (in the files 2, 5), 4 lesion" in end
    expected = np.array([0, 500, 2, 4])[labels(numbered)]
    assert np.array_equal(labels(tmp_path / "out" / numbered.name), expected)
    network = unet3d.load(net, device="cpu")
    assert network.values == (0, 500, 2, 4) and np.array_equal(network.segment(path).dataobj, expected)


@pytest.mark.parametrize(
    ("changes", "mirror", "prepared"),
    [
        ({}, None, (None, False, (0, 1, 2))),
        ({}, False, (None, False, ())),
        ({"data.spacing": [2.0, 2.0, 2.0], "data.format": "nnunet"}, None, ([2.0, 2.0, 2.0], True, (0, 1, 2))),
        ({"inference.mirror": False}, None, (None, False, ())),
        ({"inference.mirror": False}, True, (None, False, (0, 1, 2))),
        ({"data.augment.mirror": []}, True, (None, False, ())),
    ],
)
def test_a_checkpoints_preparation_is_that_of_its_run(
    other: Path, capsys: Capture, changes: dict[str, Any], mirror: bool | None, prepared: tuple[Any, ...]
) -> None:
    """Its spacing, how its layout names files, and whether it mirrors, unless the command says otherwise."""
    for name, value in changes.items():
        change(other, f"config.{name}", value)
    found = predict.load(other, "cpu", mirror=mirror).segmenter
    by_channel = LAYOUTS[found.options.format].get("by_channel", False)
    assert (found.options.spacing, by_channel, found.predictor.mirror) == prepared
    assert ("data.augment.mirror=[]" in capsys.readouterr().err) == ("data.augment.mirror" in changes)


# The files of a folder, *N: of N channels | those that are named | channels | the cases | the problems.
FILES = """
b_0000 b_0001 p_0001*2                            | .                     | 2 | b p_0001 | nothing
b_0000 b_0001 p_0001*2                            | b_0001.nii p_0001.nii | 2 | b p_0001 | nothing
b_0000 b_0002 p_0001*2                            | .                     | 2 | p_0001   | b: /b_0001
b_0000 b_0001 b_0002                              | .                     | 2 |        | b: has 3 .*b_0002.* 2 
b_0001 b_0002 c_0000 c_0002 d_0000 d_0001 whole*3 | .                 | 3 | whole | b: /b_0000; c: /c_0001; d: /d_0002
a_0000 b_0001                                     | .                     | 1 | a_0000 b_0001 | nothing
a_0000 b_0001                            | .                     | 1 by channel | a b_0001 | nothing
"""


@pytest.mark.parametrize(("files", "given", "count", "cases", "problems"), cells(FILES))
def test_predict_takes_channels_by_their_numbers_and_names_the_missing(
    tmp_path: Path, files: str, given: str, count: str, cases: str, problems: str
) -> None:
    for name, _, channels in (name.partition("*") for name in files.split()):
        image(tmp_path / f"{name}.nii", 4, 4, 4, *([int(channels)] if channels else []))
    inputs, by_channel = [tmp_path / path for path in given.split()], count.endswith("by channel")
    found, lines = predicted_files.find_cases(inputs, int(count[0]), by_channel)
    assert [case.id for case in found] == cases.split()
    assert all(case.images == tuple(sorted(case.images)) for case in found)
    wanted = [] if problems == "nothing" else problems.split("; ")
    for line, problem in zip(lines, wanted, strict=True):
        assert re.match(problem.replace("/", re.escape(f"{tmp_path}/")), line)


@promise("data sets", "a case whose label ...")
@promise("Data", "case ids that no ...")
@without("unet3d.data.cases.MAX_NAME", 10**6)
def test_a_label_map_whose_name_no_file_can_have_is_refused_at_the_start(tmp_path: Path) -> None:
    for length in (248, 249):
        image(tmp_path / f"{'a' * length}.nii", 4, 4, 4)
    cases, (problem,) = predicted_files.find_cases([tmp_path], 1)
    assert [len(case.id) for case in cases] == [248] and 249 in numbers(problem)


@promise(
    "Prediction",
    "label maps among the images to segment; `-o` with the name of one file",
    "refused over and beside an image; that file for one case, refused for several",
)
@pytest.mark.parametrize("name", ["a.nii.gz", "a.nii"])
def test_predict_writes_nothing_among_its_images(last: Path, tmp_path: Path, capsys: Capture, name: str) -> None:
    """A label map there would be an image of the next prediction, or one of two files of a name."""
    path, made = image(tmp_path / name, 9, 9, 9), tmp_path / "a.nii.gz"
    before = path.read_bytes()
    for given, out in ((tmp_path, tmp_path), (path, made)):
        assert face("predict", last, given, "-o", out, "--overwrite") == 2
        assert capsys.readouterr().err.startswith(f"error: {made}: ")
    assert [one.name for one in tmp_path.iterdir()] == [name] and path.read_bytes() == before


@promise("Prediction", "label maps among the ...")
def test_a_single_label_map_is_the_file_that_is_named(last: Path, tmp_path: Path, capsys: Capture) -> None:
    one, two = (image(tmp_path / f"{name}.nii", 1, 9, 9) for name in "ab")
    assert face("predict", last, one, "-o", tmp_path / "new" / "out.nii") == 0
    assert labels(tmp_path / "new" / "out.nii").shape == (1, 9, 9)
    capsys.readouterr()
    for out, *more in (("many.nii.gz", two), ("part.nii.gz", "--shard", "0/2"), ("out.nrrd",)):
        assert face("predict", last, one, *more, "-o", tmp_path / out) == 2
        line = capsys.readouterr().err
        assert line.startswith(f"error: -o {tmp_path / out}: ") and line.count("\n") == 1
        assert not (tmp_path / out).exists()


@promise("Prediction", "an image unlike those ...")
@pytest.mark.slow
def test_predict_warns_of_an_image_unlike_those_of_training(
    last: Path, other: Path, finished: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Also by a published file of several networks, and by none that does not know."""
    stored = nib.load(next(finished.parent.glob("data/phantom/*/imagesTr/*.nii.gz")))
    wide = nib.Nifti1Image(np.asanyarray(stored.dataobj), stored.affine @ np.diag([1, 1, 2, 1]))
    nib.save(stored, tmp_path / "alike.nii.gz"), nib.save(wide, tmp_path / "wide.nii.gz")
    publish.publish([last, last], tmp_path / "both.pt")
    change(other, "seen", None)
    for path, count in ((tmp_path / "both.pt", 1), (other, 0)):
        segmenter = predict.load(path, "cpu").segmenter
        for case in predicted_files.find_cases([tmp_path], 1)[0]:
            segmenter.labels(case)
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == count
        assert all(re.match(r"warning: wide: .*\bspacing\b.*\bin training\b", line) for line in lines)


@promise("Prediction", "a file among others ...")
@without("unet3d.cli.commands.is_out_of_memory", no)
def test_a_volume_that_memory_does_not_hold_stops_no_other(
    last: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for name in "ab":
        image(tmp_path / f"{name}.nii.gz", 16, 16, 16)
    to_file = predict.Segmenter.to_file

    def refuse(self: predict.Segmenter, case: Case, path: Path) -> tuple:
        if case.id == "a":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes")
        return to_file(self, case, path)

    monkeypatch.setattr(predict.Segmenter, "to_file", refuse)
    assert face("predict", last, tmp_path, "-o", tmp_path / "out") == 2
    printed, *_ = capsys.readouterr().err.splitlines()
    assert printed.startswith("error: a: ") and "allocate 7 bytes" in printed
    assert [path.name for path in (tmp_path / "out").glob("*.nii*")] == ["b.nii.gz"]


@promise("Prediction", "a file among others ...")
def test_files_that_are_no_case_stop_no_other_and_what_is_accepted_is_a_warning(
    last: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    files = [image(tmp_path / name, 16, 16, 16) for name in ("one/a.nii.gz", "two/a.nii.gz", "b.nii.gz")]
    monkeypatch.setattr(predicted_files, "accepted_contradictions", lambda case: [f"{case.id}: lies elsewhere"])
    assert face("predict", last, *files, "-o", tmp_path / "out") == 2
    first, *_, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: a: 2 ") and "one/a.nii.gz" in first and "two/a.nii.gz" in first
    assert second == "warning: b: lies elsewhere"
    assert [path.name for path in (tmp_path / "out").glob("*.nii*")] == ["b.nii.gz"]


def test_channels_that_lie_apart_are_reported_whatever_the_checkpoint_accepts(tmp_path: Path) -> None:
    paths = tuple(image(tmp_path / f"{side}.nii", 4, 5, 6, affine=np.diag([side, 1, 1, 1])) for side in (1, -1))
    (line,) = predicted_files.accepted_contradictions(Case("a", paths, None))
    assert line.startswith(f"a: {paths[1]}: ") and re.search(r"\b6 voxels", line)
    assert predicted_files.accepted_contradictions(Case("a", paths[:1], None)) == []


def two_sizes(path: Path) -> Path:
    """An image of 1 mm by its sform, of 2 mm by its qform."""
    stored = nib.Nifti1Image(np.random.default_rng(0).normal(size=(9, 9, 9)).astype(np.float32), np.diag([2, 2, 2, 1]))
    stored.set_qform(stored.affine, code=1)
    stored.header.set_sform(np.eye(4), code=2)
    nib.save(type(stored)(stored.dataobj, None, stored.header), path)
    return path


@promise("Data", "voxel sizes of sform ...")
@pytest.mark.slow
@pytest.mark.parametrize("form", ["auto", "qform"])
def test_files_of_two_voxel_sizes_are_one_warning_and_read_as_in_training(
    other: Path, tmp_path: Path, capsys: Capture, form: str
) -> None:
    """Label maps have the header of their image, from Python as in files."""
    images = tmp_path / "images"
    images.mkdir()
    paths = [two_sizes(images / name) for name in ("a.nii", "B.NII.GZ")]
    (images / "c.nrrd").touch()
    change(other, "config.data.affine", form)
    assert face("predict", other, images, "-o", tmp_path / "out", "--device", "cpu") == 0
    made = unet3d.load(other, "cpu").segment(paths[0])
    lines = capsys.readouterr().err.splitlines()
    assert [line[:9] for line in lines if "c.nrrd" in line] == ["warning: "]
    warned = [line for line in lines if "1 x 1 x 1 mm by its sform, of 2 x 2 x 2 mm by its qform" in line]
    assert len(warned) == 2 * (form == "auto"), "of the command, and of the function"
    assert not warned or ("(2 such files)" in warned[0] and warned[1].startswith(f"warning: a: {paths[0]}: "))
    written = nib.load(tmp_path / "out" / "a.nii.gz")
    assert np.array_equal(written.affine, np.eye(4)) and np.array_equal(written.get_qform(), np.diag([2, 2, 2, 1]))
    assert np.array_equal(made.affine, np.eye(4)) and np.array_equal(made.dataobj, written.dataobj)


@pytest.mark.parametrize(("command", "at"), [("compare", ""), ("predict", "/a.nii.gz")])
def test_a_folder_that_cannot_be_made_is_one_line(
    last: Path, finished: Path, tmp_path: Path, capsys: Capture, command: str, at: str
) -> None:
    path = image(tmp_path / "a.nii.gz", 9, 9, 9)
    given = {"compare": [finished], "predict": [last, path]}[command]
    assert face(command, *given, "-o", path / "out") == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: {path / 'out'}{at}: ") and "Not a directory" in line and line.count("\n") == 1
