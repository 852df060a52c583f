"""A snapshot says what the ledger says, and the programs that it is for can read it."""

import pickle
import pickletools
from itertools import accumulate, groupby, pairwise
from pathlib import Path

import pytest
import torch
from promises import promise
from torch.cuda import _memory_viz

from unet3d.config import compose
from unet3d.memory import breakdown
from unet3d.memory.ledger import CATEGORIES, Ledger, most_held
from unet3d.memory.meter import MEASURED_STEPS
from unet3d.memory.prediction import MemoryEstimate

VIEWER_KNOWS = {
    *("PROTO", "FRAME", "MEMOIZE", "MARK", "STOP", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE"),
    *("EMPTY_DICT", "EMPTY_LIST", "SETITEM", "SETITEMS", "APPEND", "APPENDS", "SHORT_BINUNICODE", "BINUNICODE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}


def simulated(*overrides: str) -> Ledger:
    config = compose.compose(list(overrides))
    config.model.in_channels, config.model.classes = config.model.in_channels or 1, config.model.classes or 4
    return MemoryEstimate(config, config.model).ledger


@pytest.fixture(scope="module")
def small() -> Ledger:
    return simulated("model=unet_tiny", "data.patch=[16,16,16]", "amp=true", "ckpt=2")


@pytest.fixture(scope="module")
def forum() -> Ledger:
    """A thread's network: discuss.pytorch.org/t/133116. Its sizes do not fit in 32 bits."""
    return simulated("model=forum_mid", "data.patch=[320,150,26]", "batch=2", "amp=true")


def written(ledger: Ledger, folder: Path) -> dict:
    breakdown.write_snapshot(ledger, folder / "snapshot.pickle")
    return pickle.loads((folder / "snapshot.pickle").read_bytes())


@promise("What scripts rely on", "memory/snapshot.pickle ...")
@pytest.mark.slow
def test_the_viewer_can_unpickle_a_snapshot(forum: Ledger, tmp_path: Path) -> None:
    breakdown.write_snapshot(forum, tmp_path / "snapshot.pickle")
    data = (tmp_path / "snapshot.pickle").read_bytes()
    assert data[:2] == b"\x80\x04"
    names = {opcode.name for opcode, _, _ in pickletools.genops(data)}
    assert names <= VIEWER_KNOWS
    assert "LONG1" in names  # sizes beyond 2 GiB are there, and small enough for a JavaScript number
    assert pickle.loads(data)["segments"][0]["total_size"] < 2**53


@pytest.mark.slow
def test_events_of_a_snapshot_are_the_ledgers(small: Ledger, tmp_path: Path) -> None:
    [trace] = written(small, tmp_path)["device_traces"]
    signs = {"alloc": 1, "free_completed": -1}
    changes = [signs[event["action"]] * event["size"] for event in trace if event["action"] in signs]
    assert [0, *accumulate(changes)] == small.alive_bytes()
    for event, following in pairwise(trace):
        if event["action"] == "free_requested":
            assert following == event | {"action": "free_completed"}
    assert all(event["frames"] for event in trace)
    assert {event["category"] for event in trace if "category" in event} == {*CATEGORIES, "unknown"}


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
    assert alive == {b["address"]: b["size"] for b in segment["blocks"] if b["state"] == "active_allocated"}
    assert most_held(small.events) <= segment["total_size"] < sum(s.bytes for s in small.storages) / 10


def test_blocks_of_a_snapshot_fill_the_segment(small: Ledger, tmp_path: Path) -> None:
    [segment] = written(small, tmp_path)["segments"]
    address = 0
    for block in segment["blocks"]:
        assert block["address"] == address
        address += block["size"]
    assert address == segment["total_size"]
    assert segment["active_size"] == segment["allocated_size"] == small.alive_bytes()[-1] > 0


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


def test_frames_say_what_made_a_storage(small: Ledger) -> None:
    [[_, *trace]] = breakdown.viewer_snapshot(small)["device_traces"]
    stacks = [event["frames"] for event in trace]
    found = {(made["name"], made["filename"].split(",")[0].split()[-1], step["name"]) for made, step in stacks}
    assert ("convolution", "inc.conv2", "forward") in found
    assert ("convolution", "inc.conv2", "backward") in found, "recomputed"
    assert ("convolution_backward", "up1.conv2", "backward") in found
    steps = [event["frames"][1]["line"] for event in trace if event["action"] == "alloc"]
    assert [step for step, _ in groupby(steps)] == list(range(1, MEASURED_STEPS + 1))


def test_an_empty_ledger_can_be_written(tmp_path: Path) -> None:
    ledger = Ledger()
    assert written(ledger, tmp_path) == {"segments": [], "device_traces": [[]]}
