"""The networks that the field uses: parameters, and the memory of a training step as unet3d predicts it.

    pip install -c constraints.txt -e ".[bench]"
    python benchmarks/field.py --markdown docs/results.md
    python benchmarks/field.py --check

The first line predicts a step of each network of `field_networks.py`, plain and with `unet3d.recompute`, in float32 and
bf16, as on the CPU and as on CUDA: what `python -m unet3d memory --module` predicts. It writes tables between the marks
of a page, and a picture beside it. Nothing as large as a map is made. Each setting has a process and one thread.
`--load` takes the numbers that a file has, and predicts the others; `--save` keeps all of them.

`--check` runs steps of smaller patches, and compares the CPU allocator's own record of them, without an observer, with
what is predicted of them. "Tensors" is the record's peak without scratch, which one operation takes and gives back;
"allocator" is with it. Ends with 1 where a prediction is off by more than 1 % of the tensors, or a row failed.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import explain
import field_page
import torch
from field_networks import ENTRIES, Shape
from steps import RowError, in_own_process
from torch import nn

from unet3d.base.types import mib
from unet3d.memory import any_network
from unet3d.recomputing.module import Recomputed, schedules_of
from unet3d.recomputing.prepare import has_larger_tiles
from unet3d.recomputing.program import by_plan
from unet3d.training.policy import MemoryPolicy

PLANS = ("plain", "lean", "tiles")
PRECISIONS = ("float32", "bf16")
SETTINGS = (("cuda", "bf16"), ("cpu", "float32"), ("cpu", "bf16"), ("cuda", "float32"))
TOLERANCE = 0.01  # of the record's tensors
STEPS = 2  # run by `--check`: the optimizer's state appears in the first
Numbers = dict[str, Any]
Results = dict[str, dict[str, Numbers]]  # title -> "cuda bf16" and others of SETTINGS -> what `predict` returns


def predict(index: int, device: str, precision: str) -> Numbers:
    """Return what is predicted of a network by each plan; prints each peak, and the CPU seconds so far, on stderr."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    entry = ENTRIES[index]
    network = entry.make().train()
    plans: dict[str, Numbers] = {}
    for plan, planned, work in planned_networks(network, entry.shape, device, precision):
        plans[plan] = figures_of(planned, entry.shape, device, precision) | {"work": work}
        figures = f"{mib(plans[plan]['tensors'])} MiB, {time.process_time():.1f} s"
        print(f"{entry.title}, {device}, {precision}, {plan}: {figures}", file=sys.stderr, flush=True)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return {"parameters": parameters, "seconds": time.process_time(), "plans": plans}


def planned_networks(
    network: nn.Module, shape: Shape, device: str, precision: str
) -> Iterator[tuple[str, nn.Module, float]]:
    """Yield each plan, the network that follows it, and its work in forward passes.

    Plans with the same tiles share a search for schedules.
    """
    yield "plain", network, 1.0
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    lean_differs = has_larger_tiles("lean", dtype, device == "cpu")
    recomputed: Recomputed | None = None
    for plan in PLANS[1:]:
        if recomputed is None or lean_differs:
            recomputed = Recomputed(network, plan, device_type=device)
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                program = schedules_of(recomputed).program(torch.empty(shape))
            (key,) = schedules_of(recomputed).programs
        chosen = by_plan(program, plan)
        schedules_of(recomputed).programs = {key: chosen}
        yield plan, recomputed, chosen.schedule.work


def figures_of(network: nn.Module, shape: Shape, device: str, precision: str) -> Numbers:
    """Return the bytes that are predicted of a step with AdamW, by name."""
    explanation = any_network.predict(network, shape, amp=amp_of(precision), device=device)
    assert not explanation.guesses, explanation.guesses
    entry = explanation.entry
    return {
        "tensors": explanation.peak_bytes,
        "allocated": entry.get("allocated_bytes"),
        "reserved": entry.get("reserved_bytes"),
        "workspaces": entry.get("workspace_bytes"),
    }


def amp_of(precision: str) -> bool | str:
    """Return the precision in the words of `unet3d.memory.predict`."""
    return False if precision == "float32" else precision


