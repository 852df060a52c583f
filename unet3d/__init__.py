"""unet3d: train 3D U-Nets and know where the memory goes.

From Python: `unet3d.load` opens a trained network, `unet3d.train` trains one, `unet3d.memory.explain` and
`unet3d.memory.predict` say where the memory of a step of any network goes. Each loads what it needs when it is used.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from unet3d import memory, train
    from unet3d.run.segment import load

__version__ = "0.1.0"
__all__ = ["load", "memory", "train"]


def __getattr__(name: str) -> "Any":
    from importlib import import_module

    if name == "load":
        return import_module("unet3d.run.segment").load
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"unet3d.{name}")
