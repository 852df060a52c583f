"""What a step's memory is, before it runs and as it runs.

`explain` and `predict` are for any network, from Python; torch loads when they are used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unet3d.memory.profile import explain, predict

__all__ = ["explain", "predict"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from unet3d.memory import profile

    return getattr(profile, name)


def __dir__() -> list[str]:
    return __all__
