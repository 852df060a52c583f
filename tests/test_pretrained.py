"""init=net.pt: what is loaded, what is new, at what rate; and that a resumed run loads nothing again."""

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from guards import nothing, without
from promises import promise
from ranked import train_ranks
from training import TINY, train

from unet3d import build
from unet3d.base import ranks
from unet3d.base.errors import CheckpointError, UserError
from unet3d.base.types import Batch
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.data.prepare import PreparedData, prepare_data
from unet3d.memory.breakdown import summarise_ledger
from unet3d.memory.ledger import most_held
from unet3d.memory.meter import STEPS_FOR_PEAK, LedgerMeter
from unet3d.memory.prediction import estimate
from unet3d.memory.simulate import simulate
from unet3d.memory.technique import choose_technique
from unet3d.report.loggers import without_paths
from unet3d.run import checkpoint, publish
from unet3d.run.pretrained import PretrainedWeights, class_sources, heads, load_pretrained, with_init_names
from unet3d.training import optim
from unet3d.training.step import train_step

Capture = pytest.CaptureFixture[str]
HEAD = ["outc.conv.weight", "outc.conv.bias"]


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run with averaged weights, beside its data."""
    place = tmp_path_factory.mktemp("net")
    ended = train(place, *TINY, "optim.average=0.5", f"hydra.run.dir={place / 'run'}")
    assert ended.code == 0, ended.err
    return place / "run" / "checkpoints" / "last.pt"


def words(net: Path, *more: str) -> list[str]:
    return [*TINY, f"data.root={net.parents[2] / 'data' / 'phantom'}", f"init={net}", *more]


@cache
def data_of(net: Path, *more: str) -> PreparedData:
    """The data of a run, which are read once for all tests."""
    return prepare_data(compose.compose(words(net, *more)).data)


def opened(net: Path, *more: str) -> PretrainedWeights:
    config = compose.compose(words(net, *more))
    data = data_of(net, *(word for word in more if word.startswith("data.")))
    return load_pretrained(config, build.model_options(config, data.dataset, data.spacing), data)


@pytest.mark.slow
def test_all_is_loaded_where_all_fits_averaged_weights_first(net: Path, capsys: Capture) -> None:
    found, state = opened(net), checkpoint.load_checkpoint(net)
    assert found.new == [] and found.weights.keys() == state["model"].keys()
    assert all(torch.equal(found.weights[name], state["average"][name]) for name in state["average"])
    count = len(state["model"])
    printed = capsys.readouterr()
    _, _, counts = printed.out.partition(f"init={net}: ")
    assert printed.err == "" and re.findall(r"\d+", counts) == [str(count)] * 2


@pytest.mark.slow
def test_heads_begin_with_the_rows_of_their_classes(net: Path, capsys: Capture) -> None:
    state = checkpoint.load_checkpoint(net)
    background, one, two, three = state["classes"]
    for label_map, sources, names in (
        ("{1:2,2:1}", [[0], [2], [1]], [background, background, two, two, one, one]),
        ("{1:[1,3]}", [[0], [1, 3]], [background, background, one, three, one, three]),
    ):
        found = opened(net, f"data.label_map={label_map}")
        assert found.new == [] and not {*HEAD} & found.weights.keys()
        *_, line = capsys.readouterr().out.splitlines()
        assert re.findall(f"{background}|{one}|{two}|{three}", line) == names
        model = build.model(
            dataclasses.replace(compose.from_plain(state["config"]).model, in_channels=1, classes=len(sources)), 0
        )
        found.load(model)
        for name in HEAD:
            wanted = torch.stack([state["average"][name][olds].mean(0) for olds in sources])
            assert torch.equal(model.state_dict()[name], wanted)


def test_heads_are_new_where_no_class_has_a_name_in_common(net: Path, capsys: Capture) -> None:
    found = opened(net, "data.label_map={1:1,2:2}", "data.classes=[air,x,y]")
    assert (found.new, found.head_rows) == (HEAD, {})
    there = ", ".join(checkpoint.load_checkpoint(net)["classes"])
    *_, line = capsys.readouterr().out.splitlines()
    assert "air, x, y" in line and there in line


def test_a_head_with_a_new_row_is_not_said_to_have_nothing_new(net: Path, capsys: Capture) -> None:
    one = checkpoint.load_checkpoint(net)["classes"][1]
    opened(net, "data.label_map={1:1,2:[2,3]}", f"data.classes=[air,{one},whole]")
    *_, counts, rows = capsys.readouterr().out.splitlines()
    assert "2 of output layers matched by class name (1 of 3 rows new)" in counts and "nothing" not in counts
    assert rows.endswith("whole new")


def test_a_class_without_a_source_has_a_new_row() -> None:
    assert class_sources(("b", "x", "y", "z"), ("air", "y", "w", "x+z")) == {0: [0], 1: [2], 3: [1, 3]}
    assert class_sources(("b", "x"), ("b", "x+w")) == class_sources(("b", "x"), ("b", "b", "w")) == {}


def test_heads_of_deep_supervision_are_found_by_their_size() -> None:
    options = compose.compose(
        ["model.deep_supervision=true", "model.features=[4,8,16,32]", "model.in_channels=1"]
    ).model
    options = dataclasses.replace(options, classes=3)
    stages = [name for name in heads(options) if name.startswith("up")]
    assert len(heads(options)) == 6 and {name.split(".")[0] for name in stages} == {"up1", "up2"}


def test_another_number_of_channels_has_a_new_first_layer(net: Path) -> None:
    config = compose.compose(words(net))
    options = build.model_config_from_headers(config)
    found = load_pretrained(config, dataclasses.replace(options, in_channels=2), None)
    assert len(found.new) == 1 and found.new[0].startswith("inc.") and found.new[0].endswith("weight")


def test_a_published_file_of_several_networks_gives_the_first(net: Path, tmp_path: Path, capsys: Capture) -> None:
    state = checkpoint.load_checkpoint(net)
    first = {name: state["average"].get(name, value) for name, value in state["model"].items()}
    second = {name: value + 1 for name, value in first.items()}
    checkpoint.save_checkpoint(tmp_path / "other.pt", state | {"model": second, "average": {}})
    publish.publish([net, tmp_path / "other.pt"], tmp_path / "both.pt")
    found = opened(net, f"init={tmp_path / 'both.pt'}")
    assert found.new == [] and all(torch.equal(value, first[name]) for name, value in found.weights.items())
    assert "both.pt" in capsys.readouterr().out


def test_other_images_and_another_network_are_warned_of(net: Path, tmp_path: Path, capsys: Capture) -> None:
    state = checkpoint.load_checkpoint(net)
    state["intensity"] = [{"kind": "ct", "low": -100.0, "high": 300.0, "mean": 40.0, "std": 30.0}]
    state["config"]["data"]["spacing"] = [1.0, 1.0, 2.0]
    checkpoint.save_checkpoint(tmp_path / "ct.pt", state)
    opened(net, f"init={tmp_path / 'ct.pt'}", "model.activation=silu")
    first, second = capsys.readouterr().err.splitlines()
    assert re.search(r"ct\.pt: .*model\.activation.*relu.*silu", first)
    assert re.search(r"ct\.pt: .*ct -100.*300.*zscore.*data\.spacing.*\[1\.0, 1\.0, 2\.0\]", second)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (["model.features=[5,7]"], r"init=.*model\.features.*\[4, 8\].*\[5, 7\]"),
        (["optim.init_lr=0"], r"optim\.init_lr=0: "),
        (["optim.init_lr=0.1", "optim.init_names=[down9]"], r"optim\.init_names: .*down9.*inc\."),
        (["optim.init_lr=0.1", "optim.init_names=[outc]", "data.label_map={1:[1,2]}"], r"optim\.init_names: .*outc"),
    ],
)
def test_what_cannot_be_a_start_is_refused(net: Path, more: list[str], what: str) -> None:
    with pytest.raises(UserError, match=what):
        opened(net, *more)


@pytest.mark.parametrize("word", ["optim.init_lr=0", "optim.init_names=[inc]"])
def test_what_is_for_a_start_is_refused_without_one(word: str) -> None:
    """Else what has random weights would be frozen."""
    with pytest.raises(UserError, match=rf"^{word.partition('=')[0]}: .*init=net\.pt"):
        compose.compose([*TINY, word])


@promise(
    "Resume",
    "several ranks begin with a network trained with `compile` or `channels_last`",
    "it makes no difference",
)
def test_how_the_other_run_took_its_steps_does_not_matter(
    net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several ranks may begin with what one has trained in ways of its own."""
    state = checkpoint.load_checkpoint(net)
    state["config"] |= {"compile": True, "channels_last": True}
    checkpoint.save_checkpoint(tmp_path / "net.pt", state)
    monkeypatch.setattr(ranks, "SIZE", 2)
    config = compose.compose(words(net, f"init={tmp_path / 'net.pt'}", "batch=2"))
    assert load_pretrained(config, build.model_config_from_headers(config), None).new == []


