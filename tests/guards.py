"""Guards taken out at run time: proof that a test can fail.

With `pytest -m without`, a test marked `@without(target, by)` runs again with the name `target` meaning `by`, and that
run must fail. The target is a public name of the package or of a library where the package uses it, such as
"unet3d.base.files.os.fsync". Trainings that the test starts by `training.train` run without the guard, too. Where a
guard has moved, or is imported in another way, the second run passes: name the new place. A test with a guard writes to
its own `tmp_path` alone, or its second run would fail for what the first one left.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import pytest


class Guard(NamedTuple):
    """A name and what it means while the guard is out; `by` is a function of a module, so that processes can get it."""

    target: str
    by: object
    only: str  # part of the ids of those parameters for which the guard matters

    @property
    def name(self) -> str:
        """Part of the id of the run without the guard."""
        return f"without {self.target.removeprefix('unet3d.')}"

    def take_out(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(self.target, self.by)


_out: list[Guard] = []


def without(target: str, by: object, only: str = "") -> pytest.MarkDecorator:
    """Mark a test to run again without a guard. `only`: with parameters whose id contains this, and no others."""
    return pytest.mark.without(Guard(target, by, only))


def are_out() -> Sequence[Guard]:
    """Return the guards that are out now."""
    return tuple(_out)


@contextmanager
def taken_out(guard: Guard) -> Iterator[None]:
    """Replace the guard's target within."""
    with pytest.MonkeyPatch.context() as patch:
        guard.take_out(patch)
        _out.append(guard)
        try:
            yield
        finally:
            _out.remove(guard)


def nothing(*_: object, **__: object) -> None:
    """Do nothing, in place of a function that guards by what it does or raises."""


def no(*_: object, **__: object) -> bool:
    """Return False, in place of a check."""
    return False


def yes(*_: object, **__: object) -> bool:
    """Return True, in place of a check."""
    return True


def none(*_: object, **__: object) -> dict[str, object]:
    """Return an empty dict, in place of a query."""
    return {}


def unchanged(value: object, *_: object, **__: object) -> object:
    """Return the first argument, in place of a function that cleans it."""
    return value
