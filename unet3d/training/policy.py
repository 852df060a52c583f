"""Mixed precision, activation checkpointing and slabs, applied to a step from outside the model.

Checkpointing changes no bit of loss, gradients, buffers or evaluation output, of stages that compute from their input,
weights, buffers, attributes and global random numbers; other stages are refused where `kept_state` or `recomputation`
sees it. Slabs change the rounding alone.
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

from unet3d.training import half_precision, recomputation, slab_run
from unet3d.training.kept_state import (
    KeptState,
    RandomNumbers,
    drawn_again,
    refuse_changed_input,
    refuse_own_call,
    versions,
)
from unet3d.training.recomputation import FirstCall, SecondCall
from unet3d.training.slab_run import SlabOptions


@dataclass(frozen=True)
class MemoryPolicy:
    """How a step saves memory. With `segment_starts`, the model must be an nn.Sequential; with `slabs`, a UNet3D."""

    device_type: str = "cpu"
    dtype: torch.dtype | None = None  # of mixed precision; None: float32
    segment_starts: tuple[int, ...] = ()  # the first stage of each checkpointed segment; (): no checkpointing
    slabs: SlabOptions | None = None
    channels_last: bool = False  # weights and maps in torch.channels_last_3d

    def formatted(self, model: nn.Module) -> nn.Module:
        """Return the model, its convolutions' weights in the policy's memory format; other parameters have none."""
        if self.channels_last:
            for parameter in model.parameters():
                if parameter.dim() == 5:
                    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last_3d)
        return model

    def convolutions(self) -> AbstractContextManager[None]:
        """The context for forward and backward passes: half precision that is quick and right on any CPU."""
        return half_precision.convolutions() if self.dtype and self.device_type == "cpu" else nullcontext()

    def forward(self, model: nn.Module, image: Tensor) -> Any:
        """The model's output for an image N C D H W; with gradients on, backward recomputes the segments.

        Without gradients a GPU runs no slabs: a pass keeps nothing, and they would be ten times its launches.
        """
        if self.channels_last:
            image = image.contiguous(memory_format=torch.channels_last_3d)
        if self.slabs is not None and (torch.is_grad_enabled() or self.slabs.on_cpu):
            with self.convolutions():
                return slab_run.forward(model, image, self.slabs, self.dtype)
        with torch.autocast(self.device_type, self.dtype, enabled=self.dtype is not None), self.convolutions():
            if not self.segment_starts or not torch.is_grad_enabled():
                return model(image)
            refuse_own_call(model)
            assert isinstance(model, nn.Sequential)
            segments = split(list(model), self.segment_starts, recomputation.is_compared(model, image))
            # A recomputation ends once all that backward needs is saved; RReLU's noise is filled after that.
            with set_checkpoint_early_stop(not any(isinstance(module, nn.RReLU) for module in model.modules())):
                return checkpoint_sequential(segments, len(segments), image, use_reentrant=False)

    def scaler(self) -> torch.amp.GradScaler:
        """Loss scaling, which only fp16 needs: bf16 has the exponents of fp32."""
        return torch.amp.GradScaler(self.device_type, enabled=self.dtype is torch.float16)


class Segment:
    """Consecutive stages, called once in forward and once more in backward; each forward pass makes a new one.

    The second call begins with what the stages kept before the first: that has updated running statistics, for one.
    With `is_last`, there is no second call. With `is_compared`, what both compute is.
    """

    def __init__(self, stages: Sequence[nn.Module], is_last: bool, is_compared: bool = False) -> None:
        self.stages, self.is_last, self.kept = stages, is_last, list[KeptState]()
        self.first_calls = [FirstCall(stage) if is_compared else None for stage in stages]
        self.random_numbers: RandomNumbers | None = None

    def __call__(self, state: Any) -> Any:
        if self.random_numbers is not None:
            return self._again(state, self.random_numbers)
        if self.is_last:
            for stage in self.stages:
                state = stage(state)
            return state
        self.random_numbers = RandomNumbers()
        before = versions(state)
        for stage, first in zip(self.stages, self.first_calls, strict=True):
            self.kept.append(KeptState(stage))
            with first or nullcontext():
                state = stage(state)
            self.kept[-1].refuse_changes_within()
            if any(tensor._version != version for tensor, version in before):
                refuse_changed_input(stage)
        return state

    def _again(self, state: Any, before: RandomNumbers) -> Any:
        with drawn_again(before):
            for stage, kept, first in zip(self.stages, self.kept, self.first_calls, strict=True):
                compared = nullcontext() if first is None else SecondCall(first)
                with kept.put_back() as buffers, compared:
                    state = functional_call(stage, buffers, (state,)) if buffers else stage(state)
        return state


def split(stages: Sequence[nn.Module], segment_starts: Sequence[int], is_compared: bool = False) -> list[Segment]:
    """Segments that begin with these stages, the first with stage 0; checkpoint_sequential keeps the last in memory."""
    assert segment_starts[0] == 0 and sorted(set(segment_starts)) == list(segment_starts)
    spans = list(pairwise([*segment_starts, len(stages)]))
    return [Segment(stages[start:end], end == len(stages), is_compared) for start, end in spans]


def amp_dtype(name: str, device_type: str) -> torch.dtype:
    """The dtype of `amp_dtype=`; auto is bf16, or fp16 on CUDA devices that only emulate bf16."""
    if name == "auto":
        # Without CUDA, the config is of a device elsewhere, which is taken to have bf16.
        is_present = device_type == "cuda" and torch.cuda.is_available()
        emulates = is_present and not torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.float16 if emulates else torch.bfloat16
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
