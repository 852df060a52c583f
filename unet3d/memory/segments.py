"""Where to cut the sequence of stages for checkpointing: what each cut costs, told from one step without any.

A checkpointed segment keeps the state that enters it and makes the rest again. So while a stage goes backward, what
lives is what lives there without checkpointing, less all that the stages before its segment saved, plus the states that
entered this segment and those before it. The same holds while a segment is made again, on top of what waits for it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, combinations
from math import prod
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unet3d.checks import budget_bytes, stages
from unet3d.config import Config, Model
from unet3d.memory.explain import last_step, phase_ends
from unet3d.memory.ledger import Ledger, Site, alive_at, levels, phase_peaks
from unet3d.memory.rehearsal import Starts, rehearse

TRIED = 12  # cuts rehearsed for a budget before the one with the lowest peak is taken
SLACK = 1.11  # the profile is up to that much above the rehearsed peak


@dataclass(frozen=True)
class Profile:
    """The last step of a rehearsal without checkpointing, by stage; bytes."""

    forward: list[int]  # most alive while stage i runs forward
    backward: list[int]  # most alive while stage i runs backward
    waiting: list[
        int
    ]  # alive as stage i begins to run backward, but for what was as forward began and what stages 0 to i saved
    beyond: int  # most alive in the loss, and in backward outside of all stages
    update: int  # most alive in the optimizer's step and as data arrive
    saved: list[int]  # for backward, by the stages before i
    states: list[frozenset[int]]  # the storages that enter stage i
    sizes: Mapping[int, int]  # bytes of those
    flops: list[int]  # of stage i's convolutions, forward
    later: int  # alive in later steps more than in the first: the optimizer's state


class Cut(NamedTuple):
    """The first stages of segments, and the convolution FLOPs done again as a share of a forward pass."""

    starts: Starts
    again: float


def cut(config: Config, options: Model) -> Cut:
    """The segments that `ckpt` asks for; none without checkpointing.

    At most `ckpt` segments with the lowest peak; `auto`: any number, and with a `budget` the least recomputation.
    """
    if not config.ckpt:
        return Cut((), 0)
    found = profile(config, options)
    most = stages(options) if config.ckpt == "auto" else config.ckpt
    budget = budget_bytes(config.budget) if config.ckpt == "auto" and config.budget is not None else None
    starts = choose(found, most, lambda starts: _first_step(config, options, starts) + found.later, budget)
    return Cut(starts, recomputed(found, starts))


def _first_step(config: Config, options: Model, starts: Starts) -> int:
    """Most bytes of a first step but for its update, which no cut changes."""
    peaks = phase_peaks(rehearse(config, options, starts, steps=1).ledger)
    return max(peak for phase, peak in peaks if phase in ("forward", "loss", "backward"))


def choose(profile: Profile, most: int, measure: Callable[[Starts], int], budget: int | None = None) -> Starts:
    """The cut into at most so many segments with the lowest peak; if some fit a budget, of those the least recomputed,
    or no cut at all.

    `measure` tells a cut's peak by rehearsing it. The candidates for more segments include those for fewer, so more
    segments never need more memory: where a further cut does not help, fewer are made.
    """
    if budget is not None:
        if peak(profile, (0,)) <= budget:
            return ()
        every = cuts(len(profile.forward), most)
        likely = [starts for starts in every if peak(profile, starts) <= SLACK * budget]
        for starts in sorted(likely, key=lambda starts: (recomputed(profile, starts), peak(profile, starts)))[:TRIED]:
            if measure(starts) <= budget:
                return starts
    return min(candidates(profile, most), key=lambda starts: (measure(starts), recomputed(profile, starts)))


def candidates(profile: Profile, most: int) -> list[Starts]:
    """For each number of segments, the cut with the lowest peak as far as the profile tells."""
    return [
        min(
            cuts(len(profile.forward), segments, segments),
            key=lambda starts: (peak(profile, starts), recomputed(profile, starts)),
        )
        for segments in range(2, most + 1)
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


def profile(config: Config, options: Model) -> Profile:
    """Rehearse a step without checkpointing and take its profile."""
    entered: list[frozenset[int]] = []

    def watch(model: nn.Sequential, ledger: Ledger) -> None:
        entered.extend([frozenset()] * (len(model) + 1))
        for number, stage in enumerate(model):
            stage.register_forward_hook(lambda m, given, made, at=number + 1: note(ledger, at, made))

    def note(ledger: Ledger, at: int, made: Any) -> None:
        entered[at] = frozenset(ledger.index(leaf) for leaf in tree_leaves(made) if isinstance(leaf, Tensor))

    meter = rehearse(config, options, (), watch=watch, steps=2)
    names = [name for name, _ in meter.model.named_children()]
    return _profile(meter.ledger, names, entered[:-1])


def _profile(ledger: Ledger, names: list[str], states: list[frozenset[int]]) -> Profile:
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
    return Profile(
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
