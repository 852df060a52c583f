"""A batch depends only on the seed and the step, and lost workers end the run."""

import functools
import multiprocessing
import os
import pickle
import resource
import signal
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from guards import no, nothing, without
from promises import promise
from torch.utils.data import _utils
from training import TINY, train

from unet3d.base import ranks
from unet3d.base.errors import LoaderError, UserError
from unet3d.base.types import Batch
from unet3d.config.schema import Config, Data
from unet3d.data.labels import wrong_labels
from unet3d.data.loader import batches, lost, micro_batches, worker_count
from unet3d.data.patches import Patches, PreparedCase, prepare
from unet3d.training import trainer


def case(index: int) -> PreparedCase:
    rng = np.random.default_rng(index)
    image = rng.normal(size=(1, 14, 12, 10)).astype(np.float32)
    return prepare(f"case{index}", image, (image[0] > 1).astype(np.uint8), (1.0, 1.0, 2.0), None)


default_rng = np.random.default_rng


def unseeded(*_: object) -> np.random.Generator:
    """Draw other numbers each time."""
    return default_rng()


def stream(workers: int | str = 0, first: int = 0, seed: int = 5, accumulate: int = 1) -> list[Batch]:
    """Return the micro-batches of four steps."""
    config = Config(data=Data(patch=[8, 8, 12]), batch=2, accumulate=accumulate, seed=seed, workers=workers)
    patches = Patches(case, config.data, seed, config.data.patch)
    steps = batches(patches, ["case0", "case1", "case2"], config, first)
    return [batch for step in islice(steps, 4) for batch in step]


def equal(a: list[Batch], b: list[Batch]) -> bool:
    pairs = list(zip(a, b, strict=True))
    are_images = all(torch.equal(x.image, y.image) for x, y in pairs)
    return are_images and all(torch.equal(x.label, y.label) and x.cases == y.cases for x, y in pairs)


@promise("Resume", "another number of data ...")
@without("numpy.random.default_rng", unseeded, only="1")
@pytest.mark.parametrize("workers", ["auto", 1, 2])
def test_the_same_stream_for_any_number_of_workers(workers: int | str) -> None:
    """Dropout draws from the global random state, which stays as it is."""
    before = torch.get_rng_state()
    assert equal(stream(0), stream(workers))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_same_stream_wherever_it_starts_however_steps_are_parted_and_another_of_another_seed() -> None:
    assert equal(stream(first=2)[:2], stream()[2:])
    assert equal(stream(accumulate=2)[:4], stream())
    assert not equal(stream(), stream(seed=6))


