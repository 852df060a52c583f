"""The memory of a step of any network: what is measured is what is predicted, and the model stays as it was."""

import copy
import importlib.util
import json
import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from allocator import dispatch_modes
from promises import promise
from torch import Tensor, nn
from torch.optim import AdamW

import unet3d.memory
from unet3d import build
from unet3d.base.errors import UserError
from unet3d.config import compose
from unet3d.memory.any_network import Explanation
from unet3d.memory.meter import COUNTED
from unet3d.memory.simulate import simulate
from unet3d.memory.technique import step_peak
from unet3d.report import explained
from unet3d.run import run_folder
from unet3d.training import optim

SHAPE = (1, 1, 16, 16, 16)
SMALL = ("model=unet_tiny", "model.features=[4,8]", "data.patch=[16,16,16]", "batch=1", "optim.clip=null")


class Own(nn.Module):
    """All that a step could change: weights, statistics, random numbers, tensors in a list; an output a level."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.Dropout3d(0.5)
        self.head = nn.Conv3d(8, 3, 1)
        self.seen = [torch.rand(1)]

    def forward(self, image: Tensor) -> list[Tensor]:
        self.seen[0] = image.mean()
        return [self.head(self.drop(self.norm(self.conv(image)).relu()))]


WAYS: list[dict[str, Any]] = [{}, {"amp": True}, {"amp": "fp16", "optimizer": partial(torch.optim.SGD, lr=0.1)}]


@pytest.mark.parametrize("way", WAYS, ids=["float32", "bf16", "fp16, sgd"])
def test_what_is_predicted_is_measured(way: dict[str, Any]) -> None:
    predicted, measured = (act(Own(), SHAPE, **way) for act in (unet3d.memory.predict, unet3d.memory.explain))
    assert (predicted.kind, measured.kind) == ("predicted", "measured")
    assert predicted.peak_bytes == measured.peak_bytes == max(p["steady"] for p in measured.phases.values())
    assert (predicted.categories, predicted.phases) == (measured.categories, measured.phases)
    assert sum(row["bytes"] for row in measured.layers) == sum(measured.categories.values()) == measured.peak_bytes
    assert measured.categories["params"] == sum(t.nbytes for t in (*Own().parameters(), *Own().buffers()))


@pytest.mark.slow
class Scaled(nn.Module):
    """A network with a tensor that is neither a weight nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 8, 3, padding=1)
        self.head = nn.Conv3d(8, 3, 1)
        self.kept = [torch.rand(1)]

    def forward(self, image: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.head(self.conv(image).relu())
        return logits


def test_a_recomputed_network_is_predicted_as_it_is_measured() -> None:
    network = unet3d.recompute(Scaled(), torch.zeros(SHAPE), plan="lean")
    predicted = unet3d.memory.predict(network, SHAPE)
    assert predicted.peak_bytes == unet3d.memory.explain(network, SHAPE).peak_bytes


def test_of_the_packages_own_network_it_says_what_a_run_is_predicted_to_need() -> None:
    config = compose.compose([*SMALL, "workers=0"])
    config.model.in_channels, config.model.classes = 1, 3
    made = partial(optim.optimizer, config.optim)
    model = build.model(config.model, 0)
    label = torch.zeros(1, 16, 16, 16, dtype=torch.int16)
    found = unet3d.memory.explain(model, SHAPE, build.loss(config, 3), lambda weights: made(model), label=label)
    assert found.peak_bytes == step_peak(config, config.model).tensors


def test_the_model_is_left_as_it_was() -> None:
    model = Own().eval()
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    for act in (unet3d.memory.predict, unet3d.memory.explain):
        act(model, torch.randn(SHAPE, generator=torch.Generator()), optimizer=partial(torch.optim.SGD, lr=1.0))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert not any(module.training or module._forward_hooks for module in model.modules())
        assert torch.equal(torch.get_rng_state(), state)
        assert [p.grad is None for p in model.parameters()] == [False, *[True] * 5]
        assert float(model.conv.weight.grad.sum()) == 8 * 27


def test_an_example_and_labels_are_taken_as_they_are() -> None:
    """The loss sees the very voxels; where they are predicted, their shapes and types."""
    image, label, seen = torch.rand(SHAPE), torch.ones(1, 4, dtype=torch.int32), []

    def loss(output: list[Tensor], given: Tensor) -> Tensor:
        seen.append((type(given), given.shape, given.dtype))
        return output[0].mean()

    model = Own()
    unet3d.memory.explain(model, image, loss, label=label)
    assert model.seen[0] == image.mean() and seen[-1] == (Tensor, (1, 4), torch.int32)
    unet3d.memory.predict(model, image, loss, label=label)
    assert seen[-1][1:] == ((1, 4), torch.int32) and seen[-1][0] is not Tensor


@pytest.mark.slow
def test_it_prints_draws_and_reports(tmp_path: Path) -> None:
    found = unet3d.memory.predict(Own(), SHAPE)
    text = str(found)
    first, second, *_ = text.splitlines()
    assert all(part in first for part in ("Own", "267", "1x1x16x16x16", "float32", "cpu"))
    assert "predicted" in second and f"{found.peak_bytes / 2**20:,.1f} MiB" in second
    assert max(map(len, text.splitlines())) <= 80 and "backward" in text and "conv" in text
    assert explained.draw_layers(found, tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")
    page = explained.write_page(found, tmp_path / "report").read_text()
    assert "Own" in page and "1x1x16x16x16" in page and f"{found.peak_bytes / 2**20:,.1f} MiB" in page
    memory = json.loads((tmp_path / "report" / "memory.json").read_text())
    assert memory["predicted"]["peak_bytes"] == found.peak_bytes and memory["parameters"] == 267
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "STATUS").touch()
    with pytest.raises(UserError, match=rf"^{tmp_path / 'run'}: "):
        explained.write_page(found, tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({"model": nn.ReLU()}, "^ReLU: "),
        ({"example": (16, 16)}, r"^example: .*N C D H W.*\(16, 16\)"),
        ({"amp": "fp8"}, "^amp=fp8: .*bf16.*fp16"),
        ({"device": "tpu"}, "^device=tpu: .*cpu.*cuda"),
    ],
    ids=["weights", "example", "amp", "device"],
)
def test_what_cannot_be_is_one_line(words: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        unet3d.memory.predict(**({"model": Own(), "example": SHAPE} | words))


class Detached(nn.Conv3d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


NO_STEPS: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "no network": (lambda: "net", {}, "^model: give a network"),
    "frozen": (lambda: nn.Conv3d(1, 3, 1).requires_grad_(False), {}, "^Conv3d: has no weights to train: requires_grad"),
    "detached": (lambda: Detached(1, 3, 1), {}, "^Detached: the loss has no gradient: forward detaches"),
    "lazy": (lambda: nn.LazyConv3d(3, 1), {}, "^LazyConv3d: its lazy layers have no weights yet"),
    "traced": (lambda: torch.jit.trace(nn.Conv3d(1, 3, 1), torch.zeros(SHAPE)), {}, r"compiled by torch\.jit"),
    "closure": (Own, {"optimizer": torch.optim.LBFGS}, r"^optimizer: LBFGS .*step\(closure\)"),
    "channels": (
        Own,
        {"example": (1, 2, 16, 16, 16)},
        "^Own cannot take an image of 1x2x16x16x16, float32.* 1 channels",
    ),
    "type": (Own, {"example": torch.zeros(SHAPE).double()}, "^Own cannot take an image of .*, float64.*double"),
}


@pytest.mark.parametrize("act", [unet3d.memory.explain, unet3d.memory.predict])
@pytest.mark.parametrize(("make", "words", "line"), NO_STEPS.values(), ids=[*NO_STEPS])
@pytest.mark.filterwarnings("ignore")  # of what is deprecated, as torch.jit
def test_a_step_that_cannot_be_is_one_line(
    make: Callable[[], Any],
    words: dict[str, Any],
    line: str,
    act: Callable[..., Explanation],
    capfd: pytest.CaptureFixture,
) -> None:
    with pytest.raises(UserError, match=line) as caught:
        act(**{"model": make(), "example": SHAPE} | words)
    assert "\n" not in str(caught.value)
    assert not capfd.readouterr().err, "torch's own remarks on what fails"


def test_a_compiled_network_is_not_predicted() -> None:
    with pytest.raises(UserError, match=r"torch\.compile"):
        unet3d.memory.predict(torch.compile(Own(), backend="eager"), SHAPE)  # type: ignore[arg-type]


def test_sizes_of_numpy_and_counted_averages_are_predicted_as_measured() -> None:
    model = nn.Sequential(nn.Conv3d(1, 3, 3), nn.BatchNorm3d(3, momentum=None), nn.Conv3d(3, 3, 3, padding=2))
    shape = tuple(np.array(SHAPE))
    predicted = unet3d.memory.predict(model, shape)
    assert predicted.peak_bytes == unet3d.memory.explain(model, shape).peak_bytes and not predicted.guesses


def test_on_cuda_it_is_predicted_without_a_gpu() -> None:
    """A batch in host memory takes nothing of a GPU, and each part lives until it is read."""
    host, gpu = (unet3d.memory.predict(Own(), SHAPE, device=device) for device in ("cpu", "cuda"))
    assert host.entry["kind"] == gpu.entry["kind"] == COUNTED and "cuda" in gpu.about.split()


@pytest.mark.slow
def test_of_the_packages_own_network_it_predicts_what_a_run_is_predicted_to_need_on_cuda() -> None:
    """There a run's step lets go of its batch, which here is the caller's."""
    config = compose.compose([*SMALL, "device=cuda", "amp=true", "amp_dtype=bf16"])
    config.model.in_channels, config.model.classes = 1, 3
    model, label = build.model(config.model, 0), torch.zeros(1, 16, 16, 16, dtype=torch.int16)
    found = unet3d.memory.predict(model, SHAPE, build.loss(config, 3), AdamW, "bf16", label, "cuda").phases
    wanted = simulate(config, config.model).summary()["phases"]
    image, label_map = 4 * 16**3, 2 * 16**3  # bytes
    kept = {"backward": image, "step": image + label_map}  # the loss needs the labels
    for name, peaks in found.items():
        less = kept.get(name, 0)
        assert {when: size - less for when, size in peaks.items()} == wanted[name], name


class Running(nn.Module):
    """Puts another tensor in the place of its buffer at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv3d(1, 3, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, image: Tensor) -> Tensor:
        self.seen = 0.9 * self.seen + image.detach().mean()
        return self.head(image)


def test_a_buffer_that_a_step_replaces_is_put_back() -> None:
    model = Running()
    before = model.seen
    unet3d.memory.explain(model, torch.ones(SHAPE))
    assert model.seen is before and float(before) == 0


def test_a_buffer_that_cannot_be_written_to_is_left_alone() -> None:
    model = Running()
    model.register_buffer("wide", torch.zeros(1).expand(2))
    model.eval()
    unet3d.memory.explain(model, torch.ones(SHAPE))
    assert not model.training and model.wide.tolist() == [0, 0]


def test_adafactor_takes_weights_one_by_one_on_cuda_too() -> None:
    model = nn.Sequential(*(nn.Conv3d(8, 8, 3, padding=1) for _ in range(4)))
    given: dict[str, Any] = {
        "loss": torch.nn.functional.mse_loss,
        "label": torch.zeros(1, 8, 4, 4, 4),
        "device": "cuda",
    }
    alone, together, default = (
        unet3d.memory.predict(model, (1, 8, 4, 4, 4), optimizer=partial(torch.optim.Adafactor, foreach=way), **given)
        for way in (False, True, None)
    )
    assert default.peak_bytes == alone.peak_bytes < together.peak_bytes


def test_weights_and_images_of_another_type_are_predicted_and_measured() -> None:
    model = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 3, 1)).bfloat16()
    peaks = set()
    for example in (SHAPE, torch.randn(SHAPE, dtype=torch.bfloat16)):
        peaks |= {act(model, example).peak_bytes for act in (unet3d.memory.predict, unet3d.memory.explain)}
    assert len(peaks) == 1


@pytest.mark.slow
def test_a_network_of_very_many_layers_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 40  # not 500, which take long to draw
    for module in (run_folder, explained):
        monkeypatch.setattr(module, "MOST_ITEMS", most)
    layers = [nn.Conv3d(1, 1, 1) for _ in range(most + 4)]
    found = unet3d.memory.predict(
        nn.Sequential(*layers), (1, 1, 4, 4, 4), torch.nn.functional.mse_loss, label=torch.zeros(1, 1, 4, 4, 4)
    )
    assert len(found.layers) > most
    page = explained.write_page(found, tmp_path).read_text()
    rows = json.loads((tmp_path / "memory.json").read_text())["predicted"]["layers"]
    assert len(rows) == most and sum(row["bytes"] for row in rows) == found.peak_bytes
    assert rows[-1]["module"] in page and re.search(r"\d", rows[-1]["module"])


def test_a_failing_step_restores_the_model_too_and_leaves_no_observer_on() -> None:
    model = Own()
    before = copy.deepcopy(model.state_dict())

    def loss(output: list[Tensor], label: Tensor) -> Tensor:
        raise KeyError("of the loss")

    for act in (unet3d.memory.explain, unet3d.memory.predict):
        with pytest.raises(KeyError, match="of the loss"):
            act(model, SHAPE, loss)
        assert not dispatch_modes()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Choosing(Own):
    """Takes another way by a value."""

    def forward(self, image: Tensor) -> list[Tensor]:
        if torch.rand(()) > 0.5:
            image = image + image
        return super().forward(image)


@promise(
    "The memory of any network",
    "a network or a loss reads values: branches, stochastic depth, draws of Python or NumPy",
    "a warning with FILE:LINE, also in the result, prints, memory.json and the page",
)
def test_a_prediction_that_has_to_guess_values_says_where(tmp_path: Path) -> None:
    line = Choosing.forward.__code__.co_firstlineno + 1
    with pytest.warns(UserWarning, match=rf"test_explain\.py:{line}\b.*explain"):
        found = unet3d.memory.predict(Choosing(), SHAPE)
    assert found.guesses == [f"{__file__}:{line}"]
    second, third = str(found).splitlines()[1:4:2]
    assert "GUESS" in second and f"{__file__}:{line}" in third and "unet3d.memory.explain" in third
    assert found.entry["guesses"] == found.guesses, "as memory.json and the page have it"
    assert not unet3d.memory.predict(Own(), SHAPE).guesses and not unet3d.memory.explain(Choosing(), SHAPE).guesses


class Recurrent(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.layer, self.head = kind(1, 4, batch_first=True), nn.Conv3d(4, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        y, _ = self.layer(image.flatten(2).transpose(1, 2))
        return self.head(y.transpose(1, 2).reshape(-1, 4, *image.shape[2:]))


@promise(
    "The memory of any network",
    "an LSTM, whose library alone knows what it keeps for backward",
    "a guess, with a warning that names it",
)
@pytest.mark.filterwarnings("ignore:A GUESS")
def test_an_lstm_whose_workspace_is_not_known_is_a_guess_that_says_so() -> None:
    """A recurrent layer without such a workspace is predicted to the byte; with one, too low or said to be."""
    for kind in (nn.LSTM, nn.GRU):
        predicted, measured = (
            act(Recurrent(kind), (1, 1, 4, 4, 4)) for act in (unet3d.memory.predict, unet3d.memory.explain)
        )
        assert predicted.guesses or predicted.peak_bytes == measured.peak_bytes, kind
        assert bool(predicted.guesses) == ("LSTM" in str(predicted)) == ("GUESS" in str(predicted))
    with pytest.warns(UserWarning, match=r"LSTM.*workspace.*explain"):
        unet3d.memory.predict(Recurrent(nn.LSTM), (1, 1, 4, 4, 4))


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.item(),
    "tolist": lambda x: x.reshape(1).tolist(),
    "int": lambda x: range(int(x)),
    "integer": lambda x: range(x.long().item()),
    "draw": lambda x: random.random(),
    "numpy": lambda x: np.random.rand(),
}


@promise("The memory of any network", "a network or a ...")
@pytest.mark.parametrize("way", READS)
def test_values_read_by_a_loss_and_draws_of_others_are_guesses_too(way: str) -> None:
    def loss(output: list[Tensor], label: Tensor) -> Tensor:
        READS[way](output[0].sum())
        return output[0].mean()

    before = random.getstate()
    with pytest.warns(UserWarning, match="GUESS"):
        found = unet3d.memory.predict(Own(), SHAPE, loss)
    assert len(found.guesses) == 1 and random.getstate() == before


def changed(a: Tensor) -> Tensor:
    """Return a tensor in whose place other numbers are now."""
    return a.add_(1)


@pytest.mark.parametrize(("change", "is_known"), [(lambda a: a, True), (changed, False)])
def test_axes_that_a_loss_reads_from_a_range_are_known(change: Callable[[Tensor], Tensor], is_known: bool) -> None:
    """As MONAI's Dice losses do; a range that has been written to is a guess."""

    def loss(output: list[Tensor], label: Tensor) -> Tensor:
        axes = change(torch.arange(2, output[0].dim())).tolist()
        return output[0].sum(axes if is_known else [2, 3, 4]).mean()

    with nullcontext() if is_known else pytest.warns(UserWarning, match="GUESS"):
        predicted = unet3d.memory.predict(Own(), SHAPE, loss)
    assert bool(predicted.guesses) != is_known
    if is_known:
        assert predicted.peak_bytes == unet3d.memory.explain(Own(), SHAPE, loss).peak_bytes


SIZES: dict[str, Callable[[Tensor], Any]] = {
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "numpy": lambda x: x.detach().numpy().sum(),
    "fails": lambda x: 1 / x.sum().item(),
    "equal": lambda x: torch.equal(x, x + 1),
}


@promise(
    "The memory of any network",
    "sizes that depend on values; a step that fails for values taken as 0",
    "one line with FILE:LINE: use `explain`",
)
@pytest.mark.parametrize("way", SIZES)
def test_what_depends_on_values_and_cannot_be_predicted_is_one_line(way: str) -> None:
    def loss(output: list[Tensor], label: Tensor) -> Tensor:
        SIZES[way](output[0])
        return output[0].mean()

    with pytest.raises(UserError, match=r"test_explain\.py:\d+.*unet3d\.memory\.explain"):
        unet3d.memory.predict(Own(), SHAPE, loss)


@promise("The memory of any network", "an image that is not N C D H W, without a loss of its own", "one line")
def test_an_image_of_two_dimensions_needs_a_loss_of_its_own() -> None:
    model = nn.Conv2d(1, 3, 3, padding=1)
    for act in (unet3d.memory.predict, unet3d.memory.explain):
        with pytest.raises(UserError, match=r"^example: .*N C D H W"):
            act(model, (1, 1, 8, 8))
        assert act(model, (1, 1, 8, 8), nn.functional.cross_entropy).peak_bytes


class Named(nn.Module):
    """Submodules whose names are words of tables, and one name within another."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv3d(1, 4, 1))
        self.encoder = nn.ModuleDict({"block": nn.Sequential(nn.Conv3d(4, 4, 1))})
        self.loss = nn.Conv3d(4, 3, 1)
        self.add_module("0", nn.Conv3d(4, 4, 1))

    def forward(self, image: Tensor) -> Tensor:
        x = self.get_submodule("0")(self.block(image))
        return self.loss(self.encoder["block"](x + x))


@promise(
    "The memory of any network",
    "submodules called `block`, `0` or `loss`",
    "rows of their own under their full names",
)
@pytest.mark.parametrize("act", [unet3d.memory.predict, unet3d.memory.explain])
def test_layers_have_their_full_names(act: Callable[..., Any]) -> None:
    found = act(Named(), SHAPE)
    names = {row["module"]: row["bytes"] for row in found.layers}
    assert {"(forward)", "block.0", "0", "encoder.block.0", "loss", "(loss)", "data"} == {*names} - {"backward"}
    cut = {row["module"]: row["bytes"] for row in act(Named(), SHAPE, depth=1).layers}
    assert cut == {name.partition(".")[0]: size for name, size in names.items()}
    with pytest.raises(UserError, match=r"^depth=0: "):
        act(Named(), SHAPE, depth=0)


class Sliced(nn.Module):
    """Writes to a view in place, whose gradient another branch needs too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv3d(1, 4, 1), nn.InstanceNorm3d(4), nn.Conv3d(4, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = self.conv(image)
        return self.head(nn.functional.leaky_relu_(self.norm(x)) + x)


def dynunet() -> nn.Module:
    from monai.networks.nets import DynUNet

    return DynUNet(3, 1, 3, [3] * 3, [1, 2, 2], [2, 2], filters=[4, 4, 8], norm_name=("INSTANCE", {"affine": True}))


def unet_of_monai() -> nn.Module:
    from monai.networks.nets import UNet

    return UNet(3, 1, 3, (4, 8), (2,), norm="instance", act=("leakyrelu", {"inplace": True}))


@promise(
    "The memory of any network",
    "an activation in place on a view, as after instance norm",
    "predicted bytes, peaks and layers equal measured ones",
)
@pytest.mark.parametrize("make", [Sliced, dynunet, unet_of_monai])
def test_predicted_and_measured_bytes_are_of_the_same_layers(make: Callable[[], nn.Module]) -> None:
    model = make()
    predicted, measured = (act(model, SHAPE) for act in (unet3d.memory.predict, unet3d.memory.explain))
    assert predicted.layers == measured.layers and predicted.phases == measured.phases
    assert predicted.ledger["moment"] == measured.ledger["moment"]


def bench() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "explain.py"
    spec = importlib.util.spec_from_file_location("explain_bench", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny(name: str) -> nn.Module:
    """As narrow as it can be."""
    from monai.networks import nets

    return {
        "SegResNet": lambda: nets.SegResNet(3, 8, 1, 3, blocks_down=(1, 1), blocks_up=(1,)),
        "UNETR": lambda: nets.UNETR(1, 3, (16, 16, 16), feature_size=4, hidden_size=24, mlp_dim=48, num_heads=2),
    }[name]()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SegResNet", "UNETR"])
def test_networks_of_monai_are_explained_as_the_allocator_has_them(name: str) -> None:
    """Within 1 %, without what one kernel takes and gives back; `benchmarks/explain.py` has them in their sizes."""
    shape = (1, 1, 16, 16, 16)
    tensors, _ = bench().unobserved(partial(tiny, name), shape)
    for act in (unet3d.memory.predict, unet3d.memory.explain):
        assert act(tiny(name), shape).peak_bytes == pytest.approx(tensors, rel=0.01)


@pytest.mark.parametrize("act", [unet3d.memory.predict, unet3d.memory.explain])
def test_arguments_that_are_no_functions_are_one_line(act: Callable[..., Explanation]) -> None:
    for given in ({"optimizer": "adam"}, {"loss": "dice"}):
        with pytest.raises(UserError, match=rf"^{next(iter(given))}: give a function[^\n]*$"):
            act(nn.Conv3d(1, 3, 1), (1, 1, 4, 4, 4), **given)


class Decaying(nn.Sequential):
    """Its forward puts another tensor into the place of a buffer."""

    def __init__(self) -> None:
        super().__init__(nn.Conv3d(1, 3, 1))
        self.register_buffer("history", torch.ones(2**16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.history = self.history * 0.9
        found: torch.Tensor = super().forward(x)
        return found


def test_a_buffer_that_forward_replaces_is_not_counted_twice_and_is_put_back() -> None:
    model = Decaying()
    peaks = [act(model, (1, 1, 4, 4, 4)).peak_bytes for act in (unet3d.memory.predict, unet3d.memory.explain)]
    assert peaks[0] == peaks[1]
    assert torch.equal(model.history, torch.ones(2**16))
