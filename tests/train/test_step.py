"""The one training step: accumulation, clipping, what it refuses. Its optimizer: rates, and the weights' average."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from calls import Calls
from guards import no, without, yes
from promises import promise
from torch import Tensor, nn

from unet3d.base.errors import NonFiniteLoss
from unet3d.base.types import Batch
from unet3d.config.compose import compose
from unet3d.config.schema import Optim
from unet3d.model.unet import UNet3D
from unet3d.run import checkpoint
from unet3d.training import optim
from unet3d.training.losses import SegmentationLoss, ce
from unet3d.training.policy import MemoryPolicy
from unet3d.training.step import LossFunction, Mark, StepResult, ignore_mark, train_step

Network = Callable[..., UNet3D]
FLOAT32, BF16, FP16 = (MemoryPolicy("cpu", dtype) for dtype in (None, torch.bfloat16, torch.float16))
CE = SegmentationLoss(ce)


def batch(samples: int = 1, value: float = 0.0) -> Batch:
    """Return random images and labels, the first voxel with this value."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(samples, 1, 8, 8, 8, generator=generator)
    image[0, 0, 0, 0, 0] = value
    return Batch(image, torch.randint(0, 3, (samples, 8, 8, 8), generator=generator).short(), ("case-7",))


def step(
    model: nn.Module,
    *batches: Batch,
    loss: LossFunction = CE,
    memory: MemoryPolicy = FLOAT32,
    clip: float | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    mark: Mark = ignore_mark,
) -> StepResult:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 1.0)
    return train_step(model, loss, optimizer, scaler or memory.scaler(), memory, batches, mark, clip)


def test_accumulated_halves_equal_the_whole(network: Network) -> None:
    """Instance norm knows no batch, so two micro-batches of one are a batch of two. Each phase is marked."""
    whole, halves, both, marks = network(), network(), batch(2), []
    parts = [Batch(both.image[i : i + 1], both.label[i : i + 1]) for i in range(2)]
    assert step(whole, both).loss == pytest.approx(step(halves, *parts, mark=marks.append).loss, abs=1e-6)
    assert marks == [*("data", "forward", "loss", "backward") * 2, "step", "end"]
    torch.testing.assert_close(whole.state_dict(), halves.state_dict(), atol=1e-5, rtol=1e-5)
    assert all(p.grad is None for p in halves.parameters())


@pytest.mark.parametrize(("memory", "more"), [(FLOAT32, 0), (FP16, 1)], ids=["float32", "fp16"])
def test_a_step_waits_once_for_the_device_however_many_micro_batches(
    network: Network, memory: MemoryPolicy, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All numbers are read together; fp16's scaler asks once more, whether a gradient overflowed."""
    read, lists, calls = Tensor.tolist, list[int](), Calls()
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: lists.append(tensor.numel()) or read(tensor))
    with calls:
        step(network(), *[batch()] * 3, memory=memory, clip=1.0)
    assert (lists, calls.counts[torch.ops.aten._local_scalar_dense.default]) == ([4 + more], more)


def test_a_loss_beyond_the_range_of_half_precision_weights_is_a_number() -> None:
    one = batch()._replace(image=torch.zeros(1, 1, 2, 2, 2, dtype=torch.half))
    result = step(nn.Conv3d(1, 3, 1).half(), one, loss=lambda logits, label: logits.float().sum() + 1e6)
    assert result.loss == pytest.approx(1e6, abs=100)


def test_clipping_bounds_the_update_and_reports_the_norm_before(network: Network) -> None:
    model, before = network(), network()
    assert step(model, batch(), clip=1e-3).grad_norm > 1e-3
    moved = sum((a - b).square().sum() for a, b in zip(model.parameters(), before.parameters(), strict=True))
    assert float(moved.detach()) ** 0.5 == pytest.approx(1e-3, rel=1e-2)


def broken(logits: Tensor, label: Tensor) -> Tensor:
    """A finite loss with a gradient that is not."""
    logits = logits.clone()
    logits.register_hook(lambda gradient: gradient * float("nan"))
    return CE(logits, label)


@promise("Training", "a loss or gradient ...")
@without("unet3d.training.step.math.isfinite", yes, only="float32")
@pytest.mark.parametrize(
    ("value", "loss", "memory"),
    [(float("nan"), CE, FLOAT32), (float("nan"), CE, BF16), (0.0, broken, FLOAT32)],
    ids=["loss in float32", "loss in bf16", "gradient in float32"],
)
def test_a_non_finite_loss_or_gradient_stops_before_the_update(
    network: Network, value: float, loss: LossFunction, memory: MemoryPolicy
) -> None:
    model, before = network(), network()
    with pytest.raises(NonFiniteLoss, match=r"\bnan\b.*\bcase-7\b"):
        step(model, batch(value=value), loss=loss, memory=memory, clip=12.0)
    assert all(map(torch.equal, model.parameters(), before.parameters()))


