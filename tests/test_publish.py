"""Networks given away, alone or several as one, and scored on labelled cases."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from training import TINY, train

from unet3d import __main__, apply, build, compose, publish, score, snapshot, trained
from unet3d.config import Model
from unet3d.errors import NotSaved, SnapshotError, UserError


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose averaged weights were scored, and predicted with mirroring."""
    place = tmp_path_factory.mktemp("finished")
    ended = train(place, *TINY, "optim.average=0.5", "inference.mirror=true", f"hydra.run.dir={place / 'run'}")
    assert ended.code == 0, ended.err
    return place / "run"


@pytest.fixture
def pair(finished: Path, tmp_path: Path) -> Iterator[list[Path]]:
    """Its snapshot, and one of the same kind with other weights."""
    state = snapshot.load(finished / "checkpoints" / "last.pt")
    for weights in (state["model"], state["average"]):
        for name in weights:
            weights[name] = weights[name] * 1.5 + 0.01
    snapshot.save(tmp_path / "other.pt", state)
    yield [finished / "checkpoints" / "last.pt", tmp_path / "other.pt"]


def overrides(finished: Path, *more: str) -> list[str]:
    return [*TINY, f"data.root={finished.parent / 'data' / 'phantom'}", *more]


def change(path: Path, *keys: str, value: Any) -> None:
    """Set state[key][key] ... of a snapshot."""
    state = inner = snapshot.load(path)
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    snapshot.save(path, state)


def test_networks_published_as_one_give_the_mean_of_their_logits(pair: list[Path], tmp_path: Path) -> None:
    publish.publish(pair, tmp_path / "both.pt")
    tile = torch.randn(1, 1, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one, other, both = (
            apply.open_snapshot(path, "cpu").predictor.window_logits(tile) for path in (*pair, tmp_path / "both.pt")
        )
    assert (one - other).abs().max() > 0.1
    torch.testing.assert_close(both, (one + other) / 2)
    publish.publish([tmp_path / "both.pt", pair[0]], tmp_path / "three.pt")  # what is published can be joined again
    assert len(apply.open_snapshot(tmp_path / "three.pt", "cpu").predictor.models) == 3


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("model_options", "features"), [8, 8], "model"),
        (("classes",), ["a", "b", "c"], "classes"),
        (("config", "data", "spacing"), [2.0, 2.0, 2.0], r"data\.spacing"),
        (("config", "data", "patch"), [16, 16, 32], r"data\.patch"),
        (("config", "data", "augment", "mirror"), [0], r"data\.augment\.mirror"),
        (("config", "inference", "mirror"), False, "inference"),
        (("intensity",), [{"kind": "none", "low": 0.0, "high": 0.0, "mean": 0.0, "std": 1.0}], "intensity"),
    ],
)
def test_networks_that_see_images_differently_are_not_published_as_one(
    pair: list[Path], tmp_path: Path, path: tuple, value: Any, told: str
) -> None:
    change(pair[1], *path, value=value)
    with pytest.raises(UserError, match=rf"other\.pt: differs .* in {told}; publish"):
        publish.publish(pair, tmp_path / "both.pt")
    assert not (tmp_path / "both.pt").exists()


@pytest.mark.parametrize("others", [7, [7], ["ab"], [{}], [{"x": 1}], {"a": 1}, [{1: torch.zeros(1)}]])
def test_a_published_snapshot_of_wrong_networks_is_one_line(finished: Path, tmp_path: Path, others: Any) -> None:
    state = snapshot.load(finished / "checkpoints" / "last.pt")
    for splits in ([{}], [{}, {}]):
        snapshot.save(tmp_path / "wrong.pt", state | {"others": others, "splits": splits})
        with pytest.raises(SnapshotError, match=r"wrong\.pt"):
            apply.open_snapshot(tmp_path / "wrong.pt", "cpu")


def test_a_snapshot_that_lacks_what_is_published_is_one_line(pair: list[Path], tmp_path: Path) -> None:
    state = snapshot.load(pair[1])
    del state["channels"]
    snapshot.save(pair[1], state)
    with pytest.raises(SnapshotError, match=r"other\.pt: not a snapshot of a run \(no channels\)"):
        publish.publish(pair, tmp_path / "both.pt")


