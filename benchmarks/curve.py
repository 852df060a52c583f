"""What memory costs: a network's step at eight budgets of `unet3d.recompute`, beside torch's own ways to save memory.

    pip install -c constraints.txt -e ".[bench]"
    python benchmarks/curve.py --out curve

For each network: plain; `plan=auto` with plain's peak as its budget, and with budgets from what its quickest schedule
needs to the least; `torch.utils.checkpoint` on its stages, or `checkpoint_sequential` where it is sequential. For the
first network also `torch.compile`, backend aot_eager, at several values of `activation_memory_budget`: peaks alone.
Peaks are the ledger's, in a step of its own; seconds are CPU seconds of one thread, the fewest of `--steps` later ones.
`--jobs` networks run beside each other, each in a process. Writes OUT.md and OUT.png.
"""

import argparse
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from networks import OURS, PLAIN_CONV_UNET, Task, network_of, policy_of
from peers import add_task_options, task_of, title
from steps import RowError, Steps, in_own_process, recomputed
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from unet3d.base.types import MIB, mib
from unet3d.memory.ledger import Ledger, most_held
from unet3d.recomputing.module import schedules_of

BUDGETS = 8
COMPILED = (0.1, 0.3, 0.5, 0.7, 0.9)  # shares of activations, of activation_memory_budget
SEGMENTS = (2, 3, 4, 8)  # of checkpoint_sequential
# Paths of the modules to checkpoint, as regular expressions.
CHECKPOINTED = {
    PLAIN_CONV_UNET: {
        "stages": r"network\.(en|de)coder\.stages\.\d+",
        "convolutions": r"network\.(en|de)coder\.stages\.\d+(\.\d+)?\.convs\.\d+",
    },
    "MONAI DynUNet, residual": {
        "stages": r"network\.(input_block|bottleneck|(down|up)samples\.\d+)",
        "first and last stage": r"network\.(input_block|upsamples\.2)",
    },
    "MONAI SegResNet": {
        "stages": r"network\.(down|up)_layers\.\d+",
        "stages, convolutions": r"network\.((down|up)_layers\.\d+|up_samples\.\d+|convInit|conv_final)",
    },
}
DEFAULT = (*CHECKPOINTED, OURS)
WAYS = {"plain": "k*", "recompute": "C0o-", "checkpoint": "C1s", "compile": "C2_"}  # formats of matplotlib


class Point(NamedTuple):
    """A way to train a network, and what a step takes."""

    way: str  # of WAYS
    setting: str
    peak: int  # bytes of tensors, measured
    seconds: float | None = None  # CPU
    predicted: int | None = None  # bytes
    work: float | None = None  # forward passes, predicted


class CompiledLedger(Ledger):
    """A ledger within which torch runs what it has compiled, and does not compile the ledger."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class Sequentially(nn.Module):
    """A sequential network in segments of torch's `checkpoint_sequential`."""

    def __init__(self, network: nn.Sequential, segments: int) -> None:
        super().__init__()
        self.network = network
        self.segments = segments

    def forward(self, image: Tensor) -> Any:
        """Return the network's output."""
        return checkpoint_sequential(self.network, self.segments, image, use_reentrant=False)


def points_of(name: str, task: Task, count: int) -> list[Point]:
    """Return plain, recompute at each budget, and checkpointing."""
    torch.set_num_threads(1)
    plain = measured(Point("plain", "", 0), network_of(name, task), name, task, count)
    return [plain, *budget_points(plain.peak, name, task, count), *checkpoint_points(name, task, count)]


def budget_points(most: int, name: str, task: Task, count: int) -> list[Point]:
    """Return a point for each budget, the largest first; `most` is plain's peak."""
    policy = policy_of(name, task)
    smallest = recomputed(network_of(name, task), "tiles", policy, task)
    momentum = sum(parameter.nbytes for parameter in smallest.parameters())
    (prediction,) = schedules_of(smallest).programs.values()
    quickest = prediction.fixed_bytes + prediction.schedules[0].peak_bytes + momentum
    least = prediction.peak_bytes + momentum
    steps = [(quickest - least) * number / (BUDGETS - 2) for number in range(BUDGETS - 1)]
    points: list[Point] = []
    for budget in [most, *(quickest - step for step in steps)]:
        words = f"{math.ceil(10 * budget / MIB) / 10}MiB"
        network = recomputed(network_of(name, task), "auto", policy, task, budget=words, held=f"{momentum / MIB}MiB")
        (prediction,) = schedules_of(network).programs.values()
        point = Point("recompute", f"budget {words}", 0, None, prediction.peak_bytes, prediction.schedule.work)
        if points and points[-1][4:] == point[4:]:  # the same schedule
            points.append(point._replace(peak=points[-1].peak, seconds=points[-1].seconds))
        else:
            points.append(measured(point, network, name, task, count))
    return points


def checkpoint_points(name: str, task: Task, count: int) -> list[Point]:
    """Return a point for each choice of what is checkpointed."""
    points = []
    for setting, pattern in CHECKPOINTED.get(name, {}).items():
        network = network_of(name, task)
        checkpoint_modules(network, pattern)
        points.append(measured(Point("checkpoint", setting, 0), network, name, task, count))
    if name not in CHECKPOINTED:
        for segments in SEGMENTS:
            network = network_of(name, task)
            assert isinstance(network, nn.Sequential)
            point = Point("checkpoint", f"{segments} segments", 0)
            points.append(measured(point, Sequentially(network, segments), name, task, count))
    return points


