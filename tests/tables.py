"""Tables of cases as text: a line a case, its cells between bars."""

import re
from collections.abc import Sequence

import pytest


def cases(text: str) -> list:
    """Return pytest's parameters for lines `words | part | part`: the words, split, and the list of parts.

    Lines that begin with # are comments.
    """
    lines = [line.split(" | ") for line in text.strip().splitlines() if not line.startswith("#")]
    return [pytest.param(words.split(), parts, id=words) for words, *parts in lines]


def missing(text: str, parts: Sequence[str]) -> list[str]:
    """Return the parts that a text of one line does not hold as often as they are given, each as a word of its own."""
    assert "\n" not in text, text
    counts = {part: len(re.findall(rf"(?<![\w.]){re.escape(part)}(?!\w)", text)) for part in parts}
    return [part for part, count in counts.items() if count < parts.count(part)]


def table(text: str) -> list:
    """Return pytest's parameters for lines of cells between bars, which name the case."""
    rows = [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]
    return [pytest.param(*cells, id=" ".join(cells)[:80]) for cells in rows]


def says(text: str, words: str) -> bool:
    """Return whether a text is one line and holds all of these words, parted by ` ... `, in any order."""
    return "\n" not in text.strip() and all(part.strip() in text for part in words.split(" ... "))
