"""Cases that belong together, as scans of one patient: by a file, or by a part of their names."""

import csv
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from unet3d.base.errors import UserError
from unet3d.data import nifti
from unet3d.data.dataset_json import read_json, read_words, shown

TABLES = (".csv", ".tsv")  # endings of a table, which may have another
COLUMNS = ("case", "group")  # of a table
PLAIN = re.compile(r"[\w./ -]+")  # what is rather a file's name than an expression
DELIMITERS = ",;\t"  # of spreadsheets, by their language
EXAMPLE = "a CSV file with the columns case,group, a JSON file {case: group}, or an expression such as '^[^_]+'"


def group_of_cases(ids: Sequence[str], option: str) -> dict[str, str]:
    """Return the group of each case by its id, as `option`, the value of data.groups, says. Raises UserError."""
    path = Path(option)
    ending = path.suffix.lower()
    if ending == ".json":
        listed = _from_json(path, ids)
    elif ending in TABLES or _is_file(path):
        listed = _from_table(path, ids)
    else:
        return _matched(ids, option)
    missing = [case_id for case_id in ids if case_id not in listed]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        what = f"has no group for {shown(missing[0])}{more}; each labelled case needs one"
        others = [name for name in listed if name not in ids]
        found = f"; it names {shown(others[0])}" if others else ""
        raise UserError(f"data.groups={path}: {what}{found}")
    groups = {case_id: listed[case_id] for case_id in ids}
    _refuse_alike(path, groups.values())
    return groups


def _refuse_alike(path: Path, names: Iterable[str]) -> None:
    """Raise UserError for groups whose names differ in capitals, in how an accent is stored, or as 1 and 1.0 do."""
    seen = dict[str, str]()
    for name in names:
        folded = unicodedata.normalize("NFKC", name).casefold()
        plain = re.sub(r"^(\d+)\.0+$", r"\1", folded)
        other = seen.setdefault(plain, name)
        if other != name:
            raise UserError(
                f"data.groups={path}: {shown(other)} and {shown(name)} are two groups; write one name alike"
            )


def _is_file(path: Path) -> bool:
    """Return whether a file is there; an expression may be longer than any name."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def known_id(name: object, ids: Collection[str]) -> str | None:
    """Return the id of these that a file of the user's means by a name, a file's name or path, or a number."""
    if type(name) is int:  # as spreadsheets and scripts write 7 for "7"
        name = str(name)
    if not isinstance(name, str):
        return None
    if name in ids:
        return name
    stem = nifti.stem(Path(name.strip()))
    return next((short for short in (stem, stem.removesuffix("_0000")) if short in ids), None)


def _matched(ids: Sequence[str], expression: str) -> dict[str, str]:
    """Return what a regular expression finds in each name: its first group, or all that matched without one.

    Raises UserError.
    """
    is_name = PLAIN.fullmatch(expression) is not None and ("." in expression or "/" in expression)
    start = f"data.groups={expression}: " + ("no such file, and as a regular expression " if is_name else "")
    try:
        pattern = re.compile(expression)
    except re.error as error:
        raise UserError(f"{start}cannot be read ({error}); give {EXAMPLE}") from error
    groups = {}
    for case_id in ids:
        match = pattern.search(case_id)
        text = match[1 if pattern.groups else 0] if match else None
        if not text:
            raise UserError(f"{start}finds nothing in the name {shown(case_id)}; give {EXAMPLE}")
        groups[case_id] = text
    return groups


def _from_json(path: Path, ids: Collection[str]) -> dict[str, str]:
    """Return the group of each case that a JSON file lists. Raises UserError."""
    return _by_id(path, ids, read_json(path).items())


def _from_table(path: Path, ids: Collection[str]) -> dict[str, str]:
    """Return the group of each case that a table lists, whose heads may be capitals. Raises UserError."""
    if not path.is_file():
        raise UserError(f"data.groups={path}: no such file; give {EXAMPLE}")
    lines = [line for line in read_words(path).splitlines() if not line.startswith("sep=")]  # a spreadsheet's
    head = next((line for line in lines if line.strip()), "")
    delimiter = max(DELIMITERS, key=head.count)
    try:
        rows = list(csv.reader(lines, delimiter=delimiter, skipinitialspace=True))
    except csv.Error as error:
        raise UserError(f"data.groups={path}: not readable as a table ({error}); repair it") from error
    cells = [[cell.strip() for cell in row] for row in rows if any(cell.strip() for cell in row)]
    heads = [cell.lower() for cell in cells[0]] if cells else []
    absent = [column for column in COLUMNS if heads.count(column) != 1]
    if absent or len(cells) < 2:
        problem = f"has no column {' and no '.join(absent)}" if absent else "has no row below it"
        raise UserError(f"data.groups={path}: its first line, {shown(head)}, {problem}; give {EXAMPLE}")
    places = [heads.index(column) for column in COLUMNS]
    pairs = list[tuple[str, str]]()
    for row in cells[1:]:
        case_id, group = (row[place] if place < len(row) else "" for place in places)
        pairs.append((case_id, group))
    return _by_id(path, ids, pairs)


def _by_id(path: Path, ids: Collection[str], pairs: Iterable[tuple[str, object]]) -> dict[str, str]:
    """Return the groups of cases by their ids, where a file names them so, and by its words for others.

    Raises UserError.
    """
    groups: dict[str, str] = {}
    for name, group in pairs:
        case_id = known_id(name, ids) or name
        named = _checked(path, case_id, group)
        if groups.setdefault(case_id, named) != named:  # a row for each channel's file says the same
            raise UserError(f"data.groups={path}: {shown(case_id)} is there twice, in two groups; name each case once")
    return groups


def _checked(path: Path, case_id: str, group: object) -> str:
    """Return the name of a group, which may be a number. Raises UserError for anything else."""
    if isinstance(group, bool) or not isinstance(group, (str, int)) or group == "":
        raise UserError(f"data.groups={path}: the group of {shown(case_id)} is {shown(group)}; give a name or a number")
    return str(group)
