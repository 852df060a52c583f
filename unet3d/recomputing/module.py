"""`unet3d.recompute`: any network, trained by its own schedule."""

import copy
import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_exporting
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from unet3d.base.errors import UserError
from unet3d.base.types import budget_bytes
from unet3d.recomputing.prepare import has_larger_tiles, prepare
from unet3d.recomputing.program import PLANS, Program, by_plan, describe
from unet3d.recomputing.readable import SCHEDULES, Code, code_of, content_of, snapshot
from unet3d.recomputing.run import autocast_dtype, call_by_program, refuse_hooks_of_saved_tensors
from unet3d.recomputing.scratch import plain_bytes
from unet3d.recomputing.trace import refuse_hooks

Plan = Literal["lean", "tiles", "auto"]
MANY_PROGRAMS = 20  # So many schedules of one network are warned of: each takes seconds to find.
MOST_PROGRAMS = 64  # So many are kept, those that were found last.


def recompute(
    model: nn.Module,
    example: Tensor | None = None,
    plan: Plan = "lean",
    budget: str | int | None = None,
    held: str | int | None = None,
) -> "Recomputed":
    """Return a network that trains as `model` does, with the same parameters, in less memory.

    `example` is an image N C D H W as the network will get it; the schedule is found for its size. For each other size,
    and without an example, it is found when the first such image comes. Prints a line that says what to expect, once
    the first schedule is found; where that saves nothing, passes are the network's own. Raises UserError.

    `plan`: "lean" makes sums and small convolutions again, "tiles" most maps, in at most 2.2 forward passes where the
    search finds such a schedule, and "auto" as few as fit: weights, gradients, maps and what is `held` besides (the
    optimizer's state, say, in bytes or as "600MiB") then keep the `budget`, as "6GiB".
    """
    recomputed = Recomputed(model, plan, budget, held)
    schedules = schedules_of(recomputed)
    schedules.is_silent = False
    if model.training and example is not None:
        schedules.program(example)
    return recomputed


class Recomputed(nn.Module):
    """A network that is another one, in all but its training pass, which follows a schedule.

    Each has its own class, whose bases are this one and the network's, and shares the network's state: parameters,
    modes, attributes, hooks. So its methods are the network's, and what is set on either is set on both. In evaluation,
    and without gradients, it runs the network's own forward.
    """

    _unet3d_schedules: ClassVar["Schedules"]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an object of a class that this one and the network's are the bases of, or a new network of that."""
        if cls is not Recomputed:
            return cls.__bases__[1](*args, **kwargs)
        model: nn.Module = args[0] if args else kwargs["model"]
        _refuse_wrapped(model)
        return object.__new__(_class_of(type(model)))

    def __init_subclass__(cls) -> None:
        """Do not call the network's own `__init_subclass__`, which may take note of each class."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan = "lean",
        budget: str | int | None = None,
        held: str | int | None = None,
        device_type: str | None = None,
    ) -> None:
        """Share the network's state. `device_type`: "cuda" for tiles of a GPU; None: of where the image is."""
        if plan not in PLANS:
            raise UserError(f"plan={plan}: choose {', '.join(PLANS)}")
        if (plan == "auto") != (budget is not None):
            raise UserError(f"plan={plan}, budget={budget}: a budget goes with plan=auto, and only with it")
        object.__setattr__(self, "__dict__", vars(model))
        type.__setattr__(
            type(self),
            SCHEDULES,
            Schedules(model, plan, _bytes("budget", budget), _bytes("held", held) or 0, device_type),
        )

    @property
    def forward(self) -> Callable[..., Any]:
        """Return the network's pass: by a schedule in training, else its own.

        Where somebody has put a function around it, as accelerate does, it is that function.
        """
        schedules = schedules_of(self)
        own = schedules.network.forward
        if "forward" in vars(self) and _calls_a_schedule(own):
            return own

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or not self.training or is_exporting():
                return own(*args, **kwargs)
            with _as_forward(schedules.network, own):
                return schedules.follow(*args, **kwargs)

        vars(forward)["follows_a_schedule"] = True
        return forward

    @forward.setter
    def forward(self, value: Callable[..., Any]) -> None:
        vars(self)["forward"] = value

    @forward.deleter
    def forward(self) -> None:
        del vars(self)["forward"]

    def __copy__(self) -> "Recomputed":
        schedules = schedules_of(self)
        return Recomputed(copy.copy(schedules.network), **schedules.options())

    def __deepcopy__(self, memo: dict[int, Any]) -> "Recomputed":
        schedules = schedules_of(self)
        other = Recomputed(copy.deepcopy(schedules.network, memo), **schedules.options())
        schedules_of(other).is_silent = schedules.is_silent
        schedules_of(other).has_announced = schedules.has_announced
        schedules_of(other).programs = dict(schedules.programs)
        schedules_of(other).prepared = schedules.prepared
        return other

    def __reduce_ex__(self, _: Any) -> Any:
        """Be saved as the network and what was asked for; schedules are found again."""
        schedules = schedules_of(self)
        return functools.partial(Recomputed, **schedules.options()), (schedules.network,)

    def _replicate_for_data_parallel(self) -> Any:
        raise UserError("recompute: DataParallel copies a network in each pass; use DistributedDataParallel")


