"""A network as a graph of operations on maps, traced by torch.export.

A `Value` is the result of one operation that depends on the image. Parameters and buffers are `Weight`s; what is
computed from them alone is `Derived`: weights of `weight_norm`, masks and position tables of an attention. Random
numbers are among them, also those that dropouts draw: in the network's order, so that they are plain's.

Derived tensors that only groups read are computed within each group, just before they are read, and forgotten behind
it: they may be as large as a map. All others are computed before the pass, and autograd follows them from there to
the weights.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree

from unet3d.base.errors import UserError

OURS = str(Path(__file__).parent) + os.sep
DROPOUTS = ("dropout", "feature_dropout")  # their last argument is what they have drawn when the pass began
# Operations that return their first argument itself where their rate is 0, or in evaluation.
SWITCHED = (*DROPOUTS, "alpha_dropout", "feature_alpha_dropout")


@dataclass(eq=False, repr=False)
class Value:
    """The result of one operation; in-place variants are described as the operation that returns a new tensor."""

    name: str
    op: str  # "conv3d", "leaky_relu"
    target: Callable[..., Any]
    args: tuple[Any, ...]  # Values, Weights and constants, also in lists
    kwargs: Mapping[str, Any]
    shape: torch.Size
    dtype: torch.dtype
    layer: str  # path of the module that calls it
    element: int | None = None  # Index among several results.
    inputs: tuple["Value", ...] = field(init=False)  # once each, in the order of the arguments

    def __post_init__(self) -> None:
        self.inputs = tuple(dict.fromkeys(leaf for leaf in arguments(self) if isinstance(leaf, Value)))

    def __repr__(self) -> str:
        return f"{self.name}: {self.op} {list(self.shape)}"

    @property
    def nbytes(self) -> int:
        """Its bytes in the type that it has in the graph."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def has_own_precision(self) -> bool:
        """Whether it is computed in another precision than the pass."""
        return isinstance(self.target, InPrecision)

    def weights(self) -> list["Weight"]:
        """Return the parameters and buffers among the arguments, once each."""
        return list(dict.fromkeys(leaf for leaf in arguments(self) if isinstance(leaf, Weight)))

    def argument(self, position: int, default: Any = None) -> Any:
        """Return a positional argument, or the default that the operation's schema leaves out."""
        return self.args[position] if position < len(self.args) else default


@dataclass(frozen=True)
class Weight:
    """A parameter, a buffer, a constant, or a tensor derived from them, by its name."""

    name: str
    shape: torch.Size


@dataclass(frozen=True)
class Like:
    """A tensor of ones, as large as a value: an argument of an operation that reads no numbers of it."""

    shape: torch.Size
    strides: tuple[int, ...]  # Random numbers are drawn in the order of these.
    dtype: torch.dtype
    device: torch.device

    def tensor(self) -> Tensor:
        """Return it."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device).fill_(1)


@dataclass(frozen=True, eq=False)
class Derived:
    """A tensor that is computed without the image."""

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]  # Weights, Likes and constants
    kwargs: Mapping[str, Any]
    size: int = 0  # bytes
    is_once: bool = False  # drawn once, when a pass begins, or changes a buffer
    element: int | None = None  # Index among several results.


@dataclass(frozen=True, eq=False)
class Graph:
    """The operations of one forward pass, in the order in which the network calls them."""

    image: Value
    values: tuple[Value, ...]
    outputs: tuple[Value, ...]  # once each
    returned: tuple[Any, ...]  # what the network returns: outputs, the image, Weights, and what is no tensor
    out_spec: Any  # torch.utils._pytree.TreeSpec of `returned`; None: it is a tensor
    derived: tuple[Derived, ...]
    constants: Mapping[str, Tensor]
    counters: tuple[str, ...]  # buffers that count the passes

    def returned_weights(self) -> set[str]:
        """Return the names of weights that the network returns."""
        return {leaf.name for leaf in self.returned if isinstance(leaf, Weight)}

    def is_in(self, dtype: torch.dtype) -> bool:
        """Return whether it was traced in the precision of its passes, so that values have the types of plain's."""
        return any(value.dtype == dtype for value in (self.image, *self.values))

    def expression(self, root: Value, ends: Set[Value]) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
        """Return the values from which one is made, and those of `ends` that are read, each in the graph's order."""
        made = {root}
        read: set[Value] = set()
        for value in reversed(self.values):
            if value in made:
                read.update(source for source in value.inputs if source in ends)
                made.update(source for source in value.inputs if source not in ends)
        values = (self.image, *self.values)
        return tuple(value for value in values if value in made), tuple(value for value in values if value in read)

    def users(self) -> dict[Value, list[Value]]:
        """Return the values that read each value."""
        users: dict[Value, list[Value]] = {value: [] for value in (self.image, *self.values)}
        for value in self.values:
            for source in value.inputs:
                users[source].append(value)
        return users


