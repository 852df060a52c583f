"""How operations run on a few rows of their maps: what all rules have in common.

Rows are counted along one axis of N C D H W. A rule says which rows of its inputs rows of a result are made from,
computes them, and sends a gradient of these rows to the inputs' rows. An operation without a rule runs on whole maps
under autograd, in a group with its neighbours: that costs memory, never correctness.
"""

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from unet3d.recomputing.graph import DROPOUTS, Value, Weight, carried_out
from unet3d.recomputing.state import State

TRACKING = ("batch_norm", "instance_norm")  # their fourth and fifth arguments are running statistics, or None
Span = tuple[int, int]  # rows from the first to before the second
Gradients = Sequence[Tensor | None]  # One for each input, None where there is none.


class Work(NamedTuple):
    """Rows of a value that are to be computed, or whose gradient is to be sent to the inputs."""

    value: Value
    state: State
    span: Span
    sources: Sequence[Span]  # the rows of each input from which they are made
    may_overwrite: bool  # the result may be written over the first input's rows, or over the gradient's
    wanted: Sequence[bool] = ()  # whether the gradient of each input is wanted

    @property
    def rows(self) -> int:
        """Number of rows."""
        first, end = self.span
        return end - first


class Rule:
    """How an operation runs on rows."""

    reads = "inputs"  # what its gradient is computed from: "inputs", "result" or "", nothing
    takes_statistics = False  # True for a normalisation: its input is a map with statistics.
    reads_maps = False  # its inputs have to be whole
    is_never_grouped = False  # True keeps it out of groups with operations that have no rule.
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

        `known`: the inputs, or the result alone, as `reads` says; what is popped from it is released. Here, the
        operation runs again under autograd.
        """
        value, state, *_ = work
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in known]
        weights = {weight.name: state.weights[weight.name] for weight in value.weights()}
        trained = {w.name: weights[w.name].detach().requires_grad_() for w in value.weights() if state.wants(w)}

        def run() -> Tensor:
            converted = {name: weight.to(state.dtype) for name, weight in trained.items()}
            return call(value, leaves, State(state.axis, state.dtype, weights | converted, updated={value}))

        gradients = gradients_by_autograd(run, leaves, trained, gradient, state)
        # Others may be added to these in place; that of a sum is one number, expanded.
        return [g if g is None or 0 not in g.stride() else g.contiguous() for g in gradients]

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
    tensors: dict[Value | Weight, Tensor] = dict(zip(value.inputs, inputs, strict=True))
    for weight in value.weights():
        tensors[weight] = state.weights[weight.name] if keeps_types else state.weight(weight)
    if value.op in TRACKING:
        if value in state.updated:  # Running statistics are updated when it is made first, and copies from then on.
            tensors |= {weight: tensors[weight].clone() for weight in value.args[3:5] if weight is not None}
        state.updated.add(value)
    result = carried_out(value, tensors)
    assert isinstance(result, Tensor)
    if keeps_types or not result.is_floating_point():
        return result
    return result.to(state.dtype)


def gradients_by_autograd(
    run: Callable[[], Tensor],
    leaves: Sequence[Tensor],
    weights: dict[str, Tensor],
    gradient: Tensor,
    state: State,
    frees_result: bool = False,
) -> list[Tensor | None]:
    """Return gradients of leaves, by running operations again under autograd; those of weights go to the state.

    `frees_result`: of a group, as large as a map, which backward reads only where autograd saved it.
    """
    with torch.enable_grad():
        result = run()
    if not result.requires_grad:
        return [None for _ in leaves]
    gradient = gradient.to(result.dtype)
    edge = get_gradient_edge(result)
    if frees_result:
        del result
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    computed: list[Tensor | None] = list(
        torch.autograd.grad(edge, [*wanted, *weights.values()], gradient, allow_unused=True)
    )
    memory = {memory_of(of_leaf) for of_leaf in (gradient, *computed[: len(wanted)]) if of_leaf is not None}
    for name in reversed(weights):
        of_weight = computed.pop()
        if of_weight is None:
            continue
        if memory_of(of_weight) in memory:
            of_weight = of_weight.clone()  # The gradient of a sum's terms is the same tensor, and is added to.
        memory.add(memory_of(of_weight))
        state.add_gradient(Weight(name, of_weight.shape), of_weight)
    return [computed.pop(0) if leaf.requires_grad else None for leaf in leaves]


def dropout_factor(value: Value, state: State, dtype: torch.dtype, span: Span | None = None) -> Tensor:
    """Return the numbers by which a dropout multiplies a map, or some rows of it."""
    drawn = state.weights[value.args[-1].name]
    if span is not None and drawn.shape[state.axis] > 1:
        drawn = rows_of(drawn, state.axis, span)
    if drawn.dtype != torch.bool:
        return drawn.to(dtype)
    probability = float(value.argument(1))
    factor = 1 / (1 - probability) if probability < 1 else 0.0
    return drawn.to(dtype).mul_(factor)


def rows_of(tensor: Tensor, axis: int, span: Span, first: int = 0) -> Tensor:
    """Return some rows of a tensor, whose own begin at `first`; they share its memory."""
    low, high = span
    if low == first and high - low == tensor.shape[axis]:
        return tensor
    return tensor.narrow(axis, low - first, high - low)


def shape_of_rows(value: Value, axis: int, span: Span) -> list[int]:
    """Return the shape of some rows of a value."""
    first, end = span
    shape = list(value.shape)
    shape[axis] = end - first
    return shape


def memory_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage."""
    address: int = tensor.untyped_storage()._cdata
    return address


def pad_along(x: Tensor, dimension: int, before: int, behind: int) -> Tensor:
    """Return N C D H W with zeros before and behind it along a dimension."""
    of_later = [0, 0] * (4 - dimension)  # There are two for each dimension, from the last on.
    return F.pad(x, [*of_later, before, behind])


RULES: dict[str, Rule] = {}  # Rules by operation; each module of this folder adds its own.


def rule(*operations: str) -> Callable[[type[Rule]], type[Rule]]:
    """Return a decorator that registers an object of a class of rules for operations, by their names (`value.op`)."""

    def register(kind: type[Rule]) -> type[Rule]:
        RULES.update({operation: kind() for operation in operations})
        return kind

    return register


for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
