"""Tables of cases as text: a line a case, its cells between bars."""

import re
from collections.abc import Sequence

import pytest


def cells(text: str) -> list[list[str]]:
    """Return the cells of each line, divided by ` | `; a cell may be empty. Lines that begin with # are comments."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [[cell.strip() for cell in re.split(r" \|(?= )", f"{line} ")] for line in lines]


def cases(text: str) -> list:
    """Return pytest's parameters for lines `words | part | part`: the words, split, and the list of parts."""
    return [pytest.param(words.split(), parts, id=words) for words, *parts in cells(text)]


def table(text: str, columns: int | None = None) -> list:
    """Return pytest's parameters: the cells of a line, or those of the first columns and a list of the others."""
    rows = cells(text)
    if columns is None:
        return [pytest.param(*row, id=" ".join(row)[:80]) for row in rows]
    return [pytest.param(*row[:columns], row[columns:], id=" ".join(row[:columns])) for row in rows]


def missing(text: str, parts: Sequence[str]) -> list[str]:
    """Return the parts that a text of one line does not hold as often as they are given, each as a word of its own."""
    assert "\n" not in text, text
    counts = {part: len(re.findall(rf"(?<![\w.]){re.escape(part)}(?!\w)", text)) for part in parts}
    return [part for part, count in counts.items() if count < parts.count(part)]


def says(text: str, words: str) -> bool:
    """Return whether a text is one line and holds all of these words, parted by ` ... `, in any order."""
    return "\n" not in text.strip() and all(part.strip() in text for part in words.split(" ... "))
