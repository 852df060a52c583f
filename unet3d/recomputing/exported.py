"""Reads the graph of a network from what torch.export gives, node by node."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind

from unet3d.base.errors import UserError
from unet3d.recomputing.graph import (
    DROPOUTS,
    Derived,
    Graph,
    Like,
    Value,
    Weight,
    gives_view,
    has_gradients,
    leaves,
    operation_name,
)
from unet3d.recomputing.nodes import (
    ENTERS_AUTOCAST,
    MARKS,
    SWITCHES_GRADIENTS,
    InPrecision,
    Precision,
    is_in_place,
    is_off,
    is_random,
    is_same,
    is_same_memory,
    is_view_of,
    layout_like,
    types_of,
    without_writing,
    written_argument,
)
from unet3d.recomputing.readable import code_of, look_through
from unet3d.recomputing.refusals import (
    calls_functions,
    changes_memory,
    draws,
    gives_number,
    has_unknown_size,
    layer_of,
    place_of,
    turns_on_autocast,
)

# Operations whose random numbers do not depend on those of their first argument: by the first they are written over it.
FILLING = ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform")
DETACH = torch.ops.aten.detach.default
ALIKE = ("rand_like", "randint_like", "randn_like")


class Reader:
    """Reads an exported program node by node."""

    def __init__(self, program: ExportedProgram, model: nn.Module) -> None:
        self.program = program
        self.model = model
        self.constants: dict[str, Tensor] = {}
        self.values: list[Value] = []
        self.derived: list[Derived] = []
        self.counters: list[str] = []
        self.fresh: set[str] = set()  # derived tensors that share no memory with parameters and buffers
        self.read: set[str] = set()  # weights that values read
        self.memory_of: dict[str, str] = {}  # derived tensors in the memory of another, by the name of that
        self.known: dict[fx.Node, Any] = {}  # what a node stands for: a Value, a Weight, or a tuple-valued call
        self.fakes: dict[fx.Node, Any] = {}  # results without data, where their types are not those of the program
        self.image: Value | None = None
        self.device_type = ""
        self.is_mixed = False  # or traced under autocast, where types of maps are not those of plain's
        self.has_gradients = True  # or within torch.no_grad()
        self.detached: dict[Value | Weight, Value | Weight] = {}  # what has gradients, by what it is without
        self.without_gradient: set[Value | Weight] = set()  # what was computed without gradients
        self.precision: Precision | None = None  # within torch.autocast() in forward, if it is not the pass's
        self.around: list[Precision | None] = []  # the same, of what is around that

    def graph(self) -> Graph:
        """Return the graph of all nodes."""
        self._read_inputs(self.program.graph_signature)
        for node in self.program.graph.nodes:
            if node.target in MARKS:
                self._read_mark(node)
            elif isinstance(node.target, HigherOrderOperator):
                raise UserError(calls_functions(node))
            elif node.op == "call_function":
                self._read_call(node)
        if not self.has_gradients:
            name = type(self.model).__name__
            raise UserError(f"{name}: forward turns gradients off and not on again; use torch.no_grad() as a context")
        assert self.image is not None
        returned = self._read_outputs(self.program.graph.output_node())
        outputs = [leaf for leaf in dict.fromkeys(returned) if isinstance(leaf, Value) and leaf is not self.image]
        needed = _needed(outputs)
        return Graph(
            image=self.image,
            values=tuple(value for value in self.values if value in needed),
            outputs=tuple(outputs),
            returned=returned,
            out_spec=self.program.call_spec.out_spec,
            derived=tuple(self.derived),
            constants=self.constants,
            counters=tuple(self.counters),
        )

    def _read_mark(self, node: fx.Node) -> None:
        """Take note that gradients or autocast are switched."""
        if node.target is SWITCHES_GRADIENTS:
            self.has_gradients = bool(node.args[0])
        elif node.target is ENTERS_AUTOCAST:
            self.around.append(self.precision)
            device_type, dtype, enabled, _ = node.args
            precision = Precision(str(device_type), dtype, bool(enabled))  # type: ignore[arg-type]
            if precision.device_type == self.device_type:
                self.precision = None if precision.is_ours() else precision
        else:
            self.precision = self.around.pop()

    def _detached(self, tree: Any) -> Any:
        """Return arguments of an operation without gradients: what has some is detached."""
        if isinstance(tree, tuple):
            return tuple(self._detached(leaf) for leaf in tree)
        if isinstance(tree, dict):
            return {name: self._detached(leaf) for name, leaf in tree.items()}
        if not isinstance(tree, Value | Weight) or tree in self.without_gradient:
            return tree
        if isinstance(tree, Value) and not has_gradients(tree.dtype):
            return tree
        if isinstance(tree, Weight) and tree.name in self.program.graph_signature.buffers:
            return tree  # which a normalisation may change
        if tree not in self.detached:
            name = f"{tree.name} detached"
            if isinstance(tree, Value):
                value = Value(name, "detach", DETACH, (tree,), {}, tree.shape, tree.dtype, tree.layer)
                self.values.append(value)
                self.detached[tree] = value
            else:
                self.derived.append(Derived(name, DETACH, (tree,), {}))
                self.memory_of[name] = self.memory_of.get(tree.name, tree.name)
                if tree.name in self.fresh:
                    self.fresh.add(name)
                self.detached[tree] = Weight(name, tree.shape)
            self.without_gradient.add(self.detached[tree])
        return self.detached[tree]

    def _read_inputs(self, signature: ExportGraphSignature) -> None:
        placeholders = [node for node in self.program.graph.nodes if node.op == "placeholder"]
        for node, spec in zip(placeholders, signature.input_specs, strict=True):
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                assert spec.target is not None
                self.known[node] = Weight(spec.target, node.meta["val"].shape)
            elif spec.kind is InputKind.USER_INPUT:
                fake = node.meta["val"]
                self.device_type = fake.device.type
                self.is_mixed = torch.is_autocast_enabled(self.device_type)
                self.image = Value(node.name, "image", _nothing, (), {}, fake.shape, fake.dtype, "")
                self.known[node] = self.image
            elif spec.kind is InputKind.CUSTOM_OBJ:
                name = type(self.model).__name__
                raise UserError(f"{name}: forward draws by a generator of its own (torch.Generator); draw without one")
            elif spec.kind is InputKind.CONSTANT_TENSOR and spec.target is not None:
                self.constants[node.name] = self._trained(self.program.constants[spec.target])
                self.known[node] = Weight(node.name, self.constants[node.name].shape)

    def _trained(self, constant: Tensor) -> Tensor:
        """Return the tensor of the network that a constant is, where that needs a gradient: torch.export drops it."""
        for tensor in look_through(self.model, code_of(self.model)).tensors:
            if tensor.requires_grad and tensor.is_leaf and is_same_memory(tensor, constant):
                return tensor
        return constant

    def _read_call(self, node: fx.Node) -> None:
        target = node.target
        assert callable(target)
        args = self._look_up(node.args)
        kwargs = self._look_up(node.kwargs)
        if target is operator.getitem:
            self._read_element(node)
            return
        op = operation_name(target)
        if op == "alias" or is_off(op, args) or (op == "to" and not self.is_mixed and is_same(node, op)):
            self.known[node] = args[0]
            return
        if not self.has_gradients and not is_same(node, op):
            args, kwargs = self._detached(args), self._detached(kwargs)
        if self.precision is not None and self.precision.enabled:
            raise UserError(turns_on_autocast(node, self.precision.dtype))
        if op.startswith("_assert"):
            return  # of types and sizes, which are those of the example
        if is_random(op, target, args, kwargs) and args and isinstance(args[0], Value):
            if op not in DROPOUTS:
                self._read_numbers(node, op, args, kwargs)
                return
            args = (*args, self._read_mask(node, *args))
        written = written_argument(target, args, kwargs)
        has_maps = any(isinstance(leaf, Value | _Several) for leaf in leaves((args, tuple(kwargs.values()))))
        if isinstance(written, Weight) and not (has_maps and self._is_alone(written)):
            self._read_change_of_weight(node, op, written, args, kwargs)
            return
        if op != operation_name(target, keeps_underscore=True):
            target = without_writing(target, node)
        elif written is not None:
            raise UserError(changes_memory(node, f"{op}(out=)"))
        if self.precision is not None:
            target = InPrecision(target, self.precision, node)
        arguments = list(leaves((args, tuple(kwargs.values()))))
        if not any(isinstance(leaf, Value | _Several) for leaf in arguments):
            self._read_derived(node, target, args, kwargs)
            return
        self.read.update(leaf.name for leaf in arguments if isinstance(leaf, Weight))
        if op not in DROPOUTS and is_random(op, target, args, kwargs):
            raise UserError(draws(node, op))
        fake = self._fake(node)
        if isinstance(fake, tuple | list):
            self.known[node] = _Several(op, target, args, kwargs)
            return
        if not isinstance(fake, Tensor):
            raise UserError(gives_number(node))
        if not all(isinstance(length, int) for length in fake.shape):
            raise UserError(has_unknown_size(node, op))
        value = Value(node.name, op, target, args, kwargs, fake.shape, fake.dtype, layer_of(node))
        self._add(node, value, args)

    def _add(self, node: fx.Node, value: Value, args: tuple[Any, ...]) -> None:
        """Add a value; after an in-place operation it also stands for the map that was changed."""
        self.values.append(value)
        if not self.has_gradients and not is_same(node, value.op):
            self.without_gradient.add(value)
        if is_in_place(node):
            changed = args[0]
            if changed is self.image:
                layer = value.layer or type(self.model).__name__
                problem = f"{layer}: {value.op}_ changes the image itself, which a schedule would not{place_of(node)}"
                raise UserError(f"{problem}; change a copy of it")
            shares_memory = any(is_view_of(other, changed) for other in self.values if other is not value)
            sources = changed.inputs if isinstance(changed, Value) else ()
            if shares_memory or any(is_view_of(changed, source) for source in sources):
                layer = value.layer or "the network"
                raise UserError(f"{layer}: {value.op}_ changes a map that shares memory with another{place_of(node)}")
            for earlier, stands_for in self.known.items():
                if stands_for is changed:
                    self.known[earlier] = value
        self.known[node] = value

    def _read_element(self, node: fx.Node) -> None:
        whole = self.known[node.args[0]]  # type: ignore[index]
        if whole.op == "broadcast_tensors" and whole.args[0][node.args[1]].shape == node.meta["val"].shape:
            self.known[node] = whole.args[0][node.args[1]]
            return
        assert isinstance(whole, _Several)
        if not any(isinstance(leaf, Value) for leaf in leaves((whole.args, tuple(whole.kwargs.values())))):
            self._read_derived(node, whole.target, whole.args, whole.kwargs)
            return
        fake = self._fake(node)
        element = node.args[1]
        assert isinstance(element, int)
        layer = layer_of(node)
        value = Value(
            node.name, whole.op, whole.target, whole.args, whole.kwargs, fake.shape, fake.dtype, layer, element
        )
        self.values.append(value)
        if not self.has_gradients:
            self.without_gradient.add(value)
        self.known[node] = value

    def _read_change_of_weight(
        self, node: fx.Node, op: str, weight: Weight, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Take note of a counter of passes, or of numbers written into a new tensor or a buffer.

        Raises UserError for changes that a schedule would not repeat: by numbers of maps, of what was read before, of
        parameters.
        """
        name = weight.name
        if op == "add" and args[1] == 1 and name.endswith("num_batches_tracked"):
            self.counters.append(name)
            self.known[node] = weight
            return
        memory = self.memory_of.get(name, name)
        layer = layer_of(node) or "the network"
        if any(isinstance(leaf, Value | _Several) for leaf in leaves((args, tuple(kwargs.values())))):
            problem = f"{layer}: {op}_ writes numbers of a map into {memory}{place_of(node)}"
            raise UserError(
                f"{problem}, which recompute would not repeat; make a new tensor of them, as torch.stack does"
            )
        if any(self.memory_of.get(other, other) == memory for other in self.read):
            problem = f"{layer}: {op}_ changes a tensor that was read before{place_of(node)}"
            raise UserError(f"{problem}, which recompute would not repeat in this order; change a copy of it")
        if name not in self.fresh and memory not in self.program.graph_signature.buffers:
            problem = f"{layer}: {memory} is changed by {op}_ in each pass{place_of(node)}"
            raise UserError(f"{problem}, which recompute would not repeat; change it outside of forward")
        self._read_derived(node, node.target, args, kwargs, weight)

    def _is_alone(self, weight: Weight) -> bool:
        """Return whether a weight is a new tensor, of which there is no view."""
        return weight.name in self.fresh and weight.name not in (*self.memory_of, *self.memory_of.values())

    def _read_derived(
        self,
        node: fx.Node,
        target: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        written: Weight | None = None,
    ) -> None:
        """Add a tensor that is computed without the image, or take note of a call with several such results.

        `written`: the tensor that is changed by it.
        """
        fake = self._fake(node)
        op = operation_name(target)
        if isinstance(fake, tuple | list):
            self.known[node] = _Several(op, target, args, kwargs)
            return
        if not isinstance(fake, Tensor):
            return
        name = self._new_name(node)
        element = node.args[1] if node.target is operator.getitem else None
        assert isinstance(element, int | None)
        sources = [leaf.name for leaf in leaves((args, tuple(kwargs.values()))) if isinstance(leaf, Weight)]
        if written is not None:
            sources = [written.name]
        is_once = is_random(op, target, args, kwargs) or (written is not None and written.name not in self.fresh)
        self.derived.append(Derived(name, target, args, kwargs, fake.nbytes, is_once, element))
        weight = Weight(name, fake.shape)
        self.known[node] = weight
        if not self.has_gradients:
            self.without_gradient.add(weight)
        if not gives_view(target) or all(source in self.fresh for source in sources):
            self.fresh.add(name)
        if gives_view(target) and sources:
            self.memory_of[name] = self.memory_of.get(sources[0], sources[0])

    def _new_name(self, node: fx.Node) -> str:
        """Return a name for a derived tensor that no parameter has, and no tensor of another block."""
        return f"{node.name}%{len(self.derived)}"

    def _fake(self, node: fx.Node) -> Any:
        """Return a node's result without data, of the type that it has in plain.

        torch.export does not see what autocast does within an operation: CUDA's interpolations are in float32.
        """
        fake = node.meta.get("val")
        sources = node.all_input_nodes
        is_hidden = torch.is_autocast_enabled(self.device_type) and operation_name(node.target).startswith("upsample")
        if node in self.fakes or self.precision is not None:
            return self.fakes.get(node, fake)
        if not is_hidden and not any(source in self.fakes for source in sources):
            return fake
        assert callable(node.target)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._fake)
        again = node.target(*args, **kwargs)
        if types_of(again) != types_of(fake):
            self.fakes[node] = again
        return self.fakes.get(node, fake)

    def _read_numbers(self, node: fx.Node, op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Read random numbers of which a map gives no more than number and type.

        Raises UserError for those that depend on a map's numbers.
        """
        changed, *others = args
        writes = is_in_place(node)
        is_apart = op in (FILLING if writes else ALIKE)
        if op == "bernoulli" and others:
            is_apart = True
        if not is_apart or any(isinstance(leaf, Value | _Several) for leaf in leaves((others, tuple(kwargs.values())))):
            raise UserError(draws(node, op))
        if writes and (changed is self.image or self._shares_memory(changed)):
            layer = layer_of(node) or "the network"
            raise UserError(f"{layer}: {op}_ changes a map that shares memory with another{place_of(node)}")
        source = node.args[0]
        assert isinstance(source, fx.Node)
        self._read_derived(node, node.target, (layout_like(self._fake(source)), *others), kwargs)
        if writes:
            for earlier, stands_for in self.known.items():
                if stands_for is changed:
                    self.known[earlier] = self.known[node]

    def _shares_memory(self, value: Value) -> bool:
        """Return whether another value is a view of this one, or this one of another."""
        if any(is_view_of(other, value) for other in self.values):
            return True
        return any(is_view_of(value, source) for source in value.inputs)

    def _read_mask(self, node: fx.Node, value: Value, probability: float, _: bool) -> Weight:
        """Return what a dropout draws: a factor of each channel, or whether each number stays."""
        name = self._new_name(node)
        target: Any = node.target
        source = node.args[0]
        assert isinstance(source, fx.Node)
        like = layout_like(self._fake(source))
        if operation_name(target) == "feature_dropout":
            ones = torch.Size([*value.shape[:2], *(1 for _ in value.shape[2:])])
            like = Like(ones, torch.empty(ones, device="meta").stride(), like.dtype, like.device)
            factors = ones.numel() * like.dtype.itemsize
            self.derived.append(Derived(name, target, (like, probability, True), {}, factors, is_once=True))
            return Weight(name, ones)
        args: tuple[Any, ...] = (like, probability, True)
        if like.device.type == "cpu" and probability < 1:
            # The same numbers, in no more memory than the map's.
            target = torch.ops.aten.bernoulli_.float
            args = (like, 1 - probability)
        drawn = Weight(f"{name} in the type of maps", value.shape)
        self.derived.append(Derived(drawn.name, target, args, {}, is_once=True))
        self.derived.append(Derived(name, torch.ops.aten.ne.Scalar, (drawn, 0), {}, value.shape.numel()))
        return Weight(name, value.shape)

    def _read_outputs(self, node: fx.Node) -> tuple[Any, ...]:
        """Return what forward returns, in order: values, weights, and what is no tensor."""
        arguments = node.args[0]
        assert isinstance(arguments, tuple | list)
        returned = self._look_up(arguments)
        if not any(isinstance(leaf, Value) and leaf is not self.image for leaf in returned):
            raise UserError(f"{type(self.model).__name__} returns nothing that is computed from the image")
        return tuple(returned)

    def _look_up(self, tree: Any) -> Any:
        """Return arguments with what their nodes stand for."""
        if isinstance(tree, fx.Node):
            if tree not in self.known:
                raise UserError(gives_number(tree))
            return self.known[tree]
        if isinstance(tree, list | tuple):
            return tuple(self._look_up(leaf) for leaf in tree)
        if isinstance(tree, dict):
            return {name: self._look_up(leaf) for name, leaf in tree.items()}
        return tree


@dataclass(frozen=True, eq=False)
class _Several:
    """A call with several results; each that is used becomes a value, or a derived tensor."""

    op: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def _needed(outputs: Sequence[Value]) -> set[Value]:
    """Return the values from which the outputs are computed."""
    needed: set[Value] = set()
    waiting = list(outputs)
    while waiting:
        value = waiting.pop()
        if value not in needed:
            needed.add(value)
            waiting.extend(value.inputs)
    return needed


def _nothing() -> None:
    raise AssertionError("the image is given, not computed")
