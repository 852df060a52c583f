"""Files written whole or not at all, and read within bounds: the only code of the package that replaces a file."""

import csv
import errno
import fcntl
import functools
import io
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, TextIO

import yaml  # type: ignore[import-untyped]

from unet3d.base.errors import UserError, escaped

NIFTI_ENDINGS = (".nii.gz", ".nii")
# Of other formats that hold volumes; compressed NIfTI of other kinds are among them.
OTHER_ENDINGS = re.compile(
    r"(\.(nrrd|nhdr|seg|mha|mhd|hdr|img|mgh|mgz|mnc|dcm|ima|dicom|par|rec|vtk|vti|tiff?|h5|hdf5|npy|npz|zarr|b2nd)"
    r"|\.nii\.(bz2|xz|zst|zip|z)|\.(hdr|img|nrrd|mha)\.gz)\Z",
    re.IGNORECASE | re.ASCII,
)
LARGEST_TEXT = 2**28  # bytes: the records of a million steps
LARGEST_YAML = 2**16  # bytes: thirty configs, read in half a second
LARGEST_TABLE = 2**24  # bytes
MOST_ROWS = 100_000  # ten thousand cases of fifty classes, or more of fewer
DEEPEST_YAML = 20  # levels
TAGGED = (ValueError, LookupError, AttributeError, TypeError, OverflowError)  # raised for `!!bool x` and others
PLAIN = (str, int, float, list, dict, type(None))
DEEPEST_FOLDER = 50  # levels; os.walk of Python 3.11 is recursive
TEMPORARY = f".unet3d-{'[0-9a-f]' * 16}.tmp"  # pattern of the names of what is not yet in its place
# To a spreadsheet; -1e3 is none. Letters of full width count as their narrow ones where East Asian is spoken.
FORMULA = re.compile(r"'*([=@＝＠＋－]|[+-](?!([\d.]+(e[+-]?\d+)?|inf|nan)$))", re.IGNORECASE)  # noqa: RUF001


@contextmanager
def replacing(path: Path, previous: Path | None = None) -> Iterator[IO[bytes]]:
    """Open a file that replaces `path` in one move at the end; on an error `path` stays as it was. Raises OSError."""
    remove_abandoned(path.parent.absolute())
    temporary = None
    try:
        temporary, held = _made(path.parent)
        with held as file:  # The lock is held until the file is in its place.
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
    except BaseException as error:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)  # a write names no file, a move the temporary one
            error.filename2 = None
        raise


def _made(folder: Path) -> tuple[Path, IO[bytes]]:
    """Return a new file under a temporary name that nobody has (process numbers repeat on other hosts), and held."""
    while True:
        temporary = folder / f".unet3d-{secrets.token_hex(8)}.tmp"
        file = open(temporary, "x+b")  # noqa: SIM115 (no file or link that is there)
        # Not every disk supports locks. That of lockf would end as soon as any map of the file is closed.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:  # A file without links was removed before it was held.
            return temporary, file
        file.close()


@functools.cache
def remove_abandoned(folder: Path) -> None:
    """Remove, once in a process, the temporary files in `folder` that no living process holds.

    Killed processes have left them, and they may be as large as what was written. What cannot be locked or written to
    stays, and so do links.
    """
    with suppress(OSError):
        for path in folder.glob(TEMPORARY):
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK  # some disks lock only what is written to
            with suppress(OSError), open(os.open(path, flags), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    path.unlink()


def open_regular(path: Path, follow: bool = True) -> io.BufferedReader:
    """Open a file to read it. Raises OSError, and ValueError for what is no regular file: a pipe would be waited for.

    Without `follow`, a link is none.
    """
    no_link = 0 if follow else os.O_NOFOLLOW
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | no_link)
    except OSError as error:
        if no_link and error.errno == errno.ELOOP:
            raise ValueError(f"{path} is a link") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is not a file")
    return open(descriptor, "rb")


def from_here(path: Path) -> Path:
    """Return a path relative to the current folder, where that holds it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def write_text(path: Path, text: str) -> None:
    """Write text in UTF-8."""
    with replacing(path) as file:
        file.write(text.encode(errors="backslashreplace"))  # JSON may hold half of a surrogate pair


def write_json(path: Path, values: Any) -> None:
    """Write indented JSON."""
    write_text(path, json.dumps(values, indent=2) + "\n")


def write_csv(path: Path, head: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write the CSV of `as_csv` to a file, row by row."""
    with replacing(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="")
        _write_rows(text, head, rows)
        text.detach()  # writes what it holds


