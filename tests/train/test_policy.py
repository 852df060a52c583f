"""Memory techniques change no bit: loss, gradients, buffers and evaluation output with and without."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from evenly import evenly
from guards import no, without
from promises import promise
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from unet3d.base.errors import UserError
from unet3d.base.types import Batch
from unet3d.memory.meter import open_meter
from unet3d.model.unet import UNet3D
from unet3d.recomputing.program import Technique
from unet3d.training import checkpointing, policy
from unet3d.training.losses import SegmentationLoss, ce, dice_ce
from unet3d.training.policy import MemoryPolicy
from unet3d.training.step import train_step

Network = Callable[..., UNet3D]


def outcome(model: UNet3D, memory: MemoryPolicy) -> tuple[list[Tensor], list[int]]:
    """(losses, gradients, buffers, evaluation output) of two passes, and the calls of each convolution."""
    torch.manual_seed(1)
    image, label = torch.randn(2, 1, 17, 12, 9), torch.randint(0, 3, (2, 17, 12, 9))
    calls = [_count_calls(m) for m in model.modules() if isinstance(m, nn.Conv3d | nn.ConvTranspose3d)]
    losses = []
    for _ in range(2):
        loss = SegmentationLoss(dice_ce)(memory.forward(model, image), label)
        with memory.cpu_half_precision():  # as in `train_step`
            loss.backward()
        losses.append(loss.detach())
    counts = [len(c) for c in calls]
    model.eval()
    with torch.no_grad():
        output = memory.forward(model, image)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return [*losses, *gradients, *model.buffers(), output], counts


def _count_calls(module: nn.Module) -> list[int]:
    calls: list[int] = []
    module.register_forward_hook(lambda *_: calls.append(1))
    return calls


def with_other_random_numbers(*arguments: Any, **options: Any) -> Any:
    """Checkpoint without restoring the state of the random numbers before the second forward pass."""
    return checkpoint_sequential(*arguments, **options, preserve_rng_state=False)


@promise(
    "Resume",
    "activation checkpointing in 0 or 2 to n segments",
    "loss, gradients, buffers, output are bit-identical (on the CPU, or with `deterministic=true`)",
)
@without("unet3d.training.checkpointing.checkpoint_sequential", with_other_random_numbers, only="group-0.3-None")
@pytest.mark.parametrize(
    ("norm", "dropout", "dtype"),
    [
        ("instance", 0.0, None),
        ("instance", 0.3, torch.bfloat16),
        ("group", 0.3, None),
        ("group", 0.0, torch.bfloat16),
        ("batch", 0.0, None),
        ("batch", 0.3, torch.bfloat16),
        ("batch_current", 0.3, None),
        ("batch_current", 0.0, torch.bfloat16),
    ],
    ids=str,
)
def test_checkpointing_changes_no_bit(network: Network, norm: str, dropout: float, dtype: torch.dtype | None) -> None:
    overrides = ("model=unet_tiny", f"model.norm={norm}", f"model.dropout={dropout}")
    expected, _ = outcome(network(*overrides), MemoryPolicy("cpu", dtype))
    for ckpt in (2, 3, 6):
        found, calls = outcome(network(*overrides), MemoryPolicy("cpu", dtype, Technique(evenly(6, ckpt))))
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), ckpt
        assert max(calls) <= 4, "two steps: each convolution runs at most twice in each"
        assert max(calls) > 2, "nothing was recomputed"


@pytest.mark.parametrize(
    "overrides",
    [
        ("model=nnunet_hippocampus", "model.features=[4,8,8,8]", "model.norm=batch"),
        ("model=nnunet_resenc_m", "model.features=[4,8,8,8]", "model.blocks=[1,2,1,2]"),
    ],
    ids=" ".join,
)
def test_checkpointing_changes_no_bit_with_deep_supervision(network: Network, overrides: tuple[str, ...]) -> None:
    expected, _ = outcome(network(*overrides), MemoryPolicy())
    found, _ = outcome(network(*overrides), MemoryPolicy(technique=Technique(evenly(8, 8))))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def on_its_own_buffers(stage: nn.Module, copies: dict[str, Tensor], arguments: tuple[Any, ...]) -> Any:
    """Call a stage on its buffers and not on copies of what they were."""
    return stage(*arguments)


@promise("Resume", "activation checkpointing in 0 ...")
@without("unet3d.training.checkpointing.functional_call", on_its_own_buffers)
def test_only_copies_of_running_statistics_see_a_batch_twice(network: Network) -> None:
    batches_seen = []
    for segment_starts in ((), evenly(6, 6)):
        model = network("model=unet_tiny", "model.norm=batch")
        outcome(model, MemoryPolicy(technique=Technique(segment_starts)))
        batches_seen.append(model.inc.block.conv1.norm.num_batches_tracked.item())
    assert batches_seen == [2, 2]


class Counting(nn.Module):
    """State in attributes: a number, a tensor, and what the first call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.scale, self.conv = 0, torch.ones(1), nn.Conv3d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.scale = self.scale + 1
        self.first = getattr(self, "first", self.calls)
        return self.conv(x * self.scale) * self.calls + self.first


