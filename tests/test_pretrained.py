"""init=net.pt: what is loaded, what is new, at what rate; and that a resumed run loads nothing again."""

import dataclasses
import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from guards import nothing, without
from promises import promise
from ranked import train_ranks
from training import RUN, TINY, train

from unet3d import build
from unet3d.base import ranks
from unet3d.base.errors import CheckpointError, UserError
from unet3d.base.types import Batch
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.data.prepare import PreparedData, prepare_data
from unet3d.memory.breakdown import summarise_ledger
from unet3d.memory.meter import STEPS_FOR_PEAK, LedgerMeter
from unet3d.memory.prediction import estimate
from unet3d.memory.simulate import simulate
from unet3d.memory.technique import choose_technique
from unet3d.run import checkpoint, publish
from unet3d.run.pretrained import PretrainedWeights, heads, load_pretrained, with_init_names
from unet3d.training import optim
from unet3d.training.step import train_step

Capture = pytest.CaptureFixture[str]
HEAD = ["outc.conv.weight", "outc.conv.bias"]


@pytest.fixture(scope="module")
def net(whole: Path) -> Path:
    """The checkpoint of a run with averaged weights, of background, organ, vessel and lesion."""
    return whole / "checkpoints" / "last.pt"


def words(net: Path, *more: str) -> list[str]:
    return [*RUN[:-1], f"data.root={net.parents[2] / 'data' / 'phantom'}", f"init={net}", *more]


@cache
def data_of(net: Path, *more: str) -> PreparedData:
    """The data of a run, which are read once for all tests."""
    return prepare_data(compose.compose(words(net, *more)).data)


def opened(net: Path, *more: str) -> PretrainedWeights:
    config = compose.compose(words(net, *more))
    data = data_of(net, *(word for word in more if word.startswith("data.")))
    return load_pretrained(config, build.model_options(config, data.dataset, data.spacing), data)


def changed(net: Path, target: Path, **parts: Any) -> str:
    """`init=` of a checkpoint with other parts."""
    checkpoint.save_checkpoint(target, checkpoint.load_checkpoint(net) | parts)
    return f"init={target}"


def test_all_is_loaded_where_all_fits_averaged_weights_first(net: Path, capsys: Capture) -> None:
    found, state = opened(net), checkpoint.load_checkpoint(net)
    assert found.new == [] and found.weights.keys() == state["model"].keys()
    assert all(torch.equal(found.weights[name], state["average"][name]) for name in state["average"])
    count, printed = len(state["model"]), capsys.readouterr()
    assert printed.err == "" and f"init={net}: {count} of {count} tensors loaded; nothing is new" in printed.out


@pytest.mark.parametrize(
    ("label_map", "sources", "said"),
    [
        ("{1:2,2:1}", {0: [0], 1: [2], 2: [1]}, r"nothing is new\n.*vessel from vessel; organ from organ$"),
        ("{1:[1,3]}", {0: [0], 1: [1, 3]}, r"nothing is new\n.*organ\+lesion from organ and lesion$"),
        ("{1:1,2:2} data.classes=[air,organ,vessel+w]", {0: [0], 1: [1]}, r"1 of 3 rows new\)\n.*; vessel\+w new$"),
        ("{1:1,2:2} data.classes=[air,x,y]", {}, "air, x, y, there background, organ, vessel, lesion$"),
    ],
)
def test_heads_begin_with_the_rows_of_their_classes(
    label_map: str, sources: dict, said: str, net: Path, capsys: Capture
) -> None:
    state = checkpoint.load_checkpoint(net)
    found = opened(net, *f"data.label_map={label_map}".split())
    assert found.new == ([] if sources else HEAD) and not {*HEAD} & found.weights.keys()
    assert re.search(said, capsys.readouterr().out.rstrip())
    model = build.model(dataclasses.replace(found.config.model, in_channels=1, classes=3), 0)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    for name in HEAD:
        for label, olds in sources.items():
            wanted[name][label] = state["average"][name][olds].mean(0)
    found.load(model)
    assert all(torch.equal(model.state_dict()[name], wanted[name]) for name in HEAD)


def test_heads_of_deep_supervision_are_found_by_their_size() -> None:
    given = ["model.deep_supervision=true", "model.features=[4,8,16,32]", "model.in_channels=1", "model.classes=3"]
    found = heads(compose.compose(given).model)
    assert [name.split(".")[0] for name in found] == ["up1", "up1", "up2", "up2", "outc", "outc"]


def test_heads_of_another_type_are_new(net: Path, tmp_path: Path) -> None:
    average = checkpoint.load_checkpoint(net)["average"]
    whole = {name: average[name].to(torch.int64) for name in HEAD}
    found = opened(net, changed(net, tmp_path / "whole.pt", average=average | whole), "data.label_map={1:[1,2]}")
    assert found.head_rows == {} and found.new == HEAD


