"""The cases to train on and those to hold out: by a file, a fold or a share; a patient's cases stay together."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.base.errors import UserError
from unet3d.config.schema import Data
from unet3d.data.cases import Case, DatasetInfo
from unet3d.data.dataset_json import read_json, shown
from unet3d.data.file_names import MAX_NAME
from unet3d.data.groups import group_of_cases

FOLD_SEED = 12345  # nnU-Net's, so that folds compare with published ones
NAMES_LISTED = 5  # case ids in a message


def split(dataset: DatasetInfo, data: Data) -> tuple[tuple[Case, ...], tuple[Case, ...]]:
    """Return the labelled cases as (train, val): by data.split, else data.fold, else data.val_fraction.

    With data.groups, all cases of a group are in one part. Raises UserError.
    """
    labelled = {case.id: case for case in dataset.cases if case.label is not None}
    ids = sorted(labelled)
    if data.semi and ids:
        cases = tuple(labelled[case_id] for case_id in ids)
        return cases, cases  # of which different slices are used
    if len(ids) < 2:
        same = "(or the same, without data.fold: data.semi=true data.sparse=[5,5,3])"
        raise UserError(f"{dataset.name}: {len(ids)} labelled cases; training and validation need one each {same}")
    groups = {case_id: case_id for case_id in ids}
    if data.groups is not None:
        groups = group_of_cases(ids, data.groups)
    if data.split is not None:
        train, val = _listed(ids, read_json(Path(data.split)), data.split)
        _refuse_torn_groups(train, val, groups, data.split)
    else:
        held_out = _held_out_groups(groups, data)
        train = [case_id for case_id in ids if groups[case_id] not in held_out]
        val = [case_id for case_id in ids if groups[case_id] in held_out]
    return tuple(labelled[case_id] for case_id in train), tuple(labelled[case_id] for case_id in val)


def _held_out_groups(groups: Mapping[str, str], data: Data) -> Collection[str]:
    """Return the groups to hold out; without data.groups, each case is a group of its name. Raises UserError."""
    names = sorted(set(groups.values()))
    if len(names) < 2:
        what = f"all {len(groups)} labelled cases are of one group, {shown(names[0])}"
        raise UserError(f"data.groups={data.groups}: {what}; training and validation need one each")
    kind = "labelled cases" if data.groups is None else "groups"
    return {names[index] for index in _held_out(len(names), data, kind)}


def _held_out(count: int, data: Data, kind: str) -> set[int]:
    """Return the indices of one fold, or of about data.val_fraction of all, evenly spread. Raises UserError.

    There are `count` labelled cases, or groups of them, as `kind` says.
    """
    if data.fold is None:
        chosen = min(max(round(data.val_fraction * count), 1), count - 1)  # each part keeps at least one
        return {int((k + 0.5) * count / chosen) for k in range(chosen)}
    if data.folds > count:
        raise UserError(f"data.folds={data.folds} is more than the {count} {kind}; use data.folds={count}")
    # scikit-learn's KFold(folds, shuffle=True, random_state=FOLD_SEED); this legacy generator never changes
    order = np.random.RandomState(FOLD_SEED).permutation(count)
    return {*np.array_split(order, data.folds)[data.fold].tolist()}


def _refuse_torn_groups(train: Sequence[str], val: Sequence[str], groups: Mapping[str, str], where: str) -> None:
    """Raise UserError where the file `where` puts cases of one group in both parts."""
    learned = {groups[case_id]: case_id for case_id in train}
    for case_id in val:
        group = groups[case_id]
        if group in learned:
            both = f'{_some([learned[group]])} in "train" and {_some([case_id])} in "val"'
            raise UserError(f"{where}: {both} are of one group, {shown(group)} (data.groups); put them in one part")


def _listed(ids: Sequence[str], content: Mapping[str, Any], where: str) -> tuple[list[str], list[str]]:
    """Return the parts that `content`, read from `where`, lists as {"train": [ids], "val": [ids]}. Raises UserError."""
    known = {*ids}
    for part in ("train", "val"):
        names = content.get(part)
        if not isinstance(names, list) or not names:
            raise UserError(f'{where}: "{part}" must list one case id or more: {{"train": [ids], "val": [ids]}}')
        unknown = [name for name in names if not isinstance(name, str) or name not in known]
        if unknown:
            raise UserError(f'{where}: "{part}" names {_some(unknown)}: no labelled case here; remove or rename')
        repeated = sorted(name for name, times in Counter(names).items() if times > 1)
        if repeated:
            raise UserError(f'{where}: "{part}" names {_some(repeated)} more than once; name each case once')
    in_both = sorted({*content["train"]} & {*content["val"]})
    if in_both:
        raise UserError(f'{where}: {_some(in_both)} in both "train" and "val"; a case can only be in one of them')
    return sorted(content["train"]), sorted(content["val"])


def _some(names: Sequence[Any]) -> str:
    """Return the first names, and how many more there are."""
    words = list[str]()
    for name in names[:NAMES_LISTED]:
        is_short = isinstance(name, str) and len(name) <= MAX_NAME
        words.append(name if is_short else shown(name))
    more = f" and {len(names) - NAMES_LISTED} more" if len(names) > NAMES_LISTED else ""
    return ", ".join(words) + more
