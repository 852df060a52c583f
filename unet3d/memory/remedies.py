"""What would need less memory: for `memory fit`, for a step that does not fit, and for a run that ran out of memory.

Other ways to take a config's step are memory options, smaller networks and patches: what each changes and needs.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, product
from typing import NoReturn

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.base.fit import fit
from unet3d.base.progress import counting, track
from unet3d.base.types import budget_bytes, mib
from unet3d.config.rules import check, check_ranks
from unet3d.config.schema import LOSSES, Config, Model, options_with
from unet3d.memory import breakdown
from unet3d.memory.ledger import Ledger
from unet3d.memory.meter import Peak
from unet3d.memory.tables import NAMES
from unet3d.memory.technique import choose_technique, step_peak
from unet3d.recomputing.program import Technique

PASSES = 3  # forward passes in a step's FLOPs: backward counts as two
SEGMENTS = (2, 3, 4)  # Values of ckpt that are tried.
PLANS = ("lean", "tiles")  # Plans of recompute that are tried.
WITH_BUDGET = ("auto",)  # Further ones where a schedule may be chosen for a budget.
SMALLEST = 8  # channels of the narrowest level, and voxels of a patch's side, that are still suggested
CHANGES = {"nothing": 0, "rounding": 0, "statistics": 1, "the network": 2, "the patch": 3}  # Ranks of what changes.
# The least share of the plain step's bytes that known networks need with each option; that of ckpt is divided by its
# segments. What cannot fit by these is not simulated at first.
SHARES = {"amp": 0.45, "activation": 0.5, "ckpt": 0.9, "lean": 0.25, "tiles": 0.1, "auto": 0.1}
GROUPS_SHOWN = 5  # Groups of tensors shown after out of memory.
SUGGESTIONS_SHOWN = 4  # Ways shown for a new run after out of memory.
PATIENCE = 20.0  # seconds of search after out of memory
HEAD = f"what would need less (predicted)\n{'peak MiB':>12} {'saves MiB':>10} {'more FLOPs':>10}  changes"


@dataclass(frozen=True)
class Candidate:
    """A way to take the step: what it changes, and what it needs, which is simulated when it is first asked for.

    Raises UserError then where its network does not have the technique.
    """

    config: Config
    model: Model
    overrides: tuple[str, ...] = ()  # Words to add to the command line.
    changes: str = "nothing"  # What changes in the result, a key of CHANGES.

    @cached_property
    def technique(self) -> Technique:
        """Return how the step saves memory."""
        return choose_technique(self.config, self.model)

    @cached_property
    def step(self) -> Peak:
        """Return the most bytes at once."""
        return step_peak(self.config, self.model, self.technique)

    @property
    def repeated(self) -> float:
        """Return the convolution FLOPs that are computed twice, as a share of a step's."""
        return self.technique.forward_recompute_fraction / PASSES

    @property
    def reserves(self) -> str:
        """Return words to add to the peak: what the allocator reserves for it; "" on the CPU."""
        return f", reserves {mib(self.step.reserved)} MiB" if self.step.reserved else ""

    def cost(self) -> tuple[int, float, int, int]:
        """Return the order of preference: the same result, then less recomputation, then fewer overrides."""
        return CHANGES[self.changes], self.repeated, len(self.overrides), self.step.tensors


def ways(asked: Candidate) -> Iterator[Candidate]:
    """Yield mixed precision x batch in parts x (recompute, or thriftier operations x segments), as a run would start.

    What a candidate needs, and what it recomputes, is left open.
    """
    config = asked.config
    precisions = sorted({config.amp, True})
    batches = [batch for batch in range(config.batch, 0, -1) if config.batch % batch == 0]
    plans = PLANS if config.budget is None else (*PLANS, *WITH_BUDGET)
    networks = [("", asked.model), *cheaper_activation(asked.model)]
    for amp, batch in product(precisions, batches):
        parts = config.batch * config.accumulate // batch
        plain = replace(config, amp=amp, batch=batch, accumulate=parts, ckpt=0, recompute="none")
        for (override, model), ckpt in product(networks, (0, *SEGMENTS)):
            yield from _allowed(asked, replace(plain, ckpt=ckpt), model, override)
        for plan in plans:
            yield from _allowed(asked, replace(plain, recompute=plan), asked.model)


