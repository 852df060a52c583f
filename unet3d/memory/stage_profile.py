"""A step without checkpointing, by stage of the network, and what it says of the same step with segments."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, combinations, pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unet3d.config.schema import Config, Model
from unet3d.memory.analysis import last_step, phase_ends
from unet3d.memory.ledger import Ledger
from unet3d.memory.levels import stage_of
from unet3d.memory.meter import STEPS_FOR_PEAK
from unet3d.memory.simulate import memoized, reserved_bytes, simulate, step_key

OUTSIDE = ""  # of all stages
SegmentStarts = tuple[int, ...]  # the first stage of each checkpointed segment; () without checkpointing
StageInputs = dict[str, frozenset[int]]  # stage -> storages that enter it from another stage


@dataclass(frozen=True)
class StageProfile:
    """The second step without checkpointing, by stage; bytes. Lists are empty where a network has no stages."""

    peak: int  # most alive
    reserved: int  # by the allocator on CUDA; 0 on the CPU
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

    meter = simulate(config, model_config, watch=watch, steps=STEPS_FOR_PEAK)
    return _profile(meter.ledger, inputs, reserved_bytes(config, meter.ledger))


def _profile(ledger: Ledger, inputs: StageInputs, reserved: int) -> StageProfile:
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
        peak=max(alive),
        reserved=reserved,
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


def partitions(stages: int, most: int, least: int = 2) -> Iterator[SegmentStarts]:
    """Yield all ways to split `stages` stages into `least` to `most` segments."""
    for segments in range(least, most + 1):
        for later_starts in combinations(range(1, stages), segments - 1):
            yield (0, *later_starts)


def estimated_peak(profile: StageProfile, segment_starts: SegmentStarts) -> int:
    """Return the most bytes of a step with these segments, near enough to tell a good split from a bad one.

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
    if not segment_starts:
        return 0
    recomputed = sum(profile.flops[: segment_starts[-1]])
    return recomputed / max(1, sum(profile.flops))
