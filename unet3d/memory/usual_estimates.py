"""Estimates of a step's memory that are in use elsewhere, from counts of every module's input and output."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

ADAM = 16  # bytes per parameter in float32: weight 4, gradient 4, two moments 8


class LayerCount(NamedTuple):
    """One module in one forward pass; counts are elements, `output_bytes` bytes of the output map."""

    module: str
    parameters: int  # its own, not its children's
    inputs: int
    outputs: int
    output_bytes: int
    is_leaf: bool
    is_in_place: bool


def layer_counts(model: nn.Module, forward: Callable[[], Any]) -> list[LayerCount]:
    """Run `forward` once, which runs `model`, and count every module's input and output in the order they finish."""
    counts: list[LayerCount] = []

    def count(path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        output_map = _first_tensor(output)
        counts.append(
            LayerCount(
                module=path,
                parameters=sum(p.numel() for p in module.parameters(recurse=False)),
                inputs=_first_tensor(inputs).numel(),
                outputs=output_map.numel(),
                output_bytes=output_map.nbytes,
                is_leaf=not any(module.children()),
                is_in_place=bool(getattr(module, "inplace", False)),
            )
        )

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            hook = module.register_forward_hook(partial(count, path))
            hooks.enter_context(hook)
        forward()
    return counts


def _first_tensor(tree: Any) -> Tensor:
    """Return the map that flows on, empty without one; skips that a state also carries are other modules' outputs."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            return leaf
    return torch.empty(0)


def usual_estimates(counts: Sequence[LayerCount], parameters: int, weights: int, saved: int) -> dict[str, int]:
    """Return bytes by estimate.

    `weights`: bytes of the parameters; `saved`: bytes that autograd holds as backward begins.
    """
    leaves = [count for count in counts if count.is_leaf]
    all_outputs = sum(count.output_bytes for count in counts)
    leaf_outputs = sum(count.output_bytes for count in leaves)
    new_outputs = sum(count.output_bytes for count in leaves if not count.is_in_place)
    weighted_outputs = sum(count.output_bytes for count in leaves if count.parameters)
    return {
        "4 x parameters (weights, gradients, Adam)": 4 * weights,
        "modelsize, forward: weights + outputs of layers": weights + new_outputs,
        "modelsize, with backward: weights + 2 x those": weights + 2 * new_outputs,
        "torchinfo: weights + 2 x outputs of layers with weights": weights + 2 * weighted_outputs,
        "hooks: 16 B/parameter + outputs of layers": ADAM * parameters + leaf_outputs,
        "hooks: 16 B/parameter + outputs of all modules": ADAM * parameters + all_outputs,
        "16 B/parameter + what autograd saves": ADAM * parameters + saved,
    }
