"""Each operation is attributed to its module; the breakdown of a peak adds up; a snapshot says what the ledger says."""

import pickle
import pickletools
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from promises import promise
from torch import Tensor, nn
from torch.cuda import _memory_viz

from unet3d.base.types import Batch
from unet3d.config import compose
from unet3d.memory import breakdown, tables
from unet3d.memory.breakdown import Levels, peak_moment
from unet3d.memory.ledger import CATEGORIES, Ledger, Storage, most_held
from unet3d.memory.meter import STEPS_FOR_PEAK, LedgerMeter
from unet3d.memory.prediction import MemoryEstimate
from unet3d.memory.tables import sentence
from unet3d.recomputing.program import Technique
from unet3d.training.losses import LOSSES, SegmentationLoss
from unet3d.training.policy import MemoryPolicy
from unet3d.training.step import train_step

# What the pickle reader of PyTorch's viewer knows.
VIEWER_KNOWS = """
PROTO FRAME MEMOIZE MARK STOP BINGET LONG_BINGET NONE NEWTRUE NEWFALSE EMPTY_DICT EMPTY_LIST SETITEM SETITEMS APPEND
APPENDS SHORT_BINUNICODE BINUNICODE BININT BININT1 BININT2 LONG1 BINFLOAT EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
"""


@cache
def estimate(*overrides: str) -> MemoryEstimate:
    config = compose.compose(["model=unet_tiny", "data.patch=[16,16,16]", *overrides])
    config.model.in_channels, config.model.classes = config.model.in_channels or 1, config.model.classes or 3
    return MemoryEstimate(config, config.model, steps=STEPS_FOR_PEAK)


def forum() -> MemoryEstimate:
    """A thread's network: discuss.pytorch.org/t/133116. Its sizes do not fit in 32 bits."""
    return estimate("model=forum_mid", "data.patch=[320,150,26]", "batch=2", "amp=true")


def made_by(ledger: Ledger, operation: str) -> list[Storage]:
    """Return what an operation has made, in order."""
    return [storage for storage in ledger.storages if storage.operation == f"aten.{operation}.default"]


def convolutions(subject: MemoryEstimate) -> list[str]:
    kinds = (nn.Conv3d, nn.ConvTranspose3d)
    return [path for path, module in subject.meter.model.named_modules() if isinstance(module, kinds)]


@pytest.mark.parametrize("ckpt", [0, 2])
def test_each_convolution_runs_forward_and_backward_in_its_own_module(ckpt: int) -> None:
    subject = estimate(f"ckpt={ckpt}")
    paths = convolutions(subject)
    made = made_by(subject.ledger, "convolution")
    assert [s.scope.module for s in made if not s.scope.is_recomputed] == paths * STEPS_FOR_PEAK
    gradients = made_by(subject.ledger, "convolution_backward")
    assert [path for path, _ in groupby(s.scope.module for s in gradients)] == paths[::-1] * STEPS_FOR_PEAK
    assert not any(s.scope.is_recomputed for s in gradients)
    again = [s.scope.module for s in made if s.scope.is_recomputed]
    assert again == [path for path in paths if path in again] * STEPS_FOR_PEAK, "in the order of the first pass"
    assert bool(again) == bool(ckpt) and "outc.conv" not in again, "the last segment is kept"


def test_in_tiles_each_operation_belongs_to_the_layer_that_is_made() -> None:
    """A map's layer, whatever its rows are made from again; in backward the layer whose gradient is used up.

    A gradient that stays is its weight's, also of an upsampling that another layer's tiles run through.
    """
    subject = estimate("recompute=tiles", "model.features=[4,8]")
    layers = {path for path in convolutions(subject) if not path.endswith(".up")}
    made = made_by(subject.ledger, "convolution")
    forward = [s.scope for s in made if not s.scope.is_recomputed]
    assert {scope.module for scope in forward} == layers and all(scope.is_in_tiles for scope in forward)
    assert {s.scope.module for s in made_by(subject.ledger, "convolution_backward")} == {*convolutions(subject)}
    assert any(s.scope.is_recomputed for s in made)


