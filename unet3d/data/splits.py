"""The cases to train on and those to hold out: by a file, a fold or a share; a patient's cases stay together.

A file, or a part of their names, says which cases belong together.
"""

import csv
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.base.errors import UserError
from unet3d.config.schema import Data
from unet3d.data import nifti
from unet3d.data.cases import MAX_NAME, Case, DatasetInfo
from unet3d.data.texts import decoded, read_any_json, read_bytes, read_json, shown, shown_names

FOLD_SEED = 12345  # nnU-Net's, so that folds compare with published ones
NAMES_LISTED = 5  # case ids in a message
SPLIT = '{"train": [ids], "val": [ids]}'
TABLES = (".csv", ".tsv")  # endings of a table, which may have another
COLUMNS = ("case", "group")
PLAIN = re.compile(r"[\w./ -]+")  # what is rather a file's name than an expression
DELIMITERS = ",;\t"  # Spreadsheets use these, by their language.
BLANK = f"{DELIMITERS} "  # what a line without a cell is of
EXAMPLE = "a CSV file with the columns case,group, a JSON file {case: group}, or an expression such as '^[^_]+'"


def split(dataset: DatasetInfo, data: Data) -> tuple[tuple[Case, ...], tuple[Case, ...]]:
    """Return the labelled cases as (train, val): by data.split, else data.fold, else data.val_fraction.

    With data.groups, all cases of a group are in one part. Raises UserError.
    """
    labelled = {case.id: case for case in dataset.cases if case.label is not None}
    ids = sorted(labelled)
    if data.semi and ids:
        cases = tuple(labelled[case_id] for case_id in ids)
        return cases, cases  # Training and validation use different slices of them.
    if len(ids) < 2:
        same = "(or the same, without data.fold: data.semi=true data.sparse=[5,5,3])"
        raise UserError(f"{dataset.name}: {len(ids)} labelled cases; training and validation need one each {same}")
    groups = {case_id: case_id for case_id in ids}
    if data.groups is not None:
        groups = group_of_cases(ids, data.groups)
    if data.split is not None:
        parts = _parts_in_file(data.split, data)
        train, val = (_ids_of_part({*ids}, parts, name, data.split) for name in ("train", "val"))
        _refuse_torn(train, val, groups, data.split)
    else:
        held_out = _held_out_groups(groups, data)
        train = [case_id for case_id in ids if groups[case_id] not in held_out]
        val = [case_id for case_id in ids if groups[case_id] in held_out]
    return tuple(labelled[case_id] for case_id in train), tuple(labelled[case_id] for case_id in val)


def unused(dataset: DatasetInfo, data: Data, train: Sequence[Case], val: Sequence[Case]) -> Iterator[str]:
    """Yield a sentence on the cases that are in neither part of a split: without a label map, or left out by a file."""
    labelled = [case for case in dataset.cases if case.label is not None]
    count = len(dataset.cases)
    if len(labelled) < count:
        names = _some([case.id for case in dataset.cases if case.label is None])
        what = f"{count - len(labelled)} of {count} cases have no label map: not used ({names})"
        yield f"{dataset.name}: {what}; are the names of images and label maps equal?"
    if data.split is not None and data.fold is not None and isinstance(read_any_json(Path(data.split)), dict):
        yield f"data.fold={data.fold} does nothing beside data.split={data.split}, which holds one split"
    used = {case.id for case in (*train, *val)}
    left = [case.id for case in labelled if case.id not in used]
    if left:
        what = f"{len(left)} of {len(labelled)} labelled cases are in neither part: not used ({_some(left)})"
        yield f"{data.split}: {what}"


def _parts_in_file(where: str, data: Data) -> Mapping[str, Any]:
    """Return what a file holds, of a list of splits, as nnU-Net's splits_final.json, entry data.fold.

    Raises UserError.
    """
    if Path(where).suffix == ".pkl":
        raise UserError(f"data.split={where}: a pickle may run any code and is not read; write its list as JSON")
    content = read_any_json(Path(where))
    if isinstance(content, dict):
        return content
    if not isinstance(content, list) or not content:
        raise UserError(f"{where}: holds no split; write {SPLIT}, or a list of them")
    splits = f"{where}: holds a list of {len(content)} splits"
    if data.fold is None and len(content) > 1:
        raise UserError(f"{splits}; say which one by data.fold, from 0 to {len(content) - 1}")
    if len(content) != data.folds and len(content) > 1:
        raise UserError(f"{splits}, but data.folds={data.folds}; add data.folds={len(content)}")
    number = data.fold or 0
    parts = content[number] if number < len(content) else None
    if not isinstance(parts, dict):
        raise UserError(f"{where}: entry {number} of its list is {shown(parts)}; write {SPLIT}")
    return parts


