"""Lines on a step that does not fit: why it is refused before a run, and what would have needed less memory after."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import NoReturn

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.base.types import budget_bytes, mib
from unet3d.config.schema import Config, Model, options_with
from unet3d.memory import analysis
from unet3d.memory.budget import (
    Candidate,
    cheapest_of_each,
    find_fit,
    pareto_front,
    search,
    simulated,
    smaller_networks,
)
from unet3d.memory.ledger import Ledger
from unet3d.memory.tables import NAMES

GROUPS_SHOWN = 5  # of tensors shown after out of memory
SUGGESTIONS_SHOWN = 4  # for a new run, shown after out of memory
PATIENCE = 20.0  # seconds of search after out of memory
HEAD = f"what would need less (predicted; ~: estimated)\n{'peak MiB':>12} {'saves MiB':>10} {'more FLOPs':>10}  changes"


def refuse_over_budget(asked: Candidate) -> None:
    """Raise UserError if the step, whose peak is known, does not fit `budget`, with what would need less."""
    budget = asked.config.budget
    if budget is not None and asked.occupied_bytes > budget_bytes(budget):
        _refuse(asked, budget_bytes(budget), f"budget={budget}: the step does not fit")


def refuse_over_card(asked: Candidate, validation: int, windows: int, free: int, total: int) -> None:
    """Raise UserError if the step or a validation, of `validation` bytes, does not fit a GPU's free bytes.

    The validation sees `windows` windows at once.
    """
    card = f"device=cuda: this GPU has {mib(free)} of {mib(total)} MiB free"
    if asked.occupied_bytes > free:
        _refuse(asked, free, f"{card}; the step would reserve {mib(asked.occupied_bytes)} MiB (predicted)")
    if validation > free:
        subject = "a validation window"
        advice = "a smaller data.patch"
        if windows > 1:
            subject = f"a validation of {windows} windows at once"
            advice = "inference.batch=1, or a smaller data.patch"
        needed = f"{mib(validation)} MiB in tensors and workspaces (predicted)"
        raise UserError(f"{card}; {subject} would hold {needed}; use {advice}")


def _refuse(asked: Candidate, budget: int, problem: str) -> NoReturn:
    """Raise UserError with the options that need less than the step, up to the first that fits."""
    front, best = find_fit(asked, budget, thorough=False)
    rows = [asked]
    cheaper = [row for row in front if row.cost() < best.cost() and row.overrides != best.overrides]
    last_of_each = {row.overrides: row for row in cheaper}
    for row in (*last_of_each.values(), best):
        if row.peak_bytes < asked.peak_bytes:
            rows.append(row)
    if best.occupied_bytes <= budget:
        end = f"  (fits{best.reserves})"
    else:
        end = f"\nnone of these fits; the smallest peak is {mib(best.peak_bytes)} MiB{best.reserves}"
    lines = [f"{problem}; {HEAD}", *_lines(asked, rows)]
    raise UserError("\n".join(lines) + end)


def _lines(asked: Candidate, rows: Iterable[Candidate]) -> Iterator[str]:
    """Yield one line per candidate, under HEAD."""
    for row in rows:
        peak = mib(row.peak_bytes)
        if not row.is_simulated:
            peak = f"~{peak}"
        saves = ""
        changes = "as asked"
        if row is not asked:
            saves = mib(asked.peak_bytes - row.peak_bytes)
            changes = f"{row.changes + ':':<12} {' '.join(row.overrides)}"
        yield f"  {peak:>10} {saves:>10} {row.step_recompute_fraction:>10.0%}  {changes}"


def oom_suggestions(config: Config, model_config: Model, seconds: float = PATIENCE) -> Iterator[str]:
    """Yield lines on what would need less; first what a resumed run may change.

    The budget goes: it was too high for `ckpt=auto`. The search ends after `seconds`, but for the step that it is at.
    """
    until = time.monotonic() + seconds
    asked = simulated(Candidate((), "nothing", config, model_config))
    no_budget = () if config.budget is None else ("budget=null",)
    free = simulated(asked._replace(overrides=no_budget, config=replace(config, budget=None)))
    candidates = search(free, until=until)
    fixed = options_with("fixed").keys()
    resumable = []
    for candidate in candidates:
        if fixed.isdisjoint(word.partition("=")[0] for word in candidate.overrides):
            resumable.append(candidate)
    rows = [asked]
    for candidate in _in_time((free, *cheapest_of_each(resumable)), until):
        row = simulated(candidate)
        if row.peak_bytes < rows[-1].peak_bytes:
            rows.append(row)
    yield from HEAD.splitlines()
    yield from _lines(asked, rows)
    tried = {candidate.overrides for candidate in resumable}
    others = [candidate for candidate in candidates if candidate.overrides not in tried]
    lower = _lower(others, rows[-1].peak_bytes)
    smaller = islice(smaller_networks(candidates), 1, None) if candidates else iter(())
    new = islice(_in_time(chain(lower, smaller), until), SUGGESTIONS_SHOWN)
    is_first = True
    for line in _lines(asked, new):
        if is_first:
            yield "in a new run, because a resumed one cannot change these:"
        is_first = False
        yield line
    if time.monotonic() > until:
        yield f"searched for {seconds:.0f} s; more: python -m unet3d memory fit ... budget=SIZE"


def _lower(candidates: Iterable[Candidate], peak: int) -> list[Candidate]:
    """Return the pareto_front below a peak, one candidate for the same overrides."""
    front = {candidate.overrides: candidate for candidate in pareto_front(candidates)}
    return [candidate for candidate in front.values() if candidate.peak_bytes < peak]


def _in_time(candidates: Iterable[Candidate], until: float) -> Iterator[Candidate]:
    """Yield the candidates, as long as the time is not over."""
    for candidate in candidates:
        yield candidate
        if time.monotonic() > until:
            return


def oom_moment(ledger: Ledger) -> Iterator[str]:
    """Yield when memory ran out, and the largest groups of tensors then.

    Call it before the frames of the error are cleared.
    """
    moment = len(ledger.events)
    steps_done = sum(name == "end" for _, name in ledger.marks)
    _, phase = ledger.marks[-1]
    if phase == "end":  # the ledger has stopped: later steps repeat the first ones
        moment = ledger.peak_moment()
        peak = analysis.describe(ledger, moment)["words"]
        yield f"not in the first {steps_done} steps, whose peak was in {peak}; held then:"
    else:
        place = "before" if phase == "before" else f"in {phase} of"
        yield f"{place} step {steps_done + 1}, {mib(ledger.alive_bytes()[moment])} MiB of tensors alive:"
    for group in analysis.held(ledger, moment)[:GROUPS_SHOWN]:
        tensors = f"{group.number} x {group.shape} {group.dtype}"
        yield f"  {mib(group.bytes):>10} MiB  {tensors}, {NAMES[group.category]}"


def oom_in_validation(config: Config, step: int, windows: int = 1) -> Iterator[str]:
    """Yield lines for the validation after a step, of `windows` windows at once. `ckpt` changes nothing there."""
    on_cuda = build.device_type(config) == "cuda"
    window = "x".join(map(str, config.data.patch))
    times = "one at a time" if windows == 1 else f"{windows} at once"
    strips = "on the device where they fit, else in host memory" if on_cuda else "in host memory"
    ways = ""
    if windows > 1:
        ways += "with inference.batch=1 (device), or "
    yield f"in the validation after step {step}, of windows of {window} voxels on the device, {times},"
    yield f"and of strips of windows {strips}, with 4 bytes for each class of each voxel;"
    yield "a new run needs less with a smaller data.patch (both), a wider data.spacing or smaller volumes (host);"
    yield f"this run can be resumed {ways}where there is more memory, and predict and score can use its last.pt"
