"""The work of operations, in multiplications and additions of a convolution."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from unet3d.recomputing.graph import Value
from unet3d.recomputing.rules import RULES

TRAFFIC = 40  # multiplications and additions that take as long as to read and write one number


def operations_by_rule(value: Value) -> int:
    """Return the work of an operation that has a rule."""
    return RULES[value.op].operations(value) + TRAFFIC * value.shape.numel()


def operations_without_rule(value: Value) -> int:
    """Return the work of an operation without a rule: torch counts its FLOPs on tensors without data."""
    counter = FlopCounterMode(display=False)

    def fill(tree: object) -> object:
        if isinstance(tree, tuple):
            return [fill(leaf) for leaf in tree]
        if hasattr(tree, "shape"):
            dtype = tree.dtype if isinstance(tree, Value) else torch.float32
            return torch.empty(tree.shape, dtype=dtype, device="meta")
        return tree

    flops = 0
    try:
        args = [fill(leaf) for leaf in value.args]
        kwargs = {name: fill(leaf) for name, leaf in value.kwargs.items()}
        with counter:
            value.target(*args, **kwargs)
        flops = counter.get_total_flops()
    except (RuntimeError, NotImplementedError, TypeError):  # not on meta
        pass
    return flops // 2 + TRAFFIC * value.shape.numel()
