"""Fixtures for all tests, one thread for each, and second runs of tests without their guards."""

import gc
import io
import math
import os
import pickle
import shutil
import signal
import subprocess
from collections.abc import Callable, Generator, Iterator
from copy import deepcopy
from functools import cache, partial
from pathlib import Path

import hydra
import hypothesis
import pytest
import torch
from allocator import dispatch_modes
from guards import Guard, taken_out
from made_once import made_once
from omegaconf import DictConfig
from rich.console import Console as Terminal
from training import AS_IN_RUNS, RUN, TINY, at_step, train

from unet3d.base import progress
from unet3d.config import compose
from unet3d.config.schema import Model
from unet3d.memory import simulate
from unet3d.model.unet import UNet3D

# The same examples on every machine, as many as a test that runs at each change can afford.
hypothesis.settings.register_profile("quick", derandomize=True, deadline=None, database=None, max_examples=30)
hypothesis.settings.load_profile("quick")
# Tests send signals; those that whoever started pytest ignores (nohup, `&` in a script) would stay ignored in each run.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the texts of tests/golden anew")


def pytest_configure(config: pytest.Config) -> None:
    """Without `-m gpu` there is no GPU, for the tests and for what they start: predictions are of the CPU's step."""
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in ("COLUMNS", "FORCE_COLOR"):  # what is printed is compared with texts
        os.environ.pop(name, None)


def pytest_collection_finish() -> None:
    """Leave what is loaded out of the search for garbage, which simulated steps start often."""
    gc.collect()
    gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test marked by `guards.without` with its guards, and then without each."""
    guards = [mark.args[0] for mark in metafunc.definition.iter_markers("without")]
    if guards:
        names = [guard.name for guard in guards]
        metafunc.parametrize("guard", [None, *guards], ids=[pytest.HIDDEN_PARAM, *names], indirect=True)


# What a substitute of the wrong kind raises, or a folder that the run with the guard has left: no proof of anything.
MISTAKES = (NameError, FileExistsError, ImportError)


def guard_of(item: pytest.Item) -> Guard | None:
    """Return the guard without which this item runs; None for a test as it is."""
    return item.callspec.params.get("guard") if hasattr(item, "callspec") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave runs without a guard to `-m without`, and of them those whose parameters the guard's `only` names."""
    selected = []
    deselected = []
    guards_marked = set()
    guards_run = set()
    for item in items:
        guard = guard_of(item)
        if guard is None:
            selected.append(item)
            continue
        marked = (item.nodeid.partition("[")[0], guard.target, guard.only)
        guards_marked.add(marked)
        is_meant = guard.only in item.callspec.id.replace(guard.name, "")
        if is_meant:
            guards_run.add(marked)
        if is_meant and "without" in config.getoption("markexpr"):
            selected.append(item)
        else:
            deselected.append(item)
    lost = [f"{test}: {target}, only={only!r}" for test, target, only in sorted(guards_marked - guards_run)]
    if lost and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"no parameters for a guard: {'; '.join(lost)}")
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = selected


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Expect a test to fail without its guard. It may skip; an error in a fixture stays an error."""
    guard = guard_of(pyfuncitem)
    if guard is None:
        return (yield)
    with taken_out(guard):
        try:
            yield
        except MISTAKES:
            raise
        except (Exception, pytest.fail.Exception):
            return True
    return pytest.fail(f"passes without its guard, {guard.target}")


TREES: dict[tuple, bytes] = {}  # what Hydra has composed in this process
compose_by_hydra = hydra.compose


def compose_once(name: str, overrides: list[str], **named: object) -> DictConfig:
    """Compose by Hydra, once for equal words in equal places; without the memo where folders of YAML files are named.

    Each call returns a tree of its own, which is then checked as any other. Trainings in other processes compose.
    """
    if any("searchpath" in word for word in overrides):
        return compose_by_hydra(name, overrides, **named)
    key = (os.getcwd(), compose.config_folder(), os.environ.get("OC_CAUSE"), name, *overrides, str(named))
    if key not in TREES:
        TREES[key] = pickle.dumps(compose_by_hydra(name, overrides, **named))
    tree: DictConfig = pickle.loads(TREES[key])
    return tree


hydra.compose = compose_once
composed = cache(compose.compose)
progress.FIRST_LINE = math.inf  # a slow machine prints no more than a fast one
torch.set_num_threads(1)  # these nets are too small to share; threads that wait for each other take minutes


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """A function of a name and a text: the text equals the file of this name in tests/golden.

    `pytest --update-golden` writes the file; read the difference before you commit it.
    """

    def compare(name: str, text: str) -> None:
        path = Path(__file__).parent / "golden" / name
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert text == path.read_text()

    return compare


@pytest.fixture(autouse=True)
def guard(request: pytest.FixtureRequest) -> Guard | None:
    """The guard without which this test runs."""
    return getattr(request, "param", None)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run, with all that a run writes, for all tests that read it: copy it to change it.

    One is made for all workers of pytest. Its volumes are in `data/phantom` beside it.
    """

    def make(place: Path) -> None:
        done = train(place, *TINY, "amp=true", "ckpt=2", "hydra.run.dir=run", wandb="offline", frills=True)
        assert done.code == 0, done.err

    return made_once(tmp_path_factory, "finished", make) / "run"


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of RUN that nothing interrupted, for tests that read it."""

    def make(place: Path) -> None:
        done = train(place, *RUN)
        assert done.code == 0, done.err

    return made_once(tmp_path_factory, "whole", make) / "run"


@pytest.fixture(scope="session")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of such a run, killed at step 5, with its checkpoint of step 4, for tests that read it."""

    def make(place: Path) -> None:
        assert train(place, *RUN, hook=partial(at_step, 5)).code == -signal.SIGKILL

    return made_once(tmp_path_factory, "killed", make) / "run"


@pytest.fixture
def copy(killed: Path, tmp_path: Path) -> Path:
    """The folder of the killed run, for one test."""
    shutil.copytree(killed.parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


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


FOUND_AS_IN_RUNS: dict = {}  # what was simulated with them, by all tests of this process


@pytest.fixture
def programs_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find programs as runs do, with all their tiles and by the whole search."""
    for module, name, number in AS_IN_RUNS:
        monkeypatch.setattr(module, name, number)
    monkeypatch.setattr(simulate, "memo", FOUND_AS_IN_RUNS)


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
    subprocess.run(["umount", "--lazy", str(folder)], check=True)  # maps of its files may be open


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What bars are drawn on."""
    file = io.StringIO()
    file.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(progress, "Terminal", lambda stderr: Terminal(file=file, force_terminal=True, width=80))
    return file
