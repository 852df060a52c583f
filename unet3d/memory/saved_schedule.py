"""The schedule of a run, as memory.json has it."""

from collections.abc import Sequence
from typing import NamedTuple


class SavedSchedule(NamedTuple):
    """A schedule as memory.json has it, for a resumed run."""

    recompute: str
    budget: str | None
    keep: Sequence[str]  # for each stage the maps that stay after it, as bits of a hexadecimal number
    windows: bool = False  # validation follows a program, too
