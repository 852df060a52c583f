"""The record of a step's memory: every tensor storage made or released, and the module that made it."""

import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import conv_flop_count

from unet3d.training import slabs
from unet3d.training.slabs import Observer

CATEGORIES = ("params", "grads", "optimizer", "activations", "temporaries", "inputs")
CONVOLUTION = torch.ops.aten.convolution.default
CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
# A storage made in one phase and alive when a later one begins has this category.
OUTLIVES = {"forward": ("backward", "activations"), "loss": ("backward", "activations"), "data": ("forward", "inputs")}
SUM = torch.ops.aten.add.Tensor
DEVICE = torch.ops.prim.device.default  # called for fake tensors only
WHOLE = "(forward)"  # what the forward of the network itself makes, and the weights that are in no submodule
ACCUMULATE_GRAD = 2**62  # its nodes have sequence numbers beyond; each stands for a parameter, not for an operation


class ModuleScope(NamedTuple):
    """Where an operation runs."""

    module: str  # dotted path, WHOLE for the network itself; outside of it the phase: data, forward, loss ...
    is_recomputed: bool = False  # by activation checkpointing or in slabs, within backward
    is_in_slabs: bool = False


class ModuleEvent(NamedTuple):
    """A leaf module is entered ("pre") or left ("fwd"), or its backward is over ("bwd")."""

    module: str
    layer: str  # its class
    hook: str


@dataclass
class Storage:
    """One storage's life; times are indices into the ledger's events."""

    bytes: int
    shape: tuple[int, ...]  # of the first tensor seen with it
    dtype: torch.dtype
    phase: int  # index of the mark in which it appeared
    operation: str  # that made it; "adopted" if it existed before
    scope: ModuleScope
    born: int
    died: int | None = None
    role: str | None = None  # params, grads or optimizer, if claimed


