"""All that a forward pass can read besides its image, as a value to compare: a schedule serves while it stays the same.

A trace holds what forward read when it was made: numbers of a config, a layer's dilation, a function. So a network is
looked through before each pass. Of parameters and buffers, whose values each pass reads anew, name, shape and type
count. One thing too many costs a search, one too few a wrong gradient. Attributes that no code of the network names are
left out, so that a counter of the training loop costs nothing.

Numbers and texts count by value, containers and plain objects by content, functions by identity and by what they close
over, tensors by identity and version, classes by identity and by what their own packages put into them.
"""

import functools
import logging
import operator
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextvars import ContextVar
from enum import Enum
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    EllipsisType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any, NamedTuple

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
MOST_OBJECTS = 50_000  # To look at this many takes a tenth of a second in each pass.
MISSING = "(missing)"
SCHEDULES = "_unet3d_schedules"  # The attribute in which the class of a network that recomputes keeps its schedules.


# Code that names one of these may read an attribute whose name it does not contain.
ANY_NAME = frozenset(
    ("getattr", "vars", "__dict__", "attrgetter", "methodcaller", "eval", "exec", "locals", "__getattribute__")
)
READERS = (getattr, vars, eval, exec, operator.attrgetter, operator.methodcaller)  # The same, by other names.
# Attributes in which a class keeps tensors within a pass: it writes them before it reads them.
WITHIN_A_PASS = {
    "monai.networks.nets.dynunet.DynUNet": ("heads",),
    "monai.networks.nets.dynunet.DynUNetSkipLayer": ("heads",),
}


class Code(NamedTuple):
    """What the code of a network names. `names`: of attributes, None where it may read any.

    `not_read`: attributes of classes that do not count, those of `nn.Module` among them. `cells`: variables of modules
    and attributes of classes, with the functions that give them by their names. `packages`: whose code it is.
    """

    names: frozenset[str] | None
    not_read: Mapping[type, Set[str]]
    cells: tuple[tuple[Callable[..., Any], str], ...]
    packages: frozenset[str]


def modules_of(network: nn.Module) -> list[nn.Module]:
    """Return all modules of a network, itself first."""
    modules = [network]
    known = {id(network)}
    for module in modules:
        for child in module._modules.values():
            if child is not None and id(child) not in known:
                known.add(id(child))
                modules.append(child)
    return modules


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
PARTS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    Enum: lambda value: (value.name, value.value),
    logging.Logger: lambda value: (value.name,),
    MethodType: lambda value: (value.__func__, value.__self__),
    property: lambda value: (value.fget, value.fset, value.fdel),
    staticmethod: lambda value: (value.__func__,),
    classmethod: lambda value: (value.__func__,),
    functools.partial: lambda value: (value.func, value.args, value.keywords),
    weakref.ref: lambda value: (value(),),
    ContextVar: lambda value: (value.get(None),),
}


class Look:
    """Turns all that forward can read into values to compare; what was seen before counts by its number.

    `parts`: names and values in turn, of each of the `modules`, and of the variables that code names.
    """

    def __init__(self, network: nn.Module, code: Code) -> None:
        self.code = code
        self.modules = modules_of(network)
        self.known: dict[int, int] = {}
        for module in self.modules:
            attributes = vars(module)
            self.known[id(module)] = len(self.known)
            self.known[id(attributes)] = len(self.known)
            for tensors in (attributes["_parameters"], attributes["_buffers"]):
                for tensor in tensors.values():
                    self.known[id(tensor)] = len(self.known)
        self.made: list[Any] = []
        self.tensors: list[Tensor] = []
        self.functions: list[FunctionType] = []
        self.parts = [self._part(module) for module in self.modules]
        variables: list[Any] = []
        for get, name in code.cells:
            variables += (name, self(get(name, MISSING)))
        self.parts.append(tuple(variables))

    def _part(self, module: nn.Module) -> tuple[Any, ...]:
        """Return names and values in turn of what forward can read of a module."""
        names = self.code.names
        internal = self.code.not_read.get(type(module), INTERNAL)
        attributes = vars(module)
        part: list[Any] = ["class", type(module)]
        for tensors in (attributes["_parameters"], attributes["_buffers"]):
            for name, tensor in tensors.items():
                kind = tensor if tensor is None else (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)
                part += (name, kind)
        for name, child in attributes["_modules"].items():
            part += (name, self.known.get(id(child)))
        for name, value in attributes.items():
            if name not in internal and (names is None or name in names):
                part += (name, value if type(value) in BY_VALUE else self(value))
        return tuple(part)

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
            self.tensors.append(value)
            version = None if value.is_inference() else value._version
            memory = value.untyped_storage()._cdata
            return Same(value), version, memory, value.shape, value.dtype, value.requires_grad
        if kind is FunctionType:
            return value if is_library(value.__module__, self.code.packages) else self._function(value)
        if isinstance(value, type):
            return value if is_library(value.__module__, self.code.packages) else (value, *self._members(value))
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
        for known, parts in PARTS.items():
            if isinstance(value, known):
                return [self(part) for part in parts(value)]
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


