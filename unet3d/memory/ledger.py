"""Every tensor storage alive while it is open, as a list of allocations and releases.

A storage counts from the operation that made it (or first used it) to the release of its last owner, autograd
included. What a kernel takes and gives back inside one operation, convolution scratch above all, is not seen.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


@dataclass
class Storage:
    """One storage's life; times are indices into the ledger's events."""

    bytes: int
    phase: int  # index of the mark in which it appeared
    operation: str  # what made it; "adopted" if it was there before
    born: int
    died: int | None = None


class Ledger(TorchDispatchMode):
    """`events` holds (storage index, bytes gained or lost); `marks` holds (event index, phase name)."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[Storage] = []
        self.events: list[tuple[int, int]] = []
        self.marks: list[tuple[int, str]] = [(0, "before")]
        self._known: Any = WeakIdKeyDictionary()

    def mark(self, phase: str) -> None:
        """A phase begins."""
        self.marks.append((len(self.events), phase))

    def adopt(self, tensors: Iterable[Tensor], owner: str = "adopted") -> None:
        """Count storages that exist already."""
        for tensor in tensors:
            self._add(tensor, owner)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.adopt(_tensors((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._add(tensor, str(func))
        return result

    def _add(self, tensor: Tensor, operation: str) -> None:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if storage in self._known or not size:
            return
        index = len(self.storages)
        self._known[storage] = index
        self.storages.append(Storage(size, len(self.marks) - 1, operation, len(self.events)))
        self.events.append((index, size))
        weakref.finalize(storage, self._release, index).atexit = False

    def _release(self, index: int) -> None:
        self.storages[index].died = len(self.events)
        self.events.append((index, -self.storages[index].bytes))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def levels(ledger: Ledger) -> list[int]:
    """Bytes alive after each event, after a leading 0."""
    alive = [0]
    for _, change in ledger.events:
        alive.append(alive[-1] + change)
    return alive


def phase_peaks(ledger: Ledger) -> list[tuple[str, int]]:
    """(phase, most bytes alive in it) for each mark, in order."""
    alive = levels(ledger)
    starts = [start for start, _ in ledger.marks]
    ends = [*starts[1:], len(ledger.events)]
    return [(name, max(alive[a : b + 1])) for (_, name), a, b in zip(ledger.marks, starts, ends, strict=True)]


def categories_at_peak(ledger: Ledger) -> dict[str, int]:
    """Bytes alive at the highest moment by what they are for, known from when each storage appeared and vanished."""
    alive = levels(ledger)
    moment = alive.index(max(alive))
    totals = dict.fromkeys(("params", "grads", "optimizer", "activations", "temporaries", "inputs"), 0)
    for storage in ledger.storages:
        if storage.born < moment and (storage.died is None or storage.died >= moment):
            totals[category(ledger, storage)] += storage.bytes
    return totals


def category(ledger: Ledger, storage: Storage) -> str:
    """What a storage is for. Born in forward and alive when backward begins: saved for backward, and so on."""
    if storage.operation in ("params", "optimizer"):
        return storage.operation
    phase = ledger.marks[storage.phase][1]
    if storage.operation == "adopted" and phase != "step":  # in step: the counters that torch.tensor makes unseen
        return "inputs"
    outlives = {"forward": "backward", "loss": "backward", "backward": "step", "step": "end", "data": "forward"}
    kind = {"forward": "activations", "loss": "activations", "backward": "grads", "step": "optimizer", "data": "inputs"}
    later = (start for start, name in ledger.marks[storage.phase + 1 :] if name == outlives.get(phase))
    start = next(later, None)
    if start is not None and (storage.died is None or storage.died >= start):
        return kind[phase]
    return "temporaries"
