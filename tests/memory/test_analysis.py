"""The breakdown of a peak adds up, names the right moment, and says what is worth changing."""

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unet3d.base.types import Batch
from unet3d.cli.memory_answers import narrowed
from unet3d.config import compose
from unet3d.memory import breakdown, tables
from unet3d.memory.breakdown import Levels, peak_moment
from unet3d.memory.ledger import CATEGORIES, Ledger
from unet3d.memory.meter import STEPS_FOR_PEAK, LedgerMeter
from unet3d.memory.prediction import MemoryEstimate, usual_estimates
from unet3d.memory.tables import sentence
from unet3d.recomputing.program import Technique
from unet3d.training.losses import LOSSES, SegmentationLoss
from unet3d.training.policy import MemoryPolicy
from unet3d.training.step import train_step

FORUM = ("model=forum_mid", "data.patch=[320,150,26]", "batch=2", "amp=true")


@cache
def estimate(*overrides: str) -> MemoryEstimate:
    config = compose.compose(["model=unet_tiny", "data.patch=[16,16,16]", *overrides])
    config.model.in_channels, config.model.classes = config.model.in_channels or 1, config.model.classes or 3
    return MemoryEstimate(config, config.model, steps=STEPS_FOR_PEAK)


@cache
def forum() -> MemoryEstimate:
    config = compose.compose(FORUM)
    return MemoryEstimate(config, config.model, name="forum_mid", steps=STEPS_FOR_PEAK)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), ("ckpt=2",), ("amp=true", "model.norm=group"), ("accumulate=2",)])
def test_every_breakdown_adds_up_to_the_peak(overrides: tuple[str, ...]) -> None:
    entry = estimate(*overrides).entry
    peak = entry["peak_bytes"]
    assert sum(entry["categories"].values()) == peak
    for rows in (entry["levels"], entry["layers"]):
        assert sum(row["bytes"] for row in rows) == peak
        assert all(sum(row[kind] for kind in CATEGORIES) == row["bytes"] for row in rows)
    for phase, peaks in entry["phases"].items():
        assert sum(entry["phase_categories"][phase].values()) == peaks["steady"], phase


def test_levels_and_layers_of_the_u() -> None:
    entry = estimate().entry
    level = {row["module"]: row["level"] for row in entry["layers"]}
    assert level["inc.conv1"] == level["up2.conv2"] == level["outc.conv"] == level["loss"] == level["data"] == 0
    assert level["down1.conv1"] == level["up1.conv2"] == 1 and level["down2.conv2"] == 2
    order = [name for name in level if "conv" in name]
    assert (
        order[0] == "inc.conv1" and order[-1] == "outc.conv" and order.index("down2.conv2") < order.index("up1.conv1")
    )
    assert [row["level"] for row in entry["levels"]][:3] == [0, 1, 2]


def test_what_valid_convolutions_make_belongs_to_their_own_level() -> None:
    """The decoder's maps of a level are smaller than the encoder's, some as small as those of the level below."""
    ledger = estimate("model=cicek2016", "model.features=[4,4,4,4]", "data.patch=[108,108,108]").ledger
    levels, made = Levels(ledger), [s for s in ledger.storages if s.operation == "aten.convolution.default"]
    assert {s.shape[2] for s in made if levels.of_storage(s) == 0} >= {106, 24, 20}
    assert all(levels.of_storage(s) == levels.of_module(s.scope.module) is not None for s in made)


def test_weights_gradients_and_optimizer_state_are_counted_to_the_byte() -> None:
    subject = estimate("model.norm=batch", "optim=adam")
    weights = sum(p.nbytes for p in subject.meter.model.parameters())
    buffers = sum(b.nbytes for b in subject.meter.model.buffers())
    tensors = len(list(subject.meter.model.parameters()))
    counters = 4 * tensors  # Adam's step counts
    assert subject.entry["state"] == {
        "params": weights + buffers,
        "grads": weights,
        "optimizer": 2 * weights + counters,
    }


def test_first_and_later_steps_differ_by_what_the_first_one_made() -> None:
    """The article's table: the difference is the same for data, forward and loss, and none after the update."""
    subject = estimate()
    ends = subject.entry["phase_ends"]
    more = {phase: end["steady"] - end["first"] for phase, end in ends.items()}
    states = subject.entry["state"]["optimizer"]
    assert more == {"data": states, "forward": states, "loss": states, "backward": states, "step": 0}


