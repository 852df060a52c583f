"""The processes that torchrun started for one run: what they add up, agree on and gather. Free of torch until joined.

A process alone is a world of one, in which nothing here does anything. What is within `joined`, all ranks call in the
same order. A rank that waits in vain for another raises RankLost, which names that one and what became of it.
"""

import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from unet3d.base.errors import ForeseenError, OutOfMemory, Preempted, RankLost, is_out_of_memory, reason

if TYPE_CHECKING:
    from torch import Tensor

RANK, LOCAL_RANK = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
SIZE, LOCAL_SIZE = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # all; here
BUCKET = 2**23  # bytes
PAUSE = 0.0002  # seconds between two looks at whether the GPU is done
LOOK = 1.0  # seconds between two looks at whether the others are there
GRACE = 10.0  # seconds within which each rank that still answers does so, once one does not
T = TypeVar("T")
_stores: list[Any] = []  # of torch.distributed; served by torchrun, or else by the first rank
_joined: list[bool] = []  # whether the ranks work together now
_stuck: list[bool] = []  # whether this rank's GPU waits for one that is lost


def broadcast_job(what: Any) -> None:
    """From the first rank to those that wait in `wait_for_job`: plain values."""
    if SIZE > 1 and RANK == 0:
        _store().set("run", json.dumps(what))


def cancel_job() -> None:
    """From the first rank to those that still wait: there is no run."""
    with suppress(RuntimeError, ValueError):  # nobody waits
        broadcast_job(None)


def wait_for_job(stop: Callable[[], bool]) -> Any:
    """What the first rank hands over, however long that takes. Raises Preempted once asked to `stop`."""
    while not _store().check(["run"]):
        if stop():
            raise Preempted("stopped before it began")
        time.sleep(0.1)
    return json.loads(_store().get("run"))


@contextmanager
def joined(device_type: str, timeout: float) -> Iterator[None]:
    """Within, the ranks work together; none waits longer than `timeout` seconds for another. Raises RankLost."""
    if SIZE == 1:
        yield
        return
    import torch.distributed as dist

    # loaded once there is a group, its functions would keep it: threads that outlive Python, which may abort for them
    import torch.distributed.nn  # noqa: F401

    backend, limit = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo", timedelta(seconds=timeout)
    _store().set(f"process {RANK}", f"{os.getpid()} {platform.node()}")
    try:
        with _answered():
            group = dist.PrefixStore("group", _store())
            dist.init_process_group(backend, store=group, rank=RANK, world_size=SIZE, timeout=limit)
        _joined.append(True)
        yield
    except BaseException as error:
        publish_failure(error)
        raise
    finally:
        leave()


def leave() -> None:
    """From here on, each rank is alone."""
    if SIZE > 1:
        import torch.distributed as dist

        _joined.clear()
        if dist.is_initialized() and not _stuck:
            dist.destroy_process_group()


def count() -> int:
    """How many work together."""
    return SIZE if _joined else 1


def wait_until(is_done: Callable[[], bool]) -> None:
    """Wait for this rank's GPU. Raises RankLost once another rank has ended.

    A collective of NCCL waits for a lost rank without end, and a process that waits for the collective within a call
    of CUDA hears no signal.
    """
    next_look = time.monotonic() + LOOK
    while not is_done():
        time.sleep(PAUSE)
        if time.monotonic() < next_look:
            continue
        try:
            lost = _ended()
        except RuntimeError as error:  # served by a rank that is lost
            lost = RankLost(f"the ranks do not reach each other ({reason(error)})")
        if lost is not None:
            _stuck.append(True)
            raise lost
        next_look = time.monotonic() + LOOK


def end_if_stuck(code: int) -> None:
    """End the process at once where its GPU waits for a lost rank: Python's own end would wait with it."""
    if _stuck:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def all_reduce_sum(tensors: "Iterable[Tensor]") -> None:
    """Replace each tensor by its sum over the ranks, a bucket at a time. Fake ones take the same memory, and stay."""
    if not _joined:
        return
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensor

    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.flatten() for tensor in bucket])  # gloo and NCCL take long for many small ones
        if not isinstance(flat, FakeTensor):
            with _answered():
                dist.all_reduce(flat)
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: "Iterable[Tensor]") -> "Iterator[list[Tensor]]":
    """Tensors of one type each, that together have BUCKET bytes or little more."""
    for _, alike in itertools.groupby(tensors, key=lambda tensor: (tensor.dtype, tensor.device)):
        bucket: list[Tensor] = []
        for tensor in alike:
            bucket.append(tensor)
            if sum(t.nbytes for t in bucket) >= BUCKET:
                yield bucket
                bucket = []
        if bucket:
            yield bucket