def needed_for(outputs: Iterable[Value], values: Sequence[Value]) -> tuple[Value, ...]:
    """Return the values from which outputs are computed, and these, of some in the graph's order."""
    needed = set(outputs)
    for value in reversed(values):
        if value in needed:
            needed.update(value.inputs)
    return tuple(value for value in values if value in needed)


def leaves(tree: Any) -> Iterator[Any]:
    """Yield what is in lists within lists."""
    for leaf in tree:
        if isinstance(leaf, list | tuple):
            yield from leaves(leaf)
        else:
            yield leaf


def arguments(call: Any) -> Iterator[Any]:
    """Yield what an operation is given: a Value, a Derived, or a node of an exported program."""
    return leaves((call.args, tuple(call.kwargs.values())))


def has_gradients(dtype: torch.dtype) -> bool:
    """Return whether tensors of a type can have gradients: not whole numbers, not truths."""
    return dtype.is_floating_point or dtype.is_complex


def operation_name(target: Any, keeps_underscore: bool = False) -> str:
    """Return "leaky_relu" of aten::leaky_relu_.default."""
    packet = getattr(target, "overloadpacket", target)
    name = getattr(packet, "__name__", str(packet))
    is_operator = name.startswith("__")  # aten::__and__ is no and_
    return name if keeps_underscore or is_operator else name.rstrip("_")


def gives_view(target: Any) -> bool:
    """Return whether the result of an operation may share the memory of an argument."""
    schema = getattr(target, "_schema", None)
    return schema is None or any(result.alias_info is not None for result in schema.returns)


Steps = tuple[Derived, ...]  # Steps keep the graph's order, which is that of writes in place.


def connected(graph: Graph) -> list[Steps]:
    """Return the derived tensors in sets that are computed from one another."""
    set_of: dict[str, dict[str, Derived]] = {}
    for derived in graph.derived:
        together = {derived.name: derived}
        for name in names_read([derived]):
            together = set_of.get(name, {}) | together
        set_of |= dict.fromkeys(together, together)
    place = {derived: index for index, derived in enumerate(graph.derived)}
    unique = {id(together): together for together in set_of.values()}
    return [tuple(sorted(together.values(), key=place.__getitem__)) for together in unique.values()]


def derived_in_groups(graph: Graph, grouped: Set[Value]) -> list[Steps]:
    """Return the connected derived tensors that groups alone read, without those of once a pass.

    Those are random numbers, and changes of buffers, with all that is computed from the same buffers.
    """
    read_elsewhere = graph.returned_weights()
    for value in graph.values:
        if value not in grouped:
            read_elsewhere.update(weight.name for weight in value.weights())
    inner = [steps for steps in connected(graph) if read_elsewhere.isdisjoint(_names(steps))]
    once = [derived for derived in graph.derived if derived.is_once]
    changed = set(names_read(once)) | {derived.name for derived in once}
    return [steps for steps in inner if changed.isdisjoint((*_names(steps), *names_read(steps)))]


def trained_names(graph: Graph, trained: Iterable[str]) -> frozenset[str]:
    """Return the names of trained weights, and of the derived tensors that are connected with them."""
    names = set(trained)
    for steps in connected(graph):
        followed = [derived for derived in steps if operation_name(derived.target) != "detach"]
        if not names.isdisjoint(names_read(followed)):
            names.update(_names(steps))
    return frozenset(names)


def drawn_bytes(graph: Graph, wanted: Set[str]) -> int:
    """Return the bytes of random numbers, and of what is computed from them, that a pass keeps."""
    drawn = [steps for steps in connected(graph) if any(derived.is_once for derived in steps)]
    return sum(derived.size for steps in drawn for derived in steps if derived.name in wanted)


def _names(steps: Steps) -> list[str]:
    return [derived.name for derived in steps]


def names_read(steps: Iterable[Derived]) -> list[str]:
    """Return the names of the weights that are read and not computed by these steps, in order."""
    names: dict[str, None] = {}
    computed = set()
    for derived in steps:
        for leaf in arguments(derived):
            if isinstance(leaf, Weight) and leaf.name not in computed:
                names[leaf.name] = None
        computed.add(derived.name)
    return list(names)


def derive(steps: Sequence[Derived], known: Mapping[str, Tensor], wanted: Set[str]) -> dict[str, Tensor]:
    """Return the wanted ones of derived tensors; others are forgotten behind their last reader."""
    last_reader: dict[str, Derived] = {}
    for derived in steps:
        last_reader |= dict.fromkeys((derived.name, *names_read([derived])), derived)
    results: dict[str, Tensor] = {}
    for derived in steps:
        weights = {leaf: leaf.name for leaf in arguments(derived) if isinstance(leaf, Weight)}
        tensors = {weight: results[name] if name in results else known[name] for weight, name in weights.items()}
        results[derived.name] = carried_out(derived, tensors)
        tensors.clear()
        for name in (derived.name, *weights.values()):
            if name in results and last_reader[name] is derived and name not in wanted:
                del results[name]
    return results


