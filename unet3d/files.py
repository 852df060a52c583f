"""Files written whole or not at all: the only code of the package that replaces a file."""

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any


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
    """A CSV file; None becomes an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(chain([head], rows))
    write_text(path, text.getvalue())
