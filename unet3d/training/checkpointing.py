"""Activation checkpointing of consecutive stages, which changes no bit of loss, gradients, buffers or output.

Checkpointing calls a stage twice in a step. Buffers, attributes of modules, and the random numbers of Python and NumPy
are put back for the second call; torch's own checkpointing does that for the random numbers of torch. What a call
changes within an attribute, such as a list that grows, cannot be put back: it is refused by name where it is seen,
which is one level deep and in the types of `FINGERPRINTS`.

Iterators, callables with a state, what lies deeper, class attributes and what is written through `.data` are not seen
so. The second call then computes other values, and gradients would be wrong. So in the first passes of a network a few
numbers of each operation's result are noted in the first call, and the numbers of the second call must be among them.
Nothing is compared where tensors have no data, and nothing in later passes: a state that changes values only there, or
none of the noted numbers, is not seen.
"""

import math
import random
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint_sequential, set_checkpoint_early_stop

from unet3d.base.errors import UserError
from unet3d.recomputing.state import Observer, only_watches

OF_ALL_MODULES = vars(nn.Module()).keys() - {"training"}  # the mode counts as an attribute, all else is torch's own
COLLECTIONS = (list, tuple, set, frozenset, deque)
VALUES = (int, float, str, bytes)  # compared by value, others by identity
PASSES = 2  # The first passes of a network are compared.
NUMBERS = 256  # Most numbers of a result that are compared.
# How far they may differ: relative to their norm, root mean square. Kernels of a GPU need not give equal bits.
TOLERANCE = {"cpu": (1e-6, 0.0)}
TOLERANCE_ELSEWHERE = (2e-2, 1e-3)
MADE_OF_NUMBERS = torch.ops.aten.lift_fresh.default  # torch.tensor calls it; it counts as a view.
Numbers = npt.NDArray[np.float64]

_passes: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


FINGERPRINTS: tuple[tuple[type, Callable[[Any], Any]], ...] = (  # A type's fingerprint changes with the value.
    (Tensor, lambda tensor: None if tensor.is_inference() else tensor._version),  # writes, where torch counts them
    (np.ndarray, lambda array: zlib.crc32(array.tobytes())),
    (bytearray, bytes),
    (random.Random, lambda generator: repr(generator.getstate())),
    (np.random.Generator, lambda generator: repr(generator.bit_generator.state)),
    (np.random.RandomState, lambda generator: repr(generator.get_state())),
    (torch.Generator, lambda generator: generator.get_state().numpy().tobytes()),
)


def checkpointed(model: nn.Module, image: Tensor, segment_starts: Sequence[int]) -> Any:
    """Return the output of an nn.Sequential, and keep for backward only what its segments begin with.

    Raises UserError for a network that has more to call than its stages, and for a stage that cannot be called twice.
    """
    # Calling the network must run its stages alone: checkpointing runs no more.
    is_plain = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
    hooks = [*model._forward_hooks.values(), *model._forward_pre_hooks.values(), *model._backward_hooks.values()]
    if not is_plain or "forward" in vars(model) or not all(map(only_watches, hooks)):
        fault = "has its own forward or hooks, or is no nn.Sequential"
        raise UserError(f"ckpt: the network {type(model).__name__} {fault}; put them into a stage, or set ckpt=0")
    assert isinstance(model, nn.Sequential)
    assert segment_starts[0] == 0 and sorted({*segment_starts}) == [*segment_starts]
    # A recomputation ends once all that backward needs is saved; RReLU's noise is filled after that.
    may_end_early = not any(isinstance(module, nn.RReLU) for module in model.modules())
    stages = list(model)
    compares = is_compared(model, image)
    segments: list[Callable[[Any], Any]] = []
    for start, end in pairwise(segment_starts):
        segments.append(Segment(stages[start:end], compares))

    def last_segment(state: Any) -> Any:
        for stage in stages[segment_starts[-1] :]:  # Backward begins here: these maps stay in memory.
            state = stage(state)
        return state

    with set_checkpoint_early_stop(may_end_early):
        return checkpoint_sequential([*segments, last_segment], len(segment_starts), image, use_reentrant=False)


