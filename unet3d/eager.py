"""torch loads its compiler, which takes a second or two, to switch it off as an optimizer steps.

Nothing is compiled here, so a stand-in answers. It gives way to the compiler as soon as anything else is asked of it.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

COMPILER = "torch._dynamo"


class Settings:
    """Those of the compiler; checkpointing reads one."""

    error_on_nested_fx_trace = True  # the compiler's default

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(f"{COMPILER}.config"), name)


class StandIn(ModuleType):
    """In the place of `torch._dynamo`."""

    config = Settings()

    def disable(self, function: Any, *_: Any, **__: Any) -> Any:
        """The function itself: it is not compiled."""
        return function

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Nothing is traced."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # asked by what looks at all modules
            raise AttributeError(name)
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER], torch._dynamo
            torch._dynamo = importlib.import_module(COMPILER)
        return getattr(sys.modules[COMPILER], name)


def stay_eager() -> None:
    """Keep torch from loading its compiler as long as nothing needs it."""
    if COMPILER not in sys.modules:
        torch._dynamo = sys.modules[COMPILER] = StandIn(COMPILER)
