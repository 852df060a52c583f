"""How operations run on a few rows of their maps: what all rules have in common.

Rows are counted along one axis of N C D H W. A rule says which rows of its inputs rows of a result are made from,
computes them, and sends a gradient of these rows to the inputs' rows. An operation without a rule runs on whole maps
under autograd, in a group with those beside it: that costs memory, never correctness.
"""

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.recomputing.graph import DROPOUTS, Value, Weight, filled
from unet3d.recomputing.state import State

TRACKING = ("batch_norm", "instance_norm")  # their fourth and fifth arguments are running statistics, or None
Span = tuple[int, int]  # rows from the first to before the second
Gradients = Sequence[Tensor | None]  # of each input, None where there is none


class Tile(NamedTuple):
    """Rows of a value, and the rows of each of its inputs from which they are made."""

    span: Span
    inputs: Sequence[Span]

    @property
    def rows(self) -> int:
        """Number of rows."""
        first, end = self.span
        return end - first


class Work(NamedTuple):
    """Rows of a value that are to be computed, or whose gradient is to be sent to the inputs."""

    value: Value
    tile: Tile
    state: State
    may_overwrite: bool  # the result may be written over the first input's rows, or over the gradient's
    wanted: Sequence[bool] = ()  # whether the gradient of each input is wanted


class Rule:
    """How an operation runs on rows."""

    reads = "inputs"  # what its gradient is computed from: "inputs", "result" or "", nothing
    takes_statistics = False  # of its input, which is a map: a normalisation
    reads_maps = False  # its inputs have to be whole
    is_never_grouped = False  # with operations that have no rule
    splits_gradient = False  # the gradients of its inputs are parts of that of its result

    def serves(self, value: Value, axis: int) -> bool:
        """Return whether the rule is right for these arguments."""
        return all(len(source.shape) == 5 for source in (value, *value.inputs))

    def rows(self, value: Value, axis: int, span: Span) -> list[Span]:
        """Return the rows of each input that these rows are made from."""
        spans = []
        for source in value.inputs:
            is_spread = source.shape[axis] != value.shape[axis]
            spans.append((0, 1) if is_spread else span)
        return spans

    def run(self, work: Work, inputs: Sequence[Tensor]) -> Tensor:
        """Return these rows."""
        return call(work.value, inputs, work.state)

    def gradients(self, work: Work, known: list[Tensor], gradient: Tensor) -> Gradients:
        """Return the gradients of the inputs' rows; gradients of weights are added to the state.

        `known`: the inputs, or the result alone, as `reads` says; what is popped from it is released.
        """
        return gradients_by_autograd(work.value, known, gradient, work.state)

    def operations(self, value: Value) -> int:
        """Return the multiplications and additions of the whole map; 0 where they take no longer than its memory."""
        return 0

    def is_costly(self, value: Value) -> bool:
        """Return whether computing rows again at each use would be much work: the result is then a map."""
        return False

    def fewest_rows(self, value: Value, axis: int) -> int | None:
        """Return the rows of a tile on the CPU of which fewer take a slow kernel; None where all are alike."""
        return None


def call(value: Value, inputs: Sequence[Tensor], state: State, keeps_types: bool = False) -> Tensor:
    """Return the operation's result for these inputs, on rows or whole maps; a dropout is of whole maps."""
    if value.op in DROPOUTS:
        return inputs[0] * dropout_factor(value, state, inputs[0].dtype)
    tensors: dict[Value | Weight, Tensor | None] = dict(zip(value.inputs, inputs, strict=True))
    for weight in value.weights():
        if keeps_types:
            tensors[weight] = state.weights[weight.name]
        else:
            tensors[weight] = state.weight(weight)
    if value.op in TRACKING:
        _keep_running_statistics(value, tensors, state)
    kwargs = {name: filled(leaf, tensors) for name, leaf in value.kwargs.items()}
    args = [filled(leaf, tensors) for leaf in value.args]
    result = value.target(*args, **kwargs)
    if value.element is not None:
        result = result[value.element]
    assert isinstance(result, Tensor)
    if keeps_types or not result.is_floating_point():
        return result
    return result.to(state.dtype)