class Chance(nn.Module):
    """Random numbers of Python and of NumPy."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * random.random()).square() + np.random.random()


class Averaging(nn.Module):
    """A buffer past autograd's counts of changes, which the result depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data.mul_(0.5)
        return (x * self.mean).square()


def convolution() -> nn.Conv3d:
    return nn.Conv3d(2, 2, 3, padding=1)


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
        lambda: nn.utils.parametrizations.weight_norm(convolution()),
        lambda: nn.BatchNorm3d(2, momentum=None),
        nn.RReLU,
        Counting,
        Chance,
        Averaging,
    ],
    ids=["spectral_norm", "old spectral_norm", "weight_norm", "batch", "RReLU", "counter", "chance", "buffer"],
)
def test_what_a_stage_keeps_is_put_back_for_its_second_call(make: Callable[[], nn.Module]) -> None:
    """Of a network of one's own: gradients, buffers and attributes are those without checkpointing, to the bit."""
    found = []
    for segment_starts in ((), (0, 3)):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model, image = nn.Sequential(convolution(), make(), convolution(), convolution()), torch.randn(2, 2, 6, 6, 6)
        for _ in range(2):
            MemoryPolicy(technique=Technique(segment_starts)).forward(model, image).square().sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        attributes = [getattr(model[1], name, torch.zeros(1)) for name in ("calls", "scale", "first")]
        found.append([*gradients, *model.buffers(), *map(torch.as_tensor, attributes), torch.rand(1)])
    assert len(found[0]) > 6 and all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Listing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1.0)
        return x * len(self.seen)


class Filling(Counting):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.add_(1)


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.rng = torch.Generator(), np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.rng.random()


