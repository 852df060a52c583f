"""The real training step on fake tensors, which have shapes and no data: its ledger without its memory."""

import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.base.progress import beat, parts
from unet3d.base.types import Batch, host_bytes, mib
from unet3d.config.schema import Config, Model
from unet3d.memory.copies import GpuLedger
from unet3d.memory.ledger import Ledger
from unet3d.memory.meter import MEASURED_STEPS, LedgerMeter
from unet3d.memory.tables import LSTM
from unet3d.training import optim
from unet3d.training.inference import Predictor
from unet3d.training.step import train_step
from unet3d.training.switches import switched
from unet3d.training.trainer import Learner

SegmentStarts = tuple[int, ...]  # the first stage of each checkpointed segment; () without checkpointing
PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
# Frames that are passed over in search of the code that asks for a value: torch's, and those of the dispatch modes.
INNER = (
    str(Path(torch.__file__).parent) + os.sep,
    *(f"{PACKAGE}memory{os.sep}{name}.py" for name in ("ledger", "counters", "simulate")),
)
MOST_GUESSES = 100
P = ParamSpec("P")
R = TypeVar("R")
memo: dict[tuple[Callable, str], Any] = {}  # results of all memoized functions
NORMALISATIONS = (torch.ops.aten.native_batch_norm.default, torch.ops.aten.native_group_norm.default)
# What autocast computes in float32 on CUDA and not on the CPU, of the operations in this package's forward passes: the
# loss runs outside of autocast. torch's documentation lists all (section "CUDA Ops that autocast to float32").
FLOAT32 = ("group_norm", "upsample_nearest3d", "upsample_trilinear3d")


def simulate(
    config: Config,
    options: Model,
    segment_starts: SegmentStarts,
    dtype: torch.dtype = torch.float32,
    watch: Callable[[nn.Module, Ledger], None] | None = None,
    steps: int = MEASURED_STEPS,
) -> LedgerMeter:
    """The run's own network and step on fake tensors; the returned meter holds the ledger.

    `options` leave nothing open; `dtype` is that of weights and images; `watch` may add hooks. No step needs a GPU.
    """
    target = build.device_type(config)
    with torch.random.fork_rng([]), switched(config), fake_mode(target) as guesses:
        learner = fake_learner(config, options, segment_starts, dtype)

        def make() -> list[Batch]:
            return [fake_batch(config, options, dtype) for _ in range(config.accumulate)]

        meter = fake_steps(learner, make, target, config.optim.clip, watch, steps)
        meter.guesses = guesses
        return meter


def fake_learner(
    config: Config, options: Model, segment_starts: SegmentStarts, dtype: torch.dtype = torch.float32
) -> Learner:
    """Return what a step of the run needs, within `fake_mode`, with weights of a type."""
    assert options.classes is not None
    model = fake_model(config, options, dtype)
    loss = build.loss(config, options.classes)
    policy = build.policy(config, "cpu", segment_starts)
    return Learner(model, loss, optim.optimizer(config.optim, model), policy.scaler(), policy)


def fake_steps(
    learner: Learner,
    make: Callable[[], list[Batch]],
    target: str,
    clip: float | None = None,
    watch: Callable[[nn.Module, Ledger], None] | None = None,
    steps: int = MEASURED_STEPS,
) -> LedgerMeter:
    """Training steps as on a `target`, "cpu" or "cuda", within `fake_mode`; `make` gives each its micro-batches."""
    on_gpu = target == "cuda"
    if on_gpu:
        take_weights_together(learner.optimizer)
    meter = LedgerMeter(learner.model, learner.optimizer, for_gpu=on_gpu)
    if watch is not None:
        watch(learner.model, meter.ledger)
    with closing(meter):
        for _ in parts(range(steps)):
            batches: list[Any] = make()
            if on_gpu:
                batches = list(map(BatchInTransit, batches))
            train_step(*learner, batches, meter.mark, clip)
    return meter