def test_an_operation_outside_of_modules_belongs_to_its_phase_and_no_hook_stays() -> None:
    """Also after recomputations, which checkpointing ends with an exception in the middle of modules."""
    subject = estimate("ckpt=2")
    phases = {s.scope.module for s in subject.ledger.storages}
    assert {"loss", "step"} <= phases
    assert [s.scope.module for s in made_by(subject.ledger, "cat")][:2] == ["up1", "up2"]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in subject.meter.model.modules())


@pytest.mark.parametrize("overrides", [("ckpt=2",), ("amp=true", "accumulate=2")])
def test_every_breakdown_adds_up_to_the_peak(overrides: tuple[str, ...]) -> None:
    entry = estimate(*overrides).entry
    peak = entry["peak_bytes"]
    assert sum(entry["categories"].values()) == peak
    for rows in (entry["levels"], entry["layers"]):
        assert sum(row["bytes"] for row in rows) == peak
        assert all(sum(row[kind] for kind in CATEGORIES) == row["bytes"] for row in rows)
    for phase, peaks in entry["phases"].items():
        assert sum(entry["phase_categories"][phase].values()) == peaks["steady"], phase


def test_what_valid_convolutions_make_belongs_to_their_own_level() -> None:
    """The decoder's maps of a level are smaller than the encoder's, some as small as those of the level below."""
    ledger = estimate("model=cicek2016", "model.features=[4,4,4,4]", "data.patch=[108,108,108]").ledger
    levels, made = Levels(ledger), made_by(ledger, "convolution")
    assert {s.shape[2] for s in made if levels.of_storage(s) == 0} >= {106, 24, 20}
    assert all(levels.of_storage(s) == levels.of_module(s.scope.module) is not None for s in made)


def test_weights_gradients_and_optimizer_state_are_counted_to_the_byte() -> None:
    subject = estimate("model.norm=batch", "optim=adam")
    weights = sum(p.nbytes for p in subject.meter.model.parameters())
    buffers = sum(b.nbytes for b in subject.meter.model.buffers())
    counters = 4 * len(list(subject.meter.model.parameters()))  # Adam's step counts
    optimizer = 2 * weights + counters
    assert subject.entry["state"] == {"params": weights + buffers, "grads": weights, "optimizer": optimizer}
    more = {phase: end["steady"] - end["first"] for phase, end in subject.entry["phase_ends"].items()}
    assert more == dict.fromkeys(("data", "forward", "loss", "backward"), optimizer) | {"step": 0}, "first made it"


def test_recomputed_maps_are_activations_and_those_of_their_layer() -> None:
    ledger = estimate("ckpt=2").ledger
    recomputed = [s for s in ledger.storages if s.scope.is_recomputed]
    assert {ledger.category(s) for s in recomputed} == {"activations"}
    first = next(s for s in recomputed if "conv1" in s.scope.module)
    found = breakdown.describe(ledger, first.born + 1)
    assert found["words"] == "recomputation of inc.conv1" and found["is_recomputed"]


def test_where_weights_dominate_the_peak_is_at_the_deep_level() -> None:
    small = estimate("data.patch=[8,8,8]", "batch=1", "model.features=[8,8,256]")
    location = tables.peak_location(small.entry)
    assert location["level"] == 2 and location["mostly"] in ("optimizer", "params")
    said = sentence(location, small.step.tensors)
    assert "level 2" in said and tables.NAMES[location["mostly"]] in said


@pytest.mark.slow
def test_a_map_is_at_its_resolution_whatever_module_made_it() -> None:
    """Under AMP on the CPU, pooling keeps a float32 copy of the finer map; in backward it makes the finer gradient."""
    ledger = forum().ledger
    level = Levels(ledger).of_storage
    copies = [s for s in ledger.storages if s.scope.module == "down1.pool" and s.shape[2:] == (320, 150, 26)]
    assert copies and {level(s) for s in copies} == {0}
    assert {level(s) for s in ledger.storages if s.scope.module == "backward"} == {None}
    casts = [s for s in ledger.storages if s.shape == (256, 256, 3, 3, 3) and s.role is None]
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
    subject = estimate("ckpt=0")
    start, rows = breakdown.timeline_rows(subject.ledger)
    alive = accumulate((row.change_bytes for row in rows), initial=sum(start.values()))
    assert max(alive) == subject.step.tensors
    assert [row.phase for row in rows] == sorted((row.phase for row in rows), key=list(subject.entry["phases"]).index)


