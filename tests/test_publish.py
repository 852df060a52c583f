"""Networks given away, alone or several as one, and scored on labelled cases."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from guards import no, without
from promises import promise
from training import TINY, face, numbers, train

import unet3d
from unet3d import build
from unet3d.base.errors import CheckpointError, NotSaved, UserError
from unet3d.config import compose
from unet3d.config.schema import LAYOUTS, Model
from unet3d.data.cases import Case, read_dataset
from unet3d.data.nifti import stem
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
def pair(finished: Path, tmp_path: Path) -> Iterator[list[Path]]:
    """Its checkpoint, and one of the same kind with other weights."""
    state = checkpoint.load_checkpoint(finished / "checkpoints" / "last.pt")
    for weights in (state["model"], state["average"]):
        for name in weights:
            weights[name] = weights[name] * 1.5 + 0.01
    checkpoint.save_checkpoint(tmp_path / "other.pt", state)
    yield [finished / "checkpoints" / "last.pt", tmp_path / "other.pt"]


def overrides(finished: Path, *more: str) -> list[str]:
    return [*TINY, f"data.root={finished.parent / 'data' / 'phantom'}", *more]


def change(path: Path, *keys: str, value: Any) -> None:
    """Set state[key][key] ... of a checkpoint."""
    state = inner = checkpoint.load_checkpoint(path)
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    checkpoint.save_checkpoint(path, state)


@promise("Prediction", "the module of a file of several networks", "their mean")
@pytest.mark.slow
def test_networks_published_as_one_give_the_mean_of_their_logits(pair: list[Path], tmp_path: Path) -> None:
    publish.publish(pair, tmp_path / "both.pt")
    tile = torch.randn(1, 1, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one, other, both = (
            predict.load(path, "cpu").segmenter.predictor.window_logits(tile) for path in (*pair, tmp_path / "both.pt")
        )
    assert (one - other).abs().max() > 0.1
    torch.testing.assert_close(both, (one + other) / 2)
    with torch.no_grad():  # the module alone does not mirror
        one, other, both = (unet3d.load(path, "cpu").module(tile) for path in (*pair, tmp_path / "both.pt"))
    torch.testing.assert_close(both, (one + other) / 2)
    publish.publish([tmp_path / "both.pt", pair[0]], tmp_path / "three.pt")  # what is published can be joined again
    assert len(predict.load(tmp_path / "three.pt", "cpu").segmenter.predictor.models) == 3


@promise("Prediction", "`score` with a `data.label_map` ...")
@pytest.mark.parametrize(
    ("path", "value", "option"),
    [
        (("model_options", "features"), [8, 8], r"model\.features"),
        (("classes",), ["a", "b", "c", "d"], "classes"),
        (("config", "data", "spacing"), [2.0, 2.0, 2.0], r"data\.spacing"),
        (("config", "data", "patch"), [16, 16, 32], r"data\.patch"),
        (("config", "data", "augment", "mirror"), [0], r"data\.augment\.mirror"),
        (("config", "data", "label_map"), {1: 2, 2: 1, 3: 3}, r"data\.label_map"),
        (("config", "inference", "mirror"), False, r"inference\.mirror"),
        (("intensity",), [{"kind": "none", "low": 0.0, "high": 0.0, "mean": 0.0, "std": 1.0}], "intensity"),
    ],
)
def test_networks_that_see_images_differently_are_not_published_as_one(
    pair: list[Path], tmp_path: Path, path: tuple, value: Any, option: str
) -> None:
    change(pair[1], *path, value=value)
    with pytest.raises(UserError, match=rf"other\.pt: .*last\.pt.*\b{option}\b"):
        publish.publish(pair, tmp_path / "both.pt")
    assert not (tmp_path / "both.pt").exists()


def test_networks_validated_with_other_numbers_of_windows_are_published_as_one(
    pair: list[Path], tmp_path: Path
) -> None:
    change(pair[1], "config", "inference", "batch", value=3)
    publish.publish(pair, tmp_path / "both.pt")
    assert predict.load(tmp_path / "both.pt", "cpu").segmenter.predictor.batch == 1
    assert predict.load(pair[1], "cpu").segmenter.predictor.batch == 3


@pytest.mark.parametrize("others", [7, [7], ["ab"], [{}], [{"x": 1}], {"a": 1}, [{1: torch.zeros(1)}]])
def test_a_published_checkpoint_of_wrong_networks_is_refused(finished: Path, tmp_path: Path, others: Any) -> None:
    state = checkpoint.load_checkpoint(finished / "checkpoints" / "last.pt")
    for splits in ([{}], [{}, {}]):
        checkpoint.save_checkpoint(tmp_path / "wrong.pt", state | {"others": others, "splits": splits})
        with pytest.raises(CheckpointError, match=r"wrong\.pt"):
            predict.load(tmp_path / "wrong.pt", "cpu")


@pytest.mark.parametrize("average", [7, [7], "ab", {"x": 1}, torch.zeros(3, 2)], ids=repr)
def test_an_average_that_is_none_of_a_network_is_refused(finished: Path, tmp_path: Path, average: Any) -> None:
    state = checkpoint.load_checkpoint(finished / "checkpoints" / "last.pt")
    checkpoint.save_checkpoint(tmp_path / "wrong.pt", state | {"average": average})
    with pytest.raises(CheckpointError, match=r"wrong\.pt"):
        predict.load(tmp_path / "wrong.pt", "cpu")


@pytest.mark.parametrize("key", ["channels", "step", "model_options"])
def test_a_checkpoint_that_lacks_what_is_published_is_refused(key: str, pair: list[Path], tmp_path: Path) -> None:
    state = checkpoint.load_checkpoint(pair[1])
    del state[key]
    checkpoint.save_checkpoint(pair[1], state)
    with pytest.raises(CheckpointError, match=rf"other\.pt: .*\b{key}\b"):
        publish.publish(pair, tmp_path / "both.pt")


@promise(
    "checkpoints and run folders",
    "a small file in which one set of numbers stands for many weights or networks is refused before a network is built",
)
@pytest.mark.parametrize("kind", ["aliased", "expanded"])
def test_a_small_file_that_describes_many_or_large_networks_takes_no_memory(
    pair: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    state = checkpoint.load_checkpoint(pair[0])
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


def test_a_checkpoint_scores_as_its_run_did(finished: Path, tmp_path: Path, capsys: Capture) -> None:
    net, out = str(tmp_path / "net.pt"), str(tmp_path / "out")
    for words in (
        ["publish", str(finished / "checkpoints" / "last.pt"), "-o", net],
        ["score", net, "-o", out, *overrides(finished)],
    ):
        assert face(*words) == 0
    assert (tmp_path / "out" / "scores.csv").read_bytes() == (finished / "scores.csv").read_bytes()
    printed = capsys.readouterr()
    assert printed.err == "" and "HD95 (mm)" in printed.out
    assert net in printed.out.replace("\n", "")


@pytest.mark.slow
def test_scores_are_named_after_the_checkpoint_and_its_weights(
    pair: list[Path], finished: Path, tmp_path: Path
) -> None:
    publish.publish(pair, tmp_path / "both.pt")
    for path, part in ((pair[0], r"step 4\b.*average"), (tmp_path / "both.pt", r"\b2\b")):
        title = publish.score(path, compose.compose(overrides(finished)), tmp_path / path.stem)
        assert title.startswith(SCORES_TITLE) and re.search(part, title.partition(str(path))[2])


@promise(
    "Prediction",
    "labels that are not 0, 1, 2 ... (a network that learned 0, 1, 4 by `data.label_map`)",
    "label maps hold the files' values, of a class of several its number; the last line says which",
)
def test_label_maps_hold_the_values_of_the_files_that_the_network_learned_from(
    finished: Path, tmp_path: Path, capsys: Capture
) -> None:
    label_map, values = {1: 500, 2: [2, 5], 3: 4}, (0, 500, 2, 4)
    words = "0 background, 500 organ, 2 vessel (in the files 2, 5), 4 lesion"
    shutil.copy(finished / "checkpoints" / "last.pt", tmp_path / "net.pt")
    change(tmp_path / "net.pt", "config", "data", "label_map", value=label_map)
    (numbered, *_) = (finished / "predictions").iterdir()
    (path,) = finished.parent.glob(f"data/phantom/*/imagesTr/{numbered.name}")
    assert face("predict", tmp_path / "net.pt", path, "-o", tmp_path / "out", "--device", "cpu") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("1 label map written") and words in last
    expected = np.array(values)[np.asanyarray(nib.load(numbered).dataobj)]
    assert np.array_equal(np.asanyarray(nib.load(tmp_path / "out" / numbered.name).dataobj), expected)
    network = unet3d.load(tmp_path / "net.pt", device="cpu")
    assert network.values == values
    assert np.array_equal(np.asanyarray(network.segment(path).dataobj), expected)


def test_what_is_there_is_not_scored_over(finished: Path) -> None:
    before = (finished / "scores.csv").read_bytes()
    with pytest.raises(UserError, match=re.escape(str(finished / "scores.csv"))):
        publish.score(finished / "checkpoints" / "last.pt", compose.compose(overrides(finished)), finished)
    assert (finished / "scores.csv").read_bytes() == before


def warnings_of(path: Path, capsys: Capture, *words: str) -> str:
    """What `score` prints on stderr before it finds no place for its scores."""
    (path.parent / "file").touch()
    with pytest.raises(NotSaved):
        publish.score(path, compose.compose(words), path.parent / "file" / "out")
    return capsys.readouterr().err


def test_scores_that_cannot_be_written_are_one_line(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotSaved, match=r"scores\.csv: .*Not a directory"):
        publish.score(
            finished / "checkpoints" / "last.pt", compose.compose(overrides(finished)), tmp_path / "file" / "x"
        )


@pytest.mark.parametrize(
    ("option", "value", "asked"),
    [
        ("fold", 1, ["data.fold=0", "data.folds=4"]),
        ("split", "/somewhere/split.json", []),
        ("val_fraction", 0.5, []),
    ],
)
def test_scores_on_another_split_are_warned_of(
    pair: list[Path],
    finished: Path,
    tmp_path: Path,
    capsys: Capture,
    option: str,
    value: Any,
    asked: list[str],
) -> None:
    """Of whichever network of several: the first was trained with the split that is asked for, or none was."""
    change(pair[1], "config", "data", option, value=value)
    if option == "semi":
        change(pair[1], "config", "data", "sparse", value=[3, 3, 3])
    publish.publish(pair, tmp_path / "both.pt")
    assert b"somewhere" not in (tmp_path / "both.pt").read_bytes()
    line = warnings_of(tmp_path / "both.pt", capsys, *overrides(finished, *asked))
    assert re.search(rf"both\.pt: {1 + bool(asked)}\b.*\b2\b", line) and line.count("\n") == 1


def test_folds_do_not_matter_where_there_is_no_fold(pair: list[Path], finished: Path, capsys: Capture) -> None:
    change(pair[1], "config", "data", "folds", value=4)
    assert warnings_of(pair[1], capsys, *overrides(finished)) == ""


def test_data_that_a_network_is_not_for_is_not_scored(finished: Path, tmp_path: Path) -> None:
    state = checkpoint.load_checkpoint(finished / "checkpoints" / "last.pt")
    state["model_options"]["in_channels"], state["intensity"] = 2, state["intensity"] * 2
    state["channels"], state["seen"] = ["T1", "T2"], None
    checkpoint.save_checkpoint(tmp_path / "two.pt", state)
    with pytest.raises(UserError, match=r"two\.pt: .*\b2\b.*background, .*\b1\b"):
        publish.score(tmp_path / "two.pt", compose.compose(overrides(finished)), tmp_path / "out")
    semi = compose.compose(overrides(finished, "data.sparse=[3,3,3]", "data.semi=true"))
    with pytest.raises(UserError, match=r"data\.semi\b"):
        publish.score(finished / "checkpoints" / "last.pt", semi, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_classes_in_another_order_are_not_scored(pair: list[Path], finished: Path, tmp_path: Path) -> None:
    background, first, second, *rest = checkpoint.load_checkpoint(pair[1])["classes"]
    change(pair[1], "classes", value=[background, second, first, *rest])
    with pytest.raises(UserError, match=rf"background, {second}, {first}.*background, {first}, {second}"):
        publish.score(pair[1], compose.compose(overrides(finished)), tmp_path / "out")


@promise(
    "Prediction",
    "`score` with a `data.label_map` of equal class names and other labels; publishing networks with different ones",
    "one warning with both maps; refused",
)
def test_classes_of_equal_names_from_other_labels_are_warned_of(
    pair: list[Path], finished: Path, capsys: Capture
) -> None:
    """The names are those of `data.classes`, whatever they stand for."""
    words = ["data.label_map={1:2,2:1,3:3}", "data.classes=[background,organ,vessel,lesion]"]
    line = warnings_of(pair[1], capsys, *overrides(finished, *words))
    assert line.count("\n") == 1 and re.search(r"other\.pt: .*\{1:1,2:2,3:3\}.*\{1:2,2:1,3:3\}", line)
    change(pair[1], "config", "data", "label_map", value={1: 2, 2: 1, 3: 3})
    line = warnings_of(pair[1], capsys, *overrides(finished))
    assert line.count("\n") == 1 and re.search(r"other\.pt: .*\{1:2,2:1,3:3\}.*\{1:1,2:2,3:3\}", line)


def test_scores_by_another_form_than_in_training_are_warned_of(
    pair: list[Path], finished: Path, capsys: Capture
) -> None:
    change(pair[1], "config", "data", "affine", value="qform")
    line = warnings_of(pair[1], capsys, *overrides(finished, "data.affine=sform"))
    assert re.search(r"other\.pt: .*data\.affine=qform.*sform$", line) and line.count("\n") == 1
    assert warnings_of(pair[1], capsys, *overrides(finished)) == ""


def test_a_label_map_that_changes_no_class_is_not_warned_of(pair: list[Path], finished: Path, capsys: Capture) -> None:
    assert warnings_of(pair[1], capsys, *overrides(finished, "data.label_map={1:1,2:[2],3:3}")) == ""


def two_channels(source: Path, root: Path) -> Path:
    """The data set `source` with each image twice, as channels T2 and T1."""
    shutil.copytree(source, root)
    manifest = json.loads((root / "dataset.json").read_text())
    (root / "dataset.json").write_text(json.dumps(manifest | {"modality": {"0": "T2", "1": "T1"}}))
    for path in root.glob("imagesTr/*.nii.gz"):
        image = nib.load(path)
        nib.save(nib.Nifti1Image(np.stack([image.get_fdata(dtype=np.float32)] * 2, -1), image.affine), path)
    return root


def test_channels_of_other_names_are_warned_of(
    pair: list[Path], finished: Path, tmp_path: Path, capsys: Capture
) -> None:
    (source,) = finished.parent.glob("data/phantom/*/")
    state = checkpoint.load_checkpoint(pair[1])
    state["model_options"]["in_channels"], state["intensity"] = 2, state["intensity"] * 2
    first = next(name for name, value in state["model"].items() if value.dim() == 5 and value.shape[1] == 1)
    for weights in (state["model"], state["average"]):
        weights[first] = weights[first].repeat(1, 2, 1, 1, 1)
    checkpoint.save_checkpoint(tmp_path / "two.pt", state | {"channels": ["T1", "T2"], "seen": None})
    words = ["data=decathlon", f"data.root={two_channels(source, tmp_path / 'set')}", "device=cpu"]
    assert re.search(r"two\.pt: .*T1, T2.*T2, T1", warnings_of(tmp_path / "two.pt", capsys, *words))


def test_predictions_are_those_of_the_averaged_weights(finished: Path, tmp_path: Path) -> None:
    path = finished / "checkpoints" / "last.pt"
    raw = checkpoint.load_checkpoint(path) | {"average": {}}
    checkpoint.save_checkpoint(tmp_path / "raw.pt", raw)
    task = read_dataset(compose.compose(overrides(finished)).data)
    cases = {case.id: case for case in task.cases}
    (kept,) = (finished / "predictions").iterdir()
    found = []
    for source in (path, tmp_path / "raw.pt"):
        predict.load(source, "cpu").segmenter.to_file(cases[stem(kept)], tmp_path / "made.nii.gz")
        found.append(np.asarray(nib.load(tmp_path / "made.nii.gz").dataobj))
    stored = np.asarray(nib.load(kept).dataobj)
    assert np.array_equal(stored, found[0]) and not np.array_equal(stored, found[1])


def test_predict_takes_channels_by_their_numbers(tmp_path: Path) -> None:
    """Whatever the order of the arguments; a file that holds them all is a case, whatever its name ends with."""
    for name, shape in (("b_0001", (4, 4, 4)), ("b_0000", (4, 4, 4)), ("patient_0001", (4, 4, 4, 2))):
        nib.save(nib.Nifti1Image(np.zeros(shape, np.float32), np.eye(4)), tmp_path / f"{name}.nii.gz")
    files = [tmp_path / f"{name}.nii.gz" for name in ("b_0001", "b_0000", "patient_0001")]
    for given in (files, files[1:], [files[0], files[2]]):  # also a channel that was not named, but lies there
        found = {case.id: case.images for case in predicted_files.find_cases(given, 2)[0]}
        assert found == {"b": (files[1], files[0]), "patient_0001": (files[2],)}
    files[0].rename(tmp_path / "b_0002.nii.gz")
    cases, (problem,) = predicted_files.find_cases([tmp_path], 2)
    assert [case.id for case in cases] == ["patient_0001"], "what is wrong with one case stops no other"
    assert problem.startswith(f"b: {tmp_path / 'b_0001'} ") and str(files[1]) in problem
    nib.save(nib.load(files[1]), tmp_path / "b_0001.nii.gz")
    (problem,) = predicted_files.find_cases([tmp_path], 2)[1]
    assert re.match(r"b: .*\b3\b.*\b2\b", problem) and "b_0002.nii.gz" in problem


def test_predict_names_a_channel_that_is_missing_wherever_it_stands(tmp_path: Path) -> None:
    names = "b_0001", "b_0002", "c_0000", "c_0002", "d_0000", "d_0001", "whole"
    for name in names:
        shape = (4, 4, 4, 3) if name == "whole" else (4, 4, 4)
        nib.save(nib.Nifti1Image(np.zeros(shape, np.float32), np.eye(4)), tmp_path / f"{name}.nii.gz")
    cases, problems = predicted_files.find_cases([tmp_path], 3)
    assert [case.id for case in cases] == ["whole"]
    missing = [f"{name[0]}: {tmp_path / name} " for name in ("b_0000", "c_0001", "d_0002")]
    assert [line[: len(start)] for line, start in zip(problems, missing, strict=True)] == missing


@promise("data sets", "a case whose label ...")
@promise("Data", "case ids that no ...")
@without("unet3d.data.cases.MAX_NAME", 10**6)
def test_a_label_map_whose_name_no_file_can_have_is_refused_at_the_start(tmp_path: Path) -> None:
    for length in (240, 248, 249, 250):
        nib.save(nib.Nifti1Image(np.zeros((4, 4, 4), np.float32), np.eye(4)), tmp_path / f"{'a' * length}.nii")
    cases, problems = predicted_files.find_cases([tmp_path], 1)
    assert [len(case.id) for case in cases] == [240, 248]
    first, second = problems
    assert 249 in numbers(first) and 250 in numbers(second)


def test_a_single_channel_is_numbered_in_one_layout_alone(tmp_path: Path) -> None:
    for name in ("a_0000", "b_0001"):
        nib.save(nib.Nifti1Image(np.zeros((4, 4, 4), np.float32), np.eye(4)), tmp_path / f"{name}.nii.gz")
    assert [case.id for case in predicted_files.find_cases([tmp_path], 1, by_channel=True)[0]] == ["a", "b_0001"]
    assert [case.id for case in predicted_files.find_cases([tmp_path], 1)[0]] == ["a_0000", "b_0001"]


def test_a_checkpoints_preparation_is_that_of_its_run(pair: list[Path], capsys: Capture) -> None:
    """Its spacing, how its layout names files, and whether it mirrors, unless the command says otherwise."""
    found = predict.load(pair[1], "cpu").segmenter
    by_channel = LAYOUTS[found.options.format].get("by_channel", False)
    assert (found.options.spacing, by_channel, found.predictor.mirror) == (None, False, (0, 1, 2))
    assert predict.load(pair[1], "cpu", mirror=False).segmenter.predictor.mirror == ()
    change(pair[1], "config", "data", "spacing", value=[2.0, 2.0, 2.0])
    change(pair[1], "config", "data", "format", value="nnunet")
    change(pair[1], "config", "inference", "mirror", value=False)
    found = predict.load(pair[1], "cpu").segmenter
    by_channel = LAYOUTS[found.options.format].get("by_channel", False)
    assert (found.options.spacing, by_channel, found.predictor.mirror) == ([2.0, 2.0, 2.0], True, ())
    assert predict.load(pair[1], "cpu", mirror=True).segmenter.predictor.mirror == (0, 1, 2)
    change(pair[1], "config", "data", "augment", "mirror", value=[])
    assert predict.load(pair[1], "cpu", mirror=True).segmenter.predictor.mirror == ()
    assert "data.augment.mirror=[]" in capsys.readouterr().err


@pytest.mark.slow
def test_training_cases_among_those_that_are_scored_are_warned_of(
    pair: list[Path], finished: Path, tmp_path: Path, capsys: Capture
) -> None:
    """As where cases were added since: the rule is the same, but it holds others out."""
    (case,) = [path.name.removesuffix(".nii.gz") for path in (finished / "predictions").iterdir()]
    for fingerprint in (7, {"training cases": 7}, {"training cases": ["other"]}):
        change(pair[1], "fingerprint", value=fingerprint)
        assert warnings_of(pair[1], capsys, *overrides(finished)) == ""
    change(pair[1], "fingerprint", value={"training cases": ["other", case]})
    warning = warnings_of(pair[1], capsys, *overrides(finished))
    assert re.search(rf"other\.pt: .*\b1\b.*\b1\b.*\b{case}$", warning) and warning.count("\n") == 1


@promise(
    "Prediction",
    "label maps among the images to segment; `-o` with the name of one file",
    "refused over and beside an image; that file for one case, refused for several",
)
@pytest.mark.parametrize("name", ["a.nii.gz", "a.nii"])
def test_predict_writes_nothing_among_its_images(finished: Path, tmp_path: Path, capsys: Capture, name: str) -> None:
    """A label map there would be an image of the next prediction, or one of two files of a name."""
    path = tmp_path / name
    nib.save(nib.Nifti1Image(np.zeros((9, 9, 9), np.float32), np.eye(4)), path)
    before = path.read_bytes()
    best, made = finished / "checkpoints" / "last.pt", tmp_path / "a.nii.gz"
    for given, out in ((tmp_path, tmp_path), (path, made)):
        assert face("predict", best, given, "-o", out, "--overwrite") == 2
        assert capsys.readouterr().err.startswith(f"error: {made}: ")
    assert [one.name for one in tmp_path.iterdir()] == [name] and path.read_bytes() == before


@promise("Prediction", "label maps among the ...")
def test_a_single_label_map_is_the_file_that_is_named(finished: Path, tmp_path: Path, capsys: Capture) -> None:
    best = finished / "checkpoints" / "last.pt"
    for name in ("a", "b"):
        nib.save(nib.Nifti1Image(np.eye(9, dtype=np.float32)[None], np.eye(4)), tmp_path / f"{name}.nii")
    for name in ("out.nii.gz", "new/out.nii"):
        assert face("predict", best, tmp_path / "a.nii", "-o", tmp_path / name) == 0
        assert nib.load(tmp_path / name).shape == (1, 9, 9)
    capsys.readouterr()
    for out, given, more in (
        ("many.nii.gz", [tmp_path / "a.nii", tmp_path / "b.nii"], []),
        ("part.nii.gz", [tmp_path / "a.nii"], ["--shard", "0/2"]),
        ("out.nrrd", [tmp_path / "a.nii"], []),
    ):
        assert face("predict", best, *given, "-o", tmp_path / out, *more) == 2
        line = capsys.readouterr().err
        assert line.startswith(f"error: -o {tmp_path / out}: ") and line.count("\n") == 1
        assert not (tmp_path / out).exists()


def test_predict_names_the_classes_of_which_it_keeps_one_component(
    finished: Path, tmp_path: Path, capsys: Capture
) -> None:
    publish.publish([finished / "checkpoints" / "last.pt"], tmp_path / "net.pt", largest=[1, 3])
    nib.save(nib.Nifti1Image(np.eye(9, dtype=np.float32)[None], np.eye(4)), tmp_path / "a.nii")
    assert face("predict", tmp_path / "net.pt", tmp_path / "a.nii", "-o", tmp_path / "out") == 0
    assert capsys.readouterr().out.endswith("; only the largest component is kept of: organ, lesion\n")


@promise("Prediction", "an image unlike those ...")
def test_predict_warns_of_an_image_unlike_those_of_training(finished: Path, tmp_path: Path, capsys: Capture) -> None:
    """Also by a published file of several networks, and by none that does not know."""
    image = nib.load(next(finished.parent.glob("data/phantom/*/imagesTr/*.nii.gz")))
    wide = nib.Nifti1Image(np.asanyarray(image.dataobj), image.affine @ np.diag([1, 1, 2, 1]))
    nib.save(image, tmp_path / "alike.nii.gz"), nib.save(wide, tmp_path / "wide.nii.gz")
    last = finished / "checkpoints" / "last.pt"
    publish.publish([last, last], tmp_path / "both.pt")
    state = checkpoint.load_checkpoint(last)
    checkpoint.save_checkpoint(tmp_path / "unknown.pt", state | {"seen": None})
    publish.publish([tmp_path / "unknown.pt"], tmp_path / "blind.pt")
    for path, count in ((last, 1), (tmp_path / "both.pt", 1), (tmp_path / "blind.pt", 0)):
        for name in ("alike", "wide"):
            found = predicted_files.find_cases([tmp_path / f"{name}.nii.gz"], 1)[0]
            predict.load(path, "cpu").segmenter.labels(found[0])
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == count
        assert all(re.match(r"warning: wide: .*\bspacing\b.*\bin training\b", line) for line in lines)


@promise(
    "Prediction",
    "`score` without the label map, classes or layout of the network",
    "they are the checkpoint's, and a line says so",
)
def test_scores_are_of_labels_as_the_network_learned_them(
    pair: list[Path], finished: Path, tmp_path: Path, capsys: Capture
) -> None:
    """The layout, classes and label map of the checkpoint, where neither the command nor its plan names others."""
    learned = {"format": "decathlon", "label_map": {1: [1, 2, 3]}, "classes": ["background", "all"]}
    state = checkpoint.load_checkpoint(pair[1])
    for name, value in learned.items():
        state["config"]["data"][name] = value
    (root,) = finished.parent.glob("data/phantom/*/")
    checkpoint.save_checkpoint(pair[1], state)
    words = [f"data.root={root}", "device=cpu"]
    (tmp_path / "plan.yaml").write_text("options: {data: {format: decathlon, label_map: null}}\n")
    for more, taken in (([], True), (["data.label_map=null"], False), ([f"plan={tmp_path / 'plan.yaml'}"], False)):
        assert face("score", pair[1], *words, *more, "-o", tmp_path / f"scores{len(str(more))}") == (2 if taken else 0)
        printed = capsys.readouterr()
        assert ("data.label_map={1:[1,2,3]}" in printed.out) == taken
        assert not taken or re.search(r"other\.pt: .*\bbackground, all\b", printed.err)


@promise("Prediction", "a file among others ...")
@without("unet3d.cli.commands.is_out_of_memory", no)
def test_a_volume_that_memory_does_not_hold_stops_no_other(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for name in "ab":
        nib.save(nib.Nifti1Image(np.zeros((16, 16, 16), np.float32), np.eye(4)), tmp_path / f"{name}.nii.gz")
    to_file = predict.Segmenter.to_file

    def refuse(self: predict.Segmenter, case: Case, path: Path) -> tuple:
        if case.id == "a":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes")
        return to_file(self, case, path)

    monkeypatch.setattr(predict.Segmenter, "to_file", refuse)
    assert face("predict", finished / "checkpoints" / "last.pt", tmp_path, "-o", tmp_path / "out") == 2
    printed, *_ = capsys.readouterr().err.splitlines()
    assert printed.startswith("error: a: ") and "allocate 7 bytes" in printed
    assert [path.name for path in (tmp_path / "out").glob("*.nii*")] == ["b.nii.gz"]


@promise("Prediction", "a file among others ...")
def test_files_that_are_no_case_stop_no_other_and_what_is_accepted_is_a_warning(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    files = [tmp_path / name for name in ("one/a.nii.gz", "two/a.nii.gz", "b.nii.gz")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        nib.save(nib.Nifti1Image(np.zeros((16, 16, 16), np.float32), np.eye(4)), file)
    monkeypatch.setattr(predicted_files, "accepted_contradictions", lambda case: [f"{case.id}: lies elsewhere"])
    assert face("predict", finished / "checkpoints" / "last.pt", files[0], "-o", tmp_path / "out", *files[1:]) == 2
    first, *_, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: a: 2 ") and "one/a.nii.gz" in first and "two/a.nii.gz" in first
    assert second == "warning: b: lies elsewhere"
    assert [path.name for path in (tmp_path / "out").glob("*.nii*")] == ["b.nii.gz"]


def test_channels_that_lie_apart_are_reported_whatever_the_checkpoint_accepts(tmp_path: Path) -> None:
    paths = (tmp_path / "a_0000.nii.gz", tmp_path / "a_0001.nii.gz")
    for path, side in zip(paths, (1, -1), strict=True):
        nib.save(nib.Nifti1Image(np.zeros((4, 5, 6), np.float32), np.diag([side, 1, 1, 1])), path)
    (line,) = predicted_files.accepted_contradictions(Case("a", paths, None))
    assert line.startswith(f"a: {paths[1]}: ") and re.search(r"\b6 voxels", line)
    assert predicted_files.accepted_contradictions(Case("a", paths[:1], None)) == []


@promise("Data", "sheared grids, sform beside ...")
@without("unet3d.data.nifti.MM", range(99))
def test_lengths_that_are_not_in_mm_are_reported_once(tmp_path: Path) -> None:
    paths = (tmp_path / "a_0000.nii.gz", tmp_path / "a_0001.nii.gz")
    for path in paths:
        stored = nib.Nifti1Image(np.zeros((4, 5, 6), np.float32), np.eye(4))
        stored.header.set_xyzt_units("meter")
        nib.save(stored, path)
    (line,) = predicted_files.doubts_about([Case("a", paths, None)])
    assert line.startswith(f"a: {paths[0]}: ") and {"meter", "mm", "data.spacing"} <= {*re.findall(r"[\w.]+", line)}


def two_sizes(path: Path) -> Path:
    """An image of 1 mm by its sform, of 2 mm by its qform."""
    stored = nib.Nifti1Image(np.random.default_rng(0).normal(size=(9, 9, 9)).astype(np.float32), np.diag([2, 2, 2, 1]))
    stored.set_qform(stored.affine, code=1)
    stored.header.set_sform(np.eye(4), code=2)
    nib.save(type(stored)(stored.dataobj, None, stored.header), path)
    return path


@promise("Data", "voxel sizes of sform ...")
def test_files_of_two_voxel_sizes_are_one_warning_and_read_as_in_training(
    pair: list[Path], tmp_path: Path, capsys: Capture
) -> None:
    """Label maps have the header of their image, from Python as in files."""
    images = tmp_path / "images"
    images.mkdir()
    paths = [two_sizes(images / name) for name in ("a.nii", "B.NII.GZ")]
    (images / "c.nrrd").touch()
    for form in ("auto", "qform"):
        change(pair[1], "config", "data", "affine", value=form)
        network = unet3d.load(pair[1], "cpu")
        assert network.segmenter.options.affine == form
        assert face("predict", pair[1], images, "-o", tmp_path / form, "--device", "cpu") == 0
        labels = network.segment(paths[0])
        lines = capsys.readouterr().err.splitlines()
        assert [line[:9] for line in lines if "c.nrrd" in line] == ["warning: "]
        warned = [line for line in lines if "1 x 1 x 1 mm by its sform, of 2 x 2 x 2 mm by its qform" in line]
        assert len(warned) == 2 * (form == "auto"), "of the command, and of the function"
        assert not warned or ("(2 such files)" in warned[0] and warned[1].startswith(f"warning: a: {paths[0]}: "))
        written = nib.load(tmp_path / form / "a.nii.gz")
        assert np.array_equal(written.affine, np.eye(4)) and np.array_equal(written.get_qform(), np.diag([2, 2, 2, 1]))
        assert np.array_equal(labels.affine, np.eye(4)) and np.array_equal(labels.dataobj, written.dataobj)
    with pytest.raises(UserError, match=r"other\.pt: .*last\.pt.*data\.affine"):
        publish.publish([pair[0], pair[1]], tmp_path / "both.pt")


def test_a_folder_that_cannot_be_made_is_one_line(finished: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").touch()
    assert face("compare", finished, "-o", tmp_path / "file" / "x") == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: {tmp_path / 'file' / 'x'}: ") and line.endswith("Not a directory\n")


def test_predictions_that_cannot_be_written_are_one_line(finished: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "a.nii.gz"
    nib.save(nib.Nifti1Image(np.zeros((9, 9, 9), np.float32), np.eye(4)), path)
    assert face("predict", finished / "checkpoints" / "last.pt", path, "-o", path / "out") == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: {path / 'out' / 'a.nii.gz'}: ") and "Not a directory" in line
    assert line.count("\n") == 1
