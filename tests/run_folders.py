"""Run folders as a run of some words leaves them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from training import yaml_of

DONE = "done\nexit code 0\n"


def write_run(folder: Path, words: Sequence[str], scores: str = "", status: str = DONE, **files: Any) -> Path:
    """Write STATUS, overrides.yaml, config.yaml, scores.csv; others as `memory_json=...`; empty ones are left out."""
    folder.mkdir(parents=True)
    contents = {"STATUS": status, "overrides.yaml": json.dumps(words), "scores.csv": scores}
    contents |= {name.replace("_", "."): content for name, content in files.items()}
    if "config.yaml" not in contents:
        contents["config.yaml"] = config(words)
    for name, content in contents.items():
        if content:
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def config(words: Sequence[str]) -> str:
    """The config.yaml of a run of these words. Options are set in one that is composed once, which takes long."""
    if any(word.startswith(("data=", "experiment=")) for word in words):
        return yaml_of(*words)
    values = yaml.safe_load(yaml_of(*(word for word in words if word.startswith("model="))))
    for word in words:
        name, _, value = word.partition("=")
        *groups, last = name.split(".")
        if name != "model":
            part: Mapping[str, Any] = values
            for group in groups:
                part = part[group]
            part[last] = yaml.safe_load(value)  # type: ignore[index]
    return yaml.safe_dump(values)
