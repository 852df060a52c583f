"""Batches in the order of the run: the batch of a step depends on the seed and the step alone.

Not on the number of workers, nor on where the run was resumed.
"""

import multiprocessing
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from unet3d import signals
from unet3d.data.patches import Patches, Place
from unet3d.errors import UserError
from unet3d.step import Batch

WRAPPED = f"{UserError.__module__}.{UserError.__name__}: "


class Places(Sampler[list[Place]]):
    """Endless micro-batches from `first` on; every case once an epoch, in an order drawn from (seed, epoch)."""

    def __init__(self, cases: int, batch: int, seed: int, first: int = 0) -> None:
        self.cases, self.batch, self.seed, self.first = cases, batch, seed, first

    def __iter__(self) -> Iterator[list[Place]]:
        micro_batch = self.first
        while True:
            positions = range(micro_batch * self.batch, (micro_batch + 1) * self.batch)
            yield [Place(micro_batch, slot, self._case(position)) for slot, position in enumerate(positions)]
            micro_batch += 1

    def _case(self, position: int) -> int:
        epoch, index = divmod(position, self.cases)
        return int(np.random.default_rng([self.seed, epoch]).permutation(self.cases)[index])


def batches(
    patches: Patches, cases: int, batch: int, accumulate: int, seed: int, workers: int, first_step: int = 0
) -> Iterator[list[Batch]]:
    """For each step from `first_step` on, its list of `accumulate` micro-batches. Endless."""
    loader = DataLoader(
        patches,
        batch_sampler=Places(cases, batch, seed, first_step * accumulate),
        num_workers=workers,
        collate_fn=collate,
        pin_memory=torch.cuda.is_available(),
        # torch draws a seed for its workers from here, else from the global generator, which would shift dropout.
        generator=torch.Generator().manual_seed(seed),
        worker_init_fn=helper,
        timeout=300 if workers else 0,
    )
    stream = iter(loader)
    try:
        while True:
            yield [next(stream) for _ in range(accumulate)]
    except UserError as error:  # from a worker it comes with a traceback around it
        raise UserError(str(error).strip().splitlines()[-1].removeprefix(WRAPPED)) from None
    finally:
        del stream  # its workers end
        for worker in multiprocessing.active_children():  # one that hangs: it ignores SIGTERM
            worker.kill()


def collate(samples: list[tuple[torch.Tensor, torch.Tensor, str]]) -> Batch:
    """N samples to one batch."""
    images, labels, cases = zip(*samples, strict=True)
    return Batch(torch.stack(images), torch.stack(labels), tuple(cases))


def helper(worker: int) -> None:
    """Workers leave the cores to the step, and signals to its process."""
    torch.set_num_threads(1)
    signals.ignore()
