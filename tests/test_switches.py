"""Switches of torch: on during a run and off after it, what refuses what, and what memory is predicted for them."""

import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import PLAIN, TINY, train

import unet3d
from unet3d import build
from unet3d.base import ranks
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
def test_a_switch_is_on_within_and_as_before_afterwards(
    word: str, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CUBLAS, raising=False)  # MONAI sets it as it is imported
    before = flags()
    with pytest.raises(KeyError), switched_by([word]):
        assert flags()[name] == value != before[name]
        raise KeyError
    assert flags() == before


def switched_by(words: list[str]) -> AbstractContextManager[None]:
    config = compose.compose(words)
    return switched(config.cuda, config.deterministic)


def test_the_options_of_others_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS, ":16:8")
    monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", "ieee")
    with switched_by(["deterministic=true", "cuda.tf32=true"]):
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


@pytest.mark.parametrize("word", ["ckpt=2", "recompute=lean", "recompute=tiles"])
def test_the_compiler_is_refused_beside_what_makes_maps_again(word: str) -> None:
    with pytest.raises(UserError, match=f"^compile=true and {word}: "):
        compose.compose(["compile=true", word])


@pytest.mark.parametrize("word", ["recompute=lean", "recompute=tiles", "model.norm=group"])
def test_channels_last_is_refused_beside_what_needs_the_other_format(word: str) -> None:
    with pytest.raises(UserError, match=f"^channels_last=true and {word}: "):
        compose.compose(["channels_last=true", word])


@pytest.mark.parametrize("word", ["compile=true", "channels_last=true"])
def test_what_is_of_one_process_is_refused_over_several_ranks(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "SIZE", 2)
    with pytest.raises(UserError, match=f"^{word}: .*\\b2\\b"):
        compose.compose([word])


@pytest.mark.parametrize("word", ["device=cpu", "model.downsampling=strided_conv", "model.path=package.module:name"])
def test_what_repeats_itself_is_not_refused(word: str) -> None:
    config = compose.compose(["deterministic=true", "device=cuda", word])
    assert config.deterministic and rules.switches_of(config) == "deterministic=true"


def test_a_gpu_that_auto_finds_refuses_what_device_cuda_does() -> None:
    with pytest.raises(UserError, match=r"model\.downsampling=max_pool"):
        rules.refuse_indeterminate(compose.compose(["deterministic=true"]))


def test_a_part_that_is_not_deterministic_ends_in_one_line(tmp_path: Path) -> None:
    words = (*TINY, *PLAIN, "steps=1", "deterministic=true", "hydra.run.dir=run")
    ended = train(tmp_path, *words, f"loss.path={__name__}:unrepeatable_loss")
    assert ended.code == UserError.exit_code
    assert "my_layer" in ended.err and "deterministic=true" in ended.err and "Traceback" not in ended.err


@pytest.mark.parametrize("text", [UNREPEATABLE, "it is not deterministic because it uses CuBLAS"])
def test_only_deterministic_is_named_as_what_refused_a_kernel(text: str) -> None:
    """Code of one's own may ask torch for determinism, too."""
    found = foreseen_error(RuntimeError(text), True)
    assert found is not None and str(found).startswith("deterministic=true: ")
    assert foreseen_error(RuntimeError(text), False) is None
    assert foreseen_error(RuntimeError("other"), True) is None


def test_the_environment_says_how_a_gpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with switched_by(["cuda.benchmark=true", "cuda.tf32=false"]):
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
    peaks = [
        estimate([*words, "device=cuda", f"optim.fused={fused}"], False).step.tensors for fused in ("true", "false")
    ]
    assert peaks[0] < peaks[1]


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


def with_an_empty_cache() -> None:
    """Let nothing that was compiled before be used."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path("compiled_code").resolve())
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # without processes of its own, each of which loads torch


@pytest.mark.slow
def test_a_compiled_run_has_the_losses_of_the_same_run_and_resumes(tmp_path: Path) -> None:
    words = (*TINY, "model.features=[4]", "steps=5", "optim.average=0.9", "eval_every=0")  # few kernels to compile
    assert train(tmp_path, *words, "hydra.run.dir=plain").code == 0
    assert train(tmp_path, *words, "compile=true", "hydra.run.dir=compiled", hook=with_an_empty_cache).code == 0
    plain, compiled = losses(tmp_path / "plain"), losses(tmp_path / "compiled")
    assert compiled[:3] == plain[:3]  # those that the meter observes
    assert compiled == pytest.approx(plain, rel=1e-4)
    memory = json.loads((tmp_path / "compiled" / "memory.json").read_text())
    assert memory["measured"]["kind"] == f"{COUNTED}, not compiled"
    assert train(tmp_path, "resume=compiled", "steps=6", "compile=false").code == 0
    assert len(losses(tmp_path / "compiled")) == 6


def test_a_machine_without_a_compiler_is_told_in_one_line() -> None:
    from torch._inductor.exc import InvalidCxxCompiler  # here: each run that a test starts loads this file

    assert foreseen_error(RuntimeError("compiler"), False) is None
    error = foreseen_error(InvalidCxxCompiler(), False)
    assert isinstance(error, UserError) and len(str(error).splitlines()) == 1


class Own(nn.Sequential):
    """A network of the user's own."""

    def __init__(self, in_channels: int, classes: int) -> None:
        super().__init__(nn.Conv3d(in_channels, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, classes, 3, padding=1))


@pytest.mark.parametrize("own", [[], [f"model.path={__name__}:Own"]], ids=["unet", "own"])
def test_a_run_in_channels_last_has_the_losses_of_the_same_run(tmp_path: Path, own: list[str]) -> None:
    words = (*TINY[own != [] :], *own, "steps=2", "optim.average=0.9", "optim.fused=true")
    words = tuple(word for word in words if not (own and word.startswith("model.features")))
    for value in ("true", "false"):
        assert train(tmp_path, *words, f"channels_last={value}", f"hydra.run.dir=run_{value}").code == 0
    assert losses(tmp_path / "run_true") == pytest.approx(losses(tmp_path / "run_false"), rel=1e-4)
    if not own:
        assert train(tmp_path, "resume=run_true", "steps=3").code == 0
        assert train(tmp_path, "resume=run_true", "steps=4", "channels_last=false").code == UserError.exit_code


def test_channels_last_is_of_weights_and_maps() -> None:
    config = compose.compose(["model=unet_tiny", "channels_last=true"])
    config.model.in_channels, config.model.classes = 2, 3
    policy, formats = build.policy(config, "cpu"), []
    model = policy.formatted(build.model(config.model, 0))

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(module.weight, Tensor)
        formats.append(is_channels_last(module.weight) and is_channels_last(output))

    for module in model.modules():
        if isinstance(module, nn.Conv3d) and module.kernel_size != (1, 1, 1):  # whose weights are in both formats
            module.register_forward_hook(note)
    policy.forward(model, torch.ones(2, 2, 16, 16, 16))
    assert formats and all(formats)


def is_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last_3d)
