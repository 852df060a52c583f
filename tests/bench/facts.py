"""Published figures on training memory, computed again: python tests/bench/facts.py

Sources: the forum thread discuss.pytorch.org/t/133116 (multiclass U-Net, 320x150x26, batch 2, half precision), and
three widely read articles: on the memory of convolutional networks (units of 10^6 bytes), on a Swish that keeps less,
and on a diffusion model of 76,464,439 parameters.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from unet3d import compose
from unet3d.memory.analysis import appeared, layer_counts, state_bytes
from unet3d.memory.ledger import Ledger
from unet3d.memory.meter import ENOUGH, LedgerMeter
from unet3d.memory.preflight import MemoryEstimate, simulate_all
from unet3d.memory.simulate import fake_batch, fake_mode
from unet3d.report.loggers import WIDE, paper, terminal_table
from unet3d.types import MIB, Table

FORUM = ("data.patch=[320,150,26]", "optim=adam")
AVATAR = 76_464_439  # parameters
NEAR = 0.01  # relative; where the published network or loss is not ours in every detail


class Fact(NamedTuple):
    """`said` was published; `found` is computed here; they may differ by `within`, in the same unit."""

    what: str
    unit: str
    said: float
    found: float
    within: float = 0


def facts() -> Iterator[Fact]:
    """All of them, in the order of their sources."""
    yield from forum()
    yield from tensors()
    yield from activations()
    yield from swish()
    yield from avatar()


def forum() -> Iterator[Fact]:
    """The thread's networks, wholly in float16. Its peaks are of nets that pool odd sizes down and pad them again.

    Ours keep the surplus plane, and take the loss in float32: that is the difference.
    """
    said = (
        ("forum_large", 40_158_853, 2, 4963),
        ("forum_mid", 14_496_517, 2, 5356),
        ("forum_small", 3_433_477, 2, 5058),
        ("forum_32", 5_838_981, 2, 2706),
        ("forum_32", 5_838_981, 4, 5379),
    )
    looks = {(name, batch): _half(name, batch) for name, _, batch, _ in said}
    simulate_all(list(looks.values()))
    for name, parameters, batch, _ in said:
        if batch == 2:
            yield Fact(f"{name}: parameters", "", parameters, looks[name, batch].parameters)
    for name, row in (("forum_large", 85_309_706), ("forum_mid", 33_985_034)):
        yield Fact(f"{name}: weights and images in float16, batch 2", "bytes", row, _held_first(looks[name, 2]))
    first = looks["forum_mid", 2].first_convolution.bytes
    yield Fact("forum_mid: output of the first convolution, batch 2", "bytes", 319_488_000, first)
    for name, channels in (("forum_large", 128), ("forum_mid", 192)):
        yield Fact(f"{name}: channels joined at full resolution", "", channels, sum(looks[name, 2].joined or ()))
    for name, _, batch, peak in said:
        yield Fact(
            f"{name}: peak of a float16 step, batch {batch}", "MiB", peak, looks[name, batch].peak / MIB, NEAR * peak
        )
    more = (looks["forum_mid", 2].peak - looks["forum_large", 2].peak) / MIB
    yield Fact("forum_mid: needs more than forum_large by", "MiB", 5356 - 4963, more, 0.03 * 393)


def _half(name: str, batch: int) -> MemoryEstimate:
    config = compose.compose([f"model={name}", *FORUM, f"batch={batch}"])
    return MemoryEstimate(name, config, config.model, torch.float16, ENOUGH)


def _held_first(look: MemoryEstimate) -> int:
    with fake_mode():
        image = fake_batch(look.config, look.options, look.dtype).image.nbytes
    return image + sum(p.nbytes for p in look.meter.model.parameters())


def tensors() -> Iterator[Fact]:
    """The sizes of tensors, and the groups that a tracker prints between two points of a program."""
    for shape, number, said, within in (
        ((500, 500, 3), 1, 3, 0),
        ((256, 3, 100, 100), 1, 31, 0.5),  # rounded there
        ((512, 512, 3, 3), 7, 66.060, 0.001),
        ((120, 3, 512, 512), 1, 377.48, 0.01),  # cut off there
    ):
        yield Fact(f"{number} x {shape} in float32", "MB (10^6 bytes)", said, _appeared(shape, number) / 1e6, within)


def _appeared(shape: Sequence[int], number: int) -> int:
    """Bytes of one group of tensors, as told between two points of a program."""
    ledger = Ledger()
    with fake_mode(), ledger:
        made = [torch.empty(*shape) for _ in range(number)]
        (group,) = appeared(ledger, 0, len(ledger.events))
    assert group.number == len(made)
    return group.bytes


def activations() -> Iterator[Fact]:
    """Parameters, inputs and outputs of single layers."""
    said = (
        (nn.Conv2d, (3, 64, 3, 1, 1), (1, 3, 224, 224), (1_792, 150_528, 3_211_264)),
        (nn.Linear, (1024, 1024), (1, 1024), (1_049_600, 1_024, 1_024)),
    )
    for kind, arguments, shape, numbers in said:
        with fake_mode():
            layer, given = kind(*arguments), torch.empty(shape)
            count = layer_counts(layer, partial(layer, given))[0]
        found = (count.parameters, count.inputs, count.outputs)
        for what, number, here in zip(("parameters", "inputs", "outputs"), numbers, found, strict=True):
            yield Fact(f"{kind.__name__}{arguments} on {shape}: {what}", "", number, here)


def swish() -> Iterator[Fact]:
    """The same network with Swish as two operations and as one that keeps its input alone, batch 8."""
    plain, lean = (
        MemoryEstimate("unet_small", config, replace(config.model, in_channels=1, classes=4), steps=ENOUGH)
        for config in (compose.compose(["batch=8", f"model.activation={name}"]) for name in ("swish", "swish_lean"))
    )
    yield Fact("Swish that keeps only its input: saves of the peak", "%", 20, 100 * (1 - lean.peak / plain.peak), 10)


def avatar() -> Iterator[Fact]:
    """What a parameter costs under Adam in float32: weight 4 bytes, gradient 4, two moments 8."""
    with fake_mode():
        model = nn.ParameterList([torch.empty(AVATAR)])
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        meter = LedgerMeter(model, optimizer)
        for phase in ("data", "forward", "loss", "backward"):
            meter.mark(phase)
        model[0].sum().backward()
        meter.mark("step")
        optimizer.step()
        meter.mark("end")
    found = state_bytes(meter.ledger)
    for role, what, said in (
        ("params", "weights", 291.69),
        ("optimizer", "Adam", 583.38),
        ("grads", "gradients", 291.69),
    ):
        yield Fact(f"{AVATAR:,} parameters: {what}", "MiB", said, found[role] / MIB, 0.01)


def table(found: Iterable[Fact]) -> Table:
    """Published beside computed."""
    rows = [
        [fact.what, fact.unit, *map(_number, (fact.said, fact.found, fact.found - fact.said, fact.within))]
        for fact in found
    ]
    return Table(["figure", "unit", "published", "computed here", "difference", "expected within"], rows)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}".rstrip("0").rstrip(".")


if __name__ == "__main__":
    paper(WIDE).print(terminal_table("Published figures on memory", table(facts())))
