"""The real training step on fake tensors, which have shapes and no data: its ledger without its memory."""

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import nn

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.base.progress import parts
from unet3d.base.types import Batch, host_bytes, mib
from unet3d.config.schema import Config, Model
from unet3d.memory.fake_tensors import fake_mode
from unet3d.memory.ledger import Ledger, most_held
from unet3d.memory.meter import COUNTED, MEASURED_STEPS, GpuLedger, LedgerMeter
from unet3d.recomputing.program import PLAIN, Technique
from unet3d.training import optim
from unet3d.training.inference import Predictor
from unet3d.training.losses import Probe
from unet3d.training.step import train_step
from unet3d.training.switches import switched
from unet3d.training.trainer import Learner

Watch = Callable[[nn.Module, Ledger], None]  # may add hooks to a network before its first step
CPU = torch.device("cpu")
P = ParamSpec("P")
R = TypeVar("R")
memo: dict[tuple[Callable, str], Any] = {}  # results of all memoized functions


def simulate(
    config: Config,
    model_config: Model,
    technique: Technique = PLAIN,
    dtype: torch.dtype = torch.float32,
    watch: Watch | None = None,
    steps: int = MEASURED_STEPS,
) -> LedgerMeter:
    """Take steps of the run's own network on fake tensors; the returned meter holds the ledger. No step needs a GPU.

    `model_config` leaves nothing open; `dtype` is the type of weights and images.
    """
    target = build.device_type(config)
    with torch.random.fork_rng([]), switched(config.cuda, config.deterministic), fake_mode(target) as guesses:
        learner = make_learner(config, model_config, technique, dtype)

        def make() -> list[Batch]:
            return [fake_batch(config, model_config, dtype) for _ in range(config.accumulate)]

        # Adam's first step makes other tensors than later ones, and so does the scaler of fp16.
        is_steady = config.optim.name == "sgd" and not learner.scaler.is_enabled()
        if model_config.path is not None or config.loss.path is not None:
            is_steady = False
        Probe.reference_counts()  # The first step of a process would make tensors for it.
        meter = fake_steps(learner, make, target, config.optim.clip, watch, steps, is_steady)
        meter.guesses = guesses
        if isinstance(meter.ledger, GpuLedger):
            meter.ledger.empties_cache = True
        return meter


