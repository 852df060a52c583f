"""Fingerprint of a run: its cases, hashes of their files, and the precision. A resumed run must have the same."""

import dataclasses
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from unet3d.base.errors import UserError, warn
from unet3d.data.prepare import PreparedData

DatasetFingerprint = dict[str, Any]


def fingerprint(data: PreparedData, dtype: torch.dtype | None) -> DatasetFingerprint:
    """Return the run's fingerprint as plain values; `dtype` is the type of mixed precision, None without it."""
    values = {
        "classes": list(data.dataset.classes),
        "channels": list(data.dataset.channels),
        "intensity": [dataclasses.asdict(rule) for rule in data.read.intensity],
        "training cases": [case.id for case in data.train],
        "held-out cases": [case.id for case in data.val],
        "mixed precision": str(dtype),
        "files": data.files,
    }
    if data.dataset.regions is not None:
        values["regions"] = [list(labels) for labels in (*data.dataset.regions.labels, data.dataset.regions.drawn)]
    return values


def refuse_other_data(before: Mapping[str, Any], now: DatasetFingerprint) -> None:
    """Raise UserError if the data or the precision has changed since the run began."""
    _refuse_other_files(before["files"], now["files"])  # first, as the scale of CT follows from labels
    changes = []
    for name in now:
        if name != "files" and before.get(name) != now[name]:
            changes.append(f"{name}: {_short(before.get(name))} -> {_short(now[name])}")
    if changes:
        raise UserError(f"resume: the data or the precision changed since the run began: {'; '.join(changes)}")


def _refuse_other_files(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UserError if files of the cases have changed; warn where only a sample of them could be compared."""
    differing = []
    sampled: dict[str, None] = {}  # cases, in order
    for kind in ("images", "labels"):
        changed = []
        for name in sorted(before.keys() & now.keys()):
            then = before[name][kind]
            today = now[name][kind]
            extent = "full" if then["full"] and today["full"] else "sample"
            if then[extent] != today[extent]:
                changed.append(name)
            elif extent == "sample" and then["times"] != today["times"]:
                sampled[name] = None
        if changed:
            differing.append(f"{kind} of {_listed(changed)}")
    if differing:
        remedy = "put the old files back, or start a new run"
        raise UserError(f"resume: {', '.join(differing)} changed since the run began; {remedy}")
    if sampled:
        problem = "times changed, and a sample of the bytes is the same; a run with data.fingerprint=full compares all"
        warn(f"resume: files of {_listed(sampled)}: {problem}")


def _listed(names: Iterable[str]) -> str:
    return _short(", ".join(names))


def _short(value: object) -> str:
    return textwrap.shorten(str(value), width=200, placeholder=" ...")
