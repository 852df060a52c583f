"""How operations run on a few rows of their maps: what all rules have in common.

Rows are counted along one axis of N C D H W. A rule says which rows of its inputs rows of a result are made from,
computes them, and sends a gradient of these rows to the inputs' rows. An operation without a rule runs on whole maps
under autograd: that costs memory, never correctness.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.recomputing.graph import DROPOUTS, Value, Weight

TRACKING = ("batch_norm", "instance_norm")  # their fourth and fifth arguments are running statistics, or None
Span = tuple[int, int]  # rows from the first to before the second
Gradients = Sequence[Tensor | None]  # of each input, None where there is none


class Statistics(NamedTuple):
    """Mean and 1 / standard deviation by which a normalisation divides, N or 1, C or groups; `voxels` of each.

    0 voxels say that they are constants, of evaluation.
    """

    mean: Tensor
    inverse_std: Tensor
    voxels: int


@dataclass
class State:
    """The state of a pass beside its maps."""

    axis: int
    dtype: torch.dtype  # of maps
    is_autocast: bool
    weights: Mapping[str, Tensor]  # parameters, buffers, constants and derived tensors by name
    statistics: dict[Value, Statistics] = field(default_factory=dict)
    sums: dict[Value, tuple[Tensor, Tensor]] = field(default_factory=dict)  # of normalisations' gradients, N C
    masks: dict[Value, Tensor] = field(default_factory=dict)  # of dropout
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of weights
    updated: set[Value] = field(default_factory=set)  # whole normalisations that have updated their running statistics
    takes_sums: bool = True  # False in the second of two passes over the same tiles
    prepared: dict[Any, Any] = field(default_factory=dict)  # by one instruction, for all of its tiles

    def weight(self, weight: Weight | None) -> Tensor | None:
        """Return a weight in the type of maps; it is converted once for an instruction."""
        if weight is None:
            return None
        tensor = self.weights[weight.name]
        if tensor.dtype == self.dtype or not tensor.is_floating_point():
            return tensor
        converted: Tensor = self.prepare(weight, lambda: tensor.detach().to(self.dtype))
        return converted

    def prepare(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what `make` returns, called once for an instruction."""
        if key not in self.prepared:
            self.prepared[key] = make()
        return self.prepared[key]

    def wants(self, weight: Weight | None) -> bool:
        """Return whether a gradient of the weight is to be added up."""
        return self.takes_sums and weight is not None and self.weights[weight.name].requires_grad

    def add_gradient(self, weight: Weight | None, gradient: Tensor | None) -> None:
        """Add to the gradient of a weight."""
        if gradient is None or not self.wants(weight):
            return
        assert weight is not None
        total = self.gradients.get(weight.name)
        if total is None:
            tensor = self.weights[weight.name]
            self.gradients[weight.name] = gradient.to(tensor.dtype).view(tensor.shape).contiguous()
        else:
            total.add_(gradient.view(total.shape))


class Tile(NamedTuple):
    """Rows of a value, and the rows of each of its inputs from which they are made."""

    span: Span
    inputs: Sequence[Span]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.span[1] - self.span[0]


class Work(NamedTuple):
    """Rows of a value that are to be computed, or whose gradient is to be sent to the inputs."""

    value: Value
    tile: Tile
    state: State
    may_overwrite: bool  # the result may be written over the first input's rows, or over the gradient's
    wanted: Sequence[bool] = ()  # whether the gradient of each input is wanted


class Rule:
    """How an operation runs on rows. `reads` says what its gradient is computed from: "inputs", "result" or ""."""

    reads = "inputs"

    def serves(self, value: Value, axis: int) -> bool:
        """Return whether the rule is right for these arguments."""
        return all(len(source.shape) == 5 for source in (value, *value.inputs))

    def rows(self, value: Value, axis: int, span: Span) -> list[Span]:
        """Return the rows of each input that these rows are made from."""
        return [span if source.shape[axis] == value.shape[axis] else (0, 1) for source in value.inputs]

    def run(self, work: Work, inputs: Sequence[Tensor]) -> Tensor:
        """Return these rows."""
        return call(work.value, inputs, work.state)

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        """Return the gradients of the inputs' rows; gradients of weights are added to the state.

        `known`: the inputs, or the result alone, as `reads` says; what is popped from it is released.
        """
        return gradients_by_autograd(work.value, known, gradient, work.state)

    def operations(self, value: Value) -> int:
        """Return the multiplications and additions of the whole map, 0 where they are few."""
        return 0


