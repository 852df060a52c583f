"""What is done to a step's memory from outside the model: mixed precision and activation checkpointing.

Checkpointing changes no bit of loss, gradients, buffers or evaluation output; the model knows nothing of either.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint_sequential

from unet3d.train import half_precision


@dataclass(frozen=True)
class MemoryPolicy:
    """`dtype` None: no mixed precision. `starts` (): no checkpointing, else the first stage of each segment."""

    device_type: str = "cpu"
    dtype: torch.dtype | None = None
    starts: tuple[int, ...] = ()

    def autocast(self) -> AbstractContextManager[None]:
        """The context for forward passes."""
        return torch.autocast(self.device_type, self.dtype) if self.dtype else nullcontext()

    def convolutions(self) -> AbstractContextManager[None]:
        """The context for forward and backward passes: half precision that is quick and right on any CPU."""
        return half_precision.convolutions() if self.dtype and self.device_type == "cpu" else nullcontext()

    def forward(self, model: nn.Module, image: Tensor) -> Any:
        """The model's output for an image N C D H W; with gradients on, segments are recomputed in backward."""
        with self.autocast(), self.convolutions():
            if not self.starts or not torch.is_grad_enabled():
                return model(image)
            segments = split(list(model.children()), self.starts)
            return checkpoint_sequential(segments, len(segments), image, use_reentrant=False)

    def scaler(self) -> torch.amp.GradScaler:
        """Loss scaling, a no-op but for fp16: bf16 has the exponents of fp32."""
        return torch.amp.GradScaler(self.device_type, enabled=self.dtype is torch.float16)


class Segment:
    """A run of stages, called once in forward and once more in backward; made anew for every forward pass.

    The second call leaves running statistics alone: they have seen this batch already.
    """

    def __init__(self, stages: list[nn.Module]) -> None:
        self.stages = stages
        self.has_run = False

    def __call__(self, state: Any) -> Any:
        context = kept_statistics(self.stages) if self.has_run else nullcontext()
        self.has_run = True
        with context:
            for stage in self.stages:
                state = stage(state)
        return state


def split(stages: list[nn.Module], starts: tuple[int, ...]) -> list[Segment]:
    """Segments that begin with these stages, the first with stage 0; checkpoint_sequential keeps the last in memory."""
    assert starts[0] == 0 and sorted(set(starts)) == list(starts)
    return [Segment(stages[a:b]) for a, b in zip(starts, [*starts[1:], len(stages)], strict=True)]


@contextmanager
def kept_statistics(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Batch norms inside work on copies of their running statistics.

    Copies, not None: autograd saves the statistics too, and recomputation must save as many tensors as the first pass.
    """
    norms = [m for module in modules for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    kept = [dict(m.named_buffers(recurse=False)) for m in norms]
    for norm, buffers in zip(norms, kept, strict=True):
        for name, value in buffers.items():
            setattr(norm, name, value.clone())
    try:
        yield
    finally:
        for norm, buffers in zip(norms, kept, strict=True):
            for name, value in buffers.items():
                setattr(norm, name, value)


def amp_dtype(name: str, device_type: str) -> torch.dtype:
    """The dtype of `amp_dtype=`; auto is bf16, or fp16 on CUDA devices that only emulate bf16."""
    if name == "auto":
        here = device_type == "cuda" and torch.cuda.is_available()  # elsewhere a dry run is for a card that does bf16
        emulated = here and not torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.float16 if emulated else torch.bfloat16
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
