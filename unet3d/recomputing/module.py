"""`unet3d.recompute`: any network, trained by a schedule of its own."""

import copy
import warnings
from types import BuiltinFunctionType, FunctionType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unet3d.base.errors import UserError
from unet3d.base.types import budget_bytes, mib
from unet3d.recomputing.function import autocast_dtype, call_by_program
from unet3d.recomputing.prepare import PLANS, by_plan, has_larger_tiles, prepare, work_line
from unet3d.recomputing.program import Program

Plan = Literal["lean", "tiles", "auto"]
MANY_PROGRAMS = 20  # of one network; to find a schedule takes seconds
# Types of attributes that forward may depend on.
SETTINGS = (bool, int, float, str, type(None), FunctionType, BuiltinFunctionType)


def recompute(
    model: nn.Module,
    example: Tensor | None = None,
    plan: Plan = "lean",
    budget: str | None = None,
    held: str | int | None = None,
) -> "Recomputed":
    """Return a network that trains as `model` does, with the same parameters, in less memory.

    `example` is an image N C D H W as the network will get it; the schedule is found for its size. For each other size,
    and without an example, it is found when the first such image comes. Prints a line that says what to expect, once
    the first schedule is found. Raises UserError.

    `plan`: "lean" makes sums and small convolutions again, "tiles" most maps, in at most 2.2 forward passes where the
    search finds such a schedule, and "auto" as few as fit: weights, gradients, maps and what is `held` beside them (the
    optimizer's state, say, in bytes or as "600MiB") then keep the `budget`, as "6GiB".
    """
    recomputed = Recomputed(model, plan, budget, held)
    recomputed.is_silent = False
    if model.training and example is not None:
        recomputed.program(example)
    return recomputed


class Recomputed(nn.Module):
    """A network with the parameters, buffers and names of another, whose training pass follows a schedule.

    In evaluation, and without gradients, it is the network itself, whose attributes are read and set through it.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan = "lean",
        budget: str | None = None,
        held: str | int | None = None,
        device_type: str | None = None,
    ) -> None:
        """Keep the network. `device_type`: with "cuda", tiles are those of a GPU; None: of where the image is."""
        super().__init__()
        if plan not in PLANS:
            raise UserError(f"plan={plan}: choose {', '.join(PLANS)}")
        if (plan == "auto") != (budget is not None):
            raise UserError(f"plan={plan}, budget={budget}: a budget goes with plan=auto, and only with it")
        if "_orig_mod" in model._modules:  # of a compiled module
            raise UserError(
                "recompute: the network is compiled already; give recompute the network before torch.compile"
            )
        self._modules = model._modules
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._network = [model]  # not a child: names stay those of the model
        self.training = model.training
        self.plan = plan
        self.budget = None if budget is None else budget_bytes(budget)
        self.held = budget_bytes(held) if isinstance(held, str) else held or 0
        self.device_type = device_type
        self.is_silent = True  # or to print what to expect of the first schedule
        self.programs: dict[Any, Program] = {}
        self.prepared: dict[Any, Program] = {}  # without a schedule; networks of equal layers may share it

    @property
    def network(self) -> nn.Module:
        """The network itself."""
        return self._network[0]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the network that this object does not have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_network" not in vars(self):
                raise
            return getattr(self.network, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, of the network where it is the network's, such as whether deep supervision is on."""
        is_of_network = "_network" in vars(self) and name in vars(self.network) and name not in vars(self)
        if is_of_network:
            setattr(self.network, name, value)
        else:
            super().__setattr__(name, value)

    def train(self, mode: bool = True) -> "Recomputed":
        """Set the mode, of the network too."""
        super().train(mode)
        self.network.training = mode
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Recomputed":
        other = Recomputed(copy.deepcopy(self.network, memo), "lean")
        other.plan = self.plan
        other.budget = self.budget
        other.held = self.held
        other.device_type = self.device_type
        other.is_silent = self.is_silent
        other.programs = dict(self.programs)
        other.prepared = self.prepared
        return other

    def forward(self, image: Tensor) -> Any:
        """Return what the network returns for an image N C D H W."""
        if self.network.training != self.training:  # set by name, as Lightning does after a validation
            self.network.training = self.training
        if not torch.is_grad_enabled() or not self.training:
            return self.network(image)
        return self._follow_schedule(image)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _follow_schedule(self, image: Tensor) -> Any:
        """Return the same by the schedule; torch.compile leaves it as it is."""
        return call_by_program(self.program(image), self.network, image)

    def program(self, image: Tensor) -> Program:
        """Return what passes over images of this size have in common; it is made once for each size and setting."""
        autocast = autocast_dtype(image)
        settings = _settings(self.network)
        trained = tuple(parameter.requires_grad for parameter in self.network.parameters())
        device_type = self.device_type or image.device.type
        key = (image.shape, image.requires_grad, autocast, image.dtype, image.device, device_type, settings, trained)
        if key not in self.programs:
            program = self._prepared(key, image, autocast, device_type == "cpu")
            self.programs[key] = by_plan(program, self.plan, self.budget)
            self._announce(self.programs[key])
            if len(self.programs) == MANY_PROGRAMS:
                reason = (
                    "one for each size of images and each value of a plain attribute of a module, such as a counter"
                )
                warnings.warn(f"recompute: {MANY_PROGRAMS} schedules were found, {reason}", stacklevel=2)
        return self.programs[key]

    def _prepared(self, key: Any, image: Tensor, autocast: torch.dtype | None, on_cpu: bool) -> Program:
        """Return the program without a choice of its schedule."""
        dtype = autocast or image.dtype
        key = (key, self.held, has_larger_tiles(self.plan, dtype, on_cpu))
        program = self.prepared.get(key)
        if program is None:
            program = prepare(self.network, image, autocast, on_cpu, self.plan)
            program.fixed_bytes += self.held
            if not program.maps.graph.constants:  # which are this network's own tensors
                self.prepared[key] = program
        return program

    def describe(self, program: Program) -> str:
        """Return a line: the predicted peak, the extra work, and what stays whole."""
        kinds = "of tensors (weights, gradients, maps)"
        if not program.on_cpu:
            kinds = "(weights, gradients, maps, and workspaces of cuDNN)"
        peak = f"predicted peak {mib(program.peak_bytes)} MiB {kinds}"
        return f"recompute={self.plan}: {peak}, {work_line(program)}"

    def _announce(self, program: Program) -> None:
        """Print what to expect, once, and of several ranks the first."""
        if not self.is_silent and _rank() == 0:
            print(self.describe(program))
        self.is_silent = True


def _rank() -> int:
    """Return this process's number among those that train together."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _settings(network: nn.Module) -> tuple[Any, ...]:
    """Return types, modes, rates of dropout and other plain attributes of all modules: forward may depend on them."""
    settings: list[Any] = []
    for module in network.modules():
        settings.append(type(module))
        settings += [item for item in vars(module).items() if isinstance(item[1], SETTINGS)]
    return tuple(settings)
