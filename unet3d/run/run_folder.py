"""The files of a run folder as its run writes them, and which of their values are trusted. No torch.

STATUS, init.json, metrics.jsonl; env.json, which names neither the machine nor its user; and memory.json, the predicted
and the measured step: a run reads it once and writes it whole. `unet3d memory -o` and `explained.write_page` write one
without a run. Anybody may have written what is read here.
"""

import json
import math
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from importlib import metadata
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from unet3d.base.errors import UserError, escaped
from unet3d.base.files import read_lines, read_text, write_json, write_text
from unet3d.config.schema import Config
from unet3d.memory.tables import NAMES, folded

if TYPE_CHECKING:
    import torch

Values = Mapping[str, Any]  # a record of metrics.jsonl, or an entry of memory.json
LARGEST_NUMBER = 2**53  # more bytes are not exact in a picture
MOST_ITEMS = 500  # Bound of a list or a text in memory.json.
MAX_MEMORY_BYTES = 2**23  # Bound of the file.
# Versions that env.json holds.
PACKAGES = ("unet3d", "torch", "monai", "hydra-core", "nibabel", "numpy", "scipy", "wandb")
SOURCE = Path(__file__).resolve().parents[2]  # The checkout of a package that is not installed.
MAX_HEAD_BYTES = 2**12  # No file of git that names a commit is larger.
KINDS = ("measured", "predicted")  # entries of memory.json; a measured one is preferred
DEEPEST = 10  # levels of nested JSON
MOST_PHASES = 20  # Bound of a step.
# The shape of memory.json, as `fits` reads it.
BYTES = dict.fromkeys(NAMES, int)
PEAKS = {"first": int, "steady": int}
STEP: dict[str, Any] = {
    "peak_bytes": int,
    "kind": str,
    "phases": {...: {"steady": int, "first?": int}},
    "moment?": {"words": str, "operation": str},
    "categories?": {...: int},
    "phase_categories?": {...: BYTES},
    "phase_ends?": {...: PEAKS},
    "levels?": [{"level": int | str | None, "bytes": int, **BYTES}],
    "layers?": [{"module": str, "level": int | str | None, "bytes": int, **BYTES}],
    "guesses?": [str],
    "workspace_bytes?": int,
    "workspaces?": [{"module": str, "phase": str, "bytes": int}],
    "rank_peak_bytes?": [int],
    "state?": dict.fromkeys(("params", "grads", "optimizer"), int),
}
HALVED = {"halved_peak_bytes?": int | None, "override?": str | None}  # Present where half the width was tried.
ADVICE = {"level": int | str | None, "bytes": int, "mostly": str, "mostly_bytes?": int, **HALVED}
# A run's file also has "segments" and "measured_segments", which are compared with each other and shown nowhere: what
# `preflight` lists of the step that was predicted, and the same of the step that was measured.
OTHERS = {
    "parameters": int,
    "regions": int,
    "predicted_validation_bytes": int,
    "error_bytes": int,
    "about": str,
    "advice": ADVICE,
    "without": {...: int},
    "plan": {"device": str, "peak_bytes": int},
    "schedule": {"recompute": str, "budget": str | None, "keep": [str], "windows": bool},
}


def environment(device: "torch.device") -> dict[str, Any]:
    """Return the contents of env.json for a run on this device: versions, the device and how torch computes."""
    import torch

    values: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.system(),
        **dict.fromkeys(PACKAGES),
        "commit": commit(SOURCE),
        "device": device.type,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):  # unet3d run from a checkout that was never installed
            values[name] = metadata.version(name)
    if device.type == "cpu":
        from unet3d.model.half_precision import emulates_bf16

        capability = torch.backends.cpu.get_cpu_capability()
        return values | {"cpu": f"{capability}, bf16 emulated" if emulates_bf16() else capability}
    precisions = {
        "convolutions": torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        "matmul": torch.backends.cuda.matmul.fp32_precision,
    }
    return values | {
        "gpu": torch.cuda.get_device_name(device),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "benchmark": torch.backends.cudnn.benchmark,
        "tf32": ", ".join(name for name, precision in precisions.items() if precision == "tf32") or "off",
    }


def commit(tree: Path) -> str | None:
    """Return the commit that is checked out in a source tree, without changes since; None where there is no commit.

    Git is not run: its config can name code.
    """
    try:
        git = tree / ".git"
        if git.is_file():  # A second work tree has "gitdir: PATH".
            git = tree / _line(git).removeprefix("gitdir:").strip()
        head = _line(git / "HEAD")
        branch = head.removeprefix("ref:").strip()
        if branch != head:
            shared = git / (_line(git / "commondir") or ".")
            packed = re.search(f"^([0-9a-f]+) {re.escape(branch)}$", read_text(shared / "packed-refs"), re.MULTILINE)
            head = _line(shared / branch) or (packed[1] if packed else "")
    except (UserError, OSError, ValueError):  # a file that cannot be read
        return None
    return head if re.fullmatch("[0-9a-f]{40,64}", head) else None


