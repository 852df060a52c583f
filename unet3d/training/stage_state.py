"""State of a stage from before its first call, so that backward's second call can begin as the first one did.

Checkpointing calls a stage twice in a step. Buffers, attributes of modules, and the random numbers of Python and NumPy
are put back for the second call; torch's own checkpointing does that for the random numbers of torch. What a call
changes within an attribute, such as a list that grows, cannot be put back: it is refused by name where it is seen,
which is one level deep and in the types of `FINGERPRINTS`. Iterators, callables with a state, what lies deeper, class
attributes and what is written through `.data` are not seen here: `recomputation` compares what both calls compute.
"""

import random
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from unet3d.base.errors import UserError
from unet3d.recomputing.state import only_watches

OF_ALL_MODULES = vars(nn.Module()).keys() - {"training"}  # the mode counts as an attribute, all else is torch's own
COLLECTIONS = (list, tuple, set, frozenset, deque)
VALUES = (int, float, str, bytes)  # compared by value, others by identity


def _tensor_version(tensor: Tensor) -> int | None:
    """Return how often a tensor has been written to; None where torch does not count that."""
    return None if tensor.is_inference() else tensor._version


FINGERPRINTS: tuple[tuple[type, Callable[[Any], Any]], ...] = (  # by type; they change as the value changes within
    (Tensor, _tensor_version),
    (np.ndarray, lambda array: zlib.crc32(array.tobytes())),
    (bytearray, bytes),
    (random.Random, lambda generator: repr(generator.getstate())),
    (np.random.Generator, lambda generator: repr(generator.bit_generator.state)),
    (np.random.RandomState, lambda generator: repr(generator.get_state())),
    (torch.Generator, lambda generator: generator.get_state().numpy().tobytes()),
)


def refuse_own_call(model: nn.Module) -> None:
    """Raise UserError if calling the network runs more than its stages: checkpointing runs those alone."""
    is_plain = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
    has_own_forward = "forward" in vars(model)
    hooks = [
        *model._forward_hooks.values(),
        *model._forward_pre_hooks.values(),
        *model._backward_hooks.values(),
    ]
    if not is_plain or has_own_forward or not all(map(only_watches, hooks)):
        fault = "has a forward or hooks of its own, or is no nn.Sequential"
        raise UserError(f"ckpt: the network {type(model).__name__} {fault}; put them into a stage, or set ckpt=0")


class StageState:
    """Buffers and attributes of a stage, as they are before its first call of a step."""

    def __init__(self, stage: nn.Module) -> None:
        self.stage = stage
        self.buffers = {name: buffer.clone() for name, buffer in stage.named_buffers()}
        self.modules = [_ModuleState(path, module) for path, module in stage.named_modules()]

    def refuse_changes_within(self) -> None:
        """Raise UserError, after the first call, for what has changed and cannot be put back."""
        for state in self.modules:
            name = state.changed_within()
            if name is None:
                continue
            where = type(self.stage).__name__
            if state.path:
                where += f".{state.path}"
            fault = f"{name} of {type(state.module).__name__} changes within a forward pass"
            advice = "keep it in a buffer (register_buffer), or set ckpt=0"
            raise UserError(f"ckpt: {where}: {fault}, so backward cannot compute it again; {advice}")

    @contextmanager
    def restored(self) -> Iterator[dict[str, Tensor]]:
        """Put the attributes back within, and yield copies of the buffers to call the stage on.

        Afterwards all is as the first call has left it.
        """
        now = [_attributes(state.module) for state in self.modules]
        for state in self.modules:
            _replace_attributes(state.module, state.attributes)
        try:
            yield {name: buffer.clone() for name, buffer in self.buffers.items()}
        finally:
            for state, attributes in zip(self.modules, now, strict=True):
                _replace_attributes(state.module, attributes)


class _ModuleState:
    """Attributes of one module, and fingerprints of what may change within them and its parameters."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path = path  # from the stage
        self.module = module
        self.attributes = _attributes(module)
        self.fingerprints = self._fingerprints()

    def changed_within(self) -> str | None:
        """Return the first attribute or parameter that has changed within; None without one."""
        now = self._fingerprints()
        for name, before in self.fingerprints.items():
            if not _is_same(before, now[name]):
                return name
        return None

    def _fingerprints(self) -> dict[str, list[Any]]:
        with _disable_current_modes():  # a ledger or fake tensors
            values = dict(self.attributes)
            values.update(self.module.named_parameters(recurse=False))
            return {name: _fingerprint(value) for name, value in values.items()}


def tensor_versions(state: Any) -> list[tuple[Tensor, int]]:
    """Return the tensors that a stage gets, and how often each has been written to."""
    return [(leaf, leaf._version) for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]


def refuse_changed_input(stage: nn.Module) -> None:
    """Raise UserError for a stage that has written over the input of a segment, which backward begins from."""
    fault = "writes over its input, from which backward would compute it again"
    raise UserError(f"ckpt: the stage {type(stage).__name__} {fault}; use inplace=False there, or set ckpt=0")


class RandomNumbers:
    """The state of Python's and NumPy's global random numbers."""

    def __init__(self) -> None:
        self.python = random.getstate()
        self.numpy = np.random.get_state()

    def restore(self) -> None:
        """Draw from this state on."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)


@contextmanager
def rewound(to: RandomNumbers) -> Iterator[None]:
    """Draw again within what Python and NumPy have drawn since `to`; afterwards, go on from the present state."""
    now = RandomNumbers()
    to.restore()
    try:
        yield
    finally:
        now.restore()


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's mode and what its own code has set."""
    return {name: value for name, value in vars(module).items() if name not in OF_ALL_MODULES}


def _replace_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Give a module these attributes and no others."""
    for name in _attributes(module).keys() - attributes.keys():
        del vars(module)[name]
    vars(module).update(attributes)


def _fingerprint(value: Any) -> list[Any]:
    """Return the items of a value, and the fingerprints of it and of them: what changes within, one level deep."""
    items: list[Any] = []
    if isinstance(value, dict):
        items = [*value, *value.values()]
    elif isinstance(value, COLLECTIONS):
        items = list(value)
    elif hasattr(value, "__dict__") and not callable(value):  # modules and types are callable, too
        items = list(vars(value).values())
    prints = []
    for item in (value, *items):
        prints += [read(item) for kind, read in FINGERPRINTS if isinstance(item, kind)]
    return items + prints


def _is_same(before: list[Any], now: list[Any]) -> bool:
    """Return whether two fingerprints agree."""
    if len(before) != len(now):
        return False
    for old, new in zip(before, now, strict=True):
        is_equal = isinstance(old, VALUES) and old == new
        if old is not new and not is_equal:
            return False
    return True
