"""Where to cut the sequence of stages for checkpointing: what each cut costs, told from one step without any.

A checkpointed segment keeps the state that enters it and makes the rest again. So while a stage goes backward, what
lives is what lives there without checkpointing, less all that the stages before its segment saved, plus the states that
entered this segment and those before it. The same holds while a segment is made again, on top of what waits for it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, groupby, islice
from typing import NamedTuple

from unet3d.checks import budget_bytes, stages
from unet3d.config import Config, Model, Optim
from unet3d.memory.ledger import phase_peaks
from unet3d.memory.once import once
from unet3d.memory.profile import Profile, profile
from unet3d.memory.rehearsal import Starts, rehearse, step_of
from unet3d.progress import track

TRIED = 3  # cuts rehearsed for a budget, of those that recompute as much
SLACK = 1.11  # the profile is up to that much above the rehearsed peak


class Cut(NamedTuple):
    """The first stages of segments, and the convolution FLOPs done again as a share of a forward pass."""

    starts: Starts
    again: float


def cut(config: Config, options: Model) -> Cut:
    """The segments that `ckpt` asks for; none without checkpointing.

    Two to `ckpt` segments with the lowest peak; `auto`: any number, none where that saves nothing, and with a `budget`
    the least recomputation.
    """
    if not config.ckpt:
        return Cut((), 0)
    found, auto = profile(config, options), config.ckpt == "auto"
    least, most = (1, stages(options)) if auto else (2, config.ckpt)
    budget = budget_bytes(config.budget) if auto and config.budget is not None else None
    starts = choose(found, least, most, lambda starts: _peak(config, options, starts, found), budget)
    return Cut(starts, recomputed(found, starts))


def _peak(config: Config, options: Model, starts: Starts, found: Profile) -> int:
    """Of later steps, told from a rehearsal of the first; no cut lowers the peak of the update.

    The first step is simulated with a plain optimizer: which one it is changes the update alone.
    """
    plain = Optim(name="sgd", momentum=0, weight_decay=0, clip=None)
    return max(found.update, _first_step(replace(step_of(config), optim=plain), options, starts) + found.later)


@once
def _first_step(config: Config, options: Model, starts: Starts) -> int:
    """Most bytes of a first step but for its update."""
    peaks = phase_peaks(rehearse(config, options, starts, steps=1).ledger)
    return max(peak for phase, peak in peaks if phase in ("forward", "loss", "backward"))


def choose(
    profile: Profile, least: int, most: int, measure: Callable[[Starts], int], budget: int | None = None
) -> Starts:
    """The cut into `least` to `most` segments with the lowest peak, () for one; if some fit a budget, of those the
    least recomputed, or no cut at all.

    `measure` tells a cut's peak by rehearsing it. The candidates for more segments include those for fewer, so more
    segments never need more memory: where a further cut does not help, fewer are made.
    """
    if budget is not None:
        if peak(profile, (0,)) <= budget:
            return ()
        tried = list(likely(profile, most, budget))
        for starts in track(tried, "cuts that may fit the budget", len(tried)):
            if measure(starts) <= budget:
                return starts
    found = candidates(profile, least, most)
    starts = found[0]
    if len(found) > 1:
        peaks = {starts: measure(starts) for starts in track(found, "cuts into segments", len(found))}
        starts = min(found, key=lambda starts: (peaks[starts], recomputed(profile, starts)))
    return starts if len(starts) > 1 else ()


def likely(profile: Profile, most: int, budget: int) -> Iterator[Starts]:
    """Cuts that may fit, the least recomputed first; of those that recompute alike, the few with the lowest peaks."""
    every = [starts for starts in cuts(len(profile.forward), most) if peak(profile, starts) <= SLACK * budget]
    again = partial(recomputed, profile)
    for _, alike in groupby(sorted(every, key=lambda starts: (again(starts), peak(profile, starts))), key=again):
        yield from islice(alike, TRIED)


def candidates(profile: Profile, least: int, most: int) -> list[Starts]:
    """For each number of segments, the cut with the lowest peak as far as the profile tells."""
    return [
        min(
            cuts(len(profile.forward), segments, segments),
            key=lambda starts: (peak(profile, starts), recomputed(profile, starts)),
        )
        for segments in range(least, most + 1)
    ]


def peak(profile: Profile, starts: Starts) -> int:
    """Most bytes of a step that is cut there, near enough to tell a good cut from a bad one.

    A recomputation stops as soon as it has what it needs, and autocast keeps the weights it cast through all of a
    forward pass: the profile knows neither. Off by -2 to +11 % of a rehearsal in `tests/memory/test_segments.py`.
    """
    count = len(profile.forward)
    kept: set[int] = set()
    found = profile.update
    for a, b in zip(starts, [*starts[1:], count], strict=True):
        kept |= profile.states[a]
        less = profile.saved[a] - sum(profile.sizes[index] for index in kept)
        again = profile.waiting[b - 1] if b < count else 0
        rising = max(profile.forward[a:b]) + again
        found = max(found, rising - less, max(profile.backward[a:b]) - less)
        if b == count:
            found = max(found, profile.beyond - less)
    return found


def recomputed(profile: Profile, starts: Starts) -> float:
    """Convolution FLOPs that are done again, as a share of a forward pass."""
    return sum(profile.flops[: starts[-1]]) / sum(profile.flops) if starts else 0


def cuts(count: int, most: int, least: int = 2) -> Iterator[Starts]:
    """All ways to cut so many stages into `least` to `most` segments."""
    for segments in range(least, most + 1):
        for places in combinations(range(1, count), segments - 1):
            yield (0, *places)
