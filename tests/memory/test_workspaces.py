"""Workspaces of convolutions: what they may add to a prediction for CUDA, and what a GPU's allocator says of them."""

import pytest
import torch
from torch import nn
from training import PLAIN

from unet3d import compose
from unet3d.config import Config
from unet3d.memory import predict, tables
from unet3d.memory.budget import Option, warn_over_card
from unet3d.memory.ledger import Ledger
from unet3d.memory.preflight import preflight
from unet3d.types import MIB

WORDS = ("model=unet_tiny", "model.features=[8]", "data.patch=[8,8,8]", "model.in_channels=1", "model.classes=3")
WEIGHTS = (32, 16)  # bytes of the two layers'
IMAGE, BETWEEN, OUTPUT = 512, 1024, 256  # bytes of the maps


def config(*words: str) -> Config:
    return compose.compose([*WORDS, "dry_run=true", *PLAIN, *words])


def two_layers() -> tuple[nn.Sequential, torch.Tensor]:
    """Return convolutions of 2, 4 and 1 channels, and an image of 4 x 4 x 4 voxels."""
    layers = [nn.Conv3d(2, 4, 1, bias=False), nn.Conv3d(4, 1, 1, bias=False)]
    return nn.Sequential(*layers), torch.zeros(1, 2, 4, 4, 4)


def test_a_workspace_is_as_large_as_the_maps_of_a_convolution_that_runs() -> None:
    network, image = two_layers()
    with Ledger() as ledger, torch.no_grad():
        output = network(image)
    assert output.nbytes == OUTPUT
    peak = IMAGE + BETWEEN + OUTPUT + sum(WEIGHTS)
    assert ledger.peak_bytes() == peak
    of_first = IMAGE + BETWEEN + WEIGHTS[0] + (IMAGE + BETWEEN)
    of_second = peak + (BETWEEN + OUTPUT)
    assert ledger.workspace_bound() == max(of_first, of_second) - peak


def test_backward_has_workspaces_as_well() -> None:
    network, image = two_layers()
    with Ledger() as ledger:
        output = network(image)
        forward = len(ledger.workspaces)
        output.backward(torch.ones_like(output))
    held = IMAGE + BETWEEN + 2 * OUTPUT + sum(WEIGHTS)
    peak = held + BETWEEN + WEIGHTS[1]  # gradients of the second layer's input and weights
    assert ledger.peak_bytes() == peak
    assert [size for _, size in ledger.workspaces[forward:]] == [OUTPUT + BETWEEN, BETWEEN + IMAGE]
    assert ledger.workspace_bound() == OUTPUT + BETWEEN


def test_what_fits_below_a_peak_elsewhere_adds_nothing() -> None:
    network, image = two_layers()
    with Ledger() as ledger, torch.no_grad():
        large = torch.zeros(MIB)
        del large
        network(image)
    assert ledger.workspace_bound() == 0


def test_half_precision_halves_it() -> None:
    bounds = {}
    for dtype in (torch.float32, torch.bfloat16):
        network, image = two_layers()
        with Ledger() as ledger, torch.no_grad():
            network.to(dtype)(image.to(dtype))
        bounds[dtype] = ledger.workspace_bound()
    assert bounds[torch.float32] == 2 * bounds[torch.bfloat16] > 0


def test_a_prediction_for_a_gpu_states_it_and_one_for_the_cpu_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    for device in ("cpu", "cuda"):
        asked = config(f"device={device}")
        found = preflight(asked, asked.model).memory["predicted"]
        said = capsys.readouterr().out
        assert ("workspace_bound_bytes" in found) is (device == "cuda")
        for line in (tables.workspace_bound(found), tables.spacing(found)):
            assert bool(line) is (device == "cuda")
            assert line in said
        assert ("nvidia-smi" in said) is (device == "cuda")


def test_an_explanation_for_a_gpu_states_it() -> None:
    network, image = two_layers()
    network[1] = nn.Conv3d(4, 3, 1)
    shown = {device: str(predict(network, image, device=device)) for device in ("cpu", "cuda")}
    assert "workspaces not included" in shown["cuda"] and "MiB more (bound" in shown["cuda"]
    assert shown["cuda"].count("nvidia-smi") == 1
    assert "workspace" not in shown["cpu"] and "nvidia-smi" not in shown["cpu"]


def test_a_step_that_fits_only_without_workspaces_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    asked = config("device=cuda")
    option = Option((), "nothing", asked, asked.model, reserved_bytes=5 * MIB)
    warn_over_card(option, MIB, 6 * MIB)
    assert not capsys.readouterr().err
    warn_over_card(option, MIB, 6 * MIB - 1)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning:") and "5.0 of 6.0 MiB" in line and "at most 1.0 MiB" in line
