"""unet3d: train 3D U-Nets and know where the memory goes.

From Python: `unet3d.load` opens a trained network, `unet3d.train` trains one, `unet3d.memory.explain` and
`unet3d.memory.predict` say where the memory of a step of any network goes, `unet3d.memory.assert_below` makes a test of
it, and `unet3d.recompute` lets any network train in less. Each loads what it needs when it is used.
"""

TYPE_CHECKING = False  # type checkers take it for true; typing is not loaded for it
if TYPE_CHECKING:
    from typing import Any

    from unet3d import memory
    from unet3d.cli.train import train
    from unet3d.recomputing.module import recompute
    from unet3d.run.predict import load

__version__ = "0.1.0"
__all__ = ["load", "memory", "recompute", "train"]


def __getattr__(name: str) -> "Any":
    if name == "load":
        from unet3d.run.predict import load

        return load
    if name == "memory":
        import sys

        import unet3d.memory  # noqa: F401 (by its name among the modules)

        return sys.modules["unet3d.memory"]
    if name == "recompute":
        from unet3d.recomputing.module import recompute

        return recompute
    if name == "train":
        from unet3d.cli.train import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
