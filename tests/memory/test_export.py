"""Files from a ledger: each says what the ledger says, and the programs that they are for can read them."""

import csv
import pickle
import pickletools
import re
from collections import Counter
from itertools import accumulate, groupby, pairwise
from pathlib import Path

import pytest
import torch
from torch.cuda import _memory_viz

from unet3d.config import compose
from unet3d.memory import analysis, export
from unet3d.memory.fake_tensors import fake_mode
from unet3d.memory.ledger import CATEGORIES, Ledger
from unet3d.memory.meter import MEASURED_STEPS
from unet3d.memory.technique import predicted
from unet3d.memory.tracker import ModuleEvent
from unet3d.report import memory_plots

VIEWER_KNOWS = {
    *("PROTO", "FRAME", "MEMOIZE", "MARK", "STOP", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE"),
    *("EMPTY_DICT", "EMPTY_LIST", "SETITEM", "SETITEMS", "APPEND", "APPENDS", "SHORT_BINUNICODE", "BINUNICODE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}


def simulated(*overrides: str) -> Ledger:
    config = compose.compose(list(overrides))
    config.model.in_channels, config.model.classes = config.model.in_channels or 1, config.model.classes or 4
    return predicted(config, config.model).ledger


@pytest.fixture(scope="module")
def small() -> Ledger:
    return simulated("model=unet_tiny", "data.patch=[16,16,16]", "amp=true", "ckpt=2")


@pytest.fixture(scope="module")
def forum() -> Ledger:
    """A thread's network: discuss.pytorch.org/t/133116. Its sizes do not fit in 32 bits."""
    return simulated("model=forum_mid", "data.patch=[320,150,26]", "batch=2", "amp=true")


def written(ledger: Ledger, folder: Path) -> dict:
    export.write_snapshot(ledger, folder / "snapshot.pickle")
    return pickle.loads((folder / "snapshot.pickle").read_bytes())


@pytest.mark.slow
def test_the_viewer_can_unpickle_a_snapshot(forum: Ledger, tmp_path: Path) -> None:
    export.write_snapshot(forum, tmp_path / "snapshot.pickle")
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
    assert small.peak_bytes() <= segment["total_size"] < sum(s.bytes for s in small.storages) / 10


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
    assert export.first_fit(ledger) == [0, 400, 600, 640, 0, 400]
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
    [[_, *trace]] = export.viewer_snapshot(small)["device_traces"]
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
    export.write_changes(ledger, tmp_path / "changes.txt")
    assert (tmp_path / "changes.txt").read_text() == ""
    assert export.trace(ledger, "none", 0) == []


def test_a_trace_of_the_first_convolution_grows_by_output_and_half_copies(forum: Ledger) -> None:
    pre, fwd, *_ = export.trace(forum, "mid", 0)
    assert list(pre) == list(export.TRACE_COLUMNS)
    assert (pre["layer_type"], pre["exp"], pre["hook_type"], fwd["hook_type"]) == ("Conv3d", "mid", "pre", "fwd")
    voxels, channels, half = 2 * 320 * 150 * 26, 64, 2  # bytes of a bfloat16
    output = channels * voxels * half
    assert output == 319_488_000
    # autocast makes a half-precision copy of the image, the kernel (27 weights a channel) and the bias
    assert fwd["mem_all"] - pre["mem_all"] == output + half * (voxels + 27 * channels + channels)


def test_a_trace_goes_through_each_layer_in_order(forum: Ledger) -> None:
    rows = export.trace(forum, "mid", 0)
    assert [row["call_idx"] for row in rows] == list(range(len(rows)))
    first: dict[int, dict[str, int]] = {}
    for row in rows:
        first.setdefault(row["layer_idx"], {}).setdefault(row["hook_type"], row["call_idx"])
    assert list(first) == list(range(len(first)))
    assert len(first) == len({event.module for _, event in forum.module_events})
    assert all(calls["pre"] < calls["fwd"] < calls["bwd"] for calls in first.values())


def test_each_step_has_its_own_trace(small: Ledger) -> None:
    traces = [export.trace(small, "x", step) for step in range(MEASURED_STEPS + 1)]
    assert sum(map(len, traces)) == len(small.module_events)
    assert traces[0] and traces[1] == traces[2] != traces[0]
    assert traces[MEASURED_STEPS] == []


def test_a_module_entered_before_a_steps_first_event_belongs_to_that_step() -> None:
    """As where a step uses the batch of the step before."""
    ledger = Ledger()
    with ledger:
        ledger.count([torch.empty(1)])
        ledger.mark("end")
        ledger.record(ModuleEvent("conv", "Conv3d", "pre"))
    assert export.trace(ledger, "x", 0) == []
    assert len(export.trace(ledger, "x", 1)) == 1


def test_a_trace_file_leaves_the_cache_empty(small: Ledger, tmp_path: Path) -> None:
    rows = export.trace(small, "first, try", 0)
    export.write_trace(rows, tmp_path / "trace.csv")
    header, line, *_ = (tmp_path / "trace.csv").read_text().splitlines()
    assert header == "layer_idx,call_idx,layer_type,exp,hook_type,mem_all,mem_cached"
    assert line == f'0,0,Conv3d,"first, try",pre,{rows[0]["mem_all"]},'


def test_a_timeline_file_holds_every_event_of_the_last_step(small: Ledger, tmp_path: Path) -> None:
    memory_plots.write_ledger_files(small, "small", tmp_path)
    with (tmp_path / "memory" / "timeline.csv").open(newline="") as file:
        header, *lines = csv.reader(file)
    assert header == list(analysis.TimelineRow._fields)
    assert lines == [[str(value) for value in row] for row in analysis.timeline_rows(small)[1]]
    assert lines


def test_changes_group_what_is_alike(tmp_path: Path) -> None:
    ledger = Ledger()
    with fake_mode(), ledger:
        ledger.mark("forward")
        weights = [torch.empty(512, 512, 3, 3) for _ in range(7)]
        for weight in weights:
            ledger.claim(weight, "params", "")
        others = [torch.empty(2**18 * n, dtype=torch.float32) for n in range(1, 15)]
        ledger.mark("backward")
        del weights[:2], weight, others
        ledger.mark("end")
    export.write_changes(ledger, tmp_path / "changes.txt")
    lines = (tmp_path / "changes.txt").read_text().splitlines()
    assert re.fullmatch(r"forward: 21 .*\b0\.0 MiB.* 168\.0 MiB", lines[0])
    assert lines[1:3] == [
        "+ |   7 * (512, 512, 3, 3) float32 | 63.0 MiB | params",
        "+ |   1 * (3670016,) float32       | 14.0 MiB | activations",
    ]
    assert re.fullmatch(r"\+ .*\b3\b.* 6\.0 MiB", lines[13]), "the rest"
    (backward,) = (number for number, line in enumerate(lines) if line.startswith("backward: 16 "))
    assert re.fullmatch(r".* 168\.0 MiB.* 45\.0 MiB", lines[backward])
    assert lines[backward - 1] == ""
    assert lines[backward + 1] == "- |   2 * (512, 512, 3, 3) float32 | 18.0 MiB | params"
    assert len(ledger.alive_at(len(ledger.events))) == len(weights) == 5


def test_changes_cover_the_last_step_only(small: Ledger, tmp_path: Path) -> None:
    export.write_changes(small, tmp_path / "changes.txt")
    lines = (tmp_path / "changes.txt").read_text().splitlines()
    headers = [line for line in lines if line and not line.startswith(("+", "-"))]
    counts = Counter(row.phase for row in analysis.timeline_rows(small)[1])
    assert [line.split()[:2] for line in headers] == [[f"{phase}:", str(n)] for phase, n in counts.items()]
    spans = [re.findall(r"[\d.]+ MiB", line) for line in headers]
    assert all(end == start for (_, end), (start, _) in pairwise(spans))
