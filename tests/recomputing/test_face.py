"""What a network that recomputes shares with plain ones: names, modes, copies, hooks, and what it refuses."""

import copy
import inspect
import re
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import assert_close, assert_same, drawn_schedules, run
from guards import without
from promises import promise
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_leaves, tree_structure

from unet3d.base.errors import UserError
from unet3d.recomputing.module import Recomputed, recompute, schedules_of
from unet3d.recomputing.program import describe
from unet3d.recomputing.trace import cannot_take

IMAGE = (1, 1, 9, 6, 5)
IMAGE_WORDS = "1x1x9x6x5, float64"


class Net(nn.Module):
    """A small network with a norm, a skip and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm3d(4)
        self.middle = nn.Conv3d(4, 4, 3, padding=1)
        self.head = nn.Conv3d(4, 2, 1)
        self.other_head = nn.Conv3d(4, 2, 1)

    def forward(self, image: Tensor) -> Any:
        """Return logits of both heads."""
        x = F.leaky_relu_(self.norm(self.first(image)))
        y = x + F.relu(self.middle(x))
        return self.head(y), self.other_head(x)


def make(kind: Callable[[], nn.Module] = Net, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind().double().train()


def image(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape or IMAGE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of(forward: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a network that a function is."""
    network = nn.Module()
    vars(network)["forward"] = forward
    return network


def check(model: nn.Module, x: Tensor | None = None, seeds: tuple[int, ...] = (0, 3)) -> None:
    """Compare passes of a model by random schedules with plain's."""
    x = image() if x is None else x
    plain = run(copy.deepcopy(model), x)
    for seed in seeds:
        with drawn_schedules(seed, tiles=5):
            assert_same(run(Recomputed(copy.deepcopy(model)), x), plain)


@pytest.fixture(autouse=True)
def any_schedule() -> Any:
    """Without a search: these tests hold for each schedule."""
    with drawn_schedules(seed=2, tiles=5):
        yield


@promise("Resume", "subclasses, parametrizations and gates ...")
@pytest.mark.parametrize("frozen", ["first", "norm", "middle", "head"])
def test_frozen_layers(frozen: str) -> None:
    model = make()
    model.get_submodule(frozen).requires_grad_(False)
    check(model)


@pytest.mark.parametrize(
    "norm",
    [lambda: nn.InstanceNorm3d(4, affine=True), lambda: nn.BatchNorm3d(4), lambda: nn.GroupNorm(2, 4)],
    ids=["instance", "batch", "group"],
)
@pytest.mark.parametrize("plan", ["lean", "tiles"])
def test_a_normalisation_behind_all_that_is_frozen_is_trained(norm: Callable[[], nn.Module], plan: str) -> None:
    first = nn.Conv3d(1, 4, 3, padding=1).requires_grad_(False)
    model = nn.Sequential(first, norm(), nn.ReLU(), nn.Conv3d(4, 2, 3, padding=1)).double()
    example = torch.randn(2, 1, 24, 10, 8, dtype=torch.float64)
    plain = run(copy.deepcopy(model), example, image_needs_gradient=False)
    assert plain.gradients["1.weight"] is not None
    assert_same(run(Recomputed(model, plan), example, image_needs_gradient=False), plain)


def test_all_but_one_frozen() -> None:
    model = make().requires_grad_(False)
    model.get_submodule("middle").requires_grad_(True)
    check(model)
    plain = run(copy.deepcopy(model), image(), image_needs_gradient=False)
    assert_same(run(Recomputed(model), image(), image_needs_gradient=False), plain)


@promise("What is seen, what is refused, what runs plain", "change parameters and buffers ...")
def test_thawed_after_a_pass() -> None:
    model = make()
    network = Recomputed(model)
    model.get_submodule("first").requires_grad_(False)
    network(image())[0].sum().backward()
    model.get_submodule("first").requires_grad_(True)
    model.zero_grad()
    plain = run(copy.deepcopy(model), image())
    assert_same(run(network, image()), plain)


