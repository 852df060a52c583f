"""Which ids train and which are held out: listed in a file, one fold of a cross-validation, or a share.

Arithmetic on sorted ids alone, so that the same ids and options give the same split anywhere, whatever the run's seed.
Every function returns (train, val), both sorted and disjoint.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unet3d.errors import UserError

Split = tuple[list[str], list[str]]

FOLD_SEED = 12345  # nnU-Net's, so that folds compare with published ones


def fraction(ids: Sequence[str], share: float) -> Split:
    """Hold out about `share` of the ids, evenly spread over them; each part gets at least one."""
    count = min(max(round(share * len(ids)), 1), len(ids) - 1)
    held_out = [int((k + 0.5) * len(ids) / count) for k in range(count)]
    return _part(ids, held_out)


def fold(ids: Sequence[str], folds: int, index: int) -> Split:
    """Hold out one fold: scikit-learn's KFold(folds, shuffle=True, random_state=12345), without scikit-learn.

    Raises UserError for more folds than ids.
    """
    if folds > len(ids):
        raise UserError(f"data.folds={folds} is more than the {len(ids)} labelled cases; use data.folds={len(ids)}")
    order = np.arange(len(ids))
    np.random.RandomState(FOLD_SEED).shuffle(order)  # the legacy generator is frozen: the same folds for ever
    return _part(ids, np.array_split(order, folds)[index].tolist())


def listed(ids: Sequence[str], content: Mapping[str, Any], where: str) -> Split:
    """The parts that `content`, read from `where`, lists as {"train": [ids], "val": [ids]}.

    Raises UserError for a missing or empty part, an id that is no labelled case, or one that occurs twice.
    """
    train, val = (_listed_part(ids, content, part, where) for part in ("train", "val"))
    both = sorted({*train} & {*val})
    if both:
        raise UserError(f'{where}: {_some(both)} in both "train" and "val"; a case can only be in one of them')
    return train, val


def _listed_part(ids: Sequence[str], content: Mapping[str, Any], part: str, where: str) -> list[str]:
    names = content.get(part)
    if not isinstance(names, list) or not names:
        raise UserError(f'{where}: "{part}" must list one case id or more: {{"train": [ids], "val": [ids]}}')
    unknown = [str(name) for name in names if name not in ids]
    if unknown:
        raise UserError(
            f'{where}: "{part}" names {_some(unknown)}: no labelled case of this data set; remove or rename'
        )
    if len({*names}) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise UserError(f'{where}: "{part}" names {_some(twice)} more than once; name each case once')
    return sorted(names)


def _part(ids: Sequence[str], held_out: Sequence[int]) -> Split:
    chosen = {*held_out}
    train = [name for index, name in enumerate(ids) if index not in chosen]
    return train, [ids[index] for index in sorted(chosen)]


def _some(names: Sequence[str], most: int = 5) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
