"""The observer of passes that do not call a network's modules: a memory ledger learns which layer an operation is of.

Hooks and dispatch modes that are observers change nothing; where a network's own would be lost, others are refused.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class Observer:
    """One who watches passes and changes nothing."""

    def works_on(self, layer: str, is_backward: bool) -> AbstractContextManager[None]:
        """Return the context of work on the map of a layer, by its module's path, or on the gradient of that map."""
        return nullcontext()


observer = Observer()


def only_watches(hook: Callable[..., Any]) -> bool:
    """Return whether a module's hook is an observer's."""
    return isinstance(getattr(getattr(hook, "func", None), "__self__", None), Observer)