class Ledger(TorchDispatchMode):
    """Records storages on devices of one type: a batch in host memory takes no memory of a GPU.

    `events` holds (storage index, bytes gained or lost), 0 bytes for a storage that was taken out of the count; `marks`
    and `crossings` hold (event index, what begins).
    `scope` returns where the current operation runs, `layer` the name in tables of a module's path.
    """

    def __init__(self, scope: Callable[[], ModuleScope] = lambda: ModuleScope(""), device_type: str = "cpu") -> None:
        super().__init__()
        self.storages: list[Storage] = []
        self.events: list[tuple[int, int]] = []
        self.marks: list[tuple[int, str]] = [(0, "before")]
        self.crossings: list[tuple[int, ModuleEvent]] = []
        self.convolutions: list[tuple[int, str, int]] = []  # of each forward call: events before it, module, FLOPs
        self.workspaces: list[tuple[int, int]] = []  # of each convolution: events with its results, bytes of its maps
        self.layer: Callable[[str], str] = str
        self._scope, self._device_type = scope, device_type
        self._alive: dict[int, tuple[int, Any]] = {}  # address of a storage: its index, a weak reference to it
        self._owners = self._sole_owner = (0, 0, 0)  # of the last sum of gradients; of one that autograd alone holds

    def __enter__(self) -> "Ledger":
        if self._sole_owner == (0, 0, 0):
            self._sole_owner = _sole_owner()
        super().__enter__()
        return self

    def mark(self, phase: str) -> None:
        """A phase begins."""
        self.marks.append((len(self.events), phase))

    def cross(self, crossing: ModuleEvent) -> None:
        """A module is entered or left."""
        self.crossings.append((len(self.events), crossing))

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Count storages that exist already."""
        for tensor in tensors:
            self._add(tensor, "adopted")

    def count(self, tree: Any, operation: str, scope: ModuleScope | None = None) -> None:
        """Count an operation's results; those that are counted already stay as they are."""
        for tensor in _tensors(tree):
            self._add(tensor, operation, scope)

    def claim(self, tensor: Tensor, role: str, module: str) -> None:
        """Record what a storage is for and which module owns it; count it if it is new."""
        self._add(tensor, "adopted")
        if (found := self._alive.get(tensor.untyped_storage()._cdata)) is not None:
            storage = self.storages[found[0]]
            storage.role, storage.scope = role, ModuleScope(module)

    def uncount(self, tensor: Tensor) -> None:
        """Take a storage out of the count: the device that the step is predicted for would not hold it."""
        index = self.index(tensor)
        storage = self.storages[index]
        storage.bytes = 0
        self.events[storage.born] = (index, 0)

    def index(self, tensor: Tensor) -> int:
        """Index of a tensor's storage. Raises KeyError if it is not counted."""
        return self._alive[tensor.untyped_storage()._cdata][0]

    def alive_bytes(self) -> list[int]:
        """Bytes alive after each event, after a leading 0."""
        return list(accumulate((change for _, change in self.events), initial=0))

    def peak_bytes(self) -> int:
        """Most bytes alive at once."""
        return max(self.alive_bytes())

    def largest_map(self) -> int:
        """Return the elements of the largest storage, but for weights, their gradients and the optimizer's state."""
        return max((s.bytes // s.dtype.itemsize for s in self.storages if s.role is None), default=0)

    def peak_moment(self) -> int:
        """How many events had happened when most bytes were alive, for the first time."""
        alive = self.alive_bytes()
        return alive.index(max(alive))

    def workspace_bound(self) -> int:
        """Return the most bytes that workspaces of convolutions would add to the peak: by argument, not measured.

        Engines of cuDNN for half precision and TF32 want channels last. Of NCDHW maps, cuDNN may transpose the input
        and the output in a workspace. So each convolution, and each gradient of it, is given a workspace as large as
        both maps, of their own type, while its results are alive. Filters and copies of maps that are not contiguous
        are not in it, and engines that unfold maps or sum up parts may ask for more.
        """
        alive = self.alive_bytes()
        most = max((alive[moment] + size for moment, size in self.workspaces), default=0)
        return max(0, most - max(alive))

    def phase_spans(self) -> list[tuple[str, int, int]]:
        """(phase, first event, end) for each mark, in order."""
        edges = [*self.marks, (len(self.events), "")]
        return [(name, start, end) for (start, name), (end, _) in pairwise(edges)]

    def phase_peaks(self) -> list[tuple[str, int]]:
        """(phase, most bytes alive in it) for each mark, in order."""
        alive = self.alive_bytes()
        return [(name, max(alive[start : end + 1])) for name, start, end in self.phase_spans()]

    def alive_at(self, moment: int) -> list[Storage]:
        """The storages alive after so many events."""
        return [s for s in self.storages if s.born < moment and (s.died is None or s.died >= moment)]

    def categories_at(self, moment: int) -> dict[str, int]:
        """Bytes alive after so many events, by category."""
        totals = dict.fromkeys(CATEGORIES, 0)
        for storage in self.alive_at(moment):
            totals[self.category(storage)] += storage.bytes
        return totals

    def category(self, storage: Storage) -> str:
        """What a storage is for: its claimed role, else by its birth and life. Recomputed maps are activations."""
        if storage.role is not None:
            return storage.role
        phase = self.marks[storage.phase][1]
        if storage.operation == "adopted" and phase != "step":  # in step: numbers from torch.tensor, made undispatched
            return "inputs"
        if storage.scope.is_recomputed:
            return "activations"
        until, kind = OUTLIVES.get(phase, ("", ""))
        start = next((start for start, name in self.marks[storage.phase + 1 :] if name == until), None)
        is_kept = start is not None and (storage.died is None or storage.died >= start)
        return kind if is_kept else "temporaries"

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # with True, torch loads its compiler and passes every operation through it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return getattr(args[0], "fake_device", None) or func(*args)
        self.adopt(_tensors((args, kwargs)))
        before = len(self.events)
        result = self.compute(func, args, kwargs or {})
        scope = self._scope()
        if func is CONVOLUTION:
            flops = conv_flop_count(list(args[0].shape), list(args[1].shape), list(result.shape), args[6])
            self.convolutions.append((before, scope.module, flops))
        if func is SUM and self._is_in_place(args[0]):
            self._replace(args[0], result)
        self.count(result, str(func), scope)
        if func is CONVOLUTION:
            self.workspaces.append((len(self.events), args[0].nbytes + result.nbytes))
        elif func is CONVOLUTION_BACKWARD:  # of the output's gradient and the input; a map and its gradient are alike
            self.workspaces.append((len(self.events), args[0].nbytes + args[1].nbytes))
        return result

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return an operation's result."""
        return func(*args, **kwargs)

    def _is_in_place(self, gradient: Tensor) -> bool:
        """Whether autograd, if no dispatch mode were active, would add to this gradient in place.

        It does so to a dense tensor that it alone holds: `can_accumulate_inplace` in torch's input_buffer.cpp.
        """
        if torch.is_grad_enabled() or torch._C._current_autograd_node() is None:
            return False
        storage = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
        tensor: int = gradient._use_count()  # type: ignore[attr-defined]
        self._owners = tensor, storage, sys.getrefcount(gradient)
        return self._owners == self._sole_owner and gradient.is_contiguous()

    def _replace(self, old: Tensor, new: Tensor) -> None:
        """The storage of `new` is counted as that of `old`, which dies at once."""
        index, _ = self._alive.pop(old.untyped_storage()._cdata)  # with its weak reference, which would tell of its end
        storage = new.untyped_storage()
        self._alive[storage._cdata] = index, weakref.ref(storage, partial(self._release, storage._cdata))

    def _add(self, tensor: Tensor, operation: str, scope: ModuleScope | None = None) -> None:
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if address in self._alive or not size or tensor.device.type != self._device_type:
            return
        index, now = len(self.storages), len(self.events)
        self._alive[address] = index, weakref.ref(storage, partial(self._release, address))
        shape, phase = tuple(tensor.shape), len(self.marks) - 1
        self.storages.append(Storage(size, shape, tensor.dtype, phase, operation, scope or self._scope(), now))
        self.events.append((index, size))

    def _release(self, address: int, _: Any) -> None:
        index, _ = self._alive.pop(address)
        self.storages[index].died = len(self.events)
        if self.storages[index].bytes:
            self.events.append((index, -self.storages[index].bytes))


def _sole_owner() -> tuple[int, int, int]:
    """Counts of references to a gradient that autograd alone holds, as a ledger sees them: torch's versions differ."""
    ledger = Ledger()
    ledger._sole_owner = (-1, -1, -1)
    with torch.enable_grad(), ledger:
        x = torch.ones(2, requires_grad=True) * 1
        (x.sin() + x.cos()).sum().backward()
    return ledger._owners


def _tensors(tree: Any) -> Iterator[Tensor]:
    """In arguments or results of an operation. For every operation of a step: torch's pytree takes twice the time."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from _tensors(part)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


class ModuleTracker(Observer):
    """Follows a model through a step. Between `open` and `close` it calls `crossed` at every crossing."""

    def __init__(self, model: nn.Module, crossed: Callable[[ModuleEvent], None] = lambda crossing: None) -> None:
        self.modules = {path or WHOLE: module for path, module in model.named_modules()}
        self._crossed = crossed
        self._owners = {id(p): path for path, module in self.modules.items() for p in module.parameters(recurse=False)}
        self._leaves = {path: type(m).__name__ for path, m in self.modules.items() if not list(m.children())}
        self._phase, self._in_backward = "forward", ""
        self._stack: list[str] = []
        self._layer: ModuleScope | None = None  # that runs in slabs
        self._paths_of = {id(module): path for path, module in self.modules.items()}
        self._hooks = ExitStack()
        self._firsts: list[int] = []  # from this sequence number on ...
        self._paths: list[str] = []  # ... autograd nodes belong to this module

    def open(self) -> None:
        """Begin a step."""
        self._stack, self._firsts, self._paths = [], [], []
        self._hooks.callback(setattr, slabs, "observer", slabs.observer)
        slabs.observer = self
        for path, module in self.modules.items():
            enter, leave = partial(self._enter, path), partial(self._leave, path)
            self._hooks.enter_context(module.register_forward_pre_hook(enter))
            # Always: checkpointing ends a recomputation with an exception as soon as it has all it needs.
            self._hooks.enter_context(module.register_forward_hook(leave, always_call=True))

    def close(self) -> None:
        """Remove all hooks."""
        self._hooks.close()

    def mark(self, phase: str) -> None:
        """A phase begins: operations outside of all modules belong to it."""
        self._back_in("")
        self._phase = f"({phase})" if phase in self.modules else phase
        self._attribute(self._phase)

    def scope(self) -> ModuleScope:
        """Where the current operation runs."""
        if self._layer is not None:
            return self._layer
        node = torch._C._current_autograd_node()
        if node is None or self._stack:
            return ModuleScope(self._stack[-1] if self._stack else self._phase, is_recomputed=node is not None)
        path = self._module_of(node)
        self._back_in(path)
        return ModuleScope(path)

    @contextmanager
    def works_on(self, layer: nn.Module | None, is_backward: bool) -> Iterator[None]:
        """Slabs of a layer: what runs within belongs to it."""
        path, before = self._paths_of.get(id(layer), self._phase), self._layer
        is_again = not is_backward and torch._C._current_autograd_node() is not None
        self._layer = ModuleScope(path, is_again, is_in_slabs=True)
        if is_backward:
            self._back_in(path)
        else:
            self._cross(path, "pre")
        try:
            yield
        finally:
            self._layer = before
            if not is_backward:
                self._cross(path, "fwd")

    def _module_of(self, node: Any) -> str:
        number: int = node._sequence_nr()
        if number > ACCUMULATE_GRAD:
            return self._owners.get(id(node.variable), self._phase)
        index = bisect_right(self._firsts, number) - 1
        return self._paths[index] if index >= 0 else self._phase

    def _enter(self, path: str, *_: Any) -> None:
        self._stack.append(path)
        self._attribute(path)
        self._cross(path, "pre")

    def _leave(self, path: str, *_: Any) -> None:
        self._stack.pop()
        self._attribute(self._stack[-1] if self._stack else self._phase)
        self._cross(path, "fwd")

    def _attribute(self, path: str) -> None:
        """Autograd nodes made from now on belong to `path`. Nodes made by a recomputation never run: skip them."""
        if torch._C._current_autograd_node() is None:
            self._firsts.append(torch.autograd._get_sequence_nr())
            self._paths.append(path)

    def _back_in(self, path: str) -> None:
        """Backward runs in `path` now."""
        if self._in_backward != path:
            self._cross(self._in_backward, "bwd")
            self._in_backward = path

    def _cross(self, path: str, hook: str) -> None:
        if path in self._leaves:
            self._crossed(ModuleEvent(path, self._leaves[path], hook))
