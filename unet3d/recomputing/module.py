"""`unet3d.recompute`: any network, trained by a schedule of its own."""

import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unet3d.base.errors import UserError
from unet3d.base.types import budget_bytes, mib
from unet3d.recomputing.function import autocast_dtype, call_by_program
from unet3d.recomputing.prepare import PLANS, by_plan, prepare, work_line
from unet3d.recomputing.program import Program

Plan = Literal["lean", "tiles", "auto"]


def recompute(
    model: nn.Module,
    example: Tensor,
    plan: Plan = "lean",
    budget: str | None = None,
    held: str | None = None,
) -> "Recomputed":
    """Return a network that trains as `model` does, with the same parameters, in less memory.

    `example` is an image N C D H W as the network will get it; the schedule is found for its size, and for each other
    size when the first such image comes. `plan`: "lean" makes sums and small convolutions again, "tiles" all that saves
    memory, "auto" takes the least work with which weights, gradients, maps and what is `held` beside them (the
    optimizer's state, say) fit into the `budget`, as "6GiB". Prints a line that says what to expect.
    """
    recomputed = Recomputed(model, plan, budget, held)
    if model.training:
        print(recomputed.describe(recomputed.program(example)))
    return recomputed


class Recomputed(nn.Module):
    """A network with the parameters, buffers and names of another, whose training pass follows a schedule.

    In evaluation, and without gradients, it is the network itself.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan = "lean",
        budget: str | None = None,
        held: str | None = None,
        device_type: str | None = None,
    ) -> None:
        """Keep the network. `device_type`: with "cuda", tiles are those of a GPU; None: of where the image is."""
        super().__init__()
        if plan not in PLANS:
            raise UserError(f"plan={plan}: choose {', '.join(PLANS)}")
        if (plan == "auto") != (budget is not None):
            raise UserError(f"plan={plan}, budget={budget}: a budget goes with plan=auto, and only with it")
        self._modules = model._modules
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._network = [model]  # not a child: names stay those of the model
        self.training = model.training
        self.plan = plan
        self.budget = None if budget is None else budget_bytes(budget)
        self.held = 0 if held is None else budget_bytes(held)
        self.device_type = device_type
        self.programs: dict[Any, Program] = {}

    @property
    def network(self) -> nn.Module:
        """The network itself."""
        return self._network[0]

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
        other.programs = dict(self.programs)
        return other

    def forward(self, image: Tensor) -> Any:
        """Return what the network returns for an image N C D H W."""
        if not torch.is_grad_enabled() or not self.training:
            return self.network(image)
        return call_by_program(self.program(image), self.network, image)

    def program(self, image: Tensor) -> Program:
        """Return what passes over images of this size have in common; it is made once for each size and mode."""
        autocast = autocast_dtype(image)
        modes = tuple(module.training for module in self.network.modules())
        trained = tuple(parameter.requires_grad for parameter in self.network.parameters())
        key = (image.shape, image.requires_grad, autocast, image.dtype, image.device, modes, trained)
        if key not in self.programs:
            on_cpu = (self.device_type or image.device.type) == "cpu"
            program = prepare(self.network, image, autocast, on_cpu, self.plan)
            program.fixed_bytes += self.held
            self.programs[key] = by_plan(program, self.plan, self.budget)
        return self.programs[key]

    def describe(self, program: Program) -> str:
        """Return a line: the predicted peak, the extra work, and what stays whole."""
        peak = f"predicted peak {mib(program.peak_bytes)} MiB of tensors (weights, gradients, maps)"
        return f"recompute={self.plan}: {peak}, {work_line(program)}"