def as_csv(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return CSV in which no text commands a terminal or is a formula: such text begins with `'`.

    None is an empty cell.
    """
    text = io.StringIO()
    _write_rows(text, head, rows)
    return text.getvalue()


def _write_rows(text: TextIO, head: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    writer = csv.writer(text, lineterminator="\n")
    for row in chain([head], rows):
        writer.writerow(map(_cell, row))


def _cell(value: Any) -> str:
    """Return a value as text that no spreadsheet takes for a formula."""
    text = "" if value is None else escaped(value)
    return f"'{text}" if FORMULA.match(text) else text


def from_csv(lines: Iterable[str]) -> list[dict[str, str]]:
    """Return the rows of `as_csv` by their headings, each cell as it was given; [] if the text is damaged."""
    try:
        rows = csv.reader(lines)
        head = next(rows, [])
        return [dict(zip(head, map(_without_guard, row), strict=False)) for row in rows if row]
    except csv.Error:  # a cell of more than 128 KiB
        return []


def _without_guard(cell: str) -> str:
    """Return the text of which `_cell` made this one."""
    is_guarded = cell.startswith("'") and FORMULA.match(cell)
    return cell[1:] if is_guarded else cell


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows of `write_csv` by their headings; [] where the file is missing or damaged. Raises UserError.

    Each row takes a few hundred bytes, however short it is in the file: there may be at most `MOST_ROWS`.
    """
    lines = (line.decode(errors="replace") for line in read_lines(path, LARGEST_TABLE))
    rows = from_csv(islice(lines, MOST_ROWS + 2))
    if len(rows) > MOST_ROWS:
        raise UserError(f"{path}: has more than {MOST_ROWS:,} rows; shorten or remove it")
    return rows


def read_text(path: Path, most: int = LARGEST_TEXT) -> str:
    """Return the text of a file, "" where it is missing; bytes that are not UTF-8 are replaced. Raises UserError.

    It must be a regular file (a pipe would be waited for) of at most `most` bytes.
    """
    with _opened(path, most) as file:
        return file.read().decode(errors="replace")


def read_lines(path: Path, most: int = LARGEST_TEXT) -> Iterator[bytes]:
    """Yield the lines of a file, which `read_text` would read at once. Raises UserError."""
    with _opened(path, most) as file:
        yield from file


def _opened(path: Path, most: int) -> IO[bytes]:
    """Open a regular file of at most `most` bytes; an empty one where it is missing. Raises UserError."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return io.BytesIO()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{path}: is not a file; remove it") from error
    size = os.fstat(file.fileno()).st_size
    if size > most:
        file.close()
        raise UserError(f"{path}: has {size:,} bytes; at most {most:,} are read; shorten or remove it")
    return file


def read_yaml(path: Path) -> Any:
    """Return the plain values of a YAML file, None where it is empty or missing. Raises UserError."""
    return read_yaml_as_written(path)[0]


def read_yaml_as_written(path: Path) -> tuple[Any, Any]:
    """Return the same, and a second time with each scalar as the text that stands there. Raises UserError.

    Aliases are refused: with them a small file describes values without end.
    """
    text = read_text(path, LARGEST_YAML)
    depth = 0
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if isinstance(event, yaml.AliasEvent) or depth > DEEPEST_YAML:
                raise ValueError(f"it has an alias, or more than {DEEPEST_YAML} levels")
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None, None
        written = yaml.BaseLoader("").construct_document(node)  # first: the other puts in what merge keys name
        values = loader.construct_document(node)
        _refuse_odd_values(values)
        return values, written
    except (*TAGGED, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())})") from error


def _refuse_odd_values(value: Any) -> None:
    """Raise ValueError for anything but texts, numbers, lists, mappings and None, at any depth."""
    is_long = isinstance(value, int) and value.bit_length() > 64
    if is_long or not isinstance(value, PLAIN):
        raise ValueError("only numbers, texts, lists and mappings are allowed; quote a date")
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    for part in value if isinstance(value, list) else ():
        _refuse_odd_values(part)


def refuse_links_out(folder: Path) -> None:
    """Raise UserError for a link in the folder, at any depth, that leads out of it."""
    top = os.path.realpath(folder)
    for place, folders, names in os.walk(top):
        if place.removeprefix(top).count(os.sep) > DEEPEST_FOLDER:
            raise UserError(f"{folder}: has folders in more than {DEEPEST_FOLDER} levels; remove them")
        for name in (*folders, *names):
            path = os.path.join(place, name)
            if not os.path.islink(path):
                continue
            if os.path.commonpath((top, os.path.realpath(path))) != top:
                problem = "is a link out of the folder; nothing is read or written through it: remove it"
                raise UserError(f"{folder / os.path.relpath(path, top)}: {problem}")
