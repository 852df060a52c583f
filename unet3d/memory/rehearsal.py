"""The peak of a run before it: its own build and its own step, on tensors without data.

Error class: exact against the ledger of the real run on the CPU, to the byte. What kernels take within one operation is
in neither.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from unet3d import build
from unet3d.config import Config, Model
from unet3d.memory.cuda import cuda_policy
from unet3d.memory.dry import dry
from unet3d.memory.ledger import Ledger
from unet3d.memory.meter import STEADY, LedgerMeter
from unet3d.progress import parts
from unet3d.step import Batch, train_step

Starts = tuple[int, ...]
Watch = Callable[[nn.Sequential, Ledger], None]


def rehearse(
    config: Config,
    options: Model,
    starts: Starts,
    dtype: torch.dtype = torch.float32,
    watch: Watch | None = None,
    steps: int = STEADY,
) -> LedgerMeter:
    """The run's own build and step on tensors without data; the meter holds the ledger.

    `options` are concrete: channels, classes, kernels and strides set. `starts` are the first stages of
    checkpointed segments, () for none; `dtype` is that of weights and images. `watch` may hang hooks on the model.
    For `device=cuda` as CUDA would do it, also where there is none.
    """
    assert options.in_channels is not None and options.classes is not None
    random_state, on_gpu = torch.get_rng_state(), build.target(config) == "cuda"
    with rehearsing(config):
        model = dry_model(config, options, dtype)
        loss, policy = build.loss(config, options.classes), build.policy(config, "cpu", starts)
        optimizer = build.optimizer(config.optim, model, foreach=True if on_gpu else None)
        scaler, meter = policy.scaler(), LedgerMeter(model, optimizer)
        if watch is not None:
            watch(model, meter.ledger)
        for _ in parts(range(steps)):
            made = [dry_batch(config, options, dtype) for _ in range(config.accumulate)]
            batches: list[Any] = [Arriving(made.pop(0)) for _ in range(len(made))] if on_gpu else made
            train_step(model, loss, optimizer, scaler, policy, batches, meter.mark, config.optim.clip)
    torch.set_rng_state(random_state)
    return meter


def step_of(config: Config) -> Config:
    """A key for equal steps: the config without what a simulated step takes as arguments or does not read."""
    return replace(config, model=Model(), ckpt=0, budget=None, device=build.target(config))


class Arriving:
    """A micro-batch on its way to a GPU: nothing there holds it but the step."""

    def __init__(self, batch: Batch) -> None:
        self._parts = batch._asdict()

    def __getattr__(self, name: str) -> Any:
        return self._parts.pop(name)


@contextmanager
def rehearsing(config: Config) -> Iterator[None]:
    """Tensors without data, and mixed precision as the config's device does it."""
    with dry(), cuda_policy() if build.target(config) == "cuda" else nullcontext():
        yield


def dry_model(config: Config, options: Model, dtype: torch.dtype) -> nn.Sequential:
    """The network with weights of a type. To be called within `rehearsing`."""
    torch.set_default_dtype(dtype)  # tensors without data cannot be converted in place, as `Module.to` does
    try:
        return build.model(options, config.seed)
    finally:
        torch.set_default_dtype(torch.float32)


def dry_batch(config: Config, options: Model, dtype: torch.dtype) -> Batch:
    """As the loader makes it: images, int16 labels. To be called within `rehearsing`."""
    assert options.in_channels is not None
    size = (config.batch, *config.data.patch)
    image = torch.empty(config.batch, options.in_channels, *config.data.patch, dtype=dtype)
    return Batch(image, torch.zeros(size, dtype=torch.int16))
