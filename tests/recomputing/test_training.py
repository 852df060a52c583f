"""Training with a network that recomputes: gradients arrive, accumulate, scale and synchronise as in plain."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from equality import assert_close, drawn_schedules
from test_face import Shapes, image, make
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unet3d.memory.fake_tensors import cuda_autocast
from unet3d.recomputing.module import Recomputed
from unet3d.recomputing.prepare import bound, prepare
from unet3d.recomputing.run import call_by_program
from unet3d.training.losses import LossOptions, dice_ce

WITHIN_ROUNDING = 0.03  # of the largest gradient, in bfloat16


@pytest.fixture(autouse=True)
def any_schedule() -> Iterator[None]:
    """Without a search: these tests hold for each schedule."""
    with drawn_schedules(seed=2, tiles=5):
        yield


def assert_same_gradients(network: nn.Module, plain: nn.Module) -> None:
    for (name, parameter), expected in zip(network.named_parameters(), plain.parameters(), strict=True):
        assert (parameter.grad is None) == (expected.grad is None), name
        if parameter.grad is not None and expected.grad is not None:
            assert_close(parameter.grad, expected.grad, 1e-12, name)


def test_autocast_is_within_rounding() -> None:
    exact = make().float()
    plain = copy.deepcopy(exact)
    network = Recomputed(copy.deepcopy(exact))
    x = torch.randn(2, 1, 16, 12, 8)
    exact(x)[0].square().mean().backward()
    for half in (plain, network):
        with torch.autocast("cpu", torch.bfloat16):
            output = half(x)[0]
        assert output.dtype == torch.bfloat16
        output.float().square().mean().backward()
    for name, parameter in network.named_parameters():
        expected = exact.get_parameter(name).grad
        assert (parameter.grad is None) == (expected is None)
        if parameter.grad is None or expected is None:
            continue
        assert parameter.grad.dtype == torch.float32
        largest = max(float(p.grad.abs().max()) for p in exact.parameters() if p.grad is not None)
        of_plain = plain.get_parameter(name).grad
        assert of_plain is not None
        allowed = WITHIN_ROUNDING * largest + 2 * float((of_plain - expected).abs().max())
        assert float((parameter.grad - expected).abs().max()) <= allowed, name


class Sampled(nn.Module):
    """A map of 2 x 4 x 16 x 12 x 8 numbers, read at random places."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", 2 * torch.rand(2, 16, 12, 8, 3) - 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the map."""
        return F.grid_sample(x, self.grid, align_corners=False)


class Function(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Return the map."""
        return self.function(x)


IN_FLOAT32 = {
    "max-pool": nn.MaxPool3d(3, 2, 1),
    "adaptive pool": nn.AdaptiveAvgPool3d(6),
    "adaptive max-pool": nn.AdaptiveMaxPool3d(6),
    "replication": nn.ReplicationPad3d(1),
    "sampled": Sampled(),
    "interpolated": nn.Upsample(scale_factor=1.5, mode="trilinear"),
    "summed up": Function(lambda x: 0.1 * x.cumsum(2)),
    "cast": Function(lambda x: x.float()),
    "of tokens": Function(lambda x: F.layer_norm(x.flatten(2), (x[0, 0].numel(),)).view(x.shape)),
}
BEHIND = {
    "batch norm": nn.BatchNorm3d(4),
    "instance norm": nn.InstanceNorm3d(4, affine=True),
    "group norm": nn.GroupNorm(2, 4),
    "PReLU": nn.PReLU(4),
    "ReLU": nn.ReLU(),
    "sum": Function(lambda x: x + F.leaky_relu(x)),
    "pool and interpolation": nn.Sequential(nn.MaxPool3d(2), nn.Upsample(scale_factor=2, mode="trilinear")),
    "softmax": nn.Softmax(1),
    "nothing": nn.Identity(),
}


