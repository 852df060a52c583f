"""Where to split the stages for activation checkpointing, from one simulated step without it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, combinations, groupby, islice
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unet3d.config import Config, Model, Optim
from unet3d.errors import UserError
from unet3d.memory.analysis import last_step, phase_ends
from unet3d.memory.ledger import Ledger, Site, alive_at, levels, phase_peaks
from unet3d.memory.meter import ENOUGH, STEADY, LedgerMeter
from unet3d.memory.simulate import SegmentStarts, memoized, simulate, step_key
from unet3d.progress import track
from unet3d.types import budget_bytes


@dataclass(frozen=True)
class StageProfile:
    """The last step of a rehearsal without checkpointing, by stage; bytes."""

    peak: int  # most alive
    forward: list[int]  # most alive while stage i runs forward
    backward: list[int]  # most alive while stage i runs backward
    waiting: list[int]  # alive as stage i begins backward, but for what forward began with and stages 0 to i saved
    beyond: int  # most alive in the loss, and in backward outside of all stages
    update: int  # most alive in the optimizer's step and as data arrive
    saved: list[int]  # for backward, by the stages before i
    states: list[frozenset[int]]  # the storages that enter stage i
    sizes: Mapping[int, int]  # bytes of those
    flops: list[int]  # of stage i's convolutions, forward
    later: int  # alive in later steps more than in the first: the optimizer's state


def profile_stages(config: Config, options: Model) -> StageProfile:
    """Rehearse a step without checkpointing and take its profile."""
    return _rehearsed(step_key(config), options)


@memoized
def _rehearsed(config: Config, options: Model) -> StageProfile:
    entered: list[frozenset[int]] = []

    def watch(model: nn.Module, ledger: Ledger) -> None:
        is_plain = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
        stages = list(model.children()) if is_plain else []
        entered.extend([frozenset()] * (len(stages) + 1))
        for number, stage in enumerate(stages):
            stage.register_forward_hook(lambda m, given, made, at=number + 1: note(ledger, at, made))

    def note(ledger: Ledger, at: int, made: Any) -> None:
        entered[at] = frozenset(ledger.index(leaf) for leaf in tree_leaves(made) if isinstance(leaf, Tensor))

    meter = simulate(config, options, (), watch=watch, steps=ENOUGH)
    names = [name for name, _ in meter.model.named_children()][: len(entered) - 1]
    return _profile(meter.ledger, names, entered[:-1])


def _profile(ledger: Ledger, names: list[str], states: list[frozenset[int]]) -> StageProfile:
    spans = {phase: (start, end) for phase, start, end in last_step(ledger)}
    alive, count = levels(ledger), len(names)
    begin, turn = spans["forward"][0], spans["backward"][0]
    forward, backward = [0] * count, [0] * count
    waiting: list[int | None] = [None] * count
    beyond = max(alive[spans["loss"][0] : spans["loss"][1] + 1])
    by = _saved(ledger, names, begin, turn)
    saved = [0, *accumulate(by)]
    for phase in ("forward", "backward"):
        for event in range(*spans[phase]):
            index, change = ledger.events[event]
            stage = _stage(ledger.storages[index].place.module, names)
            if change < 0:
                continue
            if stage is None:
                beyond = max(beyond, alive[event + 1])
            elif phase == "forward":
                forward[stage] = max(forward[stage], alive[event + 1])
            else:
                backward[stage] = max(backward[stage], alive[event + 1])
                if waiting[stage] is None:
                    waiting[stage] = alive[event] - alive[begin] - saved[stage + 1]
    update = max(max(alive[a : b + 1]) for phase, (a, b) in spans.items() if phase in ("step", "data"))
    sizes = {index: ledger.storages[index].bytes for state in states for index in state}
    flops = _flops(ledger, names, begin, spans["forward"][1])
    later = phase_ends(ledger)["data"]
    return StageProfile(
        max(alive),
        forward,
        backward,
        [w or 0 for w in waiting],
        beyond,
        update,
        saved,
        states,
        sizes,
        flops,
        later["steady"] - later["first"],
    )


def _stage(path: str, names: list[str]) -> int | None:
    stage = path.partition(".")[0]
    return names.index(stage) if stage in names else None


def _saved(ledger: Ledger, names: list[str], begin: int, turn: int) -> list[int]:
    """Bytes that each stage made in forward and that live as backward begins."""
    found = [0] * len(names)
    for storage in alive_at(ledger, turn):
        stage = _stage(storage.place.module, names)
        if storage.born >= begin and stage is not None and storage.role is None:
            found[stage] += storage.bytes
    return found


def _flops(ledger: Ledger, names: list[str], begin: int, end: int) -> list[int]:
    found = [0] * len(names)
    for site in ledger.sites:
        stage = _stage(site.module, names)
        if begin <= site.event <= end and stage is not None and site.operation == "convolution":
            found[stage] += flops(site)
    return found


def flops(site: Site) -> int:
    """Of a convolution: two for each product that is added up."""
    (image, *_), (weight, *_) = site.arguments[:2]
    stride, padding, dilation, transposed = site.arguments[3:7]
    places: list[int] = list(image[2:])  # of a transposed convolution: each voxel of the input meets the whole kernel
    if not transposed:
        axes = zip(image[2:], weight[2:], stride, padding, dilation, strict=True)
        places = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes]
    return 2 * int(image[0]) * prod(places) * prod(map(int, weight))


TRIED = 3  # cuts rehearsed for a budget, of those that recompute as much


SLACK = 1.11  # the profile is up to that much above the rehearsed peak


class Segments(NamedTuple):
    """The first stages of segments, and the convolution FLOPs done again as a share of a forward pass."""

    starts: SegmentStarts
    again: float


def choose_segments(config: Config, options: Model) -> Segments:
    """The segments that `ckpt` asks for; none without checkpointing.

    Two to `ckpt` segments with the lowest peak; `auto`: any number, none where that saves nothing, and with a `budget`
    the least recomputation.
    """
    if not config.ckpt:
        return Segments((), 0)
    found, auto = profile_stages(config, options), config.ckpt == "auto"
    least, most = (1, len(found.forward)) if auto else (2, config.ckpt)
    if len(found.forward) < max(2, most):
        stages = f"this network has {len(found.forward)}"
        raise UserError(f"ckpt={config.ckpt} groups the stages of an nn.Sequential; {stages}; use fewer, or 0 (off)")
    budget = budget_bytes(config.budget) if auto and config.budget is not None else None
    starts = best_starts(found, least, most, lambda starts: simulated_peak(config, options, starts, found), budget)
    return Segments(starts, recompute_fraction(found, starts))


def simulated_peak(config: Config, options: Model, starts: SegmentStarts, found: StageProfile) -> int:
    """Of later steps, told from a rehearsal of the first; no cut lowers the peak of the update.

    The first step is simulated with a plain optimizer: which one it is changes the update alone.
    """
    plain = Optim(name="sgd", momentum=0, weight_decay=0, clip=None)
    return max(found.update, _first_step(replace(step_key(config), optim=plain), options, starts) + found.later)


@memoized
def _first_step(config: Config, options: Model, starts: SegmentStarts) -> int:
    """Most bytes of a first step but for its update."""
    peaks = phase_peaks(simulate(config, options, starts, steps=1).ledger)
    return max(peak for phase, peak in peaks if phase in ("forward", "loss", "backward"))


def best_starts(
    profile: StageProfile, least: int, most: int, measure: Callable[[SegmentStarts], int], budget: int | None = None
) -> SegmentStarts:
    """The cut into `least` to `most` segments with the lowest peak, () for one; if some fit a budget, of those the
    least recomputed, or no cut at all.

    `measure` tells a cut's peak by rehearsing it. The candidates for more segments include those for fewer, so more
    segments never need more memory: where a further cut does not help, fewer are made.
    """
    if budget is not None:
        if estimated_peak(profile, (0,)) <= budget:
            return ()
        tried = list(likely(profile, most, budget))
        for starts in track(tried, "cuts that may fit the budget", len(tried)):
            if measure(starts) <= budget:
                return starts
    found = candidates(profile, least, most)
    starts = found[0]
    if len(found) > 1:
        peaks = {starts: measure(starts) for starts in track(found, "cuts into segments", len(found))}
        starts = min(found, key=lambda starts: (peaks[starts], recompute_fraction(profile, starts)))
    return starts if len(starts) > 1 else ()


def likely(profile: StageProfile, most: int, budget: int) -> Iterator[SegmentStarts]:
    """Cuts that may fit, the least recomputed first; of those that recompute alike, the few with the lowest peaks."""
    every = [
        starts for starts in partitions(len(profile.forward), most) if estimated_peak(profile, starts) <= SLACK * budget
    ]
    again = partial(recompute_fraction, profile)
    for _, alike in groupby(
        sorted(every, key=lambda starts: (again(starts), estimated_peak(profile, starts))), key=again
    ):
        yield from islice(alike, TRIED)


def candidates(profile: StageProfile, least: int, most: int) -> list[SegmentStarts]:
    """For each number of segments, the cut with the lowest peak as far as the profile tells."""
    return [
        min(
            partitions(len(profile.forward), segments, segments),
            key=lambda starts: (estimated_peak(profile, starts), recompute_fraction(profile, starts)),
        )
        for segments in range(least, most + 1)
    ]


def estimated_peak(profile: StageProfile, starts: SegmentStarts) -> int:
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


def recompute_fraction(profile: StageProfile, starts: SegmentStarts) -> float:
    """Convolution FLOPs that are done again, as a share of a forward pass."""
    return sum(profile.flops[: starts[-1]]) / sum(profile.flops) if starts else 0


def partitions(count: int, most: int, least: int = 2) -> Iterator[SegmentStarts]:
    """All ways to cut so many stages into `least` to `most` segments."""
    for segments in range(least, most + 1):
        for places in combinations(range(1, count), segments - 1):
            yield (0, *places)


def predict(config: Config, options: Model) -> dict[str, Any]:
    """`peak_bytes`, `phases`, `categories` and more in bytes as `Meter.summary` gives them, and `parameters`."""
    meter = predicted(config, options)
    return {**meter.summary(), "parameters": sum(p.numel() for p in meter.model.parameters())}


def predicted(config: Config, options: Model, dtype: torch.dtype = torch.float32, steps: int = STEADY) -> LedgerMeter:
    """The meter that holds the ledger of the rehearsed steps. `dtype` is that of weights and images."""
    return simulate(config, options, choose_segments(config, options).starts, dtype, steps=steps)