def _line(path: Path) -> str:
    return read_text(path, MAX_HEAD_BYTES).strip()


def write_status(folder: Path, line: str, code: int) -> str:
    """Write the STATUS of a run that has ended: what happened, and the exit code. Return it as one line."""
    text = escaped(f"{line}\nexit code {code}\n", keep="\n")
    write_text(folder / "STATUS", text)
    return one_line(text)


def one_line(status: str) -> str:
    """Return the text of STATUS as one line, `done, exit code 0`."""
    return ", ".join(status.split("\n")).strip(", ")


def is_done(folder: Path) -> bool:
    """Return whether the folder's run finished and wrote all its files."""
    return read_text(folder / "STATUS").startswith("done\n")


def forget_after(folder: Path, step: int, validated: int) -> int:
    """Remove what a killed run left unfinished, and the records that one resumed at `step` repeats.

    It was last validated at `validated`. Return the last step that was recorded.
    """
    for path in (*folder.glob("**/.*.tmp"), *folder.glob("checkpoints/*.tmp")):
        path.unlink(missing_ok=True)
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        return step
    records = read_records(metrics)
    lines = []
    for record in records:
        is_of_step = record["step"] == step and (step == validated or "train/loss" in record)
        if record["step"] < step or is_of_step:
            lines.append(f"{json.dumps(record)}\n")
    write_text(metrics, "".join(lines))
    return max(step, last_step(records) or 0)


def read_records(metrics: Path) -> list[Values]:
    """Return the whole records of metrics.jsonl, whose last line a kill cuts short. Raises UserError."""
    records: list[Values] = []
    for line in read_lines(metrics):
        record = json_object(line.decode(errors="replace").strip())
        if fits(record.get("step"), int) and record["step"] >= 0 and is_shallow(record, 1):
            records.append({sys.intern(key): value for key, value in record.items()})  # keys are held once
    return records


def last_step(records: Iterable[Values]) -> int | None:
    """Return the highest step of any record; None without records."""
    return max((record["step"] for record in records), default=None)


def spacing_words(spacing: Sequence[float] | None) -> str:
    """Return `1x1x2 mm`; "" for the files' own."""
    return f"{'x'.join(map(str, spacing))} mm" if spacing else ""


def update_memory(folder: Path, memory: dict[str, Any], values: Values) -> None:
    """Add or replace these entries in `memory`, the content of memory.json, and write it whole. Raises OSError."""
    memory |= {name: folded(value, MOST_ITEMS) if name in KINDS else value for name, value in values.items()}
    write_json(folder / "memory.json", memory)


def add_measured(folder: Path, memory: dict[str, Any], earlier: Values, parameters: int, measured: Values) -> None:
    """Add the measured step to `memory`, as `update_memory`, and how far the predicted peak is from its peak.

    `earlier` is what a resumed run found in memory.json: the first step stays that of the process which began the run.
    """
    segments = memory.get("segments")
    before = earlier.get("measured", {})
    if before.get("kind") == measured["kind"] and earlier.get("measured_segments") == segments:
        measured = _with_first_of(before, measured)
    changes: dict[str, Any] = {"parameters": parameters, "measured": measured, "measured_segments": segments}
    if "predicted" in memory:
        # tensors against tensors: on CUDA the ledger's, without workspaces and rounding
        of_tensors = measured.get("ledger", measured)
        changes["error_bytes"] = memory["predicted"]["peak_bytes"] - of_tensors["peak_bytes"]
    update_memory(folder, memory, changes)


