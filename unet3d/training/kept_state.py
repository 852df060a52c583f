"""What a stage keeps from one call to the next, so that backward's second call can begin as the first one did.

Checkpointing calls a stage twice in a step. Buffers, attributes of modules, and the random numbers of Python and NumPy
are put back for the second call; torch's own checkpointing does that for the random numbers of torch. What a call
changes within an attribute, such as a list that grows, cannot be put back: it is refused by name where it is seen,
which is one level deep and in the types of `INNER`. Iterators, callables with a state, what lies deeper, class
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
from unet3d.training import slabs

OF_MODULES = vars(nn.Module()).keys() - {"training"}  # what every module has; of it only the mode is an attribute here
COLLECTIONS = (list, tuple, set, frozenset, deque)
VALUES = (int, float, str, bytes)
INNER: tuple[tuple[type, Callable[[Any], Any]], ...] = (  # what changes within a value, by its type
    (Tensor, lambda tensor: None if tensor.is_inference() else tensor._version),
    (np.ndarray, lambda array: zlib.crc32(array.tobytes())),
    (np.random.Generator, lambda generator: repr(generator.bit_generator.state)),
    (np.random.RandomState, lambda generator: repr(generator.get_state())),
    (bytearray, bytes),
    (random.Random, lambda generator: repr(generator.getstate())),
    (torch.Generator, lambda generator: generator.get_state().numpy().tobytes()),
)


def refuse_own_call(model: nn.Module) -> None:
    """Raise UserError for a sequence of stages of which a call runs more than its stages: checkpointing runs them."""
    hooks = [*model._forward_hooks.values(), *model._forward_pre_hooks.values(), *model._backward_hooks.values()]
    is_plain = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
    if not is_plain or "forward" in vars(model) or not all(map(slabs.only_watches, hooks)):
        what = "has a forward or hooks of its own, or is no nn.Sequential"
        raise UserError(f"ckpt: the network {type(model).__name__} {what}; put them into a stage, or set ckpt=0")


class KeptState:
    """What a stage keeps, as it is before the stage's first call of a step."""

    def __init__(self, stage: nn.Module) -> None:
        self.stage = stage
        self.buffers = {name: buffer.clone() for name, buffer in stage.named_buffers()}
        self.attributes = {path: (module, _attributes(module)) for path, module in stage.named_modules()}
        self.inner = {path: _inner(module, found) for path, (module, found) in self.attributes.items()}

    def refuse_changes_within(self) -> None:
        """Raise UserError, after the first call, for what has changed and cannot be put back."""
        for path, (module, attributes) in self.attributes.items():
            now = _inner(module, attributes)
            for name, before in self.inner[path].items():
                if not _is_same(before, now[name]):
                    where = f"{type(self.stage).__name__}{'.' * bool(path)}{path}"
                    what = f"{name} of {type(module).__name__} changes within a forward pass"
                    advice = "keep it in a buffer (register_buffer), or set ckpt=0"
                    raise UserError(f"ckpt: {where}: {what}, so backward cannot compute it again; {advice}")

    @contextmanager
    def put_back(self) -> Iterator[dict[str, Tensor]]:
        """Within, attributes are as they were. Yields buffers as they were, to call the stage on.

        Afterwards all is again as the first call has left it.
        """
        now = [(module, _attributes(module)) for module, _ in self.attributes.values()]
        for module, before in self.attributes.values():
            _replace(module, before)
        try:
            yield {name: buffer.clone() for name, buffer in self.buffers.items()}
        finally:
            for module, after in now:
                _replace(module, after)


def versions(state: Any) -> list[tuple[Tensor, int]]:
    """Return the tensors that a stage gets, and how often each has been written to."""
    return [(leaf, leaf._version) for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]


def refuse_changed_input(stage: nn.Module) -> None:
    """Raise UserError for a stage that has written over the input of a segment, which backward begins from."""
    what = "writes over its input, from which backward would compute it again"
    raise UserError(f"ckpt: the stage {type(stage).__name__} {what}; use inplace=False there, or set ckpt=0")


class RandomNumbers:
    """The state of Python's and NumPy's global random numbers."""

    def __init__(self) -> None:
        self.python, self.numpy = random.getstate(), np.random.get_state()

    def take(self) -> None:
        """Draw from this state on."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)


@contextmanager
def drawn_again(before: RandomNumbers) -> Iterator[None]:
    """Within, Python's and NumPy's random numbers are those that followed `before`."""
    now = RandomNumbers()
    before.take()
    try:
        yield
    finally:
        now.take()


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in OF_MODULES}


def _replace(module: nn.Module, attributes: dict[str, Any]) -> None:
    for name in _attributes(module).keys() - attributes.keys():
        del vars(module)[name]
    vars(module).update(attributes)


def _inner(module: nn.Module, attributes: dict[str, Any]) -> dict[str, list[Any]]:
    """Return what changes within attributes and parameters, one level deep."""
    with _disable_current_modes():  # a ledger or fake tensors
        parameters = {name: p for name, p in module.named_parameters(recurse=False)}
        return {name: _parts(value) for name, value in (attributes | parameters).items()}


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        items = [*value, *value.values()]
    elif isinstance(value, COLLECTIONS):
        items = list(value)
    elif isinstance(value, nn.Module | type) or callable(value) or not hasattr(value, "__dict__"):
        items = []
    else:
        items = list(vars(value).values())
    return [*items, *(read(item) for item in (value, *items) for kind, read in INNER if isinstance(item, kind))]


def _is_same(before: list[Any], now: list[Any]) -> bool:
    if len(before) != len(now):
        return False
    return all(a is b or (isinstance(a, VALUES) and a == b) for a, b in zip(before, now, strict=True))
