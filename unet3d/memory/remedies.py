"""What would need less memory: for `memory fit`, for a step that does not fit, and for a run that ran out of memory."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.base.fit import fit
from unet3d.base.progress import counting, track
from unet3d.base.types import budget_bytes, mib
from unet3d.config.schema import Config, Model, options_with
from unet3d.memory import breakdown
from unet3d.memory.ledger import Ledger
from unet3d.memory.tables import NAMES
from unet3d.memory.technique import estimated_technique, step_peak
from unet3d.memory.variants import CHANGES, Candidate, halves, least_share, simulated, ways, with_price

GROUPS_SHOWN = 5  # of tensors shown after out of memory
SUGGESTIONS_SHOWN = 4  # for a new run, shown after out of memory
PATIENCE = 20.0  # seconds of search after out of memory
HEAD = f"what would need less (predicted)\n{'peak MiB':>12} {'saves MiB':>10} {'more FLOPs':>10}  changes"


def find_fit(asked: Candidate, budget: int) -> tuple[list[Candidate], Candidate]:
    """Return the cheapest way to take the step that fits the bytes, as the second; on CUDA they are reserved ones.

    The first are the ways that were tried on the way there, by cost, as `pareto_front` leaves them. Where no memory
    option is enough, the network or the patch is made smaller; where nothing is, the second has the smallest peak.
    """
    tried: list[Candidate] = []
    all_ways = list(ways(asked))
    plain = step_peak(replace(asked.config, ckpt=0, recompute="none"), asked.model)
    likely = []
    for way in all_ways:
        share = least_share(asked, way)
        if share == 1 or share * plain.limited <= budget:  # The plain step is simulated already.
            likely.append(way)
    with counting("memory options, at most", len(all_ways)) as counter:

        def measure(way: Candidate) -> int:
            tried.append(simulated(way))
            counter.advance()
            return tried[-1].step.limited

        for group in _in_groups(likely):
            if fit(_by_cost(group), measure, budget) is not None:
                return pareto_front(tried), tried[-1]
        if any([_measures_thriftiest(asked, all_ways, amp, measure, budget) for amp in (False, True)]):
            # This network needs a smaller share than known ones, so none of its ways is left out.
            for group in _in_groups(way for way in all_ways if way not in likely):
                if fit(_by_cost(group), measure, budget) is not None:
                    return pareto_front(tried), tried[-1]
        smaller = list(halves(min(tried, key=lambda way: way.step.tensors)))
        fit(smaller, measure, budget)
    best = tried[-1]
    if best.step.limited > budget:
        best = min(tried, key=lambda way: way.step.tensors)
    return pareto_front(tried), best


def _measures_thriftiest(
    asked: Candidate, candidates: Iterable[Candidate], amp: bool, measure: Callable[[Candidate], int], budget: int
) -> bool:
    """Measure what is likely to need the least with or without mixed precision; return whether it fits."""
    alike = [way for way in candidates if way.config.amp == amp]
    for way in sorted(alike, key=lambda way: least_share(asked, way)):
        with suppress(UserError):
            return measure(way) <= budget
    return False


def _in_groups(candidates: Iterable[Candidate]) -> Iterator[list[Candidate]]:
    """Yield the candidates in groups, each of which costs no more than the next: those that recompute nothing first."""
    groups: dict[tuple[int, bool], list[Candidate]] = {}
    for candidate in candidates:
        recomputes = bool(candidate.config.ckpt) or candidate.config.recompute != "none"
        groups.setdefault((CHANGES[candidate.changes], recomputes), []).append(candidate)
    for key in sorted(groups):
        yield groups[key]


def _by_cost(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates by cost, without those whose networks do not have the technique."""
    priced = []
    for candidate in candidates:
        with suppress(UserError):
            technique = estimated_technique(candidate.config, candidate.model)
            priced.append(with_price(candidate, technique))
    return sorted(priced, key=Candidate.cost)