def test_every_case_once_an_epoch_in_a_new_order() -> None:
    places = [place.case for micro in islice(micro_batches(7, 3, seed=1), 14) for place in micro]
    epochs = [places[start : start + 7] for start in range(0, 42, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


@pytest.mark.parametrize(
    ("cores", "ranks_here", "on_gpu", "expected"),
    [(16, 1, False, 1), (16, 1, True, 8), (8, 2, True, 3), (2, 4, True, 1)],
)
def test_automatic_workers_follow_the_cores_of_a_rank_beside_a_gpu(
    cores: int, ranks_here: int, on_gpu: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(ranks, "LOCAL_SIZE", ranks_here)
    assert worker_count("auto", on_gpu) == expected


BAD = 1  # in the second batch of seed 0, with case3


def failing(act: Callable[[], object], index: int) -> PreparedCase:
    if index == BAD:
        act()
    return case(index)


def second(act: Callable[[], object], workers: int = 1, timeout: float = 60) -> None:
    """Ask for a batch of sound cases, then for the one with the case that acts."""
    config = Config(data=Data(patch=[8, 8, 8]), batch=2, workers=workers)
    patches = Patches(functools.partial(failing, act), config.data, config.seed, [8, 8, 8])
    made = batches(patches, [f"case{number}" for number in range(4)], config, timeout=timeout)
    next(made)
    next(made)


def explode() -> None:
    raise IndexError("no such voxel")


def refuse() -> None:
    raise wrong_labels("case7: a.nii: damaged", "replace the file")


def exhaust() -> None:
    raise MemoryError


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch waits 5 s for a worker to end by itself before it ends it."""
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)


@promise(
    "Data",
    "a data worker that raises, is killed or hangs",
    "exit 1 with the missing cases and a hint; hangs end by a timeout",
)
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_a_worker_names_its_cases_and_keeps_its_trace(workers: int) -> None:
    with pytest.raises(RuntimeError, match=r"\bcase1, case3: (IndexError: )?no such voxel$") as caught:
        second(explode, workers)
    assert isinstance(caught.value.__cause__, IndexError)
    assert not isinstance(caught.value, LoaderError)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_case_that_cannot_be_used_stays_a_user_error_in_one_line(workers: int) -> None:
    with pytest.raises(UserError, match=r"^case7: a\.nii: damaged; replace the file$"):
        second(refuse, workers)


def test_an_error_about_labels_reaches_other_ranks_whole() -> None:
    error = wrong_labels("a: labels are numbered 0, 2", "number them", ["data.label_map={1:2}"], frozenset({2}))
    sent = pickle.loads(pickle.dumps(error))
    assert (str(sent), vars(sent)) == (str(error), vars(error))


@without("unet3d.data.loader.is_out_of_memory", no)
def test_a_memory_error_is_not_wrapped() -> None:
    with pytest.raises(MemoryError):
        second(exhaust, 0)


@promise("Data", "a data worker that ...")
@without("unet3d.data.loader.lost", nothing)
@pytest.mark.usefixtures("impatient")
def test_a_worker_that_is_killed_is_reported_with_the_missing_cases() -> None:
    """Workers run ahead: its death may be seen a batch early."""
    with pytest.raises(LoaderError, match=r"\bcase\d, case\d: DataLoader worker .*data\.cache=disk\b"):
        second(die)


@promise("Training", "too little shared memory ...")
@pytest.mark.usefixtures("impatient")
def test_a_worker_that_cannot_hand_over_its_batch_names_shared_memory() -> None:
    """It is a file. torch's thread that sends batches would lose this one, which is waited for."""
    with pytest.raises(LoaderError, match=r"\bcase1, case3: .*/dev/shm\b.*--shm-size=2g.*workers=0$"):
        second(functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100, 100)))


@promise("Training", "too few open files ...")
@without("unet3d.data.loader.is_out_of_files", no, only="files")
@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("Too many open files. Communication with the workers is no longer possible.", "ulimit -n"),
        ("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that", "--shm-size=2g"),
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", "data.cache=disk"),
    ],
    ids=["files", "bus", "killed"],
)
def test_a_lost_worker_is_reported_once_with_the_remedy(text: str, remedy: str) -> None:
    error = lost(RuntimeError(text))
    assert error is not None
    assert remedy in str(error)
    assert lost(error) is None
    assert lost(RuntimeError("shapes do not fit")) is None


@promise("Data", "a data worker that ...")
@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_worker_that_hangs_is_ended_by_the_timeout() -> None:
    """It waits for what never comes, and ignores SIGTERM."""
    with pytest.raises(LoaderError, match=r"\bcase1, case3: DataLoader timed out .*workers=0\b"):
        second(threading.Event().wait, timeout=2)
    assert not multiprocessing.active_children()


@promise("What scripts rely on", "exit code 1 ...")
@promise("Data", "a data worker that ...")
def test_a_run_whose_worker_is_killed_within_a_step_ends_with_1_and_one_line(tmp_path: Path) -> None:
    """torch raises as soon as it notices, whatever the run is doing."""
    done = train(tmp_path, *TINY, "workers=1", "hydra.run.dir=run", hook=kill_a_worker_and_wait)
    assert done.code == 1
    assert "Traceback" not in done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("failed: ")]
    assert line.startswith("failed: DataLoader worker (pid")
    assert "data.cache=disk" in line
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