def test_held_at_the_peak_is_everything_alive() -> None:
    subject = estimate("ckpt=0")
    moment = peak_moment(subject.ledger)
    groups = breakdown.held(subject.ledger, moment)
    assert sum(group.bytes for group in groups) == subject.step.tensors
    assert sum(group.number for group in groups) == len(subject.ledger.alive_at(moment))


class Foreign(nn.Module):
    """A user's network that is not a Sequential: parameters and operations of its own, and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU()), nn.Conv3d(5, 3, 1)
        self.scale = nn.Parameter(torch.ones(4, 1, 1, 1))

    def forward(self, image: Tensor) -> Tensor:
        made: Tensor = self.head(torch.cat([image, self.encoder(image) * self.scale], dim=1))
        return made


def plain(names: str = "0 1 2") -> nn.Sequential:
    layers = (nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 3, 1))
    return nn.Sequential(OrderedDict(zip(names.split(), layers, strict=True)))


def trained(network: nn.Module, starts: tuple[int, ...] = ()) -> dict[str, Any]:
    """The summary of two steps."""
    optimizer, policy = torch.optim.Adam(network.parameters()), MemoryPolicy(technique=Technique(starts))
    meter = LedgerMeter(network, optimizer)
    batch = Batch(torch.rand(1, 1, 8, 8, 8), torch.zeros(1, 8, 8, 8, dtype=torch.int16))
    for _ in range(STEPS_FOR_PEAK):
        train_step(network, SegmentationLoss(LOSSES["ce"]), optimizer, policy.scaler(), policy, [batch], meter.mark)
    return meter.summary()


@pytest.mark.parametrize(
    ("kind", "starts", "modules"),
    [(plain, (0, 2), {"0", "2", "loss"}), (Foreign, (), {"encoder.0", "head", "(forward)", "loss"})],
)
def test_a_network_that_is_not_a_u_has_layers_and_no_levels(
    kind: Callable[[], nn.Module], starts: tuple[int, ...], modules: set[str]
) -> None:
    entry = trained(kind(), starts)
    (row,) = entry["levels"]
    assert row["level"] == "other" and row["bytes"] == entry["peak_bytes"]
    levels = {row["module"]: row["level"] for row in entry["layers"]}
    assert modules <= set(levels) and set(levels.values()) == {None}
    for table in (tables.levels(entry), tables.layers(entry)):
        assert table.rows and all(len(row) == len(table.columns) for row in table.rows)
    said = sentence(tables.peak_location(entry), entry["peak_bytes"])
    assert re.fullmatch(r"(Most|The largest part) of the peak is [a-z ]+ \(\d+\.\d%\)\.", said)


def test_a_foreign_network_with_the_names_of_a_u_has_its_levels() -> None:
    levels = {row["module"]: row["level"] for row in trained(plain("inc act outc"))["layers"]}
    assert (levels["inc"], levels["outc"], levels["act"]) == (0, 0, None)


@pytest.fixture(scope="module")
def small() -> Ledger:
    return estimate("amp=true", "ckpt=2").ledger


def written(ledger: Ledger, folder: Path) -> dict[str, Any]:
    breakdown.write_snapshot(ledger, folder / "snapshot.pickle")
    found: dict[str, Any] = pickle.loads((folder / "snapshot.pickle").read_bytes())
    return found


@promise("What scripts rely on", "memory/snapshot.pickle ...")
@pytest.mark.slow
def test_the_viewer_can_unpickle_a_snapshot(tmp_path: Path) -> None:
    found = written(forum().ledger, tmp_path)
    data = (tmp_path / "snapshot.pickle").read_bytes()
    assert data[:2] == b"\x80\x04"
    names = {opcode.name for opcode, _, _ in pickletools.genops(data)}
    assert names <= {*VIEWER_KNOWS.split()}
    assert "LONG1" in names  # sizes beyond 2 GiB are there, and small enough for a JavaScript number
    assert found["segments"][0]["total_size"] < 2**53


def test_addresses_of_a_snapshot_are_reused_and_never_shared(small: Ledger, tmp_path: Path) -> None:
    found = written(small, tmp_path)
    [segment], [[opening, *trace]] = found["segments"], found["device_traces"]
    assert (opening["action"], opening["addr"], opening["size"]) == ("segment_alloc", 0, segment["total_size"])
    alive: dict[int, int] = {}
    for event in trace:
        start, end = event["addr"], event["addr"] + event["size"]
        if event["action"] == "alloc":
            assert 0 <= start < end <= segment["total_size"]
            assert all(end <= other or other + size <= start for other, size in alive.items())
            alive[start] = event["size"]
        elif event["action"] == "free_completed":
            assert alive.pop(start) == event["size"]
    blocks = segment["blocks"]
    assert alive == {b["address"]: b["size"] for b in blocks if b["state"] == "active_allocated"}
    assert [b["address"] for b in blocks] == [*accumulate((b["size"] for b in blocks[:-1]), initial=0)], "no gap"
    assert sum(b["size"] for b in blocks) == segment["total_size"]
    assert segment["active_size"] == segment["allocated_size"] == small.alive_bytes()[-1] > 0
    assert most_held(small.events) <= segment["total_size"] < sum(s.bytes for s in small.storages) / 5
    assert {event["category"] for event in trace if "category" in event} <= {*CATEGORIES}


def test_the_lowest_gap_that_fits_is_taken() -> None:
    ledger = Ledger()
    with ledger:
        first, second, third = torch.empty(100), torch.empty(50), torch.empty(10)
        del first
        large, exact = torch.empty(101), torch.empty(100)
        del second
        inside = torch.empty(20)
    [[_, *trace]] = breakdown.viewer_snapshot(ledger)["device_traces"]
    assert [event["addr"] for event in trace if event["action"] == "alloc"] == [0, 400, 600, 640, 0, 400]
    assert third.numel() + large.numel() + exact.numel() + inside.numel()


def test_a_storage_that_is_not_counted_takes_no_place(tmp_path: Path) -> None:
    """As the steps that Adam counts on the host, in the prediction for a GPU."""
    ledger = Ledger()
    assert written(ledger, tmp_path) == {"segments": [], "device_traces": [[]]}
    with ledger:
        first, other, second = torch.empty(100), torch.empty(10), torch.empty(50)
    ledger.uncount(other)
    del other
    assert ledger.alive_bytes()[-1] == first.nbytes + second.nbytes
    found = written(ledger, tmp_path)
    (segment,) = found["segments"]
    assert [block["size"] for block in segment["blocks"]] == [400, 200]
    assert [entry["size"] for entry in found["device_traces"][0] if entry["action"] == "alloc"] == [400, 200]


@promise("What scripts rely on", "memory/snapshot.pickle", "PyTorch's memory viewer reads it")
def test_torchs_own_reader_takes_a_snapshot(small: Ledger, tmp_path: Path) -> None:
    found = written(small, tmp_path)
    lines = _memory_viz.trace(found).splitlines()
    assert f"{1 + sum(1 if change > 0 else 2 for _, change in small.events)} entries" in lines
    alive, total = (str(_memory_viz.Bytes(n)) for n in (small.alive_bytes()[-1], found["segments"][0]["total_size"]))
    summary = _memory_viz.segsum(found).splitlines()
    assert {f"total_reserved: {total}", f"total_allocated: {alive}"} <= set(summary)
    assert "add_local_files" in _memory_viz.trace_plot(found)
    stacks = _memory_viz.memory(found, str).splitlines()
    (weights,) = (line for line in stacks if "inc.conv1" in line and "(8, 1, 3, 3, 3):0:adopted" in line)
    assert "step:1:before;" in weights and "params" in weights