@dataclass(eq=False)
class Schedules:
    """The schedules of a network, by images' sizes and by all that its forward pass reads."""

    network: nn.Module
    plan: Plan = "lean"
    budget: int | None = None
    held: int = 0
    device_type: str | None = None
    is_silent: bool = True  # Whether lines about schedules are left out.
    has_announced: bool = False  # Whether that about the first schedule is printed.
    programs: dict[Any, Program] = field(default_factory=dict)
    prepared: dict[Any, Program] = field(default_factory=dict)  # before a schedule is chosen; networks may share them
    code: Code | None = None

    def options(self) -> dict[str, Any]:
        """Return what was asked for."""
        names = ("plan", "budget", "held", "device_type")
        return {name: getattr(self, name) for name in names}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def follow(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the network returns for an image N C D H W, by its schedule; torch.compile leaves it alone."""
        image = self._image(args, kwargs)
        if not image.numel():
            return self.network.forward(*args, **kwargs)
        program = self.program(image)
        if not program.saves_memory:
            return self.network.forward(*args, **kwargs)
        refuse_hooks(self.network, with_root=False)
        refuse_hooks_of_saved_tensors()
        if type(image) in (Tensor, nn.Parameter) or isinstance(image, FakeTensor):
            return call_by_program(program, self.network, image)
        outputs = call_by_program(program, self.network, image.as_subclass(Tensor))
        return tree_map_only(Tensor, lambda output: _like(image, output), outputs)

    def _image(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the one argument of a call."""
        arguments = (*args, *kwargs.values())
        name = type(self.network).__name__
        remedy = "in training, give it one image N C D H W and no more"
        if len(arguments) != 1 or not isinstance(arguments[0], Tensor):
            given = [type(argument).__name__ for argument in args]
            given += [f"{keyword}={type(argument).__name__}" for keyword, argument in kwargs.items()]
            raise UserError(f"recompute: {name} was given {', '.join(given) or 'nothing'}; {remedy}")
        try:
            inspect.signature(self.network.forward).bind(*args, **kwargs)
        except TypeError as error:
            raise UserError(f"recompute: {name}.forward: {error}; {remedy}") from error
        return arguments[0]

    def program(self, image: Tensor) -> Program:
        """Return what passes over images of this size have in common.

        It is made once for each size and for all that forward reads.
        """
        if not isinstance(image, Tensor):
            raise UserError(f"recompute: the example is a {type(image).__name__}; give an image N C D H W, as a tensor")
        if not image.numel():
            size = "x".join(map(str, image.shape))
            raise UserError(f"recompute: the example, {size}, is empty; give an image of the size of those to come")
        autocast = autocast_dtype(image)
        device_type = self.device_type or image.device.type
        layout = (image.is_contiguous(), image.is_contiguous(memory_format=torch.channels_last_3d))
        kind = (type(image), image.dtype, image.device, image.requires_grad)
        about_image = (image.shape, layout, kind, autocast, device_type)
        key = self._key(about_image)
        if key not in self.programs:
            self.code = code_of(self.network)
            key = self._key(about_image)
        if key not in self.programs:
            self._say_that_it_searches(image, autocast)
            # What is set around a pass, for debugging or to save memory, is not for what is done to find a schedule.
            with saved_tensors_hooks(_same, _same), torch.autograd.set_detect_anomaly(False):
                program = self._prepared(key, image, autocast, device_type == "cpu")
            self.programs[key] = by_plan(program, self.plan, self.budget)
            if not self.is_silent and not self.has_announced and _rank() == 0:
                print(describe(self.programs[key], self.plan, self.held))
            self.has_announced = True
            for known in (self.programs, self.prepared):
                while len(known) > MOST_PROGRAMS:
                    known.pop(next(iter(known)), None)
            if len(self.programs) == MANY_PROGRAMS:
                reason = "one for each size of images and each value of what forward reads, such as a counter"
                warnings.warn(f"recompute: {MANY_PROGRAMS} schedules were found, {reason}", stacklevel=2)
        return self.programs[key]

    def _key(self, about_image: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.code is None:
            self.code = code_of(self.network)
        return (*about_image, self.code.names, snapshot(self.network, self.code))

    def _prepared(self, key: Any, image: Tensor, autocast: torch.dtype | None, on_cpu: bool) -> Program:
        """Return the program without a choice of its schedule."""
        dtype = autocast or image.dtype
        key = (key, self.held, has_larger_tiles(self.plan, dtype, on_cpu))
        program = self.prepared.get(key)
        if program is None:
            program = prepare(self.network, image, autocast, on_cpu, self.plan)
            program.fixed_bytes += self.held
            plain = plain_bytes(self.network, image, autocast, on_cpu)
            program.plain_bytes = None if plain is None else plain + self.held
            if not program.maps.graph.constants:  # Constants are tensors of this network alone.
                self.prepared[key] = program
        return program

    def _say_that_it_searches(self, image: Tensor, autocast: torch.dtype | None) -> None:
        """Print on stderr what takes some seconds now, and how to search once where only autocast is another."""
        if self.is_silent or _rank() != 0 or image.dim() != 5:
            return
        precision = str(autocast or image.dtype).removeprefix("torch.")
        line = f"recompute: finding a schedule for {'x'.join(map(str, image.shape))}, {precision}"
        sizes = [program.maps.graph.image.shape for program in self.programs.values()]
        if autocast is not None and sizes == [image.shape]:
            line += "; give the example within your autocast, so that one is found and not two"
        print(line, file=sys.stderr, flush=True)


def _calls_a_schedule(function: Any) -> bool:
    """Return whether a function is, holds or names the forward of a network that recomputes."""
    waiting = [function]
    seen = set()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if getattr(part, "follows_a_schedule", False):
            return True
        if isinstance(part, types.MethodType):
            waiting.append(part.__func__)
        elif isinstance(part, functools.partial):
            waiting += [part.func, *part.args]
        elif isinstance(part, types.FunctionType):
            waiting += [content_of(cell) for cell in part.__closure__ or ()]
            waiting += [part.__globals__[name] for name in part.__code__.co_names if name in part.__globals__]
    return False


@contextmanager
def _as_forward(network: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Set the network's forward within the context: to the one that somebody has put another function around."""
    if network.forward == forward:
        yield
        return
    present = vars(network).pop("forward", None)
    if network.forward != forward:
        vars(network)["forward"] = forward
    try:
        yield
    finally:
        vars(network).pop("forward", None)
        if present is not None:
            vars(network)["forward"] = present


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _like(image: Tensor, output: Tensor) -> Tensor:
    """Return an output as an object of the image's class, such as MONAI's MetaTensor, with its attributes."""
    output = output.as_subclass(type(image))
    vars(output).update({name: copy.copy(value) for name, value in vars(image).items()})
    return output


def _class_of(kind: type[nn.Module]) -> type[Recomputed]:
    """Return a class for one network that recomputes; what is set on it is set on the network's class."""
    meta: Any = type(kind)

    class OfNetwork(meta):  # type: ignore[misc]
        def __setattr__(cls, name: str, value: Any) -> None:
            owner = cls if name.startswith("_abc_") or name == "__abstractmethods__" else kind
            meta.__setattr__(owner, name, value)

        def __delattr__(cls, name: str) -> None:
            meta.__delattr__(kind, name)

    members = {name: vars(kind)[name] for name in ("__module__", "__qualname__", "__doc__") if name in vars(kind)}
    own = types.new_class(
        kind.__name__, (Recomputed, kind), {"metaclass": OfNetwork}, lambda body: body.update(members)
    )
    return cast("type[Recomputed]", own)


def schedules_of(recomputed: nn.Module) -> Schedules:
    """Return the schedules of a network that recomputes."""
    assert isinstance(recomputed, Recomputed)
    return type(recomputed)._unet3d_schedules


def _refuse_wrapped(model: nn.Module) -> None:
    """Raise UserError for what is no network, or no plain one any more."""
    if not isinstance(model, nn.Module):
        raise UserError(f"recompute: a {type(model).__name__} is no network; give it a torch.nn.Module")
    if isinstance(model, Recomputed):
        raise UserError("recompute: the network recomputes already; give recompute the network itself")
    if isinstance(model, DataParallel | DistributedDataParallel):
        name = type(model).__name__
        raise UserError(f"recompute: the network is in {name} already; give recompute the network before {name}")
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        name = type(model).__name__
        raise UserError(f"recompute: {name}'s lazy layers have no weights yet; call it once with an image before")
    if isinstance(model, torch.jit.ScriptModule):
        raise UserError("recompute: the network is compiled by torch.jit; give recompute the network before that")
    if any(vars(kind).get("__slots__") for kind in type(model).__mro__):
        raise UserError(f"recompute: {type(model).__name__} keeps attributes in __slots__; leave __slots__ out")
    if "_orig_mod" in model._modules:
        raise UserError("recompute: the network is compiled already; give recompute the network before torch.compile")


def _bytes(name: str, size: str | int | None) -> int | None:
    """Return bytes that were given as a number or a text."""
    if not isinstance(size, str | int | None):
        raise UserError(f"{name}={size}: give bytes, or a text such as 6GiB")
    return budget_bytes(size) if isinstance(size, str) else size


def _rank() -> int:
    """Return this process's number among those that train together."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