def is_compared(model: nn.Module, image: Tensor) -> bool:
    """Count a pass with gradients, and return whether it is one of the first, of tensors with data."""
    if isinstance(image, FakeTensor) or image.is_meta:
        return False
    _passes[model] = _passes.get(model, 0) + 1
    return _passes[model] <= PASSES


class Segment:
    """Consecutive stages of one forward pass, called in it and a second time in backward.

    The second call begins with the state from before the first, which has updated running statistics, for one. With
    `compares`, it must compute what the first one did.
    """

    def __init__(self, stages: Sequence[nn.Module], compares: bool) -> None:
        self.stages = stages
        self.compares = compares
        self.first_calls: list[tuple[StageState, Comparison | None]] = []  # States of the stages at their first calls.
        self.random_numbers: tuple[Any, Any] | None = None  # before the first call

    def __call__(self, state: Any) -> Any:
        if self.random_numbers is not None:
            return self._call_again(state, self.random_numbers)
        self.random_numbers = _random_numbers()
        inputs = [(leaf, leaf._version) for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
        for stage in self.stages:
            before = StageState(stage)
            comparison = Comparison(stage) if self.compares else None
            self.first_calls.append((before, comparison))
            with comparison or nullcontext():
                state = stage(state)
            before.refuse_changes_within()
            if any(tensor._version != version for tensor, version in inputs):
                fault = "writes over its input, from which backward would compute it again"
                advice = "use inplace=False there, or set ckpt=0"
                raise UserError(f"ckpt: the stage {type(stage).__name__} {fault}; {advice}")
        return state

    def _call_again(self, state: Any, random_numbers: tuple[Any, Any]) -> Any:
        """Return what the first call returned for the same input and these random numbers of Python and NumPy."""
        now = _random_numbers()
        try:
            _draw_from(random_numbers)
            for stage, (before, comparison) in zip(self.stages, self.first_calls, strict=True):
                if comparison is not None:
                    comparison.is_second = True
                with before.restored() as buffers, comparison or nullcontext():
                    state = functional_call(stage, buffers, (state,)) if buffers else stage(state)
            return state
        finally:
            _draw_from(now)


class StageState:
    """Buffers and attributes of a stage as they are before its first call of a step, and prints of what is in them."""

    def __init__(self, stage: nn.Module) -> None:
        self.stage = stage
        self.buffers = {name: buffer.clone() for name, buffer in stage.named_buffers()}
        self.paths = {module: path for path, module in stage.named_modules()}
        self.attributes = {module: _attributes(module) for module in self.paths}
        self.fingerprints = self._fingerprints()

    def _fingerprints(self) -> dict[tuple[nn.Module, str], list[Any]]:
        """Return what changes as a value changes within, for each attribute from before and each parameter."""
        prints = {}
        with _disable_current_modes():  # a ledger or fake tensors
            for module, attributes in self.attributes.items():
                values = attributes | dict(module.named_parameters(recurse=False))
                prints.update({(module, name): _fingerprint(value) for name, value in values.items()})
        return prints

    def refuse_changes_within(self) -> None:
        """Raise UserError, after the first call, for what has changed and cannot be put back."""
        now = self._fingerprints()
        for (module, name), before in self.fingerprints.items():
            if not _is_same(before, now[module, name]):
                path = self.paths[module]
                where = type(self.stage).__name__ + (f".{path}" if path else "")
                fault = f"{name} of {type(module).__name__} changes within a forward pass"
                advice = "keep it in a buffer (register_buffer), or set ckpt=0"
                raise UserError(f"ckpt: {where}: {fault}, so backward cannot compute it again; {advice}")

    @contextmanager
    def restored(self) -> Iterator[dict[str, Tensor]]:
        """Put the attributes back within, and yield copies of the buffers to call the stage on.

        Afterwards all is as the first call has left it.
        """
        now = {module: _attributes(module) for module in self.paths}
        _replace_attributes(self.attributes)
        try:
            yield {name: buffer.clone() for name, buffer in self.buffers.items()}
        finally:
            _replace_attributes(now)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's mode and what its own code has set."""
    return {name: value for name, value in vars(module).items() if name not in OF_ALL_MODULES}


def _replace_attributes(attributes_of: dict[nn.Module, dict[str, Any]]) -> None:
    """Give each module these attributes and no others."""
    for module, attributes in attributes_of.items():
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
    pairs = zip(before, now, strict=True)
    return all(old is new or (isinstance(old, VALUES) and old == new) for old, new in pairs)


def _random_numbers() -> tuple[Any, Any]:
    """Return the state of Python's and NumPy's global random numbers."""
    return random.getstate(), np.random.get_state()


def _draw_from(state: tuple[Any, Any]) -> None:
    """Let Python and NumPy draw from such a state on."""
    random.setstate(state[0])
    np.random.set_state(state[1])


class Comparison(Observer, TorchDispatchMode):
    """A record of what the operations of a stage's first call compute, which those of the second are compared with."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage
        self.is_second = False
        self.noted: dict[tuple[Any, torch.Size], deque[Numbers]] = defaultdict(deque)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # A memory ledger says the same.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result
        if isinstance(result, tuple | list) and result:
            first = result[0]  # others may be no values
        if isinstance(first, Tensor) and _has_values(func, args):
            numbers = _numbers(first)
            if numbers is not None:
                self.see(func, first, numbers)
        return result

    def see(self, func: Any, result: Tensor, numbers: Numbers) -> None:
        """Note a result, or raise UserError if the first call did not have it."""
        noted = self.noted[func, result.shape]
        if not self.is_second:
            noted.append(numbers)
            return
        relative, absolute = TOLERANCE.get(result.device.type, TOLERANCE_ELSEWHERE)
        absolute *= len(numbers) ** 0.5  # The norm follows from the root mean square.
        for _ in range(len(noted)):
            candidate = noted[0]
            difference = np.linalg.norm(numbers - candidate)
            allowed = relative * np.linalg.norm(candidate) + absolute
            noted.rotate(-1)  # What followed in the first call is likely to be next.
            if not difference > allowed:  # NaN is equal
                return
        fault = f"backward computes other values again ({func.overloadpacket.__name__}) than forward did"
        advice = "keep what changes in a buffer (register_buffer), or set ckpt=0"
        raise UserError(f"ckpt: the stage {type(self.stage).__name__} keeps a state, so {fault}; {advice}")


def _has_values(func: Any, args: Sequence[Any]) -> bool:
    """Return whether an operation gives new values.

    It does not as a view, as memory that is yet to be written to, and as a cast of a weight, which autocast may make
    once for several calls.
    """
    name = func.overloadpacket.__name__
    if func.is_view or "empty" in name:
        return func is MADE_OF_NUMBERS
    return not (name == "_to_copy" and args[0].requires_grad and args[0].is_leaf)


def _numbers(tensor: Tensor) -> Numbers | None:
    """Return evenly spaced numbers of a tensor, in the order of its memory; None where there is nothing to compare."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or not tensor.is_floating_point() or not tensor.numel():
        return None
    with _disable_current_modes():  # a ledger
        size = 1
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
            size += (length - 1) * stride
        if size != tensor.numel():  # not dense: its memory holds more
            return None
        step = max(1, size // NUMBERS) | 1  # odd, or all may be of a few channels or columns
        count = math.ceil(size / step)
        sample = tensor.detach().as_strided((count,), (step,)).cpu()
        return sample.double().numpy().copy()  # NumPy's memory: torch's allocator is measured.
