"""`python -m unet3d memory --below SIZE` and `unet3d.memory.assert_below`: a peak as a check, without a GPU."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from promises import promise
from torch import Tensor, nn
from training import PLAIN, TINY, face, pixels_alone, train

import unet3d.memory
from unet3d import build
from unet3d.base.errors import UserError
from unet3d.base.types import mib
from unet3d.config import compose
from unet3d.memory.breakdown import short_name
from unet3d.recomputing import search
from unet3d.recomputing.module import Recomputed

NET = ("model=unet_tiny", "model.in_channels=1", "model.classes=3", "data.patch=[16,16,16]", *PLAIN)
OUTSIDE = {"(forward)", "data", "forward", "loss", "backward", "step"}  # of all modules
PLENTY = "999GiB"


@pytest.fixture(autouse=True)
def _quick_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try few schedules: which are found makes no difference here."""
    monkeypatch.setattr(search, "TRIES", search.FEWEST_TRIES)


class Skips(nn.Module):
    """A stage at full resolution that keeps some maps for its end; it also prints."""

    def __init__(self, skips: int = 1, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv3d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Conv3d(width, width, 3, padding=1), nn.ReLU()) for _ in range(4)])
        self.head = nn.Conv3d((1 + skips) * width, 3, 1)
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


def of_skips(shape: str = "1x1x16x16x16", **keywords: int) -> tuple[str, ...]:
    """Return the flags that check a network of these skips."""
    return ("--module", f"{__name__}:Skips", "--args", json.dumps(keywords), "--input", shape)


