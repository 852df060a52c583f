"""What a run rests on besides its config: the data it was given, and the arithmetic of its device."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from unet3d.build import Data
from unet3d.errors import UserError

Grounds = dict[str, Any]
SHOWN = 3  # items of a long list


def grounds(data: Data, dtype: torch.dtype | None) -> Grounds:
    """As plain values, for the snapshot; `dtype` is that of mixed precision, None without it."""
    return {
        "classes": list(data.task.classes),
        "channels": list(data.task.channels),
        "intensity": [dataclasses.asdict(rule) for rule in data.read.intensity],
        "training cases": [case.id for case in data.train],
        "held-out cases": [case.id for case in data.val],
        "mixed precision": str(dtype),
    }


def refuse_others(before: Mapping[str, Any], now: Grounds) -> None:
    """Raise UserError where a run that goes on would rest on something else than what it began with."""
    other = [name for name in now if before[name] != now[name]]
    if other:
        told = "; ".join(f"{name}: {_shown(before[name])} -> {_shown(now[name])}" for name in other)
        raise UserError(f"resume: a run goes on with the data and the arithmetic that it began with, not {told}")


def _shown(value: Any) -> str:
    if not isinstance(value, list) or len(value) <= SHOWN:
        return str(value)
    return f"{len(value)} ({', '.join(map(str, value[:SHOWN]))} ...)"
