"""The replay against torch's own CUDA allocator, which runs here over a CUDA runtime without a device."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from cuda_desk import stubs
from cuda_desk.streams import SETTINGS, Torch, UnknownSetting, differing

from unet3d.memory.allocator import read_settings

INSTALLED = Path(torch.__file__).parent
MODELLED = [settings for settings in SETTINGS if not read_settings({"PYTORCH_ALLOC_CONF": settings})[1]]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Torch:
    """Return torch's allocator, built once; skip where that is not possible."""
    if not (INSTALLED / "lib" / "libc10_cuda.so").exists():
        pytest.skip("the installed torch is not a CUDA build: its allocator is not there")
    missing = [program for program in ("gcc", "g++", "nm", "readelf") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed: torch's allocator cannot be called")
    places = [INSTALLED.parent / "nvidia", Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
    headers = next(filter(None, map(stubs.include_folders, places)), [])
    if not headers:
        pytest.skip("CUDA's headers are not installed (CUDA_HOME): torch's allocator cannot be called")
    return Torch(INSTALLED, headers, tmp_path_factory.mktemp("torch"))


@pytest.mark.slow
@pytest.mark.parametrize("settings", MODELLED, ids=lambda settings: settings or "default")
def test_torchs_allocator_reserves_what_the_replay_does(theirs: Torch, settings: str) -> None:
    try:
        assert differing(theirs, settings, range(4)) == []
    except UnknownSetting as error:
        pytest.skip(str(error))