def test_another_number_of_channels_has_a_new_first_layer(net: Path) -> None:
    config = compose.compose(words(net))
    options = build.model_config_from_headers(config)
    found = load_pretrained(config, dataclasses.replace(options, in_channels=2), None)
    assert len(found.new) == 1 and found.new[0].startswith("inc.") and found.new[0].endswith("weight")


def test_a_published_file_of_several_networks_gives_the_first(net: Path, tmp_path: Path, capsys: Capture) -> None:
    state = checkpoint.load_checkpoint(net)
    first = state["model"] | state["average"]
    second = {name: value + 1 for name, value in first.items()}
    changed(net, tmp_path / "other.pt", model=second, average={})
    publish.publish([net, tmp_path / "other.pt"], tmp_path / "both.pt")
    found = opened(net, f"init={tmp_path / 'both.pt'}")
    assert found.new == [] and all(torch.equal(value, first[name]) for name, value in found.weights.items())
    assert "both.pt" in capsys.readouterr().out


def test_other_images_and_another_network_are_warned_of(net: Path, tmp_path: Path, capsys: Capture) -> None:
    state = checkpoint.load_checkpoint(net)
    state["intensity"] = [{"kind": "ct", "low": -100.0, "high": 300.0, "mean": 40.0, "std": 30.0}]
    state["config"]["data"]["spacing"] = [1.0, 1.0, 2.0]
    opened(net, changed(net, tmp_path / "ct.pt", **state), "model.activation=silu")
    first, second = capsys.readouterr().err.splitlines()
    assert re.search(r"ct\.pt: .*model\.activation.*relu.*silu", first)
    assert re.search(r"ct\.pt: .*ct -100.*300.*zscore.*data\.spacing.*\[1\.0, 1\.0, 2\.0\]", second)


@promise(
    "Resume",
    "several ranks begin with a network trained with `compile` or `channels_last`",
    "it makes no difference",
)
def test_how_the_other_run_was_written_and_took_its_steps_does_not_matter(
    net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    state = checkpoint.load_checkpoint(net)
    state["config"] |= {"compile": True, "channels_last": True, "ckpt": 0}
    state["model_options"]["kernels"] = [[3, 3, 3], 3]
    given = changed(net, tmp_path / "net.pt", **state)
    monkeypatch.setattr(ranks, "SIZE", 2)
    config = compose.compose(words(net, given, "batch=2"))
    assert load_pretrained(config, build.model_config_from_headers(config), None).new == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ("model.features=[5,7]", r"init=.*model\.features.*\[4, 8\].*\[5, 7\]"),
        ("optim.init_lr=0", r"optim\.init_lr=0: "),
        ("optim.init_lr=0.1 optim.init_names=[down9]", r"optim\.init_names: .*down9.*inc\."),
        ("optim.init_lr=0.1 optim.init_names=[outc] data.label_map={1:[1,2]}", r"optim\.init_names: .*outc"),
        # Without a start, what has random weights would be frozen.
        ("init=null optim.init_lr=0", r"^optim\.init_lr: .*init=net\.pt"),
        ("init=null optim.init_names=[inc]", r"^optim\.init_names: .*init=net\.pt"),
        ("init=nowhere.pt", r"init=nowhere\.pt: .*RUN/checkpoints/best\.pt"),
    ],
)
def test_what_cannot_be_a_start_is_refused(net: Path, more: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        opened(net, *more.split())


@promise(
    "checkpoints and run folders",
    "`init=net.pt` reads the file under these promises, and begins with finite numbers alone",
)
@without("unet3d.run.checkpoint.refuse_non_finite", nothing)
def test_files_that_are_no_checkpoint_of_this_network_are_refused(net: Path, tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("no checkpoint")
    with pytest.raises(CheckpointError, match=r"text\.pt: "):
        opened(net, f"init={tmp_path / 'text.pt'}")
    state = checkpoint.load_checkpoint(net)
    with pytest.raises(UserError, match=r"own\.pt: .*model\.path=evil:net"):
        opened(net, changed(net, tmp_path / "own.pt", model_options=state["model_options"] | {"path": "evil:net"}))
    name = next(iter(state["average"]))
    state["average"][name] *= float("nan")
    with pytest.raises(CheckpointError, match=rf"nan\.pt: {re.escape(name)}.*NaN"):
        opened(net, changed(net, tmp_path / "nan.pt", **state))


# The start is no network here: its options are all that a step depends on.
FROZEN = [*TINY, f"init={__file__}", "model.in_channels=1", "model.classes=3"]
FROZEN += ["optim.init_lr=0", "optim.init_names=[inc,down1,up1.block]"]


def stepped(config: Config) -> tuple[torch.nn.Module, torch.optim.Optimizer, LedgerMeter]:
    """A network after two steps, its optimizer, and what the steps held."""
    model, loss = build.model(config.model, 0), build.loss(config, 3)
    policy = build.policy(config, "cpu", choose_technique(config, config.model))
    optimizer = optim.optimizer(config.optim, model)
    meter, scaler = LedgerMeter(model, optimizer), policy.scaler()
    for _ in range(STEPS_FOR_PEAK):
        batch = Batch(torch.randn(1, 1, 16, 16, 16), torch.ones(1, 16, 16, 16, dtype=torch.int16))
        train_step(model, loss, optimizer, scaler, policy, [batch], meter.mark, config.optim.clip)
    return model, optimizer, meter


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["ckpt=2", "amp=true", "model.deep_supervision=true", "model.features=[4,8,8]", "optim.average=0.5"],
        ["recompute=tiles"],
        ["optim.init_lr=0.1"],
    ],
    ids=" ".join,
)
def test_the_ledger_of_frozen_tensors_is_predicted_to_the_byte_and_they_have_no_state(more: list[str]) -> None:
    config = compose.compose([*FROZEN, *more])
    before = build.model(config.model, 0).state_dict()
    model, optimizer, meter = stepped(config)
    predicted = simulate(config, config.model, choose_technique(config, config.model), steps=STEPS_FOR_PEAK)
    assert summarise_ledger(predicted.ledger)["phases"] == summarise_ledger(meter.ledger)["phases"]
    assert predicted.summary()["state"] == meter.summary()["state"]
    slow = {n: p for n, p in model.named_parameters() if optim.is_named(n, config.optim.init_names or ())}
    learned = {n: p for n, p in model.named_parameters() if n not in slow}
    assert slow and all(p in optimizer.state and not torch.equal(p, before[n]) for n, p in learned.items())
    if config.optim.init_lr:
        assert all(parameter in optimizer.state for parameter in slow.values())
        optim.set_rate(optimizer, 0.5)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 0.05])
        return
    assert all(p not in optimizer.state and not p.requires_grad and torch.equal(p, before[n]) for n, p in slow.items())
    assert predicted.summary()["state"]["grads"] == sum(p.nbytes for p in learned.values())


