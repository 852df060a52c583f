"""Learning rates at known points; the running average of the weights: recurrence, place, use and end."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

from unet3d.base.types import Batch
from unet3d.config.compose import compose
from unet3d.config.schema import Optim
from unet3d.run import checkpoint
from unet3d.training import optim
from unet3d.training.optim import learning_rate
from unet3d.training.policy import MemoryPolicy
from unet3d.training.step import train_step


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [1, 1, 1]), ("poly", [1, 0.5**0.9, 0.01**0.9]), ("cosine", [1, 0.5, 0.00024671982])],
)
def test_first_middle_and_last_step_of_100(schedule: str, expected: list[float]) -> None:
    options = Optim(lr=2.0, schedule=schedule)
    assert [learning_rate(options, 100, s) / 2 for s in (0, 50, 99)] == pytest.approx(expected)


def test_one_cycle_rises_then_falls_to_almost_nothing() -> None:
    rates = [learning_rate(Optim(lr=1.0, schedule="one_cycle", warmup=0.2), 100, s) for s in range(100)]
    assert rates[0] == pytest.approx(1 / 25)
    assert max(rates) == rates[20] == 1
    assert rates[:21] == sorted(rates[:21]) and rates[20:] == sorted(rates[20:], reverse=True)
    assert 0 < rates[-1] < 1e-3


def test_one_cycle_without_warmup_starts_at_the_top() -> None:
    assert learning_rate(Optim(lr=1.0, schedule="one_cycle", warmup=0.0), 10, 0) == 1


def trained(updates: int, *words: str) -> tuple[nn.Sequential, torch.optim.Optimizer, list[list[torch.Tensor]]]:
    """A network, its optimizer, and the weights after each update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(1, 2, 3), nn.Conv3d(2, 2, 1))
    optimizer, weights = optim.optimizer(compose([*words]).optim, model), []
    for _ in range(updates):
        update(model, optimizer)
        weights.append([p.detach().clone() for p in model.parameters()])
    return model, optimizer, weights


def update(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 1, 4, 4, 4)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_the_average_follows_the_weights_by_its_recurrence(name: str) -> None:
    model, optimizer, weights = trained(12, f"optim={name}", "optim.average=0.5", "optim.lr=1e-4")
    expected = weights[0]
    for count, following in enumerate(weights[1:], start=2):
        decay = min(0.5, (1 + count) / (10 + count))
        expected = [torch.lerp(old, new, 1 - decay) for old, new in zip(expected, following, strict=True)]
    found = optim.averages(model, optimizer)
    assert list(found) == [name for name, _ in model.named_parameters()]
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(found.values(), expected, strict=True))


def test_the_model_has_its_averages_within_and_its_weights_afterwards() -> None:
    model, optimizer, weights = trained(3, "optim.average=0.9")
    kept = [a.clone() for a in optim.averages(model, optimizer).values()]
    with pytest.raises(KeyError), optim.averaged(model, optimizer):
        assert all(map(torch.equal, model.parameters(), kept))
        assert not any(map(torch.equal, model.parameters(), weights[-1]))
        raise KeyError
    assert all(map(torch.equal, model.parameters(), weights[-1]))


def test_without_the_option_there_is_no_average() -> None:
    model, optimizer, (weights,) = trained(1)
    assert optim.averages(model, optimizer) == {}
    with optim.averaged(model, optimizer):
        assert all(map(torch.equal, model.parameters(), weights))


@pytest.mark.parametrize("fused", ["false", "true"])
def test_an_update_that_fp16_skips_is_not_averaged(fused: str) -> None:
    model, optimizer, _ = trained(0, "optim.average=0.9", f"optim.fused={fused}")
    policy = MemoryPolicy("cpu", torch.float16)
    batch = Batch(torch.full((1, 1, 4, 4, 4), 1e30), torch.zeros(1, 4, 4, 4))  # overflows in float16
    train_step(model, lambda logits, label: logits.float().sum(), optimizer, policy.scaler(), policy, [batch])
    assert optim.averages(model, optimizer) == {}


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_fused_updates_are_those_of_the_optimizer_but_for_rounding(name: str) -> None:
    words = (f"optim={name}", "optim.lr=1e-3", "optim.average=0.5")
    model, optimizer, _ = trained(5, *words)
    other, fused, _ = trained(5, *words, "optim.fused=true")
    torch.testing.assert_close(other.state_dict(), model.state_dict())
    torch.testing.assert_close(optim.averages(other, fused), optim.averages(model, optimizer))
    optimizer.load_state_dict(deepcopy(fused.state_dict()) | {"param_groups": optimizer.state_dict()["param_groups"]})
    model.load_state_dict(other.state_dict())
    update(model, optimizer)  # goes on from the state of the fused one
    update(other, fused)
    torch.testing.assert_close(other.state_dict(), model.state_dict())


def test_an_average_goes_on_from_the_optimizers_state_to_the_bit() -> None:
    """Checkpoints have it there: as `average` of each parameter, and the updates so far as `averaged` of the group."""
    model, optimizer, _ = trained(3, "optim.average=0.9")
    state = deepcopy(optimizer.state_dict())
    assert all("average" in found for found in state["state"].values())
    assert [group["averaged"] for group in state["param_groups"]] == [3]
    resumed, other, _ = trained(0, "optim.average=0.9")
    resumed.load_state_dict(model.state_dict())
    other.load_state_dict(state)
    update(model, optimizer)
    update(resumed, other)
    pairs = zip(optim.averages(model, optimizer).values(), optim.averages(resumed, other).values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_checkpoint_holds_the_averages_storages_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv3d(8, 64, 3))
    optimizer = optim.optimizer(compose(["optim=sgd", "optim.momentum=0", "optim.average=0.9"]).optim, model)
    model(torch.ones(1, 8, 4, 4, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint.save_checkpoint(tmp_path / "without.pt", state)
    checkpoint.save_checkpoint(tmp_path / "with.pt", state | {"average": optim.averages(model, optimizer)})
    grown = (tmp_path / "with.pt").stat().st_size - (tmp_path / "without.pt").stat().st_size
    assert grown < 1000, f"{grown} bytes: the average is {8 * 64 * 27 * 4}"