def checkpoint_modules(network: nn.Module, pattern: str) -> None:
    """Let backward compute these modules again."""
    paths = [path for path, _ in network.named_modules() if re.fullmatch(pattern, path)]
    assert paths, pattern
    for path in paths:
        module: Any = network.get_submodule(path)
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)


def compiled_point(budget: float, name: str, task: Task) -> Point:
    """Return the peak of a compiled network; its seconds would be those of another engine."""
    torch.set_num_threads(1)
    functorch_config.activation_memory_budget = budget
    network: Any = torch.compile(network_of(name, task), backend="aot_eager")
    return measured(Point("compile", f"activation_memory_budget {budget}", 0), network, name, task, count=0)


def measured(point: Point, network: nn.Module, name: str, task: Task, count: int) -> Point:
    """Return a point with the peak of a step, and the seconds of the quickest of `count` others."""
    torch.manual_seed(0)
    steps = Steps(network.train(), policy_of(name, task), task)
    if point.way == "compile":
        steps.step()  # within a ledger, nothing is compiled
    peak = peak_bytes(steps)
    seconds = min(steps.seconds(count, time.process_time), default=None)
    return point._replace(peak=peak, seconds=seconds)


def peak_bytes(steps: Steps) -> int:
    """Return the peak of tensors in a step."""
    ledger = CompiledLedger()
    with ledger:
        ledger.count([*steps.network.parameters(), *steps.network.buffers()])
        ledger.count([list(state.values()) for state in steps.optimizer.state.values()])
        steps.step()
    return most_held(ledger.events)


def table(points: Sequence[Point]) -> list[str]:
    """Return Markdown of a network's points; ratios are to the first, plain."""
    plain = points[0]
    lines = ["| way | tensors MiB | ratio | CPU s/step | ratio | predicted MiB | forward passes |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for point in points:
        cells = [f"{point.way} {point.setting}".strip(), mib(point.peak), f"{point.peak / plain.peak:.3f}"]
        cells += ["", ""] if point.seconds is None else [f"{point.seconds:.3f}", f"{point.seconds / plain.seconds:.3f}"]
        cells.append("" if point.predicted is None else mib(point.predicted))
        cells.append("" if point.work is None else f"{point.work:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def draw(curves: dict[str, list[Point]], path: Path) -> None:
    """Draw seconds against peak, both as ratios to plain; a peak alone is a line."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    columns = min(2, len(curves))
    rows = math.ceil(len(curves) / columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(5 * columns, 4 * rows), squeeze=False, sharey=True)
    for axis, (name, points) in zip(axes.flat, curves.items(), strict=False):
        plain = points[0]
        for way, form in WAYS.items():
            chosen = [point for point in points if point.way == way]
            peaks = [point.peak / plain.peak for point in chosen]
            if way == "compile":
                for index, peak in enumerate(peaks):
                    label = "torch.compile (peak alone)" if index == 0 else None
                    axis.axhline(peak, color="C2", linestyle=":", linewidth=1, label=label)
            elif chosen:
                axis.plot([point.seconds / plain.seconds for point in chosen], peaks, form, label=way)
        axis.set_title(name)
        axis.set_xlabel("CPU seconds a step, to plain")
        axis.set_ylabel("peak of tensors, to plain")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend()
    for axis in list(axes.flat)[len(curves) :]:
        axis.set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    """Measure, write the table and the picture; 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_task_options(parser)
    parser.add_argument("--networks", nargs="+", choices=DEFAULT, default=DEFAULT, metavar="NAME")
    parser.add_argument("--steps", type=int, default=1, help="timed steps of each point")
    parser.add_argument("--jobs", type=int, default=2, help="networks beside each other")
    parser.add_argument("--out", type=Path, default=Path("curve"))
    options = parser.parse_args()
    task = task_of(options)
    curves: dict[str, list[Point]] = {}
    failures: list[str] = []
    compiled = options.networks[0]

    def attempt(label: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return in_own_process(function, *arguments)
        except RowError as error:
            failures.append(f"{label}: {error}")
            return None

    with ThreadPoolExecutor(options.jobs) as pool:
        futures = {name: pool.submit(attempt, name, points_of, name, task, options.steps) for name in options.networks}
        compilations = []
        for budget in COMPILED:
            label = f"{compiled}, activation_memory_budget {budget}"
            compilations.append(pool.submit(attempt, label, compiled_point, budget, compiled, task))
    for name, future in futures.items():
        points = future.result()
        if points is not None:
            curves[name] = points
    if compiled in curves:
        curves[compiled] += [future.result() for future in compilations if future.result() is not None]
    torch.set_num_threads(1)  # as in each process
    lines = [title(task, "measured"), ""]
    for name, points in curves.items():
        lines += [f"## {name}", "", *table(points), ""]
    lines += [f"Not measured: {failure}\n" for failure in failures]
    text = "\n".join(lines)
    options.out.with_suffix(".md").write_text(text)
    print(text)
    if curves:
        draw(curves, options.out.with_suffix(".png"))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