class Tied(Net):
    """Two layers share weight and bias."""

    def __init__(self) -> None:
        super().__init__()
        self.other_head.weight = self.head.weight
        self.other_head.bias = self.head.bias


class Twice(Net):
    """A block that is called twice, with its norm."""

    def forward(self, image: Tensor) -> Any:
        """Return logits."""
        x = self.first(image)
        for _ in range(2):
            x = F.relu(self.norm(self.middle(x)))
        return self.head(x)


@promise("Resume", "subclasses, parametrizations and gates ...")
@pytest.mark.parametrize("kind", [Tied, Twice])
def test_shared_parameters(kind: Callable[[], nn.Module]) -> None:
    check(make(kind))


@promise("Resume", "subclasses, parametrizations and gates ...")
def test_a_norm_in_evaluation_within_training() -> None:
    model = make()
    with torch.no_grad():
        model.get_buffer("norm.running_mean").fill_(0.3)
        model.get_buffer("norm.running_var").fill_(2)
    model.get_submodule("norm").eval()
    check(model)
    network = Recomputed(model)
    network(image())
    assert torch.equal(model.get_buffer("norm.running_mean"), torch.full((4,), 0.3, dtype=torch.float64))


@promise(
    "What is seen, what is refused, what runs plain",
    "`eval()`, `torch.no_grad()`, an empty batch",
    "the network itself runs",
)
def test_evaluation_and_passes_without_gradients_are_the_networks() -> None:
    model = make()
    network = Recomputed(model)
    network.eval()
    assert not any(module.training for module in model.modules())
    x = image().requires_grad_()
    for output, expected in zip(network(x), model(x), strict=True):
        assert torch.equal(output, expected)
        assert output.requires_grad
    network.train()
    other = copy.deepcopy(model)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(network(x), other(x), strict=True))
    assert torch.equal(model.get_buffer("norm.running_mean"), other.get_buffer("norm.running_mean"))


class Shapes(Net):
    """Outputs in a structure."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, image: Tensor) -> Any:
        """Return logits."""
        y, x = super().forward(image)
        return y if self.kind == "tensor" else {"out": y, "inner": x, "sum": x + y}


@pytest.mark.parametrize("kind", ["tensor", "inner maps"])
def test_structures_of_outputs(kind: str) -> None:
    model = make(lambda: Shapes(kind))
    network = Recomputed(copy.deepcopy(model))
    output = network(image())
    expected = model(image())
    assert type(output) is type(expected)
    assert tree_structure(output) == tree_structure(expected)
    check(model)


class Weighted(Net):
    """The middle layer has a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.middle)


class Own(nn.Conv3d):
    """A layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the map, by standardised weights."""
        weight = self.weight - self.weight.mean((1, 2, 3, 4), keepdim=True)
        return F.conv3d(x, weight * 2, self.bias, padding=1)


