"""A process that prepares batches and raises, is killed or hangs: the run ends, and says with which cases."""

import functools
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import _utils
from training import TINY, train

from unet3d.config import Data
from unet3d.data.loader import batches, lost
from unet3d.data.patches import Patches, PreparedCase, prepare
from unet3d.errors import LoaderError, UserError
from unet3d.train import trainer

ROOT = Path(__file__).resolve().parent.parent.parent
NAMES = ["case0", "case1", "case2", "case3"]
BAD = "case1"  # in the second batch of seed 0, with case3


def sound(index: int) -> PreparedCase:
    rng = np.random.default_rng(index)
    image = rng.normal(size=(1, 8, 8, 8)).astype(np.float32)
    return prepare(NAMES[index], image, (image[0] > 1).astype(np.uint8), (1.0, 1.0, 1.0), None)


def failing(act: Callable[[], object], index: int) -> PreparedCase:
    if NAMES[index] == BAD:
        act()
    return sound(index)


def second(act: Callable[[], object], workers: int = 1, timeout: float = 60) -> None:
    """Ask for a batch of sound cases, then for the one with the case that acts."""
    patches = Patches(functools.partial(failing, act), Data(patch=[8, 8, 8]), 0, [8, 8, 8])
    made = batches(patches, NAMES, 2, 1, 0, workers, timeout=timeout)
    assert BAD not in next(made)[0].cases
    next(made)


def explode() -> None:
    raise IndexError("no such voxel")


def refuse() -> None:
    raise UserError("case7: a.nii: damaged; replace the file")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch waits 5 s for a worker to end by itself before it ends it, as soon as nothing holds its loader."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    yield
    gc.collect()


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_d16_a_fault_in_a_worker_is_told_with_its_cases_and_its_trace(workers: int) -> None:
    with pytest.raises(RuntimeError, match=r"^no batch of case1, case3: (IndexError: )?no such voxel$") as caught:
        second(explode, workers)
    assert isinstance(caught.value.__cause__, IndexError) and not isinstance(caught.value, LoaderError)


@pytest.mark.parametrize("workers", [0, 1])
def test_d16_a_case_that_cannot_be_used_stays_the_users_in_one_line(workers: int) -> None:
    with pytest.raises(UserError, match=r"^case7: a\.nii: damaged; replace the file$"):
        second(refuse, workers)


def test_d16_memory_that_runs_out_is_told_as_such() -> None:
    def exhaust() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        second(exhaust, 0)


def test_d16_a_worker_that_is_killed_is_told_with_the_cases_waited_for() -> None:
    """Workers run ahead: its death may be seen a batch early."""
    with pytest.raises(LoaderError, match=r"^no batch of case\d, case\d: DataLoader worker .*fewer workers need less$"):
        second(die)


def test_d16_a_worker_that_hangs_is_ended_by_the_timeout() -> None:
    """It waits for what never comes, and ignores SIGTERM."""
    with pytest.raises(LoaderError, match=r"^no batch of case1, case3: DataLoader timed out .*workers=0 shows"):
        second(threading.Event().wait, timeout=5)
    assert not multiprocessing.active_children()


def test_d16_what_was_said_of_a_worker_is_not_said_twice() -> None:
    error = lost(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "))
    assert error is not None and lost(error) is None
    assert lost(RuntimeError("shapes do not fit")) is None


def test_d16_a_run_whose_worker_is_killed_within_a_step_ends_with_1_and_one_line(tmp_path: Path) -> None:
    """torch tells of it as soon as it hears, whatever the run is doing."""
    done = train(tmp_path, *TINY, "workers=1", "hydra.run.dir=run", hook=kill_a_worker_and_wait)
    assert done.code == 1 and "Traceback" not in done.err, done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("failed: ")]
    assert line.startswith("failed: DataLoader worker (pid") and "data.cache=false or fewer workers need less" in line
    assert (tmp_path / "run" / "STATUS").read_text().startswith(line)


def kill_a_worker_and_wait() -> None:

    def step(*_: object, **__: object) -> None:
        (worker,) = multiprocessing.active_children()
        assert worker.pid
        os.kill(worker.pid, signal.SIGKILL)
        while True:
            pass

    _utils.MP_STATUS_CHECK_INTERVAL = 0.2
    trainer.train_step = step
