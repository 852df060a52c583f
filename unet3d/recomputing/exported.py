"""Reads the graph of a network from what torch.export gives, node by node."""

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind
from torch.utils._pytree import tree_leaves, tree_map_only

from unet3d.base.errors import UserError
from unet3d.recomputing.graph import (
    DROPOUTS,
    Call,
    Derived,
    Graph,
    InPrecision,
    Like,
    Precision,
    Value,
    Weight,
    arguments,
    gives_view,
    has_gradients,
    is_in_place,
    is_same,
    is_view_of,
    layer_of,
    needed_for,
    operation_name,
    refusal,
)
from unet3d.recomputing.readable import Look, code_of

# Operations whose random numbers do not depend on those of their first argument: by the first they are written over it.
FILLING = ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform")
SWITCHES_GRADIENTS: Any = torch._C._set_grad_enabled
MARKS = (SWITCHES_GRADIENTS, _enter_autocast, _exit_autocast)
DETACH = torch.ops.aten.detach.default
ALIKE = ("rand_like", "randint_like", "randn_like")


class Reader:
    """Reads an exported program node by node."""

    def __init__(self, program: ExportedProgram, model: nn.Module) -> None:
        self.program = program
        self.model = model
        self.name = type(model).__name__
        self.constants: dict[str, Tensor] = {}
        self.values: list[Value] = []
        self.derived: list[Derived] = []
        self.counters: list[str] = []
        self.fresh: set[str] = set()  # derived tensors that share no memory with parameters and buffers
        self.read: set[str] = set()  # weights that values read
        self.memory_of: dict[str, str] = {}  # derived tensors in the memory of another, by the name of that
        self.known: dict[fx.Node, Any] = {}  # what a node stands for: a Value, a Weight, or a call with several results
        self.fakes: dict[fx.Node, Any] = {}  # results without data, where their types are not those of the program
        self.image: Value | None = None
        self.device_type = ""
        self.is_mixed = False  # True if traced under autocast: its maps have other types than those of `plain`.
        self.has_gradients = True  # It is False within torch.no_grad().
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
                name = str(node.target).rpartition(".")[2]
                raise refusal(node, f"{name} calls functions, which recompute does not follow")
            elif node.op == "call_function":
                self._read_call(node)
        if not self.has_gradients:
            fault = "forward turns gradients off and not on again"
            raise UserError(f"{self.name}: {fault}; use torch.no_grad() as a context")
        assert self.image is not None
        returned = self._look_up(self.program.graph.output_node().args[0])
        outputs = [leaf for leaf in dict.fromkeys(returned) if isinstance(leaf, Value) and leaf is not self.image]
        if not outputs:
            raise UserError(f"{self.name} returns nothing that is computed from the image")
        return Graph(
            image=self.image,
            values=needed_for(outputs, self.values),
            outputs=tuple(outputs),
            returned=returned,
            out_spec=self.program.call_spec.out_spec,
            derived=tuple(self.derived),
            constants=self.constants,
            counters=tuple(self.counters),
        )

    def _read_inputs(self, signature: ExportGraphSignature) -> None:
        placeholders = [node for node in self.program.graph.nodes if node.op == "placeholder"]
        for node, spec in zip(placeholders, signature.input_specs, strict=True):
            if spec.kind is InputKind.CUSTOM_OBJ:
                fault = "forward draws by its own generator (torch.Generator)"
                raise UserError(f"{self.name}: {fault}; draw without one")
            fake = node.meta["val"]
            if spec.kind is InputKind.USER_INPUT:
                self.device_type = fake.device.type
                self.is_mixed = torch.is_autocast_enabled(self.device_type)
                self.image = Value(node.name, "image", DETACH, (), {}, fake.shape, fake.dtype, "")
                self.known[node] = self.image
            elif spec.target is not None:
                name = spec.target
                if spec.kind is InputKind.CONSTANT_TENSOR:
                    name = node.name
                    self.constants[name] = self._trained(self.program.constants[spec.target])
                self.known[node] = Weight(name, fake.shape)

    def _trained(self, constant: Tensor) -> Tensor:
        """Return the tensor of the network that a constant is, where that needs a gradient: torch.export drops it."""
        for tensor in Look(self.model, code_of(self.model)).tensors:
            if tensor.requires_grad and tensor.is_leaf and _memory(tensor) == _memory(constant):
                return tensor
        return constant

    def _read_mark(self, node: fx.Node) -> None:
        """Take note that gradients or autocast are switched."""
        if node.target is SWITCHES_GRADIENTS:
            self.has_gradients = bool(node.args[0])
        elif node.target is _enter_autocast:
            self.around.append(self.precision)
            device_type, dtype, enabled, _ = node.args
            precision = Precision(str(device_type), dtype, bool(enabled))  # type: ignore[arg-type]
            if precision.device_type == self.device_type:
                self.precision = None if precision.is_ours() else precision
        else:
            self.precision = self.around.pop()

    def _read_call(self, node: fx.Node) -> None:
        target: Any = node.target
        args, kwargs = self._look_up(node.args), self._look_up(node.kwargs)
        if target is operator.getitem:
            whole, element = args
            if whole.op == "broadcast_tensors" and whole.args[0][element].shape == node.meta["val"].shape:
                self.known[node] = whole.args[0][element]
            else:
                self._read_result(node, whole, element=element)
            return
        call = Call(operation_name(target), target, args, kwargs)
        op = call.op
        if op == "alias" or call.is_off() or (op == "to" and not self.is_mixed and is_same(node, op)):
            self.known[node] = args[0]
            return
        if not self.has_gradients and not is_same(node, op):
            args, kwargs = tree_map_only((Value, Weight), self._detached, (args, kwargs))
            call = replace(call, args=args, kwargs=kwargs)
        if self.precision is not None and self.precision.enabled:
            fault = f"forward turns on torch.autocast with {self.precision.dtype} by itself"
            raise refusal(node, fault, ", which recompute does not follow; call the network within it instead")
        if op.startswith("_assert"):
            return  # An assertion about types and sizes holds: they are the example's.
        if call.is_random() and args and isinstance(args[0], Value):
            if op not in DROPOUTS:
                self._read_numbers(node, call)
                return
            call = replace(call, args=(*args, self._read_mask(node, *args)))
        written = call.written_argument()
        if isinstance(written, Weight) and not (call.reads_maps() and self._is_alone(written)):
            self._read_change_of_weight(node, call, written)
            return
        if is_in_place(node):
            overload = getattr(getattr(torch.ops.aten, op, None), target._overloadname, None)
            if overload is None:
                raise refusal(node, f"{target} has no variant that gives a new tensor")
            call = replace(call, target=overload)
        elif written is not None:
            advice = ", which recompute would not repeat; let it give a new tensor"
            raise refusal(node, f"{op}(out=) writes over a map", advice)
        if self.precision is not None:
            call = replace(call, target=InPrecision(call.target, self.precision, node))
        self._read_result(node, call)

    def _read_result(
        self, node: fx.Node, call: Call, element: int | None = None, written: Weight | None = None
    ) -> None:
        """Add what a call gives: a value, or a tensor that is computed without the image, which may be `written`."""
        fake = self._fake(node)
        reads_maps = call.reads_maps()
        if reads_maps:
            self.read.update(leaf.name for leaf in arguments(call) if isinstance(leaf, Weight))
            if call.op not in DROPOUTS and call.is_random():
                raise _draws(node, call.op)
        if isinstance(fake, tuple | list):
            self.known[node] = call
        elif isinstance(fake, Tensor):
            result: Value | Weight
            if reads_maps:
                result = self._add_value(node, call, fake, element)
            else:
                name = f"{node.name}%{len(self.derived)}"
                is_once = call.is_random() or (written is not None and written.name not in self.fresh)
                derived = Derived(name, call.target, call.args, call.kwargs, fake.nbytes, is_once, element)
                result = self._add_derived(derived, fake.shape, written)
            self.known[node] = result
            if not self.has_gradients and not is_same(node, call.op):
                self.without_gradient.add(result)
        elif reads_maps:
            raise _gives_number(node)

    def _add_value(self, node: fx.Node, call: Call, fake: Tensor, element: int | None) -> Value:
        """Return a value; after an in-place operation it also stands for the map that was changed."""
        if not all(isinstance(length, int) for length in fake.shape):
            fault = f"the size of what {call.op} gives depends on the numbers of a tensor"
            raise refusal(node, fault, "; use torch.where, or a product with the mask")
        layer = layer_of(node)
        value = Value(node.name, call.op, call.target, call.args, call.kwargs, fake.shape, fake.dtype, layer, element)
        if is_in_place(node):
            self._refuse_shared(node, call)
            self._replace(call.args[0], value)
        self.values.append(value)
        return value

    def _add_derived(self, derived: Derived, shape: torch.Size, written: Weight | None = None) -> Weight:
        """Return a tensor that is computed without the image, from now on; it may be `written` before."""
        name, is_view = derived.name, gives_view(derived.target)
        sources = [leaf.name for leaf in arguments(derived) if isinstance(leaf, Weight)]
        if written is not None:
            sources = [written.name]
        self.derived.append(derived)
        if not is_view or self.fresh.issuperset(sources):
            self.fresh.add(name)
        if is_view and sources:
            self.memory_of[name] = self.memory_of.get(sources[0], sources[0])
        return Weight(name, shape)

    def _replace(self, changed: Any, by: Value | Weight) -> None:
        """Let all nodes that stand for a map that was changed stand for what it is now."""
        for earlier, stands_for in self.known.items():
            if stands_for is changed:
                self.known[earlier] = by

    def _refuse_shared(self, node: fx.Node, call: Call) -> None:
        """Raise UserError where an operation changes the image, or a map that is a view of another or has one."""
        changed = call.args[0]
        if changed is self.image:
            fault = f"{call.op}_ changes the image itself, which a schedule would not"
            raise refusal(node, fault, "; change a copy of it")
        sources = changed.inputs if isinstance(changed, Value) else ()
        has_view = any(is_view_of(other, changed) for other in self.values)
        if has_view or any(is_view_of(changed, source) for source in sources):
            raise refusal(node, f"{call.op}_ changes a map that shares memory with another")

    def _read_change_of_weight(self, node: fx.Node, call: Call, weight: Weight) -> None:
        """Take note of a counter of passes, or of numbers written into a new tensor or a buffer.

        Raises UserError for changes that a schedule would not repeat: by numbers of maps, of what was read before, of
        parameters.
        """
        name, op = weight.name, call.op
        if op == "add" and call.args[1] == 1 and name.endswith("num_batches_tracked"):
            self.counters.append(name)
            self.known[node] = weight
            return
        memory = self.memory_of.get(name, name)
        if call.reads_maps():
            advice = ", which recompute would not repeat; make a new tensor of them, as torch.stack does"
            raise refusal(node, f"{op}_ writes numbers of a map into {memory}", advice)
        if any(self.memory_of.get(other, other) == memory for other in self.read):
            advice = ", which recompute would not repeat in this order; change a copy of it"
            raise refusal(node, f"{op}_ changes a tensor that was read before", advice)
        if name not in self.fresh and memory not in self.program.graph_signature.buffers:
            advice = ", which recompute would not repeat; change it outside of forward"
            raise refusal(node, f"{memory} is changed by {op}_ in each pass", advice)
        self._read_result(node, call, written=weight)

    def _is_alone(self, weight: Weight) -> bool:
        """Return whether a weight is a new tensor, of which there is no view."""
        return weight.name in self.fresh and weight.name not in (*self.memory_of, *self.memory_of.values())

    def _fake(self, node: fx.Node) -> Any:
        """Return a node's result without data, of the type that it has in plain.

        torch.export does not see what autocast does within an operation: CUDA's interpolations are in float32.
        """
        fake = node.meta.get("val")
        is_hidden = torch.is_autocast_enabled(self.device_type) and operation_name(node.target).startswith("upsample")
        if node in self.fakes or self.precision is not None:
            return self.fakes.get(node, fake)
        if not is_hidden and self.fakes.keys().isdisjoint(node.all_input_nodes):
            return fake
        assert callable(node.target)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._fake)
        again = node.target(*args, **kwargs)
        pairs = zip(tree_leaves(again), tree_leaves(fake), strict=True)
        if any(getattr(leaf, "dtype", None) != getattr(other, "dtype", None) for leaf, other in pairs):
            self.fakes[node] = again
        return self.fakes.get(node, fake)

    def _like(self, node: fx.Node) -> Like:
        """Return the size and layout that torch gives to random numbers for a node's first argument."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        fake = self._fake(source)
        return Like(fake.shape, torch.empty_like(fake).stride(), fake.dtype, fake.device)

    def _read_numbers(self, node: fx.Node, call: Call) -> None:
        """Read random numbers of which a map gives no more than number and type.

        Raises UserError for those that depend on a map's numbers.
        """
        changed, *others = call.args
        writes = is_in_place(node)
        is_apart = call.op in (FILLING if writes else ALIKE) or (call.op == "bernoulli" and others)
        drawn = replace(call, args=(self._like(node), *others))
        if not is_apart or drawn.reads_maps():
            raise _draws(node, call.op)
        if writes:
            self._refuse_shared(node, call)
        self._read_result(node, drawn)
        if writes:
            self._replace(changed, self.known[node])

    def _read_mask(self, node: fx.Node, value: Value, probability: float, _: bool) -> Weight:
        """Return what a dropout draws: a factor of each channel, or whether each number stays."""
        name = f"{node.name}%{len(self.derived)}"
        target: Any = node.target
        like = self._like(node)
        if operation_name(target) == "feature_dropout":
            ones = torch.Size([*value.shape[:2], *(1 for _ in value.shape[2:])])
            like = replace(like, shape=ones, strides=torch.empty(ones, device="meta").stride())
            factors = ones.numel() * like.dtype.itemsize
            return self._add_derived(Derived(name, target, (like, probability, True), {}, factors, is_once=True), ones)
        args: tuple[Any, ...] = (like, probability, True)
        if like.device.type == "cpu" and probability < 1:
            # The same numbers, in no more memory than the map's.
            target = torch.ops.aten.bernoulli_.float
            args = (like, 1 - probability)
        drawn = self._add_derived(Derived(f"{name} in the type of maps", target, args, {}, is_once=True), value.shape)
        stays = Derived(name, torch.ops.aten.ne.Scalar, (drawn, 0), {}, value.shape.numel())
        return self._add_derived(stays, value.shape)

    def _detached(self, leaf: Any) -> Any:
        """Return an argument of an operation without gradients: what has some is detached."""
        if isinstance(leaf, Value):
            stays = not has_gradients(leaf.dtype)
        else:
            stays = leaf.name in self.program.graph_signature.buffers  # A normalisation may change them.
        if stays or leaf in self.without_gradient:
            return leaf
        if leaf not in self.detached:
            name = f"{leaf.name} detached"
            if isinstance(leaf, Value):
                value = Value(name, "detach", DETACH, (leaf,), {}, leaf.shape, leaf.dtype, leaf.layer)
                self.values.append(value)
                self.detached[leaf] = value
            else:
                self.detached[leaf] = self._add_derived(Derived(name, DETACH, (leaf,), {}), leaf.shape)
            self.without_gradient.add(self.detached[leaf])
        return self.detached[leaf]

    def _look_up(self, tree: Any) -> Any:
        """Return arguments with what their nodes stand for."""
        if isinstance(tree, fx.Node):
            if tree not in self.known:
                raise _gives_number(tree)
            return self.known[tree]
        if isinstance(tree, list | tuple):
            return tuple(self._look_up(leaf) for leaf in tree)
        if isinstance(tree, Mapping):
            return {name: self._look_up(leaf) for name, leaf in tree.items()}
        return tree


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """Return where and how a tensor lies in memory."""
    return tensor.untyped_storage()._cdata, tensor.shape, tensor.stride(), tensor.storage_offset()


def _gives_number(node: fx.Node) -> UserError:
    """Return the refusal of an operation that takes a number out of a tensor."""
    fault = f"{operation_name(node.target)} takes a number out of a tensor"
    return refusal(node, fault, ", which recompute would not know; compute with the tensor")


def _draws(node: fx.Node, op: str) -> UserError:
    """Return the refusal of an operation that draws random numbers of a map's numbers: a second run draws others."""
    if op == "scaled_dot_product_attention":
        fault = f"{op} draws dropout within its kernel, and would draw another when it is made again"
        return refusal(node, fault, "; set its dropout_p to 0, or compute the attention by matmul, softmax, dropout")
    fault = f"{op} draws random numbers that depend on a map, and would draw others when it is made again"
    advice = "; use dropout, or compute them from torch.rand_like, which is drawn once a pass"
    return refusal(node, fault, advice)
