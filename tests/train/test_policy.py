"""Memory techniques change no bit: loss, gradients, buffers and evaluation output with and without."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from evenly import evenly
from guards import no, without
from promises import promise
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from unet3d.base.errors import UserError
from unet3d.model.unet import UNet3D
from unet3d.recomputing.program import Technique
from unet3d.training import checkpointing, policy
from unet3d.training.policy import MemoryPolicy

Network = Callable[..., UNet3D]
Make = Callable[[], nn.Module]


def outcome(make: Make, size: Sequence[int], starts: Sequence[int], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Losses, gradients, buffers and attributes of two passes, then the output in evaluation and a random number."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model, image, memory = make(), torch.randn(size), MemoryPolicy("cpu", dtype, Technique(tuple(starts)))
    calls, losses = Counter[nn.Module](), []
    for module in model.modules():
        if isinstance(module, nn.Conv3d):
            module.register_forward_hook(lambda module, *_: calls.update([module]))
    for _ in range(2):
        scales = memory.forward(model, image)
        loss = sum(scale.float().square().mean() for scale in (scales if isinstance(scales, tuple) else (scales,)))
        with memory.cpu_half_precision():  # as in `train_step`
            loss.backward()
        losses.append(loss.detach())
    assert max(calls.values()) == (4 if starts else 2), "each convolution is recomputed once at most, and some are"
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    attributes = [torch.as_tensor(kept) for kept in vars(model[1]).values() if isinstance(kept, int | Tensor)]
    state = [*losses, *gradients, *model.buffers(), *attributes]
    kept = [tensor.clone() for tensor in state]
    with torch.no_grad():
        return [*kept, memory.forward(model.eval(), image), torch.rand(1)]


def with_other_random_numbers(*arguments: Any, **options: Any) -> Any:
    """Checkpoint without restoring the state of the random numbers before the second forward pass."""
    return checkpoint_sequential(*arguments, **options, preserve_rng_state=False)


def on_its_own_buffers(stage: nn.Module, copies: dict[str, Tensor], arguments: tuple[Any, ...]) -> Any:
    """Call a stage on its buffers and not on copies of what they were."""
    return stage(*arguments)


@promise(
    "Resume",
    "activation checkpointing in 0 or 2 to n segments",
    "loss, gradients, buffers, output are bit-identical (on the CPU, or with `deterministic=true`)",
)
@without("unet3d.training.checkpointing.checkpoint_sequential", with_other_random_numbers, only="norm=group")
@without("unet3d.training.checkpointing.functional_call", on_its_own_buffers, only="norm=batch ")
@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        ("model=unet_tiny model.norm=instance model.dropout=0.3", torch.bfloat16),
        ("model=unet_tiny model.norm=group model.dropout=0.3", None),
        ("model=unet_tiny model.norm=batch model.dropout=0.3", torch.bfloat16),
        ("model=unet_tiny model.norm=batch_current", None),
        ("model=nnunet_hippocampus model.features=[4,8,8,8] model.norm=batch", None),
        ("model=nnunet_resenc_m model.features=[4,8,8,8] model.blocks=[1,2,1,2]", None),
    ],
    ids=str,
)
def test_checkpointing_changes_no_bit(network: Network, words: str, dtype: torch.dtype | None) -> None:
    make, size = partial(network, *words.split()), (2, 1, 17, 12, 9)
    expected = outcome(make, size, (), dtype)
    stages = len(make())
    for segments in (2, 3, stages):
        found = outcome(make, size, evenly(stages, segments), dtype)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), segments


class Stage(nn.Module):
    """A stage that computes by a function of itself and its input, and keeps what that function uses."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor], **kept: object) -> None:
        super().__init__()
        self.conv = nn.Conv3d(2, 2, 1)
        self.register_buffer("mean", torch.ones(1))
        self.act = act
        vars(self).update(kept)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, x)


def convolution() -> nn.Conv3d:
    return nn.Conv3d(2, 2, 3, padding=1)


def count(stage: Any, x: Tensor) -> Tensor:
    """A number, a tensor, and what the first call makes."""
    stage.calls += 1
    stage.scale = stage.scale + 1
    stage.first = getattr(stage, "first", stage.calls)
    return stage.conv(x * stage.scale) * stage.calls + stage.first


def draw(stage: Any, x: Tensor) -> Tensor:
    """Random numbers of Python and of NumPy."""
    return (x * random.random()).square() + np.random.random()


def halve(stage: Any, x: Tensor) -> Tensor:
    """A buffer past autograd's counts of changes, which the result depends on."""
    stage.mean.data.mul_(0.5)
    return (x * stage.mean).square()


@cache
def grid(length: int) -> Tensor:
    """A tensor made once: equal in both calls, though the second makes none."""
    return torch.linspace(0, 1, length).sin()


def remembering() -> nn.Module:
    grid.cache_clear()
    return Stage(lambda stage, x: (x * grid(6)).square())


@promise(
    "Resume",
    "stages of one's own that keep something between calls, under checkpointing",
    "buffers, attributes and global random numbers are put back for the second call: bit-identical with "
    "`spectral_norm`, counters, `RReLU`; changes within an attribute, a weight or the input are refused "
    "by name",
)
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.utils.parametrizations.spectral_norm(convolution()),
        lambda: nn.utils.spectral_norm(convolution()),
        nn.RReLU,
        lambda: Stage(count, calls=0, scale=torch.ones(1)),
        partial(Stage, draw),
        partial(Stage, halve),
        partial(Stage, lambda stage, x: torch.empty_like(x).copy_(x).square()),
        remembering,
        lambda: nn.Sequential(convolution(), nn.ReLU(inplace=True), nn.Dropout3d()),
    ],
    ids=["spectral_norm", "old spectral_norm", "RReLU", "counter", "chance", "buffer", "empty", "memo", "in place"],
)
def test_what_a_stage_keeps_is_put_back_for_its_second_call(make: Make) -> None:
    """Of a network of one's own: all is as without checkpointing, to the bit."""
    pair = (
        outcome(lambda: nn.Sequential(convolution(), make(), convolution(), convolution()), (2, 2, 6, 6, 6), starts)
        for starts in ((), (0, 3))
    )
    assert all(torch.equal(a, b) for a, b in zip(*pair, strict=True))


