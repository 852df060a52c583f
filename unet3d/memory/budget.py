"""The search for what fits a memory budget: for `budget=`, for `memory fit`, and for a run that ran out of memory."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import inf
from typing import Any, NamedTuple

from unet3d.base.errors import UserError
from unet3d.base.progress import track
from unet3d.base.types import mib
from unet3d.config.schema import Config, Model
from unet3d.memory.checkpoint_plan import SLACK
from unet3d.memory.peak import step_peak
from unet3d.memory.recompute_plan import estimated_step
from unet3d.memory.simulate import memoized
from unet3d.memory.stage_profile import estimated_peak, forward_recompute_fraction, partitions, profile_stages
from unet3d.memory.technique import choose_technique
from unet3d.memory.variants import (
    cheaper_activation,
    depends_on_batch,
    is_allowed,
    list_override,
    refuse_step,
    replaced,
    resized,
    width_overrides,
)
from unet3d.recomputing.plans import Technique

PASSES = 3  # forward passes in a step's FLOPs: backward counts as two
PLANS = ("lean", "tiles")  # of recompute, that are tried
WITH_BUDGET = ("auto",)  # the same, where a schedule may be chosen for a budget
SMALLEST = 8  # channels of the narrowest level, and voxels of a patch's side, that are still suggested
CHANGES = {"nothing": 0, "rounding": 0, "statistics": 1, "the network": 2, "the patch": 3}  # in the result, by rank


class Candidate(NamedTuple):
    """A way to take the step: what it changes, and what it needs."""

    overrides: tuple[str, ...]  # to add to the command line
    changes: str  # in the result, a key of CHANGES
    config: Config
    model: Model
    peak_bytes: int = 0
    step_recompute_fraction: float = 0  # convolution FLOPs computed twice, as a share of a step's
    segments: int = 1
    is_simulated: bool = True  # else the peak is estimated, see `stage_profile.estimated_peak`
    reserved_bytes: int = 0  # by CUDA's allocator; 0 on the CPU, and where it is not known

    @property
    def occupied_bytes(self) -> int:
        """Return the bytes that a budget limits: tensors on the CPU, what the allocator reserves on CUDA."""
        return max(self.peak_bytes, self.reserved_bytes)

    @property
    def reserves(self) -> str:
        """Return words to add to the peak: what the allocator reserves for it; "" on the CPU."""
        if not self.reserved_bytes:
            return ""
        return f", reserves {mib(self.reserved_bytes)} MiB"

    def cost(self) -> tuple[int, float, int, int]:
        """Return the order of preference: the same result, then less recomputation, then fewer overrides."""
        return CHANGES[self.changes], self.step_recompute_fraction, len(self.overrides), self.peak_bytes


@memoized
def simulated(candidate: Candidate) -> Candidate:
    """Return the candidate as a run takes it: with the segments that it chooses, and the peak of its second step."""
    config = candidate.config
    technique = choose_technique(config, candidate.model)
    peak = step_peak(config, candidate.model, technique)
    return candidate._replace(
        peak_bytes=peak.peak_bytes,
        reserved_bytes=peak.reserved_bytes,
        step_recompute_fraction=technique.forward_recompute_fraction / PASSES,
        segments=max(1, len(technique.segment_starts)),
        is_simulated=True,
    )


def peaks_without(config: Config, model_config: Model, technique: Technique) -> dict[str, int]:
    """Return the peak of the same step without each memory option that it uses, in bytes, by its override.

    With `recompute=auto` it is that option alone: another step would follow another schedule.
    """
    peaks = {}
    parts = config.accumulate
    has_program = technique.program is not None
    is_comparable = not has_program or config.recompute != "auto"
    if config.amp and is_comparable:
        peaks["amp=true"] = _peak_alike(technique, replace(config, amp=False), model_config)
    if parts > 1 and is_comparable:
        together = replace(config, batch=config.batch * parts, accumulate=1)
        peaks[f"accumulate={parts}"] = _peak_alike(technique, together, model_config)
    plain = replace(config, recompute="none", ckpt=0)
    if technique.segment_starts:
        peaks[f"ckpt={config.ckpt}"] = step_peak(plain, model_config).peak_bytes
    if has_program:
        peaks[f"recompute={config.recompute}"] = step_peak(plain, model_config).peak_bytes
    return peaks


def _peak_alike(technique: Technique, config: Config, model_config: Model) -> int:
    """Return the peak of a config with the same segments, or a program of the same plan for its own maps."""
    if technique.program is not None:
        technique = choose_technique(config, model_config)
    return step_peak(config, model_config, technique).peak_bytes


def single_techniques(asked: Candidate) -> list[Candidate]:
    """Return the step with each further memory option alone, of those that change rounding at most."""
    config = asked.config
    changed = [("amp=true", replace(config, amp=True))]
    if not config.ckpt and config.recompute == "none":
        changed.append(("ckpt=2", replace(config, ckpt=2)))
        for plan in PLANS:
            changed.append((f"recompute={plan}", replace(config, recompute=plan)))
    new = [(word, way) for word, way in changed if way != config and is_allowed(way, asked.model)]
    candidates = []
    for word, way in track(new, "memory options", len(new)):
        changes = "nothing" if word == "ckpt=2" else "rounding"
        with suppress(UserError):  # a user's network that is no sequence of stages
            candidates.append(simulated(Candidate((word,), changes, way, asked.model)))
    return candidates


def search(asked: Candidate, enough: int = 0, until: float = inf) -> list[Candidate]:
    """Return ways to take the step, the cheapest first.

    They are mixed precision x batch in parts x (recompute, or thriftier operations x segments). Peaks of recompute and
    segments are estimated. Once one is at most `enough` bytes, what can only cost more is left out; so is what comes
    after the time `until`, of `time.monotonic`.
    """
    candidates: list[Candidate] = []
    lowest_cost: tuple[int, float] | None = None  # of the candidates that are small enough
    ways = sorted(_unsegmented(asked), key=_least_cost)
    for way in track(ways, "trying memory options", len(ways)):
        if lowest_cost is not None and lowest_cost < _least_cost(way):
            break
        if time.monotonic() > until:
            break
        is_by_program = way.config.recompute != "none"
        added = list(_by_program(way) if is_by_program else _in_segments(way, asked.config.ckpt))
        candidates += added
        costs = [candidate.cost()[:2] for candidate in added if candidate.occupied_bytes <= enough]
        if lowest_cost is not None:
            costs.append(lowest_cost)
        lowest_cost = min(costs, default=None)
    return sorted(candidates, key=Candidate.cost)


def _by_program(way: Candidate) -> Iterator[Candidate]:
    """Yield the way with its estimated peak; nothing where the network cannot be traced."""
    with suppress(UserError):
        peak, fraction = estimated_step(way.config, way.model)
        yield way._replace(peak_bytes=peak, step_recompute_fraction=fraction / PASSES, is_simulated=False)


def _in_segments(way: Candidate, asked_ckpt: Any) -> Iterator[Candidate]:
    """Yield the way without checkpointing, and with each split into segments."""
    profile = profile_stages(way.config, way.model)
    overrides = way.overrides
    if asked_ckpt != 0:
        overrides = (*overrides, "ckpt=0")
    yield way._replace(overrides=overrides, peak_bytes=profile.peak, reserved_bytes=profile.reserved)
    overrides = way.overrides
    if asked_ckpt != "auto":
        overrides = (*overrides, "ckpt=auto")
    stages = len(profile.forward)
    for split in partitions(stages, stages):
        yield way._replace(
            overrides=overrides,
            config=replace(way.config, ckpt="auto"),
            peak_bytes=estimated_peak(profile, split),
            step_recompute_fraction=forward_recompute_fraction(profile, split) / PASSES,
            segments=len(split),
            is_simulated=False,
        )


def _least_cost(way: Candidate) -> tuple[int, float]:
    """Return the least that the first two parts of a way's `cost` can be.

    With least memory, convolutions are computed again, which costs more than 0.
    """
    is_recomputed = way.config.recompute in ("tiles", "auto")
    return CHANGES[way.changes], sys.float_info.min if is_recomputed else 0.0


def _unsegmented(asked: Candidate) -> Iterator[Candidate]:
    """Yield mixed precision x batch in parts x (recompute, or thriftier operations), without checkpointing."""
    config = asked.config
    precisions = sorted({config.amp, True})
    batches = [batch for batch in range(config.batch, 0, -1) if config.batch % batch == 0]
    networks = [("", asked.model), *cheaper_activation(asked.model)]
    for amp, batch in product(precisions, batches):
        parts = config.batch * config.accumulate // batch
        changed = replace(config, amp=amp, batch=batch, accumulate=parts, ckpt=0)
        for override, model in networks:
            yield from _allowed(asked, replace(changed, recompute="none"), model, override)
        plans = PLANS if config.budget is None else (*PLANS, *WITH_BUDGET)
        for plan in plans:
            yield from _allowed(asked, replace(changed, recompute=plan), asked.model, "")


def _allowed(asked: Candidate, changed: Config, model: Model, activation: str) -> Iterator[Candidate]:
    """Yield the changed step with its overrides, if a run of it would start; `activation`: one more override."""
    if not is_allowed(changed, model):
        return
    config = asked.config
    overrides = list(asked.overrides)
    if changed.amp != config.amp:
        overrides.append("amp=true")
    if changed.batch != config.batch:
        overrides += [f"batch={changed.batch}", f"accumulate={changed.accumulate}"]
    if changed.recompute != config.recompute:
        overrides.append(f"recompute={changed.recompute}")
    if changed.recompute != "none" and config.ckpt != 0:
        overrides.append("ckpt=0")
    if activation:
        overrides.append(activation)
    changes = "nothing"
    if (changed.amp, changed.recompute) != (config.amp, config.recompute):
        changes = "rounding"
    if changed.batch != config.batch and depends_on_batch(config, model):
        changes = "statistics"
    yield Candidate(tuple(overrides), changes, changed, model)


def untried(asked: Candidate) -> list[str]:
    """Return why the search leaves out recompute, where a run of it would be refused."""
    reasons = []
    for plan in PLANS:
        try:
            refuse_step(replace(asked.config, model=asked.model, ckpt=0, recompute=plan))
        except UserError as error:
            reasons.append(str(error))
    return reasons


def pareto_front(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return, of candidates by cost, those with a lower peak than all cheaper ones that change the result alike."""
    front: list[Candidate] = []
    for candidate in candidates:
        if not front or candidate.cost()[0] != front[-1].cost()[0] or candidate.peak_bytes < front[-1].peak_bytes:
            front.append(candidate)
    return front


