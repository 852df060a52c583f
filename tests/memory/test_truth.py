"""The predicted ledger against the CPU allocator, for each option that a user may set: 16, 32 channels, 32^3, batch 2.

The profiler's `[memory]` events are the CPU allocator's own record of every allocation and release. Unlike a ledger it
holds three things that are no operation's result:

- convolution scratch, above all inputs, gradients and weights in oneDNN's blocked layouts;
- one spare map in the backward of batch and instance norm, whose kernel allocates its result twice and drops the first;
- the random state that checkpointing keeps, made where no dispatch mode sees it.

The spare map never sets the allocator's peak, but with the scratch dropped it can stand 256 bytes above the ledger's.
With all three dropped, every row below is exact. How large the scratch is depends on the CPU, so no test says; without
oneDNN a convolution unfolds its input into 27 maps, and then every peak lies in a convolution.

`test_predict.py` holds that a prediction is the ledger of the real run; here it stands for both.
"""

import json
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from unet3d import build, compose
from unet3d.config import Config
from unet3d.memory.segments import choose_segments
from unet3d.memory.simulate import simulate
from unet3d.train import optim
from unet3d.train.step import train_step
from unet3d.types import Batch

STEPS = 2  # the optimizer's state appears in the first
MAP = 4 * 2 * 16 * 32**3  # bytes of one float32 map at full resolution
RNG_STATE = 5056  # bytes
CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")
NORM_BACKWARD = "aten::native_batch_norm_backward"
RANDOM_STATE = "random state"
UNITS, DEEP = ("relu", "leaky_relu", "silu"), "model.features=[16,32,64]"


def config(*overrides: str) -> Config:
    found = compose.compose(["model=unet", "model.features=[16,32]", "data.patch=[32,32,32]", "optim=adam", *overrides])
    found.model.in_channels, found.model.classes = 1, 3
    return found


@cache
def ledger_peak(*overrides: str) -> int:
    found = config(*overrides)
    starts = choose_segments(found, found.model).segment_starts
    return simulate(found, found.model, starts, steps=STEPS).ledger.peak_bytes()


class Change(NamedTuple):
    """An allocation (bytes > 0) or its release."""

    time: float
    bytes: int
    operator: str  # that it happened in, of CONVOLUTIONS and NORM_BACKWARD, else ""
    unseen: str  # what no ledger sees: the operator that held it from birth to release, or RANDOM_STATE; else ""


@cache
def record_of(*overrides: str) -> list[Change]:
    return allocators_record(config(*overrides))


def allocators_record(options: Config) -> list[Change]:
    """What the allocator did while a network was built and trained, in order."""
    size = (options.batch, *options.data.patch)
    starts = choose_segments(options, options.model).segment_starts
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = build.model(options.model, options.seed)
        loss, policy, optimizer = (
            build.loss(options, 3),
            build.policy(options, "cpu", starts),
            optim.optimizer(options.optim, model),
        )
        for _ in range(STEPS):
            batch = Batch(torch.randn(options.batch, 1, *size[1:]), torch.zeros(size, dtype=torch.int16))
            train_step(model, loss, optimizer, policy.scaler(), policy, [batch], clip=options.optim.clip)
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return changes(json.loads(path.read_text())["traceEvents"])


def changes(events: list[dict[str, Any]]) -> list[Change]:
    """Allocations matched with their releases by address; releases of what is older than the record are left out."""
    names = (*CONVOLUTIONS, NORM_BACKWARD)
    spans = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e["ph"] == "X" and e["name"] in names)
    starts = [start for start, _, _ in spans]
    assert all(a[1] <= b[0] for a, b in pairwise(spans))  # one thread, none within another

    def span(time: float) -> int:
        """Which operator call a moment lies in, -1 if in none."""
        index = bisect_right(starts, time) - 1
        return index if index >= 0 and time <= spans[index][1] else -1

    found: list[Change] = []
    births: dict[int, int] = {}  # by address, as indices into `found`
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        time, size, address = event["ts"], event["args"]["Bytes"], event["args"]["Addr"]
        at = span(time)
        change = Change(time, size, spans[at][2] if at >= 0 else "", RANDOM_STATE if abs(size) == RNG_STATE else "")
        if size > 0:
            births[address] = len(found)
        elif (birth := births.pop(address, None)) is None:
            continue
        elif at >= 0 and span(found[birth].time) == at:
            found[birth] = found[birth]._replace(unseen=change.operator)
            change = change._replace(unseen=change.operator)
        found.append(change)
    return found


