"""Promises of the pages, marked on the tests that show them: python tests/promises.py [--write | WORDS]

`@promise("Resume", "the fault", "what happens")` on a test is a row under "Resume" in docs/faults.md. Other tests of
that row name its section and first words, `@promise("Resume", "the ...")`. `--write` puts the rows into the pages, in
the order that they have there, new ones last; without it, the pages that differ are printed. WORDS: the rows that have
them, each with its tests.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("SECURITY.md", "docs/faults.md", "docs/recompute.md")
MORE = " ..."  # ends the first words of a row that another test's mark has in full


class Mark(NamedTuple):
    """A promise as one test's decorator has it."""

    section: str
    cells: tuple[str, ...]
    test: str  # tests/file.py::name

    @property
    def row(self) -> str:
        """The line in a page: of a table, or of a list where a promise is one sentence."""
        return f"| {' | '.join(self.cells)} |" if len(self.cells) > 1 else f"- {self.cells[0]}"

    @property
    def is_whole(self) -> bool:
        return not self.cells[-1].endswith(MORE)


def promise(section: str, *cells: str) -> pytest.MarkDecorator:
    """Mark a test as one that shows a row of a page's section. Texts are literals: they are read without importing."""
    return pytest.mark.promise(section, *cells)


def marks() -> Iterator[Mark]:
    """Yield the promises of all tests."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            for call in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "promise":
                    section, *cells = map(ast.literal_eval, call.args)
                    yield Mark(section, tuple(cells), f"{path.relative_to(ROOT)}::{node.name}")


def rows() -> dict[tuple[str, str], list[str]]:
    """Return the tests of each row, by section and line. Raises ValueError for first words of no row or of several."""
    found: dict[tuple[str, str], list[str]] = {}
    given = sorted(marks(), key=lambda mark: not mark.is_whole)
    for mark in given:
        words = mark.cells[0].removesuffix(MORE)
        wholes = [whole for whole in given if whole.is_whole and whole.section == mark.section]
        begun = {whole.row for whole in wholes if whole.cells[0].startswith(words)}
        exact = {whole.row for whole in wholes if whole.cells[0] == words}
        if len(exact or begun) != 1:
            raise ValueError(f"{mark.test}: {len(exact or begun)} rows of {mark.section} begin with {words!r}")
        found.setdefault((mark.section, (exact or begun).pop()), []).append(mark.test)
    return found


def rewritten(text: str, promised: dict[tuple[str, str], list[str]]) -> str:
    """Return a page with the rows of its sections: those that it has first, in its order."""
    lines = text.splitlines()
    for section in dict.fromkeys(section for section, _ in promised):
        heads = [at for at, line in enumerate(lines) if line == f"## {section}" or line.startswith(f"For {section}")]
        if heads:
            wanted = [line for name, line in promised if name == section]
            first = next(at for at in range(heads[0], len(lines)) if _is_row(lines, at))
            last = next((at for at in range(first, len(lines)) if not lines[at]), len(lines))
            old = lines[first:last]
            kept = [line for line in old if line in wanted]
            lines[first:last] = [*kept, *(line for line in wanted if line not in old)]
    return "\n".join(lines) + "\n"


def _is_row(lines: list[str], at: int) -> bool:
    return lines[at].startswith("- ") or lines[at - 1].startswith("|---")


def outdated() -> list[str]:
    """Return the pages whose rows are not those of the tests."""
    promised = rows()
    texts = {page: (ROOT / page).read_text() for page in PAGES}
    return [page for page, text in texts.items() if rewritten(text, promised) != text]


def main() -> int:
    """Compare, write, or search. Returns 1 if a page is not up to date."""
    words = " ".join(sys.argv[1:])
    promised = rows()
    if words and words != "--write":
        for (section, line), tests in promised.items():
            if words.lower() in line.lower():
                print(f"{section}: {line}", *tests, sep="\n    ")
        return 0
    pages = outdated()
    for page in pages if words else ():
        (ROOT / page).write_text(rewritten((ROOT / page).read_text(), promised))
    for page in pages:
        print(f"{page}: {'written' if words else 'differs'}")
    return 1 if pages and not words else 0


if __name__ == "__main__":
    sys.exit(main())
