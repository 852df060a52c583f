"""The memory of a step of any network: what is measured is what is predicted, and the model stays as it was."""

import copy
import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
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
from unet3d.memory import tables
from unet3d.memory.any_network import Explanation
from unet3d.memory.meter import COUNTED
from unet3d.memory.simulate import simulate
from unet3d.memory.technique import step_peak
from unet3d.report import explained
from unet3d.training import optim

SHAPE = (1, 1, 16, 16, 16)
TINY_SHAPE = (1, 1, 4, 4, 4)
SMALL = ("model=unet_tiny", "model.features=[4,8]", "data.patch=[16,16,16]", "batch=1", "optim.clip=null")
BOTH = (unet3d.memory.predict, unet3d.memory.explain)


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


class Sliced(nn.Module):
    """Writes to a view in place, whose gradient another branch needs too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv3d(1, 4, 1), nn.InstanceNorm3d(4), nn.Conv3d(4, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = self.conv(image)
        return self.head(nn.functional.leaky_relu_(self.norm(x)) + x)


class Replacing(nn.Conv3d):
    """Puts another tensor in the place of its buffer at each step; another buffer cannot be written to."""

    def __init__(self) -> None:
        super().__init__(1, 3, 1)
        self.register_buffer("history", torch.ones(2**16))
        self.register_buffer("wide", torch.zeros(1).expand(2))

    def forward(self, image: Tensor) -> Tensor:
        self.history = 0.9 * self.history + image.detach().mean()
        return super().forward(image)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.head = kind(1, 4, batch_first=True), nn.Conv3d(4, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        y, _ = self.layer(image.flatten(2).transpose(1, 2))
        return self.head(y.transpose(1, 2).reshape(-1, 4, *image.shape[2:]))


def convs(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), *more, nn.ReLU(), nn.Conv3d(4, 3, 1))


def over_a_range(output: list[Tensor], label: Tensor) -> Tensor:
    """A loss that reads axes from a range, as MONAI's Dice losses do."""
    return output[0].sum(torch.arange(2, output[0].dim()).tolist()).mean()


def dynunet() -> nn.Module:
    from monai.networks.nets import DynUNet

    return DynUNet(3, 1, 3, [3] * 3, [1, 2, 2], [2, 2], filters=[4, 4, 8], norm_name=("INSTANCE", {"affine": True}))


WAYS = {
    "float32": (Own, {}),
    "bf16": (Own, {"amp": True}),
    "fp16, sgd": (Own, {"amp": "fp16", "optimizer": partial(torch.optim.SGD, lr=0.1)}),
    "sizes of numpy, averages that count": (
        lambda: convs(nn.BatchNorm3d(4, momentum=None)),
        {"example": np.array(SHAPE)},
    ),
    "weights of bf16": (lambda: convs().bfloat16(), {}),
    "weights and images of bf16": (lambda: convs().bfloat16(), {"example": torch.randn(SHAPE, dtype=torch.bfloat16)}),
    "recomputed": (lambda: unet3d.recompute(convs(), torch.zeros(SHAPE), plan="lean"), {}),
    "a view in place": (Sliced, {}),
    "axes from a range": (Own, {"loss": over_a_range}),
    "a buffer that is replaced": (Replacing, {"example": TINY_SHAPE}),
    "a recurrent layer without a workspace": (lambda: Recurrent(nn.GRU), {"example": TINY_SHAPE}),
}


@promise(
    "The memory of any network",
    "an activation in place on a view, as after instance norm",
    "predicted bytes, peaks and layers equal measured ones",
)
@pytest.mark.parametrize(
    ("make", "words"),
    [*WAYS.values(), pytest.param(dynunet, {}, marks=pytest.mark.slow)],
    ids=[*WAYS, "DynUNet of MONAI"],
)
def test_what_is_predicted_is_measured(make: Callable[[], nn.Module], words: dict[str, Any]) -> None:
    model = make()
    predicted, measured = (act(**{"model": model, "example": SHAPE} | words) for act in BOTH)
    assert (predicted.kind, measured.kind) == ("predicted", "measured") and not predicted.guesses
    assert predicted.peak_bytes == measured.peak_bytes == max(p["steady"] for p in measured.phases.values())
    for name in ("categories", "phases", "layers"):
        assert getattr(predicted, name) == getattr(measured, name)
    assert predicted.ledger["moment"] == measured.ledger["moment"]
    assert sum(row["bytes"] for row in measured.layers) == sum(measured.categories.values()) == measured.peak_bytes
    if make is Own:
        assert measured.categories["params"] == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


@pytest.mark.slow
def test_of_the_packages_own_network_it_measures_what_a_run_is_predicted_to_need() -> None:
    config = compose.compose([*SMALL, "workers=0"])
    config.model.in_channels, config.model.classes = 1, 3
    model, label = build.model(config.model, 0), torch.zeros(1, 16, 16, 16, dtype=torch.int16)
    made = partial(optim.optimizer, config.optim)
    found = unet3d.memory.explain(model, SHAPE, build.loss(config, 3), lambda weights: made(model), label=label)
    assert found.peak_bytes == step_peak(config, config.model).tensors


