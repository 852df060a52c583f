"""Switches of torch: on during a run and off after it, what refuses what, and what memory is predicted for them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training import PLAIN, TINY, train

import unet3d
from unet3d import checks, compose
from unet3d.errors import UserError
from unet3d.memory.preflight import estimate
from unet3d.report.run_folder import environment
from unet3d.training.losses import LOSSES
from unet3d.training.switches import CUBLAS, refused, switched

UNREPEATABLE = "my_layer does not have a deterministic implementation, but you set it"


def flags() -> dict[str, Any]:
    """What torch computes with."""
    cudnn = torch.backends.cudnn
    return {
        "benchmark": cudnn.benchmark,
        "tf32": cudnn.allow_tf32,
        "precision": (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision),  # type: ignore[attr-defined]
        "cudnn": cudnn.deterministic,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "filling": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "cublas": os.environ.get(CUBLAS),
    }


def noting_loss(logits: Any, label: Tensor, options: Any) -> Tensor:
    """Write what torch computes with beside the run, then the package's own loss."""
    Path("flags.json").write_text(json.dumps(flags()))
    return LOSSES["dice_ce"](logits, label, options)


def unrepeatable_loss(logits: Any, label: Tensor, options: Any) -> Tensor:
    raise RuntimeError(UNREPEATABLE)


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [
        ("cuda.benchmark=true", "benchmark", True),
        ("cuda.tf32=false", "tf32", False),
        ("deterministic=true", "deterministic", True),
        ("deterministic=true", "cudnn", True),
        ("deterministic=true", "cublas", ":4096:8"),
    ],
)
def test_a_switch_is_on_within_and_as_before_afterwards(word: str, name: str, value: object) -> None:
    before = flags()
    with pytest.raises(KeyError), switched(compose.compose([word])):
        assert flags()[name] == value != before[name]
        raise KeyError
    assert flags() == before


def test_the_options_of_others_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS, ":16:8")
    monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", "ieee")
    with switched(compose.compose(["deterministic=true", "cuda.tf32=true"])):
        assert os.environ[CUBLAS] == ":16:8"  # cuBLAS repeats its results with this one, too
    assert (torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.rnn.fp32_precision) == ("tf32", "ieee")


def test_a_run_switches_for_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    before = flags()
    words = [*TINY, *PLAIN, "steps=1", "cuda.tf32=false", "deterministic=true"]
    run = unet3d.train([*words, f"loss.path={__name__}:noting_loss", "hydra.run.dir=run"])
    assert flags() == before
    within = json.loads(Path("flags.json").read_text())
    assert within["deterministic"] and within["cudnn"] and not within["tf32"]
    assert json.loads((run.folder / "env.json").read_text())["deterministic"] is True


def test_two_deterministic_runs_are_equal_to_the_bit(tmp_path: Path) -> None:
    words = (*TINY, *PLAIN, "steps=2", "deterministic=true", "model.downsampling=strided_conv")
    records = []
    for name in ("a", "b"):
        assert train(tmp_path, *words, f"hydra.run.dir={name}").code == 0
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        records.append([line["train/loss"] for line in lines if "train/loss" in line])
    assert len(records[0]) == 2 and records[0] == records[1]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("deterministic=true cuda.benchmark=true", ["deterministic=true", "cuda.benchmark=true"]),
        ("deterministic=true device=cuda", ["deterministic=true", "model.downsampling=max_pool", "strided_conv"]),
        (
            "deterministic=true device=cuda model.downsampling=strided_conv model.upsampling=trilinear",
            ["deterministic=true", "model.upsampling=trilinear", "nearest"],
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(words: str, names: list[str]) -> None:
    with pytest.raises(UserError) as error:
        compose.compose(words.split())
    assert all(name in str(error.value) for name in names)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("value", ["few", "true", "1.5", "-1", "257"])
def test_workers_are_a_number_or_auto(value: str) -> None:
    with pytest.raises(UserError, match=r"^workers="):
        compose.compose([f"workers={value}"])


@pytest.mark.parametrize("word", ["device=cpu", "model.downsampling=strided_conv", "model.path=package.module:name"])
def test_what_repeats_itself_is_not_refused(word: str) -> None:
    compose.compose(["deterministic=true", "device=cuda" if word != "device=cpu" else "device=cpu", word])


def test_a_gpu_that_auto_finds_refuses_what_device_cuda_does() -> None:
    with pytest.raises(UserError, match=r"model\.downsampling=max_pool"):
        checks.refuse_indeterminate(compose.compose(["deterministic=true"]))


def test_a_part_that_is_not_deterministic_ends_in_one_line(tmp_path: Path) -> None:
    words = (*TINY, *PLAIN, "steps=1", "deterministic=true", "hydra.run.dir=run")
    ended = train(tmp_path, *words, f"loss.path={__name__}:unrepeatable_loss")
    assert ended.code == UserError.exit_code
    assert "my_layer" in ended.err and "deterministic=true" in ended.err and "Traceback" not in ended.err
    assert refused(RuntimeError("other")) is None


def test_the_environment_says_how_a_gpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with switched(compose.compose(["cuda.benchmark=true", "cuda.tf32=false"])):
        found = environment(torch.device("cuda"))
    assert (found["benchmark"], found["tf32"], found["deterministic"], found["capability"]) == (
        True,
        "off",
        False,
        "9.0",
    )
    assert "convolutions" in environment(torch.device("cuda"))["tf32"]


def test_a_fused_update_needs_no_copies_of_all_weights_on_a_gpu() -> None:
    """Where the update is the peak: few voxels, many weights."""
    words = ["model=unet_tiny", "model.features=[4,64]", "data.patch=[4,4,4]", "model.in_channels=1", "model.classes=2"]
    peaks = [estimate([*words, "device=cuda", f"optim.fused={fused}"], False).peak for fused in ("true", "false")]
    assert peaks[0] < peaks[1]
