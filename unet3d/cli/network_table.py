"""`unet3d plan --network` and `--module`: the table of the largest patches, each verified by simulated steps."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

from torch import nn

from unet3d import build
from unet3d.base.errors import UserError, escaped
from unet3d.base.progress import Counter, counting
from unet3d.base.terminal import WIDE, paper, terminal_table
from unet3d.base.types import MIB, Table, mib
from unet3d.cli import memory_of_module
from unet3d.config.schema import Config, Model
from unet3d.memory.ledger import Ledger
from unet3d.memory.peak import Peak
from unet3d.model import geometry
from unet3d.model.architecture import levels_of
from unet3d.model.geometry import Triple
from unet3d.planning.largest import Largest, largest
from unet3d.planning.patches import CUBE, VOXEL, Padding, Series, padded_by_rules, padded_to
from unet3d.planning.steps import AS_NNUNET, AUTO, SCHEDULES, USUAL_BYTES, ConfigSteps, Schedule, Steps
from unet3d.recomputing.module import Recomputed, schedules_of
from unet3d.recomputing.program import Program

MODULE_MULTIPLE = 16  # voxels, of the patches of a network whose strides are not known
FORMS = {"cuda": ("tensors", "allocated", "reserved", "expandable"), "cpu": ("tensors",)}  # of peaks, as printed
COMPARED = {"cuda": "reserved", "cpu": "tensors"}  # with the budget
UNITS = {"GiB": 2**30, "MiB": MIB, "KiB": 2**10}
NEVER = 2**31 - 1  # collections of younger objects, before one of the oldest


class ModuleSteps(Steps):
    """The steps of any network."""

    def __init__(self, path: str, keywords: Mapping[str, Any], channels: int, config: Config) -> None:
        super().__init__(config)
        self.path = path
        self.network = memory_of_module.made(path, keywords).train()
        self.channels = channels
        self.prepared: dict[Any, Program] = {}  # shared by the schedules of a patch

    def ledger(self, schedule: Schedule, patch: Triple, budget: int) -> Ledger:
        network: nn.Module = self.network
        shape = (self.config.batch, self.channels, *patch)
        config = replace(self.config, amp=schedule.amp)
        plan: Any = schedule.recompute
        if plan != "none":
            network = Recomputed(network, plan)
            schedules_of(network).prepared = self.prepared
        return memory_of_module.prediction(self.path, network, shape, config).meter.ledger


def of_config(config: Config, by_rules: bool) -> tuple[Steps, Padding, str]:
    """Return the steps of a config's network, which patches it takes, and a line about it.

    `by_rules`: depth and widths follow the patch as nnU-Net's rules say, for cubic voxels; else they are the config's.
    """
    if by_rules:

        def network(patch: Triple) -> Model:
            levels = levels_of(VOXEL, patch)
            kernels = [list(kernel) for kernel in levels.kernels]
            strides = [list(stride) for stride in levels.strides]
            return replace(config.model, features=levels.features, kernels=kernels, strides=strides)

        about = "nnU-Net's network: depth by its rules for the patch, 32 to 320 channels, deep supervision"
        return ConfigSteps(config, network), padded_by_rules, about
    model = build.model_config_from_headers(config)
    if not model.features or model.padding != "same":
        raise UserError("--network: takes networks of the package with model.padding=same; others by --module")
    strides = geometry.strides(model)
    units = [prod(stride[axis] for stride in strides) for axis in range(3)]
    return ConfigSteps(config, lambda _: model), padded_to(units), f"{len(model.features)} levels"


def of_module(
    path: str,
    keywords: Mapping[str, Any],
    channels: int,
    multiple: int | None,
    config: Config,
) -> tuple[Steps, Padding, str]:
    """Return the steps of any network, which patches are tried, and a line about it. Raises UserError."""
    unit = multiple or MODULE_MULTIPLE
    steps = ModuleSteps(path, keywords, channels, config)
    return steps, padded_to((unit, unit, unit)), f"{path}: patches of multiples of {unit} voxels"


def print_largest(
    steps: Steps,
    padded: Padding,
    about: str,
    *,
    budgets: Sequence[int],
    proportions: Triple | None,
    peak_of: Triple | None,
    recompute: str | None,
) -> None:
    """Print a row for each budget, series of patches and schedule. Raises UserError."""
    rows = []
    if peak_of is not None:
        if padded(peak_of) != peak_of:
            raise UserError(f"--peak-of {shown(peak_of)}: the network takes {shown(padded(peak_of))}, say")
        peaks = steps.peaks(AS_NNUNET, peak_of, 0)
        budgets = (peaks.limited,)
        rows.append(["", _words(steps, AS_NNUNET), shown(peak_of), "1.00x", *_sizes(peaks, steps), "", ""])
    patches = []
    if proportions is None or proportions != CUBE:
        patches.append(Series(padded))
    if proportions is not None:
        patches.append(Series(padded, proportions, is_cube=False))
    schedules = [schedule for schedule in (*SCHEDULES, AUTO) if schedule.recompute == recompute]
    total = len(budgets) * len(patches) * len(schedules or SCHEDULES)
    with counting("largest patches", total) as counter, _young_garbage_alone():
        for series in patches:
            rows += _rows(steps, series, schedules or SCHEDULES, budgets, peak_of, counter)
    print(escaped(f"{about}; batch {steps.batch}, on {steps.device_type}"))
    paper(WIDE).print(terminal_table("Largest patch, predicted peak of a step (MiB)", _table(steps, rows)))
    kind = COMPARED[steps.device_type]
    print(f"By bytes {kind}, each patch fits and the next larger one does not: {steps.simulated} steps simulated.")


@contextmanager
def _young_garbage_alone() -> Iterator[None]:
    """Let Python look for garbage among young objects alone: to go through all that torch has loaded takes long."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)