def test_heads_of_another_type_are_new(net: Path, tmp_path: Path) -> None:
    state = checkpoint.load_checkpoint(net)
    for weights in (state["average"], state["model"]):
        weights |= {name: weights[name].to(torch.int64) for name in HEAD}
    checkpoint.save_checkpoint(tmp_path / "whole.pt", state)
    found = opened(net, f"init={tmp_path / 'whole.pt'}", "data.label_map={1:[1,2]}")
    assert found.head_rows == {} and {*HEAD} <= {*found.new}


def test_sizes_that_are_written_in_another_way_are_no_difference(net: Path, tmp_path: Path, capsys: Capture) -> None:
    state = checkpoint.load_checkpoint(net)
    state["model_options"]["kernels"] = [[3, 3, 3], 3]
    checkpoint.save_checkpoint(tmp_path / "same.pt", state)
    opened(net, f"init={tmp_path / 'same.pt'}")
    assert capsys.readouterr().err == ""


@promise(
    "checkpoints and run folders",
    "`init=net.pt` reads the file under these promises, and begins with finite numbers alone",
)
@without("unet3d.run.checkpoint.refuse_non_finite", nothing)
def test_files_that_are_no_checkpoint_of_this_network_are_refused(net: Path, tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("no checkpoint")
    with pytest.raises(CheckpointError, match=r"text\.pt: "):
        opened(net, f"init={tmp_path / 'text.pt'}")
    with pytest.raises(UserError, match=r"init=nowhere\.pt: .*RUN/checkpoints/best\.pt"):
        compose.compose(["init=nowhere.pt"])
    state = checkpoint.load_checkpoint(net)
    checkpoint.save_checkpoint(
        tmp_path / "own.pt", state | {"model_options": state["model_options"] | {"path": "evil:net"}}
    )
    with pytest.raises(UserError, match=r"own\.pt: .*model\.path=evil:net"):
        opened(net, f"init={tmp_path / 'own.pt'}")
    name = next(iter(state["average"]))
    state["average"][name] = state["average"][name] * float("nan")
    checkpoint.save_checkpoint(tmp_path / "nan.pt", state)
    with pytest.raises(CheckpointError, match=rf"nan\.pt: {re.escape(name)}.*NaN"):
        opened(net, f"init={tmp_path / 'nan.pt'}")


FROZEN = ["optim.init_lr=0", "optim.init_names=[inc,down1,up1.block]"]


def stepped(config: Config) -> tuple[torch.nn.Module, torch.optim.Optimizer, LedgerMeter]:
    """A network after two steps, its optimizer, and what the steps held."""
    assert config.model.in_channels and config.model.classes
    model, loss = build.model(config.model, 0), build.loss(config, config.model.classes)
    policy = build.policy(config, "cpu", choose_technique(config, config.model))
    optimizer = optim.optimizer(config.optim, model)
    meter, scaler = LedgerMeter(model, optimizer), policy.scaler()
    size = config.batch, config.model.in_channels, *config.data.patch
    for _ in range(STEPS_FOR_PEAK):
        batch = Batch(torch.randn(size), torch.ones(size[0], *size[2:], dtype=torch.int16))
        train_step(model, loss, optimizer, scaler, policy, [batch], meter.mark, config.optim.clip)
    return model, optimizer, meter


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["ckpt=2", "amp=true"],
        ["recompute=tiles"],
        ["model.deep_supervision=true", "model.features=[4,8,8]", "optim.average=0.5"],
        ["optim.init_lr=0.1"],
    ],
    ids=" ".join,
)
def test_the_ledger_of_frozen_tensors_is_predicted_to_the_byte_and_they_have_no_state(more: list[str]) -> None:
    config = compose.compose([*TINY, *FROZEN, f"init={__file__}", "model.in_channels=1", "model.classes=3", *more])
    before = build.model(config.model, 0).state_dict()
    model, optimizer, meter = stepped(config)
    starts = choose_technique(config, config.model)
    predicted = simulate(config, config.model, starts, steps=STEPS_FOR_PEAK)
    assert summarise_ledger(predicted.ledger)["phases"] == summarise_ledger(meter.ledger)["phases"]
    assert predicted.summary()["state"] == meter.summary()["state"]
    slow = {n: p for n, p in model.named_parameters() if optim.is_named(n, config.optim.init_names or ())}
    assert slow and len(slow) < len(list(model.parameters()))
    if config.optim.init_lr:
        assert [group.get(optim.FACTOR) for group in optimizer.param_groups] == [None, 0.1]
        assert all(parameter in optimizer.state for parameter in slow.values())
        return
    assert all(p not in optimizer.state and not p.requires_grad and torch.equal(p, before[n]) for n, p in slow.items())
    learned = {n: p for n, p in model.named_parameters() if n not in slow}
    assert all(p in optimizer.state and not torch.equal(p, before[n]) for n, p in learned.items())
    assert predicted.summary()["state"]["grads"] == sum(p.nbytes for p in learned.values())