def pareto_front(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return, by cost, the candidates with a lower peak than all cheaper ones that change the result alike."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=Candidate.cost):
        is_first = not front or candidate.cost()[0] != front[-1].cost()[0]
        if is_first or candidate.step.tensors < front[-1].step.tensors:
            front.append(candidate)
    return front


def refuse_over_budget(asked: Candidate) -> None:
    """Raise UserError if the step, whose peak is known, does not fit `budget`, with what would need less."""
    budget = asked.config.budget
    if budget is not None and asked.step.limited > budget_bytes(budget):
        _refuse(asked, budget_bytes(budget), f"budget={budget}: the step does not fit")


def refuse_over_card(asked: Candidate, validation: int, windows: int, free: int, total: int) -> None:
    """Raise UserError if the step or a validation, of `validation` bytes, does not fit a GPU's free bytes.

    The validation sees `windows` windows at once.
    """
    card = f"device=cuda: this GPU has {mib(free)} of {mib(total)} MiB free"
    if asked.step.limited > free:
        _refuse(asked, free, f"{card}; the step would reserve {mib(asked.step.limited)} MiB (predicted)")
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
    front, best = find_fit(asked, budget)
    rows = [asked]
    for row in front:
        if row.cost() < best.cost() and row.step.tensors < asked.step.tensors:
            rows.append(row)
    if best.step.tensors < asked.step.tensors:
        rows.append(best)
    if best.step.limited <= budget:
        end = f"  (fits{best.reserves})"
    else:
        end = f"\nnone of these fits; the smallest peak is {mib(best.step.tensors)} MiB{best.reserves}"
    lines = [f"{problem}; {HEAD}", *_lines(asked, rows)]
    raise UserError("\n".join(lines) + end)


def _lines(asked: Candidate, rows: Iterable[Candidate]) -> Iterator[str]:
    """Yield one line per candidate, under HEAD."""
    for row in rows:
        saves = ""
        changes = "as asked"
        if row is not asked:
            saves = mib(asked.step.tensors - row.step.tensors)
            changes = f"{row.changes + ':':<12} {' '.join(row.overrides)}"
        yield f"  {mib(row.step.tensors):>10} {saves:>10} {row.step_recompute_fraction:>10.0%}  {changes}"


def oom_suggestions(config: Config, model_config: Model, seconds: float = PATIENCE) -> Iterator[str]:
    """Yield lines on what would need less; first what a resumed run may change.

    The budget goes: it was too high for `recompute=auto`. The search ends after `seconds`, but for the step that it is
    at.
    """
    until = time.monotonic() + seconds
    until_new = until - seconds / 2  # what a resumed run may change leaves as much time for the rest
    asked = simulated(Candidate((), "nothing", config, model_config))
    no_budget = () if config.budget is None else ("budget=null",)
    free = asked._replace(overrides=no_budget, config=replace(config, budget=None))
    if config.recompute == "auto":
        free = free._replace(config=replace(free.config, recompute="tiles"), overrides=(*no_budget, "recompute=tiles"))
    fixed = options_with("fixed").keys()
    resumable = [free]
    others: list[Candidate] = []
    for way in sorted(ways(free), key=lambda way: (CHANGES[way.changes], -least_share(free, way))):
        is_fixed = not fixed.isdisjoint(word.partition("=")[0] for word in way.overrides)
        (others if is_fixed else resumable).append(way)
    rows = [asked, *_lower(track(resumable, "memory options", len(resumable)), asked.step.tensors, until_new)]
    yield from HEAD.splitlines()
    yield from _lines(asked, rows)
    new = list(_lower(others, rows[-1].step.tensors, until, SUGGESTIONS_SHOWN))
    if len(new) < SUGGESTIONS_SHOWN:
        lowest = [*rows, *new][-1]
        smaller = halves(lowest)
        new += _lower(smaller, lowest.step.tensors, until, SUGGESTIONS_SHOWN - len(new))
    if new:
        yield "in a new run, because a resumed one cannot change these:"
        yield from _lines(asked, new)
    if time.monotonic() > until:
        yield f"searched for {seconds:.0f} s; more: python -m unet3d memory fit ... budget=SIZE"


def _lower(candidates: Iterable[Candidate], size: int, until: float, most: int | None = None) -> Iterator[Candidate]:
    """Yield candidates lower than a size (bytes) and those before, simulated; at most so many, up to a time."""
    found = 0
    for candidate in candidates:
        if time.monotonic() > until or found == most:
            return
        with suppress(UserError):
            row = simulated(candidate)
            if row.step.tensors < size:
                size = row.step.tensors
                found += 1
                yield row


def oom_moment(ledger: Ledger) -> Iterator[str]:
    """Yield when memory ran out, and the largest groups of tensors then.

    Call it before the frames of the error are cleared.
    """
    moment = len(ledger.events)
    steps_done = sum(name == "end" for _, name in ledger.marks)
    _, phase = ledger.marks[-1]
    if phase == "end":  # the ledger has stopped: later steps repeat the first ones
        moment = ledger.peak_moment()
        peak = breakdown.describe(ledger, moment)["words"]
        yield f"not in the first {steps_done} steps, whose peak was in {peak}; held then:"
    else:
        place = "before" if phase == "before" else f"in {phase} of"
        yield f"{place} step {steps_done + 1}, {mib(ledger.alive_bytes()[moment])} MiB of tensors alive:"
    for group in breakdown.held(ledger, moment)[:GROUPS_SHOWN]:
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