def _rows(
    steps: Steps,
    series: Series,
    schedules: Sequence[Schedule],
    budgets: Sequence[int],
    beside: Triple | None,
    counter: Counter,
) -> Iterator[list[str]]:
    """Yield the rows of a series of patches; `beside`: the patch whose voxels are 1."""
    known: dict[Schedule, dict[int, int]] = {schedule: {} for schedule in schedules}
    for budget in budgets:
        for schedule in schedules:
            answer = _answer(steps, series, schedule, budget, known[schedule])
            counter.advance()
            row = [rounded(budget), _words(steps, schedule)]
            if answer.patch is None:
                row += ["none", "", *("" for _ in FORMS[steps.device_type])]
            else:
                voxels = prod(answer.patch)
                row += [shown(answer.patch), f"{voxels / prod(beside):.2f}x" if beside else f"{voxels:,}"]
                row += _sizes(steps.peaks(schedule, answer.patch, budget), steps)
            if answer.next is None:
                row += ["too long", ""]
            else:
                row += [shown(answer.next), mib(steps.peaks(schedule, answer.next, budget).limited)]
            yield row


def _answer(
    steps: Steps,
    series: Series,
    schedule: Schedule,
    budget: int,
    known: dict[int, int],
) -> Largest:
    """Return the largest patch within a budget; `known` gets the bytes of each step that is simulated, by voxels."""

    def occupied(patch: Triple) -> int:
        size = steps.peaks(schedule, patch, budget).limited
        known[prod(patch)] = size
        return size

    guess: dict[int, float] = {**known}
    return largest(series, occupied, budget, guess or {1: USUAL_BYTES * schedule.usual * steps.batch})


def _table(steps: Steps, rows: list[list[str]]) -> Table:
    """Return the table of these rows."""
    columns = [
        "budget",
        "schedule",
        "largest",
        "voxels",
        *FORMS[steps.device_type],
        "next",
        COMPARED[steps.device_type],
    ]
    return Table(columns, rows)


def _words(steps: Steps, schedule: Schedule) -> str:
    """Return the type and the plan of a schedule, as `bf16 lean`."""
    name = "float32"
    if schedule.amp:
        name = "bf16" if steps.config.amp_dtype == "auto" else steps.config.amp_dtype
    return name if schedule.recompute == "none" else f"{name} {schedule.recompute}"


def _sizes(peaks: Peak, steps: Steps) -> list[str]:
    return [mib(getattr(peaks, form)) for form in FORMS[steps.device_type]]


def rounded(size: int) -> str:
    """Return bytes as `11 GiB`, `5.21 GiB`, `64 MiB` or `1 KiB`."""
    unit = "GiB" if size >= 2**30 else "MiB" if size >= MIB else "KiB"
    number = f"{size / UNITS[unit]:.2f}"
    return f"{number.rstrip('0').rstrip('.')} {unit}"


def shown(patch: Sequence[int]) -> str:
    """Return 160x192x160."""
    return "x".join(map(str, patch))
