"""A step of the U-Net in slabs of rows: `lean` keeps the convolutions' raw maps, `slab` makes them again too.

Both compute what the model computes, with its own layers and weights. A convolution's raw output and the statistics of
its normalisation stand for all that follows up to the next convolution, which makes its input again, a slab at a time.
Gradients are written over gradients whose rows are used up. `slab` also drops the maps: backward makes a level again
when it needs it, so that two maps of full resolution exist at a time. `rows` has a rule for each type of layer, and
`slab_rules` refuses what has none.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from unet3d.model.blocks import DoubleConv
from unet3d.model.unet import UNet3D
from unet3d.training import slab_rules, slabs
from unet3d.training.rows import Node, Stored, added, joined, node_of, stored
from unet3d.training.slabs import Slabs, statistics


@dataclass(frozen=True)
class SlabOptions:
    """How a step runs in slabs."""

    rows: int  # of the first level's map in a slab; slabs of other maps have as many numbers
    is_lean: bool  # keep the raw maps; else make them again
    axis: int  # along which rows are counted: 2, 3 or 4 of N C D H W
    on_cpu: bool  # where thin slabs of one image would leave oneDNN; elsewhere none run without gradients


def forward(model: nn.Module, image: Tensor, options: SlabOptions, dtype: torch.dtype | None) -> Any:
    """What `model(image)` is, image N C D H W; with gradients on, one `backward()` may follow, for the parameters.

    Raises UserError for a network that is not computed by the rules.
    """
    slab_rules.refuse_unknown(model, "lean=true" if options.is_lean else "slab")
    assert isinstance(model, UNet3D)
    run = _Run(model, options, dtype or image.dtype)
    anchor = next((p for p in model.parameters() if p.requires_grad), None)  # by which autograd knows of this pass
    if torch.is_grad_enabled() and anchor is not None:
        found: tuple[Tensor, ...] = InSlabs.apply(anchor, image, run)
    else:
        found = run.forward(image, keeps=False)
    return found[0] if len(found) == 1 else found


class InSlabs(torch.autograd.Function):
    """A pass through the model. Backward adds to the parameters' `grad` as gradients are made, past autograd's hooks.

    `torch.autograd.grad` and a gradient of the image are not served: no step of this package asks for them.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, image: Tensor, run: "_Run") -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.inputs = [(tensor, tensor._version) for tensor in (image, *run.parameters)]
        return run.forward(image, keeps=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        run, inputs, ctx.run, ctx.inputs = ctx.run, ctx.inputs, None, []
        if run is None:
            raise RuntimeError("a pass in slabs keeps nothing for a second backward; call forward again")
        if any(tensor._version != version for tensor, version in inputs):
            raise RuntimeError("weights or image were modified by an inplace operation after the forward pass in slabs")
        if not run.has_its_parameters():
            raise RuntimeError("weights of the network were replaced after the forward pass in slabs")
        run.backward(list(gradients))
        return None, None, None


@dataclass
class _Level:
    """What backward needs of a level, until it is deleted. Raw maps come before a convolution's normalisation."""

    first: Node  # raw, of the encoder's first convolution
    shortcut: Node | None  # of a residual encoder block
    second: Stored = field(init=False)  # raw, of the encoder's second convolution
    skip: Node | None = None
    below: Node = field(init=False)  # what comes from the level below, before it is upsampled
    third: Stored = field(init=False)  # raw, of the decoder's convolutions
    fourth: Stored = field(init=False)
    sum: Stored | None = None  # the shortcut of a residual decoder block
    deeper: "_Level | None" = None


class _Run:
    """One forward pass of a model, and its backward pass."""

    def __init__(self, model: UNet3D, options: SlabOptions, dtype: torch.dtype) -> None:
        stages: dict[str, Any] = dict(model.named_children())
        depth = len(model.options.features)
        self.head, self.options, self.dtype = stages["outc"].conv, options, dtype
        self.encoder = [stages["inc"], *(stages[f"down{level}"] for level in range(1, depth))]
        self.decoder = [stages[f"up{depth - 1 - level}"] for level in range(depth - 1)]
        self.model = model
        self.parameters = list(model.parameters())
        self.is_training = {module: module.training for module in model.modules()}  # backward is of the same mode
        self.known: dict[nn.Module, Any] = {}  # statistics of normalisations, masks of dropout
        self.sides: list[Tensor] = []  # logits of deep supervision, deepest first
        self.is_again = False  # maps are made a second time

    def has_its_parameters(self) -> bool:
        """Return whether the model holds the parameters that it had in forward, by whose layers backward goes."""
        now = list(self.model.parameters())
        return len(now) == len(self.parameters) and all(a is b for a, b in zip(now, self.parameters, strict=True))

    @torch.no_grad()
    def forward(self, image: Tensor, keeps: bool) -> tuple[Tensor, ...]:
        """Logits at full resolution; in training with deep supervision, those of all levels, finest first."""
        block, x = self.encoder[0].block, stored(image.to(self.dtype), self.options.axis, needs_grad=False)
        self.start = self.node(block.conv1.conv, x)
        numbers = self.options.rows * self.start.shape.numel() // self.start.length
        self.slabs = Slabs(numbers, self.options.on_cpu)
        self.top = _Level(self.raw(block.conv1, x), self.shortcut(block, x))
        logits = self.make(self.node(self.head, self.run(0, self.top, keeps)))
        self.is_again = True
        found = logits.tensor, *reversed(self.sides)
        del self.sides  # the loss may write over them if nobody else holds them
        self.storages = [tensor.untyped_storage()._cdata for tensor in found]
        return found

    def run(self, depth: int, level: _Level, keeps: bool) -> Node:
        """Run a level and those below it. Returns its result; `keeps`: the level then holds what backward needs."""
        is_lean = keeps and self.options.is_lean
        second, skip = self.encoded(depth, level)
        if is_lean or (keeps and depth == len(self.decoder)):
            level.second, level.skip = second, skip
        else:
            skip = self.slabs.settle(second, skip)
            level.first = self.start if depth == 0 else level.first  # made again from the image
        if not keeps:
            del level.first, level.shortcut
        if depth == len(self.decoder):
            return skip
        del second
        deeper = self.descend(depth + 1, skip)
        below = self.run(depth + 1, deeper, is_lean)
        joint = self.join(depth, skip, below)
        block = self.decoder[depth].block
        third, shortcut = self.raw(block.conv1, joint), self.stored_shortcut(block, joint)
        if keeps:
            level.below, level.deeper = below, deeper if is_lean else None
            level.skip = skip if is_lean or depth > 0 else None
        del joint, skip, below, deeper
        fourth = self.raw(block.conv2, self.after(block.conv1, third))
        result = self.end(block, fourth, shortcut)
        if keeps:
            level.third, level.fourth, level.sum = third, fourth, shortcut
        else:
            del third
            result = self.slabs.settle(fourth, result)
        if (head := self.side_head(depth)) is not None and not self.is_again:
            self.sides.append(self.make(self.node(head, result)).tensor)
        return result

    def descend(self, depth: int, skip: Node) -> _Level:
        """Enter the level below: its first convolution and its block's shortcut, from the skip above."""
        block, x = self.encoder[depth].block, self.lowered(depth, skip)
        return _Level(self.raw(block.conv1, x), self.stored_shortcut(block, x))

    def lowered(self, depth: int, skip: Node) -> Node:
        """What enters a level's encoder block."""
        pool = self.encoder[depth].pool
        return skip if pool is None else self.node(pool, skip)

    def join(self, depth: int, skip: Node, below: Node) -> Node:
        """What enters a level's decoder block."""
        up = self.decoder[depth].up
        for layer in up if isinstance(up, nn.Sequential) else [up]:
            below = self.node(layer, below)
        return joined(skip, below)

    def side_head(self, depth: int) -> Any:
        """The head of a level of deep supervision, in training."""
        up = self.decoder[depth]
        return up.head if self.is_training[up] else None

    # Backward

    @torch.no_grad()
    def backward(self, of_logits: list[Tensor]) -> None:
        """Add to the parameters' gradients; `of_logits` are those of what `forward` returned."""
        self.of_logits = of_logits
        level = self.top
        del self.top
        of_first, _ = self.back(0, level, [])
        self.slabs.pull(self.start, of_first)

    def back(self, depth: int, level: _Level, of_result: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """The gradients of a level's `first` and `shortcut`, from that of its result if that was a map of its own."""
        block, own = self.encoder[depth].block, self.slabs
        if depth < len(self.decoder):
            self.back_through_decoder(depth, level, of_result)
            self.back_through_levels_below(depth, level)
        elif depth == 0:  # a network of one level
            result = self.end(block, level.second, level.shortcut)
            self.back_through_head(0, result, level.second, norm_of(block.conv2))
        elif of_result:
            own.pull(self.end(block, level.second, level.shortcut), of_result.pop())
        own.complete(level.second, norm_of(block.conv2))
        of_second = own.of_maps.pop(level.second)
        level.skip = None
        del level.second
        first = level.first if isinstance(level.first, Stored) else self.make(level.first)
        del level.first
        own.pull(self.node(block.conv2.conv, self.after(block.conv1, first)), of_second)
        own.complete(first, norm_of(block.conv1))
        of_shortcut = None if level.shortcut is None else own.of_maps.pop(level.shortcut, None)
        return own.of_maps.pop(first), of_shortcut

    def back_through_head(self, depth: int, result: Node, raw: Stored, norm: nn.Module | None) -> None:
        """From the gradient of a level's logits to that of the raw map that its result follows from."""
        head, of_logits = self.head if depth == 0 else self.side_head(depth), self.of_logits[depth]
        if depth == 0 and not self.options.is_lean:
            self.slabs.pull_twice(self.node(head, result), of_logits, raw, norm)
        else:
            self.slabs.pull(self.node(head, result), of_logits, is_ours=False)
        if of_logits.untyped_storage()._cdata == self.storages[depth]:  # a loss wrote it over the logits
            of_logits.data = of_logits.new_empty(0)  # autograd holds it until backward returns

    def back_through_decoder(self, depth: int, level: _Level, of_result: list[Tensor]) -> None:
        """To the gradients of the skip and of what comes from below."""
        block, own = self.decoder[depth].block, self.slabs
        result = self.end(block, level.fourth, level.sum)
        if of_result:
            own.pull(result, of_result.pop())
        if depth == 0 or self.side_head(depth) is not None:
            self.back_through_head(depth, result, level.fourth, norm_of(block.conv2))
        own.complete(level.fourth, norm_of(block.conv2))
        del result
        of_fourth = own.of_maps.pop(level.fourth)
        del level.fourth
        own.pull(self.node(block.conv2.conv, self.after(block.conv1, level.third)), of_fourth)
        del of_fourth
        own.complete(level.third, norm_of(block.conv1))
        of_third = own.of_maps.pop(level.third)
        del level.third
        if level.skip is None:
            level.skip = self.slabs.settle(*self.encoded(depth, level))
        joint = self.join(depth, level.skip, level.below)
        if level.sum is not None and (shortcut := self.shortcut(block, joint)) is not None:
            own.pull(shortcut, own.of_maps.pop(level.sum))
            level.sum = None
        own.pull(self.node(block.conv1.conv, joint), of_third, over=level.below)

    def back_through_levels_below(self, depth: int, level: _Level) -> None:
        """From the gradients of the skip and of what comes from below to that of the level's `second`."""
        block, own = self.encoder[depth].block, self.slabs
        deeper, of_below, of_skip = level.deeper, list[Tensor](), list[Tensor]()
        if deeper is None:
            assert level.skip is not None
            of_below.append(own.of_maps.pop(level.below))
            del level.below
            deeper = self.descend(depth + 1, level.skip)
            of_skip.append(own.of_maps.pop(level.skip))
            level.skip = None
            self.run(depth + 1, deeper, keeps=True)
        level.deeper = None
        of_first, of_shortcut = self.back(depth + 1, deeper, of_below)
        del deeper
        if of_skip:
            level.second, skip = self.encoded(depth, level)
            own.pull(skip, of_skip.pop())
        inner, x = self.encoder[depth + 1].block, self.lowered(depth + 1, self.end(block, level.second, level.shortcut))
        own.pull(self.node(inner.conv1.conv, x), of_first)
        if of_shortcut is not None and (shortcut := self.shortcut(inner, x)) is not None:
            own.pull(shortcut, of_shortcut)

    def encoded(self, depth: int, level: _Level) -> tuple[Stored, Node]:
        """The raw map of the encoder's second convolution, and the skip that follows from it."""
        block = self.encoder[depth].block
        second = self.raw(block.conv2, self.after(block.conv1, level.first))
        return second, self.end(block, second, level.shortcut)

    # Nodes and maps

    def node(self, layer: nn.Module, source: Node) -> Node:
        """A layer's map."""
        return node_of(layer, source, self.dtype, self.known.get(layer))

    def after(self, unit: Any, raw: Node) -> Node:
        """A convolution unit's result from its convolution's."""
        for layer in list(unit.children())[1:]:
            if isinstance(layer, nn.Dropout3d):
                if not self.is_training[layer]:
                    continue
                if layer not in self.known:  # the numbers that the model would draw
                    device = next(unit.parameters()).device
                    ones = torch.ones(*raw.shape[:2], 1, 1, 1, dtype=self.dtype, device=device)
                    self.known[layer] = F.dropout3d(ones, layer.p)
            raw = self.node(layer, raw)
        return raw

    def end(self, block: DoubleConv, raw: Node, shortcut: Node | None) -> Node:
        """A block's result from its last convolution's."""
        x = self.after(block.conv2, raw)
        return x if block.act is None or shortcut is None else self.node(block.act, added(x, shortcut))

    def shortcut(self, block: DoubleConv, x: Node) -> Node | None:
        """What a residual block adds."""
        if block.act is None:
            return None
        return x if block.project is None else self.node(block.project, x)

    def stored_shortcut(self, block: DoubleConv, x: Node) -> Stored | None:
        """The same, as a map."""
        node = self.shortcut(block, x)
        return None if node is None else self.make(node)

    def make(self, node: Node) -> Stored:
        """The node's map."""
        return self.slabs.make(node, self.dtype, next(self.head.parameters()).device)

    def raw(self, unit: Any, source: Node) -> Stored:
        """The map of a unit's convolution; its normalisation's statistics are known from then on."""
        found, norm = self.make(self.node(unit.conv, source)), norm_of(unit)
        if norm is not None and norm not in self.known:
            with slabs.observer.works_on(norm, False):
                self.known[norm] = statistics(norm, found.tensor, self.slabs.pieces(found.tensor))
        return found


def norm_of(unit: Any) -> nn.Module | None:
    """The normalisation of a convolution unit."""
    return getattr(unit, "norm", None)
