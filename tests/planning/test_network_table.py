"""`python -m unet3d plan --network` and `--module`: every printed patch fits, and the next does not."""

import json
import re

import pytest
import torch
from torch import Tensor, nn
from training import face

from unet3d.recomputing import search

NETWORK = ("model.features=[2,4]", "batch=1", "optim=sgd", "loss.batch_dice=false")
QUESTION = ("--network", "unet_tiny", "--classes", "3", *NETWORK)


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


# A row begins with its budget, and thus not as the line of --peak-of.
ROW = re.compile(r"^ *\d\S* \S+ +(?P<schedule>float32|bf16(?: \w+)?) +(?P<patch>[\dx]+|none) +(?P<numbers>.*)", re.M)


def table(capsys: pytest.CaptureFixture[str], *words: str) -> list[tuple[str, str, list[str]]]:
    """Return the schedule, the patch and the rest of each row that `plan` prints."""
    assert face("plan", *words) == 0
    found = ROW.finditer(capsys.readouterr().out)
    return [(row["schedule"], row["patch"], row["numbers"].split()) for row in found]


def peaks(capsys: pytest.CaptureFixture[str], budget: str, *words: str) -> tuple[bool, list[str]]:
    """Return whether a step fits by `memory --below`, and its peaks in MiB."""
    code = face("memory", *words, "--below", budget, "--json")
    answer = json.loads(capsys.readouterr().out)
    assert code == (0 if answer["fits"] else 1)
    return answer["fits"], [f"{size / 2**20:,.1f}" for size in answer["peak_bytes"].values()]


@pytest.mark.slow
def test_the_patch_of_a_config_fits_and_the_next_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    ((schedule, patch, numbers),) = table(capsys, *QUESTION, "device=cuda", "budget=24MiB", "recompute=lean")
    assert schedule == "bf16 lean"
    words = ["model=unet_tiny", "model.in_channels=1", "model.classes=3", *NETWORK, "device=cuda", "amp=true"]
    of_patches = []
    for size in (patch, numbers[-2]):
        lengths = f"data.patch=[{size.replace('x', ',')}]"
        of_patches.append(peaks(capsys, "24MiB", *words, "recompute=lean", lengths))
    (fits, sizes), (next_fits, next_sizes) = of_patches
    assert (fits, next_fits) == (True, False)
    assert numbers[1:4] == sizes[:3]
    assert numbers[-1] == next_sizes[2]


@pytest.mark.slow
def test_any_network_is_asked_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    network = ["--module", f"{__name__}:Thin", "--args", '{"width": 2}']
    found = table(capsys, *network, "--multiple", "8", "device=cpu", "batch=1", "budget=4MiB")
    assert [schedule for schedule, _, _ in found] == ["float32", "bf16", "bf16 lean", "bf16 tiles"]
    assert len({patch for _, patch, _ in found}) > 1  # recomputing makes room
    for size, fits in ((found[0][1], True), (found[0][2][-2], False)):
        assert peaks(capsys, "4MiB", *network, "--input", f"1x1x{size}", "device=cpu")[0] == fits


@pytest.mark.slow
def test_the_budget_may_be_the_peak_of_a_patch_and_proportions_stand_beside_cubes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["recompute=lean", "device=cpu", "--peak-of", "32x32x32", "--proportions", "4x4x1"]
    cube, thin = table(capsys, *QUESTION, *asked)
    assert cube[0] == thin[0] == "bf16 lean"
    assert len({*cube[1].split("x")}) == 1
    x, y, z = map(int, thin[1].split("x"))
    assert min(x, y) >= 3 * z
    assert float(cube[2][0].removesuffix("x")) > 1


def test_a_budget_that_nothing_keeps_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    ((schedule, patch, numbers),) = table(capsys, *QUESTION, "device=cpu", "budget=0.1MiB", "recompute=lean")
    assert (schedule, patch) == ("bf16 lean", "none")
    assert "16x16x16" in numbers