def pointing() -> nn.Module:
    """A buffer that an attribute holds, too."""
    stage = Stage(lambda stage, x: stage.conv(x * stage.all["mean"].add_(1)))
    stage.all = {"mean": stage.mean}
    return stage


def clamp(stage: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        stage.conv.weight.mul_(0.9)
    return stage.conv(x)


def decay(stage: Any, x: Tensor) -> Tensor:
    """A weight that is written to past autograd's counts of changes."""
    stage.conv.weight.data.mul_(0.9)
    return stage.conv(x).square()


def nest(stage: Any, x: Tensor) -> Tensor:
    """A list within a list."""
    stage.seen[0].append(1)
    return stage.conv(x + len(stage.seen[0])).square()


def scale(stage: Any, x: Tensor) -> Tensor:
    """The state is in the last operation alone, which backward does not run again: it needs the factor alone."""
    return stage.conv(x) * torch.tensor(float(next(stage.factors)))


@promise("Resume", "stages of one's own ...")
@promise(
    "Resume",
    "a state that is not seen there: in iterators, closures, deeper than one level, written through `.data`",
    "in a network's first two passes a few numbers of each operation that backward runs again are "
    "compared with forward's; a difference is refused with stage and operation, before the update. Not "
    "seen: a state that matters later, or in none of these numbers; one that picks a view, or gives a "
    "NumPy array, for a segment's last operation, which is not run again; on a GPU differences below 2 %",
)
@without("unet3d.training.checkpointing.is_compared", no, only="unseen")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Stage(lambda s, x: x * len(s.seen.append(1) or s.seen), seen=[]), "Stage: seen of Stage"),
        (lambda: nn.Sequential(Stage(lambda s, x: x * s.scale.add_(1), scale=torch.ones(1))), r"\.0: scale of Stage"),
        (lambda: Stage(lambda s, x: x * s.rng.random(), rng=np.random.default_rng(0)), "rng of Stage"),
        (lambda: Stage(lambda s, x: x * torch.rand(1, generator=s.rng), rng=torch.Generator()), "rng of Stage"),
        (pointing, "all of Stage"),
        (partial(Stage, clamp), "weight of Conv3d"),
        (lambda: nn.ReLU(inplace=True), r"\bReLU\b.*inplace=False"),
        (lambda: Stage(lambda s, x: s.conv(x * next(s.factors)).square(), factors=itertools.count(1)), "stage Stage"),
        (lambda: Stage(lambda s, x: (s.conv(x) * s.call()).square(), call=itertools.count(1).__next__), "stage Stage"),
        (lambda: Stage(nest, seen=[[]]), "stage Stage"),
        (partial(Stage, decay), "stage Stage"),
        (lambda: Stage(scale, factors=itertools.count(1)), "stage Stage"),
    ],
    ids=[
        *("list", "tensor", "NumPy", "torch", "buffer", "weight", "in place"),
        *("unseen iterator", "unseen closure", "unseen in a list", "unseen write", "unseen in the last operation"),
    ],
)
def test_what_cannot_be_put_back_or_computes_other_values_again_is_refused_by_name(
    make: Make, named: str, dtype: torch.dtype | None
) -> None:
    with pytest.raises(UserError, match=rf"^ckpt\b[^\n]*{named}[^\n]*ckpt=0"):
        outcome(lambda: nn.Sequential(convolution(), make(), convolution()), (1, 2, 6, 6, 6), (0, 1, 2), dtype)


@promise("Resume", "another number of threads ...")
def test_other_threads_change_rounding_alone(network: Network, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(torch.cat([tensor.flatten() for tensor in outcome(network, (2, 1, 16, 16, 16), ())]))
    assert (found[0] - found[1]).norm() < 1e-4 * found[0].norm()


@promise("Resume", "stages of one's own ...")
def test_hooks_of_the_network_are_refused() -> None:
    model = nn.Sequential(convolution())
    model.register_forward_hook(lambda module, inputs, output: output * 2)
    with pytest.raises(UserError, match=r"^ckpt\b.*\bSequential\b.*\bhooks.*ckpt=0"):
        MemoryPolicy(technique=Technique((0,))).forward(model, torch.randn(1, 2, 6, 6, 6))


@promise("Resume", "a state that is ...")
def test_calls_are_compared_in_the_first_two_passes_alone() -> None:
    """Later ones run no operation more."""
    model, image = nn.Sequential(convolution()), torch.ones(1)
    assert [checkpointing.is_compared(model, image) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize(("name", "scales"), [(None, False), ("bf16", False), ("fp16", True)])
def test_mixed_precision_computes_in_its_dtype_and_only_fp16_scales_the_loss(name: str | None, scales: bool) -> None:
    dtype = None if name is None else policy.amp_dtype(name, "cpu")
    memory = MemoryPolicy("cpu", dtype)
    assert memory.forward(convolution(), torch.randn(1, 2, 8, 8, 8)).dtype is (dtype or torch.float32)
    assert memory.scaler().is_enabled() == scales


def test_auto_is_bf16_unless_a_gpu_that_is_present_emulates_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert policy.amp_dtype("auto", "cpu") is policy.amp_dtype("auto", "cuda") is torch.bfloat16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert policy.amp_dtype("auto", "cuda") is torch.float16
