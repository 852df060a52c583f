"""Trainings over several ranks, each a real process forked from the server of `training`; torch serves their store."""

import functools
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

from torch.distributed import TCPStore
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from training import Ended, Hook, forked, start, train_here, without_frills

from unet3d.base import ranks
from unet3d.memory import prediction


def train_ranks(
    place: Path, *words: str, count: int = 2, hooks: Mapping[int, Hook] | None = None, frills: bool = False
) -> list[Ended]:
    """`torchrun --nproc-per-node COUNT train.py WORDS`, once all have ended; `hooks` run first in a rank's process.

    The run's folder is place/run.
    """
    place.mkdir(exist_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = [
        start(
            place / f"rank{rank}",
            *words,
            *(f"data.root={place / 'phantom'}", f"hydra.run.dir={place / 'run'}"),
            hook=functools.partial(_become, rank, count, store.port, (hooks or {}).get(rank)),
            frills=frills,
        )
        for rank in range(count)
    ]
    waiting = {child.sentinel: child for child, _ in started}
    while waiting:  # as torchrun does: the end of one rank by an error ends the others
        for sentinel in wait(list(waiting)):
            if waiting.pop(sentinel).exitcode:
                for child in waiting.values():
                    assert child.pid
                    with suppress(ProcessLookupError):
                        os.kill(child.pid, signal.SIGKILL if _is_stopped(child.pid) else signal.SIGTERM)
    return [Ended(child, folder) for child, folder in started]


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except FileNotFoundError:
        return False


def _become(rank: int, count: int, port: int, hook: Hook | None) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    _read_environment(hook)


def _read_environment(hook: Hook | None) -> None:
    """Become the rank that the environment names, as a process that begins with it does."""
    ranks.RANK = int(os.environ["RANK"])
    ranks.LOCAL_RANK = int(os.environ["LOCAL_RANK"])
    ranks.SIZE = int(os.environ["WORLD_SIZE"])
    ranks.GRACE = 2.0
    if hook:
        hook()


def torchrun(place: Path, *words: str, restarts: int, hook: Hook | None = None) -> int | None:
    """Return the exit code of `torchrun --nproc-per-node 2 --max-restarts RESTARTS train.py WORDS`.

    It is torchrun's own launcher; its ranks are forked, and not interpreters that load torch. Each works in a folder
    of its own, place/rank0 and place/rank1, and leaves the names of its threads there, in `threads`.
    """
    launcher = forked(_launch, place, words, restarts, hook)
    launcher.start()
    launcher.join()
    return launcher.exitcode


def _launch(place: Path, words: tuple[str, ...], restarts: int, hook: Hook | None) -> None:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=place.name,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=restarts,
        start_method="fork",
    )
    elastic_launch(config, _train_as_rank)(place, words, hook)


def _train_as_rank(place: Path, words: tuple[str, ...], hook: Hook | None) -> None:
    folder = place / f"rank{os.environ['RANK']}"
    folder.mkdir(exist_ok=True)
    try:
        train_here(folder, words, functools.partial(_read_environment, hook), "disabled", False, ())
    except SystemExit as end:
        if end.code:
            raise
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    (folder / "threads").write_text(" ".join(names))


def predict_without_pictures() -> None:
    """Leave out the report and the pictures of a run with frills, but not its preflight."""
    predict = prediction.preflight
    without_frills()
    prediction.preflight = predict
