"""Layers on a few rows of their maps at a time: what each reads, and what it computes.

A `Node` is a map that need not exist: it yields any of its rows, made from rows of its sources. `Stored` maps exist.
`RULES` has one rule for each type of layer; a new layer needs one more, here and in `slab_rules`. Rows run along
`axis`, one of D, H, W.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from unet3d.model.blocks import LeanSwish, Swish, crop
from unet3d.training.half_precision import ONEDNN

Span = tuple[int, int]  # rows from the first to before the second
Rows = Mapping["Stored", tuple[int, Tensor]]  # of each stored map, the first row and the rows


@dataclass(frozen=True, eq=False, repr=False)
class Node:
    """A map N C D H W, by rows."""

    shape: torch.Size
    axis: int
    sources: tuple["Node", ...] = ()
    layer: Any = None  # an nn.Module

    @property
    def length(self) -> int:
        return self.shape[self.axis]

    def needs(self, first: int, end: int) -> list[Span]:
        """The rows of each source that these rows are made from."""
        return [(first, end) for _ in self.sources]

    def compute(self, first: int, end: int, *rows: Tensor) -> Tensor:
        """These rows, from those that `needs` names."""
        raise NotImplementedError

    def rows(self, first: int, end: int, stored: Rows) -> Tensor:
        """These rows, from rows of the stored maps."""
        spans = self.needs(first, end)
        return self.compute(first, end, *(s.rows(*span, stored) for s, span in zip(self.sources, spans, strict=True)))

    def reach(self, first: int, end: int) -> dict["Stored", Span]:
        """The rows of each stored map that these rows are made from."""
        found: dict[Stored, Span] = {}
        for source, span in zip(self.sources, self.needs(first, end), strict=True):
            for stored, (low, high) in source.reach(*span).items():
                a, b = found.get(stored, (low, high))
                found[stored] = min(a, low), max(b, high)
        return found

    def nodes(self) -> Iterator["Node"]:
        """This node and all that it is made from."""
        yield self
        for source in self.sources:
            yield from source.nodes()


@dataclass(frozen=True, eq=False, repr=False)
class Stored(Node):
    """A map that exists."""

    tensor: Tensor = field(default_factory=lambda: torch.empty(0))
    needs_grad: bool = True

    def rows(self, first: int, end: int, stored: Rows) -> Tensor:
        low, rows = stored[self]
        if (first, end) == (low, low + rows.shape[self.axis]):
            return rows  # not a view, for which backward would make a map of zeros to fill
        return rows.narrow(self.axis, first - low, end - first)

    def reach(self, first: int, end: int) -> dict["Stored", Span]:
        return {self: (first, end)}

    def read(self, first: int, end: int) -> Tensor:
        """A view of these rows."""
        return self.tensor.narrow(self.axis, first, end - first)


def stored(tensor: Tensor, axis: int, needs_grad: bool = True) -> Stored:
    """A tensor N C D H W as a node."""
    return Stored(tensor.shape, axis, tensor=tensor, needs_grad=needs_grad)


class Pointwise(Node):
    """Each row from the same row of its source."""

    def compute(self, first: int, end: int, *rows: Tensor) -> Tensor:
        result: Tensor = self.layer(rows[0])
        return result


class Sloped(Pointwise):
    """PReLU, whose weight may be of another type than a normalisation's result."""

    def compute(self, first: int, end: int, *rows: Tensor) -> Tensor:
        return F.prelu(rows[0], self.layer.weight.to(rows[0].dtype))


class Rectified(Pointwise):
    """ReLU and leaky ReLU, in place where their input is no stored map: what else makes it does not keep it."""

    def compute(self, first: int, end: int, *rows: Tensor) -> Tensor:
        slope = self.layer.negative_slope if isinstance(self.layer, nn.LeakyReLU) else 0.0
        if isinstance(self.sources[0], Stored):
            return F.leaky_relu(rows[0], slope) if slope else F.relu(rows[0])
        return F.leaky_relu_(rows[0], slope) if slope else F.relu_(rows[0])


class Silu(Pointwise):
    """SiLU, never in place: the layer may be set to that, and its input be a stored map."""

    def compute(self, first: int, end: int, *rows: Tensor) -> Tensor:
        return F.silu(rows[0])