def call(value: Value, inputs: Sequence[Tensor], state: State, keeps_types: bool = False) -> Tensor:
    """Return the operation's result for these inputs, on rows or whole maps; a dropout is of whole maps."""
    if value.op in DROPOUTS:
        factor = dropout_factor(value, state, inputs[0].dtype)
        return inputs[0] if factor is None else inputs[0] * factor
    tensors: dict[Value | Weight, Tensor | None] = dict(zip(value.inputs, inputs, strict=True))
    for weight in value.weights():
        tensors[weight] = state.weights[weight.name] if keeps_types else state.weight(weight)
    if value.op in TRACKING:
        _keep_running_statistics(value, tensors, state)
    kwargs = {name: filled(leaf, tensors) for name, leaf in value.kwargs.items()}
    result = value.target(*(filled(leaf, tensors) for leaf in value.args), **kwargs)
    if value.element is not None:
        result = result[value.element]
    assert isinstance(result, Tensor)
    if not keeps_types and result.is_floating_point() and result.dtype != state.dtype:
        result = result.to(state.dtype)
    return result


def _keep_running_statistics(value: Value, tensors: dict[Value | Weight, Tensor | None], state: State) -> None:
    """Let a normalisation update its running statistics when it is made first, and copies of them from then on."""
    if value in state.updated:
        for weight in value.args[3:5]:
            running = tensors.get(weight)
            tensors[weight] = None if running is None else running.clone()
    state.updated.add(value)


def filled(tree: Any, tensors: Mapping[Value | Weight, Tensor | None]) -> Any:
    """Return arguments with tensors in the place of values and weights."""
    if isinstance(tree, Value | Weight):
        return tensors[tree]
    if isinstance(tree, tuple):
        return [filled(leaf, tensors) for leaf in tree]
    return tree


def gradients_by_autograd(
    value: Value,
    inputs: Sequence[Tensor],
    gradient: Tensor,
    state: State,
    keeps_types: bool = False,
) -> Gradients:
    """Return the inputs' gradients by running the operation again under autograd; weights' are added to the state."""
    weights = [weight for weight in value.weights() if state.wants(weight)]
    leaves = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    with torch.enable_grad():
        parameters = {weight.name: state.weights[weight.name].detach().requires_grad_() for weight in weights}
        known = {**state.weights, **parameters}
        inner = State(state.axis, state.dtype, state.is_autocast, known, masks=state.masks, updated={value})
        result = _call_with_gradients(value, leaves, inner, keeps_types)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    wanted += parameters.values()
    if not result.requires_grad:
        return [None] * len(leaves)
    computed = torch.autograd.grad(result, wanted, gradient.to(result.dtype), allow_unused=True)
    gradient_of = dict(zip(map(id, wanted), computed, strict=True))
    for weight in weights:
        state.add_gradient(weight, gradient_of[id(parameters[weight.name])])
    return [gradient_of.get(id(leaf)) for leaf in leaves]


def _call_with_gradients(value: Value, inputs: Sequence[Tensor], state: State, keeps_types: bool) -> Tensor:
    """Return `call`, whose conversions of weights autograd follows."""
    if not keeps_types:
        floating = {name: t for name, t in state.weights.items() if t.requires_grad and t.dtype != state.dtype}
        state.weights = {**state.weights, **{name: t.to(state.dtype) for name, t in floating.items()}}
    return call(value, inputs, state, keeps_types)


def dropout_factor(value: Value, state: State, dtype: torch.dtype, tile: Tile | None = None) -> Tensor | None:
    """Return the numbers by which a dropout multiplies a map, or a tile's rows of it. None: it is off."""
    mask = state.masks.get(value)
    if mask is None:
        return None
    if tile is not None and mask.shape[state.axis] > 1:
        mask = mask.narrow(state.axis, tile.span[0], tile.rows)
    if mask.dtype == torch.bool:
        probability = float(value.argument(1))
        return mask.to(dtype).mul_(1 / (1 - probability))
    return mask.to(dtype)


def draw_mask(value: Value, state: State, device: torch.device) -> Tensor | None:
    """Return the numbers that a dropout draws: a factor of each channel, or one bit of each voxel. None: it is off."""
    probability = float(value.argument(1))
    if not value.argument(2) or probability == 0:
        return None
    if value.op == "feature_dropout":
        each_channel = [*value.shape[:2], *(1 for _ in value.shape[2:])]
        return torch.feature_dropout(torch.ones(each_channel, dtype=state.dtype, device=device), probability, True)
    ones = torch.ones(value.shape, dtype=state.dtype, device=device)
    return F.dropout(ones, probability, inplace=True) != 0


RULES: dict[str, Rule] = {}  # by operation; the modules of rules fill it
