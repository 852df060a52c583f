"""The record of a step's memory: every tensor storage made or released, and the module that made it.

`ModuleTracker` says which module an operation belongs to, in forward, in backward and in a recomputation."""

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import conv_flop_count

from unet3d.recomputing import state as of_pass
from unet3d.recomputing.fake_kernels import GradientSums
from unet3d.recomputing.state import Observer
from unet3d.recomputing.workspaces import CONVOLUTION

WHOLE = "(forward)"  # the forward of the network itself, and the weights that are in no submodule
ACCUMULATE_GRAD = 2**62  # its nodes have sequence numbers beyond; each stands for a parameter, not for an operation


class ModuleScope(NamedTuple):
    """The module or phase in which an operation runs."""

    module: str  # dotted path, WHOLE for the network itself; outside of it the phase: data, forward, loss ...
    is_recomputed: bool = False  # within backward, by activation checkpointing or a schedule
    is_in_tiles: bool = False  # results may be a few rows of a map


class ModuleTracker(Observer):
    """Follows a model through a step, between `open` and `close`."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = {path or WHOLE: module for path, module in model.named_modules()}
        paths = {id(module): path for path, module in self.modules.items()}
        every_path = model.named_modules(remove_duplicate=False)  # a module may have several
        self._first_paths = {path: paths[id(module)] for path, module in every_path}
        self._owners: dict[int, str] = {}  # id of a parameter -> path of its module
        for path, module in self.modules.items():
            self._owners |= dict.fromkeys(map(id, module.parameters(recurse=False)), path)
        self._phase = "forward"
        self._stack: list[str] = []  # modules that were entered and not left
        self._tile_scope: ModuleScope | None = None  # The layer whose tiles, or their gradients, are made.
        self._hooks = ExitStack()
        self._first_numbers: list[int] = []  # From each sequence number on ...
        self._node_paths: list[str] = []  # ... autograd nodes belong to this module.

    def open(self) -> None:
        """Begin a step."""
        self._stack = []
        self._first_numbers = []
        self._node_paths = []
        self._hooks.callback(setattr, of_pass, "observer", of_pass.observer)
        of_pass.observer = self
        for path, module in self.modules.items():
            enter = module.register_forward_pre_hook(partial(self._enter, path))
            self._hooks.enter_context(enter)
            # Always: checkpointing ends a recomputation with an exception as soon as it has all it needs.
            leave = module.register_forward_hook(partial(self._leave, path), always_call=True)
            self._hooks.enter_context(leave)

    def close(self) -> None:
        """Remove all hooks."""
        self._hooks.close()

    def mark(self, phase: str) -> None:
        """Begin a phase: operations outside of all modules belong to it."""
        self._phase = f"({phase})" if phase in self.modules else phase
        self._attribute_nodes(self._phase)

    def scope(self) -> ModuleScope:
        """Return where the current operation runs."""
        if self._tile_scope is not None:
            return self._tile_scope
        node = torch._C._current_autograd_node()
        if node is None or self._stack:
            return ModuleScope(self._innermost(), is_recomputed=node is not None)
        return ModuleScope(self._module_of(node))

    @contextmanager
    def works_on(self, layer: str, is_backward: bool) -> Iterator[None]:
        """Attribute to a layer what runs within: its tiles."""
        path = self._first_paths.get(layer, WHOLE)
        outer = self._tile_scope
        is_recomputed = not is_backward and torch._C._current_autograd_node() is not None
        self._tile_scope = ModuleScope(path, is_recomputed, is_in_tiles=True)
        try:
            yield
        finally:
            self._tile_scope = outer

    def _innermost(self) -> str:
        """Return the module that runs, or the phase outside of all modules."""
        return self._stack[-1] if self._stack else self._phase

    def _module_of(self, node: Any) -> str:
        """Return the module whose forward made an autograd node."""
        number: int = node._sequence_nr()
        if number > ACCUMULATE_GRAD:
            return self._owners.get(id(node.variable), self._phase)
        index = bisect_right(self._first_numbers, number) - 1
        return self._node_paths[index] if index >= 0 else self._phase

    def _enter(self, path: str, *_: Any) -> None:
        self._stack.append(path)
        self._attribute_nodes(path)

    def _leave(self, path: str, *_: Any) -> None:
        self._stack.pop()
        self._attribute_nodes(self._innermost())

    def _attribute_nodes(self, path: str) -> None:
        """Attribute autograd nodes made from now on to `path`. Nodes made by a recomputation never run: skip them."""
        if torch._C._current_autograd_node() is None:
            self._first_numbers.append(torch.autograd._get_sequence_nr())
            self._node_paths.append(path)


CATEGORIES = ("params", "grads", "optimizer", "activations", "temporaries", "inputs")
DEVICE = torch.ops.prim.device.default  # called for fake tensors only
SEQUENCES = (list, tuple)
ADOPTED = "adopted"  # the operation of a storage that existed before the ledger saw it
# A storage made in one phase and alive when a later one begins has this category.
OUTLIVES = {
    "forward": ("backward", "activations"),
    "loss": ("backward", "activations"),
    "data": ("forward", "inputs"),
}


@dataclass
class Storage:
    """One storage's life; times are indices into the ledger's events."""

    bytes: int
    shape: tuple[int, ...]  # The shape of the first tensor seen with it.
    dtype: torch.dtype
    phase: int  # index of the mark in which it appeared
    operation: str  # What made it; ADOPTED if it existed before.
    scope: ModuleScope
    born: int
    died: int | None = None
    role: str | None = None  # params, grads or optimizer, if claimed


class Ledger(TorchDispatchMode):
    """Records storages on devices of one type: a batch in host memory takes no memory of a GPU.

    `events` holds (storage index, bytes gained or lost), 0 bytes for a storage that was taken out of the count; `marks`
    holds (event index, what begins). `scope` returns where the current operation runs,
    `layer` the name in tables of a module's path.
    """

    def __init__(self, scope: Callable[[], ModuleScope] = lambda: ModuleScope(""), device_type: str = "cpu") -> None:
        super().__init__()
        self.storages: list[Storage] = []
        self.events: list[tuple[int, int]] = []
        self.marks: list[tuple[int, str]] = [(0, "before")]
        self.convolutions: list[tuple[int, str, int]] = []  # Each call's earlier events, module, FLOPs.
        self.workspaces: list[tuple[int, int]] = []  # Of a GPU's convolutions: each call's earlier events, bytes.
        self.layer: Callable[[str], str] = str
        self._scope = scope
        self._device_type = device_type
        self._alive: dict[int, tuple[int, Any]] = {}  # address of a storage: its index, a weak reference to it
        self._sums = GradientSums()

    def __enter__(self) -> "Ledger":
        self._sums.try_out()
        super().__enter__()
        return self

    def mark(self, phase: str) -> None:
        """Begin a phase."""
        self.marks.append((len(self.events), phase))

    def count(self, tree: Any, operation: str = ADOPTED, scope: ModuleScope | None = None) -> None:
        """Count the storages of all tensors in a tree, as made by `operation`; those counted before stay as they are.

        `scope`: where the operation runs, if that is known.
        """
        for tensor in _tensors(tree):
            self._add(tensor, operation, scope)

    def claim(self, tensor: Tensor, role: str, module: str) -> None:
        """Record what a storage is for and which module owns it; count it if it is new."""
        self._add(tensor, ADOPTED, None)
        entry = self._alive.get(tensor.untyped_storage()._cdata)
        if entry is not None:
            storage = self.storages[entry[0]]
            storage.role = role
            storage.scope = ModuleScope(module)

    def uncount(self, tensor: Tensor) -> None:
        """Take a storage out of the count: the device that the step is predicted for would not hold it."""
        index = self.index(tensor)
        storage = self.storages[index]
        storage.bytes = 0
        self.events[storage.born] = (index, 0)

    def index(self, tensor: Tensor) -> int:
        """Return the index of a tensor's storage. Raises KeyError if it is not counted."""
        return self._alive[tensor.untyped_storage()._cdata][0]

    def repeat(self, times: int) -> bool:
        """Record the first step, which is over, again, without what it has left: later steps find that.

        Returns whether this was done: not where the step has left more than the optimizer's state, or has released what
        was there before it, since later steps would then be others.
        """
        begin, _ = self.marks[1]
        for storage in self.storages:
            is_other = storage.died is not None
            if storage.born >= begin:
                is_other = storage.died is None and storage.role != "optimizer" and storage.operation != ADOPTED
            if is_other:
                return False
        events = self.events[begin:]
        marks = self.marks[1:]
        convolutions = list(self.convolutions)
        workspaces = list(self.workspaces)
        for time in range(1, times + 1):
            numbers: dict[int, int] = {}
            moments = {}
            for moment, (index, change) in enumerate(events, begin):
                moments[moment] = len(self.events)
                if self.storages[index].died is not None:
                    number = numbers.setdefault(index, len(self.storages) + len(numbers))
                    self.events.append((number, change))
            moments[begin + len(events)] = len(self.events)
            for index in numbers:
                old = self.storages[index]
                assert old.died is not None
                phase = old.phase + time * len(marks)
                new = replace(old, phase=phase, born=moments[old.born], died=moments[old.died])
                self.storages.append(new)
            self.marks += [(moments[moment], phase) for moment, phase in marks]
            self.convolutions += [(moments[moment], module, flops) for moment, module, flops in convolutions]
            self.workspaces += [(moments[moment], size) for moment, size in workspaces]
        return True

    def alive_bytes(self) -> list[int]:
        """Return the bytes alive after each event, after a leading 0."""
        changes = (change for _, change in self.events)
        return list(accumulate(changes, initial=0))

    def largest_map(self) -> int:
        """Return the elements of the largest storage, but for weights, their gradients and the optimizer's state."""
        return max((s.bytes // s.dtype.itemsize for s in self.storages if s.role is None), default=0)

    def requests(self) -> list[tuple[int, int]]:
        """Return what an allocator is asked for, like `events`: tensors, and scratch memory that is known of."""
        return self.events

    def phase_spans(self) -> list[tuple[str, int, int]]:
        """Return (phase, first event, end) for each mark, in order."""
        edges = [*self.marks, (len(self.events), "")]
        return [(name, start, end) for (start, name), (end, _) in pairwise(edges)]

    def alive_at(self, moment: int) -> list[Storage]:
        """Return the storages alive after `moment` events."""
        return [s for s in self.storages if s.born < moment and _outlives(s, moment)]

    def categories_at(self, moment: int) -> dict[str, int]:
        """Return the bytes alive after `moment` events, by category."""
        totals = dict.fromkeys(CATEGORIES, 0)
        for storage in self.alive_at(moment):
            totals[self.category(storage)] += storage.bytes
        return totals

    def category(self, storage: Storage) -> str:
        """Return what a storage is for: its claimed role, else by its birth and life.

        Recomputed maps are activations.
        """
        if storage.role is not None:
            return storage.role
        phase = self.marks[storage.phase][1]
        if storage.operation == ADOPTED and phase != "step":  # In step, torch.tensor makes numbers undispatched.
            return "inputs"
        if storage.scope.is_recomputed:
            return "activations"
        if phase not in OUTLIVES:
            return "temporaries"
        later_phase, category = OUTLIVES[phase]
        for start, name in self.marks[storage.phase + 1 :]:
            if name == later_phase:
                return category if _outlives(storage, start) else "temporaries"
        return "temporaries"

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would pass every operation through torch's compiler.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return getattr(args[0], "fake_device", None) or func(*args)
        self.count((args, kwargs))
        events_before = len(self.events)
        result = self.compute(func, args, kwargs or {})
        scope = self._scope()
        if func is CONVOLUTION:
            flops = conv_flop_count(list(args[0].shape), list(args[1].shape), list(result.shape), args[6])
            self.convolutions.append((events_before, scope.module, flops))
        if self._sums.is_in_place(func, args):
            self._replace(args[0], result)
        self.count(result, str(func), scope)
        return result

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return an operation's result."""
        return func(*args, **kwargs)

    def _replace(self, old: Tensor, new: Tensor) -> None:
        """Let `new` take the place of `old`, which dies at once: autograd would have written the sum over it."""
        index, _ = self._alive.pop(old.untyped_storage()._cdata)  # Its weak reference would tell of its end.
        self._watch(new, index)

    def _add(self, tensor: Tensor, operation: str, scope: ModuleScope | None) -> None:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if storage._cdata in self._alive or not size or tensor.device.type != self._device_type:
            return
        index = len(self.storages)
        self._watch(tensor, index)
        self.storages.append(
            Storage(
                bytes=size,
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                phase=len(self.marks) - 1,
                operation=operation,
                scope=scope or self._scope(),
                born=len(self.events),
            )
        )
        self.events.append((index, size))

    def _watch(self, tensor: Tensor, index: int) -> None:
        """Count a tensor's storage under an index until it dies."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        self._alive[address] = index, weakref.ref(storage, partial(self._release, address))

    def _release(self, address: int, _: Any) -> None:
        index, _ = self._alive.pop(address)
        storage = self.storages[index]
        storage.died = len(self.events)
        if storage.bytes:
            self.events.append((index, -storage.bytes))


def _outlives(storage: Storage, moment: int) -> bool:
    """Return whether a storage is alive after `moment` events, if it was born before."""
    return storage.died is None or storage.died >= moment


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in arguments or results of an operation, in order.

    It is called for every operation of a step: torch's pytree takes several times as long.
    """
    found: list[Tensor] = []
    waiting = [tree]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, SEQUENCES):
            waiting.extend(reversed(part))
        elif isinstance(part, dict):
            waiting.extend(reversed(part.values()))
    return found


def most_held(changes: Iterable[tuple[int, int]]) -> int:
    """Return the most bytes that a ledger's `events` or `requests` hold at once."""
    return max(accumulate(change for _, change in changes), default=0)
