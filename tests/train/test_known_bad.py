"""Versions that are known to be bad on 3D convolutions are named before a run on CUDA, and only there."""

import pytest
import torch

from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.memory.preflight import preflight
from unet3d.training import known_bad

BF16 = torch.bfloat16
FP16 = torch.float16
LARGE = 2**31  # elements of a map
WORDS = ("amp=true", "amp_dtype=bf16", "dry_run=true")


def tiny(*overrides: str) -> Config:
    """Return a config whose preflight takes a moment."""
    config = compose.compose(["model=unet_tiny", "model.features=[4,8]", "data.patch=[8,8,8]", *overrides])
    config.model.in_channels = 1
    config.model.classes = 2
    return config


def use(monkeypatch: pytest.MonkeyPatch, version: str, cudnn: int | None) -> None:
    """Behave as with these versions installed."""
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)


def warnings(capsys: pytest.CaptureFixture[str], config: Config) -> list[str]:
    """Return the warnings of a preflight."""
    capsys.readouterr()
    preflight(config, config.model)
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]


@pytest.mark.parametrize(
    ("version", "cudnn", "dtype", "issue"),
    [
        ("2.9.0+cu128", 91002, BF16, "#166122"),
        ("2.9.0+cu130", 91301, FP16, "#166643"),
        ("2.9.0+cu128", 91600, BF16, "#166122"),
        ("2.9.1+cu128", 91002, FP16, "#166122"),
        ("2.10.0+cu128", 91002, BF16, "#163539"),
        ("2.11.0+cu126", 91002, BF16, "#163539"),
    ],
)
def test_a_bad_version_is_named_with_its_issue(
    monkeypatch: pytest.MonkeyPatch, version: str, cudnn: int, dtype: torch.dtype, issue: str
) -> None:
    use(monkeypatch, version, cudnn)
    line = known_bad.warning(dtype, lambda: LARGE)
    assert line is not None
    assert f"torch {version} with cuDNN 9.{cudnn // 100 % 100}.{cudnn % 100}" in line
    assert issue in line
    assert "; use " in line


@pytest.mark.parametrize(
    ("version", "cudnn", "dtype"),
    [
        ("2.9.1+cu130", 91501, BF16),
        ("2.9.0+cu128", 91002, None),  # float32
        ("2.9.0+cu128", 90701, BF16),
        ("2.10.0+cu130", 91501, BF16),
        ("2.10.0+cu128", 91002, FP16),
        ("2.13.0+cu130", 92000, BF16),
        ("2.15.0+cu132", 92600, FP16),
        ("2.9.0+cpu", None, BF16),
    ],
)
def test_nothing_is_said_of_others(
    monkeypatch: pytest.MonkeyPatch, version: str, cudnn: int | None, dtype: torch.dtype | None
) -> None:
    use(monkeypatch, version, cudnn)
    assert known_bad.warning(dtype, lambda: LARGE) is None


def test_a_version_that_is_bad_for_large_maps_alone_is_named_for_them_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, "2.10.0+cu128", 91002)
    wide = ("device=cuda", *WORDS, "model.features=[64,4]")
    small, large = (tiny(*wide, f"data.patch=[{n},{n},{n}]") for n in (8, 208))
    assert warnings(capsys, small) == []
    (line,) = warnings(capsys, large)  # a batch of 2, of 64 channels: 1.2e9 elements
    assert "#163539" in line


def test_it_is_said_before_a_run_on_cuda_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, "2.9.0+cu128", 91002)
    (line,) = warnings(capsys, tiny("device=cuda", *WORDS))
    assert line == f"warning: {known_bad.warning(BF16, lambda: 0)}"
    assert warnings(capsys, tiny("device=cpu", *WORDS)) == []


def test_a_cudnn_that_torch_refuses_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> int:
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(torch.backends.cudnn, "version", refuse)
    (line,) = warnings(capsys, tiny("device=cuda", *WORDS))
    assert line == "warning: cuDNN version incompatibility"
