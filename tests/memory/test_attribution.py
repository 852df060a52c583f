"""Every operation is laid at the right module's door, in forward, in backward and in recomputation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from evenly import evenly
from torch.utils._python_dispatch import TorchDispatchMode

from unet3d.memory.ledger import Crossing, ModuleScope, ModuleTracker
from unet3d.model.unet import UNet3D
from unet3d.train.policy import MemoryPolicy

Network = Callable[..., UNet3D]


class Log(TorchDispatchMode):
    """(operation, place) of all that is dispatched."""

    def __init__(self, tracker: ModuleTracker) -> None:
        super().__init__()
        self.tracker = tracker
        self.lines: list[tuple[str, ModuleScope]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.lines.append((str(func).split(".")[1], self.tracker.here()))
        return result

    def places(self, operation: str) -> list[ModuleScope]:
        return [place for name, place in self.lines if name == operation]


def step(model: UNet3D, ckpt: int) -> tuple[Log, list[Crossing]]:
    crossings: list[Crossing] = []
    tracker = ModuleTracker(model, crossings.append)
    log = Log(tracker)
    tracker.open()
    with log:
        tracker.mark("forward")
        logits = MemoryPolicy(segment_starts=evenly(6, ckpt)).forward(model, torch.ones(1, 1, 16, 16, 16))
        tracker.mark("loss")
        loss = logits.square().sum()
        tracker.mark("backward")
        loss.backward()
        tracker.mark("step")
        torch.zeros(1) + 1
    tracker.close()
    return log, crossings


def convolutions(model: UNet3D) -> list[str]:
    kinds = (torch.nn.Conv3d, torch.nn.ConvTranspose3d)
    return [path for path, module in model.named_modules() if isinstance(module, kinds)]


@pytest.mark.parametrize("ckpt", [0, 2, 4])
def test_each_convolution_runs_forward_and_backward_in_its_own_module(network: Network, ckpt: int) -> None:
    model = network("model=unet_tiny")
    log, _ = step(model, ckpt)
    paths = convolutions(model)
    forward = [place.module for place in log.places("convolution") if not place.is_recomputed]
    assert forward == paths
    backward = log.places("convolution_backward")
    assert [place.module for place in backward] == paths[::-1]
    assert not any(place.is_recomputed for place in backward)


def test_recomputation_is_told_from_the_first_pass(network: Network) -> None:
    model = network("model=unet_tiny")
    paths = convolutions(model)
    again = {
        ckpt: [place.module for place in step(model, ckpt)[0].places("convolution") if place.is_recomputed]
        for ckpt in (0, 2)
    }
    assert again[0] == []
    assert 0 < len(again[2]) < len(paths), "the last segment is kept"
    assert again[2] == [path for path in paths if path in again[2]], "in the order of the first pass"


def test_what_belongs_to_no_module_belongs_to_its_phase(network: Network) -> None:
    log, _ = step(network("model=unet_tiny"), 0)
    places = dict(log.lines)
    assert places["sum"].module == "loss" == log.places("expand")[-1].module, "the loss, and its gradient"
    assert log.lines[-1] == ("add", ModuleScope("step"))
    assert [place.module for place in log.places("cat")] == ["up1", "up2"]


def test_leaf_modules_are_entered_left_and_come_back_in_reverse(network: Network) -> None:
    model = network("model=unet_tiny")
    _, crossings = step(model, 0)
    leaves = [path for path, module in model.named_modules() if not list(module.children())]
    entered = [c.module for c in crossings if c.hook == "pre"]
    assert sorted(entered) == sorted(leaves)
    assert [c.module for c in crossings if c.hook == "fwd"] == entered
    assert [c.module for c in crossings if c.hook == "bwd"] == entered[::-1]
    assert crossings[0] == Crossing("inc.block.conv1.conv", "Conv3d", "pre")


def test_a_recomputation_that_is_broken_off_leaves_every_module(network: Network) -> None:
    """Checkpointing stops a recomputation once it has all it needs: with an exception, in the middle of modules."""
    _, crossings = step(network("model=unet_tiny"), 2)
    assert sum(c.hook == "pre" for c in crossings) == sum(c.hook == "fwd" for c in crossings)


def test_it_leaves_the_model_as_it_was(network: Network) -> None:
    model = network("model=unet_tiny")
    step(model, 0)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_following_changes_no_bit(network: Network) -> None:
    """Loss and gradients with hooks on are those without."""
    found = []
    for follow in (False, True):
        model = network("model=unet_tiny")
        tracker = ModuleTracker(model)
        if follow:
            tracker.open()
        model(torch.ones(1, 1, 16, 16, 16)).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
