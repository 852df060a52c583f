"""`python -m unet3d plan --network` and `--module`: every printed patch fits, and the next does not."""

import json
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from training import face

from unet3d.recomputing import search

NETWORK = ("model.features=[2,4]", "batch=1", "optim=sgd", "loss.batch_dice=false")
KINDS = ("tensors", "allocated", "reserved")
QUESTION = ("--network", "unet_tiny", "--classes", "3", *NETWORK)
SCHEDULES = {
    "float32": "amp=false recompute=none",
    "bf16": "amp=true recompute=none",
    "bf16 lean": "amp=true recompute=lean",
    "bf16 tiles": "amp=true recompute=tiles",
}


@pytest.fixture(autouse=True)
def _quick_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try few schedules: which are found makes no difference here."""
    monkeypatch.setattr(search, "TRIES", search.FEWEST_TRIES)


class Thin(nn.Module):
    """Two convolutions and a skip."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, width, 3, padding=1)
        self.second = nn.Conv3d(width, width, 3, padding=1)
        self.last = nn.Conv3d(2 * width, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = torch.relu(self.first(image))
        return self.last(torch.cat([x, torch.relu(self.second(x))], dim=1))


class Row(NamedTuple):
    """A row of the table. Sizes are MiB."""

    schedule: str
    patch: str
    voxels: str
    peaks: list[str]
    next: str
    next_peak: str


def rows(out: str, kinds: int) -> list[Row]:
    """Return the rows of a table with so many kinds of peak, but for that of --peak-of."""
    found = []
    for line in out.splitlines():
        words = line.split()
        if not words or not words[0][0].isdigit() or "x" not in line:
            continue
        patch = next(index for index, word in enumerate(words) if word == "none" or word.count("x") == 2)
        schedule = " ".join(words[2:patch])
        numbers = words[patch + 1 :]
        assert len(numbers) == kinds + 3, line
        found.append(Row(schedule, words[patch], numbers[0], numbers[1 : 1 + kinds], *numbers[1 + kinds :]))
    return found


def checked(capsys: pytest.CaptureFixture[str], budget: str, *words: str) -> dict:
    """Return what `memory --below` says of a step."""
    code = face("memory", *words, "--below", budget, "--json")
    answer: dict = json.loads(capsys.readouterr().out)
    assert code == (0 if answer["fits"] else 1)
    return answer


def listed(patch: str) -> str:
    return f"[{patch.replace('x', ',')}]"


@pytest.mark.slow
def test_the_patch_of_a_config_fits_and_the_next_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert face("plan", *QUESTION, "device=cuda", "budget=24MiB", "recompute=lean") == 0
    (row,) = rows(capsys.readouterr().out, kinds=4)
    network = ["model=unet_tiny", "model.in_channels=1", "model.classes=3", *NETWORK, "device=cuda"]
    words = [*network, *SCHEDULES[row.schedule].split()]
    answer = checked(capsys, "24MiB", *words, f"data.patch={listed(row.patch)}")
    assert answer["fits"]
    assert row.peaks[:3] == [f"{answer['peak_bytes'][kind] / 2**20:,.1f}" for kind in KINDS]
    larger = checked(capsys, "24MiB", *words, f"data.patch={listed(row.next)}")
    assert not larger["fits"]
    assert row.next_peak == f"{larger['peak_bytes']['reserved'] / 2**20:,.1f}"


@pytest.mark.slow
def test_any_network_is_asked_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    network = ["--module", f"{__name__}:Thin", "--args", '{"width": 2}']
    assert face("plan", *network, "--multiple", "8", "device=cpu", "batch=1", "budget=4MiB") == 0
    table = rows(capsys.readouterr().out, kinds=1)
    assert [row.schedule for row in table] == [*SCHEDULES][:4]
    assert len({row.patch for row in table}) > 1  # recomputing makes room
    row = table[0]
    assert checked(capsys, "4MiB", *network, "--input", f"1x1x{row.patch}", "device=cpu")["fits"]
    assert not checked(capsys, "4MiB", *network, "--input", f"1x1x{row.next}", "device=cpu")["fits"]


@pytest.mark.slow
def test_the_budget_may_be_the_peak_of_a_patch_and_proportions_stand_beside_cubes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    question = [*QUESTION, "recompute=lean", "device=cpu", "--peak-of", "32x32x32", "--proportions", "4x4x1"]
    assert face("plan", *question) == 0
    cube, thin = rows(capsys.readouterr().out, kinds=1)
    assert len({*cube.patch.split("x")}) == 1
    x, y, z = (int(length) for length in thin.patch.split("x"))
    assert min(x, y) >= 3 * z
    assert cube.schedule == thin.schedule == "bf16 lean"
    assert float(cube.voxels.removesuffix("x")) > 1


@pytest.mark.slow
def test_a_budget_that_nothing_keeps_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert face("plan", *QUESTION, "device=cpu", "budget=0.1MiB", "recompute=lean") == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "bf16 lean" in line)
    assert "none" in line and "16x16x16" in line


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--network", "nnunet", "--module", "a:b"], "--module"),
        (["--network", "nothing"], "model"),
        (["--network", "nnunet", "--proportions", "1x1"], "--proportions"),
        (["--network", "nnunet", "--peak-of", "30x30x30"], "32x32x32"),
        (["--network", "nnunet", "--peak-of", "32x32x32", "budget=1GiB"], "budget"),
        (["--network", "nnunet", "--multiple", "8"], "--multiple"),
        (["--network", "nnunet", "--classes", "1"], "--classes"),
        (["--network", "nnunet", "ckpt=2"], "ckpt"),
        (["--network", "nnunet", "recompute=auto"], "budget"),
        (["--network", "nnunet", "budget=11"], "budget"),
        (["--network", "cicek2016"], "padding"),
        (["--module", "a:b", "optim=sgd"], "optim"),
        (["--module", "a:b", "recompute=auto", "budget=1GiB"], "recompute=auto"),
    ],
)
def test_mistakes_are_one_line(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert face("plan", *words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert named in captured.err
