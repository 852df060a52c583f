"""The peak of validation before it: one window of the sliding window, on tensors without data."""

import torch

from unet3d import build
from unet3d.config import Config, Model
from unet3d.memory.ledger import Ledger, levels
from unet3d.memory.rehearsal import dry_batch, dry_model, rehearsing


def validation_peak(config: Config, options: Model, optimizer: int) -> int:
    """Bytes alive at most on the device: weights, what the optimizer keeps, and the windows of one patch, mirrored.

    `optimizer`: bytes of its state. The volume and its scores lie in host memory and are not counted.
    """
    ledger = Ledger()
    with rehearsing(config), torch.no_grad():
        model = dry_model(config, options, torch.float32).eval()
        predictor = build.predictor(config, model, options, build.policy(config, "cpu", ()))
        tile = dry_batch(config, options, torch.float32).image[:1].clone()
        for parameter in model.parameters():
            ledger.claim(parameter, "params", "")
        with ledger:
            predictor.window_logits(tile)
    return max(levels(ledger)) + optimizer
