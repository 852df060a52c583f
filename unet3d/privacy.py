"""What a private run must not tell: the machine, its user, and the paths on it, which often name patients.

Plain data and dictionaries, for the sinks that record elsewhere.
"""

import os
from collections.abc import Mapping
from typing import Any

PATHS = frozenset({"data.root", "data.images", "data.labels", "data.split", "resume"})
SETTINGS = {  # wandb.Settings
    "host": "",  # None would be filled in
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "disable_job_creation": True,
    "save_code": False,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


def without_paths(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`values` without the options that are paths and without whatever looks like one, at any depth."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            kept[name] = without_paths(value, f"{prefix}{name}.")
        elif f"{prefix}{name}" not in PATHS and not is_path(value):
            kept[name] = value
    return kept


def is_path(value: object) -> bool:
    """Whether a value is, or looks like, a path, or is a list with one."""
    if isinstance(value, list | tuple):
        return any(is_path(item) for item in value)
    return isinstance(value, os.PathLike) or (isinstance(value, str) and ("/" in value or "\\" in value))
