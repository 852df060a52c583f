"""`python -m unet3d memory --below SIZE` and `unet3d.memory.assert_below`: a peak as a check, without a GPU."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from promises import promise
from torch import Tensor, nn
from training import PLAIN, TINY, face

import unet3d.memory
from unet3d import build
from unet3d.base.errors import UserError
from unet3d.base.types import mib
from unet3d.config import compose
from unet3d.memory.breakdown import cut_name, short_name
from unet3d.recomputing import search
from unet3d.recomputing.module import Recomputed

NET = ("model=unet_tiny", "model.in_channels=1", "model.classes=3", "data.patch=[16,16,16]", *PLAIN)
OUTSIDE = {"(forward)", "data", "forward", "loss", "backward", "step"}  # of all modules
PLENTY = "999GiB"
SHAPE = (1, 1, 16, 16, 16)


@pytest.fixture(autouse=True)
def _quick_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try few schedules: which are found makes no difference here."""
    monkeypatch.setattr(search, "TRIES", search.FEWEST_TRIES)


class Skips(nn.Module):
    """A stage at full resolution that keeps some maps for its end; it also prints."""

    def __init__(self, skips: int = 1) -> None:
        super().__init__()
        self.stem = nn.Conv3d(1, 16, 3, padding=1)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Conv3d(16, 16, 3, padding=1), nn.ReLU()) for _ in range(4)])
        self.head = nn.Conv3d((1 + skips) * 16, 3, 1)
        self.skips = skips
        print("a network that prints")

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        maps = []
        for block in self.blocks:
            maps.append(x)
            x = block(x)
        print("a forward pass that prints")
        return self.head(torch.cat([x, *maps[: self.skips]], dim=1))


SKIPS = ("--module", f"{__name__}:Skips", "--input", "1x1x16x16x16")


def checked(capsys: pytest.CaptureFixture[str], *words: object, below: str = PLENTY) -> dict[str, Any]:
    """Return the JSON of a check, which is alone on stdout."""
    code = face("memory", *words, "--below", below, "--json")
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (0 if answer["fits"] else 1)
    return answer


def in_mib(size: int) -> str:
    return f"{size / 2**20}MiB"


