"""The real training step on fake tensors: shapes without data."""

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from unet3d import build
from unet3d.config import Config, Model
from unet3d.errors import UserError
from unet3d.memory.ledger import Ledger, levels
from unet3d.memory.meter import STEADY, LedgerMeter
from unet3d.progress import parts
from unet3d.train import optim
from unet3d.train.inference import Predictor
from unet3d.train.policy import MemoryPolicy
from unet3d.train.step import train_step
from unet3d.types import Batch, mib

NORMALISATIONS = (torch.ops.aten.native_batch_norm.default, torch.ops.aten.native_group_norm.default)


@contextmanager
def fake_mode() -> Iterator[None]:
    """Tensors made inside occupy nothing; reading a number out of one gives 0."""
    with FakeTensorMode(allow_non_fake_inputs=True), _Corrections():
        yield


class _Corrections(TorchDispatchMode):
    """What tensors without data do otherwise.

    `.item()` gives 0 (a loss of 0, no overflow found); what is known, Adam's step count, stays known. The statistics
    that normalisation saves are float32 if its parameters are, also for half-precision maps, whose gradients are of
    their own type.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in the ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            result = func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return args[0].dtype.is_floating_point * 0.0
        if func in NORMALISATIONS and args[1] is not None:
            output, mean, inverse_std = result
            return output, mean.to(args[1].dtype), inverse_std.to(args[1].dtype)
        if func is torch.ops.aten.native_group_norm_backward.default and result[0] is not None:
            return result[0].to(args[1].dtype), *result[1:]
        return result


# What autocast computes in float32 on CUDA and not on the CPU, as far as forward passes of this package go: the loss
# runs outside of autocast. torch's documentation lists all (section "CUDA Ops that autocast to float32").
FLOAT32 = ("group_norm", "upsample_nearest3d", "upsample_trilinear3d")


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Within, `torch.autocast("cpu")` casts what CUDA's autocast would cast, and nothing else.

    Operations that only the CPU's autocast treats (pooling and concatenation above all) are left alone.
    """
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*only once for all operators", UserWarning)  # that they are overridden
            for name in _only_on_the_cpu():
                library.impl(name, torch.library.fallthrough_kernel, allow_override=True)
            for name in FLOAT32:
                overload = getattr(torch.ops.aten, name).default
                library.impl(name, partial(_in_float32, overload), allow_override=True)
        yield
    finally:
        library._destroy()


def _only_on_the_cpu() -> list[str]:
    """Names that have a kernel for the CPU's autocast and none for CUDA's."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        is_known = name.startswith("aten::") and torch._C._dispatch_has_kernel(name)
        if is_known and has(name, "AutocastCPU") and not has(name, "AutocastCUDA"):
            found.add(name.removeprefix("aten::"))
    return sorted(found)


def _in_float32(overload: Any, *args: Any) -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        return overload(*(a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args))


P = ParamSpec("P")


R = TypeVar("R")


_memories: list[dict] = []


def clear_memo() -> None:
    """Compute everything again."""
    for memory in _memories:
        memory.clear()


def memoized(function: Callable[P, R]) -> Callable[P, R]:
    """The function, called once for arguments that read alike: for configs, which cannot be hashed."""
    found: dict[str, R] = {}
    _memories.append(found)

    @wraps(function)
    def remembered(*args: P.args, **kwargs: P.kwargs) -> R:
        key = repr((args, kwargs))
        if key not in found:
            found[key] = function(*args, **kwargs)
        return found[key]

    return remembered


SegmentStarts = tuple[int, ...]


Watch = Callable[[nn.Module, Ledger], None]


def simulate(
    config: Config,
    options: Model,
    starts: SegmentStarts,
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
    with simulating(config):
        model = fake_model(config, options, dtype)
        loss, policy = build.loss(config, options.classes), build.policy(config, "cpu", starts)
        optimizer = optim.optimizer(config.optim, model, foreach=True if on_gpu else None)
        scaler, meter = policy.scaler(), LedgerMeter(model, optimizer)
        if watch is not None:
            watch(model, meter.ledger)
        for _ in parts(range(steps)):
            made = [fake_batch(config, options, dtype) for _ in range(config.accumulate)]
            batches: list[Any] = [Arriving(made.pop(0)) for _ in range(len(made))] if on_gpu else made
            train_step(model, loss, optimizer, scaler, policy, batches, meter.mark, config.optim.clip)
    torch.set_rng_state(random_state)
    return meter


def step_key(config: Config) -> Config:
    """A key for equal steps: the config without what a simulated step takes as arguments or does not read."""
    return replace(config, model=Model(), ckpt=0, budget=None, device=build.target(config))


class Arriving:
    """A micro-batch on its way to a GPU: nothing there holds it but the step."""

    def __init__(self, batch: Batch) -> None:
        self._parts = batch._asdict()

    def __getattr__(self, name: str) -> Any:
        return self._parts.pop(name)


@contextmanager
def simulating(config: Config) -> Iterator[None]:
    """Tensors without data, and mixed precision as the config's device does it."""
    with fake_mode(), cuda_autocast() if build.target(config) == "cuda" else nullcontext():
        yield


def fake_model(config: Config, options: Model, dtype: torch.dtype) -> nn.Module:
    """The network with weights of a type. To be called within `rehearsing`."""
    torch.set_default_dtype(dtype)  # tensors without data cannot be converted in place, as `Module.to` does
    try:
        return build.model(options, config.seed)
    finally:
        torch.set_default_dtype(torch.float32)


def fake_batch(config: Config, options: Model, dtype: torch.dtype) -> Batch:
    """As the loader makes it: images, int16 labels. To be called within `rehearsing`."""
    assert options.in_channels is not None
    size = (config.batch, *config.data.patch)
    image = torch.empty(config.batch, options.in_channels, *config.data.patch, dtype=dtype)
    return Batch(image, torch.zeros(size, dtype=torch.int16))


def validation_peak(config: Config, options: Model, optimizer: int) -> int:
    """Bytes alive at most on the device: weights, what the optimizer keeps, and the windows of one patch, mirrored.

    `optimizer`: bytes of its state. The volume and its scores lie in host memory and are not counted.
    """
    with simulating(config), torch.no_grad():
        model = fake_model(config, options, torch.float32).eval()
        return _window_peak(build.predictor(config, [model], options, build.policy(config, "cpu", ()))) + optimizer


def refuse_large_window(predictor: Predictor, path: Path) -> None:
    """Raise UserError where a window of the snapshot at `path` would hold more in tensors than the device's memory.

    The device's in all, used or not; that a container or a scheduler allows less is not known here.
    """
    device = next(predictor.models[0].parameters()).device
    with fake_mode(), cuda_autocast() if device.type == "cuda" else nullcontext(), torch.no_grad():
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