@pytest.mark.slow
def test_of_the_packages_own_network_it_predicts_what_a_run_is_predicted_to_need_on_cuda() -> None:
    """There a run's step lets go of its batch, which here is the caller's."""
    config = compose.compose([*SMALL, "device=cuda", "amp=true", "amp_dtype=bf16"])
    config.model.in_channels, config.model.classes = 1, 3
    model, label = build.model(config.model, 0), torch.zeros(1, 16, 16, 16, dtype=torch.int16)
    found = unet3d.memory.predict(model, SHAPE, build.loss(config, 3), AdamW, "bf16", label, "cuda")
    assert found.entry["kind"] == COUNTED and "cuda" in found.about.split()
    wanted = simulate(config, config.model).summary()["phases"]
    image, label_map = 4 * 16**3, 2 * 16**3  # bytes
    kept = {"backward": image, "step": image + label_map}  # the loss needs the labels
    for name, peaks in found.phases.items():
        less = kept.get(name, 0)
        assert {when: size - less for when, size in peaks.items()} == wanted[name], name


def fails(output: list[Tensor], label: Tensor) -> Tensor:
    raise KeyError("of the loss")


@pytest.mark.parametrize("loss", [None, fails], ids=["a step", "a step that fails"])
@pytest.mark.parametrize("act", BOTH)
def test_the_model_is_left_as_it_was(act: Callable[..., Explanation], loss: Callable[..., Tensor] | None) -> None:
    model = nn.Sequential(Replacing(), nn.Conv3d(3, 1, 1), Own()).eval()
    model[2].conv.weight.grad = torch.ones_like(model[2].conv.weight)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(KeyError, match="of the loss") if loss else nullcontext():
        act(model, torch.randn(SHAPE, generator=torch.Generator()), loss, partial(torch.optim.SGD, lr=1.0))
    assert not dispatch_modes() and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(one.training or one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    assert {name for name, weight in model.named_parameters() if weight.grad is not None} == {"2.conv.weight"}
    assert float(model[2].conv.weight.grad.sum()) == 8 * 27


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
    peak = f"{found.peak_bytes / 2**20:,.1f} MiB"
    first, second, *others = str(found).splitlines()
    assert first == "Own: 267 parameters; input 1x1x16x16x16, float32, on cpu"
    assert second.startswith(f"predicted peak of a step: {peak} (")
    assert max(map(len, others)) <= 80 and {"backward", "conv"} <= {*" ".join(others).split()}
    assert explained.draw_layers(found, tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")
    page = explained.write_page(found, tmp_path / "report").read_text()
    assert "Own" in page and "1x1x16x16x16" in page and peak in page
    memory = json.loads((tmp_path / "report" / "memory.json").read_text())
    assert memory["predicted"]["peak_bytes"] == found.peak_bytes and memory["parameters"] == 267
    (tmp_path / "report" / "STATUS").touch()
    with pytest.raises(UserError, match=rf"^{tmp_path / 'report'}: "):
        explained.write_page(found, tmp_path / "report")


def test_of_very_many_layers_a_file_has_the_largest_and_the_sum_of_the_others() -> None:
    found = unet3d.memory.predict(nn.Sequential(*(nn.Conv3d(3, 3, 1) for _ in range(9))), (1, 3, *TINY_SHAPE[2:]))
    rows = tables.folded(found.entry, 5)["layers"]
    assert len(rows) == 5 < len(found.layers) and sum(row["bytes"] for row in rows) == found.peak_bytes
    assert rows[-1]["module"] == f"{len(found.layers) - 4} smaller layers"


class Detached(nn.Conv3d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


NO_STEPS = {
    "no network": (lambda: "net", {}, "^model: give a network"),
    "no weights": (nn.ReLU, {}, "^ReLU: "),
    "frozen": (lambda: nn.Conv3d(1, 3, 1).requires_grad_(False), {}, "^Conv3d: has no weights to train: requires_grad"),
    "detached": (lambda: Detached(1, 3, 1), {}, "^Detached: the loss has no gradient: forward detaches"),
    "lazy": (lambda: nn.LazyConv3d(3, 1), {}, "^LazyConv3d: its lazy layers have no weights yet"),
    "traced": (lambda: torch.jit.trace(nn.Conv3d(1, 3, 1), torch.zeros(SHAPE)), {}, r"compiled by torch\.jit"),
    "closure": (Own, {"optimizer": torch.optim.LBFGS}, r"^optimizer: LBFGS .*step\(closure\)"),
    "example": (Own, {"example": (16, 16)}, r"^example: .*N C D H W.*\(16, 16\)"),
    "channels": (
        Own,
        {"example": (1, 2, 16, 16, 16)},
        "^Own cannot take an image of 1x2x16x16x16, .* 1 channels",
    ),
    "type": (Own, {"example": torch.zeros(SHAPE).double()}, "^Own cannot take an image of .*, float64.*double"),
    "amp": (Own, {"amp": "fp8"}, "^amp=fp8: .*bf16.*fp16"),
    "depth": (Own, {"depth": 0}, "^depth=0: "),
    "optimizer's name": (Own, {"optimizer": "adam"}, "^optimizer: give a function"),
    "loss's name": (Own, {"loss": "dice"}, "^loss: give a function"),
}


@pytest.mark.parametrize("act", BOTH)
@pytest.mark.parametrize("way", NO_STEPS)
@pytest.mark.filterwarnings("ignore")  # of what is deprecated, as torch.jit
def test_a_step_that_cannot_be_is_one_line(
    way: str, act: Callable[..., Explanation], capfd: pytest.CaptureFixture[str]
) -> None:
    make, words, line = NO_STEPS[way]
    with pytest.raises(UserError, match=line) as caught:
        act(**{"model": make(), "example": SHAPE} | words)
    assert "\n" not in str(caught.value)
    assert not capfd.readouterr().err, "torch's own remarks on what fails"


def test_what_is_compiled_and_other_devices_are_not_predicted() -> None:
    with pytest.raises(UserError, match=r"torch\.compile"):
        unet3d.memory.predict(torch.compile(Own(), backend="eager"), SHAPE)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^device=tpu: .*cpu.*cuda"):
        unet3d.memory.predict(Own(), SHAPE, device="tpu")


def test_adafactor_takes_weights_one_by_one_on_cuda_too() -> None:
    model = nn.Sequential(*(nn.Conv3d(8, 8, 3, padding=1) for _ in range(4)))
    shape, loss = (1, 8, 4, 4, 4), nn.functional.mse_loss
    alone, together, default = (
        unet3d.memory.predict(
            model, shape, loss, partial(torch.optim.Adafactor, foreach=way), label=torch.zeros(shape), device="cuda"
        )
        for way in (False, True, None)
    )
    assert default.peak_bytes == alone.peak_bytes < together.peak_bytes


@promise("The memory of any network", "an image that is not N C D H W, without a loss of its own", "one line")
@pytest.mark.parametrize("act", BOTH)
def test_an_image_of_two_dimensions_needs_a_loss_of_its_own(act: Callable[..., Explanation]) -> None:
    model = nn.Conv2d(1, 3, 3, padding=1)
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
@pytest.mark.parametrize("act", BOTH)
def test_layers_have_their_full_names(act: Callable[..., Explanation]) -> None:
    names = {row["module"]: row["bytes"] for row in act(Named(), SHAPE).layers}
    assert {"(forward)", "block.0", "0", "encoder.block.0", "loss", "(loss)", "data"} == {*names} - {"backward"}
    cut = {row["module"]: row["bytes"] for row in act(Named(), SHAPE, depth=1).layers}
    assert cut == {name.partition(".")[0]: size for name, size in names.items()}


# --- values, which a prediction does not have


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


@promise(
    "The memory of any network",
    "an LSTM, whose library alone knows what it keeps for backward",
    "a guess, with a warning that names it",
)
def test_an_lstm_whose_workspace_is_not_known_is_a_guess_that_says_so() -> None:
    with pytest.warns(UserWarning, match=r"LSTM.*workspace.*explain"):
        found = unet3d.memory.predict(Recurrent(nn.LSTM), TINY_SHAPE)
    assert found.guesses and "LSTM" in str(found) and "GUESS" in str(found)


def mean_after(act: Callable[[Tensor], Any]) -> Callable[[list[Tensor], Tensor], Tensor]:
    """A loss that does something with the output before it takes its mean."""

    def loss(output: list[Tensor], label: Tensor) -> Tensor:
        act(output[0])
        return output[0].mean()

    return loss


READS = {
    "item": lambda x: x.sum().item(),
    "integer": lambda x: range(x.sum().long().item()),
    "draw": lambda x: random.random(),
    "draw of NumPy": lambda x: np.random.rand(),
    "a range that was written to": lambda x: torch.arange(2, x.dim()).add_(1).tolist(),
}


@promise("The memory of any network", "a network or a ...")
@pytest.mark.parametrize("way", READS)
def test_values_read_by_a_loss_and_draws_of_others_are_guesses_too(way: str) -> None:
    before = random.getstate()
    with pytest.warns(UserWarning, match="GUESS"):
        found = unet3d.memory.predict(Own(), SHAPE, mean_after(READS[way]))
    assert len(found.guesses) == 1 and random.getstate() == before


SIZES = {
    "mask": lambda x: x[x > 0],
    "numpy": lambda x: x.detach().numpy().sum(),
    "fails": lambda x: 1 / x.sum().item(),
}


@promise(
    "The memory of any network",
    "sizes that depend on values; a step that fails for values taken as 0",
    "one line with FILE:LINE: use `explain`",
)
@pytest.mark.parametrize("way", SIZES)
def test_what_depends_on_values_and_cannot_be_predicted_is_one_line(way: str) -> None:
    with pytest.raises(UserError, match=r"test_explain\.py:\d+.*unet3d\.memory\.explain"):
        unet3d.memory.predict(Own(), SHAPE, mean_after(SIZES[way]))