def test_schedules_scale_both_groups() -> None:
    given = [f"init={__file__}", "optim.init_lr=0.1", "optim.init_names=[inc]"]
    config = compose.compose([*TINY, *given, "model.in_channels=1", "model.classes=2"])
    optimizer = optim.optimizer(config.optim, build.model(config.model, 0))
    optim.set_rate(optimizer, optim.learning_rate(config.optim, 4, 2))
    new, loaded = (group["lr"] for group in optimizer.param_groups)
    assert new == optim.learning_rate(config.optim, 4, 2) and loaded == pytest.approx(new / 10)


@pytest.fixture(scope="module")
def transferred(net: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str]]]:
    """A run of two of its four steps from a frozen start, and its words."""
    place = tmp_path_factory.mktemp("transferred")
    started = shutil.copy(net, place / "net.pt")
    given = words(Path(started), f"data.root={net.parents[2] / 'data' / 'phantom'}", "data.label_map={1:[1,2]}")
    given += ["optim.init_lr=0", f"hydra.run.dir={place / 'run'}"]
    ended = train(place, *given, "steps=2")
    assert ended.code == 0, ended.err
    assert f"init={started}" in ended.out
    yield place / "run", given


@pytest.mark.slow
def test_a_run_records_its_start_and_measures_what_it_predicted(net: Path, transferred: tuple[Path, list[str]]) -> None:
    folder, _ = transferred
    record, memory = (json.loads((folder / name).read_text()) for name in ("init.json", "memory.json"))
    state, before = checkpoint.load_checkpoint(folder / "checkpoints/last.pt"), checkpoint.load_checkpoint(net)
    assert record["new"] == [] and [*record["by class"]] == HEAD
    assert {*record["loaded"], *HEAD} == state["model"].keys()
    values = yaml.safe_load((folder / "config.yaml").read_text())
    config = compose.from_plain(values | {"model": state["model_options"]})
    assert memory["measured"]["peak_bytes"] == most_held(simulate(config, config.model).ledger.events)
    assert all(torch.equal(state["model"][name], before["average"][name]) for name in record["loaded"])
    assert len(state["optimizer"]["state"]) == 2  # of the head's weight and bias
    assert values["optim"]["init_names"] == record["loaded"]