@pytest.mark.slow
def test_the_moment_of_the_peak_is_named() -> None:
    moment = forum().entry["moment"]
    assert "up3.conv2" in moment["words"] and moment["phase"] == "backward"
    assert not moment["is_recomputed"]
    assert moment["words"] in tables.moment(forum().entry) and moment["operation"] in tables.moment(forum().entry)
    ledger = estimate("ckpt=2").ledger
    recomputed = next(s for s in ledger.storages if s.scope.is_recomputed and "conv1" in s.scope.module)
    found = breakdown.describe(ledger, recomputed.born + 1)
    assert "inc.conv1" in found["words"] and found["is_recomputed"]


def test_recomputed_maps_are_activations_and_those_of_their_layer() -> None:
    ledger = estimate("ckpt=2").ledger
    recomputed = [s for s in ledger.storages if s.scope.is_recomputed]
    assert recomputed and {ledger.category(s) for s in recomputed} == {"activations"}
    made = {s.scope.module.partition(".")[0] for s in recomputed if s.operation == "aten.convolution.default"}
    assert made and "outc" not in made, "the last segment is kept"


@pytest.mark.slow
def test_the_forum_is_answered() -> None:
    """The peak is at full resolution, and the first level's width is what to change: not the deepest."""
    subject = forum()
    location, narrower = tables.peak_location(subject.entry), narrowed(subject)
    assert (location["level"], location["mostly"]) == (0, "activations")
    assert narrower[0].model.features == [32, 128, 256, 256] and narrower[0].step.tensors < 0.7 * subject.step.tensors
    assert narrower[3].step.tensors > 0.98 * subject.step.tensors and narrower[3].parameters < 0.8 * subject.parameters
    said = sentence(
        {**location, "override": "WIDTHS", "halved_peak_bytes": narrower[0].step.tensors}, subject.step.tensors
    )
    assert all(part in said for part in ("73%", "level 0", "WIDTHS", "33%")), said


def test_where_weights_dominate_the_peak_is_at_the_deep_level() -> None:
    small = estimate("data.patch=[8,8,8]", "batch=1", "model.features=[8,8,256]")
    location = tables.peak_location(small.entry)
    assert location["level"] == 2 and location["mostly"] in ("optimizer", "params")
    assert "level 2" in sentence(location, small.step.tensors)
    assert tables.NAMES[location["mostly"]] in sentence(location, small.step.tensors)


@pytest.mark.slow
def test_a_narrower_network_is_as_precise_and_has_groups_that_divide_its_widths() -> None:
    groups = estimate("model.norm=group", "model.groups=8", "model.features=[8,16,32]")
    assert list(narrowed(groups)) == [1, 2], "8 groups do not divide 4 channels"
    subject = replace(estimate("data.patch=[32,32,32]", "optim=adam"), dtype=torch.float16)
    assert 0.5 * subject.step.tensors < narrowed(subject)[0].step.tensors < 0.8 * subject.step.tensors


def test_a_map_is_at_its_resolution_whatever_module_made_it() -> None:
    """Under AMP on the CPU, pooling keeps a float32 copy of the finer map; in backward it makes the finer gradient."""
    subject = forum()
    copies = [s for s in subject.ledger.storages if s.scope.module == "down1.pool" and s.shape[2:] == (320, 150, 26)]
    level = Levels(subject.ledger).of_storage
    assert copies and {level(s) for s in copies} == {0}
    assert {level(s) for s in subject.ledger.storages if s.scope.module == "backward"} == {None}
    casts = [s for s in subject.ledger.storages if s.shape == (256, 256, 3, 3, 3) and s.role is None]
    assert {level(s) for s in casts if s.scope.module.startswith("down3")} == {3}, "a weight is not a map"


def test_what_autograd_saved_is_seen() -> None:
    """A tracker that walks the garbage collector cannot: no Python name holds the sigmoid."""
    ledger = Ledger()
    with ledger:
        ledger.mark("forward")
        x = torch.ones(64, 64, requires_grad=True)
        loss = (x.sigmoid() * 2).sum()
        ledger.mark("backward")
        end = len(ledger.events)
    saved = [group for group in breakdown.held(ledger, end) if group.shape == (64, 64)]
    assert sum(group.number for group in saved) == 2, "x, and sigmoid(x)"
    assert loss.requires_grad


def test_the_timeline_runs_from_the_first_event_of_the_last_step_to_its_peak() -> None:
    subject = estimate()
    start, rows = breakdown.timeline_rows(subject.ledger)
    alive = accumulate((row.change_bytes for row in rows), initial=sum(start.values()))
    assert max(alive) == subject.step.tensors
    assert [row.phase for row in rows] == sorted((row.phase for row in rows), key=list(subject.entry["phases"]).index)


def test_held_at_the_peak_is_everything_alive() -> None:
    subject = estimate()
    moment = peak_moment(subject.ledger)
    groups = breakdown.held(subject.ledger, moment)
    assert sum(group.bytes for group in groups) == subject.step.tensors
    assert sum(group.number for group in groups) == len(subject.ledger.alive_at(moment))


