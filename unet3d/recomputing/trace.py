"""Reads the graph of a network from torch.export."""

import io
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind

from unet3d.base.errors import UserError
from unet3d.recomputing.graph import DROPOUTS, Derived, Graph, Value, Weight, gives_view, leaves, operation_name
from unet3d.recomputing.refusals import (
    cannot_trace,
    draws,
    has_contexts,
    layer_of,
    place_of,
    refuse_exchange,
    refuse_hooks,
)


def trace(model: nn.Module, image: Tensor) -> Graph:
    """Return the graph of `model(image)` in its present mode, with the sizes of this image.

    Raises UserError where the network cannot be described so, and names the place.
    """
    refuse_hooks(model)
    refuse_exchange(model)
    try:
        with _silence(), _attributes_stay(model):
            program = torch.export.export(model, (image.detach(),), strict=False)
    except Exception as error:  # torch.export has no common type of error
        raise UserError(cannot_trace(model, error)) from error
    return _Reader(program, model).graph()


@contextmanager
def _silence() -> Iterator[None]:
    """Keep torch.export's remarks on what it cannot trace to itself: the error says it."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what forward keeps in the module
            yield
    finally:
        logging.disable(disabled)


@contextmanager
def _attributes_stay(model: nn.Module) -> Iterator[None]:
    """Undo what tracing does to attributes that are no parameters: a list that two modules share becomes two."""
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    lists = [(value, list(value)) for _, known in before for value in known.values() if isinstance(value, list)]
    try:
        yield
    finally:
        for attributes, known in before:
            attributes.clear()
            attributes.update(known)
        for value, items in lists:
            value[:] = items


class _Reader:
    """Reads an exported program node by node."""

    def __init__(self, program: ExportedProgram, model: nn.Module) -> None:
        self.program = program
        self.model = model
        self.constants: dict[str, Tensor] = {}
        self.values: list[Value] = []
        self.derived: list[Derived] = []
        self.counters: list[str] = []
        self.fresh: set[str] = set()  # derived tensors that share no memory with parameters and buffers
        self.known: dict[fx.Node, Any] = {}  # what a node stands for: a Value, a Weight, or a tuple-valued call
        self.image: Value | None = None

    def graph(self) -> Graph:
        """Return the graph of all nodes."""
        outputs: tuple[Value, ...] = ()
        self._read_inputs(self.program.graph_signature)
        for node in self.program.graph.nodes:
            if node.op == "get_attr":
                raise UserError(has_contexts(self.model, node))
            if node.op == "call_function":
                self._read_call(node)
            elif node.op == "output":
                outputs = self._read_outputs(node)
        assert self.image is not None
        needed = _needed(outputs)
        return Graph(
            image=self.image,
            values=tuple(value for value in self.values if value in needed),
            outputs=outputs,
            out_spec=self.program.call_spec.out_spec,
            derived=tuple(self.derived),
            constants=self.constants,
            counters=tuple(self.counters),
        )

    def _read_inputs(self, signature: ExportGraphSignature) -> None:
        placeholders = [node for node in self.program.graph.nodes if node.op == "placeholder"]
        for node, spec in zip(placeholders, signature.input_specs, strict=True):
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                assert spec.target is not None
                self.known[node] = Weight(spec.target, node.meta["val"].shape)
            elif spec.kind is InputKind.USER_INPUT:
                fake = node.meta["val"]
                self.image = Value(node.name, "image", _nothing, (), {}, fake.shape, fake.dtype, "")
                self.known[node] = self.image
            elif spec.kind is InputKind.CONSTANT_TENSOR and spec.target is not None:
                self.constants[node.name] = self.program.constants[spec.target]
                self.known[node] = Weight(node.name, self.constants[node.name].shape)

    def _read_call(self, node: fx.Node) -> None:
        target = node.target
        assert callable(target)
        args = self._look_up(node.args)
        kwargs = self._look_up(node.kwargs)
        if target is operator.getitem:
            self._read_element(node)
            return
        op = operation_name(target)
        if op == "alias":
            self.known[node] = args[0]
            return
        if op.startswith("_assert"):
            return  # of types and sizes, which are those of the example
        if op != operation_name(target, keeps_underscore=True):
            if isinstance(args[0], Weight):
                self._read_change_of_weight(node, op, args, kwargs)
                return
            target = _functional(target, node)
        arguments = list(leaves((args, tuple(kwargs.values()))))
        if not any(isinstance(leaf, Value | _Several) for leaf in arguments):
            self._read_derived(node, target, args, kwargs)
            return
        if op not in DROPOUTS and _is_random(op, target, args, kwargs):
            raise UserError(draws(node, op))
        fake = node.meta.get("val")
        if isinstance(fake, tuple | list):
            self.known[node] = _Several(op, target, args, kwargs)
            return
        if not isinstance(fake, Tensor):
            raise UserError(f"{layer_of(node) or 'the network'}: {op} has a result that is no tensor{place_of(node)}")
        value = Value(node.name, op, target, args, kwargs, fake.shape, fake.dtype, layer_of(node))
        self._add(node, value, args)

    def _add(self, node: fx.Node, value: Value, args: tuple[Any, ...]) -> None:
        """Add a value; after an in-place operation it also stands for the map that was changed."""
        self.values.append(value)
        if _is_in_place(node):
            changed = args[0]
            shares_memory = any(_is_view_of(other, changed) for other in self.values if other is not value)
            if shares_memory or any(_is_view_of(changed, source) for source in changed.inputs):
                raise UserError(
                    f"{value.layer}: {value.op}_ changes a map that shares memory with another{place_of(node)}"
                )
            for earlier, stands_for in self.known.items():
                if stands_for is changed:
                    self.known[earlier] = value
        self.known[node] = value

    def _read_element(self, node: fx.Node) -> None:
        whole = self.known[node.args[0]]  # type: ignore[index]
        assert isinstance(whole, _Several)
        fake = node.meta["val"]
        element = node.args[1]
        assert isinstance(element, int)
        layer = layer_of(node)
        value = Value(
            node.name, whole.op, whole.target, whole.args, whole.kwargs, fake.shape, fake.dtype, layer, element
        )
        self.values.append(value)
        self.known[node] = value

    def _read_change_of_weight(self, node: fx.Node, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of a counter of passes, or of numbers written into a new tensor; other changes are refused."""
        name = args[0].name
        if name in self.fresh:
            self._read_derived(node, node.target, args, kwargs)
            return
        if op == "add" and args[1] == 1 and name.endswith("num_batches_tracked"):
            self.counters.append(name)
            self.known[node] = args[0]
            return
        raise UserError(f"{name} is changed by {op}_ in each pass, which recompute would not repeat{place_of(node)}")

    def _read_derived(self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        fake = node.meta.get("val")
        op = operation_name(target)
        if _is_random(op, target, args, kwargs):
            raise UserError(draws(node, op))
        if isinstance(fake, Tensor):
            self.derived.append(Derived(node.name, target, args, kwargs))
            self.known[node] = Weight(node.name, fake.shape)
            sources = [leaf.name for leaf in leaves((args, tuple(kwargs.values()))) if isinstance(leaf, Weight)]
            if not gives_view(target) or all(name in self.fresh for name in sources):
                self.fresh.add(node.name)
        elif fake is not None:
            raise UserError(f"{layer_of(node) or 'the network'}: {target} has several results{place_of(node)}")

    def _read_outputs(self, node: fx.Node) -> tuple[Value, ...]:
        signature = self.program.graph_signature
        outputs = []
        names = {str(argument) for argument in signature.user_outputs}
        for argument in node.args[0]:  # type: ignore[union-attr]
            value = self.known.get(argument)  # type: ignore[arg-type]
            if getattr(argument, "name", None) not in names:
                continue
            if not isinstance(value, Value) or value is self.image:
                raise UserError(f"{type(self.model).__name__} returns {argument}, which is not computed from the image")
            outputs.append(value)
        if len(outputs) != len(node.args[0]):  # type: ignore[arg-type]
            raise UserError(f"{type(self.model).__name__} returns something beside tensors; return tensors alone")
        return tuple(outputs)

    def _look_up(self, tree: Any) -> Any:
        """Return arguments with what their nodes stand for."""
        if isinstance(tree, fx.Node):
            return self.known[tree]
        if isinstance(tree, list | tuple):
            return tuple(self._look_up(leaf) for leaf in tree)
        if isinstance(tree, dict):
            return {name: self._look_up(leaf) for name, leaf in tree.items()}
        return tree


@dataclass(frozen=True, eq=False)
class _Several:
    """A call with several results; each that is used becomes a value."""

    op: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def _functional(target: Any, node: fx.Node) -> Any:
    """Return the operation that gives a new tensor where this one writes over its first argument."""
    packet = getattr(torch.ops.aten, operation_name(target), None)
    overload = getattr(packet, target._overloadname, None)
    if overload is None:
        raise UserError(f"{layer_of(node)}: {target} has no variant that gives a new tensor{place_of(node)}")
    return overload


def _is_in_place(node: fx.Node) -> bool:
    return operation_name(node.target) != operation_name(node.target, keeps_underscore=True)


def _is_view_of(value: Value, source: Any) -> bool:
    """Return whether a value shares the memory of another."""
    return source in value.inputs and gives_view(value.target)


def _is_random(op: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation draws random numbers with these arguments."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    if op == "scaled_dot_product_attention":
        probability = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        return bool(probability)
    if op == "rrelu":
        return len(args) > 3 and bool(args[3])
    if op.endswith("dropout"):
        return bool(args[1]) and bool(args[2])
    return True


def _needed(outputs: tuple[Value, ...]) -> set[Value]:
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