def _allowed(asked: Candidate, changed: Config, model: Model, activation: str = "") -> Iterator[Candidate]:
    """Yield the changed step with its overrides, if a run of it would start; `activation`: one more override."""
    if not is_allowed(changed, model):
        return
    config = asked.config
    added = []
    for name in ("amp", "batch", "accumulate", "recompute", "ckpt"):
        if getattr(changed, name) != getattr(config, name):
            added.append(f"{name}={getattr(changed, name)}".lower())
    if activation:
        added.append(activation)
    changes = "nothing"
    if (changed.amp, changed.recompute) != (config.amp, config.recompute):
        changes = "rounding"
    if changed.batch != config.batch and depends_on_batch(config, model):
        changes = "statistics"
    yield Candidate(changed, model, replaced(asked.overrides, added), changes)


def least_share(asked: Candidate, way: Candidate) -> float:
    """Return the share of the bytes of the plain step that is asked for, which another way needs at least."""
    share = way.config.batch / asked.config.batch
    if way.config.amp != asked.config.amp:
        share *= SHARES["amp"]
    if way.model != asked.model:
        share *= SHARES["activation"]
    if way.config.ckpt:
        share *= SHARES["ckpt"] / way.config.ckpt
    return share * SHARES.get(way.config.recompute, 1.0)


def untried(asked: Candidate) -> list[str]:
    """Return why recompute is no way, where a run of it would be refused."""
    reasons = []
    for plan in PLANS:
        try:
            refuse_step(replace(asked.config, model=asked.model, ckpt=0, recompute=plan))
        except UserError as error:
            reasons.append(str(error))
    return reasons


def single_techniques(asked: Candidate) -> list[Candidate]:
    """Return the step with each further memory option alone, of those that change rounding at most."""
    config = asked.config
    changed = [] if config.amp else [replace(config, amp=True)]
    if not config.ckpt and config.recompute == "none":
        changed += [replace(config, ckpt=2), *(replace(config, recompute=plan) for plan in PLANS)]
    new = [way for other in changed for way in _allowed(asked, other, asked.model)]
    candidates = []
    for way in track(new, "memory options", len(new)):
        with suppress(UserError):  # a user's network that is no sequence of stages
            _ = way.step  # simulates
            candidates.append(way)
    return candidates