def take_weights_together(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer of fake weights update all of them at once, as torch chooses where weights are on CUDA."""
    if isinstance(optimizer, torch.optim.Adafactor):  # which takes them one by one everywhere
        return
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def step_key(config: Config) -> Config:
    """A key for equal steps: the config without what `simulate` takes as arguments or does not read."""
    return replace(config, model=Model(), ckpt=0, budget=None, device=build.device_type(config))


def fake_model(config: Config, options: Model, dtype: torch.dtype) -> nn.Module:
    """The network with weights of a type, within `fake_mode`."""
    torch.set_default_dtype(dtype)  # fake tensors cannot be converted in place, as `Module.to` does
    try:
        return build.policy(config, "cpu", ()).formatted(build.model(options, config.seed))
    finally:
        torch.set_default_dtype(torch.float32)


def fake_batch(config: Config, options: Model, dtype: torch.dtype) -> Batch:
    """As the loader makes it, within `fake_mode`: images N C D H W, int16 labels N D H W."""
    assert options.in_channels is not None
    count = build.patches_per_rank(config)
    image = torch.empty(count, options.in_channels, *config.data.patch, dtype=dtype)
    return Batch(image, torch.zeros(count, *config.data.patch, dtype=torch.int16))


class BatchInTransit:
    """A micro-batch on its way to a GPU: each part can be read once, and only the reader then holds it."""

    def __init__(self, batch: Batch) -> None:
        self._parts = batch._asdict()

    def __getattr__(self, name: str) -> Any:
        return self._parts.pop(name)


def memoized(function: Callable[P, R]) -> Callable[P, R]:
    """The function, called once for arguments of equal `repr`: configs cannot be hashed."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        key = (function, repr((args, kwargs)))
        if key not in memo:
            memo[key] = function(*args, **kwargs)
        return cast(R, memo[key])

    return call


def validation_peak(config: Config, options: Model, optimizer: int) -> int:
    """Most bytes on the device in validation: weights, `optimizer` bytes of state, windows, mirrored; no sums."""
    with fake_mode(build.device_type(config)), torch.no_grad():
        model = fake_model(config, options, torch.float32).eval()
        predictor = build.predictor(config, [model], options, build.policy(config, "cpu", ()))
        return _windows(predictor, build.device_type(config)).peak_bytes() + optimizer


def refuse_large_window(predictor: Predictor, path: Path) -> None:
    """Raise UserError where windows of the checkpoint at `path` would need more than all memory of the device."""
    device = next(predictor.models[0].parameters()).device
    needed = _predicted_peak(predictor)
    memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else host_bytes()
    if needed > memory:
        window = "x".join(map(str, predictor.window))
        times = f", {predictor.batch} at once," if predictor.batch > 1 else ""
        held = f"its window of {window} voxels{times} would hold {mib(needed)} MiB in tensors (predicted, ledger)"
        advice = "predict on a larger device, or train with a smaller data.patch"
        if predictor.batch > 1:
            advice = f"predict one window at a time (inference.batch=1), {advice}"
        raise UserError(f"{path}: {held}; {device.type} has {mib(memory)} MiB; {advice}")


def fitted(predictor: Predictor, free: float = math.inf) -> Predictor:
    """Return the predictor that knows what its windows need beside the weights.

    Where that is more than `free` bytes, half as many windows see the networks at once, and so on down to one.
    """
    weights = sum(parameter.nbytes for model in predictor.models for parameter in model.parameters())
    device = next(predictor.models[0].parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        needed = _predicted_peak(predictor) - weights
        while needed > free and predictor.batch > 1:
            predictor = replace(predictor, batch=predictor.batch // 2)
            needed = _predicted_peak(predictor) - weights
    return replace(predictor, window_bytes=needed)


def largest_map(predictor: Predictor) -> int:
    """Return the elements of the largest map that the predictor's windows make."""
    return _predicted(predictor).largest_map()


def _predicted_peak(predictor: Predictor) -> int:
    """Return the most bytes of weights and windows."""
    return _predicted(predictor).peak_bytes()


def _predicted(predictor: Predictor) -> Ledger:
    """Return the ledger of windows of fake networks in the place of the predictor's."""
    device = next(predictor.models[0].parameters()).device
    with fake_mode(device.type), torch.no_grad():
        policy = replace(predictor.policy, device_type="cpu", segment_starts=())
        models = tuple(policy.formatted(build.model(predictor.options, seed=0)).eval() for _ in predictor.models)
        return _windows(replace(predictor, models=models, policy=policy), device.type)


def _windows(predictor: Predictor, target: str) -> Ledger:
    """Return the ledger of fake networks that see windows, mirrored, as on a `target`, "cpu" or "cuda"."""
    ledger = GpuLedger() if target == "cuda" else Ledger()
    assert predictor.options.in_channels is not None
    tiles = torch.empty(predictor.batch, predictor.options.in_channels, *predictor.window)
    for model in predictor.models:
        for parameter in model.parameters():
            ledger.claim(parameter, "params", "")
    with ledger:
        predictor.window_logits(tiles)
    return ledger


@contextmanager
def fake_mode(device_type: str = "cpu") -> Iterator[list[str]]:
    """Tensors made inside occupy nothing; a number read from one is 0. Mixed precision is that of a device type.

    Yields a list that grows by each place, FILE:LINE, of code outside of this package that reads such a number, and by
    LSTM where one has run.
    """
    autocast = cuda_autocast() if device_type == "cuda" else nullcontext()
    with FakeTensorMode(allow_non_fake_inputs=True), _Corrections() as corrections, autocast:
        yield corrections.guesses


class _Corrections(TorchDispatchMode):
    """Where fake tensors differ from real ones.

    `.item()` gives 0 (a loss of 0, no overflow found), which is a guess where a network or a loss of others asks for
    it; known numbers, as Adam's step count, stay known. Statistics that normalisation saves have its parameters' type,
    also for half-precision maps, whose gradients have their own type.
    """

    def __init__(self) -> None:
        super().__init__()
        self.guesses: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in the ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        beat()
        try:
            result = func(*args, **(kwargs or {}))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            place = _asking(sys._getframe(1))
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise unknown(place, error) from error
            if place and place not in self.guesses and len(self.guesses) < MOST_GUESSES:
                self.guesses.append(place)
            return _zero(args[0].dtype)
        if func is torch.ops.aten.mkldnn_rnn_layer.default and LSTM not in self.guesses:  # its workspace has 0 bytes
            self.guesses.append(LSTM)
        if func.is_view:
            _copy_for_slices(torch._C._current_autograd_node())
        if func in NORMALISATIONS and args[1] is not None:
            output, mean, inverse_std = result
            return output, mean.to(args[1].dtype), inverse_std.to(args[1].dtype)
        if func is torch.ops.aten.native_group_norm_backward.default and result[0] is not None:
            return result[0].to(args[1].dtype), *result[1:]
        return result


def _zero(dtype: torch.dtype) -> complex:
    """Return 0 as a number of Python that `.item()` gives for a type."""
    if dtype == torch.bool:
        return False
    return 0j if dtype.is_complex else 0.0 if dtype.is_floating_point else 0


def _asking(frame: FrameType | None) -> str:
    """Return FILE:LINE of the innermost code outside of torch; "" if that is this package's own."""
    while frame is not None and frame.f_code.co_filename.startswith(INNER):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(PACKAGE):
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def asked_in(trace: TracebackType | None) -> str:
    """Return FILE:LINE of the innermost code outside of torch in a trace; "" if that is this package's own."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace)]
    path, line = next((one for one in reversed(frames) if not one[0].startswith(INNER)), ("", 0))
    return "" if not path or path.startswith(PACKAGE) else f"{path}:{line}"


def unknown(place: str, error: Exception) -> Exception:
    """Return what to raise where no 0 can stand for the values that code at a place asks for."""
    if not place:
        return error
    return UserError(
        f"{place}: sizes or numbers depend on values, which a prediction does not have: use unet3d.memory.explain"
    )


def _copy_for_slices(node: Any) -> None:
    """Have the gradient of a view that was written to in place copied, if the view's gradient is what a node computes.

    Autograd takes such a view of a real tensor as `as_strided`, whose gradient is a copy; of a fake one it takes the
    view again, whose gradient is no copy. The copy is made as the next node begins, which then holds it alone.
    """
    following = node.next_functions if node is not None else ()
    if following and following[0][0] is not None and following[0][0].name().endswith("CopySlices"):
        following[0][0].register_prehook(lambda gradients: tuple(g if g is None else g.clone() for g in gradients))


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Within, `torch.autocast("cpu")` casts what CUDA's autocast would cast, and nothing else."""
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*only once for all operators", UserWarning)  # that they are overridden
            for name in _cast_on_cpu_only():
                library.impl(name, torch.library.fallthrough_kernel, allow_override=True)
            for name in FLOAT32:
                overload = getattr(torch.ops.aten, name).default
                library.impl(name, partial(_in_float32, overload), allow_override=True)
        yield
    finally:
        library._destroy()


def _cast_on_cpu_only() -> Iterator[str]:
    """Operations with a kernel for the CPU's autocast and none for CUDA's: pooling and concatenation above all."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = {f"{s.name}.{s.overload_name}".rstrip(".") for s in torch._C._jit_get_all_schemas()}
    for name in sorted(name for name in names if name.startswith("aten::") and torch._C._dispatch_has_kernel(name)):
        if has(name, "AutocastCPU") and not has(name, "AutocastCUDA"):
            yield name.removeprefix("aten::")


def _in_float32(overload: Any, *args: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        return overload(*(a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args))
