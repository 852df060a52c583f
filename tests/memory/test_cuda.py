"""CUDA's mixed precision without a GPU: golden bytes of the real policy, and what follows from it."""

import errno
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from guards import without
from promises import promise
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from training import PLAIN, TINY, pixels_alone, train

from unet3d import build
from unet3d.base.errors import is_out_of_memory
from unet3d.base.types import mib
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.memory import meter as of_ledger
from unet3d.memory.allocator import Settings
from unet3d.memory.fake_tensors import cuda_autocast, fake_mode
from unet3d.memory.ledger import most_held
from unet3d.memory.meter import STEPS_FOR_PEAK, GpuLedger, peak_of
from unet3d.memory.simulate import simulate
from unet3d.memory.technique import choose_technique, step_peak
from unet3d.model.unet import UNet3D
from unet3d.run.training_state import CheckpointManager
from unet3d.training import optim
from unet3d.training.trainer import Learner

ROOT = Path(__file__).resolve().parent.parent.parent
# Bytes that autograd saves in forward and cross-entropy, widths 16..128, 32 x 32 x 32, batch 2: with a CUDA build of
# torch on fake cuda tensors, autocast to float16; and the same in float32.
GOLDEN = {
    "model.norm=instance": (58_966_532, 34_027_972),
    "model.norm=group": (58_950_532, 64_486_212),
    "model.norm=batch": (58_960_900, 34_022_340),
    "model.activation=silu": (81_117_700, 45_103_556),
    "model.activation=leaky_relu": (81_117_700, 45_103_556),
}


def config(*overrides: str) -> Config:
    found = compose.compose(["model=unet_small", "model.groups=4", "data.patch=[32,32,32]", *overrides])
    found.model.in_channels, found.model.classes = 1, 3
    return found


def tiny(*overrides: str) -> Config:
    found = compose.compose(
        ["model=unet_tiny", "model.features=[8,16]", "model.groups=4", "data.patch=[16,16,16]", *overrides]
    )
    found.model.in_channels, found.model.classes = 1, 3
    return found


def peak(options: Config) -> int:
    return most_held(simulate(options, options.model, steps=STEPS_FOR_PEAK).ledger.events)


STEADY = ["accumulate=2", "device=cuda amp=true recompute=lean"]


@pytest.mark.parametrize("words", STEADY)
def test_a_repeated_step_is_the_next_step(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = tiny("optim=sgd", "optim.average=0.99", *words.split())
    technique = choose_technique(options, options.model)
    repeated = simulate(options, options.model, technique).ledger
    monkeypatch.setattr(of_ledger.Ledger, "repeat", lambda *_: False)
    taken = simulate(options, options.model, technique).ledger
    assert [repeated.marks, repeated.events, repeated.storages] == [taken.marks, taken.events, taken.storages]
    assert (repeated.convolutions, repeated.workspaces) == (taken.convolutions, taken.workspaces)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@without("unet3d.memory.fake_tensors.cuda_autocast", nullcontext)
def test_layer_norm_and_softmax_are_in_float32(dtype: torch.dtype) -> None:
    with fake_mode("cuda"), torch.autocast("cpu", dtype):
        tokens = torch.randn(2, 4, dtype=dtype, requires_grad=True)
        results = [F.layer_norm(tokens, (4,)), tokens.softmax(-1)]
        assert [result.dtype for result in results] == [torch.float32] * 2
        (gradient,) = torch.autograd.grad(sum(results).sum(), tokens)  # type: ignore[union-attr]
        assert gradient.dtype == dtype


def saved(options: Config, dtype: torch.dtype | None) -> int:
    sizes, alive = {}, []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        alive.append(tensor)
        sizes[storage._cdata] = storage.nbytes()
        return tensor

    with fake_mode(), cuda_autocast():
        model = build.model(options.model, 0)
        image, label = torch.empty(2, 1, 32, 32, 32), torch.empty(2, 32, 32, 32, dtype=torch.int64)
        autocast = torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)
        with saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
            F.cross_entropy(model(image).float() if dtype is torch.bfloat16 else model(image), label)
        weights = {p.untyped_storage()._cdata for p in model.parameters()}
    return sum(size for storage, size in sizes.items() if storage not in weights)


@pytest.mark.parametrize(("override", "bytes_"), GOLDEN.items())
def test_the_bytes_are_those_of_cudas_own_policy(override: str, bytes_: tuple[int, int]) -> None:
    options = config(override)
    assert (saved(options, None), saved(options, torch.float16)) == bytes_


def test_the_cpus_policy_is_restored_afterwards() -> None:
    def pooled() -> torch.dtype:
        with torch.autocast("cpu", torch.bfloat16):
            return F.max_pool3d(torch.ones(1, 1, 2, 2, 2, dtype=torch.bfloat16), 2).dtype

    assert pooled() is torch.float32
    with cuda_autocast():
        assert pooled() is torch.bfloat16
    assert pooled() is torch.float32


@pytest.mark.slow
def test_a_gpu_holds_one_micro_batch_at_a_time() -> None:
    """The CPU holds all of them, because the step is given all of them."""
    peaks = {}
    for device in ("cpu", "cuda"):
        for parts in (2, 3):
            peaks[device, parts] = peak(tiny("model.features=[16]", f"accumulate={parts}", f"device={device}", *PLAIN))
    loss = 4  # bytes, that each micro-batch leaves until the step reads them all
    assert peaks["cuda", 3] == peaks["cuda", 2] + loss
    images, labels = 2 * 16**3 * 4, 2 * 16**3 * 2  # bytes, in float32 and in int16
    assert peaks["cpu", 3] - peaks["cpu", 2] == images + labels + loss
    assert peaks["cpu", 2] - peaks["cuda", 2] == images + 2 * labels, "in backward only autograd holds an image"