class DrawingByTorch(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(1, generator=self.generator)


class Pointing(Counting):
    """A buffer that an attribute holds, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.all = {"count": self.count}

    def forward(self, x: Tensor) -> Tensor:
        self.all["count"] += 1
        return self.conv(x * self.count)


class Clamping(Counting):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.conv.weight.mul_(0.9)
        return self.conv(x)


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Identity(), convolution(), convolution())
    model.register_forward_hook(lambda module, inputs, output: output * 2)
    return model


@promise("Resume", "stages of one's own ...")
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: nn.Sequential(Listing(), convolution(), convolution()), r"Listing\b.*\bseen"),
        (lambda: nn.Sequential(nn.Sequential(Filling()), convolution(), convolution()), r"\.0\b.*\bscale of Filling"),
        (lambda: nn.Sequential(Drawing(), convolution(), convolution()), r"\brng of Drawing"),
        (lambda: nn.Sequential(DrawingByTorch(), convolution(), convolution()), r"\bgenerator of DrawingByTorch"),
        (lambda: nn.Sequential(Pointing(), convolution(), convolution()), r"\ball of Pointing"),
        (lambda: nn.Sequential(Clamping(), convolution(), convolution()), r"weight of Conv3d"),
        (lambda: nn.Sequential(convolution(), nn.ReLU(inplace=True), convolution()), r"\bReLU\b.*\binplace=False"),
        (hooked, r"\bSequential\b.*\bhooks"),
    ],
    ids=["list", "tensor", "generator", "generator of torch", "buffer", "weight", "in place", "hook"],
)
def test_what_cannot_be_put_back_is_refused_by_name(make: Callable[[], nn.Module], named: str) -> None:
    image = torch.randn(1, 2, 6, 6, 6)
    with pytest.raises(UserError, match=rf"^ckpt\b.*{named}.*ckpt=0"):
        MemoryPolicy(technique=Technique((0, 1, 2))).forward(make(), image)


class Iterating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factors, self.conv = iter(range(1, 100)), convolution()

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x * next(self.factors)).square()


class Closing(Counting):
    """A count in the closure of a function."""

    def __init__(self) -> None:
        super().__init__()
        calls: list[int] = []

        def count() -> int:
            calls.append(1)
            return len(calls)

        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return (self.conv(x) * self.count()).square()


class Nesting(Counting):
    """A list within a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = [[]]

    def forward(self, x: Tensor) -> Tensor:
        self.seen[0].append(1)
        return self.conv(x + len(self.seen[0])).square()


class Decaying(Counting):
    """A weight that is written to past autograd's counts of changes."""

    def forward(self, x: Tensor) -> Tensor:
        self.conv.weight.data.mul_(0.9)
        return self.conv(x).square()


class Scaling(Iterating):
    """The state is in the last operation alone, which backward does not run again: it needs the factor alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * torch.tensor(float(next(self.factors)))


class Remembering(nn.Module):
    """A tensor made once, in a dict that is no attribute: equal in both calls, though the second makes none."""

    grids: ClassVar[dict[Any, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        if x.shape not in self.grids:
            self.grids[x.shape] = torch.linspace(0, 1, x.shape[-1]).sin()
        return (x * self.grids[x.shape]).square()


@promise(
    "Resume",
    "a state that is not seen there: in iterators, closures, deeper than one level, written through `.data`",
    "in a network's first two passes a few numbers of each operation that backward runs again are "
    "compared with forward's; a difference is refused with stage and operation, before the update. Not "
    "seen: a state that matters later, or in none of these numbers; one that picks a view, or gives a "
    "NumPy array, for a segment's last operation, which is not run again; on a GPU differences below 2 %",
)
@without("unet3d.training.checkpointing.is_compared", no)
@pytest.mark.parametrize("kind", [Iterating, Closing, Nesting, Decaying, Scaling])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_a_second_call_that_computes_other_values_is_refused(kind: type, dtype: torch.dtype | None) -> None:
    model, memory = (
        nn.Sequential(kind(), convolution(), convolution()),
        MemoryPolicy("cpu", dtype, Technique((0, 1, 2))),
    )
    output = memory.forward(model, torch.randn(1, 2, 6, 6, 6))
    with pytest.raises(UserError, match=rf"^ckpt\b[^\n]*\b{kind.__name__}\b[^\n]*ckpt=0"):
        output.sum().backward()


class Gathering(nn.Module):
    """Views of memory that is not written to yet."""

    def forward(self, x: Tensor) -> Tensor:
        both = torch.empty(x.shape[0], 4, *x.shape[2:], dtype=x.dtype)
        both[:, :2], both[:, 2:] = x, x.sin()
        return both[:, 1:3].square()


@promise("Resume", "a state that is ...")
@pytest.mark.parametrize(
    "make", [Remembering, Gathering, lambda: nn.Sequential(convolution(), nn.ReLU(inplace=True), nn.Dropout3d())]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_second_call_that_computes_the_same_is_not_refused(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    gradients = []
    for starts in ((), (0, 3)):
        torch.manual_seed(0)
        model, image = nn.Sequential(convolution(), make(), convolution(), convolution()), torch.randn(1, 2, 6, 6, 6)
        Remembering.grids.clear()
        MemoryPolicy(technique=Technique(starts)).forward(model.to(dtype), image.to(dtype)).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.equal(*gradients)


@promise("Resume", "a state that is ...")
def test_calls_are_compared_in_the_first_passes_alone() -> None:
    """Later ones run no operation more."""
    model, memory = nn.Sequential(convolution(), convolution()), MemoryPolicy(technique=Technique((0, 1)))
    noted = []
    for _ in range(checkpointing.PASSES + 1):
        with pytest.MonkeyPatch.context() as patch:
            calls: list[int] = []
            patch.setattr(checkpointing.Comparison, "see", lambda *_, calls=calls: calls.append(1))
            memory.forward(model, torch.randn(1, 2, 6, 6, 6)).sum().backward()
        noted.append(len(calls))
    assert all(noted[:-1]) and not noted[-1]


@promise("Resume", "another number of threads ...")
def test_other_threads_change_rounding_alone(network: Network, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    gradients = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        model = network("model=unet_tiny")
        model(torch.ones(1, 1, 16, 16, 16)).square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() < 1e-4 * gradients[0].norm()


def test_names_of_weights_do_not_depend_on_the_policy(network: Network) -> None:
    before = list(network().state_dict())
    model = network()
    outcome(model, MemoryPolicy("cpu", torch.bfloat16, Technique((0, 1, 4))))
    assert list(model.state_dict()) == before


def test_checkpointing_lowers_the_peak(network: Network) -> None:
    def peak(ckpt: int) -> int:
        model = network("model=unet_tiny")
        memory = MemoryPolicy(technique=Technique(evenly(6, ckpt)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        meter = open_meter(model, optimizer)
        batch = Batch(torch.randn(1, 1, 16, 16, 16), torch.zeros(1, 16, 16, 16, dtype=torch.int16))
        train_step(model, SegmentationLoss(ce), optimizer, memory.scaler(), memory, [batch], meter.mark)
        return meter.summary()["peak_bytes"]

    plain = peak(0)
    assert all(peak(ckpt) < plain for ckpt in (2, 3, 4, 5, 6))


def test_mixed_precision_computes_in_its_dtype(network: Network) -> None:
    model, image = network("model=unet_tiny"), torch.randn(1, 1, 8, 8, 8)
    for dtype, expected in ((None, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)):
        assert MemoryPolicy("cpu", dtype).forward(model, image).dtype is expected


def test_only_fp16_scales_the_loss() -> None:
    enabled = [MemoryPolicy("cpu", d).scaler().is_enabled() for d in (None, torch.bfloat16, torch.float16)]
    assert enabled == [False, False, True]


def test_auto_is_bf16_unless_a_gpu_that_is_present_emulates_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert policy.amp_dtype("fp16", "cpu") is torch.float16
    assert policy.amp_dtype("auto", "cpu") is policy.amp_dtype("auto", "cuda") is torch.bfloat16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert policy.amp_dtype("auto", "cuda") is torch.float16
