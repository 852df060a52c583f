"""The training step, what it trains with, and what saves its memory.

The package can also be called: `unet3d.train(["model=unet_small"])` runs a training, as `unet3d.cli.train.from_python`.
"""

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unet3d.cli.train import TrainedRun


class _Train(ModuleType):
    def __call__(self, overrides: Sequence[str] = ()) -> "TrainedRun":
        from unet3d.cli.train import from_python

        return from_python(overrides)


sys.modules[__name__].__class__ = _Train  # importing any module of this package makes `unet3d.train` the package
