"""The peak of a run before it: its own build and its own step, on tensors without data.

Error class: exact against the ledger of the real run on the CPU, to the byte. What kernels take within one operation is
in neither.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from unet3d import build
from unet3d.checks import budget_bytes, stages
from unet3d.config import Config, Model
from unet3d.errors import UserError
from unet3d.memory.dry import dry
from unet3d.memory.meter import STEADY, LedgerMeter
from unet3d.step import Batch, train_step


def forecast(config: Config, options: Model) -> dict[str, Any]:
    """Predict, print it, and return memory.json's first entries; none on CUDA, where nothing is predicted yet.

    Raises UserError where the step needs more than `budget`.
    """
    if build.device(config).type != "cpu":
        return {}
    found = predict(config, options)
    parameters = found.pop("parameters")
    peak = found["peak_bytes"] / 2**20
    phase = max(found["phases"], key=lambda name: found["phases"][name]["steady"])
    print(f"{parameters:,} parameters; predicted peak of a step {peak:,.1f} MiB (ledger), in {phase}", flush=True)
    if config.budget is not None and found["peak_bytes"] > budget_bytes(config.budget):
        raise UserError(plan(config, options, budget_bytes(config.budget)))
    return {"parameters": parameters, "predicted": found}


def plan(config: Config, options: Model, budget: int) -> str:
    """What would fit, one change after the other: those that leave the network as it is first, a narrower one last."""
    lines = [f"budget={config.budget}: the step does not fit. Predicted peaks with"]
    overrides: dict[str, str] = {}
    for override, changed, changed_options in levers(config, options):
        overrides[override.partition("=")[0]] = override  # a narrower net takes the place of a narrow one
        peak = predict(changed, changed_options)["peak_bytes"]
        lines.append(
            f"  {peak / 2**20:10,.1f} MiB  {' '.join(overrides.values())}{'  (fits)' if peak <= budget else ''}"
        )
        if peak <= budget:
            return "\n".join(lines)
    return "\n".join([*lines, "nothing of this fits; a smaller data.patch would"])


def levers(config: Config, options: Model) -> Iterator[tuple[str, Config, Model]]:
    """Overrides to add one by one, each with the config and model options that they lead to together."""
    if not config.amp:
        config = replace(config, amp=True)
        yield "amp=true", config, options
    if not config.ckpt:
        choices = [replace(config, ckpt=n) for n in range(2, stages(options) + 1)]
        config = min(choices, key=lambda choice: predict(choice, options)["peak_bytes"])
        yield f"ckpt={config.ckpt}", config, options
    if config.batch > 1:
        parts = config.batch * config.accumulate
        config = replace(config, batch=1, accumulate=parts)
        yield f"batch=1 accumulate={parts}", config, options
    while min(options.features) >= 16:
        halved = [width // 2 for width in options.features]
        decoder = None if options.decoder is None else [width // 2 for width in options.decoder]
        options = replace(options, features=halved, decoder=decoder)
        given = f"model.features={halved}".replace(" ", "")
        yield given if decoder is None else f"{given} model.decoder={decoder}".replace(", ", ","), config, options


def predict(config: Config, options: Model) -> dict[str, Any]:
    """`peak_bytes`, `phases`, `categories` and more in bytes as `Meter.summary` gives them, and `parameters`."""
    meter = rehearse(config, options)
    return {**meter.summary(), "parameters": sum(p.numel() for p in meter.model.parameters())}


def rehearse(config: Config, options: Model, dtype: torch.dtype = torch.float32) -> LedgerMeter:
    """The run's own build and step on tensors without data; the meter holds the ledger.

    `options` are concrete: channels, classes, kernels and strides set. `dtype` is that of weights and images.
    """
    assert options.in_channels is not None and options.classes is not None
    random_state = torch.get_rng_state()
    with dry():
        torch.set_default_dtype(dtype)
        try:
            model = build.model(options, config.seed)
        finally:
            torch.set_default_dtype(torch.float32)
        loss, policy = build.loss(config, options.classes), build.policy(config, "cpu")
        optimizer, scaler = build.optimizer(config.optim, model), policy.scaler()
        meter = LedgerMeter(model, optimizer)
        for _ in range(STEADY):
            batches = [_batch(config, options.in_channels, dtype) for _ in range(config.accumulate)]
            train_step(model, loss, optimizer, scaler, policy, batches, meter.mark, config.optim.clip)
    torch.set_rng_state(random_state)
    return meter


def _batch(config: Config, channels: int, dtype: torch.dtype) -> Batch:
    """As the loader makes it: float32 images, int16 labels."""
    size = (config.batch, *config.data.patch)
    image = torch.empty(config.batch, channels, *config.data.patch, dtype=dtype)
    return Batch(image, torch.zeros(size, dtype=torch.int16))
