"""Switches of torch: on during a run and off after it, and what memory is predicted for them."""

import json
import os
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import PLAIN, TINY, train

import unet3d
from unet3d import build
from unet3d.base.errors import UserError
from unet3d.config import compose, rules
from unet3d.memory.meter import COUNTED
from unet3d.memory.prediction import estimate
from unet3d.run.record import headline, read_run
from unet3d.run.run_folder import environment
from unet3d.training.losses import LOSSES
from unet3d.training.switches import CUBLAS, foreseen_error, switched

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


def switched_by(*words: str) -> AbstractContextManager[None]:
    config = compose.compose(words)
    return switched(config.cuda, config.deterministic)


@pytest.mark.parametrize(
    ("words", "on"),
    [
        (["cuda.benchmark=true"], {"benchmark": True}),
        (["cuda.tf32=false"], {"tf32": False}),
        (["deterministic=true"], {"deterministic": True, "cudnn": True, "cublas": ":4096:8"}),
    ],
)
def test_a_switch_is_on_within_and_as_before_afterwards(
    words: list[str], on: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CUBLAS, raising=False)  # MONAI sets it as it is imported
    before = flags()
    assert not on.items() & before.items()
    with pytest.raises(KeyError), switched_by(*words):
        assert on.items() <= flags().items()
        raise KeyError
    assert flags() == before


def test_the_options_of_others_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS, ":16:8")
    monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", "ieee")
    with switched_by("deterministic=true", "cuda.tf32=true"):
        assert os.environ[CUBLAS] == ":16:8"  # cuBLAS repeats its results with this one, too
    assert (torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.rnn.fp32_precision) == ("tf32", "ieee")


def test_a_run_switches_for_itself_alone_and_says_what_was_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    before = flags()
    words = [*TINY, *PLAIN, "steps=1", "cuda.tf32=false", "deterministic=true", "optim.fused=true"]
    run = unet3d.train([*words, f"loss.path={__name__}:noting_loss", "hydra.run.dir=run"])
    assert flags() == before
    within = json.loads(Path("flags.json").read_text())
    assert within["deterministic"] and within["cudnn"] and not within["tf32"]
    assert json.loads((run.folder / "env.json").read_text())["deterministic"] is True
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "s/step" in line)
    recorded = read_run(run.folder)
    for word in ("optim.fused=true", "cuda.tf32=false", "deterministic=true"):
        assert word in line and word in recorded.switches
    assert headline(recorded)["time/switches"] == recorded.switches
    assert rules.switched_on({}) == ""


def test_a_part_that_is_not_deterministic_ends_in_one_line(tmp_path: Path) -> None:
    words = (*TINY, *PLAIN, "steps=1", "deterministic=true", "hydra.run.dir=run")
    ended = train(tmp_path, *words, f"loss.path={__name__}:unrepeatable_loss")
    assert ended.code == UserError.exit_code
    assert "my_layer" in ended.err and "deterministic=true" in ended.err and "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("error", "is_deterministic", "line"),
    [
        (RuntimeError(UNREPEATABLE), True, "deterministic=true: "),
        (RuntimeError(UNREPEATABLE), False, None),
        (RuntimeError("it is not deterministic because it uses CuBLAS"), True, "deterministic=true: "),
        (RuntimeError("other"), True, None),
    ],
)
def test_what_a_switch_cannot_do_here_is_told_in_one_line(
    error: RuntimeError, is_deterministic: bool, line: str | None
) -> None:
    """Code of one's own may ask torch for determinism, too."""
    found = foreseen_error(error, is_deterministic)
    assert (found is None) == (line is None)
    assert found is None or (str(found).startswith(line or "") and "\n" not in str(found))


def test_a_machine_without_a_compiler_is_told_in_one_line() -> None:
    from torch._inductor.exc import InvalidCxxCompiler  # here: each run that a test starts loads this file

    assert re.match(r"compile=true: .*\Z", str(foreseen_error(InvalidCxxCompiler(), False)))


def test_a_fused_update_needs_no_copies_of_all_weights_on_a_gpu() -> None:
    """Where the update is the peak: few voxels, many weights."""
    words = ["model=unet_tiny", "model.features=[4,64]", "data.patch=[4,4,4]", "model.in_channels=1", "model.classes=2"]
    fused, plain = (
        estimate([*words, "device=cuda", f"optim.fused={value}"], False).step.tensors for value in ("true", "false")
    )
    assert fused < plain


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


def with_an_empty_cache() -> None:
    """Let nothing that was compiled before be used."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path("compiled_code").resolve())
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # without processes of its own, each of which loads torch


@pytest.mark.slow
def test_a_compiled_run_and_one_in_channels_last_have_the_losses_of_the_same_run_and_resume(tmp_path: Path) -> None:
    words = (*TINY, "model.features=[4]", "steps=5", "optim.average=0.9", "eval_every=0")  # few kernels to compile
    for name in ("plain", "compile", "channels_last"):
        switch = [] if name == "plain" else [f"{name}=true"]
        assert train(tmp_path, *words, *switch, f"hydra.run.dir={name}", hook=with_an_empty_cache).code == 0
    plain, compiled, last = (losses(tmp_path / name) for name in ("plain", "compile", "channels_last"))
    assert compiled[:3] == plain[:3]  # those that the meter observes
    assert compiled == pytest.approx(plain, rel=1e-4) and last == pytest.approx(plain, rel=1e-4)
    memory = json.loads((tmp_path / "compile" / "memory.json").read_text())
    assert memory["measured"]["kind"] == f"{COUNTED}, not compiled"
    assert train(tmp_path, "resume=compile", "steps=6", "compile=false").code == 0
    assert len(losses(tmp_path / "compile")) == 6
    assert train(tmp_path, "resume=channels_last", "steps=6").code == 0
    assert train(tmp_path, "resume=channels_last", "steps=7", "channels_last=false").code == UserError.exit_code


def test_channels_last_is_of_weights_and_maps() -> None:
    config = compose.compose(["model=unet_tiny", "channels_last=true"])
    config.model.in_channels, config.model.classes = 2, 3
    policy = build.policy(config, "cpu")
    own = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 3, 3))  # of a user
    formats = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        formats.extend(t.is_contiguous(memory_format=torch.channels_last_3d) for t in (module.weight, output))

    for model in map(policy.formatted, (build.model(config.model, 0), own)):
        for module in model.modules():
            if isinstance(module, nn.Conv3d) and module.kernel_size != (1, 1, 1):  # whose weights are in both formats
                module.register_forward_hook(note)
        policy.forward(model, torch.ones(2, 2, 16, 16, 16))
    assert len(formats) > 4 and all(formats)


def test_the_environment_says_how_a_gpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with switched_by("cuda.benchmark=true", "cuda.tf32=false"):
        found = environment(torch.device("cuda"))
    assert (found["benchmark"], found["tf32"], found["capability"]) == (True, "off", "9.0")
    assert "convolutions" in environment(torch.device("cuda"))["tf32"]
