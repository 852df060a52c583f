"""Versions of torch and cuDNN that are known to be bad on 3D convolutions in half precision, by pytorch's issues.

A build of torch is installed with a cuDNN of its own, and uses another one where that is found first: both count.
torch 2.9 is older than this package asks for; pip can be told to install it anyway.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import torch

HALF = (torch.bfloat16, torch.float16)
LATER = 10**6  # than any version
WITHOUT_CUDNN = (
    "computes 3D convolutions in half precision without cuDNN: 4 times slower in the first report, "
    "and with more memory than predicted"
)
Version = tuple[int, ...]


class KnownBad(NamedTuple):
    """A fault of some versions. Ranges are half open: first bad version, first good one."""

    torch: tuple[Version, Version]
    cudnn: tuple[int, int]  # as cuDNN writes versions: 91002 for 9.10.2
    dtypes: tuple[torch.dtype, ...]
    wrong: str
    issues: str
    remedy: str
    elements: int = 0  # of a map, at least


KNOWN = (
    KnownBad(
        torch=((2, 9, 0), (2, 9, 1)),
        cudnn=(90800, LATER),
        dtypes=HALF,
        wrong=WITHOUT_CUDNN,
        issues="pytorch#166122, #166643",
        remedy="use torch 2.10 or newer",
    ),
    KnownBad(  # this torch asks for cuDNN's version as it runs, and comes with 9.10.2 or 9.13
        torch=((2, 9, 1), (2, 10)),
        cudnn=(90800, 91500),
        dtypes=HALF,
        wrong=WITHOUT_CUDNN,
        issues="pytorch#166122, #166643",
        remedy="use torch 2.10 or newer, or cuDNN 9.15 or newer",
    ),
    KnownBad(  # 2.10 comes with 9.10.2 for CUDA 12, and with 9.15.1 for CUDA 13
        torch=((2, 10), (LATER,)),
        cudnn=(90800, 91500),
        dtypes=(torch.bfloat16,),
        wrong="can be wrong in bf16 in 3D convolutions of very large maps, as of 1.8e9 elements",
        issues="pytorch#163539",
        remedy="use cuDNN 9.15 or newer, as builds of torch for CUDA 13 do",
        elements=2**30,  # nobody has said how much smaller ones than the reported are right
    ),
)


def warning(dtype: torch.dtype | None, largest_map: Callable[[], int]) -> str | None:
    """Return a line on the known fault of 3D convolutions of this type on CUDA here, None without one.

    `largest_map` returns the elements of the largest map of the network; it is called only where they matter.
    """
    try:
        cudnn = torch.backends.cudnn.version()
    except RuntimeError as error:  # cuDNN here is older than the one that torch was built with
        return str(error).partition("\n")[0]
    if cudnn is None:
        return None
    version = release(torch.__version__)
    for known in KNOWN:
        is_torch = known.torch[0] <= version < known.torch[1]
        is_cudnn = known.cudnn[0] <= cudnn < known.cudnn[1]
        if not is_torch or not is_cudnn or dtype not in known.dtypes:
            continue
        if known.elements and largest_map() < known.elements:
            continue
        versions = f"torch {torch.__version__} with cuDNN {dotted(cudnn)}"
        return f"{versions} {known.wrong} ({known.issues}); {known.remedy}"
    return None


def release(version: str) -> Version:
    """Return the numbers of a version, without its build: 2, 9, 1 of 2.9.1+cu128."""
    without_build, _, _ = version.partition("+")
    numbers = re.findall(r"\d+", without_build)
    return tuple(int(number) for number in numbers[:3])


def dotted(cudnn: int) -> str:
    """Return a version of cuDNN as people write it: 9.10.2 for 91002."""
    major = cudnn // 10_000
    minor = cudnn // 100 % 100
    patch = cudnn % 100
    return f"{major}.{minor}.{patch}"
