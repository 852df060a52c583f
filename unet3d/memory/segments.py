"""The split of a network into checkpointed segments.

Splits are ranked from one simulated step without checkpointing; the best of each number of segments are simulated.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, combinations, pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unet3d.base.errors import UserError
from unet3d.base.progress import track
from unet3d.config.schema import Config, Model, Optim
from unet3d.memory.breakdown import last_step, phase_ends, stage_of
from unet3d.memory.ledger import Ledger
from unet3d.memory.meter import STEPS_FOR_PEAK
from unet3d.memory.peak import Peak, peak_of
from unet3d.memory.simulate import memoized, simulate, step_key
from unet3d.recomputing.plans import PLAIN, Technique

OUTSIDE = ""  # of all stages
PLAIN_SGD = Optim(name="sgd", momentum=0, weight_decay=0, clip=None)  # changes a step's update alone
SegmentStarts = tuple[int, ...]  # the first stage of each checkpointed segment; () without checkpointing
StageInputs = dict[str, frozenset[int]]  # stage -> storages that enter it from another stage


def choose_segments(config: Config, model_config: Model) -> Technique:
    """Return two to `ckpt` segments with the lowest peak: more never need more, so another may not help.

    Raises UserError where the network has fewer stages.
    """
    if not config.ckpt:
        return PLAIN
    profile = profile_stages(config, model_config)
    stages = len(profile.forward)
    if stages < config.ckpt:
        raise UserError(
            f"ckpt={config.ckpt} groups the stages of an nn.Sequential; this network has {stages}; "
            "use fewer, or 0 (off)"
        )
    rank = partial(_rank, profile)
    candidates = [min(partitions(stages, count), key=rank) for count in range(2, config.ckpt + 1)]
    best = candidates[0]
    if len(candidates) > 1:
        peaks = {}
        for starts in track(candidates, "segment choices", len(candidates)):
            peaks[starts] = simulated_steady_peak(config, model_config, profile, starts)
        best = min(candidates, key=lambda starts: (peaks[starts], forward_recompute_fraction(profile, starts)))
    return Technique(best, forward_recompute_fraction=forward_recompute_fraction(profile, best))


def partitions(stages: int, segments: int) -> Iterator[SegmentStarts]:
    """Yield all ways to split `stages` stages into so many segments."""
    for later_starts in combinations(range(1, stages), segments - 1):
        yield (0, *later_starts)


def simulated_steady_peak(
    config: Config, model_config: Model, profile: "StageProfile", segment_starts: SegmentStarts
) -> int:
    """Simulate one SGD step; return the peak of later steps (bytes). The optimizer changes the update phase alone."""
    first = replace(step_key(config), optim=PLAIN_SGD)
    peak = _first_step_peak(first, model_config, segment_starts)
    return max(profile.update, peak + profile.optimizer_state)


@memoized
def _first_step_peak(config: Config, model_config: Model, segment_starts: SegmentStarts) -> int:
    """Return the most bytes of a first step without its update."""
    ledger = simulate(config, model_config, Technique(segment_starts), steps=1).ledger
    return max(peak for phase, peak in ledger.phase_peaks() if phase in ("forward", "loss", "backward"))


@dataclass(frozen=True)
class StageProfile:
    """The second step without checkpointing, by stage; bytes. Lists are empty where a network has no stages."""

    step: Peak
    forward: list[int]  # most alive while stage i runs forward
    backward: list[int]  # most alive while stage i runs backward
    waiting: list[int]  # alive as stage i starts backward, minus the initial bytes and what stages 0 to i saved
    outside: int  # most alive in the loss, and in backward outside of all stages
    update: int  # most alive in the optimizer's step and as data arrive
    saved: list[int]  # for backward, by the stages before i
    inputs: list[frozenset[int]]  # storages that enter stage i from another stage
    sizes: Mapping[int, int]  # bytes of those
    flops: list[int]  # of stage i's convolutions, forward
    optimizer_state: int  # alive in later steps more than in the first


def profile_stages(config: Config, model_config: Model) -> StageProfile:
    """Simulate two steps without checkpointing and profile the second."""
    return _profiled(step_key(config), model_config)


@memoized
def _profiled(config: Config, model_config: Model) -> StageProfile:
    inputs: StageInputs = {}

    def watch(model: nn.Module, ledger: Ledger) -> None:
        if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
            return
        for name, stage in model.named_children():
            inputs[name] = frozenset()
            if len(inputs) > 1:  # the image enters the first
                stage.register_forward_pre_hook(partial(note_inputs, name, ledger))

    def note_inputs(name: str, ledger: Ledger, stage: nn.Module, state: Any) -> None:
        maps = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
        inputs[name] = frozenset(map(ledger.index, maps))

    return _profile(simulate(config, model_config, watch=watch, steps=STEPS_FOR_PEAK).ledger, inputs)


def _profile(ledger: Ledger, inputs: StageInputs) -> StageProfile:
    spans = {phase: (start, end) for phase, start, end in last_step(ledger)}
    forward_start, _ = spans["forward"]
    backward_start, _ = spans["backward"]
    alive = ledger.alive_bytes()
    flops = _forward_flops(ledger, spans["forward"])
    saved = _saved_bytes(ledger, forward_start, backward_start)
    sums = accumulate(saved[stage] for stage in inputs)
    saved_until = dict(zip(inputs, sums, strict=True))
    forward = _peaks(alive, inputs, _allocations(ledger, spans["forward"]))
    backward = _peaks(alive, inputs, _allocations(ledger, spans["backward"]))
    waiting = dict.fromkeys(inputs, 0)
    for event, stage in reversed(list(_allocations(ledger, spans["backward"]))):  # the first of a stage comes last
        if stage in waiting:
            waiting[stage] = alive[event] - alive[forward_start] - saved_until[stage]
    sizes = {}
    for storages in inputs.values():
        for index in storages:
            sizes[index] = ledger.storages[index].bytes
    data_ends = phase_ends(ledger)["data"]
    return StageProfile(
        step=peak_of(ledger),
        forward=[forward[stage] for stage in inputs],
        backward=[backward[stage] for stage in inputs],
        waiting=list(waiting.values()),
        outside=max(_most_alive(alive, spans["loss"]), forward[OUTSIDE], backward[OUTSIDE]),
        update=max(_most_alive(alive, spans["step"]), _most_alive(alive, spans["data"])),
        saved=[0, *saved_until.values()],
        inputs=list(inputs.values()),
        sizes=sizes,
        flops=[flops[stage] for stage in inputs],
        optimizer_state=data_ends["steady"] - data_ends["first"],
    )


def _forward_flops(ledger: Ledger, forward: tuple[int, int]) -> Counter[str]:
    """Return the FLOPs of convolutions in forward, by stage."""
    start, end = forward
    flops = Counter[str]()
    for event, module, count in ledger.convolutions:
        if start <= event <= end:
            flops[stage_of(module)] += count
    return flops


def _saved_bytes(ledger: Ledger, forward: int, backward: int) -> Counter[str]:
    """Return the bytes made since forward began that are alive as backward begins, by stage."""
    saved = Counter[str]()
    for storage in ledger.alive_at(backward):
        if storage.born >= forward and storage.role is None:
            saved[stage_of(storage.scope.module)] += storage.bytes
    return saved


def _allocations(ledger: Ledger, span: tuple[int, int]) -> Iterator[tuple[int, str]]:
    """Yield the event and the stage of each allocation in a phase."""
    start, end = span
    for event, (index, change) in enumerate(ledger.events[start:end], start):
        if change > 0:
            yield event, stage_of(ledger.storages[index].scope.module)


def _peaks(alive: list[int], stages: StageInputs, allocations: Iterable[tuple[int, str]]) -> Counter[str]:
    """Return the most bytes alive at allocations of each stage, and of what belongs to none."""
    peaks = Counter[str]()
    for event, stage in allocations:
        name = stage if stage in stages else OUTSIDE
        peaks[name] = max(peaks[name], alive[event + 1])
    return peaks


def _most_alive(alive: list[int], span: tuple[int, int]) -> int:
    start, end = span
    return max(alive[start : end + 1])


def _rank(profile: StageProfile, segment_starts: SegmentStarts) -> tuple[int, float]:
    """Return by what splits into as many segments are ranked: their peak, then what they recompute."""
    return ranking_peak(profile, segment_starts), forward_recompute_fraction(profile, segment_starts)


def ranking_peak(profile: StageProfile, segment_starts: SegmentStarts) -> int:
    """Return about the most bytes of a step with these segments, near enough to tell a good split from a bad one.

    A recomputation stops as soon as it has what it needs, and autocast keeps the weights it cast through all of a
    forward pass: the profile knows neither. Off by -2 to +11 % of a simulation in `tests/memory/test_segments.py`.
    """
    count = len(profile.forward)
    input_storages = set[int]()  # of this segment and those before, which checkpointing keeps
    peak = profile.update
    for start, end in pairwise([*segment_starts, count]):
        input_storages |= profile.inputs[start]
        freed = profile.saved[start] - sum(profile.sizes[index] for index in input_storages)
        waiting = profile.waiting[end - 1] if end < count else 0
        forward = max(profile.forward[start:end]) + waiting - freed
        backward = max(profile.backward[start:end]) - freed
        peak = max(peak, forward, backward)
        if end == count:
            peak = max(peak, profile.outside - freed)
    return peak


def forward_recompute_fraction(profile: StageProfile, segment_starts: SegmentStarts) -> float:
    """Return the convolution FLOPs that are computed twice, as a share of a forward pass (of a step: a third of it)."""
    recomputed = sum(profile.flops[: segment_starts[-1]])
    return recomputed / max(1, sum(profile.flops))