def carried_out(operation: Value | Derived, tensors: Mapping[Any, Tensor | None]) -> Any:
    """Return the result of an operation on these tensors, in the place of its values and weights."""
    args = [filled(leaf, tensors) for leaf in operation.args]
    kwargs = {name: filled(leaf, tensors) for name, leaf in operation.kwargs.items()}
    result = operation.target(*args, **kwargs)
    return result if operation.element is None else result[operation.element]


def filled(tree: Any, tensors: Mapping[Any, Tensor | None]) -> Any:
    """Return arguments with tensors in the place of values and weights."""
    if isinstance(tree, Value | Weight):
        return tensors[tree]
    if isinstance(tree, Like):
        return tree.tensor()
    if isinstance(tree, tuple):
        return [filled(leaf, tensors) for leaf in tree]
    return tree


# The operations of a trace


@dataclass(frozen=True, eq=False)
class Call:
    """An operation and its arguments; of several results, each that is used becomes a value or a derived tensor."""

    op: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def reads_maps(self) -> bool:
        """Return whether it depends on the image."""
        return any(isinstance(leaf, Value | Call) for leaf in arguments(self))

    def is_off(self) -> bool:
        """Return whether it is a dropout that leaves its argument alone."""
        return self.op in SWITCHED and not (self.args[1] and self.args[2])

    def is_random(self) -> bool:
        """Return whether it draws random numbers with these arguments."""
        if torch.Tag.nondeterministic_seeded not in getattr(self.target, "tags", ()):
            return False
        if self.op == "scaled_dot_product_attention":
            return bool(self.args[4] if len(self.args) > 4 else self.kwargs.get("dropout_p", 0.0))
        if self.op == "rrelu":
            return len(self.args) > 3 and bool(self.args[3])
        return not self.is_off()

    def written_argument(self) -> Any:
        """Return the argument that it changes; None where it gives a new tensor."""
        schema: Any = self.target
        for place, argument in enumerate(schema._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                return self.args[place] if place < len(self.args) else self.kwargs.get(argument.name)
        return None


def is_in_place(node: fx.Node) -> bool:
    return operation_name(node.target) != operation_name(node.target, keeps_underscore=True)


def is_view_of(value: Value, source: Any) -> bool:
    """Return whether a value shares the memory of another."""
    if source not in value.inputs or (value.op == "to" and value.dtype != source.dtype):
        return False
    return gives_view(value.target)


def is_same(node: fx.Node, op: str) -> bool:
    """Return whether an operation returns its argument itself: a conversion to the type or the layout that it has."""
    if op not in ("contiguous", "to"):
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if op == "contiguous":
        layout: Any = node.kwargs.get("memory_format", torch.contiguous_format)
        return bool(source.meta["val"].is_contiguous(memory_format=layout))
    return len(node.args) == 2 and not node.kwargs and node.args[1] == source.meta["val"].dtype


class Precision(NamedTuple):
    """What torch.autocast is set to for a type of device."""

    device_type: str
    dtype: torch.dtype
    enabled: bool

    def is_ours(self) -> bool:
        """Return whether operations compute alike under the autocast that is on now."""
        is_on = torch.is_autocast_enabled(self.device_type)
        if not self.enabled or not is_on:
            return self.enabled == is_on
        return torch.get_autocast_dtype(self.device_type) == self.dtype


class InPrecision:
    """An operation in its own precision, of tensors in the types that plain's have."""

    def __init__(self, target: Callable[..., Any], precision: Precision, node: fx.Node) -> None:
        self.target = target
        self.precision = precision
        self.dtypes = []  # Types of the tensors among the arguments, in order.
        for leaf in arguments(node):
            if isinstance(leaf, fx.Node) and isinstance(leaf.meta.get("val"), Tensor):
                self.dtypes.append(leaf.meta["val"].dtype)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the operation, such as its schema."""
        if name == "target":
            raise AttributeError(name)
        return getattr(self.target, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the operation's result."""
        arguments, structure = _pytree.tree_flatten((args, kwargs))
        dtypes = iter(self.dtypes)
        for place, leaf in enumerate(arguments):
            if isinstance(leaf, Tensor):
                arguments[place] = leaf.to(next(dtypes, leaf.dtype))
        args, kwargs = _pytree.tree_unflatten(arguments, structure)
        device_type, dtype, enabled = self.precision
        with torch.autocast(device_type, dtype, enabled, cache_enabled=False):
            return self.target(*args, **kwargs)


def refusal(node: fx.Node, fault: str, advice: str = "") -> UserError:
    """Return the error about an operation that recompute cannot carry out: the layer, the place, and what to do."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    calls = [line.strip() for line in lines if line.strip().startswith("File ") and OURS not in line]
    place = f" ({calls[-1]})" if calls else ""
    return UserError(f"{layer_of(node) or 'the network'}: {fault}{place}{advice}")


def layer_of(node: fx.Node) -> str:
    """Return the path of the module that calls a node."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return str(paths[-1]) if paths else ""
