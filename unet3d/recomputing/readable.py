"""All that a forward pass can read besides its image, as a value: a schedule serves as long as this stays the same.

A trace holds what forward read when it was made: numbers of a config, a layer's dilation, a function. So a network is
looked through before each pass. Of parameters and buffers, whose values each pass reads anew, name, shape and type
count. One thing too many costs a search, one too few a wrong gradient. Attributes that no code of the network names are
left out, so that a counter of the training loop costs nothing.
"""

import functools
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from unet3d.recomputing.looking import BY_VALUE, INTERNAL, MISSING, Look, Same, content_of, is_library
from unet3d.recomputing.state import only_watches

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
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
VARIABLES = "variables"  # The name at which those of code begin in a snapshot.


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


def snapshot(network: nn.Module, code: Code) -> tuple[Any, ...]:
    """Return all that the network's forward pass can read, as names and values in turn."""
    modules = modules_of(network)
    return tuple(_entries(modules, code, Look(modules, code.packages)))


def look_through(network: nn.Module, code: Code) -> Look:
    """Return a look that has seen all that forward can read, with the functions and the loose tensors that it found."""
    modules = modules_of(network)
    look = Look(modules, code.packages)
    _entries(modules, code, look)
    return look


def _entries(modules: Sequence[nn.Module], code: Code, look: Look) -> list[Any]:
    """Return names and values in turn, as a look sees them."""
    known = look.known
    names = code.names
    not_read = code.not_read
    entries: list[Any] = []
    add = entries.append
    for module in modules:
        attributes = vars(module)
        add("class")
        add(type(module))
        for tensors in (attributes["_parameters"], attributes["_buffers"]):
            for name, tensor in tensors.items():
                add(name)
                add(tensor if tensor is None else (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad))
        for name, child in attributes["_modules"].items():
            add(name)
            add(known.get(id(child)))
        internal = not_read.get(type(module), INTERNAL)
        for name, value in attributes.items():
            if name in internal or not (names is None or name in names):
                continue
            add(name)
            add(value if type(value) in BY_VALUE else look(value))
    add(VARIABLES)
    add(None)
    for get, name in code.cells:
        add(name)
        add(look(get(name, MISSING)))
    return entries


def values_by_path(network: nn.Module, code: Code) -> dict[str, list[Any]]:
    """Return what forward can read by its path, as "blocks.0.scale", and which tensors parameters and buffers are."""
    values: dict[str, list[Any]] = {}
    path_of = {module: path for path, module in network.named_modules()}
    modules = modules_of(network)
    paths = iter([path_of[module] for module in modules])
    path = ""
    entries = snapshot(network, code)
    for name, value in zip(entries[::2], entries[1::2], strict=True):
        if name in ("class", VARIABLES):
            path = next(paths, "")
        values.setdefault(f"{path}.{name}".removeprefix("."), []).append(value)
    for module in modules:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            values[f"{path_of[module]}.{name}".removeprefix(".")].append(tensor if tensor is None else Same(tensor))
    return values


def hooked(network: nn.Module, with_root: bool = True) -> list[str]:
    """Return in words which modules have hooks; observers' do not count.

    `with_root`: also those of the network itself. Hooks of all modules that there are count always.
    """
    found = []
    for module in modules_of(network):
        attributes = vars(module)
        for kind in HOOKS:
            hooks = attributes[kind]
            if hooks and (with_root or module is not network) and not all(map(only_watches, hooks.values())):
                path = next(path for path, other in network.named_modules() if other is module)
                found.append(f"{path or type(network).__name__}: {kind[1:]}")
    for kind in HOOKS:
        hooks = getattr(nn.modules.module, f"_global{kind}")
        if hooks and not all(map(only_watches, hooks.values())):
            found.append(f"all modules: {kind[1:]}")
    return found


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
            for function in look_through(self.network, self.code()).functions:
                self._read_function(function)
        return self.code()

    def code(self) -> Code:
        """Return what is found so far."""
        names = None if self.names & ANY_NAME else frozenset(self.names)
        not_read = {kind: _not_read(kind) for kind in self.own_names}
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


def _not_read(kind: type) -> Set[str]:
    """Return the attributes of a class of modules that do not count."""
    names: Set[str] = INTERNAL
    for base in kind.__mro__:
        names |= set(WITHIN_A_PASS.get(f"{base.__module__}.{base.__qualname__}", ()))
    return names


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
