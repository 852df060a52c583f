"""Batches in the order of the run: they depend on seed and step, not on the number of workers or on a resume."""

import itertools
import math
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from unet3d.base import ranks, signals
from unet3d.base.errors import LoaderError, UserError, file_limit, is_out_of_files, is_out_of_memory
from unet3d.base.types import Batch, mib
from unet3d.config.schema import Config
from unet3d.data.patches import Patches, PatchIndex

SHARED = Path("/dev/shm")
MOST_WORKERS = 8  # Bound of workers=auto.
USES_SHARED = f"batches of data workers pass through {SHARED}: enlarge it (docker run --shm-size=2g), or set workers=0"


def worker_count(asked: int | str, on_gpu: bool) -> int:
    """Return how many processes prepare batches.

    `auto` for a step on the CPU: 1, as the step itself is busy on all cores. On a GPU: all cores that this rank has but
    one, which launches the step; beyond MOST_WORKERS each would hold batches that a step does not wait for.
    """
    if asked != "auto":
        return int(asked)
    if not on_gpu:
        return 1
    cores = len(os.sched_getaffinity(0)) // ranks.LOCAL_SIZE
    return max(1, min(cores - 1, MOST_WORKERS))


def micro_batches(cases: int, batch: int, seed: int, first: int = 0) -> Iterator[list[PatchIndex]]:
    """Yield micro-batches without end, from number `first` on.

    Every case comes once an epoch, in an order drawn from (seed, epoch).
    """
    for number in itertools.count(first):
        indices = list[PatchIndex]()
        for sample in range(batch):
            epoch, position = divmod(number * batch + sample, cases)
            order = np.random.default_rng([seed, epoch]).permutation(cases)
            indices.append(PatchIndex(number, sample, int(order[position])))
        yield indices


def batches(
    patches: Patches, cases: Sequence[str], config: Config, first_step: int = 0, pin: bool = False, timeout: float = 300
) -> Iterator[list[Batch]]:
    """Yield for each step from `first_step` on its list of micro-batches of the named cases: this rank's share.

    Endless. `pin` only for a GPU: it creates a CUDA context. Raises UserError for an unusable case, LoaderError if a
    worker dies or takes longer than `timeout` seconds for a batch, RuntimeError for other errors.
    """
    workers = _with_room(worker_count(config.workers, on_gpu=pin), config)
    first = ranks.RANK * config.batch // ranks.SIZE
    last = (ranks.RANK + 1) * config.batch // ranks.SIZE
    whole = micro_batches(len(cases), config.batch, config.seed, first_step * config.accumulate)
    sampler, awaited = itertools.tee(batch[first:last] for batch in whole)
    loader = DataLoader(
        patches,
        batch_sampler=sampler,
        num_workers=workers,
        collate_fn=_collate,
        pin_memory=pin,
        # torch draws a seed for its workers from here, else from the global generator, which would shift dropout.
        generator=torch.Generator().manual_seed(config.seed),
        worker_init_fn=_start_worker,
        timeout=timeout if workers else 0,
    )
    stream: Any = iter(loader)
    try:
        while True:
            step = list[Batch]()
            for _ in range(config.accumulate):
                indices = next(awaited)  # batches come in order, so the cases of a missing one are known
                step.append(_next(stream, [cases[index.case] for index in indices]))
            yield step
    finally:
        _end_workers(stream)


def _end_workers(stream: Any) -> None:
    """End the workers: torch does so only when nothing refers to them, and a traceback may."""
    workers = list(getattr(stream, "_workers", ()))  # without workers it has no such list
    if workers:
        stream._shutdown_workers()
    for worker in workers:
        worker.kill()  # one that hangs ignores SIGTERM
        worker.join()


def _with_room(workers: int, config: Config) -> int:
    """Return how many workers to start: of `workers=auto` fewer where there is no room. Raises UserError."""
    batch_bytes = 4 * config.batch // ranks.SIZE * math.prod(config.data.patch)
    while workers and (lack := _lack_of_room(workers, 2 * workers + config.accumulate, batch_bytes)):
        if config.workers != "auto" or workers == 1:
            raise UserError(f"workers={workers}: {lack}")
        workers //= 2
    return workers


def _lack_of_room(workers: int, batches: int, batch_bytes: int) -> str:
    """Return why workers cannot hand over this many batches at once, each of at least `batch_bytes`; "" if they can."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed_files = 16 + 8 * workers + 2 * batches  # workers have pipes; each tensor of a batch under way is a file
    if limit != resource.RLIM_INFINITY and len(os.listdir("/proc/self/fd")) + needed_files > limit:
        return f"{file_limit()}, and workers=0 needs fewer"
    if SHARED.is_dir():
        status = os.statvfs(SHARED)
        free = status.f_bavail * status.f_frsize
        needed = 2**20 + batches * batch_bytes
        if status.f_blocks and free < needed:  # without a limit it says that it has no blocks
            return f"{mib(needed)} MiB do not fit into {mib(free)} MiB; {USES_SHARED}"
    return ""


def _next(stream: Iterator[Batch], cases: Sequence[str]) -> Batch:
    """Return the next batch, which is of these cases. Raises UserError, LoaderError, RuntimeError."""
    try:
        return next(stream)
    except UserError as error:  # a worker's has a traceback around it
        last_line = str(error).strip().splitlines()[-1]
        raise UserError(last_line.removeprefix(f"{type(error).__module__}.{type(error).__name__}: ")) from None
    except Exception as error:
        if is_out_of_memory(error):
            raise
        missing = f"no batch of {', '.join(dict.fromkeys(cases))}: "
        lines = str(error).strip().splitlines() or [repr(error)]
        raise lost(error, missing) or RuntimeError(missing + lines[-1]) from error


def lost(error: Exception, prefix: str = "") -> LoaderError | None:
    """Return the error to show if torch reports with `error` that a worker died or hangs; None for another error."""
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, LoaderError):
        return None  # shown already
    if "DataLoader timed out" in text:
        return LoaderError(f"{prefix}{text}; can the files still be read? workers=0 shows where it waits")
    if is_out_of_files(error):
        return LoaderError(f"{prefix}too many open files; {file_limit()}, and workers=0 needs fewer")
    if "</torch_" in str(error) or "Bus error" in text:  # torch's name of a file in shared memory
        return LoaderError(f"{prefix}no room in shared memory; {USES_SHARED}")
    if "DataLoader worker (pid" in text:
        return LoaderError(f"{prefix}{text}; out of memory? data.cache=disk or fewer workers need less")
    return None


def _collate(samples: list[tuple[torch.Tensor, torch.Tensor, str]]) -> Batch:
    """Return samples as a batch."""
    images, labels, cases = zip(*samples, strict=True)
    batch = Batch(torch.stack(images), torch.stack(labels), tuple(cases))
    if get_worker_info() is not None:  # shared here, an error is the run's; in the thread that sends, it would be lost
        batch.image.share_memory_()
        batch.label.share_memory_()
    return batch


def _start_worker(_: int) -> None:
    """Leave the cores to the step, and signals to its process."""
    torch.set_num_threads(1)
    signals.ignore()