@dataclass(frozen=True, eq=False, repr=False)
class Scaled(Node):
    """Each channel times a factor: dropout with the mask that it has drawn."""

    factor: Tensor = field(default_factory=lambda: torch.empty(0))

    def compute(self, first: int, end: int, *rows: Tensor) -> Tensor:
        return rows[0] * self.factor


class Statistics(NamedTuple):
    """Of a normalisation: mean and 1 / std, N or 1, C or groups, 1 1 1. `voxels`: that each is of, 0: constant."""

    mean: Tensor
    inverse_std: Tensor
    voxels: int


@dataclass(frozen=True, eq=False, repr=False)
class Normalised(Node):
    """A normalisation whose statistics are known."""

    statistics: Statistics = Statistics(torch.empty(0), torch.empty(0), 0)

    def compute(self, first: int, end: int, *rows: Tensor) -> Tensor:
        layer = self.layer
        mean, scale = (spread(t, self.shape[1]) for t in self.statistics[:2])
        if layer.weight is None:
            bias = torch.zeros_like(mean)
        else:
            scale, bias = scale * layer.weight.view(1, -1, 1, 1, 1), layer.bias.view(1, -1, 1, 1, 1).to(mean.dtype)
        result: Tensor = _Affine.apply(rows[0], mean, scale, bias)
        return result


class _Affine(torch.autograd.Function):
    """(x - mean) * scale + bias of each channel, computed in the type of `mean`, given in that of x; keeps x alone.

    It is a batch normalisation of constant statistics and variance 1, whose kernels convert half precision as they go.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, mean, scale, bias)
        of_channels = [_by_channel(t, x) for t in (scale, bias, mean, torch.ones_like(mean))]
        found = torch.ops.aten.native_batch_norm(_as_one(x), *of_channels, False, 0.0, 0.0)[0]
        result: Tensor = torch.ops.aten._unsafe_view(found, x.shape)  # no view: an activation may write over it
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        x, mean, scale, bias = ctx.saved_tensors
        weight, centre, variance = (_by_channel(t, x) for t in (scale, mean, torch.ones_like(mean)))
        of_x, *sums = torch.ops.aten.native_batch_norm_backward(
            *(_as_one(gradient), _as_one(x), weight, centre, variance, None, None, False, 0.0, [True, True, True])
        )
        of_scale, of_bias = (t.view(*x.shape[:2], 1, 1, 1) for t in sums)
        of_mean = (-of_bias * scale).sum_to_size(mean.shape)
        return of_x.view(x.shape), of_mean, of_scale.sum_to_size(scale.shape), of_bias.sum_to_size(bias.shape)


def _as_one(x: Tensor) -> Tensor:
    """N C D H W as 1 NC D H W: torch's kernels are fast where it is contiguous."""
    return x.contiguous().view(1, -1, *x.shape[2:])


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    """Values N or 1, C 1 1 1 as those of `_as_one(x)`."""
    return (values if len(values) == len(x) else torch.cat([values] * len(x))).reshape(-1)


