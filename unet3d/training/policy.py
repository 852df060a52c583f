"""Mixed precision, activation checkpointing and recomputation by a program, applied to a step from outside the model.

Checkpointing changes no bit of loss, gradients, buffers or evaluation output, of stages that compute from their input,
weights, buffers, attributes and global random numbers; other stages are refused where `stage_state` or `recomputation`
sees it. A program changes only the rounding.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint_sequential, set_checkpoint_early_stop

from unet3d.model import half_precision
from unet3d.recomputing.function import call_by_program
from unet3d.recomputing.program import Program
from unet3d.recomputing.refusals import refuse_hooks
from unet3d.training import recomputation
from unet3d.training.recomputation import FirstCall, SecondCall
from unet3d.training.stage_state import (
    RandomNumbers,
    StageState,
    refuse_changed_input,
    refuse_own_call,
    rewound,
    tensor_versions,
)


@dataclass(frozen=True)
class MemoryPolicy:
    """Settings by which a step saves memory.

    With `segment_starts`, the model must be an nn.Sequential; with a `program`, the network that it was prepared for.
    """

    device_type: str = "cpu"
    dtype: torch.dtype | None = None  # of mixed precision; None: float32
    segment_starts: tuple[int, ...] = ()  # the first stage of each checkpointed segment; (): no checkpointing
    program: Program | None = None  # that training passes follow
    window_program: Program | None = None  # that passes without gradients follow, over images of its size
    channels_last: bool = False  # weights and maps in torch.channels_last_3d

    def formatted(self, model: nn.Module) -> nn.Module:
        """Return the model, its convolutions' weights in the policy's memory format; other parameters have none."""
        if self.channels_last:
            for parameter in model.parameters():
                if parameter.dim() == 5:
                    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last_3d)
        return model

    def cpu_half_precision(self) -> AbstractContextManager[None]:
        """Return the context for forward and backward passes in which half precision is quick and right on any CPU."""
        if self.dtype is None or self.device_type != "cpu":
            return nullcontext()
        return half_precision.convolutions()

    def forward(self, model: nn.Module, image: Tensor) -> Any:
        """Return the model's output for an image N C D H W; with gradients on, backward recomputes what is not kept."""
        if self.channels_last:
            image = image.contiguous(memory_format=torch.channels_last_3d)
        autocast = torch.autocast(self.device_type, self.dtype, enabled=self.dtype is not None)
        with autocast, self.cpu_half_precision():
            if not torch.is_grad_enabled():
                if self.window_program is not None and self.window_program.serves(image):
                    return call_by_program(self.window_program, model, image)
                return model(image)
            if self.program is not None:
                refuse_hooks(model)
                return call_by_program(self.program, model, image)
            if self.segment_starts:
                return self._checkpointed(model, image)
            return model(image)

    def _checkpointed(self, model: nn.Module, image: Tensor) -> Any:
        """Return the model's output, and keep for backward only what its segments begin with."""
        refuse_own_call(model)
        assert isinstance(model, nn.Sequential)
        segments = split(list(model), self.segment_starts, recomputation.is_compared(model, image))
        # A recomputation ends once all that backward needs is saved; RReLU's noise is filled after that.
        may_end_early = not any(isinstance(module, nn.RReLU) for module in model.modules())
        with set_checkpoint_early_stop(may_end_early):
            return checkpoint_sequential(segments, len(segments), image, use_reentrant=False)

    def scaler(self) -> torch.amp.GradScaler:
        """Return the loss scaling, which only fp16 needs: bf16 has the exponents of fp32."""
        return torch.amp.GradScaler(self.device_type, enabled=self.dtype is torch.float16)


class Segment:
    """Consecutive stages of one forward pass, called in it and a second time in backward, unless `is_last`.

    The second call begins with the state from before the first, which has updated running statistics, for one. With
    `is_compared`, the second call must compute what the first one did.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        is_last: bool,
        is_compared: bool = False,
    ) -> None:
        self.stages = stages
        self.is_last = is_last
        self.states: list[StageState] = []  # of the stages, before their first call
        self.first_calls = [FirstCall(stage) if is_compared else None for stage in stages]
        self.random_numbers: RandomNumbers | None = None  # before the first call

    def __call__(self, state: Any) -> Any:
        if self.random_numbers is not None:
            return self._recompute(state, self.random_numbers)
        if self.is_last:
            for stage in self.stages:
                state = stage(state)
            return state
        self.random_numbers = RandomNumbers()
        inputs = tensor_versions(state)
        for stage, first_call in zip(self.stages, self.first_calls, strict=True):
            before = StageState(stage)
            self.states.append(before)
            with first_call or nullcontext():
                state = stage(state)
            before.refuse_changes_within()
            if any(tensor._version != version for tensor, version in inputs):
                refuse_changed_input(stage)
        return state

    def _recompute(self, state: Any, random_numbers: RandomNumbers) -> Any:
        """Return what the first call returned for the same input."""
        with rewound(random_numbers):
            for stage, before, first_call in zip(self.stages, self.states, self.first_calls, strict=True):
                comparison = nullcontext() if first_call is None else SecondCall(first_call)
                with before.restored() as buffers, comparison:
                    state = functional_call(stage, buffers, (state,)) if buffers else stage(state)
        return state


def split(
    stages: Sequence[nn.Module],
    segment_starts: Sequence[int],
    is_compared: bool = False,
) -> list[Segment]:
    """Return segments that begin with these stages, the first with stage 0.

    checkpoint_sequential keeps the last one's maps in memory.
    """
    assert segment_starts[0] == 0 and sorted(set(segment_starts)) == list(segment_starts)
    segments = []
    for start, end in pairwise([*segment_starts, len(stages)]):
        is_last = end == len(stages)
        segments.append(Segment(stages[start:end], is_last, is_compared and not is_last))
    return segments


def amp_dtype(name: str, device_type: str) -> torch.dtype:
    """Return the dtype of `amp_dtype=`; auto is bf16, or fp16 on CUDA devices that only emulate bf16."""
    if name == "auto":
        # Without CUDA, the config is for a device elsewhere, which is taken to have bf16.
        is_present = device_type == "cuda" and torch.cuda.is_available()
        emulates = is_present and not torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.float16 if emulates else torch.bfloat16
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