def _held_out_groups(groups: Mapping[str, str], data: Data) -> Collection[str]:
    """Return the groups to hold out; without data.groups, each case is a group of its name. Raises UserError."""
    names = sorted(set(groups.values()))
    if len(names) < 2:
        what = f"all {len(groups)} labelled cases are of one group, {shown(names[0])}"
        raise UserError(f"data.groups={data.groups}: {what}; training and validation need one each")
    count = len(names)
    if data.fold is None:  # about data.val_fraction of all, evenly spread
        chosen = min(max(round(data.val_fraction * count), 1), count - 1)  # each part keeps at least one
        return {names[int((k + 0.5) * count / chosen)] for k in range(chosen)}
    if data.folds > count:
        kind = "labelled cases" if data.groups is None else "groups"
        raise UserError(f"data.folds={data.folds} is more than the {count} {kind}; use data.folds={count}")
    # scikit-learn's KFold(folds, shuffle=True, random_state=FOLD_SEED); this legacy generator never changes
    order = np.random.RandomState(FOLD_SEED).permutation(count)
    return {names[index] for index in np.array_split(order, data.folds)[data.fold]}


def _refuse_torn(train: Sequence[str], val: Sequence[str], groups: Mapping[str, str], where: str) -> None:
    """Raise UserError where the file `where` puts a case, or cases of one group, in both parts."""
    in_both = sorted({*train} & {*val})
    if in_both:
        raise UserError(f'{where}: {_some(in_both)} in both "train" and "val"; a case can only be in one of them')
    learned = {groups[case_id]: case_id for case_id in train}
    for case_id in val:
        group = groups[case_id]
        if group in learned:
            both = f'{_some([learned[group]])} in "train" and {_some([case_id])} in "val"'
            raise UserError(f"{where}: {both} are of one group, {shown(group)} (data.groups); put them in one part")


def _ids_of_part(ids: Collection[str], content: Mapping[str, Any], part: str, where: str) -> list[str]:
    """Return the ids that `content` lists under the name of a part, which may be files' names. Raises UserError."""
    names = content.get(part)
    if not isinstance(names, list) or not names:
        present = f"; it has {shown(list(content))}" if part not in content else ""
        raise UserError(f'{where}: "{part}" must list one case id or more: {SPLIT}{present}')
    meant = [known_id(name, ids) for name in names]
    unknown = [name for name, case_id in zip(names, meant, strict=True) if case_id is None]
    if unknown:
        problem = f"no labelled case here; remove or rename, ids are as {shown(min(ids))}"
        raise UserError(f'{where}: "{part}" names {_some(unknown)}: {problem}')
    found = [case_id for case_id in meant if case_id is not None]
    repeated = sorted(case_id for case_id, times in Counter(found).items() if times > 1)
    if repeated:
        raise UserError(f'{where}: "{part}" names {_some(repeated)} more than once; name each case once')
    return sorted(found)


def _some(names: Sequence[Any]) -> str:
    """Return the first names, and how many more there are."""
    words = [name if isinstance(name, str) and len(name) <= MAX_NAME else shown(name) for name in names[:NAMES_LISTED]]
    more = f" and {len(names) - NAMES_LISTED} more" if len(names) > NAMES_LISTED else ""
    return ", ".join(words) + more


def labels_by_class(dataset: DatasetInfo) -> dict[str, Sequence[int]]:
    """Return the label values of each class, or region, but the background."""
    names = dataset.classes[1:]
    if dataset.regions is None:
        return {name: (value,) for value, name in enumerate(names, start=1)}
    return dict(zip(names, dataset.regions.labels, strict=True))


