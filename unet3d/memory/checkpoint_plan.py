"""The split of a network into checkpointed segments.

All splits are estimated from one simulated step without checkpointing; where several are likely, these are simulated.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby, islice

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.base.progress import track
from unet3d.base.types import budget_bytes
from unet3d.config.schema import Config, Model
from unet3d.memory.peak import PLAIN_SGD, step_peak
from unet3d.memory.simulate import memoized, simulate, step_key
from unet3d.memory.stage_profile import (
    SegmentStarts,
    StageProfile,
    estimated_peak,
    forward_recompute_fraction,
    partitions,
    profile_stages,
)
from unet3d.recomputing.plans import PLAIN, Technique

SLACK = 1.11  # an estimated peak is at most this many times the simulated one
TRIED = 3  # splits simulated for a budget, of those that recompute as much

Measure = Callable[[SegmentStarts], int]


def choose_segments(config: Config, model_config: Model) -> Technique:
    """Return two to `ckpt` segments with the lowest peak.

    `ckpt=auto`: any number or none; with a `budget`, what fits and recomputes least. Raises UserError where the network
    has fewer stages.
    """
    if not config.ckpt:
        return PLAIN
    profile = profile_stages(config, model_config)
    stages = len(profile.forward)
    is_auto = config.ckpt == "auto"
    least = 1 if is_auto else 2
    most = stages if is_auto else config.ckpt
    if stages < max(2, most):
        raise UserError(
            f"ckpt={config.ckpt} groups the stages of an nn.Sequential; this network has {stages}; "
            "use fewer, or 0 (off)"
        )
    budget = None
    if is_auto and config.budget is not None:
        budget = budget_bytes(config.budget)
    measure: Measure = partial(simulated_steady_peak, config, model_config, profile)
    if budget is not None and build.device_type(config) == "cuda":  # it is of what the allocator reserves
        measure = partial(_reserved, config, model_config)
    segment_starts = best_segment_starts(profile, least, most, measure, budget)
    return Technique(segment_starts, forward_recompute_fraction=forward_recompute_fraction(profile, segment_starts))


def best_segment_starts(
    profile: StageProfile,
    least: int,
    most: int,
    measure: Measure,
    budget: int | None = None,
) -> SegmentStarts:
    """Return the split into `least` to `most` segments with the lowest peak, () for one.

    For a `budget` in bytes, return () where the step without checkpointing fits, else the split that fits and
    recomputes least; where none fits, the lowest peak. `measure` simulates what a split needs: its peak or, for a
    budget on CUDA, what it reserves. Where another segment does not help there are fewer: more never need more.
    """
    if budget is not None:
        if max(profile.peak, profile.reserved) <= budget:
            return ()
        likely = list(_likely(profile, most, budget))
        for choice in track(likely, "segment choices that may fit", len(likely)):
            if measure(choice) <= budget:
                return choice
    stages = len(profile.forward)
    candidates = []
    for count in range(least, most + 1):
        splits = partitions(stages, count, count)
        candidates.append(min(splits, key=partial(_estimated_cost, profile)))
    best = candidates[0]
    if len(candidates) > 1:
        peaks = {choice: measure(choice) for choice in track(candidates, "segment choices", len(candidates))}
        best = min(candidates, key=lambda choice: (peaks[choice], forward_recompute_fraction(profile, choice)))
    return best if len(best) > 1 else ()


def _estimated_cost(profile: StageProfile, segment_starts: SegmentStarts) -> tuple[int, float]:
    return estimated_peak(profile, segment_starts), forward_recompute_fraction(profile, segment_starts)


def _likely(profile: StageProfile, most: int, budget: int) -> Iterator[SegmentStarts]:
    """Yield splits that may fit, the least recomputed first; of equal ones, the few with the lowest peaks."""
    fraction = partial(forward_recompute_fraction, profile)
    splits = partitions(len(profile.forward), most)
    in_order = sorted(splits, key=lambda choice: _estimated_cost(profile, choice)[::-1])
    for _, equals in groupby(in_order, key=fraction):
        fitting = (choice for choice in equals if estimated_peak(profile, choice) <= SLACK * budget)
        yield from islice(fitting, TRIED)


def simulated_steady_peak(
    config: Config,
    model_config: Model,
    profile: StageProfile,
    segment_starts: SegmentStarts,
) -> int:
    """Simulate one SGD step; return the peak of later steps (bytes). The optimizer changes the update phase alone."""
    first = replace(step_key(config), optim=PLAIN_SGD)
    peak = _first_step_peak(first, model_config, segment_starts)
    return max(profile.update, peak + profile.optimizer_state)


@memoized
def _first_step_peak(config: Config, model_config: Model, segment_starts: SegmentStarts) -> int:
    """Return the most bytes of a first step without its update."""
    ledger = simulate(config, model_config, Technique(segment_starts), steps=1).ledger
    peaks = [peak for phase, peak in ledger.phase_peaks() if phase in ("forward", "loss", "backward")]
    return max(peaks)


def _reserved(config: Config, model_config: Model, segment_starts: SegmentStarts) -> int:
    return step_peak(config, model_config, Technique(segment_starts)).reserved_bytes
