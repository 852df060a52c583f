"""How libraries are loaded: their threads let others have the cores, and they load while there is room."""

import mmap
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from unet3d.base.errors import OutOfMemory, address_limit
from unet3d.base.types import mib

THREAD = 48 * 2**20  # bytes of address space that OpenBLAS takes for each of its threads, with the thread's stack
SPINS = "3000"  # turns of a waiting thread's loop before it sleeps; libgomp's own number is 300,000
HEAP = 160 * 2**20  # bytes, of Python's objects and code beside shared objects, that a library takes at most


def share_cores() -> None:
    """Let threads that wait for each other sleep soon, unless the environment says how they are to wait.

    A thread that waits awake keeps its core busy. Where two programs share the cores, steps then take six times as
    long. On idle cores sleeping costs a hundredth: `tests/bench/busy_cores.py`. Call it before torch loads.
    """
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ["GOMP_SPINCOUNT"] = SPINS


def load_libraries() -> None:
    """Load what a run uses, if the address space is limited. Raises OutOfMemory if it does not fit.

    NumPy and SciPy bring OpenBLAS, which ends the process or asks again without end where memory is refused to it.
    """
    if not address_limit():
        return
    for name, use in (("numpy", _use_numpy), ("scipy", _use_scipy), ("torch", _use_torch)):
        size = HEAP + THREAD * (1 + _threads()) + (0 if name in sys.modules else _shared_objects(name))
        try:
            mmap.mmap(-1, size).close()
        except OSError as error:
            needed = f"{name} does not fit: it may take {mib(size)} MiB of address space"
            raise OutOfMemory(f"{needed}, with OMP_NUM_THREADS=1 less") from error
        use()


def _threads() -> int:
    """How many OpenBLAS starts, at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    named = (os.environ.get(name, "") for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"))
    return min(64, next((int(text) for text in named if text.isdecimal()), cores))  # 64: as NumPy builds it


def _shared_objects(name: str) -> int:
    """Bytes of the shared objects of a package, and of those that its wheel brings."""
    found = find_spec(name)
    assert found is not None and found.submodule_search_locations
    home = Path(found.submodule_search_locations[0])
    return sum(path.stat().st_size for place in (home, home.with_name(f"{name}.libs")) for path in place.rglob("*.so*"))


def _use_numpy() -> None:
    import numpy

    numpy.ones((99, 99)) @ numpy.ones((99, 99))  # takes the buffers of its threads


def _use_scipy() -> None:
    import scipy.interpolate
    import scipy.spatial.transform

    scipy.interpolate.make_interp_spline(range(9), range(9))


def _use_torch() -> None:
    import torch._dynamo

    torch.ones(2**20).sum()  # starts its threads
