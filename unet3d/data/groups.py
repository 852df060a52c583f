"""Cases that belong together, as scans of one patient: by a file, or by a part of their names."""

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from unet3d.base.errors import UserError
from unet3d.base.files import LARGEST_TABLE, read_text
from unet3d.data.dataset_json import read_json, shown

FILES = (".csv", ".json")  # endings of a file; all else is a regular expression
COLUMNS = ("case", "group")  # of a CSV file
BOM = "\ufeff"  # of spreadsheets
EXAMPLE = "a CSV file with the columns case,group, a JSON file {case: group}, or an expression such as '^[^_]+'"


def group_of_cases(ids: Sequence[str], option: str) -> dict[str, str]:
    """Return the group of each case by its id, as `option`, the value of data.groups, says. Raises UserError."""
    path = Path(option)
    if path.suffix not in FILES:
        return _matched(ids, option)
    listed = _from_csv(path) if path.suffix == ".csv" else _from_json(path)
    missing = [case_id for case_id in ids if case_id not in listed]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"data.groups={path}: has no group for {shown(missing[0])}{more}; each labelled case needs one")
    return {case_id: listed[case_id] for case_id in ids}


def _matched(ids: Sequence[str], expression: str) -> dict[str, str]:
    """Return what a regular expression finds in each name: its first group, or all that matched without one.

    Raises UserError.
    """
    try:
        pattern = re.compile(expression)
    except re.error as error:
        raise UserError(f"data.groups={expression}: no regular expression ({error}); give {EXAMPLE}") from error
    groups = {}
    for case_id in ids:
        match = pattern.search(case_id)
        text = match[1 if pattern.groups else 0] if match else None
        if not text:
            raise UserError(f"data.groups={expression}: finds nothing in the name {shown(case_id)}; give {EXAMPLE}")
        groups[case_id] = text
    return groups


def _from_json(path: Path) -> dict[str, str]:
    """Return the group of each case that a JSON file lists. Raises UserError."""
    content = read_json(path)
    return {case_id: _checked(path, case_id, group) for case_id, group in content.items()}


def _from_csv(path: Path) -> dict[str, str]:
    """Return the group of each case that a CSV file lists. Raises UserError."""
    if not path.is_file():
        raise UserError(f"data.groups={path}: no such file; give {EXAMPLE}")
    try:
        rows = list(csv.DictReader(read_text(path, LARGEST_TABLE).removeprefix(BOM).splitlines()))
    except csv.Error as error:
        raise UserError(f"data.groups={path}: not readable as CSV ({error}); repair it") from error
    if not rows or not _has_columns(rows[0]):
        raise UserError(f"data.groups={path}: its first line is not case,group, or no other follows; give {EXAMPLE}")
    groups: dict[str, str] = {}
    for row in rows:
        case_id, group = (row[column] for column in COLUMNS)
        if case_id in groups:
            raise UserError(f"data.groups={path}: {shown(case_id)} is there twice; name each case once")
        groups[case_id] = _checked(path, case_id, group)
    return groups


def _has_columns(row: Mapping[str, str]) -> bool:
    return all(column in row for column in COLUMNS)


def _checked(path: Path, case_id: str, group: object) -> str:
    """Return the name of a group, which may be a number. Raises UserError for anything else."""
    if isinstance(group, bool) or not isinstance(group, (str, int)) or group == "":
        raise UserError(f"data.groups={path}: the group of {shown(case_id)} is {shown(group)}; give a name or a number")
    return str(group)
