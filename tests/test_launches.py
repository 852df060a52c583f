"""What a step on CUDA asks of the device, counted on fake tensors by `benchmarks/launches.py`.

That these counts are those of torch's CUDA build is shown by `benchmarks/cuda_desk.py`.
"""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from unet3d import build
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.memory.fake_tensors import fake_mode
from unet3d.memory.ledger import most_held
from unet3d.memory.simulate import simulate
from unet3d.memory.technique import choose_technique

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "launches.py"
AT_64 = ("device=cuda", "data.patch=[64,64,64]", "batch=2", "amp=true")
slow = pytest.mark.slow


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module(SCRIPT.stem)


def config_of(*words: str) -> Config:
    config = compose.compose([*AT_64, *words])
    config.model = build.model_config_from_headers(config)
    return config


@pytest.mark.parametrize(
    ("words", "most"),
    [
        (("model=unet",), 420),
        (("model=nnunet_hippocampus",), 600),
    ],
)
def test_a_step_launches_few_kernels(script: ModuleType, words: tuple[str, ...], most: int) -> None:
    assert 200 < script.counted(config_of(*words)).launches <= most


@slow
@pytest.mark.usefixtures("programs_of_runs")
@pytest.mark.parametrize(
    ("plan", "size", "most", "of_plain", "of_loss"),
    [("lean", 64, 700, 0.51, 2**21), ("tiles", 64, 785, 0.44, 0), ("tiles", 128, 1400, 0.27, 0)],
)
def test_a_step_that_recomputes_launches_few_kernels_in_less_memory(
    script: ModuleType, plan: str, size: int, most: int, of_plain: float, of_loss: int
) -> None:
    """Few beside the memory that is saved: workspaces of convolutions are in both peaks.

    `of_loss`: bytes by which the loss's own tensors, which the program does not know, may raise the peak.
    """
    plain = config_of("model=unet", "amp_dtype=bf16", f"data.patch=[{size},{size},{size}]")
    config = replace(plain, recompute=plan)
    technique = choose_technique(config, config.model)
    assert 200 < script.counted(config).launches <= most
    peak = most_held(simulate(config, config.model, technique).ledger.requests())
    assert peak <= of_plain * most_held(simulate(plain, plain.model).ledger.requests())
    assert technique.program is not None
    weights = sum(p.nbytes for p in build.model(plain.model, 0).parameters())
    of_optimizer = 2 * weights
    of_loss += 128 * 2**10  # and a few numbers a channel, or a piece of it
    assert 0 <= peak - technique.program.peak_bytes - of_optimizer <= of_loss


@pytest.mark.parametrize(
    ("words", "synchronisations"),
    [(("accumulate=3",), 1), (("amp_dtype=fp16", "accumulate=2"), 2)],
)
def test_a_step_waits_for_the_device_once_and_twice_in_fp16(
    script: ModuleType, words: tuple[str, ...], synchronisations: int
) -> None:
    counts = script.counted(config_of("model=unet_tiny", *words))
    assert counts.synchronisations == synchronisations


@pytest.mark.parametrize("name", ["dice_ce", "ce", "dice"])
def test_the_loss_of_a_map_is_at_most_sixty_launches(script: ModuleType, name: str) -> None:
    config = config_of(f"loss={name}")
    with fake_mode("cuda"):
        loss = build.loss(config, 3)
        logits = torch.empty(2, 3, 64, 64, 64, requires_grad=True)
        label = torch.zeros(2, 64, 64, 64, dtype=torch.int16)
        with script.Launches() as launches:
            loss(logits, label).backward()
    assert 5 < launches.counts.launches <= 60
    assert launches.counts.synchronisations == 0


def test_convolutions_are_those_of_the_network(script: ModuleType) -> None:
    """One forward; backward two, of the data and of the weights, but for the image, which has no gradient."""
    config = config_of("model=unet_tiny")
    network = build.model(config.model, 0)
    layers = [m for m in network.modules() if isinstance(m, torch.nn.Conv3d | torch.nn.ConvTranspose3d)]
    assert script.counted(config).convolutions == 3 * len(layers) - 1


def test_the_script_prints_one_line_of_json(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "model=unet_tiny", "data.patch=[16,16,16]"])
    assert script.main() == 0
    names = ["launches", "convolutions", "normalisations", "synchronisations"]
    assert [*json.loads(capsys.readouterr().out)] == names
    for wrong in ("model.features=[]", "optim.fused=true"):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), wrong])
        assert script.main() == 2
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1 and wrong in printed
