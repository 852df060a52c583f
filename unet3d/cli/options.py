"""Every option with its type, range, default and meaning, from the schema: for --help and docs/options.md."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from unet3d.config import compose, rules, schema

USAGE = """python train.py                                           train on phantoms, made once under data/
python train.py data=nnunet data.root=PATH amp=true       train on a data set of your own
python train.py resume=outputs/DATE/TIME-ID steps=300     go on with a run, here for longer

python train.py OPTION=VALUE ...    (installed: unet3d train OPTION=VALUE ...)

Several jobs: -m ckpt=0,2. What would run: --cfg job. A folder of your own YAML files: --config-dir FOLDER.
model=NAME, data=NAME, loss=NAME, optim=NAME and experiment=NAME choose files of configs/.
"""
TITLE = (
    "# Options\n\nWritten by `python -m unet3d options` from `unet3d/config/schema.py` and the default YAML files.\n"
)
Row = tuple[str, str, str, str, str]  # option, type, allowed values, default, meaning


def groups(node: Any, prefix: str = "") -> dict[str, list[Row]]:
    """Return the options by group, a row each, with the values of `node` as defaults."""
    title = f"{prefix.rstrip('.') or 'run'}: {type(node).__doc__}"
    rows: list[Row] = []
    tables = {title: rows}
    for item in fields(node):
        value = getattr(node, item.name)
        if is_dataclass(value):
            tables |= groups(value, f"{prefix}{item.name}.")
            continue
        facts = schema.FACTS[prefix + item.name]
        kind = facts.get("kind") or facts["type"].replace(" | None", " or null")
        rows.append((prefix + item.name, kind, _allowed(facts), plain(value), facts["about"]))
    return tables


def _allowed(metadata: Mapping[str, Any]) -> str:
    """Return which values an option may have; "" where its type is all."""
    parts = [*metadata["among"], rules.bounds(metadata)]
    if metadata["size"]:
        parts.append(f"{metadata['size']} items")
    return ", ".join(part for part in parts if part)


def plain(value: Any) -> str:
    """Return a value as a command line takes it."""
    if isinstance(value, list):
        return f"[{','.join(map(plain, value))}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_text() -> str:
    """Return what `python train.py --help` prints."""
    lines = [USAGE]
    for title, rows in groups(compose.compose([])).items():
        lines += ["", title]
        for name, kind, allowed, default, meaning in rows:
            values = f"{kind}; {allowed}" if allowed else kind
            lines.append(f"  {name}={default}  ({values})")
            lines.append(f"      {meaning}")
    return "\n".join(lines)


def as_markdown() -> str:
    """Return the content of docs/options.md: a table a group."""
    lines = [TITLE]
    for title, rows in groups(compose.compose([])).items():
        lines.append(f"\n## {title}\n")
        lines.append("| option | type | allowed | default | meaning |")
        lines.append("|---|---|---|---|---|")
        for row in rows:
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)