def absences(
    dataset: DatasetInfo, data: Data, learned: Set[int], scored: Set[int], stored: Set[int] = frozenset()
) -> list[str]:
    """Return warnings of classes that no training case shows, with what to do. Raises UserError where none is shown.

    `learned` and `scored` are the labels of training and held-out cases on the network's grid, `stored` those of the
    training files, where they are known.
    """
    place = "training case" if data.sparse is None else "slice that is learned from"
    labels_of = labels_by_class(dataset)
    absent = {name: labels for name, labels in labels_of.items() if learned.isdisjoint(labels)}
    resampled = "" if data.spacing is None else f" at data.spacing={data.spacing}"
    if len(absent) == len(labels_of):
        problem = "there is nothing to learn, check the label maps"
        raise UserError(f"{dataset.name}: no foreground in any {place}{resampled}; {problem}")
    finer = "" if data.spacing is None else ", give a finer data.spacing"
    vanished = "all voxels are lost by resampling; give a finer data.spacing"
    held_out = "only in held-out ones; hold out others (data.split, data.fold)"
    nowhere = f"check the label maps{finer}, or leave the class out"
    by_remedy: dict[str, list[str]] = {vanished: [], held_out: [], nowhere: []}
    for name, labels in absent.items():
        is_vanished = resampled and not stored.isdisjoint(labels)
        by_remedy[vanished if is_vanished else nowhere if scored.isdisjoint(labels) else held_out].append(name)
    return [
        f"{dataset.name}: {shown_names(names)} in no {place}{resampled}, so not learned: {remedy}"
        for remedy, names in by_remedy.items()
        if names
    ]


def group_of_cases(ids: Sequence[str], option: str) -> dict[str, str]:
    """Return the group of each case by its id, as `option`, the value of data.groups, says. Raises UserError."""
    where = f"data.groups={option}"
    path = Path(option)
    ending = path.suffix.lower()
    if ending not in (*TABLES, ".json") and not path.is_file():
        return _matched(ids, option)
    listed = dict[str, str]()
    for name, group in read_json(path).items() if ending == ".json" else _rows(path, where):
        case_id = known_id(name, ids) or name
        if isinstance(group, bool) or not isinstance(group, str | int) or group == "":
            raise UserError(f"{where}: the group of {shown(case_id)} is {shown(group)}; give a name or a number")
        if listed.setdefault(case_id, str(group)) != str(group):  # a row for each channel's file says the same
            raise UserError(f"{where}: {shown(case_id)} is there twice, in two groups; name each case once")
    missing = [case_id for case_id in ids if case_id not in listed]
    if missing:
        others = [name for name in listed if name not in ids]
        found = f"; it names {_some(others)}" if others else ""
        raise UserError(f"{where}: has no group for {_some(missing)}; each labelled case needs one{found}")
    seen = dict[str, str]()
    for case_id in ids:  # groups may differ in capitals, in how an accent is stored, or as 1 and 1.0 do
        name = listed[case_id]
        folded = unicodedata.normalize("NFKC", name).casefold()
        other = seen.setdefault(re.sub(r"^(\d+)\.0+$", r"\1", folded), name)
        if other != name:
            raise UserError(f"{where}: {shown(other)} and {shown(name)} are two groups; write one name alike")
    return {case_id: listed[case_id] for case_id in ids}


def known_id(name: object, ids: Collection[str]) -> str | None:
    """Return the id of these that a file of the user's means by a name, a file's name or path, or a number."""
    if type(name) is int:  # Spreadsheets and scripts write 7 for "7".
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


def _rows(path: Path, where: str) -> Iterator[tuple[str, str]]:
    """Yield the case and the group of each row of a table, whose heads may be capitals. Raises UserError."""
    if not path.is_file():
        raise UserError(f"{where}: no such file; give {EXAMPLE}")
    lines = decoded(read_bytes(path), "replace").splitlines()
    lines = [line for line in lines if line.strip(BLANK) and not line.startswith("sep=")]  # a spreadsheet's
    head = lines[0] if lines else ""
    try:
        rows = list(csv.reader(lines, delimiter=max(DELIMITERS, key=head.count), skipinitialspace=True))
    except csv.Error as error:
        raise UserError(f"{where}: not readable as a table ({error}); repair it") from error
    heads = [cell.strip().lower() for row in rows[:1] for cell in row]
    absent = [column for column in COLUMNS if heads.count(column) != 1]
    if absent or len(rows) < 2:
        problem = f"has no column {' and no '.join(absent)}" if absent else "has no row below it"
        raise UserError(f"{where}: its first line, {shown(head)}, {problem}; give {EXAMPLE}")
    for row in rows[1:]:
        case_id, group = (row[place].strip() if place < len(row) else "" for place in map(heads.index, COLUMNS))
        yield case_id, group