class Subclassed(Net):
    """The middle layer is of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = Own(4, 4, 3, padding=1)


class Gate(nn.Module):
    """A layer with a gate behind it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.gate = nn.Parameter(torch.full((1,), 0.5))
        self.of_channels = nn.Parameter(torch.ones(4, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the map."""
        return self.layer(x) * self.gate * self.of_channels + self.gate


class Gated(Net):
    """The middle layer has a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = Gate(self.middle)  # type: ignore[assignment]


@promise(
    "Resume",
    "subclasses, parametrizations and gates, shared weights, repeated blocks, norms in evaluation, "
    "frozen layers, under `recompute`",
    "autograd's gradients",
)
@pytest.mark.parametrize("kind", [Weighted, Subclassed, Gated])
def test_changed_layers(kind: Callable[[], nn.Module]) -> None:
    check(make(kind))


def test_spectral_norm_is_equal_or_refused() -> None:
    """Its power iteration changes buffers in each pass."""
    model = make()
    parametrizations.spectral_norm(model.get_submodule("middle"))
    expected = run(copy.deepcopy(model), image())
    try:
        outcome = run(Recomputed(copy.deepcopy(model)), image())
    except UserError as error:
        assert "middle" in str(error)
    else:
        assert_same(outcome, expected)


class Branching(Net):
    """What forward does depends on numbers."""

    def forward(self, image: Tensor) -> Any:
        """Return logits."""
        x = self.first(image)
        if x.mean() > 0:
            x = x * 2
        return self.head(x)


@promise(
    "What is seen, what is refused, what runs plain",
    "`forward` depends on numbers of a map (`if x.mean() > 0`, `.item()`) or of a counter, changes the image in "
    "place, or a map that another is a view of",
    "refused, with the line",
)
def test_a_forward_that_depends_on_numbers_is_refused_with_its_place() -> None:
    lines, first = inspect.getsourcelines(Branching.forward)
    place = next(first + number for number, line in enumerate(lines) if "if x.mean()" in line)
    with pytest.raises(UserError, match=re.escape(f"{__file__}:{place}")):
        Recomputed(make(Branching))(image())


@promise("What is seen, what is refused, what runs plain", "hooks of layers, or ...")
@pytest.mark.parametrize("name", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_hooks_of_modules_are_refused(name: str) -> None:
    model = make()
    getattr(model.get_submodule("middle"), f"register_{name}")(lambda *_: None)
    with pytest.raises(UserError, match="middle"):
        Recomputed(model)(image())


@pytest.mark.parametrize("draw", [torch.bernoulli, F.alpha_dropout, F.rrelu])
def test_numbers_that_would_be_drawn_again_are_refused(draw: Callable[..., Tensor]) -> None:
    class Noisy(Net):
        def forward(self, image: Tensor) -> Any:
            x = self.first(image)
            options: dict[str, Any] = {"training": True} if draw in (F.alpha_dropout, F.rrelu) else {}
            return self.head(x * draw(x.sigmoid(), **options))

    with pytest.raises(UserError, match=re.escape(__file__)):
        Recomputed(make(Noisy))(image())


@pytest.mark.parametrize(("ranks", "is_refused"), ((1, False), (2, True)))
def test_statistics_that_ranks_exchange_are_refused(
    ranks: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    network = Recomputed(nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.SyncBatchNorm(4), nn.Conv3d(4, 2, 1)))
    if is_refused:
        with pytest.raises(UserError, match="1: SyncBatchNorm"):
            schedules_of(network).program(torch.zeros(1, 1, 8, 8, 8))
    else:
        with pytest.raises(UserError) as error:  # on the CPU torch has none
            schedules_of(network).program(torch.zeros(1, 1, 8, 8, 8))
        assert "exchange" not in str(error.value)


class Tokens(nn.Module):
    """A network whose tokens have no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, 4, 1)
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens as a map."""
        maps = self.first(x)
        tokens = maps.flatten(2).transpose(1, 2)
        return self.mix(tokens).transpose(1, 2).reshape(maps.shape)


@promise("Resume", "an operation that `recompute` ...")
def test_operations_without_a_rule_are_named() -> None:
    lines = []
    for network in (Tokens(), make()):
        recomputed = Recomputed(network.double())
        lines.append(describe(schedules_of(recomputed).program(image().double()), "lean"))
    assert "linear in mix" in lines[0]
    assert "checkpointed" not in lines[1]


class Switched(Net):
    """A network with a switch in a part of it, as nnU-Net's deep supervision, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.is_deep = True
        self.dropped = nn.Dropout3d(0.0)
        self.middle.gain = 1  # type: ignore[assignment]

    def forward(self, image: Tensor) -> Any:
        """Return logits, of both heads if the network is deep."""
        y, x = super().forward(image)
        y = self.dropped(y * self.middle.gain)
        return (y, x) if self.is_deep else y


@without("unet3d.recomputing.module.snapshot", lambda network, code: ())
def test_attributes_that_forward_depends_on_change_between_passes() -> None:
    network = Recomputed(make(Switched))
    plain = make(Switched)
    for is_deep, gain in ((True, 1), (False, 1), (True, 3), (True, 1)):
        for model in (network, plain):
            model.is_deep = is_deep
            model.get_submodule("middle").gain = gain
        assert network.is_deep is schedules_of(network).network.is_deep is is_deep
        outputs = network(image())
        assert isinstance(outputs, tuple) is is_deep
        for output, expected in zip(tree_leaves(outputs), tree_leaves(plain(image())), strict=True):
            assert_close(output.detach(), expected.detach(), 1e-12)


def test_an_attribute_that_changes_each_step_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unet3d.recomputing.module.MANY_PROGRAMS", 2)
    network = Recomputed(make(Switched))
    network(image())
    network.get_submodule("middle").gain = 2
    with pytest.warns(UserWarning, match="such as a counter"):
        network(image())


class OfMode(Net):
    """A network that returns another structure in training, as MONAI's DynUNet."""

    def forward(self, image: Tensor) -> Any:
        """Return logits, of both heads in training."""
        outputs = super().forward(image)
        return outputs if self.training else outputs[0]


def test_a_mode_that_is_set_module_by_module() -> None:
    """Lightning does so after a validation."""
    network = Recomputed(make(OfMode))
    modes = {module: module.training for module in network.modules()}
    network.eval()
    assert isinstance(network(image()), Tensor)
    for module, mode in modes.items():
        module.training = mode
    assert isinstance(network(image()), tuple)


def test_without_an_example_the_line_comes_with_the_first_training_pass(capsys: pytest.CaptureFixture[str]) -> None:
    network = recompute(make(), held=2**20)
    with torch.no_grad():
        network(image())
    assert not capsys.readouterr().out
    network(image())
    network(image(2, 1, 5, 12, 4))
    said = capsys.readouterr()
    assert said.out.count("recompute=lean: ") == 1
    searches = [line for line in said.err.splitlines() if "finding a schedule" in line]
    assert [IMAGE_WORDS in line for line in searches] == [True, False] and "2x1x5x12x4, float64" in searches[1]
    assert "autocast" not in said.err
    other = Recomputed(make())
    peaks = [schedules_of(each).program(image()).peak_bytes for each in (network, other)]
    assert peaks[0] - peaks[1] == 2**20


def test_an_example_outside_of_autocast_is_said_to_cost_a_second_search(capsys: pytest.CaptureFixture[str]) -> None:
    single = image().float()
    for is_within in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_within):
            network = recompute(make().float(), single)
        with torch.autocast("cpu", torch.bfloat16):
            network(single)
        said = capsys.readouterr().err
        assert said.count("finding a schedule") == (1 if is_within else 2)
        assert said.count("give the example within your autocast") == (0 if is_within else 1)


def test_compiled_after_but_not_before() -> None:
    model = make()
    network = Recomputed(copy.deepcopy(model))
    torch.compile(network, backend="eager")(image())[0].square().sum().backward()
    model(image())[0].square().sum().backward()
    assert_close(network.get_parameter("first.weight").grad, model.get_parameter("first.weight").grad, 1e-12)
    with pytest.raises(UserError, match=r"torch\.compile"):
        Recomputed(torch.compile(model, backend="eager"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "options", "words"),
    (
        (lambda: None, {}, "NoneType is no network"),
        (lambda: torch.jit.script(nn.Conv3d(1, 2, 1)), {}, r"torch\.jit"),
        (lambda: nn.DataParallel(make()), {}, "DataParallel"),
        (lambda: nn.Sequential(nn.LazyConv3d(2, 1)), {}, "lazy layers"),
        (make, {"plan": "auto", "budget": ["6GiB"]}, "budget"),
        (make, {"held": 1.5}, "held"),
    ),
    ids=("nothing", "scripted", "in DataParallel", "lazy", "a list of budgets", "half a byte"),
)
def test_what_is_no_plain_network_or_no_size_is_refused(
    given: Callable[[], Any], options: dict[str, Any], words: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated.
        model = given()
    with pytest.raises(UserError, match=words):
        recompute(model, **options)


@promise(
    "What is seen, what is refused, what runs plain",
    "an image of other channels, another type, or a size that the network cannot take",
    "refused, with what `forward` raises, and lengths that it takes",
)
@pytest.mark.parametrize(
    ("arguments", "keywords", "words"),
    (
        ((image(1, 3, 9, 6, 5),), {}, r"cannot take an image of 1x3x9x6x5, float64 at .* to have 1 channels"),
        ((image().float(),), {}, r"cannot take an image of 1x1x9x6x5, float32 at .*: Input type \(float\)"),
        ((image(), image()), {}, "was given Tensor, Tensor; .* one image"),
        ((image(),), {"mask": image()}, "was given Tensor, mask=Tensor; .* one image"),
        ((), {"img": image()}, "Net.forward: missing a required argument: 'image'; .* one image"),
        ((image()[0],), {}, "4 dimensions"),
    ),
    ids=("channels", "type", "two", "two, one by name", "another name", "no batch"),
)
def test_what_is_no_image_of_the_network_is_refused(
    arguments: tuple[Tensor, ...], keywords: dict[str, Tensor], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        Recomputed(make())(*arguments, **keywords)


def test_lengths_that_a_network_cannot_take_are_named_with_others() -> None:
    def forward(x: Tensor) -> Tensor:
        return F.interpolate(F.max_pool3d(x, 4), scale_factor=4) + x

    assert cannot_take(of(forward), (1, 4, 8, 4, 4), torch.float64) is None
    line = cannot_take(of(forward), (1, 4, 9, 8, 7), torch.float64)
    assert line is not None and line.endswith("; it takes 1x4x12x8x8, lengths of multiples of 4")
    with pytest.raises(UserError, match="is empty"):
        recompute(make(), image(0, 1, 9, 6, 5))


@promise(
    "What is seen, what is refused, what runs plain",
    "batch norm with `momentum=None`, in training",
    "refused, with its layer",
)
def test_counted_averages_are_refused_with_their_layer() -> None:
    model = make()
    model.norm.momentum = None
    with pytest.raises(UserError, match=r"norm: BatchNorm3d with momentum=None .*momentum"):
        Recomputed(model)(image())
    model.norm.eval()
    Recomputed(model)(image())


def test_no_more_schedules_are_kept_than_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unet3d.recomputing.module.MOST_PROGRAMS", 2)
    schedules = schedules_of(Recomputed(make()))
    first, second, third = (image(1, 1, length, 4, 4) for length in (5, 6, 7))
    programs = [schedules.program(each) for each in (first, second)]
    schedules.program(third)
    assert schedules.program(second) is programs[1]
    assert next(iter(schedules.programs.values())) is programs[1] and len(schedules.programs) == 2
    assert len(schedules.prepared) == 2


def test_more_objects_than_a_pass_can_look_through_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unet3d.recomputing.readable.MOST_OBJECTS", 200)
    model = make(Switched)
    model.get_submodule("middle").gain = [[1.0] for _ in range(300)]  # type: ignore[assignment]
    with pytest.raises(UserError, match="more than 200 objects"):
        recompute(model)(image())


@pytest.mark.parametrize("is_method", [False, True])
def test_what_is_put_around_forward_counts_in_every_mode_and_in_copies(is_method: bool) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 2, 3, padding=1)).train()
    image = torch.randn(IMAGE)
    wanted = 2 * network(image).detach()
    recomputed: Any = recompute(network)
    own = recomputed.forward
    if is_method:
        recomputed.own = own
        recomputed.forward = types.MethodType(lambda self, image: 2 * self.own(image), recomputed)
    else:
        recomputed.forward = lambda image: 2 * own(image)
    for is_training in (True, False):
        assert torch.allclose(recomputed.train(is_training)(image), wanted, atol=1e-5)
        if not is_method:
            assert torch.allclose(copy.deepcopy(recomputed)(image), wanted, atol=1e-5)
    assert recomputed.train()(image[:0]).shape == (0, *wanted.shape[1:])
