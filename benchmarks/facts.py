"""Published figures on training memory, computed with this package: python benchmarks/facts.py

Sources: the forum thread discuss.pytorch.org/t/133116 (multiclass U-Net, 320x150x26, batch 2, half precision), and
three widely read articles: on the memory of convolutional networks (units of 10^6 bytes), on a Swish that keeps less,
and on a diffusion model of 76,464,439 parameters.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from unet3d.base.terminal import WIDE, paper, terminal_table
from unet3d.base.types import MIB, Table
from unet3d.config import compose
from unet3d.memory.breakdown import held, summarise_ledger
from unet3d.memory.fake_tensors import fake_mode
from unet3d.memory.ledger import Ledger
from unet3d.memory.meter import STEPS_FOR_PEAK, LedgerMeter
from unet3d.memory.prediction import MemoryEstimate
from unet3d.memory.simulate import fake_batch


class Published(NamedTuple):
    """`value` was published; what is computed here may differ by `within`, in the same unit."""

    figure: str
    unit: str
    value: float
    within: float = 0


# The thread's networks are wholly in float16. Its peaks are of nets that pad odd sizes after pooling; ours keep the
# surplus plane and take the loss in float32: hence 1 %.
PUBLISHED = (
    Published("forum_large: parameters", "", 40_158_853),
    Published("forum_mid: parameters", "", 14_496_517),
    Published("forum_small: parameters", "", 3_433_477),
    Published("forum_32: parameters", "", 5_838_981),
    Published("forum_large: weights and images in float16, batch 2", "bytes", 85_309_706),
    Published("forum_mid: weights and images in float16, batch 2", "bytes", 33_985_034),
    Published("forum_mid: output of the first convolution, batch 2", "bytes", 319_488_000),
    Published("forum_large: channels joined at full resolution", "", 128),
    Published("forum_mid: channels joined at full resolution", "", 192),
    Published("forum_large: peak of a float16 step, batch 2", "MiB", 4963, 49.63),
    Published("forum_mid: peak of a float16 step, batch 2", "MiB", 5356, 53.56),
    Published("forum_small: peak of a float16 step, batch 2", "MiB", 5058, 50.58),
    Published("forum_32: peak of a float16 step, batch 2", "MiB", 2706, 27.06),
    Published("forum_32: peak of a float16 step, batch 4", "MiB", 5379, 53.79),
    Published("forum_mid: needs more than forum_large by", "MiB", 393, 11.79),
    Published("1 x (500, 500, 3) in float32", "MB (10^6 bytes)", 3),
    Published("1 x (256, 3, 100, 100) in float32", "MB (10^6 bytes)", 31, 0.5),  # rounded there
    Published("7 x (512, 512, 3, 3) in float32", "MB (10^6 bytes)", 66.060, 0.001),
    Published("1 x (120, 3, 512, 512) in float32", "MB (10^6 bytes)", 377.48, 0.01),  # cut off there
    Published("Conv2d(3, 64, 3, 1, 1) on (1, 3, 224, 224): parameters", "", 1_792),
    Published("Conv2d(3, 64, 3, 1, 1) on (1, 3, 224, 224): inputs", "", 150_528),
    Published("Conv2d(3, 64, 3, 1, 1) on (1, 3, 224, 224): outputs", "", 3_211_264),
    Published("Linear(1024, 1024) on (1, 1024): parameters", "", 1_049_600),
    Published("Linear(1024, 1024) on (1, 1024): inputs", "", 1_024),
    Published("Linear(1024, 1024) on (1, 1024): outputs", "", 1_024),
    Published("Swish that keeps only its input: saves of the peak", "%", 20, 10),
    Published("76,464,439 parameters: weights", "MiB", 291.69, 0.01),
    Published("76,464,439 parameters: Adam", "MiB", 583.38, 0.01),
    Published("76,464,439 parameters: gradients", "MiB", 291.69, 0.01),
)


def computed() -> dict[str, float]:
    """Figure -> the value that this package finds."""
    return {figure: value for part in (forum, tensors, layers, swish, adam) for figure, value in part()}


def forum() -> Iterator[tuple[str, float]]:
    two = {name: _half(name, 2) for name in ("forum_large", "forum_mid", "forum_small", "forum_32")}
    for name, net in two.items():
        yield f"{name}: parameters", net.parameters
        yield f"{name}: weights and images in float16, batch 2", _weights_and_images(net)
        first = next(s for s in net.ledger.storages if s.operation == "aten.convolution.default")
        yield f"{name}: output of the first convolution, batch 2", first.bytes
        joined = [s.shape[1] for s in net.ledger.storages if s.operation == "aten.cat.default" and len(s.shape) == 5]
        yield f"{name}: channels joined at full resolution", joined[-1]
        yield f"{name}: peak of a float16 step, batch 2", net.step.tensors / MIB
    yield "forum_32: peak of a float16 step, batch 4", _half("forum_32", 4).step.tensors / MIB
    more = two["forum_mid"].step.tensors - two["forum_large"].step.tensors
    yield "forum_mid: needs more than forum_large by", more / MIB


def _half(name: str, batch: int) -> MemoryEstimate:
    config = compose.compose([f"model={name}", "data.patch=[320,150,26]", "optim=adam", f"batch={batch}"])
    return MemoryEstimate(config, config.model, name=name, dtype=torch.float16, steps=STEPS_FOR_PEAK)


def _weights_and_images(net: MemoryEstimate) -> int:
    with fake_mode():
        image = fake_batch(net.config, net.model, net.dtype).image.nbytes
    return image + sum(p.nbytes for p in net.meter.model.parameters())


def tensors() -> Iterator[tuple[str, float]]:
    """Groups of tensors as the ledger finds them."""
    for number, shape in ((1, (500, 500, 3)), (1, (256, 3, 100, 100)), (7, (512, 512, 3, 3)), (1, (120, 3, 512, 512))):
        ledger = Ledger()
        with fake_mode(), ledger:
            made = [torch.empty(*shape) for _ in range(number)]
            (group,) = held(ledger, len(ledger.events))
        assert (group.number, group.shape, len(made)) == (number, shape, number)
        yield f"{number} x {shape} in float32", group.bytes / 1e6


def layers() -> Iterator[tuple[str, float]]:
    """Parameters, inputs and outputs of single layers."""
    for kind, arguments, shape in (
        (nn.Conv2d, (3, 64, 3, 1, 1), (1, 3, 224, 224)),
        (nn.Linear, (1024, 1024), (1, 1024)),
    ):
        with fake_mode():
            layer, given = kind(*arguments), torch.empty(shape)
            parameters = sum(parameter.numel() for parameter in layer.parameters())
            counts = {"parameters": parameters, "inputs": given.numel(), "outputs": layer(given).numel()}
        for what, count in counts.items():
            yield f"{kind.__name__}{arguments} on {shape}: {what}", count


def swish() -> Iterator[tuple[str, float]]:
    """The same network with Swish as two operations and as one that keeps its input alone, batch 8."""
    plain, lean = (
        MemoryEstimate(config, replace(config.model, in_channels=1, classes=4), name="unet_small", steps=STEPS_FOR_PEAK)
        for config in (compose.compose(["batch=8", f"model.activation={name}"]) for name in ("swish", "swish_lean"))
    )
    yield "Swish that keeps only its input: saves of the peak", 100 * (1 - lean.step.tensors / plain.step.tensors)


def adam() -> Iterator[tuple[str, float]]:
    """What a parameter costs under Adam in float32: weight 4 bytes, gradient 4, two moments 8."""
    with fake_mode():
        model = nn.ParameterList([torch.empty(76_464_439)])
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        meter = LedgerMeter(model, optimizer)
        for phase in ("data", "forward", "loss", "backward"):
            meter.mark(phase)
        model[0].sum().backward()
        meter.mark("step")
        optimizer.step()
        meter.mark("end")
    found = summarise_ledger(meter.ledger)["state"]
    for role, what in (("params", "weights"), ("optimizer", "Adam"), ("grads", "gradients")):
        yield f"76,464,439 parameters: {what}", found[role] / MIB


def table(found: dict[str, float], published: Iterable[Published] = PUBLISHED) -> Table:
    """Published beside computed."""
    rows = [
        [p.figure, p.unit, *map(_number, (p.value, found[p.figure], found[p.figure] - p.value, p.within))]
        for p in published
    ]
    return Table(["figure", "unit", "published", "computed here", "difference", "expected within"], rows)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}".rstrip("0").rstrip(".")


if __name__ == "__main__":
    paper(WIDE).print(terminal_table("Published figures on memory", table(computed())))
