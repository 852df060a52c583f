"""The running average of the weights: its recurrence, its place in the optimizer's state, its use and its end."""

from pathlib import Path

import pytest
import torch
from torch import nn

from unet3d.compose import compose
from unet3d.train import checkpoint, optim
from unet3d.train.policy import MemoryPolicy
from unet3d.train.step import train_step
from unet3d.types import Batch


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(1, 2, 3), nn.Conv3d(2, 2, 1))


@pytest.mark.parametrize("optim", ["adamw", "adam", "sgd"])
def test_it_follows_the_weights_by_its_recurrence(optim: str) -> None:
    model = net()
    optimizer = optim.optimizer(compose([f"optim={optim}", "optim.average=0.5", "optim.lr=1e-4"]).optim, model)
    expected: list[torch.Tensor] = []
    for count in range(1, 13):
        model(torch.ones(1, 1, 4, 4, 4)).square().sum().backward()
        optimizer.step()
        decay = min(0.5, (1 + count) / (10 + count))
        weights = [p.detach().clone() for p in model.parameters()]
        pairs = zip(expected or weights, weights, strict=True)
        expected = [torch.lerp(old, new, 1 - decay) for old, new in pairs]
    found = optim.averages(model, optimizer)
    assert list(found) == [name for name, _ in model.named_parameters()]
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(found.values(), expected, strict=True))


def test_it_is_used_within_and_left_behind() -> None:
    model = net()
    optimizer = optim.optimizer(compose(["optim.average=0.9"]).optim, model)
    for _ in range(3):
        model(torch.ones(1, 1, 4, 4, 4)).square().sum().backward()
        optimizer.step()
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    kept = {name: a.clone() for name, a in optim.averages(model, optimizer).items()}
    with pytest.raises(KeyError), optim.averaged(model, optimizer):
        assert all(torch.equal(p, kept[name]) for name, p in model.named_parameters())
        assert not any(torch.equal(p, own[name]) for name, p in model.named_parameters())
        raise KeyError
    assert all(torch.equal(p, own[name]) for name, p in model.named_parameters())


def test_without_the_option_there_is_none() -> None:
    model = net()
    optimizer = optim.optimizer(compose([]).optim, model)
    model(torch.ones(1, 1, 4, 4, 4)).sum().backward()
    optimizer.step()
    assert optim.averages(model, optimizer) == {}


def test_an_update_that_fp16_skips_is_not_averaged() -> None:
    model = net()
    policy = MemoryPolicy("cpu", torch.float16)
    optimizer, scaler = optim.optimizer(compose(["optim.average=0.9"]).optim, model), policy.scaler()
    image = torch.full((1, 1, 4, 4, 4), 1e30)  # overflows in float16
    batch = Batch(image, torch.zeros(1, 4, 4, 4))
    train_step(model, lambda logits, label: logits.float().sum(), optimizer, scaler, policy, [batch])
    assert optim.averages(model, optimizer) == {}


def test_in_a_snapshot_it_lies_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv3d(8, 64, 3))
    optimizer = optim.optimizer(compose(["optim=sgd", "optim.momentum=0", "optim.average=0.9"]).optim, model)
    model(torch.ones(1, 8, 4, 4, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint.save_snapshot(tmp_path / "without.pt", state)
    checkpoint.save_snapshot(tmp_path / "with.pt", state | {"average": optim.averages(model, optimizer)})
    grown = (tmp_path / "with.pt").stat().st_size - (tmp_path / "without.pt").stat().st_size
    assert grown < 1000, f"{grown} bytes: the average is {8 * 64 * 27 * 4}"
