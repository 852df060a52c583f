"""Shared by all tests: small models, and one thread, so that results do not depend on the machine's cores."""

import io
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch
from allocator import dispatch_modes
from rich.console import Console as Terminal

from unet3d import compose, progress
from unet3d.config import Model
from unet3d.model.unet import UNet3D

# Tests send signals; those that whoever started pytest ignores (nohup, `&` in a script) would stay ignored in each run.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    """Without `-m gpu` there is no GPU, for the tests and for what they start: predictions are of the CPU's step."""
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


FIRST = (
    *(
        "test_sweep.py",
        "test_launchers.py",
        "test_predict.py",
        "test_faults_resume.py",
        "test_faults_run.py",
        "test_plan.py",
    ),
    *("test_segments.py", "test_cli.py", "test_command.py", "test_docs.py", "test_own_parts.py", "test_loggers.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest first: one that begins last would keep one worker busy, and the other idle."""
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))


composed = cache(compose.compose)
torch.set_num_threads(1)  # these nets are too small to share; threads that wait for each other take minutes


@pytest.fixture
def options() -> Callable[..., Model]:
    """Model options from overrides, with channels and classes set: `options("model=unet_tiny", "model.norm=batch")`."""

    def make(*overrides: str, in_channels: int = 1, classes: int = 3) -> Model:
        model = deepcopy(composed(overrides or ("model=unet_tiny",)).model)
        model.in_channels = model.in_channels or in_channels
        model.classes = model.classes or classes
        return model

    return make


@pytest.fixture
def network(options: Callable[..., Model]) -> Callable[..., UNet3D]:
    """A seeded network from overrides."""

    def make(*overrides: str, in_channels: int = 1, classes: int = 3) -> UNet3D:
        torch.manual_seed(0)
        return UNet3D(options(*overrides, in_channels=in_channels, classes=classes))

    return make


@pytest.fixture(autouse=True)
def observers_are_off() -> Iterator[None]:
    """After each test: one left on would hold tensors of all later tests, and be seen by those that look for none."""
    yield
    assert not dispatch_modes()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root can mount a disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What bars are drawn on."""
    file = io.StringIO()
    file.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(progress, "Terminal", lambda stderr: Terminal(file=file, force_terminal=True, width=80))
    return file
