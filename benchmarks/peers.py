"""Networks of several libraries, plain and with `unet3d.recompute`: memory and seconds a step, side by side in one run.

    pip install -c constraints.txt -e ".[bench]"
    python benchmarks/peers.py --amp bf16

Every network trains with the same `train_step`, patch, loss and optimizer, each row in a process of its own; ratios are
to the same network plain, ours to `unet3d`. `unet3d` is nnU-Net's PlainConvUNet with the same weights: equal logits are
checked first. Rows take turns in each round, so that a machine that slows down slows all of them. Seconds are the
median of a round, the fastest round counts. Tensors are the ledger's peak (on CUDA what the allocator gave out);
predicted is what `recompute` says, with momentum; resident is how much the process grew in steps without a ledger.
`--predict` computes the peak of tensors and trains nothing.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cuda_rows import Turn
from networks import NETWORKS, OURS, THEIRS, WAYS, Task, config_of, network_of, policy_of
from steps import RowError, Steps, forget_resident_peak, in_own_process, recomputed, resident_bytes
from torch import nn

from unet3d.base.types import MIB, mib
from unet3d.memory.fake_tensors import fake_mode
from unet3d.memory.ledger import most_held
from unet3d.memory.meter import STEPS_FOR_PEAK, LedgerMeter
from unet3d.memory.simulate import simulate
from unet3d.memory.technique import choose_technique
from unet3d.recomputing.module import schedules_of

PLANS = ("plain", "lean", "tiles")
DEFAULT = [OURS, *WAYS[1:], *THEIRS]
Numbers = dict[str, float]  # parameters, peak, predicted and resident in bytes, s, loss


class Row(NamedTuple):
    """A network and how it is trained."""

    network: str
    plan: str

    @property
    def title(self) -> str:
        """Return the row's name in the table."""
        return self.network if self.plan == "plain" else f"{self.network}, recompute {self.plan}"

    @property
    def reference(self) -> "Row":
        """Return the row to which the ratios are."""
        return Row(OURS if self.network in WAYS else self.network, "plain")


def rows_of(networks: Sequence[str], plans: Sequence[str]) -> list[Row]:
    """Return the rows of these networks; a way of our own engine has no other plan."""
    rows = []
    for network in networks:
        rows += [Row(network, plan) for plan in plans if plan == "plain" or network not in WAYS]
    return rows


def measure(row: Row, task: Task, count: int, turn: Turn | None = None) -> Numbers:
    """Return what `count` steps take, and before that a step under the ledger, once it is its turn."""
    torch.manual_seed(0)
    network = network_of(row.network, task).train()
    policy = policy_of(row.network, task)
    numbers: Numbers = {"parameters": parameters_of(network)}
    if row.plan != "plain":
        network = recomputed(network, row.plan, policy, task)
    else:
        numbers["predicted"] = predict(row, task, count)["peak"]
    forget_resident_peak()
    before = resident_bytes()
    steps = Steps(network, policy, task)
    if row.plan != "plain":
        numbers["predicted"] = predicted_bytes(network) + steps.momentum_bytes()
    with turn or nullcontext():
        numbers["peak"] = steps.peak_bytes()
        forget_resident_peak()
        numbers["s"] = statistics.median(steps.seconds(count))
    numbers["resident"] = resident_bytes("VmHWM") - before
    numbers["loss"] = steps.losses[-1]
    return numbers


def predict(row: Row, task: Task, count: int) -> Numbers:
    """Return parameters and the peak of tensors, without the memory of a step."""
    if row.plan != "plain":
        network = recomputed(network_of(row.network, task), row.plan, policy_of(row.network, task), task)
        momentum = sum(parameter.nbytes for parameter in network.parameters())
        return {"parameters": parameters_of(network), "peak": predicted_bytes(network) + momentum}
    if row.network in THEIRS:
        return predict_theirs(row.network, task)
    config = config_of(row.network, task)
    technique = choose_technique(config, config.model)
    meter = simulate(config, config.model, technique, steps=STEPS_FOR_PEAK)
    return {"parameters": parameters_of(meter.model), "peak": most_held(meter.ledger.requests())}


def predict_theirs(name: str, task: Task) -> Numbers:
    """Return the same of another library's network."""
    with fake_mode(), torch.device(task.device):
        steps = Steps(network_of(name, task).train(), policy_of(name, task), task)
        with closing(LedgerMeter(steps.network, steps.optimizer, for_gpu=task.device == "cuda")) as meter:
            steps.step(meter.mark)
        return {"parameters": parameters_of(steps.network), "peak": most_held(meter.ledger.requests())}