@promise("What scripts rely on", "exit code 1 of `memory --below`", "with a line on stdout: more than the limit")
@pytest.mark.parametrize(
    ("words", "kind"),
    [(NET, "tensors"), (SKIPS, "tensors"), ((*NET, "device=cuda"), "reserved")],
    ids=["config", "module", "cuda"],
)
def test_a_peak_at_the_limit_fits_and_one_of_a_byte_more_does_not(
    words: tuple[str, ...], kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA the limit is for what the allocator reserves, and what its replay leaves out is said."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.8")
    answer = checked(capsys, *words)
    peak = answer["peak_bytes"][kind]
    assert answer["compared"] == kind and [*answer["peak_bytes"].values()] == sorted(answer["peak_bytes"].values())
    lines = []
    for limit, code in ((peak, 0), (peak - 1, 1), (peak // 2, 1)):
        assert face("memory", *words, "--below", in_mib(limit)) == code
        captured = capsys.readouterr()
        assert captured.out.count("\n") == 1
        for part in (answer["network"], mib(peak), mib(limit), answer["layer"]["name"]):
            assert part in captured.out
        assert ("garbage_collection_threshold" in captured.err) == (kind == "reserved")
        lines.append(captured.out)
    assert " at the limit" in lines[0] and "1 bytes above" in lines[1] and f"{mib(peak // 2)} MiB above" in lines[2]


@promise(
    "What scripts rely on",
    "the object of `memory --below --json`",
    "has the names that docs/memory.md lists, and adds up",
)
@promise(
    "The memory of any network",
    "a network that prints, under `memory --below ... --json`",
    "to stderr: the object is alone on stdout",
)
def test_the_object_has_the_documented_names_and_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    answer = checked(capsys, *SKIPS, below="1MiB")
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    assert answer["version"] == 2 and not [name for name in answer if f"`{name}`" not in page]
    assert answer["margin_bytes"] == 2**20 - answer["peak_bytes"]["tensors"] < 0
    assert sum(layer["bytes"] for layer in answer["layers"]) == answer["peak_bytes"]["tensors"]
    assert answer["layers"][0] == answer["layer"] and answer["workspace_bytes"] is None


def refusal(model: nn.Module, limit: Any = 1, **settings: Any) -> str:
    """Return the line with which a network is refused."""
    with pytest.raises(AssertionError) as caught:
        unet3d.memory.assert_below(model, SHAPE, limit, **settings)
    return str(caught.value)


def test_from_pytest_it_is_the_same_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--args", '{"skips": 2}', "amp=true", "device=cuda", "--below", "1MiB")
    assert face("memory", *SKIPS, *words) == 1
    line = capsys.readouterr().out.strip()
    assert refusal(Skips(2), "1MiB", amp=True, device="cuda") == line
    unet3d.memory.assert_below(Skips(2), SHAPE, PLENTY, amp=True, device="cuda")


def test_a_limit_may_be_a_number_of_bytes_and_is_for_the_optimizer_too() -> None:
    peak = unet3d.memory.predict(Skips(), SHAPE).peak_bytes
    unet3d.memory.assert_below(Skips(), SHAPE, peak)
    refusal(Skips(), peak - 1)
    unet3d.memory.assert_below(Skips(), SHAPE, peak - 1, optimizer=torch.optim.SGD)


@pytest.mark.parametrize("limit", [0, True, 1.5])
def test_what_is_no_number_of_bytes_is_refused(limit: Any) -> None:
    with pytest.raises(UserError, match=f"limit={limit}"):
        unet3d.memory.assert_below(Skips(), SHAPE, limit)


def test_a_network_on_meta_needs_what_a_real_one_needs() -> None:
    with torch.device("meta"):
        model = Skips()
    assert refusal(model) == refusal(Skips())
    with pytest.raises(UserError, match=r"meta.*unet3d\.memory\.predict"):
        unet3d.memory.explain(model, SHAPE)


def test_a_schedule_that_is_not_found_yet_is_found_and_measured_as_predicted() -> None:
    """Without an example, and for another precision than the example's; the line names the network."""
    for model in (unet3d.recompute(Skips()), unet3d.recompute(Skips(), torch.zeros(SHAPE), "tiles")):
        predicted, measured = (act(model, SHAPE, amp="bf16") for act in (unet3d.memory.predict, unet3d.memory.explain))
        assert predicted.name == measured.name == "Skips"
        assert predicted.peak_bytes == measured.peak_bytes
        assert measured.peak_bytes < unet3d.memory.predict(Skips(), SHAPE, amp="bf16").peak_bytes


@pytest.mark.slow
def test_a_prediction_for_cuda_has_the_schedule_for_cuda() -> None:
    """A network whose schedule was found for an example on the CPU has other tiles there."""
    shape = (1, 1, 32, 32, 32)
    found_on_cpu = unet3d.recompute(Skips(), torch.zeros(shape), "tiles")
    for_cuda = Recomputed(Skips(), "tiles", device_type="cuda")
    on_cpu = unet3d.memory.predict(found_on_cpu, shape)
    on_cuda = unet3d.memory.predict(found_on_cpu, shape, device="cuda")
    assert on_cuda.peak_bytes == unet3d.memory.predict(for_cuda, shape, device="cuda").peak_bytes > on_cpu.peak_bytes


@pytest.mark.parametrize("way", ["recompute=tiles", "model.residual=true"])
def test_layers_have_the_names_of_modules_and_are_summed_up_by_depth(
    way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = compose.compose([*NET, way])
    names = {name for name, _ in build.model(config.model, 0).named_modules()}
    answer = checked(capsys, *NET, way)
    assert {layer["name"] for layer in answer["layers"]} <= names | OUTSIDE
    assert answer["layer"]["name"] in names and answer["reached_in"]["module"] in names | OUTSIDE
    stages = Counter[str]()
    for layer in answer["layers"]:
        stages[cut_name(1, layer["name"])] += layer["bytes"]
    by_stage = checked(capsys, *NET, way, "--depth", "1")["layers"]
    assert {layer["name"]: layer["bytes"] for layer in by_stage} == stages


@pytest.mark.slow
def test_a_runs_measured_layers_are_those_of_a_check(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = json.loads((finished / "memory.json").read_text())["measured"]
    answer = checked(capsys, *TINY, "amp=true", "ckpt=2")
    assert answer["peak_bytes"]["tensors"] == measured["peak_bytes"]
    layers = Counter[str]()
    for layer in answer["layers"]:
        layers[short_name(layer["name"])] += layer["bytes"]
    assert layers == {row["module"]: row["bytes"] for row in measured["layers"]}


@pytest.mark.filterwarnings("ignore:A GUESS")
def test_a_guess_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--module", f"{__name__}:Choosing", "--input", "1x1x4x4x4")
    assert face("memory", *words, "--below", PLENTY) == 0
    captured = capsys.readouterr()
    assert "GUESSED" in captured.out and __file__ in captured.err
    (place,) = checked(capsys, *words)["guesses"]
    assert place.startswith(__file__)


class Choosing(nn.Conv3d):
    """Takes another way by a value."""

    def __init__(self) -> None:
        super().__init__(1, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image if image.mean() > 0 else -image)


@promise(
    "The memory of any network",
    "an unexpected error in `memory --below`, whose exit code 1 is also that of a larger peak",
    "nothing on stdout",
)
def test_an_unexpected_error_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python ends with exit code 1 for it, as for a peak above the limit, and prints a trace; stdout has no answer."""
    (tmp_path / "broken.py").write_text("raise ZeroDivisionError('of the file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError, match="of the file"):
        face("memory", "--module", "broken:network", "--input", "1x1x8x8x8", "--below", "8GiB")
    assert not capsys.readouterr().out