PAIRS = [("max-pool", behind) for behind in BEHIND]
PAIRS += [(operation, behind) for operation in list(IN_FLOAT32)[1:] for behind in ("batch norm", "PReLU")]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize(("operation", "behind"), PAIRS)
def test_operations_that_autocast_computes_in_float32(operation: str, behind: str, device_type: str) -> None:
    """In groups, with rules behind them; a GPU's autocast, which has other operations, is carried out on the CPU."""
    torch.manual_seed(0)
    exact = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1, bias=False), IN_FLOAT32[operation], BEHIND[behind]).train()
    x = torch.randn(2, 1, 16, 12, 8)
    results = []
    for kind in (None, torch.bfloat16, device_type):
        network: nn.Module = copy.deepcopy(exact)
        if isinstance(kind, str):
            network = Recomputed(network, device_type=device_type)
        with cuda_autocast() if device_type == "cuda" else nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=kind is not None):
                output = network(x)
            (output.float() * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum().backward()
        results.append((output, [parameter.grad for parameter in network.parameters()]))
    (expected, gradients), (plain, of_plain), (output, of_output) = results
    assert output.dtype == plain.dtype
    assert_rounded(output.detach().float(), plain.detach().float(), expected.detach())
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    for gradient, expected_gradient, gradient_of_plain in zip(of_output, gradients, of_plain, strict=True):
        assert gradient.dtype == torch.float32
        assert_rounded(gradient, gradient_of_plain, expected_gradient, largest)


def assert_rounded(result: Tensor, plain: Tensor, exact: Tensor, scale: float | None = None) -> None:
    """Assert that a result of half precision is about as close to the exact one as plain's."""
    scale = float(exact.abs().max()) if scale is None else scale
    allowed = WITHIN_ROUNDING * scale + 2 * float((plain - exact).abs().max())
    assert float((result - exact).abs().max()) <= allowed


def test_a_second_backward_raises() -> None:
    network = Recomputed(make())
    loss = network(image())[0].sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("name", ["first.weight", "norm.bias", "head.weight", "image"])
def test_what_changed_between_forward_and_backward_raises(name: str) -> None:
    network = Recomputed(make())
    x = image()
    loss = network(x)[0].sum()
    with torch.no_grad():
        (x if name == "image" else network.get_parameter(name)).mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


def test_logits_under_a_loss_that_may_write_over_them() -> None:
    network = Recomputed(make())
    label = torch.zeros(1, *image().shape[2:], dtype=torch.long)
    logits = network(image())[0]
    before = logits.detach().clone()
    dice_ce(logits, label, LossOptions()).backward()
    assert torch.equal(logits.detach(), before)
    plain = make()
    dice_ce(plain(image())[0], label, LossOptions()).backward()
    assert_same_gradients(network, plain)
    network.zero_grad()
    dice_ce(network(image())[0], label, LossOptions()).backward()
    assert_close(network.get_parameter("first.weight").grad, plain.get_parameter("first.weight").grad, 1e-10)


def test_distributed_data_parallel() -> None:
    """Its hooks see each gradient; one rank, since a second one adds nothing that the network could do wrong."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(Recomputed(make(lambda: Shapes("tensor"))), find_unused_parameters=True)
        for step in range(2):
            model.zero_grad()
            model(image(seed=step)).square().mean().backward()
        plain = make(lambda: Shapes("tensor"))
        plain(image(seed=1)).square().mean().backward()
        for (name, parameter), expected in zip(model.module.named_parameters(), plain.parameters(), strict=True):
            if expected.grad is not None:
                assert parameter.grad is not None, name
                assert_close(parameter.grad, expected.grad, 1e-12, name)
    finally:
        dist.destroy_process_group()


class Sloped(nn.Module):
    """A network whose graph depends on an attribute, and perhaps on a tensor that is no buffer."""

    def __init__(self, slope: float, has_constant: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, 4, 3, padding=1)
        self.last = nn.Conv3d(4, 2, 3, padding=1)
        self.slope = slope
        self.factors = [torch.rand(4, 1, 1, 1)] if has_constant else []

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = F.leaky_relu(self.first(x), self.slope)
        for factor in self.factors:
            x = x * factor
        return self.last(x)


def frozen(network: Sloped) -> Sloped:
    network.first.requires_grad_(False)
    return network


@pytest.mark.parametrize(
    ("other", "is_equal"),
    [
        (lambda: Sloped(0.1), True),
        (lambda: Sloped(0.2), False),
        (lambda: Sloped(0.1, has_constant=True), False),
        (lambda: frozen(Sloped(0.1)), False),
    ],
)
def test_a_program_is_bound_to_an_equal_network_alone(other: Callable[[], Sloped], is_equal: bool) -> None:
    """Others are traced, and gradients are theirs in each case."""
    network = other().train()
    prepared_for = Sloped(0.1, has_constant=bool(network.factors)).train()
    image = torch.randn(1, 1, 9, 5, 4)
    program = prepare(prepared_for, image, None, on_cpu=True)
    program = program.by(program.schedules[0])
    for autocast in (None, torch.bfloat16):
        found = bound(program, network, image, autocast)
        assert (found is program) == (is_equal and autocast is None)
    found = bound(program, network, image)
    plain = copy.deepcopy(network)
    plain(image).square().mean().backward()
    call_by_program(found, network, image).square().mean().backward()
    for (name, parameter), expected in zip(network.named_parameters(), plain.parameters(), strict=True):
        assert (parameter.grad is None) == (expected.grad is None), name
        if parameter.grad is not None and expected.grad is not None:
            torch.testing.assert_close(parameter.grad, expected.grad)
