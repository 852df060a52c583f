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


def test_a_step_launches_few_kernels(script: ModuleType) -> None:
    assert 200 < script.counted(config_of("model=unet")).launches <= 420


@slow
@pytest.mark.usefixtures("programs_of_runs")
def test_a_step_that_recomputes_launches_few_kernels_in_less_memory(script: ModuleType) -> None:
    """Few beside the memory that is saved: workspaces of convolutions are in both peaks."""
    plain = config_of("model=unet", "amp_dtype=bf16")
    config = replace(plain, recompute="tiles")
    technique = choose_technique(config, config.model)
    assert 200 < script.counted(config).launches <= 785
    peak = most_held(simulate(config, config.model, technique).ledger.requests())
    assert peak <= 0.44 * most_held(simulate(plain, plain.model).ledger.requests())
    assert technique.program is not None
    weights = sum(p.nbytes for p in build.model(plain.model, 0).parameters())
    of_optimizer = 2 * weights
    numbers = 128 * 2**10  # bytes: a few numbers a channel, or a piece of it
    assert 0 <= peak - technique.program.peak_bytes - of_optimizer <= numbers


@pytest.mark.parametrize(
    ("words", "synchronisations"),
    [(("accumulate=3",), 1), (("amp_dtype=fp16", "accumulate=2"), 2)],
)
def test_a_step_waits_for_the_device_once_and_twice_in_fp16(
    script: ModuleType, words: tuple[str, ...], synchronisations: int
) -> None:
    counts = script.counted(config_of("model=unet_tiny", *words))
    assert counts.synchronisations == synchronisations


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