def predicted_bytes(network: Any) -> int:
    """Return the peak that `recompute` predicts, without momentum."""
    (prediction,) = schedules_of(network).programs.values()
    peak: int = prediction.peak_bytes
    return peak


def parameters_of(network: nn.Module) -> int:
    """Return the number of weights."""
    return sum(parameter.numel() for parameter in network.parameters())


def table(results: dict[Row, list[Numbers]], task: Task, is_predicted: bool) -> str:
    """Return Markdown."""
    best: dict[Row, Numbers] = {}
    for row, rounds in results.items():
        best[row] = {key: min(numbers[key] for numbers in rounds) for key in rounds[0]}
    lines = [title(task, "predicted" if is_predicted else "measured"), ""]
    columns = {"peak": "tensors MiB"}
    if not is_predicted:
        columns |= {"resident": "resident MiB", "s": "s/step"}
    head = "| network | parameters |"
    head += "".join(f" {name} | ratio |" for name in columns.values())
    rule = "|---|---:|" + "---:|---:|" * len(columns)
    if not is_predicted:
        head += " predicted MiB | loss |"
        rule += "---:|---:|"
    lines += [head, rule]
    for row, numbers in best.items():
        reference = best.get(row.reference)
        cells = [row.title, f"{numbers['parameters']:,}"]
        for key in columns:
            cells.append(f"{numbers[key]:.3f}" if key == "s" else mib(numbers[key]))
            cells.append(f"{numbers[key] / reference[key]:.3f}" if reference else "")
        if not is_predicted:
            cells.append(mib(numbers["predicted"]) if "predicted" in numbers else "")
            cells.append(f"{numbers['loss']:.5f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def title(task: Task, kind: str) -> str:
    """Return a line that says what was measured, and on what."""
    size = "x".join(map(str, task.patch))
    line = f"torch {torch.__version__}, {torch.get_num_threads()} threads, amp {task.amp}, patch {size} voxels, "
    return line + f"batch {task.batch}, {task.classes} classes, {kind}"


def add_task_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that make a Task."""
    default = Task()
    parser.add_argument("--amp", choices=("off", "bf16", "fp16"), default=default.amp)
    parser.add_argument("--patch", type=int, nargs=3, default=default.patch, help="voxels")
    parser.add_argument("--widths", type=int, nargs="+", default=default.widths, help="channels of each level")
    parser.add_argument("--classes", type=int, default=default.classes)
    parser.add_argument("--batch", type=int, default=default.batch)


def task_of(options: argparse.Namespace) -> Task:
    """Return the Task of these options."""
    return Task(tuple(options.patch), tuple(options.widths), options.classes, options.batch, options.amp)


def run(rows: Sequence[Row], options: argparse.Namespace, task: Task) -> int:
    """Measure or predict rows, each in a process of its own, and print the table; 1 if a row failed."""
    results: dict[Row, list[Numbers]] = {}
    failures: dict[Row, str] = {}
    function = predict if options.predict else measure
    for _ in range(1 if options.predict else options.rounds):
        for row in rows:
            try:
                numbers = in_own_process(function, row, task, options.steps)
            except RowError as error:
                failures[row] = f"{row.title}: {error}"
                print(failures[row], file=sys.stderr)
                continue
            print(f"{row.title}: {numbers['peak'] / MIB:,.1f} MiB", file=sys.stderr)
            results.setdefault(row, []).append(numbers)
    print(table(results, task, options.predict))
    for failure in failures.values():
        print(f"\nNot measured: {failure}")
    return 1 if failures else 0


def main() -> int:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_task_options(parser)
    parser.add_argument("--deep-supervision", action="store_true", help="of nnU-Net's PlainConvUNet and ours")
    parser.add_argument("--steps", type=int, default=2, help="timed steps a round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=DEFAULT, metavar="NAME")
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=PLANS)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU where there is one")
    parser.add_argument("--predict", action="store_true", help="compute the peak of tensors alone, of any size")
    parser.add_argument("--only", choices=NETWORKS, help=argparse.SUPPRESS)  # one plan, in this process, as JSON
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)  # of `cuda_rows.Turn`
    options = parser.parse_args()
    task = task_of(options)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    task = task._replace(device=device, deep_supervision=options.deep_supervision)
    if options.only:
        turn = Turn(options.turn)
        print(json.dumps(measure(Row(options.only, options.plans[0]), task, options.steps, turn)))
        return 0
    return run(rows_of(options.networks, options.plans), options, task)


if __name__ == "__main__":
    sys.exit(main())
