"""A version that is known to be bad on 3D convolutions is named before a run on CUDA, and only there."""

import pytest
import torch
from promises import promise

from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.memory.prediction import preflight
from unet3d.training import switches

BF16 = torch.bfloat16
LARGE = 2**31  # elements of a map
WORDS = ("amp=true", "amp_dtype=bf16", "dry_run=true")


def tiny(*overrides: str) -> Config:
    """Return a config whose preflight takes a moment."""
    config = compose.compose(["model=unet_tiny", "model.features=[4,8]", "data.patch=[8,8,8]", *overrides])
    config.model.in_channels = 1
    config.model.classes = 2
    return config


def warnings(capsys: pytest.CaptureFixture[str], config: Config) -> list[str]:
    """Return the warnings of a preflight."""
    capsys.readouterr()
    preflight(config, config.model)
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]


@promise("Config", "cuDNN in a version ...")
@pytest.mark.parametrize("cudnn", [90800, 91002, 91499])
def test_a_bad_version_is_named_with_its_issue(monkeypatch: pytest.MonkeyPatch, cudnn: int) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    line = switches.cudnn_warning(BF16, lambda: LARGE)
    assert line is not None
    assert f"torch {torch.__version__} with cuDNN 9.{cudnn // 100 % 100}.{cudnn % 100}" in line
    assert "#163539" in line
    assert "; use " in line


@pytest.mark.parametrize(
    ("cudnn", "dtype"),
    [(91500, BF16), (90701, BF16), (91002, torch.float16), (91002, None), (None, BF16)],
)
def test_nothing_is_said_of_others(
    monkeypatch: pytest.MonkeyPatch, cudnn: int | None, dtype: torch.dtype | None
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    assert switches.cudnn_warning(dtype, lambda: LARGE) is None


@promise(
    "Config",
    "cuDNN in a version that is bad on 3D convolutions of very large maps in bf16, on a GPU",
    "one warning with the versions, pytorch's issue and what to use; for such maps alone",
)
def test_a_version_that_is_bad_for_large_maps_alone_is_named_for_them_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    wide = ("device=cuda", *WORDS, "model.features=[64,4]")
    small, large = (tiny(*wide, f"data.patch=[{n},{n},{n}]") for n in (8, 208))
    assert warnings(capsys, small) == []
    (line,) = warnings(capsys, large)  # a batch of 2, of 64 channels: 1.2e9 elements
    assert "#163539" in line


@promise("Config", "cuDNN in a version ...")
def test_a_cudnn_that_torch_refuses_is_said_before_a_run_on_cuda_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> int:
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(torch.backends.cudnn, "version", refuse)
    assert warnings(capsys, tiny("device=cpu", *WORDS)) == []
    (line,) = warnings(capsys, tiny("device=cuda", *WORDS))
    assert line == "warning: cuDNN version incompatibility"
