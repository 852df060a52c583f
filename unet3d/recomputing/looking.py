"""Objects as values to compare: what stays equal has not changed.

Numbers and texts count by value, containers and plain objects by content, functions by identity and by what they close
over, tensors by identity and version, classes by identity and by what their own packages put into them.
"""

import functools
import logging
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextvars import ContextVar
from enum import Enum
from types import (
    BuiltinFunctionType,
    CellType,
    EllipsisType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unet3d.base.errors import UserError

INTERNAL = frozenset(vars(nn.Module())) - {"training"}
NUMBERS = frozenset((bool, int, float, complex))  # By their text: 1 and 1.0, 0.0 and -0.0 are not the same.
BY_VALUE = frozenset(
    (str, bytes, NoneType, EllipsisType, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
)
LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "numpy"))
MOST_OBJECTS = 50_000  # They take a tenth of a second in each pass.
MISSING = "(missing)"
SCHEDULES = "_unet3d_schedules"  # The attribute in which the class of a network that recomputes keeps its schedules.


class Same:
    """An object that equals itself alone. It is kept alive only where Python has no weak references to it."""

    __slots__ = ("address", "reference")

    def __init__(self, value: Any) -> None:
        self.address = id(value)
        try:
            self.reference: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self.reference = lambda: value

    def __hash__(self) -> int:
        return self.address

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same) or self.address != other.address:
            return False
        value = self.reference()
        return value is not None and value is other.reference()


