"""Communication between the processes that torchrun started for one run. Free of torch until `joined`.

With one process every function here is a no-op. Inside `joined`, all ranks must make the same calls in the same order.
A rank that waits for one that is lost raises RankLost, which names it and says how it ended.
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

RANK = int(os.environ.get("RANK", "0"))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
SIZE = int(os.environ.get("WORLD_SIZE", "1"))  # ranks of the run
LOCAL_SIZE = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # ranks on this machine
BUCKET = 2**23  # bytes that are summed at once, at least
PAUSE = 0.0002  # seconds between two looks at whether the GPU is done
RELEASE = 1.0  # seconds that gloo has to release a tensor
LOOK = 1.0  # seconds between two looks at whether the others are there
GRACE = 10.0  # seconds within which each rank that still answers does so, once one does not
T = TypeVar("T")
_stores: list[Any] = []  # Stores of torch.distributed, served by torchrun or by the first rank.
_joined: list[bool] = []  # whether the ranks work together now
_stuck: list[bool] = []  # whether this rank's GPU waits for one that is lost


def broadcast_job(job: Any) -> None:
    """Send plain values from rank 0 to the ranks that wait in `wait_for_job`."""
    if SIZE > 1 and RANK == 0:
        _store().set("run", json.dumps(job))


def cancel_job() -> None:
    """Tell the ranks that still wait that there is no run."""
    with suppress(RuntimeError, ValueError):  # nobody waits
        broadcast_job(None)


def wait_for_job(stop: Callable[[], bool]) -> Any:
    """Return what rank 0 broadcasts, however long that takes. Raises Preempted once asked to `stop`."""
    while not _store().check(["run"]):
        if stop():
            raise Preempted("stopped before it began")
        time.sleep(0.1)
    return json.loads(_store().get("run"))


@contextmanager
def joined(device_type: str, timeout: float) -> Iterator[None]:
    """Let the ranks work together; none waits longer than `timeout` seconds for another. Raises RankLost."""
    if SIZE == 1:
        yield
        return
    import torch.distributed as dist

    # Loaded once there is a group, its functions would keep it: threads that outlive Python, which may abort for them.
    import torch.distributed.nn  # noqa: F401

    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    _store().set(f"process {RANK}", f"{os.getpid()} {platform.node()}")
    try:
        with _answered():
            group = dist.PrefixStore("group", _store())
            dist.init_process_group(
                backend, store=group, rank=RANK, world_size=SIZE, timeout=timedelta(seconds=timeout)
            )
        _joined.append(True)
        yield
    except BaseException as error:
        publish_failure(error)
        raise
    finally:
        leave()


def leave() -> None:
    """End the group: each rank is alone from here on."""
    if SIZE > 1:
        import torch.distributed as dist

        _joined.clear()
        if dist.is_initialized() and not _stuck:
            dist.destroy_process_group()


def count() -> int:
    """Return how many ranks work together now."""
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
            references = flat._use_count()  # type: ignore[attr-defined]
            with _answered():
                dist.all_reduce(flat)
            # A thread of gloo releases a tensor a moment after the collective has returned: until then the memory is
            # taken, and a measured peak would depend on the moment.
            until = time.monotonic() + (RELEASE if flat.device.type == "cpu" else 0)
            while time.monotonic() < until and flat._use_count() > references:  # type: ignore[attr-defined]
                time.sleep(0)
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: "Iterable[Tensor]") -> "Iterator[list[Tensor]]":
    """Yield groups of tensors of one type and device, of BUCKET bytes or little more."""
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
    """Fill each tensor with rank 0's numbers."""
    import torch.distributed as dist

    with _answered():
        for tensor in tensors:
            dist.broadcast(tensor, 0)


def all_reduce_max(number: int) -> int:
    """Return the largest of the ranks' numbers."""
    if not _joined:
        return number
    import torch
    import torch.distributed as dist

    largest = torch.tensor(number)
    with _answered():
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def gather(thing: T) -> list[T]:
    """Return each rank's value, in the order of ranks."""
    if not _joined:
        return [thing]
    import torch.distributed as dist

    things: list[Any] = [None for _ in range(SIZE)]
    with _answered():
        dist.all_gather_object(things, thing)
    return things


def on_rank0(act: Callable[[], T]) -> T:
    """Call `act` on rank 0 only, and return its result on all ranks; an error is raised by all."""
    if not _joined:
        return act()
    import torch.distributed as dist

    ended: list[Any] = [None, None]  # its result, and the error that it raised
    if RANK == 0:
        try:
            ended[0] = act()
        except (OSError, ForeseenError) as error:
            if not isinstance(error, Exception):  # a signal
                raise
            ended[1] = error
    with _answered():
        dist.broadcast_object_list(ended, 0)
    result, problem = ended
    if problem is not None:
        raise problem
    return result  # type: ignore[no-any-return]


def _store() -> Any:
    """Return the store of keys and values that all ranks share."""
    if not _stores:
        import torch.distributed as dist

        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store still has what an earlier one wrote
        _stores.append(dist.PrefixStore(f"unet3d {attempt}", next(iter(dist.rendezvous("env://")))[0]))
    return _stores[0]


def publish_failure(error: BaseException) -> None:
    """Tell the other ranks how this one failed: the line, the exit code, and whether another rank caused it."""
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
    """Return how another rank ended; None unless one did. Each rank comes here once one is lost."""
    _store().set(f"here {RANK}", "")
    until = time.monotonic() + GRACE
    while True:
        ended = _ended()
        silent = _silent()
        if ended is not None or not silent:
            return ended
        if time.monotonic() > until:
            return RankLost(f"rank {silent[0]}: does not answer; if it was only slow, set a longer rank_timeout")
        time.sleep(0.05)


def _ended() -> RankLost | None:
    """Return how another rank ended: it has said so, or its process is gone. None unless one did."""
    for rank in range(SIZE):
        if rank != RANK and _store().check([f"end {rank}"]):
            line, code, is_echo = json.loads(_store().get(f"end {rank}"))
            if not is_echo:
                return RankLost(f"rank {rank}: {line}", code)
    gone = [rank for rank in _silent() if _is_gone(rank)]
    return RankLost(f"rank {gone[0]}: its process was killed") if gone else None


def _silent() -> list[int]:
    """Return the other ranks that have left neither `end` (their last line) nor `here` (they answer) in the store."""
    others = [rank for rank in range(SIZE) if rank != RANK]
    return [rank for rank in others if not any(_store().check([f"{word} {rank}"]) for word in ("end", "here"))]


def _is_gone(rank: int) -> bool:
    """Return whether a rank's process was on this machine, and is no more."""
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