@pytest.mark.parametrize("kind", ["aliased", "expanded"])
def test_a_small_file_that_describes_many_or_large_networks_takes_no_memory(
    pair: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    state = snapshot.load(pair[0])
    kept = {name: state[name] for name in ("config", "model_options", "intensity", "model")} | {"average": {}}
    if kind == "aliased":
        kept |= {"others": [state["model"]] * 9, "splits": [{}] * 10}
    else:
        kept["model_options"] = kept["model_options"] | {"features": [64, 128]}
        with torch.device("meta"):
            shapes = build.model(Model(**kept["model_options"]), 0).state_dict()
        kept["model"] = {name: torch.zeros(()).expand(value.shape) for name, value in shapes.items()}
    snapshot.save(tmp_path / "bomb.pt", kept)
    monkeypatch.setattr(trained, "_network", lambda *_: pytest.fail("memory is taken"))
    with pytest.raises(SnapshotError, match=r"bomb\.pt: its weights are not all there"):
        apply.open_snapshot(tmp_path / "bomb.pt", "cpu")


def test_a_snapshot_scores_as_its_run_did(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    net, out = str(tmp_path / "net.pt"), str(tmp_path / "out")
    for words in (
        ["publish", str(finished / "checkpoints" / "last.pt"), "-o", net],
        ["score", net, *overrides(finished), "-o", out],
    ):
        monkeypatch.setattr("sys.argv", ["unet3d", *words])
        assert __main__.main() == 0
    assert (tmp_path / "out" / "scores.csv").read_bytes() == (finished / "scores.csv").read_bytes()
    told = capsys.readouterr()
    assert told.err == "" and "HD95" in told.out and "mean of classes" in told.out


def test_what_is_there_is_not_scored_over(finished: Path) -> None:
    before = (finished / "scores.csv").read_bytes()
    with pytest.raises(UserError, match=r"scores\.csv: is there already"):
        score.score(finished / "checkpoints" / "last.pt", compose.compose(overrides(finished)), finished)
    assert (finished / "scores.csv").read_bytes() == before


def test_scores_that_cannot_be_written_are_one_line(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotSaved, match=r"scores\.csv: not saved \(Not a directory\)"):
        score.score(finished / "checkpoints" / "last.pt", compose.compose(overrides(finished)), tmp_path / "file" / "x")


@pytest.mark.parametrize(
    ("option", "value", "asked"),
    [
        ("fold", 1, ["data.fold=0"]),
        ("split", "/somewhere/split.json", []),
        ("semi", True, []),
        ("val_fraction", 0.5, []),
    ],
)
def test_scores_on_another_split_are_warned_of(
    pair: list[Path],
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
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
    found = trained.parse(snapshot.load(tmp_path / "both.pt"), tmp_path / "both.pt")
    score._warn_of_another_split(found, compose.compose(overrides(finished, *asked)).data)
    assert f"{1 + len(asked)} of 2 networks were trained with another split" in capsys.readouterr().err


def test_folds_do_not_matter_where_there_is_no_fold(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = finished / "checkpoints" / "last.pt"
    options = compose.compose(overrides(finished, "data.folds=4")).data
    score._warn_of_another_split(trained.parse(snapshot.load(path), path), options)
    assert capsys.readouterr().err == ""


def test_data_that_a_network_is_not_for_is_not_scored(finished: Path, tmp_path: Path) -> None:
    state = snapshot.load(finished / "checkpoints" / "last.pt")
    state["model_options"]["in_channels"], state["intensity"] = 2, state["intensity"] * 2
    snapshot.save(tmp_path / "two.pt", state)
    with pytest.raises(UserError, match=r"two\.pt: a network of 2 channels and \d classes; the data has 1 and"):
        score.score(tmp_path / "two.pt", compose.compose(overrides(finished)), tmp_path / "out")
    semi = compose.compose(overrides(finished, "data.sparse=[3,3,3]", "data.semi=true"))
    with pytest.raises(UserError, match=r"data\.semi holds out slices"):
        score.score(finished / "checkpoints" / "last.pt", semi, tmp_path / "out")
    assert not (tmp_path / "out").exists()