# Types whose objects are returned: they compare by identity, or nothing in them can change.
EQUAL_THEMSELVES = frozenset(
    (Same, BuiltinFunctionType, ModuleType, type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))
)
# What counts of objects of some types.
PARTS: dict[type, tuple[str, ...]] = {
    Enum: ("name", "value"),
    logging.Logger: ("name",),
    MethodType: ("__func__", "__self__"),
    property: ("fget", "fset", "fdel"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    functools.partial: ("func", "args", "keywords"),
}


class Look:
    """Turns what it is shown into a value to compare; what was seen before counts by its number."""

    def __init__(self, modules: Sequence[nn.Module], packages: frozenset[str]) -> None:
        """Know a network's modules, parameters and buffers. `packages`: those whose code may change."""
        self.packages = packages
        self.known: dict[int, int] = {}
        for module in modules:
            attributes = vars(module)
            self.known[id(module)] = len(self.known)
            self.known[id(attributes)] = len(self.known)
            for tensors in (attributes["_parameters"], attributes["_buffers"]):
                for tensor in tensors.values():
                    self.known[id(tensor)] = len(self.known)
        self.made: list[Any] = []
        self.tensors: list[Tensor] = []
        self.functions: list[FunctionType] = []

    def __call__(self, value: Any) -> Any:
        kind = type(value)
        if kind in BY_VALUE or kind in EQUAL_THEMSELVES:
            return value
        if kind in NUMBERS or (kind is tuple and NUMBERS.issuperset(map(type, value))):
            return kind, repr(value)
        number = self.known.get(id(value))
        if number is not None:
            return Look, number
        self.known[id(value)] = len(self.known)
        if len(self.known) > MOST_OBJECTS:
            raise UserError(
                f"forward could read more than {MOST_OBJECTS} objects, of a {kind.__name__} among others, which "
                "recompute and ckpt look through in each pass; keep what it does not need outside of the network"
            )
        if kind is tuple or kind is list or kind is deque:
            return kind, *map(self, value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if kind is FunctionType:
            return value if is_library(value.__module__, self.packages) else self._function(value)
        if isinstance(value, type):
            return value if is_library(value.__module__, self.packages) else (value, *self._members(value))
        if kind.__module__.startswith("unet3d.recomputing"):
            return kind
        if isinstance(value, ModuleType):
            return value
        return self(kind), *self._content(value)

    def _members(self, kind: type) -> Iterator[Any]:
        """Yield what a class has by itself, and what the classes before it have."""
        for base in kind.__bases__:
            yield self(base)
        for name, member in vars(kind).items():
            is_data = not name.startswith("__") and name != SCHEDULES and type(member) is not GetSetDescriptorType
            if is_data or type(member) is FunctionType:
                yield name, self(member)

    def _tensor(self, tensor: Tensor) -> tuple[Any, ...]:
        self.tensors.append(tensor)
        version = None if tensor.is_inference() else tensor._version
        memory = tensor.untyped_storage()._cdata
        return Same(tensor), version, memory, tensor.shape, tensor.dtype, tensor.requires_grad

    def _function(self, function: FunctionType) -> tuple[Any, ...]:
        self.functions.append(function)
        parts = [function, function.__code__]
        if function.__defaults__ or function.__kwdefaults__:
            parts += (self(function.__defaults__), self(function.__kwdefaults__))
        if function.__dict__:
            parts.append(self(function.__dict__))
        for cell in function.__closure__ or ():
            parts.append(self(content_of(cell)))
        return tuple(parts)

    def _content(self, value: Any) -> Iterable[Any]:
        """Return the content of a container or an object."""
        for known, names in PARTS.items():
            if isinstance(value, known):
                return [self(getattr(value, name)) for name in names]
        if isinstance(value, weakref.ref):
            return (self(value()),)
        if isinstance(value, ContextVar):
            return (self(value.get(None)),)
        if isinstance(value, np.ndarray):
            content = self._made(value.tolist()) if value.dtype.hasobject else value.tobytes()
            return value.shape, value.dtype.str, content
        if isinstance(value, nn.Module):
            number = self.known.get(id(vars(value)))  # Of a network that recomputes, which shares its attributes.
            if number is not None:
                return (number,)
            attributes = ((name, item) for name, item in vars(value).items() if name not in INTERNAL)
            held = (value._parameters, value._buffers, value._modules)
            return tuple((name, self(item)) for name, item in (*attributes, *zip("pbm", held, strict=True)))
        if isinstance(value, dict | MappingProxyType):
            items: Iterable[Any] = [(self(key), self(item)) for key, item in value.items()]
        elif isinstance(value, set | frozenset):
            items = (frozenset(map(self, value)),)
        elif isinstance(value, tuple | list | deque):
            items = map(self, value)
        else:
            return (*self._attributes(value), self._state(value))
        return (*items, *self._attributes(value))

    def _attributes(self, value: Any) -> Iterator[Any]:
        """Yield the attributes of an object."""
        attributes = getattr(value, "__dict__", {})
        if type(value).__module__.startswith("omegaconf"):
            # The rest of a node is its parent, and what it remembers of that.
            attributes = {name: attributes[name] for name in ("_content", "_val") if name in attributes}
        for name, item in attributes.items():
            yield name, self(item)
        for base in type(value).__mro__:
            slots = vars(base).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name.startswith("__") and not name.endswith("__"):
                    name = f"_{base.__name__.lstrip('_')}{name}"  # As Python itself calls it.
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    yield name, self(getattr(value, name))

    def _state(self, value: Any) -> Any:
        """Return what an object has besides attributes, as generators of random numbers and iterators have."""
        kind: Any = type(value)
        plain: Any = object
        has_own_state = kind.__reduce__ is not plain.__reduce__ or kind.__reduce_ex__ is not plain.__reduce_ex__
        if not has_own_state and (hasattr(value, "__dict__") or hasattr(kind, "__slots__")):
            return None
        if not has_own_state or isinstance(value, torch.Generator):
            return Same(value)
        try:
            return self._made(value.__reduce_ex__(2))
        except Exception:  # An object that cannot be copied may raise anything.
            return Same(value)

    def _made(self, value: Any) -> Any:
        """Look at a value that was made for it, and keep it, so that no other one takes its address meanwhile."""
        self.made.append(value)
        return self(value)


def content_of(cell: CellType) -> Any:
    """Return what a cell of a closure holds."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


@functools.cache
def is_library(module: str | None, packages: Set[str]) -> bool:
    """Return whether a module's code is taken to stay the same: it is installed, and not among these packages."""
    package = (module or "").partition(".")[0]
    if package in packages:
        return False
    path = str(getattr(sys.modules.get(package), "__file__", None))
    return package in LIBRARIES or "site-packages" in path or "dist-packages" in path
