"""A version that is known to be bad on 3D convolutions is named before a run on CUDA, and only there."""

import re

import pytest
import torch
from promises import promise

from unet3d.config import compose
from unet3d.memory.prediction import preflight
from unet3d.training import switches

BF16 = torch.bfloat16


@promise("Config", "cuDNN in a version ...")
@pytest.mark.parametrize(
    ("cudnn", "dtype", "named"),
    [(90800, BF16, "9.8.0"), (91499, BF16, "9.14.99"), (91500, BF16, ""), (90799, BF16, ""), (91002, None, "")],
)
def test_a_bad_version_is_named_with_its_issue(
    monkeypatch: pytest.MonkeyPatch, cudnn: int, dtype: torch.dtype | None, named: str
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    line = switches.cudnn_warning(dtype, lambda: 2**31)
    assert (line is not None) == bool(named)
    assert not line or re.match(rf"torch {re.escape(torch.__version__)} with cuDNN {named} .*#163539.*; use ", line)


@promise(
    "Config",
    "cuDNN in a version that is bad on 3D convolutions of very large maps in bf16, on a GPU",
    "one warning with the versions, pytorch's issue and what to use; for such maps alone",
)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("device=cuda data.patch=[208,208,208]", "#163539"),  # a batch of 2, of 64 channels: 1.2e9 elements
        ("device=cuda data.patch=[8,8,8]", ""),
        ("device=cpu data.patch=[208,208,208]", ""),
    ],
)
def test_it_is_said_before_a_run_on_cuda_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    small = "model=unet_tiny model.features=[64,4] amp=true amp_dtype=bf16 dry_run=true"
    config = compose.compose(f"{small} {words}".split())
    config.model.in_channels, config.model.classes = 1, 2
    preflight(config, config.model)
    warnings = re.findall("^warning: .*", capsys.readouterr().err, re.MULTILINE)
    assert len(warnings) == bool(said) and said in "".join(warnings)


def test_a_cudnn_that_torch_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise RuntimeError("cuDNN version incompatibility\nmore")

    monkeypatch.setattr(torch.backends.cudnn, "version", refuse)
    assert switches.cudnn_warning(None, int) == "cuDNN version incompatibility"