def halves(candidate: Candidate) -> Iterator[Candidate]:
    """Yield the candidate with half the widths, again and again, then with half the patch's longest side.

    It ends where neither makes a network.
    """
    while True:
        config = candidate.config
        model = candidate.model
        narrower = resized(model, lambda level, width: max(1, width // 2))
        if min(model.features, default=0) >= 2 * SMALLEST and is_allowed(config, narrower):
            overrides = replaced(candidate.overrides, width_overrides(narrower))
            candidate = Candidate(config, narrower, overrides, "the network")
        else:
            patch = list(config.data.patch)
            longest = patch.index(max(patch))
            patch[longest] //= 2
            smaller = replace(config, data=replace(config.data, patch=patch))
            is_fixed = "auto" not in (config.model.kernels, config.model.strides) and model.features
            if not is_fixed or patch[longest] < SMALLEST or not is_allowed(smaller, model):
                return
            overrides = replaced(candidate.overrides, [list_override("data.patch", patch)])
            candidate = Candidate(smaller, model, overrides, "the patch")
        yield candidate


def replaced(overrides: Iterable[str], added: Sequence[str]) -> tuple[str, ...]:
    """Return overrides with `added`, without others of the same options."""
    names = {override.partition("=")[0] for override in added}
    others = [override for override in overrides if override.partition("=")[0] not in names]
    return (*others, *added)


def resized(model_config: Model, change: Callable[[int, int], int]) -> Model:
    """Return the network with other widths: `change` is given a level and its width, of encoder and decoder."""
    features = [change(level, width) for level, width in enumerate(model_config.features)]
    decoder = model_config.decoder
    if decoder:
        decoder = [change(level, width) for level, width in enumerate(decoder)]
    return replace(model_config, features=features, decoder=decoder)


def width_overrides(model_config: Model) -> list[str]:
    """Return the overrides that set a network's widths."""
    widths = {"model.features": model_config.features, "model.decoder": model_config.decoder}
    return [list_override(name, values) for name, values in widths.items() if values is not None]


def list_override(name: str, values: Sequence[int]) -> str:
    """Return `data.patch=[96,96,32]`."""
    return f"{name}=[{','.join(map(str, values))}]"


def is_allowed(config: Config, model_config: Model) -> bool:
    """Return whether a run of this network would start."""
    with suppress(UserError):
        refuse_step(replace(config, model=model_config))
        return True
    return False


def refuse_step(config: Config) -> None:
    """Raise UserError where a run of this config would not start; its paths need not exist."""
    check(config, here=False)
    check_ranks(config)


def depends_on_batch(config: Config, model_config: Model) -> bool:
    """Return whether a norm, Dice or mean is over the whole batch, so that parts change it.

    Of a user's own network it is assumed.
    """
    norm = model_config.norm if model_config.features else "batch"
    loss = config.loss
    return norm.startswith("batch") or loss.batch_dice or loss.path is not None or not LOSSES[loss.name].get("by_image")


def cheaper_activation(model_config: Model) -> list[tuple[str, Model]]:
    """Return the override, if any, that keeps less for backward and computes the same function, and its network."""
    is_in_place = model_config.inplace
    is_instance_norm = model_config.norm == "instance"  # Its output is a view: autograd copies what changes it.
    if model_config.activation == "swish":
        return [("model.activation=swish_lean", replace(model_config, activation="swish_lean"))]
    if is_in_place and is_instance_norm:
        return [("model.inplace=false", replace(model_config, inplace=False))]
    if not is_in_place and not is_instance_norm and model_config.activation == "leaky_relu":
        return [("model.inplace=true", replace(model_config, inplace=True))]
    return []


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
            needed = way.step.limited
            tried.append(way)
            counter.advance()
            return needed

        def thriftiest_fits(amp: bool) -> bool:
            alike = [way for way in all_ways if way.config.amp == amp]
            for way in sorted(alike, key=lambda way: least_share(asked, way)):
                with suppress(UserError):
                    return measure(way) <= budget
            return False

        def attempts() -> Iterator[list[Candidate]]:
            yield from _groups_by_cost(likely)
            if any([thriftiest_fits(amp) for amp in (False, True)]):
                # This network needs a smaller share than known ones, so none of its ways is left out.
                yield from _groups_by_cost(way for way in all_ways if way not in likely)
            yield list(halves(min(tried, key=lambda way: way.step.tensors)))

        for group in attempts():
            if fit(group, measure, budget) is not None:
                return pareto_front(tried), tried[-1]
    return pareto_front(tried), min(tried, key=lambda way: way.step.tensors)


def _groups_by_cost(candidates: Iterable[Candidate]) -> Iterator[list[Candidate]]:
    """Yield the candidates by cost in groups that are priced as they are asked for, what recomputes nothing first.

    Those whose networks do not have the technique are left out.
    """

    def group_of(candidate: Candidate) -> tuple[int, bool]:
        recomputes = bool(candidate.config.ckpt) or candidate.config.recompute != "none"
        return CHANGES[candidate.changes], recomputes

    for _, group in groupby(sorted(candidates, key=group_of), key=group_of):
        costs = []
        for candidate in group:
            with suppress(UserError):
                technique = choose_technique(candidate.config, candidate.model, is_estimate=True)
                costs.append((technique.forward_recompute_fraction, len(candidate.overrides), candidate))
        yield [candidate for *_, candidate in sorted(costs, key=lambda cost: cost[:2])]


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
    rows = [asked, *(row for row in front if row.cost() < best.cost() and row.step.tensors < asked.step.tensors)]
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
        yield f"  {mib(row.step.tensors):>10} {saves:>10} {row.repeated:>10.0%}  {changes}"


def oom_suggestions(config: Config, model_config: Model, seconds: float = PATIENCE) -> Iterator[str]:
    """Yield lines on what would need less; first what a resumed run may change.

    The budget goes: it was too high for `recompute=auto`. The search ends after `seconds`, but for the step that it is
    at.
    """
    until = time.monotonic() + seconds
    until_new = until - seconds / 2  # what a resumed run may change leaves as much time for the rest
    asked = Candidate(config, model_config)
    words = [] if config.budget is None else ["budget=null"]
    plan = config.recompute
    if plan == "auto":
        plan = "tiles"
        words.append("recompute=tiles")
    free = Candidate(replace(config, budget=None, recompute=plan), model_config, tuple(words))
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
    """Yield each candidate that needs less than `size` (bytes) and than those before, until a time; `most` at most."""
    found = 0
    for candidate in candidates:
        if time.monotonic() > until or found == most:
            return
        with suppress(UserError):
            if candidate.step.tensors < size:
                size = candidate.step.tensors
                found += 1
                yield candidate


def oom_moment(ledger: Ledger) -> Iterator[str]:
    """Yield when memory ran out, and the largest groups of tensors then.

    Call it before the frames of the error are cleared.
    """
    moment = len(ledger.events)
    steps_done = sum(name == "end" for _, name in ledger.marks)
    _, phase = ledger.marks[-1]
    if phase == "end":  # the ledger has stopped: later steps repeat the first ones
        moment = breakdown.peak_moment(ledger)
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