def tensors_of(network: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by all their names."""
    tensors: dict[str, Tensor] = dict(network.named_parameters(remove_duplicate=False))
    return tensors | dict(network.named_buffers(remove_duplicate=False))


def snapshot(network: nn.Module, code: Code) -> tuple[Any, ...]:
    """Return all that the network's forward pass can read."""
    return tuple(Look(network, code).parts)


def values_by_path(network: nn.Module, code: Code) -> dict[str, list[Any]]:
    """Return what forward can read by its path, as "blocks.0.scale", and which tensors parameters and buffers are."""
    values: dict[str, list[Any]] = {}
    path_of = {module: path for path, module in network.named_modules()}
    look = Look(network, code)
    paths = [*(path_of[module] for module in look.modules), ""]
    for path, part in zip(paths, look.parts, strict=True):
        for name, value in zip(part[::2], part[1::2], strict=True):
            values.setdefault(f"{path}.{name}".removeprefix("."), []).append(value)
    for path, module in zip(paths, look.modules, strict=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            values[f"{path}.{name}".removeprefix(".")].append(tensor if tensor is None else Same(tensor))
    return values


# What code names


def code_of(network: nn.Module) -> Code:
    """Return what the code of the network's forward pass names, as far as Python's functions say so."""
    return _CodeReader(network).read()


class _CodeReader:
    """Follows forward into the methods, functions and classes that it names."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.names = {"forward", "training"}
        self.cells: dict[tuple[int, str], tuple[Callable[..., Any], str]] = {}
        self.read_already: set[int] = set()
        self.own_names: dict[type, set[str]] = {}
        self.packages = frozenset(type(module).__module__.partition(".")[0] for module in modules_of(network))

    def read(self) -> Code:
        """Read until there is nothing new, and return what was found."""
        for module in modules_of(self.network):
            held = (module._parameters, module._buffers, module._modules)
            self.own_names.setdefault(type(module), set()).update(vars(module), *held)
        count = -1
        while count != len(self.names) + len(self.cells):
            count = len(self.names) + len(self.cells)
            for kind in self.own_names:
                self._read_class(kind)
            for function in Look(self.network, self.code()).functions:
                self._read_function(function)
        return self.code()

    def code(self) -> Code:
        """Return what is found so far."""
        names = None if self.names & ANY_NAME else frozenset(self.names)
        not_read = {}
        for kind in self.own_names:
            paths = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
            not_read[kind] = INTERNAL.union(*(WITHIN_A_PASS.get(path, ()) for path in paths))
        return Code(names, not_read, tuple(self.cells.values()), self.packages - {"torch"})

    def _read_class(self, kind: type) -> None:
        """Read the methods that are named, and those that Python calls without a name."""
        for base in kind.__mro__:
            if base in (nn.Module, object) or base.__module__.startswith("unet3d.recomputing"):
                continue
            for name, member in list(vars(base).items()):
                is_called_unnamed = name.startswith("__") and name != "__init__" and callable(member)
                if is_called_unnamed or (name in self.names and not name.startswith("__")):
                    self._add_cell(kind, name)
                    self._read_member(member)
        for name in self.own_names.get(kind, ()):
            if name in self.names:
                self._add_cell(kind, name)  # A property of that name would come before what the object has.

    def _read_member(self, member: Any) -> None:
        for part in ("fget", "func", "__func__", "__wrapped__"):
            inner = getattr(member, part, None)
            if isinstance(inner, FunctionType):
                self._read_function(inner)
        if isinstance(member, FunctionType):
            self._read_function(member)

    def _read_function(self, function: FunctionType) -> None:
        if id(function) in self.read_already:
            return
        self.read_already.add(id(function))
        names = _names(function.__code__)
        is_of_library = is_library(function.__module__, self.packages)
        if is_of_library:
            names -= ANY_NAME
        self.names |= names
        for cell in function.__closure__ or ():
            if isinstance(content_of(cell), FunctionType):
                self._read_function(content_of(cell))
        for name in names & function.__globals__.keys():
            value = function.__globals__[name]
            self._add_variable(function.__globals__, name, is_of_library)
            if any(value is reader for reader in READERS) or isinstance(value, READERS[-2:]):
                self.names.add("getattr")
            self._read_module(value, names)
        if not is_of_library:
            for name in names & sys.modules.keys():  # Imported within the function.
                self._read_module(sys.modules[name], names)

    def _read_module(self, value: Any, names: Set[str]) -> None:
        """Add the variables of a module that code names, and of modules within it."""
        waiting = [value]
        known = set()
        for module in waiting:
            if not isinstance(module, ModuleType) or id(module) in known:
                continue
            known.add(id(module))
            variables = vars(module)
            is_of_library = is_library(module.__name__, self.packages)
            for name in names & variables.keys():
                self._add_variable(variables, name, is_of_library)
                waiting.append(variables[name])

    def _add_cell(self, owner: type, name: str) -> None:
        self.cells.setdefault((id(owner), name), (functools.partial(getattr, owner), name))

    def _add_variable(self, variables: dict[str, Any], name: str, is_of_library: bool) -> None:
        """Add a variable of a module; of a library's it matters whether it is another object."""
        get = functools.partial(_object, variables) if is_of_library else variables.get
        self.cells.setdefault((id(variables), name), (get, name))


def _object(variables: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return a variable that is a function, a class or a module, and else what equals that object alone."""
    value = variables.get(name, default)
    if value is os.environ or value is os.getenv:
        return repr(os.environ)
    return value if isinstance(value, FunctionType | ModuleType | type) else Same(value)


@functools.cache
def _names(code: CodeType) -> frozenset[str]:
    """Return the names and texts that code contains, with those of functions within it."""
    names = {*code.co_names, *code.co_freevars}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
        elif isinstance(constant, str):
            names.add(constant)
    return frozenset(names)


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
