"""The memory of a training step, before it runs and as it runs.

`explain` and `predict` are for any network, from Python, and `assert_below` is for its tests; torch loads when they
are used.

In reading order: `ledger` records each tensor storage and the module that made it; `breakdown` says who holds the
bytes; `meter` reads the peaks of a step, and adds what happens within convolutions on a GPU. `fake_tensors` and
`simulate` take the step without its memory; `allocator` replays CUDA's allocator.
`technique` chooses what backward computes again, by segments (`ckpt`) or a schedule (`recompute`); `remedies` has other
ways to take a step, and searches for one that fits. `prediction` is what a run prints first; `any_network` and
`user_step` are for networks of others; `tables` shows the figures.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unet3d.memory.any_network import assert_below, explain, predict

__all__ = ["assert_below", "explain", "predict"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from unet3d.memory import any_network

    return getattr(any_network, name)


def __dir__() -> list[str]:
    return __all__
