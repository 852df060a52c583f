"""Every option with its type, range, default and meaning, from the schema: for --help and docs/options.md."""

from dataclasses import fields, is_dataclass
from typing import Any

from unet3d.config import compose, rules

USAGE = """python train.py OPTION=VALUE ...    (installed: unet3d train OPTION=VALUE ...)

Several jobs: -m ckpt=0,2. What would run: --cfg job. A folder of your own YAML files: --config-dir FOLDER.
model=NAME, data=NAME, loss=NAME, optim=NAME and experiment=NAME choose files of configs/.
"""
TITLE = (
    "# Options\n\nWritten by `python -m unet3d options` from `unet3d/config/schema.py` and the default YAML files.\n"
)
Row = tuple[str, str, str, str, str]  # option, type, allowed values, default, meaning


def groups(node: Any, prefix: str = "") -> dict[str, list[Row]]:
    """A row an option, by group: its name and what it is about. Defaults are those of `node`."""
    found: dict[str, list[Row]] = {}
    own = found.setdefault(f"{prefix.rstrip('.') or 'run'}: {type(node).__doc__}", [])
    for item in fields(node):
        value, about = getattr(node, item.name), item.metadata
        if is_dataclass(value):
            found |= groups(value, f"{prefix}{item.name}.")
            continue
        kind = item.type.__name__ if isinstance(item.type, type) else str(item.type).removeprefix("typing.")
        size = f"{about['size']} items" if about["size"] else ""
        allowed = ", ".join(filter(None, (*about["among"], rules.bounds(about), size)))
        free = dict.fromkeys(("ckpt", "slab", "batch", "workers"), "int or auto") | {"label_map": "map or null"}
        kind = kind.replace("Any", free.get(item.name, "int, list or auto")).replace(" | None", " or null")
        own.append((prefix + item.name, kind, allowed, plain(value), about["about"]))
    return found


def plain(value: Any) -> str:
    """A value as a command line takes it."""
    if isinstance(value, list):
        return f"[{','.join(map(plain, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def as_text() -> str:
    """What `python train.py --help` prints."""
    lines = [USAGE]
    for title, rows in groups(compose.compose([])).items():
        lines += ["", title]
        for name, kind, allowed, default, meaning in rows:
            lines.append(f"  {name}={default}  ({kind}{'; ' * bool(allowed)}{allowed})\n      {meaning}")
    return "\n".join(lines)


def as_markdown() -> str:
    """The content of docs/options.md: a table a group."""
    lines = [TITLE]
    for title, rows in groups(compose.compose([])).items():
        lines += [f"\n## {title}\n", "| option | type | allowed | default | meaning |", "|---|---|---|---|---|"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)
