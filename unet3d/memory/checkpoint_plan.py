"""Where to split a network into checkpointed segments, estimated from one simulated step without checkpointing."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, combinations, groupby, islice
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.base.progress import track
from unet3d.base.types import budget_bytes
from unet3d.config.schema import Config, Model, Optim
from unet3d.memory.allocator import read_settings, replay
from unet3d.memory.analysis import last_step, phase_ends
from unet3d.memory.ledger import Ledger
from unet3d.memory.meter import MEASURED_STEPS, STEPS_FOR_PEAK, LedgerMeter
from unet3d.memory.simulate import SegmentStarts, memoized, simulate, step_key

SLACK = 1.11  # an estimated peak is at most so many times the simulated one
PLAIN = Optim(name="sgd", momentum=0, weight_decay=0, clip=None)  # changes the update alone
TRIED = 3  # choices simulated for a budget, of those with the same recompute fraction


class Segments(NamedTuple):
    """The first stage of each checkpointed segment, () for none, and the share of a forward pass that is recomputed."""

    segment_starts: SegmentStarts
    recompute_fraction: float


def choose_segments(config: Config, options: Model) -> Segments:
    """Two to `ckpt` segments with the lowest peak; `auto`: any number or none, with a `budget` the least recomputed."""
    if not config.ckpt:
        return Segments((), 0)
    profile, is_auto = profile_stages(config, options), config.ckpt == "auto"
    least, most = (1, len(profile.forward)) if is_auto else (2, config.ckpt)
    if len(profile.forward) < max(2, most):
        stages = f"this network has {len(profile.forward)}"
        raise UserError(f"ckpt={config.ckpt} groups the stages of an nn.Sequential; {stages}; use fewer, or 0 (off)")
    budget = budget_bytes(config.budget) if is_auto and config.budget is not None else None
    if budget is not None and build.device_type(config) == "cuda":  # it is of what the allocator reserves
        measure: Callable[[SegmentStarts], int] = partial(simulated_reserved, config, options)
    else:
        measure = partial(simulated_peak, config, options, profile)
    segment_starts = best_segment_starts(profile, least, most, measure, budget)
    return Segments(segment_starts, recompute_fraction(profile, segment_starts))


@dataclass(frozen=True)
class StageProfile:
    """The second step without checkpointing, by stage; bytes. Lists are empty where a network has no stages."""

    peak: int  # most alive
    reserved: int  # by the allocator on CUDA; 0 on the CPU
    forward: list[int]  # most alive while stage i runs forward
    backward: list[int]  # most alive while stage i runs backward
    waiting: list[int]  # alive as stage i begins backward, without what was alive at the start and what 0 to i saved
    outside: int  # most alive in the loss, and in backward outside of all stages
    update: int  # most alive in the optimizer's step and as data arrive
    saved: list[int]  # for backward, by the stages before i
    inputs: list[frozenset[int]]  # storages that enter stage i from another stage
    sizes: Mapping[int, int]  # bytes of those
    flops: list[int]  # of stage i's convolutions, forward
    optimizer_state: int  # alive in later steps more than in the first


def profile_stages(config: Config, options: Model) -> StageProfile:
    """Simulate two steps without checkpointing and profile the second."""
    return _profiled(step_key(config), options)


@memoized
def _profiled(config: Config, options: Model) -> StageProfile:
    inputs: dict[str, frozenset[int]] = {}

    def watch(model: nn.Module, ledger: Ledger) -> None:
        is_plain = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
        for name, stage in model.named_children() if is_plain else ():
            inputs[name] = frozenset()
            if len(inputs) > 1:  # the image enters the first
                stage.register_forward_pre_hook(partial(note, name, ledger))

    def note(name: str, ledger: Ledger, stage: nn.Module, state: Any) -> None:
        inputs[name] = frozenset(ledger.index(leaf) for leaf in tree_leaves(state) if isinstance(leaf, Tensor))

    ledger = simulate(config, options, (), watch=watch, steps=STEPS_FOR_PEAK).ledger
    return _profile(ledger, inputs, reserved_bytes(config, ledger))


def reserved_bytes(config: Config, ledger: Ledger) -> int:
    """Return what CUDA's allocator, with the settings of this environment, would reserve; 0 for a step on the CPU."""
    if build.device_type(config) != "cuda":
        return 0
    settings, _ = read_settings(os.environ)
    return replay(ledger.events, settings).reserved_bytes