def test_the_steps_that_adam_counts_lie_on_the_host() -> None:
    for device, numbers in (("cpu", 1), ("cuda", 0)):
        options = tiny(f"device={device}", "optim=adam")
        meter = simulate(options, options.model, steps=STEPS_FOR_PEAK)
        weights = [weight.numel() for weight in meter.model.parameters()]
        states = meter.ledger.categories_at(len(meter.ledger.events))["optimizer"]
        assert states == sum(4 * (2 * size + numbers) for size in weights)


def test_a_convolution_copies_what_does_not_lie_as_its_kernel_wants_it() -> None:
    """Its result is made while the copy is there: see `_convolution` in torch's Convolution.cpp."""
    size = 4 * 8**3
    with fake_mode("cuda"), GpuLedger() as ledger:
        layer = nn.Conv3d(2, 2, 1, bias=False)
        whole = torch.empty(1, 4, 8, 8, 8)
        part = whole.permute(0, 1, 4, 3, 2)[:, 1:3].requires_grad_()
        ledger.mark("forward")
        result = layer(part)
        ledger.mark("backward")
        result.backward(torch.empty(1, 2, 8, 8, 8).transpose(2, 4))
    sums = [[change for _, change in ledger.events[start:end]] for _, start, end in ledger.phase_spans()[1:]]
    assert sums[0] == [2 * size, 2 * size, -2 * size], "the copy, the result, and the copy goes"
    assert sums[1][:3] == [2 * size, 2 * size, 2 * size], "the gradient, the image's copy, the gradient's copy"


def test_the_replay_has_the_settings_that_the_environment_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    options = config("device=cuda", *PLAIN)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    usual = step_peak(options, options.model)
    ledger = simulate(options, options.model, steps=STEPS_FOR_PEAK).ledger
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "large_segment_size_mb:64")
    assert peak_of(ledger).reserved != usual.reserved == peak_of(ledger, Settings()).reserved


@pytest.mark.slow
def test_a_dry_run_for_cuda_needs_no_gpu(tmp_path: Path) -> None:
    words = (*TINY, *PLAIN, "amp=true", "device=cuda", "dry_run=true", "hydra.run.dir=run")
    done = train(tmp_path, *words, hook=pixels_alone, frills=True)
    assert done.code == 0, done.err
    found = json.loads((tmp_path / "run" / "memory.json").read_text())["predicted"]
    assert f"{mib(found['allocated_bytes'])} MiB" in done.out and f"{mib(found['reserved_bytes'])} MiB" in done.out
    assert found["peak_bytes"] <= found["allocated_bytes"] <= found["reserved_bytes"]


def test_a_run_on_the_cpu_leaves_a_gpu_alone(network: Callable[..., UNet3D], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be full or in use by someone else: a run on the CPU asks it for no random state."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for asked in ("get_rng_state_all", "get_rng_state"):
        monkeypatch.setattr(torch.cuda, asked, lambda *of: pytest.fail("asked of the GPU"))
    model, settings = network(), compose.compose(["device=cpu"])
    optimizer, policy = optim.optimizer(settings.optim, model), build.policy(settings, "cpu")
    learner = Learner(model, build.loss(settings, 2), optimizer, policy.scaler(), policy)
    rests_on = {"classes": [], "channels": [], "intensity": []}
    state = CheckpointManager(Path(), settings, settings.model, rests_on, learner).state_dict(1, 0, None)
    assert state["cuda_rng"] == []


# Texts of RuntimeError but for the last ones.
RUNTIME_ERRORS = """
CUDA error: out of memory. Compile with `TORCH_USE_CUDA_DSA`
cuDNN error: CUDNN_STATUS_ALLOC_FAILED
NVML_SUCCESS == r INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":1016
[enforce fail] DefaultCPUAllocator: can't allocate memory
could not create a primitive
std::bad_alloc
GET was unable to find an engine to execute this computation
"""
NO_MEMORY = [
    *map(RuntimeError, RUNTIME_ERRORS.strip().splitlines()),
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
]
OTHERS = [
    RuntimeError("could not create a primitive descriptor for a convolution"),
    RuntimeError("can't start new thread"),  # for a limit on processes
    RuntimeError("DataLoader worker (pid 1) is killed by signal: Bus error. out of shared memory"),
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    FileExistsError(errno.EEXIST, "File exists", "w/bad_alloc"),
    ValueError("ALLOC_FAILED"),
]


@promise("Training", "memory runs out in ...")
@without("unet3d.base.errors.NO_MEMORY", ("can't allocate", "ALLOC_FAILED"), only="create a primitive.")
@without("unet3d.base.errors.NO_MEMORY", ("could not create a primitive",), only="primitive descriptor")
@pytest.mark.parametrize("error", [*NO_MEMORY, *OTHERS], ids=lambda error: f"{type(error).__name__} {error}"[:60] + ".")
def test_what_counts_as_out_of_memory(error: BaseException) -> None:
    assert is_out_of_memory(error) is (error in NO_MEMORY)
