"""Scratch that convolution kernels take inside one operation, which no ledger sees: measured, and else bounded.

A table holds, per convolution call, how many bytes the allocator gave out during it; one file per machine and library
versions. Measured: scratch depends on the number of threads (each keeps its own weight gradient, and with one thread
1x1 convolutions use another kernel), so that is part of a file's name.

Error class: table. With a complete table the CPU's peak is exact but for the random state that checkpointing keeps,
5056 bytes for each checkpointed segment, which belongs to no convolution.
"""

import json
import os
import platform
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from unet3d import half_precision
from unet3d.errors import UserError
from unet3d.memory.bounds import arguments, call, most
from unet3d.memory.ledger import Ledger, Site, levels
from unet3d.progress import track

LARGEST = 2**50  # bytes; more is no measurement


class Transient(NamedTuple):
    """Most bytes that the allocator gave out during a call, outputs included, above what was there before it."""

    bytes: int
    first_bytes: int  # in the first call: on CUDA with the trials of kernels, on the CPU the same


Table = dict[str, Transient]  # by `key`


class Bracket(NamedTuple):
    """Peak bytes with kernels' scratch lie within; counts are of distinct calls, in the table or not."""

    low: int
    high: int
    known: int
    missing: int


def key(site: Site) -> str:
    """What decides a kernel on one machine: the operation, shapes, strides, types and options."""
    return json.dumps([site.operation, site.arguments], separators=(",", ":"))


def bracket(ledger: Ledger, table: Table) -> Bracket:
    """The ledger's peak, or more where scratch comes on top of what is alive as a convolution begins.

    A call that the table lacks counts with its outputs alone in `low`, with `most` in `high`.
    """
    alive = levels(ledger)
    low = high = max(alive)  # outputs are in the ledger already
    calls = {key(site): site for site in ledger.sites}
    bounds = {name: most(site) for name, site in calls.items() if name not in table}
    for site in ledger.sites:
        name, before = key(site), alive[site.event]
        if name in table:
            low = max(low, before + table[name].bytes)
        high = max(high, before + (bounds[name] if name in bounds else table[name].bytes))
    return Bracket(low, high, known=len(calls) - len(bounds), missing=len(bounds))


def probe(sites: Iterable[Site], device: torch.device) -> Table:
    """The machine's table, with what it lacked of these calls measured and written."""
    path = place(device)
    table = read(path)
    missing = {name: site for site in sites if (name := key(site)) not in table}
    if missing:
        calls = track(missing.items(), "measuring convolutions", len(missing))
        table |= {name: measure(site, device) for name, site in calls}
        write(path, table)
    return table


def measure(site: Site, device: torch.device) -> Transient:
    """Two calls on tensors of a small constant."""
    once = partial(call, site, arguments(site, device))
    peak = partial(_cuda_peak, device) if device.type == "cuda" else _cpu_peak
    with half_precision.convolutions():
        first = peak(once)
        return Transient(peak(once), first)


def _cpu_peak(once: Callable[[], Any]) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read at the first profile; else two lines a call on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = once()
    del result
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    alive = peak = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        alive += event["args"]["Bytes"]
        peak = max(peak, alive)
    return peak


def _cuda_peak(device: torch.device, once: Callable[[], Any]) -> int:
    """Of bytes requested, as the ledger counts them; `max_memory_allocated` would add the allocator's rounding."""
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats(device)
    result = once()
    peak = int(torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before)
    del result
    return peak


def place(device: torch.device) -> Path:
    """The table's file: `kernels-<machine, versions, settings>.json` in the user's cache."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    root = root if root.is_absolute() else Path.home() / ".cache"
    kind = " ".join(_cuda_kind(device) if device.type == "cuda" else _cpu_kind())
    return root / "unet3d" / f"kernels-{re.sub('[^a-z0-9.]+', '-', kind.lower()).strip('-')}.json"


def _cpu_kind() -> list[str]:
    """Virtual machines hide a CPU's name, so its family and model, which decide its instructions, are added."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    facts = [re.search(rf"^{name}\s*: (.+)$", text, re.MULTILINE) for name in ("model name", "cpu family", "model")]
    machine = [found[1] for found in facts if found] or [platform.processor() or platform.machine()]
    version = re.search(r"MKL-DNN v([\d.]+)", torch.__config__.show())
    onednn = f"onednn {version[1]}" if version and torch._C._get_mkldnn_enabled() else "no onednn"
    isa = " ".join([torch.backends.cpu.get_cpu_capability(), os.environ.get("ONEDNN_MAX_CPU_ISA", "")])
    slabs = f"slabs {half_precision.SLAB_BYTES}"  # of half precision that is computed in float32
    return [*machine, isa, f"torch {torch.__version__}", onednn, slabs, f"threads {torch.get_num_threads()}"]


def _cuda_kind(device: torch.device) -> list[str]:
    cudnn = torch.backends.cudnn
    version = f"cudnn {cudnn.version()}" if cudnn.enabled else "no cudnn"
    switches = {"benchmark": cudnn.benchmark, "deterministic": cudnn.deterministic, "tf32": cudnn.allow_tf32}
    chosen = [name for name, is_on in switches.items() if is_on]
    return [torch.cuda.get_device_name(device), f"torch {torch.__version__}", version, *chosen]


def read(path: Path) -> Table:
    """A table's file; empty if there is none."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(entries, dict):
            raise ValueError("not an object")
        return {name: _checked(number, entry) for number, (name, entry) in enumerate(entries.items(), 1)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a table of kernels' memory ({error}). Delete it and probe again.") from None


def _checked(number: int, entry: Any) -> Transient:
    if not isinstance(entry, list) or len(entry) != 2 or any(type(size) is not int for size in entry):
        raise ValueError(f"entry {number} is not two whole numbers")
    if not all(0 <= size <= LARGEST for size in entry):
        raise ValueError(f"entry {number} is not within 0 to 2^50 bytes")
    return Transient(*entry)


def write(path: Path, table: Table) -> None:
    """Whole or not at all, also when two processes write at once."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(table, indent=0), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error}). Set XDG_CACHE_HOME to a folder that can.") from None
