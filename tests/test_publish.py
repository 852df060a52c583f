"""Networks given away, alone or several as one, and scored on labelled cases."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from training import TINY, train

from unet3d import __main__, apply, compose, publish, score, snapshot
from unet3d.errors import SnapshotError, UserError


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
    ("path", "value"),
    [
        (("model_options", "features"), [8, 8]),
        (("classes",), ["a", "b", "c"]),
        (("config", "data", "spacing"), [2.0, 2.0, 2.0]),
        (("config", "data", "patch"), [16, 16, 32]),
        (("intensity",), [{"kind": "none", "low": 0.0, "high": 0.0, "mean": 0.0, "std": 1.0}]),
    ],
)
def test_networks_that_see_images_differently_are_not_published_as_one(
    pair: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: tuple, value: Any
) -> None:
    state: Any = snapshot.load(pair[1])
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    snapshot.save(pair[1], state)
    told = path[0] if path[0] != "config" else rf"data\.{path[-1]}"
    monkeypatch.setattr(apply, "segmenter", lambda *_: None)  # whether it can be used alone is another test's
    with pytest.raises(UserError, match=rf"other\.pt: differs .* in {told}; publish"):
        publish.publish(pair, tmp_path / "both.pt")
    assert not (tmp_path / "both.pt").exists()


@pytest.mark.parametrize("others", [7, [7], ["ab"], [{}], [{"x": 1}], {"a": 1}])
def test_a_published_snapshot_of_wrong_networks_is_one_line(finished: Path, tmp_path: Path, others: Any) -> None:
    state = snapshot.load(finished / "checkpoints" / "last.pt")
    snapshot.save(tmp_path / "wrong.pt", state | {"others": others})
    with pytest.raises(SnapshotError, match=r"wrong\.pt"):
        apply.open_snapshot(tmp_path / "wrong.pt", "cpu")


def test_a_snapshot_that_names_one_network_without_end_takes_no_memory(
    pair: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = snapshot.load(pair[0])
    snapshot.save(tmp_path / "bomb.pt", state | {"others": [state["model"]] * apply.MOST_NETWORKS})
    with monkeypatch.context() as patch:
        patch.setattr(apply.build, "model", lambda *_, **__: pytest.fail("memory is taken"))
        with pytest.raises(SnapshotError, match="more than"):
            apply.open_snapshot(tmp_path / "bomb.pt", "cpu")
    with pytest.raises(UserError, match="at most"):
        publish.publish([pair[0]] * (apply.MOST_NETWORKS + 1), tmp_path / "many.pt")
    assert not (tmp_path / "many.pt").exists()


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


def test_scores_on_another_split_are_warned_of(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = compose.compose(overrides(finished, "data.fold=0", "data.folds=4"))
    score.score(finished / "checkpoints" / "last.pt", config, tmp_path / "out")
    assert "was trained with data.folds=5, data.fold=None: it may have seen these cases" in capsys.readouterr().err


def test_data_that_a_network_is_not_for_is_not_scored(finished: Path, tmp_path: Path) -> None:
    state = snapshot.load(finished / "checkpoints" / "last.pt")
    snapshot.save(tmp_path / "two.pt", state | {"intensity": state["intensity"] * 2})
    with pytest.raises(UserError, match=r"two\.pt: a network of 2 channels and \d classes; the data has 1 and"):
        score.score(tmp_path / "two.pt", compose.compose(overrides(finished)), tmp_path / "out")
    semi = compose.compose(overrides(finished, "data.sparse=[3,3,3]", "data.semi=true"))
    with pytest.raises(UserError, match=r"data\.semi holds out slices"):
        score.score(finished / "checkpoints" / "last.pt", semi, tmp_path / "out")
    assert not (tmp_path / "out").exists()