def find_fit(asked: Candidate, budget: int, thorough: bool = True) -> tuple[list[Candidate], Candidate]:
    """Return the pareto_front, and the cheapest that fits the bytes, or that with the smallest peak, simulated.

    On CUDA the bytes are those that the allocator reserves.

    Unless `thorough`, candidates that cost more than what fits may be missing.
    """
    candidates = search(asked, 0 if thorough else budget)
    may_lack = not thorough and any(candidate.occupied_bytes <= budget for candidate in candidates)
    likely = [candidate for candidate in candidates if candidate.peak_bytes <= SLACK * budget]
    in_order = cheapest_of_each(likely)
    for candidate in track(in_order, "options that may fit, at most", len(in_order)):
        best = simulated(candidate)
        if best.occupied_bytes <= budget:
            return pareto_front(candidates), best
        others = [other for other in candidates if other.overrides != best.overrides]
        candidates = sorted([*others, best], key=Candidate.cost)
    if may_lack:  # and no estimate was right
        return find_fit(asked, budget)
    rows = pareto_front(candidates)
    for best in smaller_networks(candidates):
        rows.append(best)
        if best.occupied_bytes <= budget:
            break
    return rows, best


def cheapest_of_each(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return, of candidates by cost, the cheapest with the same overrides, by cost."""
    cheapest = {candidate.overrides: candidate for candidate in reversed(candidates)}
    return sorted(cheapest.values(), key=Candidate.cost)


def smaller_networks(candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yield the lowest peak, then smaller networks and patches, simulated, each with a lower peak than those before."""
    candidate: Candidate | None = min(candidates, key=lambda candidate: candidate.peak_bytes)
    halves = []
    while candidate is not None:
        halves.append(candidate)
        candidate = _halved(candidate)
    lowest = inf
    for half in track(halves, "smaller networks and patches, at most", len(halves)):
        smaller = simulated(half)
        if smaller.peak_bytes < lowest:
            lowest = smaller.peak_bytes
            yield smaller


def _halved(candidate: Candidate) -> Candidate | None:
    """Return it with half the widths, else with half the patch's longest side; None if neither makes a network."""
    config = candidate.config
    model = candidate.model
    narrower = resized(model, lambda level, width: max(1, width // 2))
    if min(model.features, default=0) >= 2 * SMALLEST and is_allowed(config, narrower):
        overrides = replaced(candidate.overrides, width_overrides(narrower))
        return candidate._replace(overrides=overrides, changes="the network", model=narrower)
    patch = list(config.data.patch)
    longest = patch.index(max(patch))
    patch[longest] //= 2
    smaller = replace(config, data=replace(config.data, patch=patch))
    is_fixed = "auto" not in (config.model.kernels, config.model.strides) and model.features  # for any patch
    if not is_fixed or patch[longest] < SMALLEST or not is_allowed(smaller, model):
        return None
    overrides = replaced(candidate.overrides, [list_override("data.patch", patch)])
    return candidate._replace(overrides=overrides, changes="the patch", config=smaller)