def spread(values: Tensor, channels: int) -> Tensor:
    """Values of groups N G 1 1 1 as those of their channels."""
    return values if values.shape[1] == channels else values.repeat_interleave(channels // values.shape[1], 1)


@dataclass(frozen=True, eq=False, repr=False)
class Convolved(Node):
    """A convolution, in a type."""

    dtype: torch.dtype = torch.float32

    def needs(self, first: int, end: int) -> list[Span]:
        low, high = self._touched(first, end)
        return [(max(low, 0), min(high, self.sources[0].length))]

    def compute(self, first: int, end: int, *rows: Tensor) -> Tensor:
        x, padding = self.padded(first, end, rows[0].to(self.dtype))
        weight, bias = self.parameters()
        return F.conv3d(x, weight, bias, self.layer.stride, padding)

    def gradients(self, first: int, end: int, rows: Tensor, gradient: Tensor, others: bool) -> tuple[Tensor, ...]:
        """Of the source's rows, if they need one, and of weight and bias; the convolution itself does not run."""
        x, padding = self.padded(first, end, rows.detach())
        weight, bias = self.parameters()
        wanted, sizes = [rows.requires_grad, others, others and bias is not None], None if bias is None else [len(bias)]
        of_x, *of_layer = torch.ops.aten.convolution_backward(
            gradient.contiguous(), x, weight, sizes, self.layer.stride, padding, (1, 1, 1), False, (0, 0, 0), 1, wanted
        )
        if of_x is not None and x.shape != rows.shape:
            low = self._touched(first, end)[0]
            of_x = of_x.narrow(self.axis, max(-low, 0), rows.shape[self.axis])
        return (of_x, *of_layer)

    def parameters(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias in the type of this convolution."""
        bias = self.layer.bias
        return self.layer.weight.to(self.dtype), None if bias is None else bias.to(self.dtype)

    def padded(self, first: int, end: int, rows: Tensor) -> tuple[Tensor, list[int]]:
        """The source's rows with zeros for those outside of the map, and the padding that is left to do."""
        padding, (low, high), length = list(self.layer.padding), self._touched(first, end), self.sources[0].length
        if (first, end) == (0, self.length):
            return rows, padding
        padding[self.axis - 2] = 0
        before, after = max(-low, 0), max(high - length, 0)
        if before or after:
            rows = F.pad(rows, [0, 0] * (4 - self.axis) + [before, after])
        return rows.contiguous(), padding

    def fewest_rows(self) -> int:
        """Rows of a slab of one image for which torch computes by oneDNN; for fewer, its slow kernel on the CPU."""
        if self.shape[0] > 1 or self.axis == 4:
            return 1
        source = self.sources[0]
        fewest = ONEDNN // (source.shape[1] * source.shape[5 - self.axis]) + 1  # of the source: C x D x H counts
        kernel, stride = (int(getattr(self.layer, name)[self.axis - 2]) for name in ("kernel_size", "stride"))
        return max(1, -(-(fewest - kernel) // stride) + 1)

    def _touched(self, first: int, end: int) -> Span:
        kernel, stride, padding = (getattr(self.layer, n)[self.axis - 2] for n in ("kernel_size", "stride", "padding"))
        return first * stride - padding, (end - 1) * stride - padding + kernel


class Pooled(Node):
    """Max-pooling; its kernel is its stride."""

    def needs(self, first: int, end: int) -> list[Span]:
        stride = self.layer.stride[self.axis - 2]
        return [(first * stride, min(end * stride, self.sources[0].length))]

    def compute(self, first: int, end: int, *rows: Tensor) -> Tensor:
        result: Tensor = self.layer(rows[0])
        return result


@dataclass(frozen=True, eq=False, repr=False)
class Raised(Node):
    """Upsampling by whole factors: a transposed convolution whose kernel is its stride, or interpolation."""

    factor: int = 1
    margin: int = 0  # rows of the source that a row reads beside its own
    run: Callable[[Tensor], Tensor] = nn.Identity()

    def needs(self, first: int, end: int) -> list[Span]:
        low, high = first // self.factor - self.margin, -(-end // self.factor) + self.margin
        return [(max(low, 0), min(high, self.sources[0].length))]

    def compute(self, first: int, end: int, *rows: Tensor) -> Tensor:
        low = self.needs(first, end)[0][0]
        return self.run(rows[0]).narrow(self.axis, first - low * self.factor, end - first)


@dataclass(frozen=True, eq=False, repr=False)
class Joined(Node):
    """`blocks.join` of a skip and what comes from below."""

    def needs(self, first: int, end: int) -> list[Span]:
        offset = (self.sources[0].length - self.length) // 2
        return [(first + offset, end + offset), (first, end)]

    def compute(self, first: int, end: int, *rows: Tensor) -> Tensor:
        size = _sized(self, end - first)
        below = rows[1][..., : size[0], : size[1], : size[2]]
        return torch.cat((crop(rows[0].to(below.dtype), size), below), 1)


class Added(Joined):
    """The first source plus the centre of the second: a residual sum."""

    def needs(self, first: int, end: int) -> list[Span]:
        offset = (self.sources[1].length - self.length) // 2
        return [(first, end), (first + offset, end + offset)]

    def compute(self, first: int, end: int, *rows: Tensor) -> Tensor:
        return rows[0] + crop(rows[1], _sized(self, end - first))


def _sized(node: Node, rows: int) -> torch.Size:
    """D H W of so many rows."""
    return torch.Size([rows if axis == node.axis else n for axis, n in enumerate(node.shape)][2:])


def joined(skip: Node, below: Node) -> Node:
    """The concatenation along channels of what both cover."""
    size = [min(a, b) for a, b in zip(skip.shape[2:], below.shape[2:], strict=True)]
    return Joined(torch.Size([skip.shape[0], skip.shape[1] + below.shape[1], *size]), skip.axis, (skip, below))


def added(x: Node, shortcut: Node) -> Node:
    """A residual sum."""
    return Added(x.shape, x.axis, (x, shortcut))


Rule = Callable[[Any, Node, torch.dtype, Any], Node]
RULES: dict[type, Rule] = {}  # by exact type: a subclass may compute something else


def node_of(layer: nn.Module, source: Node, dtype: torch.dtype, known: Any) -> Node:
    """Return a layer's map. `known`: what it keeps from the pass that began: statistics, a mask.

    `slab_rules` has refused layers without a rule before.
    """
    return RULES[type(layer)](layer, source, dtype, known)


def rule(*kinds: type) -> Callable[[Rule], Rule]:
    """Make a function the rule of layers of exactly these types."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(kinds, function))
        return function

    return register


@rule(nn.Conv3d)
def _(layer: Any, source: Node, dtype: torch.dtype, known: Any) -> Node:
    sizes = zip(source.shape[2:], layer.kernel_size, layer.stride, layer.padding, strict=True)
    size = [(n + 2 * int(p) - k) // s + 1 for n, k, s, p in sizes]
    return Convolved(
        torch.Size([source.shape[0], layer.out_channels, *size]), source.axis, (source,), layer, dtype=dtype
    )


@rule(nn.MaxPool3d)
def _(layer: Any, source: Node, dtype: torch.dtype, known: Any) -> Node:
    up = (lambda n, s: -(-n // s)) if layer.ceil_mode else (lambda n, s: n // s)
    size = [up(n, s) for n, s in zip(source.shape[2:], layer.stride, strict=True)]
    return Pooled(torch.Size([*source.shape[:2], *size]), source.axis, (source,), layer)


@rule(nn.ConvTranspose3d)
def _(layer: Any, source: Node, dtype: torch.dtype, known: Any) -> Node:
    def run(x: Tensor) -> Tensor:
        bias = None if layer.bias is None else layer.bias.to(dtype)
        return F.conv_transpose3d(x.to(dtype), layer.weight.to(dtype), bias, layer.stride)

    return _raised(layer, source, layer.out_channels, [int(s) for s in layer.stride], 0, run)


@rule(nn.Upsample)
def _(layer: Any, source: Node, dtype: torch.dtype, known: Any) -> Node:
    return _raised(layer, source, source.shape[1], [int(s) for s in layer.scale_factor], 1, layer)


def _raised(
    layer: nn.Module, source: Node, channels: int, factors: Sequence[int], margin: int, run: Callable[[Tensor], Tensor]
) -> Node:
    size = [n * f for n, f in zip(source.shape[2:], factors, strict=True)]
    shape, factor = torch.Size([source.shape[0], channels, *size]), factors[source.axis - 2]
    return Raised(shape, source.axis, (source,), layer, factor=factor, margin=margin, run=run)


@rule(nn.InstanceNorm3d, nn.BatchNorm3d, nn.GroupNorm)
def _(layer: nn.Module, source: Node, dtype: torch.dtype, known: Any) -> Node:
    return Normalised(source.shape, source.axis, (source,), layer, statistics=known)


@rule(nn.ReLU, nn.LeakyReLU)
def _(layer: nn.Module, source: Node, dtype: torch.dtype, known: Any) -> Node:
    return Rectified(source.shape, source.axis, (source,), layer)


@rule(nn.SiLU)
def _(layer: nn.SiLU, source: Node, dtype: torch.dtype, known: Any) -> Node:
    return Silu(source.shape, source.axis, (source,), layer)


@rule(nn.PReLU)
def _(layer: nn.PReLU, source: Node, dtype: torch.dtype, known: Any) -> Node:
    return Sloped(source.shape, source.axis, (source,), layer)


@rule(Swish, LeanSwish)
def _(layer: nn.Module, source: Node, dtype: torch.dtype, known: Any) -> Node:
    return Pointwise(source.shape, source.axis, (source,), layer)


@rule(nn.Dropout3d)
def _(layer: nn.Dropout3d, source: Node, dtype: torch.dtype, known: Any) -> Node:
    return Scaled(source.shape, source.axis, (source,), layer, factor=known)
