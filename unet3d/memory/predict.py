"""The peak of a run before it: its own build and its own step, on tensors without data.

Error class: exact against the ledger of the real run on the CPU, to the byte. What kernels take within one operation is
in neither.
"""

from pathlib import Path
from typing import Any

import torch

from unet3d import build, record
from unet3d.config import Config, Model
from unet3d.memory.dry import dry
from unet3d.memory.meter import STEADY, LedgerMeter
from unet3d.step import Batch, train_step


def forecast(config: Config, options: Model, folder: Path) -> None:
    """Predict, print it, and write it to memory.json. On CUDA nothing is predicted yet."""
    if build.device(config).type != "cpu":
        return
    found = predict(config, options)
    parameters = found.pop("parameters")
    record.write_json(folder / "memory.json", {"parameters": parameters, "predicted": found})
    peak = found["peak_bytes"] / 2**20
    phase = max(found["phases"], key=lambda name: found["phases"][name]["steady"])
    print(f"{parameters:,} parameters; predicted peak of a step {peak:,.1f} MiB (ledger), in {phase}", flush=True)


def predict(config: Config, options: Model) -> dict[str, Any]:
    """`peak_bytes`, `phases`, `categories` in bytes as `Meter.summary` gives them, and `parameters`.

    `options` are concrete: channels, classes, kernels and strides set.
    """
    assert options.in_channels is not None and options.classes is not None
    random_state = torch.get_rng_state()
    with dry():
        model = build.model(options, config.seed)
        loss, policy = build.loss(config, options.classes), build.policy(config, "cpu")
        optimizer, scaler = build.optimizer(config.optim, model), policy.scaler()
        meter = LedgerMeter(model, optimizer)
        for _ in range(STEADY):
            batches = [_batch(config, options.in_channels) for _ in range(config.accumulate)]
            train_step(model, loss, optimizer, scaler, policy, batches, meter.mark, config.optim.clip)
        summary = meter.summary()
        parameters = sum(p.numel() for p in model.parameters())
    torch.set_rng_state(random_state)
    return {**summary, "parameters": parameters}


def _batch(config: Config, channels: int) -> Batch:
    """As the loader makes it: float32 images, int16 labels."""
    size = (config.batch, *config.data.patch)
    image = torch.empty(config.batch, channels, *config.data.patch)
    return Batch(image, torch.zeros(size, dtype=torch.int16))
