"""Every tensor storage alive while it is open, as a list of allocations and releases, with the module that made it."""

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

ENDLESS = 2**62  # sequence numbers beyond belong to AccumulateGrad, which stands for a parameter, not for an operation


class ModuleScope(NamedTuple):
    """Where an operation runs."""

    module: str  # dotted path; outside of all modules the phase: data, forward, loss, backward, step
    is_recomputed: bool = False  # run a second time, within backward, by activation checkpointing


class Crossing(NamedTuple):
    """A leaf module is entered ("pre"), left ("fwd"), or its backward is over ("bwd")."""

    module: str
    layer: str  # its class
    hook: str


class ModuleTracker:
    """Follows one model through a step. `crossed` is told of every crossing, between `open` and `close`."""

    def __init__(self, model: nn.Module, crossed: Callable[[Crossing], None] = lambda crossing: None) -> None:
        self._model = model
        self._crossed = crossed
        self._owners: dict[int, str] = {
            id(parameter): path for path, module in model.named_modules() for parameter in module.parameters(False)
        }
        self._leaves = {path: type(m).__name__ for path, m in model.named_modules() if not list(m.children())}
        self._phase = "forward"
        self._stack: list[str] = []
        self._handles: list[RemovableHandle] = []
        self._starts: list[int] = []  # from this sequence number on ...
        self._paths: list[str] = []  # ... nodes belong to this module
        self._in_backward = ""

    def open(self) -> None:
        """Begin to follow, afresh."""
        self._stack, self._starts, self._paths = [], [], []
        for path, module in self._model.named_modules():
            enter, leave = partial(self._enter, path), partial(self._leave, path)
            self._handles.append(module.register_forward_pre_hook(enter))
            # also called where checkpointing breaks off a recomputation that has made all it needs
            self._handles.append(module.register_forward_hook(leave, always_call=True))

    def close(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def mark(self, phase: str) -> None:
        """What is outside of all modules belongs to this phase from now on."""
        self._left_backward("")
        self._phase = phase
        self._note(phase)

    def here(self) -> ModuleScope:
        """The place of the operation that is running."""
        node = torch._C._current_autograd_node()
        if node is None or self._stack:
            return ModuleScope(self._stack[-1] if self._stack else self._phase, is_recomputed=node is not None)
        path = self._module_of(node)
        self._left_backward(path)
        return ModuleScope(path)

    def _module_of(self, node: Any) -> str:
        number: int = node._sequence_nr()
        if number > ENDLESS:
            return self._owners.get(id(node.variable), self._phase)
        index = bisect_right(self._starts, number) - 1
        return self._paths[index] if index >= 0 else self._phase

    def _enter(self, path: str, *_: Any) -> None:
        self._stack.append(path)
        self._note(path)
        self._tell(path, "pre")

    def _leave(self, path: str, *_: Any) -> None:
        self._stack.pop()
        self._note(self._stack[-1] if self._stack else self._phase)
        self._tell(path, "fwd")

    def _note(self, path: str) -> None:
        """Nodes made from now on belong to `path`. A recomputation's nodes never run, so they need no note."""
        if torch._C._current_autograd_node() is None:
            self._starts.append(torch.autograd._get_sequence_nr())
            self._paths.append(path)

    def _left_backward(self, path: str) -> None:
        if self._in_backward != path:
            self._tell(self._in_backward, "bwd")
            self._in_backward = path

    def _tell(self, path: str, hook: str) -> None:
        if path in self._leaves:
            self._crossed(Crossing(path, self._leaves[path], hook))


CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


DEVICE = torch.ops.prim.device.default  # asked of a tensor without data; tensors with data are not asked


CATEGORIES = ("params", "grads", "optimizer", "activations", "temporaries", "inputs")


@dataclass
class Storage:
    """One storage's life; times are indices into the ledger's events."""

    bytes: int
    shape: tuple[int, ...]  # of the tensor that it was first seen with
    dtype: torch.dtype
    phase: int  # index of the mark in which it appeared
    operation: str  # what made it; "adopted" if it was there before
    place: ModuleScope
    born: int
    died: int | None = None
    role: str | None = None  # params, grads or optimizer, where its owner said so


class Row(NamedTuple):
    """One event, told."""

    event: int
    phase: str
    module: str  # of the storage
    operation: str  # that made the storage
    category: str  # of the storage
    change_bytes: int  # > 0: allocated
    alive_bytes: int  # after the event


class Site(NamedTuple):
    """One call of a convolution: kernels take scratch that no storage shows."""

    event: int  # events that had happened before it
    module: str  # dotted path
    operation: str  # convolution or convolution_backward
    arguments: tuple  # as called; a tensor is (shape, strides, dtype)


class Ledger(TorchDispatchMode):
    """`events` holds (storage index, bytes gained or lost); `marks` and `crossings` hold (event index, what began).

    `here` tells which module is at work. What lies on another type of device, as a batch on its way to a GPU, takes no
    memory of this one.
    """

    def __init__(self, here: Callable[[], ModuleScope] = lambda: ModuleScope(""), device_type: str = "cpu") -> None:
        super().__init__()
        self._device_type = device_type
        self.storages: list[Storage] = []
        self.events: list[tuple[int, int]] = []
        self.marks: list[tuple[int, str]] = [(0, "before")]
        self.crossings: list[tuple[int, Crossing]] = []
        self.sites: list[Site] = []
        self._here = here
        self._known: dict[int, tuple[int, Any]] = {}  # address of a living storage: its index, a reference to it

    def mark(self, phase: str) -> None:
        """A phase begins."""
        self.marks.append((len(self.events), phase))

    def cross(self, crossing: Crossing) -> None:
        """A module is entered or left."""
        self.crossings.append((len(self.events), crossing))

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Count storages that exist already."""
        for tensor in tensors:
            self._add(tensor, "adopted")

    def claim(self, tensor: Tensor, role: str, module: str) -> None:
        """Say what a storage is for and whose it is; count it if it was not."""
        self._add(tensor, "adopted")
        found = self._known.get(tensor.untyped_storage()._cdata)
        if found is not None:
            storage = self.storages[found[0]]
            storage.role, storage.place = role, ModuleScope(module)

    def index(self, tensor: Tensor) -> int:
        """Of a tensor's storage that was counted. KeyError for another."""
        return self._known[tensor.untyped_storage()._cdata][0]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else every operation passes through torch's compiler, which is loaded to be kept away

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return getattr(args[0], "fake_device", None) or func(*args)
        self.adopt(tensors((args, kwargs)))
        if func in CONVOLUTIONS:
            self.sites.append(
                Site(len(self.events), self._here().module, func.name().removeprefix("aten::"), _plain(args))
            )
        result = func(*args, **(kwargs or {}))
        place = self._here()
        for tensor in tensors(result):
            self._add(tensor, str(func), place)
        return result

    def _add(self, tensor: Tensor, operation: str, place: ModuleScope | None = None) -> None:
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if address in self._known or not size or tensor.device.type != self._device_type:
            return
        index, now = len(self.storages), len(self.events)
        self._known[address] = index, weakref.ref(storage, partial(self._release, address))
        shape, phase = tuple(tensor.shape), len(self.marks) - 1
        self.storages.append(Storage(size, shape, tensor.dtype, phase, operation, place or self._here(), now))
        self.events.append((index, size))

    def _release(self, address: int, _: Any) -> None:
        index, _ = self._known.pop(address)
        self.storages[index].died = len(self.events)
        self.events.append((index, -self.storages[index].bytes))


def tensors(tree: Any) -> Iterator[Tensor]:
    """Those in arguments or results of an operation."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from tensors(part)
    elif isinstance(tree, dict):
        yield from tensors(tuple(tree.values()))


def _plain(value: Any) -> Any:
    """An argument without its data, fit to be compared and hashed."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), str(value.dtype).removeprefix("torch.")
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def levels(ledger: Ledger) -> list[int]:
    """Bytes alive after each event, after a leading 0."""
    alive = [0]
    for _, change in ledger.events:
        alive.append(alive[-1] + change)
    return alive


def phase_spans(ledger: Ledger) -> list[tuple[str, int, int]]:
    """(phase, first event, end) for each mark, in order."""
    starts = [start for start, _ in ledger.marks]
    ends = [*starts[1:], len(ledger.events)]
    return [(name, a, b) for (_, name), a, b in zip(ledger.marks, starts, ends, strict=True)]


def phase_peaks(ledger: Ledger) -> list[tuple[str, int]]:
    """(phase, most bytes alive in it) for each mark, in order."""
    alive = levels(ledger)
    return [(name, max(alive[a : b + 1])) for name, a, b in phase_spans(ledger)]


def peak_moment(ledger: Ledger) -> int:
    """How many events had happened when most bytes were alive, for the first time."""
    alive = levels(ledger)
    return alive.index(max(alive))


def alive_at(ledger: Ledger, moment: int) -> list[Storage]:
    """The storages alive after so many events."""
    return [s for s in ledger.storages if s.born < moment and (s.died is None or s.died >= moment)]


def categories_at(ledger: Ledger, moment: int) -> dict[str, int]:
    """Bytes alive after so many events by what they are for."""
    totals = dict.fromkeys(CATEGORIES, 0)
    for storage in alive_at(ledger, moment):
        totals[category(ledger, storage)] += storage.bytes
    return totals


OUTLIVES = {"forward": "backward", "loss": "backward", "data": "forward"}


KIND = {"forward": "activations", "loss": "activations", "data": "inputs"}


def category(ledger: Ledger, storage: Storage) -> str:
    """What a storage is for: what its owner said, or born in forward and alive when backward begins, and so on.

    What checkpointing makes a second time are activations.
    """
    if storage.role is not None:
        return storage.role
    phase = ledger.marks[storage.phase][1]
    if storage.operation == "adopted" and phase != "step":  # in step: numbers that torch.tensor makes unseen
        return "inputs"
    if storage.place.is_recomputed:
        return "activations"
    later = (start for start, name in ledger.marks[storage.phase + 1 :] if name == OUTLIVES.get(phase))
    start = next(later, None)
    if start is not None and (storage.died is None or storage.died >= start):
        return KIND[phase]
    return "temporaries"
