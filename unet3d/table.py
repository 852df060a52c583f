"""A table of text, for the terminal, the report and files alike."""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

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


def write_csv(path: Path, head: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write cells as they are; None is an empty one."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(head)
        writer.writerows(rows)
