"""A version of cuDNN that is known to be bad on 3D convolutions in bf16, by pytorch's issue.

torch 2.10 comes with cuDNN 9.10.2 for CUDA 12, and with 9.15.1 for CUDA 13; another cuDNN may be found first.
"""

from collections.abc import Callable

import torch

BAD_CUDNN = range(90800, 91500)  # as cuDNN writes versions: 91002 for 9.10.2
LARGE = 2**30  # elements of a map: of 1.8e9 in the report; nobody has said how much smaller ones are right


def warning(dtype: torch.dtype | None, largest_map: Callable[[], int]) -> str | None:
    """Return a line on the known fault of 3D convolutions of this type on CUDA here, None without one.

    `largest_map` returns the elements of the largest map of the network; it is called only where they matter.
    """
    try:
        cudnn = torch.backends.cudnn.version()
    except RuntimeError as error:  # cuDNN here is older than the one that torch was built with
        return str(error).partition("\n")[0]
    if dtype is not torch.bfloat16 or cudnn not in BAD_CUDNN or largest_map() < LARGE:
        return None
    dotted = f"{cudnn // 10_000}.{cudnn // 100 % 100}.{cudnn % 100}"
    return (
        f"torch {torch.__version__} with cuDNN {dotted} can be wrong in bf16 in 3D convolutions of very large maps, as "
        "of 1.8e9 elements (pytorch#163539); use cuDNN 9.15 or newer, as builds of torch for CUDA 13 do"
    )