def step_anyway(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Update whatever the gradients are."""
    optimizer.step()


@promise(
    "Training",
    "fp16 overflows",
    "the update is skipped and the scale lowered; at any scale, or in running statistics, the run stops",
)
@without("torch.amp.GradScaler.step", step_anyway)
@without("unet3d.training.step.LOWEST_SCALE", 0.0)
def test_fp16_that_overflows_skips_the_update_and_lowers_the_scale_to_the_lowest(network: Network) -> None:
    model, before, scaler = network(), network(), FP16.scaler()
    scales = [step(model, batch(), loss=broken, memory=FP16, scaler=scaler).scale for _ in range(17)]
    assert scales == [2.0**exponent for exponent in range(16, -1, -1)]
    assert all(map(torch.equal, model.parameters(), before.parameters()))
    with pytest.raises(NonFiniteLoss):
        step(model, batch(), loss=broken, memory=FP16, scaler=scaler)


@promise("Training", "fp16 overflows ...")
@without("unet3d.training.step.ranks.all_reduce_max", no)
def test_fp16_that_overflows_into_running_statistics_is_stopped(network: Network) -> None:
    """A lower scale does not make them finite, and validation would use them to the end."""
    poisoned = batch(value=float("inf"))
    with pytest.raises(NonFiniteLoss, match=r"amp_dtype=bf16"):
        step(network("model=unet_tiny", "model.norm=batch"), poisoned, memory=FP16)
    with pytest.raises(NonFiniteLoss, match=r"^((?!amp_dtype).)*$"):  # bf16 would not help where float32 does not
        step(network("model=unet_tiny", "model.norm=batch"), poisoned)


@pytest.mark.parametrize(
    ("schedule", "warmup", "rates"),
    [
        ("constant", 0.2, [1, 1, 1, 1]),
        ("poly", 0.2, [1, 0.9**0.9, 0.5**0.9, 0.01**0.9]),
        ("cosine", 0.2, [1, 0.97552826, 0.5, 0.00024671982]),
        ("one_cycle", 0.2, [0.04, 0.52, 0.69134172, 0.00038548188]),
        ("one_cycle", 0.1, [0.04, 1, 0.58682409, 0.00030458650]),
        ("one_cycle", 0.0, [1, 0.97552826, 0.5, 0.00024671982]),
    ],
)
def test_rates_of_the_first_later_and_last_step_of_100(schedule: str, warmup: float, rates: list[float]) -> None:
    options = Optim(lr=2.0, schedule=schedule, warmup=warmup)
    assert [optim.learning_rate(options, 100, s) / 2 for s in (0, 10, 50, 99)] == pytest.approx(rates)


def trained(updates: int, *words: str) -> tuple[nn.Conv3d, torch.optim.Optimizer, list[Tensor]]:
    """A network, its optimizer, and the first weight after each update."""
    torch.manual_seed(0)
    model = nn.Conv3d(1, 3, 3, padding=1)
    optimizer, weights = optim.optimizer(compose([*words, "optim.average=0.5"]).optim, model), []
    for _ in range(updates):
        step(model, batch(), optimizer=optimizer)
        weights.append(model.weight.detach().clone())
    return model, optimizer, weights


def test_the_average_follows_the_weights_by_its_recurrence() -> None:
    model, optimizer, (expected, *following) = trained(12)
    for count, weight in enumerate(following, start=2):
        expected = torch.lerp(expected, weight, 1 - min(0.5, (1 + count) / (10 + count)))
    averages = optim.averages(model, optimizer)
    assert [*averages] == ["weight", "bias"]
    torch.testing.assert_close(averages["weight"], expected)
    with pytest.raises(KeyError), optim.averaged(model, optimizer):
        assert torch.equal(model.weight, averages["weight"])
        raise KeyError
    assert torch.equal(model.weight, following[-1])


@pytest.mark.parametrize("fused", ["false", "true"])
def test_an_update_that_fp16_skips_is_not_averaged(fused: str) -> None:
    model, optimizer, _ = trained(0, f"optim.fused={fused}")
    step(model, batch(), loss=broken, memory=FP16, optimizer=optimizer)
    assert optim.averages(model, optimizer) == {}


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_fused_optimizer_does_the_same_but_for_rounding_and_each_goes_on_from_the_other(name: str) -> None:
    model, optimizer, _ = trained(5, f"optim={name}")
    other, fused, _ = trained(5, f"optim={name}", "optim.fused=true")
    for _ in range(2):
        torch.testing.assert_close(other.state_dict(), model.state_dict())
        torch.testing.assert_close(optim.averages(other, fused), optim.averages(model, optimizer))
        state = deepcopy(fused.state_dict()) | {"param_groups": optimizer.state_dict()["param_groups"]}
        optimizer.load_state_dict(state)
        step(model, batch(), optimizer=optimizer)
        step(other, batch(), optimizer=fused)


def test_a_checkpoint_holds_the_averages_storages_once(tmp_path: Path) -> None:
    model, optimizer, _ = trained(1)
    state = {"optimizer": optimizer.state_dict(), "average": optim.averages(model, optimizer)}
    checkpoint.save_checkpoint(tmp_path / "shared", state)
    checkpoint.save_checkpoint(tmp_path / "twice", deepcopy(state["average"]) | state)
    shared, twice = ((tmp_path / name).stat().st_size for name in ("shared", "twice"))
    assert twice - shared >= sum(average.nbytes for average in state["average"].values())
