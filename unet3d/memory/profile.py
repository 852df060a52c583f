"""What each stage of the network keeps and needs, told from one step without checkpointing."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unet3d.config import Config, Model
from unet3d.memory.explain import last_step, phase_ends
from unet3d.memory.ledger import Ledger, Site, alive_at, levels
from unet3d.memory.meter import ENOUGH
from unet3d.memory.once import once
from unet3d.memory.rehearsal import rehearse, step_of


@dataclass(frozen=True)
class Profile:
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


def profile(config: Config, options: Model) -> Profile:
    """Rehearse a step without checkpointing and take its profile."""
    return _rehearsed(step_of(config), options)


@once
def _rehearsed(config: Config, options: Model) -> Profile:
    entered: list[frozenset[int]] = []

    def watch(model: nn.Sequential, ledger: Ledger) -> None:
        entered.extend([frozenset()] * (len(model) + 1))
        for number, stage in enumerate(model):
            stage.register_forward_hook(lambda m, given, made, at=number + 1: note(ledger, at, made))

    def note(ledger: Ledger, at: int, made: Any) -> None:
        entered[at] = frozenset(ledger.index(leaf) for leaf in tree_leaves(made) if isinstance(leaf, Tensor))

    meter = rehearse(config, options, (), watch=watch, steps=ENOUGH)
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
