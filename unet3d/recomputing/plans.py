"""What a step follows: a schedule by plan or budget, and what a user reads of it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from unet3d.base.errors import UserError
from unet3d.base.fit import fit
from unet3d.base.types import mib
from unet3d.recomputing import search
from unet3d.recomputing.groups import first_of_group
from unet3d.recomputing.program import Program
from unet3d.recomputing.schedule import Schedule, compile_schedule

PLANS = ("lean", "tiles", "auto")  # little work, little memory, what a budget allows
WORTH_FOR_LEAN = 1.3  # 1 % of a forward pass less is as good as so many % of memory less
WORTH_FOR_TILES = 0.1
FEW = 50  # times fewer numbers than the largest value has: so small is an excitation beside the map that it scales


class Technique(NamedTuple):
    """A way to save the memory of maps: backward computes them a second time."""

    segment_starts: tuple[int, ...] = ()  # the first stage of each checkpointed segment; (): no checkpointing
    program: Program | None = None  # of recomputation by a schedule
    window_program: Program | None = None  # that passes without gradients follow, too
    forward_recompute_fraction: float = 0.0  # convolution FLOPs computed twice, as a share of a forward pass


PLAIN = Technique()


def by_plan(program: Program, plan: str, budget: int | None = None) -> Program:
    """Return the program by the schedule of a plan, and for "auto" of a budget in bytes.

    Raises UserError for a budget that neither a schedule nor the network's own pass keeps.
    """
    if plan == "lean":
        plain = math.inf if program.plain_bytes is None else program.plain_bytes - program.fixed_bytes
        return program.by(leanest(program.schedules, plain))
    if plan == "tiles":
        return program.by(smallest(program.schedules))
    assert budget is not None
    number = fit(program.schedules, lambda schedule: schedule.peak_bytes, budget - program.fixed_bytes)
    if number is None and program.plain_bytes is not None and program.plain_bytes <= budget:
        return program.by(least_memory(program.schedules))
    if number is None:
        raise UserError(
            f"budget={mib(budget)}MiB: a step needs at least {mib(least_bytes(program))} MiB of "
            "tensors; take a smaller patch or a smaller network"
        )
    return program.by(program.schedules[number])


def without_backward(program: Program) -> Program:
    """Return the program whose pass keeps nothing for a backward pass."""
    assert program.sizes is not None
    nothing: list[set[int]] = [set() for _ in range(program.sizes.count + 1)]
    return program.by(compile_schedule(program.sizes, nothing))


def least_bytes(program: Program) -> int:
    """Return the least that a pass can need at once."""
    return program.fixed_bytes + min(schedule.peak_bytes for schedule in program.schedules)


def leanest(schedules: Sequence[Schedule], plain: float = math.inf) -> Schedule:
    """Return the schedule that weighs memory and work best, of those with little more than the least work.

    Where that needs no less than the `plain` pass (bytes without weights and image), twice as much more work may be
    taken for one that does.
    """
    least_work = min(schedule.work for schedule in schedules)
    best = _best(schedules, least_work + search.LITTLE_WORK, WORTH_FOR_LEAN)
    if best.peak_bytes < plain:
        return best
    most_work = least_work + 2 * search.LITTLE_WORK
    saving = [schedule for schedule in schedules if schedule.peak_bytes < plain and schedule.work <= most_work]
    return _best(saving or [best], most_work, WORTH_FOR_LEAN)


def smallest(schedules: Sequence[Schedule]) -> Schedule:
    """Return the schedule of bearable work that needs least memory, or hardly more at much less work."""
    return _best(schedules, search.MOST_WORK, WORTH_FOR_TILES)


def least_memory(schedules: Sequence[Schedule]) -> Schedule:
    """Return the schedule of least memory, whatever its work."""
    return min(schedules, key=lambda schedule: schedule.peak_bytes)


def _best(schedules: Sequence[Schedule], most_work: float, worth: float) -> Schedule:
    """Return the schedule that weighs memory and work best, of those of at most that work if there are any."""

    def cost(schedule: Schedule) -> float:
        return math.log(schedule.peak_bytes) + worth * schedule.work

    bearable = [schedule for schedule in schedules if schedule.work <= most_work]
    return min(bearable or schedules, key=cost)


def work_line(program: Program) -> str:
    """Return the work of a program, and which operations have no rule: not those of few numbers, which cost nothing."""
    percent = round(100 * (program.schedule.work - 1))
    work = f"{percent} % more forward work" if percent > 0 else "no more forward work"
    largest = max(value.shape.numel() for value in program.maps.graph.values)
    whole: dict[str, None] = {}
    for map_ in program.maps.whole:
        if FEW * max(value.shape.numel() for value in (*map_.fused, *map_.sources)) < largest:
            continue
        value = first_of_group(map_.fused)
        whole[f"{value.op} in {value.layer}" if value.layer else value.op] = None
    if not whole:
        return work
    first = ", ".join(list(whole)[:3])
    more = f" and {len(whole) - 3} others" if len(whole) > 3 else ""
    return f"{work}; checkpointed as a whole (correct, saves less): {first}{more}"


def describe(program: Program, plan: str, held: int = 0) -> str:
    """Return a line: the bytes of a schedule and of the network's own pass, the schedule's work, what has no rule.

    `held`: bytes that lie in memory besides, and are counted in both.
    """
    kinds = ["weights", "gradients", "activations"]
    if not program.on_cpu:
        kinds.append("workspaces of cuDNN")
    if held:
        kinds.append(f"{mib(held)} MiB held")
    *first, last = kinds
    size = f"{mib(program.peak_bytes)} MiB"
    if program.plain_bytes is not None:
        size = f"{size} instead of {mib(program.plain_bytes)} MiB"
    sizes = f"{size} (predicted) for {', '.join(first)} and {last}"
    if program.saves_memory:
        return f"recompute={plan}: {sizes}, {work_line(program)}"
    assert program.plain_bytes is not None
    line = f"recompute={plan}: would need {sizes}, so the network runs plain"
    if plan == "lean" and program.by(smallest(program.schedules)).saves_memory:
        return f"{line}; plan='tiles' would need less"
    return line
