"""Mixed precision, activation checkpointing and recomputation by a program, applied to a step from outside the model.

Checkpointing changes no bit of loss, gradients, buffers or evaluation output, of stages that compute from their input,
weights, buffers, attributes and global random numbers; other stages are refused where `checkpointing` sees it. A
program changes only the rounding. `refuse_odd_logits` checks what a user's own network returns.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unet3d.base.errors import UserError
from unet3d.model import half_precision
from unet3d.recomputing.program import PLAIN, Technique
from unet3d.recomputing.run import call_by_program
from unet3d.recomputing.trace import refuse_hooks
from unet3d.training.checkpointing import checkpointed


@dataclass(frozen=True)
class MemoryPolicy:
    """Settings by which a step saves memory.

    A model in checkpointed segments must be an nn.Sequential; with a program, the network that it was prepared for.
    """

    device_type: str = "cpu"
    dtype: torch.dtype | None = None  # Type of mixed precision; None: float32.
    technique: Technique = PLAIN
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
        segment_starts, program, window_program, _ = self.technique
        autocast = torch.autocast(self.device_type, self.dtype, enabled=self.dtype is not None)
        with autocast, self.cpu_half_precision():
            if not torch.is_grad_enabled():
                if window_program is not None and window_program.serves(image):
                    return call_by_program(window_program, model, image)
                return model(image)
            if program is not None:
                refuse_hooks(model)
                return call_by_program(program, model, image)
            if segment_starts:
                return checkpointed(model, image, segment_starts)
            return model(image)

    def scaler(self) -> torch.amp.GradScaler:
        """Return the loss scaling, which only fp16 needs: bf16 has the exponents of fp32."""
        return torch.amp.GradScaler(self.device_type, enabled=self.dtype is torch.float16)


def amp_dtype(name: str, device_type: str) -> torch.dtype:
    """Return the dtype of `amp_dtype=`; auto is bf16, or fp16 on CUDA devices that only emulate bf16."""
    if name == "auto":
        # Without CUDA, the config is for a device elsewhere, which is taken to have bf16.
        is_present = device_type == "cuda" and torch.cuda.is_available()
        emulates = is_present and not torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.float16 if emulates else torch.bfloat16
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[name]


def refuse_odd_logits(
    output: object,
    path: str,
    classes: int,
    sizes: Sequence[int],
    may_be_several: bool = False,
) -> None:
    """Raise UserError unless the network at `path` returned logits for images of `sizes`, N D H W.

    `may_be_several`: a tuple of logits, for deep supervision, of which the first are of the images' size.
    """
    scales: tuple[Any, ...] = (output,)
    if may_be_several and isinstance(output, tuple) and output:
        scales = output
    batch, *size = sizes
    expected = (batch, classes, *size)
    for number, logits in enumerate(scales, start=1):
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        is_coarser = number > 1 and len(shape) == 5 and shape[:2] == expected[:2]
        if shape != expected and not is_coarser:
            which = "" if len(scales) == 1 else f" as number {number}"
            advice = f"return logits N K D H W of the image's size, here {expected}"
            raise UserError(f"model.path={path}: returns{which} {shape}; {advice}")
        if not logits.is_floating_point():
            raise UserError(f"model.path={path}: returns {logits.dtype}; return logits, floating-point numbers")
        if may_be_several and torch.is_grad_enabled() and not logits.requires_grad:
            fault = "returns logits without a gradient: they are detached, or none of its parameters requires one"
            raise UserError(f"model.path={path}: {fault}")
