"""Maps and gradients of nodes, a slab of rows at a time."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from unet3d.training.rows import Convolved, Node, Normalised, Rows, Span, Statistics, Stored, spread, stored

Completion = Callable[[int, int, Tensor], None]  # of the first row, the one after the last, and the rows: changes them
OfStatistics = dict[nn.Module, tuple[Statistics, list[Tensor]]]  # gradients of a normalisation's mean and 1 / std
PIECES = 8  # of a map at most, of which statistics are taken one after the other


class Observer:
    """Where a memory ledger may learn which layer slabs are of: they do not call the model's modules.

    Hooks and dispatch modes that are observers change nothing; others are refused.
    """

    def works_on(self, layer: nn.Module | None, is_backward: bool) -> AbstractContextManager[None]:
        """The context of work on a layer's map, or on the gradients that it gives."""
        return nullcontext()


observer = Observer()


def only_watches(hook: Callable[..., Any]) -> bool:
    """Return whether a module's hook is a memory ledger's, which changes nothing."""
    return isinstance(getattr(getattr(hook, "func", None), "__self__", None), Observer)


def statistics(norm: Any, raw: Tensor, pieces: int = PIECES) -> Statistics:
    """Of a normalisation's input N C D H W, in its mode; running ones are updated as the layer does it.

    They are taken of one piece of the channels after another, so what is computed beside them is as large as a piece.
    """
    shape, is_batch = raw.shape, isinstance(norm, nn.BatchNorm3d)
    if is_batch and not norm.training and norm.running_mean is not None:
        mean, variance = (t.view(1, -1, 1, 1, 1) for t in (norm.running_mean, norm.running_var))
        return Statistics(mean, (variance + norm.eps).rsqrt(), 0)
    groups = norm.num_groups if isinstance(norm, nn.GroupNorm) else shape[1]
    grouped = raw.view(shape[0], groups, -1) if is_batch else raw.view(1, shape[0] * groups, -1)
    parts = [_moments(piece) for piece in grouped.split(max(1, grouped.shape[1] // pieces), 1)]
    mean, unbiased = (torch.cat(part) for part in zip(*parts, strict=True))
    count = raw.numel() // mean.numel()
    if count == 1:
        unbiased = _of_one_voxel(norm, unbiased)
    if is_batch and norm.running_mean is not None:
        norm.num_batches_tracked.add_(1)
        for running, now in ((norm.running_mean, mean), (norm.running_var, unbiased)):
            running.lerp_(now.to(running.dtype), norm.momentum)
    inverse_std = (unbiased * ((count - 1) / count) + norm.eps).rsqrt()
    found = [t.view(-1, groups, 1, 1, 1).detach().requires_grad_() for t in (mean, inverse_std)]
    return Statistics(found[0], found[1], count)


def _of_one_voxel(norm: Any, unbiased: Tensor) -> Tensor:
    """Return the variances, 0, of single numbers. Raises ValueError where the layer itself refuses them."""
    if not isinstance(norm, nn.GroupNorm) or len(unbiased) == norm.num_groups:
        raise ValueError(f"{type(norm).__name__}: expected more than 1 value per channel when training")
    return torch.zeros_like(unbiased)


def _moments(x: Tensor) -> list[Tensor]:
    """Mean and unbiased variance of each channel of N C V; of half precision, in float32."""
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    running = [torch.zeros(x.shape[1], dtype=exact, device=x.device) for _ in range(2)]
    # Its result, as large as x, is not used: no other function finds both in one pass and converts as it goes.
    torch.ops.aten.native_batch_norm(x.contiguous(), None, None, *running, True, 1.0, 0.0)
    return running


class Slabs:
    """Slabs of about so many numbers, and the gradients that are on their way."""

    def __init__(self, numbers: int, on_cpu: bool) -> None:
        self.numbers, self.on_cpu = numbers, on_cpu
        self.of_maps: dict[Node, Tensor] = {}  # gradients of stored maps
        self.of_statistics: OfStatistics = {}

    def spans(self, node: Node) -> list[Span]:
        """The rows of each slab of a node."""
        most = max(n.shape.numel() for n in node.nodes()) / node.length  # a pooled row is made from several
        rows = max(1, round(self.numbers / most))
        fewest = node.fewest_rows() if self.on_cpu and isinstance(node, Convolved) else 1
        if fewest <= node.length:  # else torch's kernel is slow however many rows there are
            rows = max(rows, fewest)
        count = math.ceil(node.length / rows)
        return list(pairwise(node.length * index // count for index in range(count + 1)))

    def pieces(self, raw: Tensor) -> int:
        """Return in how many pieces to take the statistics of a map: on a GPU each is as large as a slab."""
        return PIECES if self.on_cpu else max(1, min(PIECES, raw.numel() // self.numbers))

    def make(self, node: Node, dtype: torch.dtype, device: torch.device) -> Stored:
        """The node's map."""
        with observer.works_on(node.layer, False):
            found = stored(torch.empty(node.shape, dtype=dtype, device=device), node.axis)
            self._fill(found, node)
            return found

    def settle(self, raw: Stored, result: Node) -> Stored:
        """Write over a map what is made from it row by row."""
        with observer.works_on(result.layer, False):
            self._fill(raw, result)
            return stored(raw.tensor, raw.axis)

    def _fill(self, target: Stored, node: Node) -> None:
        for first, end in self.spans(node):
            rows = {s: (low, s.read(low, high)) for s, (low, high) in node.reach(first, end).items()}
            target.read(first, end).copy_(node.rows(first, end, rows))

    def pull(self, node: Node, gradient: Tensor, over: Node | None = None, is_ours: bool = True) -> None:
        """Add what a gradient of the node gives to the parameters, statistics and stored maps that it is made from.

        A map's gradient is written over the node's, if that `is_ours` and of its shape, or over the map itself, if it
        is `over`: not needed any more.
        """
        reach, free = node.reach(0, node.length), gradient if is_ours else None
        with observer.works_on(node.layer, True):
            sinks = {source: self._sink(source, free, over) for source in reach if source.needs_grad}
            self._pull(node, gradient, sinks, _Sums(node, self.of_statistics))
            for source, sink in sinks.items():
                self.of_maps[source] = sink.close()

    def pull_twice(self, node: Node, gradient: Tensor, raw: Stored, norm: nn.Module | None) -> None:
        """`pull` and `complete` without a map beside `raw`, over which its gradient is written: once for the sums."""
        others = [source for source in node.reach(0, node.length) if source.needs_grad and source is not raw]
        with observer.works_on(node.layer, True):
            sinks = {source: self._sink(source, None, None) for source in others}
            self._pull(node, gradient, sinks, _Sums(node, self.of_statistics))
            for source, sink in sinks.items():
                self.of_maps[source] = sink.close()
            last = _Sink(raw.tensor, raw.axis, self._completion(raw, norm))
            self._pull(node, gradient, {raw: last}, None)
            self.of_maps[raw] = last.close()

    def complete(self, raw: Stored, norm: nn.Module | None) -> None:
        """Add to the gradient of a normalisation's input what its statistics give."""
        if (completion := self._completion(raw, norm)) is not None:
            with observer.works_on(norm, True):
                for first, end in self.spans(raw):
                    completion(first, end, self.of_maps[raw].narrow(raw.axis, first, end - first))

    def _completion(self, raw: Stored, norm: nn.Module | None) -> Completion | None:
        if norm is None or norm not in self.of_statistics:  # none, or constant statistics
            return None
        known, (of_mean, of_inverse) = self.of_statistics.pop(norm)
        channels = raw.shape[1]
        mean, shift = spread(known.mean.detach(), channels), spread(of_mean / known.voxels, channels)
        slope = spread(-of_inverse * known.inverse_std.detach() ** 3 / known.voxels, channels)

        def complete(first: int, end: int, rows: Tensor) -> None:
            x = raw.read(first, end)
            part = x - mean if x.dtype == mean.dtype else x.to(mean.dtype).sub_(mean)
            part.mul_(slope).add_(shift).add_(rows.to(part.dtype))  # of two types, add_ would convert unseen
            rows.copy_(part)

        return complete

    def _sink(self, source: Stored, free: Tensor | None, over: Node | None) -> "_Sink":
        if source in self.of_maps:
            return _Sink(self.of_maps[source], source.axis, adds=True)
        if source is over:
            return _Sink(source.tensor, source.axis)
        if free is not None and free.shape == source.shape and not any(free is g for g in self.of_maps.values()):
            self.of_maps[source] = free
            return _Sink(free, source.axis)
        return _Sink(torch.empty_like(source.tensor), source.axis)

    def _pull(self, node: Node, gradient: Tensor, sinks: "dict[Stored, _Sink]", sums: "_Sums | None") -> None:
        spans = self.spans(node)
        reaches = [node.reach(*span) for span in spans]
        for span, reach, following in zip(spans, reaches, [*reaches[1:], None], strict=True):
            rows = {s: (low, s.read(low, high).detach()) for s, (low, high) in reach.items()}
            wanted = [rows[source][1].requires_grad_() for source in sinks]
            found = _slab(node, span, rows, gradient.narrow(node.axis, span[0], span[1] - span[0]), wanted, sums)
            for (source, sink), of_rows in zip(sinks.items(), found, strict=True):
                low, high = reach[source]
                sink.add(low, of_rows, high if following is None else following[source][0])
                del of_rows
            del rows, wanted, found  # before the next slab's are made


def _slab(
    node: Node, span: Span, rows: Rows, gradient: Tensor, wanted: list[Tensor], sums: "_Sums | None"
) -> Sequence[Tensor]:
    """The gradients of some rows; those of parameters and statistics are added to the sums."""
    others = [] if sums is None else sums.tensors
    with torch.enable_grad():
        if isinstance(node, Convolved):  # backward does not need its result
            x = node.sources[0].rows(*node.needs(*span)[0], rows).to(node.dtype)
        else:
            x = node.rows(*span, rows)
    if isinstance(node, Convolved):
        gradient, *of_layer = node.gradients(*span, x, gradient, sums is not None)
        if sums is not None:
            sums.add([node.layer.weight, node.layer.bias], of_layer)
    if not x.requires_grad:
        return []
    edge, gradient = get_gradient_edge(x), gradient.to(x.dtype)
    del x  # half precision: a copy that backward does not read
    found = torch.autograd.grad(edge, [*wanted, *others], gradient)
    if sums is not None:
        sums.add(others, found[len(wanted) :])
    # A sum gives both of its terms the same gradient: a sink may change only its own.
    storages = [g.untyped_storage()._cdata for g in found[: len(wanted)]]
    return [g.clone() if storages[i] in storages[:i] else g for i, g in enumerate(found[: len(wanted)])]


class _Sums:
    """Gradients of the parameters and statistics that a node is made from; those of its own convolution aside."""

    def __init__(self, node: Node, of_statistics: OfStatistics) -> None:
        inner = list(node.nodes())[isinstance(node, Convolved) :]
        layers = dict.fromkeys(n.layer for n in inner if n.layer is not None)
        # Once each: layers may share a parameter, whose gradient is then of all of them.
        parameters = dict.fromkeys(p for layer in layers for p in layer.parameters() if p.requires_grad)
        self.tensors: list[Tensor] = list(parameters)
        self.statistics: dict[Tensor, Tensor] = {}
        for n in inner:
            if isinstance(n, Normalised) and n.statistics.voxels:
                zeros = [torch.zeros_like(t) for t in n.statistics[:2]]
                _, sums = of_statistics.setdefault(n.layer, (n.statistics, zeros))
                self.statistics |= dict(zip(n.statistics[:2], sums, strict=True))
        self.tensors += self.statistics

    def add(self, tensors: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
        for tensor, gradient in zip(tensors, gradients, strict=True):
            if tensor is None or gradient is None:
                continue
            if tensor in self.statistics:
                self.statistics[tensor] += gradient
            elif tensor.grad is not None and tensor.requires_grad:
                tensor.grad += gradient
            elif tensor.requires_grad:
                tensor.grad = gradient.to(tensor.dtype).contiguous()


class _Sink:
    """Collects gradients of a map's rows, slab by slab, and writes those to which no later slab adds."""

    def __init__(self, target: Tensor, axis: int, complete: Completion | None = None, adds: bool = False) -> None:
        self.target, self.axis, self.complete, self.adds = target, axis, complete, adds
        self.written = 0
        self.open: Tensor | None = None  # rows that the next slab adds to

    def add(self, low: int, rows: Tensor, done: int) -> None:
        """Rows from `low` on; no later slab adds to those before `done`."""
        if self.open is not None:
            rows.narrow(self.axis, 0, self.open.shape[self.axis]).add_(self.open)
        end = low + rows.shape[self.axis]
        done = min(done, end)
        finished, target = rows.narrow(self.axis, 0, done - low), self.target.narrow(self.axis, low, done - low)
        if self.complete is not None:
            self.complete(low, done, finished)
        if self.adds:
            target.add_(finished)
        else:
            self._clear(low)
            target.copy_(finished)
        self.written = done
        self.open = rows.narrow(self.axis, done - low, end - done).clone() if done < end else None

    def close(self) -> Tensor:
        """The gradients of all rows; 0 for those of which nothing was made."""
        if not self.adds:
            self._clear(self.target.shape[self.axis])
        return self.target

    def _clear(self, until: int) -> None:
        self.target.narrow(self.axis, self.written, max(0, until - self.written)).zero_()