def check(index: int, precision: str) -> list[Numbers]:
    """Return a row for each plan: bytes predicted of a small step, and those of the allocator's record."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    entry = ENTRIES[index]
    keywords = {"side": entry.side} if entry.title.endswith(" UNETR") else {}
    network = entry.make(**keywords).train()
    policy = MemoryPolicy("cpu", None if precision == "float32" else torch.bfloat16)
    rows = []
    for plan, planned, _ in planned_networks(network, entry.checked_shape, "cpu", precision):
        predicted = figures_of(planned, entry.checked_shape, "cpu", precision)["tensors"]
        programs = schedules_of(planned).programs if isinstance(planned, Recomputed) else {}

        def made(programs: dict[Any, Any] = programs) -> nn.Module:
            fresh = entry.make(**keywords).train()
            if not programs:
                return fresh
            recomputed = Recomputed(fresh)
            schedules_of(recomputed).programs = dict(programs)
            return recomputed

        tensors, allocator = explain.unobserved(made, entry.checked_shape, policy, STEPS)
        row = {"title": entry.title, "plan": plan, "shape": entry.checked_shape}
        rows.append(row | {"predicted": predicted, "tensors": tensors, "allocator": allocator})
        print(check_line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def check_line(row: Numbers) -> str:
    """Return a row of the check's table."""
    error = f"{row['predicted'] / row['tensors'] - 1:+.2%}"
    sizes = [mib(row[name]) for name in ("predicted", "tensors")]
    cells = [row["title"], row["plan"], "x".join(map(str, row["shape"])), *sizes, error, mib(row["allocator"])]
    return f"| {' | '.join(cells)} |"


def run_check(indices: Sequence[int], precision: str) -> int:
    """Check networks, each in a process of its own, and print the table; 1 if a row is off or failed."""
    print(f"{precision}, one thread, torch {torch.__version__}\n")
    print("| network | plan | input | predicted MiB | tensors MiB | error | allocator MiB |")
    print("|---|---|---|---:|---:|---:|---:|", flush=True)
    code = 0
    for index in indices:
        try:
            rows = in_own_process(check, index, precision)
        except RowError as error:
            print(f"\nNot checked: {ENTRIES[index].title}: {error}\n")
            code = 1
            continue
        for row in rows:
            print(check_line(row), flush=True)
            if abs(row["predicted"] / row["tensors"] - 1) > TOLERANCE:
                code = 1
    return code


def predictions(indices: Sequence[int], stored: Path | None, save: Path | None) -> tuple[Results, int]:
    """Return what is predicted of networks, of which a stored file may have some; and 1 if a prediction failed."""
    results: Results = {} if stored is None or not stored.exists() else json.loads(stored.read_text())
    code = 0
    for device, precision in SETTINGS:
        for index in indices:
            settings = results.setdefault(ENTRIES[index].title, {})
            setting = f"{device} {precision}"
            if setting in settings:
                continue
            try:
                settings[setting] = in_own_process(predict, index, device, precision)
            except RowError as error:
                print(f"{ENTRIES[index].title}, {setting}: {error}", file=sys.stderr)
                code = 1
            if save is not None:
                save.write_text(json.dumps(results, indent=1))
    return results, code


def main() -> int:
    """Predict and write, or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    titles = [entry.title for entry in ENTRIES]
    parser.add_argument("--networks", nargs="+", choices=titles, default=titles, metavar="TITLE")
    parser.add_argument("--check", action="store_true", help="run small steps instead, and compare")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32", help="of --check")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="write tables into it, and PAGE.png (stdout)")
    parser.add_argument("--save", type=Path, metavar="JSON", help="keep the numbers in a file")
    parser.add_argument("--load", type=Path, metavar="JSON", help="take the numbers that a file has")
    options = parser.parse_args()
    indices = [titles.index(title) for title in options.networks]
    if options.check:
        return run_check(indices, options.precision)
    results, code = predictions(indices, options.load, options.save)
    entries = [ENTRIES[index] for index in indices]
    text = field_page.tables(entries, results)
    if options.markdown is None:
        print(text)
    else:
        field_page.write(options.markdown, text)
        field_page.draw(entries, results, options.markdown.with_suffix(".png"))
    return code


if __name__ == "__main__":
    sys.exit(main())
