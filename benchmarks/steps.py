"""Steps of a network, plain or as `unet3d.recompute` trains it, and what they take: bytes of tensors, seconds."""

import ctypes
import gc
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from networks import Task
from torch import nn

import unet3d
from unet3d.base.types import Batch
from unet3d.memory.meter import MEASURED_STEPS, open_meter
from unet3d.recomputing.module import Recomputed
from unet3d.training.losses import CUDA_CHUNK, LossOptions, SegmentationLoss, dice_ce
from unet3d.training.policy import MemoryPolicy
from unet3d.training.step import Mark, ignore_mark, train_step

LOADED = ["torch", "torch._dynamo", "sympy", "unet3d.build", "monai.networks.nets"]
LOADED += ["dynamic_network_architectures.architectures.unet", "pytorch3dunet.unet3d.model", "steps"]


class Steps:
    """A network's training steps on one batch, all with the same loss and optimizer."""

    def __init__(self, network: nn.Module, policy: MemoryPolicy, task: Task) -> None:
        chunk = CUDA_CHUNK if task.device == "cuda" else None
        self.network = network
        self.policy = policy
        self.optimizer = torch.optim.SGD(network.parameters(), 1e-2, momentum=0.99, nesterov=True)
        for parameter in network.parameters():  # momentum of the first step: so the first step's peak is any other's
            self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self.loss = SegmentationLoss(dice_ce, LossOptions(chunk=chunk))
        self.scaler = policy.scaler()
        self.batch = random_batch(task)
        self.losses: list[float] = []

    def step(self, mark: Mark = ignore_mark) -> None:
        """Take a step; it ends when the device has finished, since the loss is read."""
        result = train_step(
            self.network,
            self.loss,
            self.optimizer,
            self.scaler,
            self.policy,
            [self.batch],
            mark,
            clip=12.0,
        )
        self.losses.append(result.loss)

    def peak_bytes(self) -> int:
        """Return the peak of tensors: by the ledger in one step; on CUDA by the allocator, in a step after others."""
        meter = open_meter(self.network, self.optimizer)
        on_gpu = meter.device.type == "cuda"
        for _ in range(MEASURED_STEPS + 1 if on_gpu else 1):
            self.step(meter.mark)
        peak: int = meter.summary()["peak_bytes"]
        return peak

    def seconds(self, count: int, clock: Callable[[], float] = time.perf_counter) -> list[float]:
        """Return how long each of several steps takes."""
        durations = []
        for _ in range(count):
            started = clock()
            self.step()
            durations.append(clock() - started)
        return durations

    def momentum_bytes(self) -> int:
        """Return the bytes of the optimizer's state."""
        return sum(parameter.nbytes for parameter in self.network.parameters())


def random_batch(task: Task) -> Batch:
    """Return an image N 1 D H W and labels N D H W."""
    image = torch.randn(task.batch, 1, *task.patch)
    label = torch.randint(0, task.classes, (task.batch, *task.patch))
    return Batch(image, label.short())


def recomputed(
    network: nn.Module,
    plan: Any,
    policy: MemoryPolicy,
    task: Task,
    budget: str | None = None,
    held: str | None = None,
) -> Recomputed:
    """Return `unet3d.recompute` of a network for the task's images; its line goes to stderr."""
    example = torch.empty(task.batch, 1, *task.patch, device=task.device)
    with redirect_stdout(sys.stderr), torch.autocast(task.device, policy.dtype, enabled=policy.dtype is not None):
        return unet3d.recompute(network.train(), example, plan, budget, held)


def resident_bytes(name: str = "VmRSS") -> int:
    """Return the bytes of memory that this process has, or with "VmHWM" at most had."""
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 2**10


def forget_resident_peak() -> None:
    """Give back what is free, and let VmHWM begin again."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


class RowError(Exception):
    """A row could not be measured; says why in a line."""


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return a function's result in a process of its own, forked from one that has only imported the libraries.

    Raises RowError.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(_with_plain_errors, function, arguments).result()
        except BrokenProcessPool as error:
            raise RowError("the process was killed") from error


def _with_plain_errors(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Return a function's result. Raises RowError for any error: those of libraries may not travel to a parent."""
    try:
        return function(*arguments)
    except Exception as error:
        traceback.print_exc()
        lines = str(error).splitlines() or [""]
        raise RowError(f"{type(error).__name__}: {lines[0]}") from None
