"""The usual estimates of training memory, from parameters and module outputs, to set beside the truth.

Each sees a part: none knows what autograd saves, what backward takes for a moment, or when the peak is.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

ADAM = 16  # bytes per parameter in float32: weight 4, gradient 4, two moments 8


class LayerCount(NamedTuple):
    """One module in one forward pass; counts are elements, `output_bytes` bytes of the output map."""

    module: str
    layer: str
    parameters: int  # its own, not its children's
    inputs: int
    outputs: int
    output_bytes: int
    is_leaf: bool
    is_in_place: bool


def layer_counts(model: nn.Module, forward: Callable[[], Any]) -> list[LayerCount]:
    """Run `forward` once, which runs `model`, and count every module's input and output in the order they finish."""
    found: list[LayerCount] = []
    handles: list[RemovableHandle] = []
    for path, module in model.named_modules():

        def count(module: nn.Module, inputs: Any, output: Any, path: str = path) -> None:
            found.append(_count(path, module, _first(inputs), _first(output)))

        handles.append(module.register_forward_hook(count))
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return found


def _count(path: str, module: nn.Module, given: Tensor, made: Tensor) -> LayerCount:
    parameters = sum(p.numel() for p in module.parameters(recurse=False))
    in_place = bool(getattr(module, "inplace", False))
    is_leaf = not any(module.children())
    name = type(module).__name__
    return LayerCount(path, name, parameters, given.numel(), made.numel(), made.nbytes, is_leaf, in_place)


def _first(tree: Any) -> Tensor:
    """The map that flows on; a state also carries skips, which are outputs of others."""
    found: Tensor = next(leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return found


def estimates(counts: Iterable[LayerCount], parameters: int, weights: int, saved: int) -> dict[str, int]:
    """Estimate -> bytes. `weights`: bytes of the parameters; `saved`: bytes that autograd holds as backward begins."""
    counts = list(counts)
    leaves = [count for count in counts if count.is_leaf]
    outputs = sum(count.output_bytes for count in leaves if not count.is_in_place)
    weighted = sum(count.output_bytes for count in leaves if count.parameters)
    return {
        "4 x parameters (weights, gradients, Adam)": 4 * weights,
        "modelsize, forward: weights + outputs of layers": weights + outputs,
        "modelsize, with backward: weights + 2 x those": weights + 2 * outputs,
        "torchinfo: weights + 2 x outputs of layers with weights": weights + 2 * weighted,
        "hooks: 16 B/parameter + outputs of layers": ADAM * parameters + sum(c.output_bytes for c in leaves),
        "hooks: 16 B/parameter + outputs of all modules": ADAM * parameters + sum(c.output_bytes for c in counts),
        "16 B/parameter + what autograd saves": ADAM * parameters + saved,
    }
