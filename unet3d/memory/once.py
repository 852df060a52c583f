"""What was computed for equal arguments is not computed again."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


_memories: list[dict] = []


def forget() -> None:
    """Compute everything again."""
    for memory in _memories:
        memory.clear()


def once(function: Callable[P, R]) -> Callable[P, R]:
    """The function, called once for arguments that read alike: for configs, which cannot be hashed."""
    found: dict[str, R] = {}
    _memories.append(found)

    @wraps(function)
    def remembered(*args: P.args, **kwargs: P.kwargs) -> R:
        key = repr((args, kwargs))
        if key not in found:
            found[key] = function(*args, **kwargs)
        return found[key]

    return remembered
