"""Which module is at work: in forward by hooks, in backward by the sequence number that autograd gave its node.

Hooks see no tensor and change none. Nothing stays on the model once the tracker is closed.
"""

from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

ENDLESS = 2**62  # sequence numbers beyond belong to AccumulateGrad, which stands for a parameter, not for an operation


class Place(NamedTuple):
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

    def here(self) -> Place:
        """The place of the operation that is running."""
        node = torch._C._current_autograd_node()
        if node is None or self._stack:
            return Place(self._stack[-1] if self._stack else self._phase, is_recomputed=node is not None)
        path = self._module_of(node)
        self._left_backward(path)
        return Place(path)

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