def peak(record: list[Change], without: Sequence[str] = ()) -> tuple[int, str]:
    """Most bytes alive at once, less the unseen of these kinds, and the operator that it happened in ("": another)."""
    alive = most = 0
    where = ""
    for change in record:
        if change.unseen not in without:
            alive += change.bytes
        if alive > most:
            most, where = alive, change.operator
    return most, where


def random_states(record: list[Change]) -> int:
    return sum(change.bytes == RNG_STATE for change in record)


@pytest.mark.parametrize(
    ("overrides", "segments"),
    [
        (("model.inplace=true",), 0),
        (("model.inplace=true", "model.activation=leaky_relu"), 0),
        (("model.inplace=true", "ckpt=3"), 1),  # at the peak one segment waits for its recomputation
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_where_the_peak_lies_in_no_convolution_the_ledger_has_every_byte(
    overrides: tuple[str, ...], segments: int
) -> None:
    """In place on instance norm's view, autograd clones maps in backward: more than a convolution's scratch.

    Scratch depends on the CPU: with AVX2 alone and checkpointing it takes more than those clones.
    """
    record = record_of(*overrides)
    assert peak(record, without=CONVOLUTIONS) == (ledger_peak(*overrides) + segments * RNG_STATE, "")
    if not segments:
        assert peak(record) == peak(record, without=CONVOLUTIONS)
    assert random_states(record) == STEPS * 2 * segments  # one in forward, one put aside while recomputing


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.activation=leaky_relu",),
        ("model.norm=group",),
        ("model.norm=batch",),
        ("ckpt=3",),
        ("amp=true",),
        ("amp=true", "amp_dtype=fp16"),
        ("amp=true", "ckpt=3"),
    ],
    ids=" ".join,
)
def test_where_it_lies_in_a_convolution_all_that_the_ledger_lacks_is_scratch(overrides: tuple[str, ...]) -> None:
    record = record_of(*overrides)
    seen = ledger_peak(*overrides)
    truth, where = peak(record, without=[RANDOM_STATE])
    assert where in CONVOLUTIONS
    assert truth > seen
    assert peak(record, without=[RANDOM_STATE, NORM_BACKWARD])[0] == truth  # the spare map is not what is lacking
    assert peak(record, without=[RANDOM_STATE, NORM_BACKWARD, *CONVOLUTIONS])[0] == seen


@pytest.mark.parametrize(("norm", "maps"), [("instance", 2), ("batch", 0), ("group", 0)])
def test_in_place_costs_two_maps_after_instance_norm_and_nothing_after_the_others(norm: str, maps: int) -> None:
    """Instance norm returns a view; autograd replays an in-place change of a view on clones of the whole."""
    plain, in_place = (ledger_peak(f"model.norm={norm}", f"model.inplace={on}") for on in ("false", "true"))
    assert in_place == plain + maps * MAP


@pytest.mark.parametrize("norm", ["instance", "batch", "group"])
def test_an_activation_that_keeps_its_input_keeps_a_third_map(norm: str) -> None:
    """ReLU keeps only its result, which the next convolution keeps anyway; four units are at full resolution."""
    relu, leaky, silu = (ledger_peak(f"model.norm={norm}", f"model.activation={a}", DEEP) for a in UNITS)
    assert leaky == silu >= relu + 4 * MAP
    if norm != "instance":
        assert ledger_peak(f"model.norm={norm}", "model.activation=leaky_relu", DEEP, "model.inplace=true") == relu


def test_in_float32_the_norms_need_the_same_but_for_their_statistics() -> None:
    peaks = [ledger_peak(f"model.norm={norm}") for norm in ("instance", "batch", "group")]
    assert max(peaks) - min(peaks) < 16 * 1024
