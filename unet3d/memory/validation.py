"""The peak of validation, or of a prediction, before it: one window of the sliding window, on tensors without data."""

import dataclasses
import os
from contextlib import nullcontext
from pathlib import Path

import torch

from unet3d import build
from unet3d.config import Config, Model
from unet3d.errors import UserError
from unet3d.inference import Predictor
from unet3d.memory.cuda import cuda_policy
from unet3d.memory.dry import dry
from unet3d.memory.ledger import Ledger, levels
from unet3d.memory.rehearsal import dry_model, rehearsing
from unet3d.policy import MemoryPolicy
from unet3d.table import mib


def validation_peak(config: Config, options: Model, optimizer: int) -> int:
    """Bytes alive at most on the device: weights, what the optimizer keeps, and the windows of one patch, mirrored.

    `optimizer`: bytes of its state. The volume and its scores lie in host memory and are not counted.
    """
    with rehearsing(config), torch.no_grad():
        model = dry_model(config, options, torch.float32).eval()
        return _window_peak(build.predictor(config, [model], options, build.policy(config, "cpu", ()))) + optimizer


def refuse_large_window(predictor: Predictor, path: Path) -> None:
    """Raise UserError where a window of the snapshot at `path` would hold more in tensors than the device's memory.

    The device's in all, used or not; that a container or a scheduler allows less is not known here.
    """
    device = next(predictor.models[0].parameters()).device
    with dry(), cuda_policy() if device.type == "cuda" else nullcontext(), torch.no_grad():
        models = tuple(build.model(predictor.options, seed=0).eval() for _ in predictor.models)
        policy = MemoryPolicy("cpu", predictor.policy.dtype)
        needed = _window_peak(dataclasses.replace(predictor, models=models, policy=policy))
    there = _memory(device)
    if needed > there:
        window = "x".join(map(str, predictor.window))
        raise UserError(
            f"{path}: its window of {window} voxels would hold {mib(needed)} MiB in tensors (predicted, ledger); "
            f"{device.type} has {mib(there)} MiB; predict on a larger device, or train with a smaller data.patch"
        )


def _window_peak(predictor: Predictor) -> int:
    """Bytes alive at most while a window, mirrored, goes through networks without data."""
    ledger = Ledger()
    assert predictor.options.in_channels is not None
    tile = torch.empty(1, predictor.options.in_channels, *predictor.window)
    for model in predictor.models:
        for parameter in model.parameters():
            ledger.claim(parameter, "params", "")
    with ledger:
        predictor.window_logits(tile)
    return max(levels(ledger))


def _memory(device: torch.device) -> int:
    """Bytes that the device has, used or not."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