@pytest.mark.slow
def test_usual_estimates_miss_the_peak_as_they_do() -> None:
    """Widths 16..128, 64 x 64 x 64, batch 2, float32, as measured elsewhere: no closed form survives an activation."""
    errors = {}
    for activation in ("relu", "leaky_relu"):
        subject = estimate(
            "model=unet_small", "data.patch=[64,64,64]", "loss=ce", "optim=adam", f"model.activation={activation}"
        )
        found = usual_estimates(subject)
        errors[activation] = [size / subject.step.tensors - 1 for size in found.values()]
    assert list(found)[3].startswith("torchinfo")
    four_times_weights, _, with_backward, torchinfo, *_, what_autograd_saves = errors["relu"]
    assert four_times_weights < -0.9
    assert with_backward > 1
    assert torchinfo - errors["leaky_relu"][3] > 0.2
    assert what_autograd_saves < 0
    assert min(map(abs, errors["leaky_relu"])) > 0.02


class Foreign(nn.Module):
    """A user's network that is not a Sequential: parameters and operations of its own, and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU()), nn.Conv3d(5, 3, 1)
        self.scale = nn.Parameter(torch.ones(4, 1, 1, 1))

    def forward(self, image: Tensor) -> Tensor:
        made: Tensor = self.head(torch.cat([image, self.encoder(image) * self.scale], dim=1))
        return made


def plain(names: str = "0 1 2 3 4") -> nn.Sequential:
    """A Sequential of five layers."""
    layers = (
        nn.Conv3d(1, 4, 3, padding=1),
        nn.MaxPool3d(2),
        nn.ReLU(),
        nn.Upsample(scale_factor=2),
        nn.Conv3d(4, 3, 1),
    )
    return nn.Sequential(OrderedDict(zip(names.split(), layers, strict=True)))


def trained(network: nn.Module, starts: tuple[int, ...]) -> dict[str, Any]:
    """The summary of two steps."""
    optimizer, policy = torch.optim.Adam(network.parameters()), MemoryPolicy(technique=Technique(starts))
    meter = LedgerMeter(network, optimizer)
    batch = Batch(torch.rand(1, 1, 8, 8, 8), torch.zeros(1, 8, 8, 8, dtype=torch.int16))
    for _ in range(STEPS_FOR_PEAK):
        train_step(network, SegmentationLoss(LOSSES["ce"]), optimizer, policy.scaler(), policy, [batch], meter.mark)
    return meter.summary()


@pytest.mark.parametrize(
    ("kind", "starts", "modules"),
    [
        (plain, (), {"0", "4", "loss"}),
        (plain, (0, 2), {"0", "4", "loss"}),
        (Foreign, (), {"encoder.0", "head", "(forward)", "loss"}),
    ],
)
def test_a_network_that_is_not_a_u_has_layers_and_no_levels(
    kind: Callable[[], nn.Module], starts: tuple[int, ...], modules: set[str]
) -> None:
    entry = trained(kind(), starts)
    (row,) = entry["levels"]
    assert row["level"] == "other" and row["bytes"] == entry["peak_bytes"]
    levels = {row["module"]: row["level"] for row in entry["layers"]}
    assert modules <= set(levels) and set(levels.values()) == {None}
    assert entry["moment"]["operation"] in tables.moment(entry)
    for table in (tables.levels(entry), tables.layers(entry)):
        assert table.rows and all(len(row) == len(table.columns) for row in table.rows)
    said = sentence(tables.peak_location(entry), entry["peak_bytes"])
    assert re.fullmatch(r"(Most|The largest part) of the peak is [a-z ]+ \(\d+\.\d%\)\.", said)


def test_a_foreign_network_with_the_names_of_a_u_has_its_levels() -> None:
    entry = trained(plain("inc down1 act up1 outc"), ())
    levels = {row["module"]: row["level"] for row in entry["layers"]}
    assert (levels["inc"], levels["outc"], levels["down1"], levels["act"]) == (0, 0, 1, None)
    assert entry["levels"][0]["level"] == 0


def test_tables_have_a_cell_for_each_heading() -> None:
    entry = forum().entry
    made = [tables.phases(entry), tables.categories(entry), tables.levels(entry), tables.layers(entry)]
    made.append(tables.state(entry, forum().parameters))
    for table in made:
        assert table.rows and all(len(row) == len(table.columns) for row in table.rows)
    assert [row[0] for row in made[0].rows] == ["data", "forward", "loss", "backward", "optimizer"]
    bare = {key: entry[key] for key in ("phases", "peak_bytes")}
    assert len(tables.phases(bare).columns) == 3 and not tables.levels(bare).rows, "as a CUDA run without a ledger"