def broadcast_from_rank0(tensors: "Iterable[Tensor]") -> None:
    """Fill each tensor with the first rank's numbers."""
    import torch.distributed as dist

    with _answered():
        for tensor in tensors:
            dist.broadcast(tensor, 0)


def all_reduce_max(number: int) -> int:
    """The largest number that a rank has."""
    if not _joined:
        return number
    import torch
    import torch.distributed as dist

    found = torch.tensor(number)
    with _answered():
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def gather(thing: T) -> list[T]:
    """What each rank has, in order."""
    if not _joined:
        return [thing]
    import torch.distributed as dist

    found: list[Any] = [None] * SIZE
    with _answered():
        dist.all_gather_object(found, thing)
    return found


def on_rank0(act: Callable[[], T]) -> T:
    """What `act` returns on the first rank, which alone calls it; an error that it raises is raised by all."""
    if not _joined:
        return act()
    outcome: tuple[Any, Exception | None] = None, None
    if RANK == 0:
        try:
            outcome = act(), None
        except (OSError, ForeseenError) as error:
            if not isinstance(error, Exception):  # a signal
                raise
            outcome = None, error
    value, problem = _from_rank0(outcome)
    if problem is not None:
        raise problem
    result: T = value
    return result


def _from_rank0(thing: T) -> T:
    import torch.distributed as dist

    found = [thing]
    with _answered():
        dist.broadcast_object_list(found, 0)
    return found[0]


def _store() -> Any:
    if not _stores:
        import torch.distributed as dist

        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store still has what an earlier one wrote
        _stores.append(dist.PrefixStore(f"unet3d {attempt}", next(iter(dist.rendezvous("env://")))[0]))
    return _stores[0]


def publish_failure(error: BaseException) -> None:
    """Leave a word to the others: what happened, the exit code, and whether that is their own doing."""
    line = str(error) if isinstance(error, ForeseenError) else reason(error)
    code = OutOfMemory.exit_code if is_out_of_memory(error) else getattr(error, "exit_code", 1)
    with suppress(RuntimeError):  # nobody serves the store any more
        _store().set(f"end {RANK}", json.dumps([line, code, isinstance(error, RankLost)]))


@contextmanager
def _answered() -> Iterator[None]:
    """Turn an error of communication into one that says which rank is lost."""
    try:
        yield
    except RuntimeError as error:  # torch has one type for all
        if is_out_of_memory(error):
            raise
        lost = RankLost(f"the ranks do not reach each other ({reason(error)})")
        with suppress(RuntimeError):  # they may be served by the rank that is lost
            lost = _lost() or lost
        raise lost from error


def _lost() -> RankLost | None:
    """What ended another rank; None if no other ended by itself. Where one is lost, each of the others comes here."""
    _store().set(f"here {RANK}", "")
    others, until = [rank for rank in range(SIZE) if rank != RANK], time.monotonic() + GRACE
    while True:
        ended = _ended()
        if ended is not None:
            return ended
        silent = [
            rank for rank in others if not _store().check([f"end {rank}"]) and not _store().check([f"here {rank}"])
        ]
        if not silent:
            return None
        if time.monotonic() > until:
            return RankLost(f"rank {silent[0]}: does not answer; if it was only slow, set a longer rank_timeout")
        time.sleep(0.05)


def _ended() -> RankLost | None:
    """What ended another rank: its own word, or its process is gone. None if no other ended by itself."""
    others = [rank for rank in range(SIZE) if rank != RANK]
    ends = {rank: json.loads(_store().get(f"end {rank}")) for rank in others if _store().check([f"end {rank}"])}
    for rank, (line, code, is_echo) in ends.items():
        if not is_echo:
            return RankLost(f"rank {rank}: {line}", code)
    for rank in others:
        if rank not in ends and not _store().check([f"here {rank}"]) and _is_gone(rank):
            return RankLost(f"rank {rank}: its process was killed")
    return None


def _is_gone(rank: int) -> bool:
    """Whether its process was on this machine, and is no more."""
    if not _store().check([f"process {rank}"]):
        return False  # it has not come yet
    number, _, node = _store().get(f"process {rank}").decode().partition(" ")
    if node != platform.node():
        return False
    try:
        with open(f"/proc/{number}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"  # ended, and nobody has asked how
    except FileNotFoundError:
        return True
