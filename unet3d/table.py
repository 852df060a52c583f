"""A table of text, for the terminal, the report and files alike."""

from typing import NamedTuple

MIB = 2**20


class Table(NamedTuple):
    """Headings with their units, and rows of text."""

    columns: list[str]
    rows: list[list[str]]


def mib(size: float) -> str:
    """Bytes as MiB (2^20 bytes), to a tenth."""
    return f"{size / MIB:,.1f}"


def percent(part: float, whole: float) -> str:
    """A share, or a change if signed by the caller; "" of nothing."""
    return f"{part / whole:.1%}" if whole else ""