def make_learner(
    config: Config,
    model_config: Model,
    technique: Technique = PLAIN,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> Learner:
    """Return what a step of the run needs, with weights of a type; within `fake_mode` they are fake."""
    assert model_config.classes is not None
    model = fake_model(config, model_config, dtype).to(device).train()
    loss = build.loss(config, model_config.classes, device, model_config.output_regions)
    policy = build.policy(config, device.type, technique)
    return Learner(model, loss, optim.optimizer(config.optim, model), policy.scaler(), policy)


def fake_steps(
    learner: Learner,
    make: Callable[[], list[Batch]],
    target: str,
    clip: float | None = None,
    watch: Watch | None = None,
    steps: int = MEASURED_STEPS,
    is_steady: bool = False,
) -> LedgerMeter:
    """Take training steps as on a `target`, "cpu" or "cuda", within `fake_mode`.

    `make` gives each its micro-batches. `is_steady`: network, loss and optimizer take every step alike, so that the
    ledger may repeat the first.
    """
    on_gpu = target == "cuda"
    if on_gpu:
        take_weights_together(learner.optimizer)
    meter = LedgerMeter(learner.model, learner.optimizer, for_gpu=on_gpu)
    if watch is not None:
        watch(learner.model, meter.ledger)
    with closing(meter):
        for number in parts(range(steps)):
            batches: list[Any] = make()
            if on_gpu:
                batches = list(map(BatchInTransit, batches))
            train_step(*learner, batches, meter.mark, clip)
            del batches  # before the ledger repeats the step
            if is_steady and number == 0 and meter.ledger.repeat(steps - 1):
                break
    return meter


def take_weights_together(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer of fake weights update all of them at once, as torch chooses where weights are on CUDA."""
    if isinstance(optimizer, torch.optim.Adafactor):  # Adafactor takes parameters one by one everywhere.
        return
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def step_key(config: Config) -> Config:
    """Return a key for equal steps: the config without what `simulate` takes as arguments or does not read."""
    return replace(
        config,
        model=Model(),
        ckpt=0,
        recompute="none",
        budget=None,
        device=build.device_type(config),
    )


def fake_model(config: Config, model_config: Model, dtype: torch.dtype) -> nn.Module:
    """Return the network with weights of a type, within `fake_mode`."""
    torch.set_default_dtype(dtype)  # fake tensors cannot be converted in place, as `Module.to` does
    try:
        model = build.model(model_config, config.seed)
        return build.policy(config, "cpu").formatted(model)
    finally:
        torch.set_default_dtype(torch.float32)


def fake_batch(config: Config, model_config: Model, dtype: torch.dtype) -> Batch:
    """Return a batch as the loader makes it, within `fake_mode`: images N C D H W, int16 labels N D H W."""
    assert model_config.in_channels is not None
    count = build.patches_per_rank(config)
    image = torch.empty(count, model_config.in_channels, *config.data.patch, dtype=dtype)
    label = torch.zeros(count, *config.data.patch, dtype=torch.int16)
    return Batch(image, label)


class BatchInTransit:
    """A micro-batch on its way to a GPU: each part can be read once, and only the reader then holds it."""

    def __init__(self, batch: Batch) -> None:
        self._parts = batch._asdict()

    def __getattr__(self, name: str) -> Any:
        return self._parts.pop(name)


def memoized(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, called once for arguments of equal `repr`: configs cannot be hashed."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        key = (function, repr((args, kwargs)))
        if key not in memo:
            memo[key] = function(*args, **kwargs)
        return cast(R, memo[key])

    return call


def validation_peak(
    config: Config,
    model_config: Model,
    optimizer_bytes: int,
    technique: Technique = PLAIN,
) -> int:
    """Return the most bytes on the device in validation, but for the sums of windows.

    They are the weights, `optimizer_bytes` of state, and forward passes on one batch of windows, one for each
    mirroring.
    """
    device_type = build.device_type(config)
    with switched(config.cuda, config.deterministic), fake_mode(device_type), torch.no_grad():
        model = fake_model(config, model_config, torch.float32).eval()
        policy = build.policy(config, "cpu", technique)
        predictor = build.predictor(config, [model], model_config, policy)
        return most_held(_windows(predictor, device_type).requests()) + optimizer_bytes


def refuse_large_window(predictor: Predictor, path: Path) -> None:
    """Raise UserError where windows of the checkpoint at `path` would need more than all memory of the device."""
    device = next(predictor.models[0].parameters()).device
    needed = _most(predictor)
    memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else host_bytes()
    if needed <= memory:
        return
    kind = "tensors and workspaces" if device.type == "cuda" else f"tensors ({COUNTED})"
    window = f"its window of {'x'.join(map(str, predictor.window))} voxels"
    advice = "predict on a larger device, or train with a smaller data.patch"
    if predictor.batch > 1:
        window = f"{window}, {predictor.batch} at once,"
        advice = f"predict one window at a time (inference.batch=1), {advice}"
    raise UserError(
        f"{path}: {window} would hold {mib(needed)} MiB in {kind}, predicted; "
        f"{device.type} has {mib(memory)} MiB; {advice}"
    )


def fitted(predictor: Predictor, free: float = math.inf) -> Predictor:
    """Return the predictor that knows what its windows need in addition to the weights.

    Where that is more than `free` bytes, half as many windows see the networks at once, and so on down to one.
    """
    weights = sum(parameter.nbytes for model in predictor.models for parameter in model.parameters())
    device = next(predictor.models[0].parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        needed = _most(predictor) - weights
        while needed > free and predictor.batch > 1:
            predictor = replace(predictor, batch=predictor.batch // 2)
            needed = _most(predictor) - weights
    return replace(predictor, window_bytes=needed)


def largest_map(predictor: Predictor) -> int:
    """Return the elements of the largest map that the predictor's windows make."""
    return _predicted(predictor).largest_map()


def _most(predictor: Predictor) -> int:
    """Return the most bytes of weights and windows, with workspaces."""
    return most_held(_predicted(predictor).requests())


def _predicted(predictor: Predictor) -> Ledger:
    """Return the ledger of weights and windows of fake networks in the place of the predictor's."""
    device = next(predictor.models[0].parameters()).device
    with fake_mode(device.type), torch.no_grad():
        policy = replace(predictor.policy, device_type="cpu", technique=PLAIN)
        models = tuple(policy.formatted(build.model(predictor.options, seed=0)).eval() for _ in predictor.models)
        return _windows(replace(predictor, models=models, policy=policy), device.type)


def _windows(predictor: Predictor, target: str) -> Ledger:
    """Return the ledger of a prediction of one batch of windows by fake networks, one forward pass for each mirroring.

    It is as on a `target`, "cpu" or "cuda".
    """
    ledger = GpuLedger() if target == "cuda" else Ledger()
    assert predictor.options.in_channels is not None
    tiles = torch.empty(predictor.batch, predictor.options.in_channels, *predictor.window)
    for model in predictor.models:
        for parameter in model.parameters():
            ledger.claim(parameter, "params", "")
    with ledger:
        predictor.window_logits(tiles)
    return ledger
