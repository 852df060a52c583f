"""Which module of a network an operation belongs to: in forward, in backward and in a recomputation."""

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from unet3d.recomputing import state as of_pass
from unet3d.recomputing.state import Observer

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
        self._first_paths: dict[str, str] = {}  # a module's paths, of which it may have several -> the first of them
        for path, module in model.named_modules(remove_duplicate=False):
            self._first_paths[path] = paths[id(module)]
        self._owners: dict[int, str] = {}  # id of a parameter -> path of its module
        for path, module in self.modules.items():
            for parameter in module.parameters(recurse=False):
                self._owners[id(parameter)] = path
        self._phase = "forward"
        self._stack: list[str] = []  # modules that were entered and not left
        self._tile_scope: ModuleScope | None = None  # of the layer whose tiles are made, or their gradients
        self._hooks = ExitStack()
        self._first_numbers: list[int] = []  # from this sequence number on ...
        self._node_paths: list[str] = []  # ... autograd nodes belong to this module

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