@pytest.mark.slow
def test_a_run_records_its_start_and_goes_on_without_the_file(net: Path, tmp_path: Path) -> None:
    started = Path(shutil.copy(net, tmp_path / "net.pt"))
    given = [*words(started, f"data.root={net.parents[2] / 'data' / 'phantom'}"), "hydra.run.dir=run"]
    given += ["data.label_map={1:[1,2]}", "optim.init_lr=0"]
    ended = train(tmp_path, *given, "steps=2")
    assert ended.code == 0 and f"init={started}" in ended.out, ended.err
    folder = tmp_path / "run"
    state, before = checkpoint.load_checkpoint(folder / "checkpoints/last.pt"), checkpoint.load_checkpoint(net)
    record = json.loads((folder / "init.json").read_text())
    assert record["new"] == [] and [*record["by class"]] == HEAD
    assert {*record["loaded"], *HEAD} == state["model"].keys()
    assert yaml.safe_load((folder / "config.yaml").read_text())["optim"]["init_names"] == record["loaded"]
    assert len(state["optimizer"]["state"]) == 2  # of the head's weight and bias
    with pytest.raises(UserError, match=r"^resume: .*\binit\b"):
        compose.resumed(folder, compose.compose_tree([f"resume={folder}", f"init={net}"]))
    started.unlink()
    ended = train(tmp_path, *given, "resume=auto", "steps=4", "eval_every=0")
    assert ended.code == 0 and "init=" not in ended.out, ended.err
    state = checkpoint.load_checkpoint(folder / "checkpoints/last.pt")
    assert state["step"] == 4
    assert all(torch.equal(state["model"][name], before["average"][name]) for name in record["loaded"])
    publish.publish([folder / "checkpoints/last.pt"], tmp_path / "out.pt")
    assert b"net.pt" not in (tmp_path / "out.pt").read_bytes()


@pytest.mark.slow
def test_memory_of_a_frozen_start_is_predicted_without_a_run(net: Path) -> None:
    given = words(net, "data.label_map={1:[1,2]}", "optim.init_lr=0")
    found = estimate(with_init_names(given), half=False)
    head = 4 * (found.model.features[0] * 2 + 2)  # bytes: a weight for each channel and class, a bias for each class
    assert found.entry["state"]["grads"] == head and with_init_names(given[:-1]) == given[:-1]


@pytest.mark.slow
def test_ranks_begin_with_the_same_weights_which_the_first_alone_reads(net: Path, tmp_path: Path) -> None:
    given = [*words(net), "optim.init_lr=0", "data.label_map={1:[1,2]}", "batch=2", "steps=2", "eval_every=0"]
    first, other = train_ranks(tmp_path, *given)
    assert (first.code, other.code) == (0, 0), first.err
    assert f"init={net}" in first.out and "init=" not in other.out
    state, before = checkpoint.load_checkpoint(tmp_path / "run/checkpoints/last.pt"), checkpoint.load_checkpoint(net)
    assert all(torch.equal(state["model"][n], before["average"][n]) for n in before["average"].keys() - {*HEAD})
