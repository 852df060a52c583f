"""Files written whole or not at all: the only code of the package that replaces a file."""

import csv
import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any

from unet3d.errors import escaped

FORMULA = re.compile(r"'*(=|@|[+-](?!([\d.]+(e[+-]?\d+)?|inf|nan)$))", re.IGNORECASE)  # to a spreadsheet; -1e3 is none


@contextmanager
def replacing(path: Path, previous: Path | None = None) -> Iterator[IO[bytes]]:
    """A file that replaces `path` in one move at the end; on an error `path` stays as it was. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # content and names outlast a loss of power
        if previous is not None and path.exists():  # at each moment one of the two is whole
            os.replace(path, previous)
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Text in UTF-8."""
    with replacing(path) as file:
        file.write(text.encode())


def write_json(path: Path, values: Any) -> None:
    """Indented JSON."""
    write_text(path, json.dumps(values, indent=2) + "\n")


def write_csv(path: Path, head: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """The CSV file of `as_csv`."""
    write_text(path, as_csv(head, rows))


def as_csv(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """CSV in which no text commands a terminal or is a formula: such text begins with `'`. None is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(_cell, row) for row in chain([head], rows))
    return text.getvalue()


def _cell(value: Any) -> str:
    text = "" if value is None else escaped(value)
    return f"'{text}" if FORMULA.match(text) else text


def from_csv(text: str) -> list[dict[str, str]]:
    """The rows of `as_csv` by their headings, each cell as it was given."""
    return [{key: _given(cell) for key, cell in row.items()} for row in csv.DictReader(text.splitlines())]


def _given(cell: Any) -> Any:
    """Of a damaged file, a cell may be None or a list."""
    return cell[1:] if isinstance(cell, str) and cell.startswith("'") and FORMULA.match(cell) else cell
