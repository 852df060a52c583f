"""Every operation is attributed to its module, in forward, in backward and in recomputation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from evenly import evenly
from torch.utils._python_dispatch import TorchDispatchMode

from unet3d.memory.ledger import ModuleScope, ModuleTracker
from unet3d.model.unet import UNet3D
from unet3d.recomputing import state
from unet3d.recomputing.prepare import prepare
from unet3d.recomputing.program import Technique, by_plan
from unet3d.training.policy import MemoryPolicy

Network = Callable[..., UNet3D]


class Log(state.Observer, TorchDispatchMode):
    """(operation, scope) of all that is dispatched."""

    def __init__(self, tracker: ModuleTracker) -> None:
        super().__init__()
        self.tracker = tracker
        self.lines: list[tuple[str, ModuleScope]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.lines.append((str(func).split(".")[1], self.tracker.scope()))
        return result

    def scopes(self, operation: str) -> list[ModuleScope]:
        return [scope for name, scope in self.lines if name == operation]


def step(model: UNet3D, ckpt: int) -> Log:
    tracker = ModuleTracker(model)
    log = Log(tracker)
    tracker.open()
    with log:
        tracker.mark("forward")
        logits = MemoryPolicy(technique=Technique(evenly(6, ckpt))).forward(model, torch.ones(1, 1, 16, 16, 16))
        tracker.mark("loss")
        loss = logits.square().sum()
        tracker.mark("backward")
        loss.backward()
        tracker.mark("step")
        torch.zeros(1) + 1
    tracker.close()
    return log


def convolutions(model: UNet3D) -> list[str]:
    kinds = (torch.nn.Conv3d, torch.nn.ConvTranspose3d)
    return [path for path, module in model.named_modules() if isinstance(module, kinds)]


@pytest.mark.parametrize("ckpt", [0, 2, 4])
def test_each_convolution_runs_forward_and_backward_in_its_own_module(network: Network, ckpt: int) -> None:
    model = network("model=unet_tiny")
    log = step(model, ckpt)
    paths = convolutions(model)
    forward = [scope.module for scope in log.scopes("convolution") if not scope.is_recomputed]
    assert forward == paths
    backward = log.scopes("convolution_backward")
    assert [scope.module for scope in backward] == paths[::-1]
    assert not any(scope.is_recomputed for scope in backward)


@pytest.mark.parametrize("plan", ["lean", "tiles"])
def test_in_tiles_each_operation_belongs_to_the_layer_that_is_made(network: Network, plan: str) -> None:
    """A map's layer, whatever its rows are made from again; in backward the layer whose gradient is used up."""
    model = network("model=unet_tiny", "model.features=[4,8]").train()
    image = torch.ones(1, 1, 16, 16, 16)
    program = by_plan(prepare(model, image, None, on_cpu=True), plan)
    tracker = ModuleTracker(model)
    log = Log(tracker)
    tracker.open()
    with log:
        tracker.mark("forward")
        logits = MemoryPolicy(technique=Technique(program=program)).forward(model, image)
        tracker.mark("loss")
        loss = logits.square().sum()
        tracker.mark("backward")
        loss.backward()
    tracker.close()
    made = [path for path in convolutions(model) if not path.endswith(".up")]
    forward = [scope for scope in log.scopes("convolution") if not scope.is_recomputed]
    assert {scope.module for scope in forward} == {*made}
    assert all(scope.is_in_tiles for scope in forward)
    backward = [scope.module for scope in log.scopes("convolution_backward")]
    assert {*backward} == {*made}
    assert backward[0] == "outc.conv"
    again = [scope for scope in log.scopes("convolution") if scope.is_recomputed]
    assert len({scope.module for scope in again}) >= (program.schedule.work > 1.5)
    assert tracker is not state.observer, "closed, it observes no more"


def test_a_recomputed_operation_is_marked_as_such(network: Network) -> None:
    model = network("model=unet_tiny")
    paths = convolutions(model)
    recomputed = {
        ckpt: [scope.module for scope in step(model, ckpt).scopes("convolution") if scope.is_recomputed]
        for ckpt in (0, 2)
    }
    assert recomputed[0] == []
    assert 0 < len(recomputed[2]) < len(paths), "the last segment is kept"
    assert recomputed[2] == [path for path in paths if path in recomputed[2]], "in the order of the first pass"


def test_an_operation_outside_of_modules_belongs_to_its_phase(network: Network) -> None:
    log = step(network("model=unet_tiny"), 0)
    scopes = dict(log.lines)
    assert scopes["sum"].module == "loss" == log.scopes("expand")[-1].module, "the loss, and its gradient"
    assert log.lines[-1] == ("add", ModuleScope("step"))
    assert [scope.module for scope in log.scopes("cat")] == ["up1", "up2"]


def test_after_closing_the_model_has_no_hooks(network: Network) -> None:
    """Also after recomputations, which checkpointing ends with an exception in the middle of modules."""
    model = network("model=unet_tiny")
    step(model, 2)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


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