def _with_first_of(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return `now` with each "first", at any depth, as it was `before` if it was there."""
    merged = dict(now)
    for key, value in now.items():
        if key == "first":
            merged[key] = before.get(key, value)
        elif isinstance(value, dict):
            merged[key] = _with_first_of(before.get(key, {}), value)
    return merged


def read_memory(folder: Path) -> dict[str, Any]:
    """Return memory.json without its damaged entries; {} without a file. Raises UserError for one that is too large."""
    return without_damaged(json_object(read_text(folder / "memory.json", MAX_MEMORY_BYTES)))


def peaks(memory: Mapping[str, Any]) -> dict[str, Any]:
    """Return the few numbers of memory.json that dashboards show; bytes of a step's tensors, unless its kind says more.

    Before the first step these are the predicted ones.
    """
    values = {"parameters": memory.get("parameters"), "memory/error_bytes": memory.get("error_bytes")}
    values["memory/validation_predicted_bytes"] = memory.get("predicted_validation_bytes")
    for kind in reversed(KINDS):
        if kind in memory:
            values[f"memory/peak_{kind}_bytes"] = memory[kind]["peak_bytes"]
            values["memory/peak_kind"] = memory[kind]["kind"]
    return {name: value for name, value in values.items() if value is not None}


def json_object(text: str) -> dict[str, Any]:
    """Return a JSON object; {} for text that is empty, damaged, or nested without end."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) and is_shallow(value, DEEPEST) else {}


def without_damaged(values: Values) -> dict[str, Any]:
    """Return the entries of memory.json that have the shapes which tables and pictures read; unknown entries stay."""
    is_sound = {key: fits(values.get(key), shape) for key, shape in OTHERS.items()}
    is_sound |= {kind: _is_step(values.get(kind)) for kind in KINDS}
    if is_sound["advice"]:
        advice = values["advice"]
        names_halved = advice.get("halved_peak_bytes") is None or advice.get("override") is not None
        is_sound["advice"] = is_sound["predicted"] and advice["mostly"] in NAMES and names_halved
    is_sound["error_bytes"] = is_sound["error_bytes"] and is_sound["measured"] and is_sound["predicted"]
    return {key: value for key, value in values.items() if is_sound.get(key, True)}


def _is_step(entry: Any) -> bool:
    """Return whether an entry of memory.json has what tables and pictures read."""
    if not fits(entry, STEP):
        return False
    names, *others = [entry[key].keys() for key in ("phases", "phase_ends", "phase_categories") if key in entry]
    return (
        len(names) <= MOST_PHASES
        and all(keys == names for keys in others)
        and entry["peak_bytes"] > 0
        and ("moment" in entry or "layers" not in entry)
        and ("ledger" not in entry or _is_step(entry["ledger"]))
    )


def sound(values: Any, node: Any = Config) -> dict[str, Any]:
    """Return the options below `node` that have the right type, and those that this version does not know.

    So an option that is a number may be multiplied, and one that is a list counted, also in a file of strangers.
    """
    if not isinstance(values, dict):
        return {}
    types = get_type_hints(node)
    checked: dict[str, Any] = {}
    for name, value in values.items():
        kind = types.get(name, Any)
        if is_dataclass(kind) and isinstance(value, dict):
            checked[name] = sound(value, kind)
        elif not is_dataclass(kind) and _is_of(value, kind):
            checked[name] = value
    return checked


def _is_of(value: Any, kind: Any) -> bool:
    """Return whether a plain value is of an option's type; an integer also serves as a float."""
    if kind is Any:
        return True
    if isinstance(kind, UnionType):
        return any(_is_of(value, member) for member in get_args(kind))
    if get_origin(kind) is list:
        (item_kind,) = get_args(kind)
        return isinstance(value, list) and all(_is_of(item, item_kind) for item in value)
    return type(value) is kind or (kind is float and type(value) is int)


def fits(value: Any, shape: Any) -> bool:
    """Return whether JSON has this shape: a type, [shape of all items], {key: shape} or {...: shape of all values}.

    A key with a question mark may be missing.
    """
    if isinstance(value, (str, list, dict)) and len(value) > MOST_ITEMS:
        return False
    if isinstance(shape, list):
        return isinstance(value, list) and bool(value) and all(fits(item, shape[0]) for item in value)
    if isinstance(shape, dict) and isinstance(value, dict):
        if ... in shape:
            return bool(value) and all(fits(item, shape[...]) for item in value.values())
        for key, part in shape.items():
            name = key.removesuffix("?")
            if not (fits(value[name], part) if name in value else name != key):
                return False
        return True
    if isinstance(shape, dict) or not isinstance(value, shape):
        return False
    if isinstance(value, bool):
        return bool(shape is bool)  # JSON's true is no number.
    return not isinstance(value, int) or abs(value) <= LARGEST_NUMBER


def is_shallow(value: Any, levels: int) -> bool:
    """Return whether lists and dictionaries are nested in at most this many levels."""
    items: Any = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels >= 0 and all(is_shallow(item, levels - 1) for item in items)


def as_number(cell: Any) -> float | None:
    """Return the number in a cell or record; None without one, or for one too large for a picture."""
    try:
        number = float(cell)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if LARGEST_NUMBER < abs(number) < math.inf else number


def finite(cell: Any) -> float | None:
    """Return the number in a cell or record if means can be taken of it; None for NaN and infinity."""
    number = as_number(cell)
    return number if number is not None and math.isfinite(number) else None