@pytest.mark.slow
def test_a_resumed_run_needs_the_file_no_more(net: Path, transferred: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, given = transferred
    with pytest.raises(UserError, match=r"^resume: .*\binit\b"):
        compose.resumed(folder, compose.compose_tree([f"resume={folder}", f"init={net}"]))
    (folder.parent / "net.pt").unlink()
    ended = train(folder.parent, *given, "resume=auto", "steps=4", "eval_every=0")
    assert ended.code == 0, ended.err
    state, before = checkpoint.load_checkpoint(folder / "checkpoints/last.pt"), checkpoint.load_checkpoint(net)
    assert state["step"] == 4 and "init=" not in ended.out
    loaded = json.loads((folder / "init.json").read_text())["loaded"]
    assert all(torch.equal(state["model"][name], before["average"][name]) for name in loaded)
    publish.publish([folder / "checkpoints/last.pt"], tmp_path / "out.pt")
    assert b"net.pt" not in (tmp_path / "out.pt").read_bytes()


@pytest.mark.slow
def test_memory_of_a_frozen_start_is_predicted_without_a_run(net: Path) -> None:
    given = words(net, "data.label_map={1:[1,2]}", "optim.init_lr=0")
    found = estimate(with_init_names(given), half=False)
    head = 4 * (found.model.features[0] * 2 + 2)  # bytes: a weight for each channel and class, a bias for each class
    assert found.entry["state"]["grads"] == head and with_init_names(given[:-1]) == given[:-1]


def test_wandb_does_not_record_where_the_weights_come_from() -> None:
    assert without_paths({"init": "patient.pt", "seed": 0}) == {"seed": 0}


@pytest.mark.slow
def test_ranks_begin_with_the_same_weights_which_the_first_alone_reads(net: Path, tmp_path: Path) -> None:
    given = [*TINY, f"init={net}", "optim.init_lr=0", "data.label_map={1:[1,2]}", "batch=2", "steps=2", "eval_every=0"]
    first, other = train_ranks(tmp_path, *given)
    assert (first.code, other.code) == (0, 0), first.err
    assert f"init={net}" in first.out and "init=" not in other.out
    state, before = checkpoint.load_checkpoint(tmp_path / "run/checkpoints/last.pt"), checkpoint.load_checkpoint(net)
    assert all(torch.equal(state["model"][n], before["average"][n]) for n in before["average"].keys() - {*HEAD})
