"""The state of a pass without its maps: statistics, what is prepared for several tiles, gradients of weights.

On the CPU a gradient of a weight is added as soon as it is there. On a GPU each call is a launch, for which it waits:
there a tile's gradients are added together, and what is small is made once in a pass.

An `Observer` of passes, which call no modules, learns here which layer an operation is of. Hooks and dispatch modes
that are observers change nothing; where a network's own would be lost, others are refused.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from unet3d.recomputing.graph import Value, Weight

T = TypeVar("T")


@dataclass
class State:
    """The state of a pass without its maps."""

    axis: int
    dtype: torch.dtype  # Type of maps.
    weights: Mapping[str, Tensor]  # parameters, buffers, constants and derived tensors by name
    on_cpu: bool = True  # On a GPU each call costs a launch, and small values stay for the whole pass.
    # Entries of `normalisation.Norm`.
    statistics: dict[Value, tuple[Tensor, Tensor, int]] = field(default_factory=dict)
    sums: dict[Value, tuple[Tensor, Tensor]] = field(default_factory=dict)  # Sums N C of normalisations' gradients.
    gradients: dict[str, Tensor] = field(default_factory=dict)  # Weights' gradients.
    of_tile: dict[str, Tensor] = field(default_factory=dict)  # the same, not yet added
    of_images: dict[int, list[tuple[Weight, Tensor]]] = field(default_factory=dict)  # the same, not yet summed
    updated: set[Value] = field(default_factory=set)  # whole normalisations that have updated their running statistics
    takes_sums: bool = True  # False in the second of two passes over the same tiles
    prepared: dict[Any, Any] = field(default_factory=dict)  # What an instruction prepares for all of its tiles.
    converted: dict[str, Tensor] = field(default_factory=dict)  # weights in the type of maps, of the whole pass

    def weight(self, weight: Weight) -> Tensor:
        """Return a weight in the type of maps; it is converted once for an instruction, if not for the pass."""
        tensor = self.converted.get(weight.name, self.weights[weight.name])
        if not tensor.is_floating_point() or tensor.dtype == self.dtype:
            return tensor
        return self.prepare(weight, lambda: tensor.detach().to(self.dtype))

    def prepare(self, key: Any, make: Callable[[], T]) -> T:
        """Return what `make` returns, called once for an instruction."""
        if key not in self.prepared:
            self.prepared[key] = make()
        made: T = self.prepared[key]
        return made

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """Return what `make` returns, called once in a pass on a GPU: a few numbers a channel, and a launch."""
        return make() if self.on_cpu else self.prepare(key, make)

    def convert(self, weights: Iterable[Weight]) -> None:
        """Convert weights to the type of maps for the whole pass, in one launch."""
        for weight in weights:
            tensor = self.weights[weight.name]
            if tensor.is_floating_point() and tensor.dtype != self.dtype:
                self.converted[weight.name] = torch.empty_like(tensor, dtype=self.dtype)
        if self.converted:
            tensors = [self.weights[name].detach() for name in self.converted]
            torch._foreach_copy_(list(self.converted.values()), tensors)

    def forget_prepared(self) -> None:
        """Forget what an instruction has prepared; on a GPU it stays for the pass."""
        if self.on_cpu:
            self.prepared.clear()

    def wants(self, weight: Weight | None) -> bool:
        """Return whether a gradient of the weight is to be added up."""
        if weight is None or not self.takes_sums:
            return False
        return self.weights[weight.name].requires_grad

    def add_gradient(self, weight: Weight | None, gradient: Tensor | None) -> None:
        """Add to the gradient of a weight; on a GPU `close_tile` does so for all weights together."""
        if gradient is None or not self.wants(weight):
            return
        assert weight is not None
        tensor = self.weights[weight.name]
        if not self.on_cpu:
            if weight.name in self.of_tile:
                self.close_tile()
            self.of_tile[weight.name] = gradient.view(tensor.shape)
            return
        total = self.gradients.get(weight.name)
        if total is None:
            total = gradient.to(tensor.dtype).view(tensor.shape)
            self.gradients[weight.name] = total.contiguous()
        else:
            gradient = gradient.to(total.dtype)  # Of two types, add_ would convert unseen by any ledger.
            total.add_(gradient.view(total.shape))

    def close_tile(self) -> None:
        """Add a tile's gradients to the weights' gradients, in at most two launches."""
        of_tile = self.of_tile
        self.of_tile = {}
        converted = {}
        for name, gradient in of_tile.items():
            if gradient.dtype != self.weights[name].dtype:
                converted[name] = torch.empty_like(self.weights[name])
        if converted:
            torch._foreach_copy_(list(converted.values()), [of_tile[name] for name in converted])
            of_tile |= converted
        known = [name for name in of_tile if name in self.gradients]
        if known:
            torch._foreach_add_([self.gradients[name] for name in known], [of_tile[name] for name in known])
        for name, gradient in of_tile.items():
            if name not in known:
                self.gradients[name] = gradient.contiguous()

    def add_gradient_of_images(self, weight: Weight | None, gradients: Tensor) -> None:
        """Add gradients N C of images to the gradient of a weight; on a GPU they are summed up when the pass ends."""
        if weight is None or not self.wants(weight):
            return
        if self.on_cpu:
            self.add_gradient(weight, gradients.sum(0))
        else:
            self.of_images.setdefault(len(gradients), []).append((weight, gradients))

    def close_gradients(self) -> None:
        """Sum up the gradients of images, for all weights together."""
        for of_weights in self.of_images.values():
            sums = torch.cat([gradients for _, gradients in of_weights], 1).sum(0)
            lengths = [gradients.shape[1] for _, gradients in of_weights]
            for (weight, _), gradient in zip(of_weights, sums.split(lengths), strict=True):
                self.add_gradient(weight, gradient)
        self.close_tile()


class Observer:
    """One who watches passes and changes nothing."""

    def works_on(self, layer: str, is_backward: bool) -> AbstractContextManager[None]:
        """Return the context of work on the map of a layer, by its module's path, or on the gradient of that map."""
        return nullcontext()


observer = Observer()


def only_watches(hook: Callable[..., Any]) -> bool:
    """Return whether a module's hook is an observer's."""
    return isinstance(getattr(getattr(hook, "func", None), "__self__", None), Observer)