def _profile(ledger: Ledger, inputs: Mapping[str, frozenset[int]], reserved: int) -> StageProfile:
    spans, alive, names = {name: (a, b) for name, a, b in last_step(ledger)}, ledger.alive_bytes(), list(inputs)
    (begin, end), ends = spans["forward"], phase_ends(ledger)["data"]
    flops = Counter[str]()
    for event, module, count in ledger.convolutions:
        if begin <= event <= end:
            flops[module.partition(".")[0]] += count
    saved = Counter[str]()  # for backward, made in forward
    for storage in ledger.alive_at(spans["backward"][0]):
        if storage.born >= begin and storage.role is None:
            saved[storage.scope.module.partition(".")[0]] += storage.bytes
    until = dict(zip(names, accumulate(saved[name] for name in names), strict=True))
    forward, backward, waiting = (dict.fromkeys(names, 0) for _ in range(3))
    outside = max(alive[spans["loss"][0] : spans["loss"][1] + 1])
    for phase, peaks in (("forward", forward), ("backward", backward)):
        for event, (index, change) in enumerate(ledger.events[slice(*spans[phase])], spans[phase][0]):
            stage = ledger.storages[index].scope.module.partition(".")[0]
            if change > 0 and stage in peaks:
                if phase == "backward" and not peaks[stage]:
                    waiting[stage] = alive[event] - alive[begin] - until[stage]
                peaks[stage] = max(peaks[stage], alive[event + 1])
            elif change > 0:
                outside = max(outside, alive[event + 1])
    return StageProfile(
        peak=max(alive),
        reserved=reserved,
        forward=list(forward.values()),
        backward=list(backward.values()),
        waiting=list(waiting.values()),
        outside=outside,
        update=max(max(alive[a : b + 1]) for a, b in (spans["step"], spans["data"])),
        saved=[0, *until.values()],
        inputs=list(inputs.values()),
        sizes={index: ledger.storages[index].bytes for state in inputs.values() for index in state},
        flops=[flops[name] for name in names],
        optimizer_state=ends["steady"] - ends["first"],
    )


def best_segment_starts(
    profile: StageProfile, least: int, most: int, measure: Callable[[SegmentStarts], int], budget: int | None = None
) -> SegmentStarts:
    """The split into `least` to `most` segments with the lowest peak, () for one; or the least recomputed for a budget.

    `measure` simulates what a split needs: its peak or, for a budget on CUDA, what it reserves. Where another segment
    does not help there are fewer: more never need more.
    """
    if budget is not None:
        if max(profile.peak, profile.reserved) <= budget:
            return ()
        tried = list(_likely(profile, most, budget))
        for choice in track(tried, "segment choices that may fit", len(tried)):
            if measure(choice) <= budget:
                return choice
    cost, stages = partial(_estimated_cost, profile), len(profile.forward)
    candidates = [min(partitions(stages, count, count), key=cost) for count in range(least, most + 1)]
    best = candidates[0]
    if len(candidates) > 1:
        peaks = {choice: measure(choice) for choice in track(candidates, "segment choices", len(candidates))}
        best = min(candidates, key=lambda choice: (peaks[choice], recompute_fraction(profile, choice)))
    return best if len(best) > 1 else ()


def _estimated_cost(profile: StageProfile, segment_starts: SegmentStarts) -> tuple[int, float]:
    return estimated_peak(profile, segment_starts), recompute_fraction(profile, segment_starts)


def _likely(profile: StageProfile, most: int, budget: int) -> Iterator[SegmentStarts]:
    """Splits that may fit, the least recomputed first; of those that recompute alike, the few with the lowest peaks."""
    fraction = partial(recompute_fraction, profile)
    every = sorted(partitions(len(profile.forward), most), key=lambda choice: _estimated_cost(profile, choice)[::-1])
    for _, alike in groupby(every, key=fraction):
        yield from islice((c for c in alike if estimated_peak(profile, c) <= SLACK * budget), TRIED)


def partitions(stages: int, most: int, least: int = 2) -> Iterator[SegmentStarts]:
    """All ways to split so many stages into `least` to `most` segments."""
    for segments in range(least, most + 1):
        for later in combinations(range(1, stages), segments - 1):
            yield (0, *later)


def estimated_peak(profile: StageProfile, segment_starts: SegmentStarts) -> int:
    """Most bytes of a step with these segments, near enough to tell a good split from a bad one.

    A recomputation stops as soon as it has what it needs, and autocast keeps the weights it cast through all of a
    forward pass: the profile knows neither. Off by -2 to +11 % of a simulation in `tests/memory/test_segments.py`.
    """
    count, kept, peak = len(profile.forward), set[int](), profile.update
    for a, b in zip(segment_starts, [*segment_starts[1:], count], strict=True):
        kept |= profile.inputs[a]
        freed = profile.saved[a] - sum(profile.sizes[index] for index in kept)
        waiting = profile.waiting[b - 1] if b < count else 0
        peak = max(peak, max(profile.forward[a:b]) + waiting - freed, max(profile.backward[a:b]) - freed)
        if b == count:
            peak = max(peak, profile.outside - freed)
    return peak