def _keep_running_statistics(value: Value, tensors: dict[Value | Weight, Tensor | None], state: State) -> None:
    """Let a normalisation update its running statistics when it is made first, and copies of them from then on."""
    if value in state.updated:
        for weight in value.args[3:5]:
            running = tensors.get(weight)
            if running is not None:
                running = running.clone()
            tensors[weight] = running
    state.updated.add(value)


def gradients_by_autograd(
    value: Value,
    inputs: Sequence[Tensor],
    gradient: Tensor,
    state: State,
) -> Gradients:
    """Return the inputs' gradients by running the operation again under autograd; weights' are added to the state."""
    weights = [weight for weight in value.weights() if state.wants(weight)]
    leaves = []
    for tensor in inputs:
        leaf = tensor.detach()
        leaves.append(leaf.requires_grad_(tensor.is_floating_point()))
    parameters = {}
    for weight in weights:
        parameter = state.weights[weight.name].detach()
        parameters[weight.name] = parameter.requires_grad_()
    inner = State(
        axis=state.axis,
        dtype=state.dtype,
        weights={weight.name: parameters.get(weight.name, state.weights[weight.name]) for weight in value.weights()},
        updated={value},
    )
    with torch.enable_grad():
        result = _call_with_gradients(value, leaves, inner)
    if not result.requires_grad:
        return [None for _ in leaves]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    wanted += parameters.values()
    computed = torch.autograd.grad(
        result,
        wanted,
        gradient.to(result.dtype),
        allow_unused=True,
    )
    gradient_of = dict(zip(map(id, wanted), computed, strict=True))
    for weight in weights:
        parameter = parameters[weight.name]
        state.add_gradient(weight, gradient_of[id(parameter)])
    return [_with_memory(gradient_of.get(id(leaf))) for leaf in leaves]


def _with_memory(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient to which others may be added in place: that of a sum is one number, expanded."""
    if gradient is None or 0 not in gradient.stride():
        return gradient
    return gradient.contiguous()


def _call_with_gradients(value: Value, inputs: Sequence[Tensor], state: State) -> Tensor:
    """Return `call`, whose conversions of weights autograd follows."""
    converted = dict(state.weights)  # those of this operation
    for name, tensor in state.weights.items():
        if tensor.requires_grad:
            converted[name] = tensor.to(state.dtype)
    state.weights = converted
    return call(value, inputs, state)


def dropout_factor(value: Value, state: State, dtype: torch.dtype, tile: Tile | None = None) -> Tensor:
    """Return the numbers by which a dropout multiplies a map, or a tile's rows of it."""
    drawn = state.weights[value.args[-1].name]
    if tile is not None and drawn.shape[state.axis] > 1:
        first, _ = tile.span
        drawn = drawn.narrow(state.axis, first, tile.rows)
    if drawn.dtype != torch.bool:
        return drawn.to(dtype)
    probability = float(value.argument(1))
    factor = 1 / (1 - probability) if probability < 1 else 0.0
    return drawn.to(dtype).mul_(factor)


def pad_along(x: Tensor, dimension: int, before: int, behind: int) -> Tensor:
    """Return N C D H W with zeros before and behind it along a dimension."""
    pads = []  # two for each dimension, from the last on
    for _ in range(dimension + 1, 5):
        pads += [0, 0]
    pads += [before, behind]
    return F.pad(x, pads)


RULES: dict[str, Rule] = {}  # by operation; each module of this folder adds its own


def rule(*operations: str) -> Callable[[type[Rule]], type[Rule]]:
    """Return a decorator that registers an object of a class of rules for operations, by their names (`value.op`)."""

    def register(kind: type[Rule]) -> type[Rule]:
        RULES.update({operation: kind() for operation in operations})
        return kind

    return register


for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
