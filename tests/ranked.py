"""Trainings over several ranks, each a real process forked from the server of `training`; torch serves their store."""

import functools
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

from torch.distributed import TCPStore
from training import Ended, Hook, start

from unet3d.base import ranks


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
    ranks.RANK = ranks.LOCAL_RANK = rank
    ranks.SIZE = count
    ranks.GRACE = 2.0
    if hook:
        hook()