def recompute_fraction(profile: StageProfile, segment_starts: SegmentStarts) -> float:
    """Convolution FLOPs that are computed twice, as a share of a forward pass."""
    return sum(profile.flops[: segment_starts[-1]]) / max(1, sum(profile.flops)) if segment_starts else 0


def in_slabs(config: Config, options: Model) -> tuple[int, int, float]:
    """Return the peak of a step with `lean` or `slab`, what CUDA's allocator reserves, and the price.

    The price is what is convolved beyond a plain forward pass, as a share of that.
    """
    peak, reserved, _, made = _in_slabs(step_key(config), options, STEPS_FOR_PEAK)
    profile = profile_stages(replace(config, lean=False, slab=0), options)
    return peak, reserved, made / max(1, sum(profile.flops)) - 1


def estimated_in_slabs(config: Config, options: Model) -> tuple[int, float]:
    """Return peak and price from one micro-batch of a first step.

    A peak early in backward is overestimated by the gradients.
    """
    profile = profile_stages(replace(config, lean=False, slab=0), options)
    plain = replace(step_key(config), optim=PLAIN, accumulate=1)
    peak, _, gradients, made = _in_slabs(plain, options, 1)
    voxels, others = build.patches_per_rank(config) * prod(config.data.patch), config.accumulate - 1
    micro_batch = voxels * (4 * (options.in_channels or 0) + 2) if build.device_type(config) == "cpu" else 0
    waiting = others * (micro_batch + 4)  # with the losses that the step reads at its end
    most = max(profile.update, peak + profile.optimizer_state + waiting + gradients * (others > 0))
    return most, made / max(1, sum(profile.flops)) - 1


@memoized
def _in_slabs(config: Config, options: Model, steps: int) -> tuple[int, int, int, int]:
    """Return peak, reserved bytes, bytes of gradients, and FLOPs of all convolutions but backward's own."""
    meter = simulate(config, options, (), steps=steps)
    spans = {name: (a, b) for name, a, b in last_step(meter.ledger)}
    begin, end = spans["forward"][0], spans["backward"][1]
    made = sum(count for event, _, count in meter.ledger.convolutions if begin <= event <= end)
    gradients = sum(p.nbytes for p in meter.model.parameters())
    return meter.ledger.peak_bytes(), reserved_bytes(config, meter.ledger), gradients, made


def simulated_peak(config: Config, options: Model, profile: StageProfile, segment_starts: SegmentStarts) -> int:
    """Of later steps, from a first one with a plain optimizer, which changes the update alone; no segment does."""
    peak = _first_step_peak(replace(step_key(config), optim=PLAIN), options, segment_starts)
    return max(profile.update, peak + profile.optimizer_state)


def simulated_reserved(config: Config, options: Model, segment_starts: SegmentStarts) -> int:
    """Return what CUDA's allocator reserves for the first steps, in bytes."""
    return _reserved(step_key(config), options, segment_starts)


@memoized
def _reserved(config: Config, options: Model, segment_starts: SegmentStarts) -> int:
    return reserved_bytes(config, simulate(config, options, segment_starts, steps=STEPS_FOR_PEAK).ledger)


@memoized
def _first_step_peak(config: Config, options: Model, segment_starts: SegmentStarts) -> int:
    """Most bytes of a first step without its update."""
    peaks = simulate(config, options, segment_starts, steps=1).ledger.phase_peaks()
    return max(peak for phase, peak in peaks if phase in ("forward", "loss", "backward"))


def predict(config: Config, options: Model) -> dict[str, Any]:
    """`peak_bytes`, `phases`, `categories` and more in bytes, as `LedgerMeter.summary` gives them, and `parameters`."""
    meter = predicted(config, options)
    return {**meter.summary(), "parameters": sum(p.numel() for p in meter.model.parameters())}


def predicted(
    config: Config, options: Model, dtype: torch.dtype = torch.float32, steps: int = MEASURED_STEPS
) -> LedgerMeter:
    """The meter with the ledger of the simulated steps. `dtype` is that of weights and images."""
    return simulate(config, options, choose_segments(config, options).segment_starts, dtype, steps=steps)