class Failing(nn.Conv3d):
    """Fails as it is made or as it is called, with errors of no special kind."""

    def __init__(self, where: str) -> None:
        if where == "init":
            raise AttributeError("of init")
        super().__init__(1, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        raise KeyError("of forward")


def of_failing(where: str) -> tuple[str, ...]:
    """Return the flags that check a network that fails in `where`."""
    return ("--module", f"{__name__}:Failing", "--args", json.dumps({"where": where}), "--input", "1x1x8x8x8")


def checked(capsys: pytest.CaptureFixture[str], *words: object, below: str = PLENTY) -> dict[str, Any]:
    """Return the JSON of a check, which is alone on stdout."""
    code = face("memory", *words, "--below", below, "--json")
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (0 if answer["fits"] else 1)
    return answer


def in_mib(size: int) -> str:
    return f"{size / 2**20}MiB"


@promise("What scripts rely on", "exit code 1 of `memory --below`", "with a line on stdout: more than the limit")
@pytest.mark.parametrize("words", [(*NET,), of_skips()], ids=["config", "module"])
def test_a_peak_at_the_limit_fits_and_one_of_a_byte_more_does_not(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    answer = checked(capsys, *words)
    peak = answer["peak_bytes"]["tensors"]
    lines = []
    for limit, code in ((peak, 0), (peak - 1, 1), (peak // 2, 1)):
        assert face("memory", *words, "--below", in_mib(limit)) == code
        out = capsys.readouterr().out
        assert out.count("\n") == 1
        assert all(part in out for part in (answer["network"], mib(peak), mib(limit), answer["layer"]["name"]))
        lines.append(out)
    assert " at the limit" in lines[0] and "bytes" not in lines[0] and "1 bytes above" in lines[1]
    assert f"{mib(peak - peak // 2)} MiB above" in lines[2] and mib(answer["layer"]["bytes"]) in lines[2]


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
    answer = checked(capsys, *of_skips(), below="1MiB")
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    assert answer["version"] == 2 and not [name for name in answer if f"`{name}`" not in page]
    assert answer["margin_bytes"] == 2**20 - answer["peak_bytes"]["tensors"] < 0
    assert sum(layer["bytes"] for layer in answer["layers"]) == answer["peak_bytes"]["tensors"]
    assert answer["layers"][0] == answer["layer"] and answer["workspace_bytes"] is None


def test_on_cuda_the_limit_is_for_what_the_allocator_reserves(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.8")
    for words in ((*NET,), of_skips()):
        answer = checked(capsys, *words, "device=cuda")
        tensors, allocated, reserved = (answer["peak_bytes"][kind] for kind in ("tensors", "allocated", "reserved"))
        assert answer["compared"] == "reserved" and tensors <= allocated <= reserved
        assert answer["workspace_bytes"] >= 0
        assert face("memory", *words, "device=cuda", "--below", in_mib(reserved - 1)) == 1
        captured = capsys.readouterr()
        assert mib(reserved) in captured.out and "garbage_collection_threshold" in captured.err


@pytest.mark.parametrize("way", [(), ("amp=true", "device=cuda")], ids=["cpu", "cuda"])
def test_from_pytest_it_is_the_same_line(way: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert face("memory", *of_skips(skips=2), *way, "--below", "1MiB") == 1
    line = capsys.readouterr().out.strip()
    settings: dict[str, Any] = {"amp": True, "device": "cuda"} if way else {}
    with pytest.raises(AssertionError) as caught:
        unet3d.memory.assert_below(Skips(skips=2), (1, 1, 16, 16, 16), "1MiB", **settings)
    assert str(caught.value) == line
    unet3d.memory.assert_below(Skips(skips=2), (1, 1, 16, 16, 16), PLENTY, **settings)


def test_a_limit_may_be_a_number_of_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    shape = (1, 1, 4, 4, 4)
    peak = checked(capsys, *of_skips("1x1x4x4x4"))["peak_bytes"]["tensors"]
    unet3d.memory.assert_below(Skips(), shape, peak)
    with pytest.raises(AssertionError):
        unet3d.memory.assert_below(Skips(), shape, peak - 1)
    limits: list[Any] = [0, -1, True, 1.5, None]
    for limit in limits:
        with pytest.raises(UserError, match=f"limit={limit}"):
            unet3d.memory.assert_below(Skips(), shape, limit)


@pytest.mark.parametrize(("has_example", "device"), [(False, "cpu"), (True, "cuda")])
def test_a_schedule_that_is_not_found_yet_is_found(has_example: bool, device: str) -> None:
    """Without an example, and for another precision than the example's; the line names the network."""
    shape = (1, 1, 16, 16, 16)
    example = torch.zeros(shape) if has_example else None
    model = unet3d.recompute(Skips(), example, "tiles")
    with pytest.raises(AssertionError) as caught:
        unet3d.memory.assert_below(model, shape, 1, amp="bf16", device=device)
    assert str(caught.value).startswith("Skips: ")
    with pytest.raises(AssertionError) as of_plain:
        unet3d.memory.assert_below(Skips(), shape, 1, amp="bf16", device=device)
    assert str(of_plain.value) != str(caught.value)


def test_a_schedule_that_is_not_found_yet_is_measured_as_predicted() -> None:
    shape = (1, 1, 16, 16, 16)
    model = unet3d.recompute(Skips())
    predicted = unet3d.memory.predict(model, shape)
    measured = unet3d.memory.explain(model, shape)
    assert (predicted.name, predicted.peak_bytes) == (measured.name, measured.peak_bytes)
    assert measured.name == "Skips" and measured.peak_bytes < unet3d.memory.predict(Skips(), shape).peak_bytes


def test_a_prediction_for_cuda_has_the_schedule_for_cuda() -> None:
    """A network whose schedule was found for an example on the CPU has other tiles there."""
    shape = (1, 1, 32, 32, 32)
    found_on_cpu = unet3d.recompute(Skips(), torch.zeros(shape), "tiles")
    for_cuda = Recomputed(Skips(), "tiles", device_type="cuda")
    on_cpu = unet3d.memory.predict(found_on_cpu, shape)
    on_cuda = unet3d.memory.predict(found_on_cpu, shape, device="cuda")
    assert on_cuda.peak_bytes == unet3d.memory.predict(for_cuda, shape, device="cuda").peak_bytes > on_cpu.peak_bytes
    assert unet3d.memory.predict(for_cuda, shape, device="cpu").peak_bytes == on_cpu.peak_bytes


def test_the_loss_and_the_optimizer_count(capsys: pytest.CaptureFixture[str]) -> None:
    shape = (1, 1, 4, 4, 4)
    limit = in_mib(checked(capsys, *of_skips("1x1x4x4x4"))["peak_bytes"]["tensors"] - 1)
    with pytest.raises(AssertionError):
        unet3d.memory.assert_below(Skips(), shape, limit)
    unet3d.memory.assert_below(Skips(), shape, limit, optimizer=torch.optim.SGD)


def test_a_network_on_meta_needs_what_a_real_one_needs() -> None:
    lines = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = Skips()
        with pytest.raises(AssertionError) as caught:
            unet3d.memory.assert_below(model, (1, 1, 16, 16, 16), "1MiB")
        lines.append(str(caught.value))
    assert lines[0] == lines[1]
    with pytest.raises(UserError, match=r"meta.*unet3d\.memory\.predict"):
        unet3d.memory.explain(model, (1, 1, 16, 16, 16))


WIDER = ("model=unet_small", "model.in_channels=1", "model.classes=3", "data.patch=[96,96,64]", "batch=2", *PLAIN)
BIG = "1x1x160x160x128"
CHANGES = {
    "one more skip": (of_skips(BIG, skips=1), of_skips(BIG, skips=2)),
    "a wider level": ((*WIDER, "model.features=[16,32,64]"), (*WIDER, "model.features=[24,32,64]")),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_adds_300_mb_fails(change: str, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = CHANGES[change]
    peak = checked(capsys, *before)["peak_bytes"]["tensors"]
    limit = in_mib(peak + 150 * 10**6)
    assert face("memory", *before, "--below", limit) == 0
    capsys.readouterr()
    assert checked(capsys, *after)["peak_bytes"]["tensors"] > peak + 300 * 10**6
    assert face("memory", *after, "--below", limit) == 1


@pytest.mark.parametrize("way", ["ckpt=2", "recompute=lean", "recompute=tiles", "model.residual=true"])
def test_layers_have_the_names_of_modules(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = compose.compose([*NET, way])
    names = {name for name, _ in build.model(config.model, 0).named_modules()}
    answer = checked(capsys, *NET, way)
    assert {layer["name"] for layer in answer["layers"]} <= names | OUTSIDE
    assert answer["layer"]["name"] in names and answer["reached_in"]["module"] in names | OUTSIDE


def summed(rows: list[dict[str, Any]], key: str, name: Callable[[str], str]) -> dict[str, int]:
    """Return the bytes of rows by a name that is made of theirs."""
    totals = Counter[str]()
    for row in rows:
        totals[name(row[key])] += row["bytes"]
    return dict(totals)


def stage(path: str) -> str:
    return path.partition(".")[0]


def layers_beside(folder: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> list[tuple[Any, Any]]:
    """Return what a run has measured beside its prediction, and beside checks of the same step."""
    memory = json.loads((folder / "memory.json").read_text())
    measured = memory["measured"]["layers"]
    in_full = checked(capsys, *words)
    by_stage = checked(capsys, *words, "--depth", "1")["layers"]
    return [
        (measured, memory["predicted"]["layers"]),
        (memory["measured"]["peak_bytes"], in_full["peak_bytes"]["tensors"]),
        (summed(measured, "module", str), summed(in_full["layers"], "name", short_name)),
        (summed(measured, "module", stage), summed(by_stage, "name", str)),
    ]


@pytest.mark.slow
def test_a_runs_measured_layers_are_the_predicted_ones(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for measured, predicted in layers_beside(finished, (*TINY, "amp=true", "ckpt=2"), capsys):
        assert measured == predicted


@pytest.mark.slow
def test_measured_layers_of_recompute_are_the_predicted_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*TINY, *PLAIN, "recompute=tiles")
    done = train(tmp_path, *words, "hydra.run.dir=run", hook=pixels_alone, frills=True)
    assert done.code == 0, done.err
    for measured, predicted in layers_beside(tmp_path / "run", words, capsys):
        assert measured == predicted


def rows_of_layers(printed: str) -> dict[str, str]:
    """Return the MiB of each row of the table by layer, as printed."""
    _, _, rest = printed.partition("At the peak, by layer\n")
    table, _, _ = rest.partition("At the peak, the largest groups")
    rows = [line.split() for line in table.splitlines() if "%" in line]
    return {row[0]: row[1] if "." in row[1] else row[2] for row in rows}


@pytest.mark.slow
def test_the_table_by_layer_can_be_drilled_down(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unet3d.cli.memory_answers.narrowed", lambda subject: {})
    monkeypatch.setattr("unet3d.cli.memory_answers.family", lambda subject, overrides: [subject])
    monkeypatch.setattr("unet3d.cli.memory_answers.remedies.single_techniques", lambda asked: [])
    wanted = {}
    for depth in (1, 2, 9):
        for row in checked(capsys, *NET, "--depth", depth)["layers"]:
            wanted[depth, row["name"]] = mib(row["bytes"])
    for depth in (1, 2, 9):
        assert face("memory", *NET, "--depth", depth) == 0
        printed = rows_of_layers(capsys.readouterr().out)
        assert printed == {name: size for (of, name), size in wanted.items() if of == depth}
    assert {(1, "up2"), (2, "up2.block"), (9, "up2.block.conv1.conv")} <= wanted.keys()
    assert (1, "up2.block") not in wanted and (2, "up2.block.conv1") not in wanted


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--below", "8"), ["--below 8:", "GiB"]),
        (("--json",), ["--json", "--below"]),
        (("--below", "8GiB", "--curves", "-o", "out"), ["--below", "--curves"]),
        (("--below", "8GiB", *of_skips(), "--measure"), ["--below", "--measure"]),
        (("--below", "8GiB", "batch=1,2"), ["--below", "commas"]),
        (("fit", "--below", "8GiB", "budget=8GiB"), ["--below", "fit"]),
        (("--below", "8GiB", *NET, "budget=8GiB"), ["--below", "remove budget="]),
        (("--depth", "0"), ["--depth 0:"]),
        (("--depth", "1", "batch=1,2"), ["--depth", "commas"]),
        (("--below", "8GiB", "--json", "chkpt=2"), ["chkpt"]),
        (("--below", "8GiB", "--json", *of_skips(nope=1)), ["--args", "nope"]),
        (("--below", "8GiB", *of_failing("forward")), ["Failing", "1x1x8x8x8", "KeyError: 'of forward'"]),
        (("--below", "8GiB", *of_failing("init")), [f"{__name__}:Failing", "--args", "AttributeError: of init"]),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_no_answer(words: tuple[str, ...], said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Its exit code is neither that of a peak within the limit nor that of one above, and stdout stays empty."""
    assert face("memory", *words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and all(part in captured.err for part in said)
    assert captured.err.count("\n") == 1 and not captured.out


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
def test_an_unexpected_error_is_no_answer_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python ends with exit code 1 for it, as for a peak above the limit, and prints a trace; stdout has no answer."""
    (tmp_path / "broken.py").write_text("raise ZeroDivisionError('of the file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError, match="of the file"):
        face("memory", "--module", "broken:network", "--input", "1x1x8x8x8", "--below", "8GiB")
    assert not capsys.readouterr().out
