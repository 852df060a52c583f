"""The tests that a page of the project names, row by row."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def named_tests(page: str) -> list[str]:
    """Ids, `tests/file.py::name`, in the order of the page."""
    return re.findall(r"`(tests/[\w/]+\.py::\w+)`", (ROOT / page).read_text())


def missing_tests(page: str) -> list[str]:
    """Return the tests that the page names and that do not exist."""
    return [test for test in named_tests(page) if not _exists(*test.split("::"))]


def check_named_tests(page: str) -> None:
    """Every test that the page names exists, and every row of its tables names one."""
    assert not missing_tests(page)
    lines = (ROOT / page).read_text().splitlines()
    heads = {number - 1 for number, line in enumerate(lines) if line.startswith("|---")}
    rows = [line for number, line in enumerate(lines) if line.startswith("| ") and number not in heads]
    assert [row for row in rows if "::" not in row] == [], "a row without a test"


def _exists(path: str, name: str) -> bool:
    return f"def {name}(" in (ROOT / path).read_text()
