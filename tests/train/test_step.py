"""The one training step: phases, accumulation, clipping, and what it refuses."""

from collections.abc import Callable

import pytest
import torch
from calls import Calls
from guards import no, without, yes
from promises import promise
from torch import nn

from unet3d.base.errors import NonFiniteLoss
from unet3d.base.types import Batch
from unet3d.model.unet import UNet3D
from unet3d.training.losses import SegmentationLoss, ce
from unet3d.training.policy import MemoryPolicy
from unet3d.training.step import StepResult, ignore_mark, train_step

Network = Callable[..., UNet3D]


def batch(samples: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(samples, 1, 8, 8, 8, generator=generator)
    return Batch(image, torch.randint(0, 3, (samples, 8, 8, 8), generator=generator).short(), ("a",) * samples)


def step(
    model: nn.Module,
    batches: list[Batch],
    clip: float | None = None,
    memory: MemoryPolicy = MemoryPolicy(),  # noqa: B008 (frozen)
    mark: Callable[[str], None] = ignore_mark,
) -> StepResult:
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    loss = SegmentationLoss(ce)
    return train_step(model, loss, optimizer, memory.scaler(), memory, batches, mark, clip)


def test_marks_each_phase_in_order(network: Network) -> None:
    marks: list[str] = []
    step(network(), [batch(1), batch(1)], mark=marks.append)
    assert marks == ["data", "forward", "loss", "backward"] * 2 + ["step", "end"]


def test_accumulated_halves_equal_the_whole(network: Network) -> None:
    """Instance norm knows no batch, so two micro-batches of one are a batch of two."""
    whole, halves = network(), network()
    both = batch(2)
    parts = [Batch(both.image[i : i + 1], both.label[i : i + 1]) for i in range(2)]
    results = [step(whole, [both]), step(halves, parts)]
    assert results[0].loss == pytest.approx(results[1].loss, abs=1e-6)
    for a, b in zip(whole.parameters(), halves.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "numbers"), [(None, 0), (torch.float16, 1)], ids=("float32", "fp16"))
def test_a_step_waits_once_for_the_device_however_many_micro_batches(
    network: Network, dtype: torch.dtype | None, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for loss, norm and scale together; fp16's scaler asks once more, whether a gradient overflowed."""
    read, lists, calls = torch.Tensor.tolist, list[int](), Calls()
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: lists.append(tensor.numel()) or read(tensor))
    with calls:
        result = step(network(), [batch(1)] * 3, clip=1.0, memory=MemoryPolicy(dtype=dtype))
    assert calls.counts[torch.ops.aten._local_scalar_dense.default] == numbers
    assert lists == [4 + numbers]
    assert result.scale == (65536.0 if dtype else 1.0)


def test_a_loss_beyond_the_range_of_half_precision_weights_is_a_number() -> None:
    model = nn.Conv3d(1, 3, 1).half()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    policy = MemoryPolicy()
    one = batch(1)._replace(image=torch.zeros(1, 1, 2, 2, 2, dtype=torch.half))
    result = train_step(
        model, lambda logits, label: logits.float().sum() + 1e6, optimizer, policy.scaler(), policy, [one]
    )
    assert result.loss == pytest.approx(1e6, abs=100)


def test_clipping_bounds_the_update_and_reports_the_norm_before(network: Network) -> None:
    model, before = network(), network()
    norm = step(model, [batch(1)], clip=1e-3).grad_norm
    assert norm > 1e-3
    moved = sum((a - b).square().sum() for a, b in zip(model.parameters(), before.parameters(), strict=True))
    assert float(moved.detach()) ** 0.5 == pytest.approx(1e-3, rel=1e-2)


def test_gradients_are_released(network: Network) -> None:
    model = network()
    step(model, [batch(1)])
    assert all(p.grad is None for p in model.parameters())


def test_any_module_is_a_network() -> None:
    """Only checkpointed segments need an nn.Sequential."""
    torch.manual_seed(0)
    model = nn.Conv3d(1, 3, 1)
    losses = [step(model, [batch(1)]).loss for _ in range(2)]
    assert losses[1] < losses[0]


@promise("Training", "a loss or gradient ...")
@without("unet3d.training.step.math.isfinite", yes, only="None")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_non_finite_loss_stops_before_the_update(network: Network, dtype: torch.dtype | None) -> None:
    model, before = network(), network()
    poisoned = batch(1)._replace(cases=("case-7",))
    poisoned.image[0, 0, 0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteLoss, match=r"\bnan\b.*\bcase-7\b"):
        step(model, [poisoned], memory=MemoryPolicy("cpu", dtype))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))


class BrokenGradient(torch.autograd.Function):
    """A finite loss with a gradient that is not."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan")


def broken(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return SegmentationLoss(ce)(BrokenGradient.apply(logits), label)


@promise("Training", "a loss or gradient ...")
@without("unet3d.training.step.math.isfinite", yes, only="12.0")
@pytest.mark.parametrize("clip", [None, 12.0])
def test_a_non_finite_gradient_stops_before_the_update(network: Network, clip: float | None) -> None:
    model, before, memory = network(), network(), MemoryPolicy()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    with pytest.raises(NonFiniteLoss, match=r"\bnan\b"):
        train_step(model, broken, optimizer, memory.scaler(), memory, [batch(1)], clip=clip)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))


@promise("Training", "fp16 overflows ...")
@without("unet3d.training.step.LOWEST_SCALE", 0.0)
def test_fp16_that_overflows_at_any_scale_is_stopped(network: Network) -> None:
    model, memory = network(), MemoryPolicy("cpu", torch.float16)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 1.0), memory.scaler()
    for _ in range(17):
        train_step(model, broken, optimizer, scaler, memory, [batch(1)])
    with pytest.raises(NonFiniteLoss):
        train_step(model, broken, optimizer, scaler, memory, [batch(1)])


def step_anyway(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Update whatever the gradients are."""
    optimizer.step()


@promise(
    "Training",
    "fp16 overflows",
    "the update is skipped and the scale lowered; at any scale, or in running statistics, the run stops",
)
@without("torch.amp.GradScaler.step", step_anyway)
def test_fp16_skips_the_update_and_lowers_the_scale(network: Network) -> None:
    model, before = network(), network()
    memory = MemoryPolicy("cpu", torch.float16)
    scaler = memory.scaler()
    start = scaler.get_scale()
    poisoned = batch(1)
    poisoned.image[:] = float("inf")
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    train_step(model, SegmentationLoss(ce), optimizer, scaler, memory, [poisoned])
    assert scaler.get_scale() < start
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))


@promise("Training", "fp16 overflows ...")
@without("unet3d.training.step.ranks.all_reduce_max", no)
def test_fp16_that_overflows_into_running_statistics_is_stopped(network: Network) -> None:
    """A lower scale does not make them finite, and validation would use them to the end."""
    memory = MemoryPolicy("cpu", torch.float16)
    poisoned = batch(1)
    poisoned.image[:] = float("inf")
    with pytest.raises(NonFiniteLoss, match=r"amp_dtype=bf16"):
        step(network("model=unet_tiny", "model.norm=batch"), [poisoned], memory=memory)
    with pytest.raises(NonFiniteLoss) as error:  # bf16 would not help where float32 does not
        step(network("model=unet_tiny", "model.norm=batch"), [poisoned])
    assert "nan" in str(error.value) and "amp_dtype" not in str(error.value)
