"""The files of a run folder: written during a run, read back for reports and comparisons."""

import json
import math
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from unet3d.base.errors import UserError, escaped
from unet3d.base.files import (
    LARGEST_YAML,
    read_csv,
    read_lines,
    read_text,
    read_yaml,
    refuse_links_out,
    write_json,
    write_text,
)
from unet3d.config import compose, rules
from unet3d.config.schema import Config
from unet3d.memory.tables import NAMES, folded
from unet3d.report.shapes import MOST_ITEMS, as_number, finite, fits, is_shallow, sound

if TYPE_CHECKING:
    import torch

PACKAGES = ("unet3d", "torch", "monai", "hydra-core", "nibabel", "numpy", "scipy", "wandb")
SOURCE = Path(__file__).resolve().parents[2]  # of this package, where it is not installed
LARGEST_HEAD = 2**12  # bytes of a file of git that names one commit
LARGEST_STATUS, LARGEST_ENV, LARGEST_MEMORY, LARGEST_SPLIT = 2**20, 2**16, 2**23, 2**24  # bytes of these files
MOST_PARTS = 20  # of split.json
KINDS = ("measured", "predicted")  # entries of memory.json; a measured one is preferred
Record = Mapping[str, Any]
# The shape of memory.json, as `fits` reads it. An entry has all of STEP, and of DETAILS any.
DEEPEST = 10  # levels
MOST_PHASES = 20  # of a step
BYTES = dict.fromkeys(NAMES, int)
PEAKS = {"first": int, "steady": int}
STEP = {"peak_bytes": int, "kind": str, "phases": {...: {"steady": int}}}  # and a "first", where it is known
DETAILS = {
    "moment": {"words": str, "operation": str},
    "categories": {...: int},
    "phase_categories": {...: BYTES},
    "phase_ends": {...: PEAKS},
    "levels": [{"level": int | str | None, "bytes": int, **BYTES}],
    "layers": [{"module": str, "level": int | str | None, "bytes": int, **BYTES}],
    "guesses": [str],
    "workspace_bound_bytes": int,
    "workspaces": [{"module": str, "phase": str, "bytes": int}],
    "rank_peak_bytes": [int],
    "state": dict.fromkeys(("params", "grads", "optimizer"), int),
}
ADVICE = {"level": int | str | None, "bytes": int, "mostly": str}
HALVED = {"halved_peak_bytes": int, "override": str}  # of advice, where half the width was tried


def start_folder(folder: Path, config: Config, device: "torch.device", start: Mapping[str, Any] | None = None) -> None:
    """Make the subfolders and write what is known before the first step; init.json says what `start` loaded."""
    for part in ("checkpoints", "figures", "predictions"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    if config.resume is None:
        for name in ("metrics.jsonl", "init.json"):
            (folder / name).unlink(missing_ok=True)  # of a run that ended before its first checkpoint
    if start is not None:
        write_json(folder / "init.json", start)
    (folder / "report.html").unlink(missing_ok=True)  # of an earlier end; the next one writes it again
    write_text(folder / "config.yaml", compose.to_yaml(config))
    write_json(folder / "env.json", environment(device))
    write_text(folder / "STATUS", "running\n")


def environment(device: "torch.device") -> dict[str, Any]:
    """Versions, the device and how torch computes; nothing that names the machine or its user."""
    import torch

    from unet3d.training.half_precision import emulates_bf16

    found: dict[str, Any] = {"python": platform.python_version(), "system": platform.system()}
    found |= dict.fromkeys(PACKAGES) | {"commit": commit(SOURCE)}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):  # unet3d run from a checkout that was never installed
            found[name] = metadata.version(name)
    found |= {"device": device.type, "threads": torch.get_num_threads()}
    found["deterministic"] = torch.are_deterministic_algorithms_enabled()
    if device.type == "cpu":
        return found | {"cpu": torch.backends.cpu.get_cpu_capability() + ", bf16 emulated" * emulates_bf16()}
    gpu = {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    found |= gpu | {"cudnn": torch.backends.cudnn.version()}
    found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return found | {"benchmark": torch.backends.cudnn.benchmark, "tf32": _tf32()}


def _tf32() -> str:
    """Return what torch computes from float32 with TF32, in words."""
    import torch

    precisions = {
        "convolutions": torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        "matmul": torch.backends.cuda.matmul.fp32_precision,
    }
    return ", ".join(name for name, precision in precisions.items() if precision == "tf32") or "off"


def commit(tree: Path) -> str | None:
    """The commit that is checked out in this source tree; None if it is none. Git is not run: its config can name code.

    Changes since then are not seen.
    """
    try:
        git = tree / ".git"
        if git.is_file():  # of a second work tree: "gitdir: PATH"
            git = tree / read_text(git, LARGEST_HEAD).removeprefix("gitdir:").strip()
        shared = git / (read_text(git / "commondir", LARGEST_HEAD).strip() or ".")
        said = read_text(git / "HEAD", LARGEST_HEAD).strip()
        if (name := said.removeprefix("ref:").strip()) != said:
            packed = [line.split() for line in read_text(shared / "packed-refs").splitlines()]
            said = read_text(shared / name, LARGEST_HEAD).strip()
            said = said or next((words[0] for words in packed if words[1:] == [name]), "")
    except (UserError, OSError, ValueError):  # a file that cannot be read
        return None
    return said if re.fullmatch("[0-9a-f]{40,64}", said) else None


def write_status(folder: Path, line: str, code: int) -> None:
    """Write the STATUS of a run that has ended: what happened, and the exit code."""
    write_text(folder / "STATUS", escaped(f"{line}\nexit code {code}\n", keep="\n"))


def is_done(folder: Path) -> bool:
    """Whether the folder's run finished and wrote all its files."""
    return read_text(folder / "STATUS").startswith("done\n")


def forget_after(metrics: Path, step: int, validated: int) -> int:
    """Drop the records that a run resumed at `step`, last validated at `validated`, repeats; returns the last step."""
    if not metrics.exists():
        return step
    kept, last = [], step
    for record in _records(metrics):
        at = record["step"]
        last = max(last, at)
        if at < step or (at == step and (step == validated or "train/loss" in record)):
            kept.append(f"{json.dumps(record)}\n")
    write_text(metrics, "".join(kept))
    return last


def read_memory(folder: Path) -> dict[str, Any]:
    """memory.json without what is damaged; empty if there is none."""
    found = _object(read_text(folder / "memory.json", LARGEST_MEMORY))
    shapes = {"parameters": int, "error_bytes": int, "about": str, "advice": ADVICE, "without": {...: int}}
    is_sound = {key: fits(found.get(key), shape) for key, shape in shapes.items()}
    is_sound |= {kind: _is_step(found.get(kind)) for kind in KINDS}
    if is_sound["advice"]:
        is_tried = found["advice"].get("halved_peak_bytes") is not None
        is_sound["advice"] = is_sound["predicted"] and found["advice"]["mostly"] in NAMES
        is_sound["advice"] &= not is_tried or fits(found["advice"], HALVED)
    is_sound["error_bytes"] &= all(is_sound[kind] for kind in KINDS)
    return {key: value for key, value in found.items() if is_sound.get(key, True)}


def update_memory(folder: Path, values: dict[str, Any]) -> None:
    """Add or replace these entries of memory.json."""
    values = {name: folded(value, MOST_ITEMS) if name in KINDS else value for name, value in values.items()}
    write_json(folder / "memory.json", read_memory(folder) | values)


def add_measured(folder: Path, parameters: int, measured: dict[str, Any], before: dict[str, Any]) -> None:
    """Add the measured step to memory.json; a resumed run keeps the first step that was there `before`, if it fits."""
    found, known = read_memory(folder), before.get("measured", {})
    segments = found.get("segments")
    if known.get("kind") == measured["kind"] and before.get("measured_segments") == segments:  # the same step
        measured = _with_first_of(known, measured)
    found |= {"parameters": parameters, "measured": folded(measured, MOST_ITEMS), "measured_segments": segments}
    if "predicted" in found:  # tensors against tensors: on CUDA the ledger's, without workspaces and rounding
        found["error_bytes"] = found["predicted"]["peak_bytes"] - measured.get("ledger", measured)["peak_bytes"]
    write_json(folder / "memory.json", found)


def _with_first_of(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """`now`, but each "first", at any depth, as it was `before` if it was there."""
    merged = dict(now)
    for key, value in now.items():
        if key == "first":
            merged[key] = before.get(key, value)
        elif isinstance(value, dict):
            merged[key] = _with_first_of(before.get(key, {}), value)
    return merged


@dataclass(frozen=True)
class RunFolder:
    """What the files of a run folder say; empty where a file is missing or damaged."""

    path: Path
    status: str
    config: str
    settings: Record  # `config` as plain values
    overrides: list[str] | None  # the command line; None if it is not known
    environment: Mapping[str, str]
    records: list[Record]
    scores: list[dict[str, str]]
    split: Mapping[str, list[str]]  # names of the cases by what they are for
    memory: Record

    @property
    def memory_kind(self) -> str:
        """Whether `memory_entry` was measured or predicted."""
        return next(kind for kind in KINDS if kind in self.memory)

    @property
    def memory_entry(self) -> Record:
        """The step in memory.json; only if `memory` is not empty."""
        entry: Record = self.memory[self.memory_kind]
        return entry

    @property
    def last_validation(self) -> Record:
        """Its record; empty if there was none."""
        return next((record for record in reversed(self.records) if "val/dice_mean" in record), {})

    @property
    def best_validation(self) -> Record:
        """The record of the validation with the highest mean Dice; empty if there is none."""
        return best_of(self.records)

    @property
    def has_own_grids(self) -> bool:
        """Whether its scores are of the files' own grids, beside those of another grid, the network's."""
        from unet3d.training.metrics import NETWORK  # loads NumPy, for which a command first makes sure of memory

        return bool(self.scores) and any(str(key).startswith(NETWORK) for key in self.scores[0])

    @property
    def dice_mean(self) -> float | None:
        """The mean Dice of the last validation: of its label maps on the files' own grids once these are scored."""
        if not self.has_own_grids:
            return as_number(self.last_validation.get("val/dice_mean"))
        from unet3d.training.metrics import mean_of

        keys = [key for key in self.scores[0] if str(key).startswith("dice/")]
        return mean_of(mean_of(as_number(row.get(key)) for row in self.scores) for key in keys)

    @property
    def spacing(self) -> str:
        """That of the network's grid, `1x1x2 mm`; "" where it is the files' own."""
        data = self.settings.get("data")
        return spacing_words(data.get("spacing")) if isinstance(data, dict) else ""

    @property
    def switches(self) -> str:
        """What was on as its steps were timed; "" if nothing was."""
        return rules.switched_on(compose.flat(self.settings, "."))

    def values(self, key: str) -> list[float]:
        """A number's values in the records, in their order; NaN and infinity included."""
        return [number for record in self.records if (number := as_number(record.get(key))) is not None]


def read_run(path: Path) -> RunFolder:
    """Read a run folder, whatever of it is missing or damaged."""
    refuse_links_out(path)
    settings, words = (_yaml(path / name) for name in ("config.yaml", "overrides.yaml"))
    memory, split = read_memory(path), _object(read_text(path / "split.json", LARGEST_SPLIT))
    versions = _object(read_text(path / "env.json", LARGEST_ENV))
    return RunFolder(
        path=path,
        status=", ".join(read_text(path / "STATUS", LARGEST_STATUS).split("\n")).strip(", "),
        config=read_text(path / "config.yaml", LARGEST_YAML),
        settings=sound(settings),
        overrides=[str(word) for word in words] if isinstance(words, list) else None,
        environment={key: str(value) for key, value in versions.items() if value is not None},
        records=_records(path / "metrics.jsonl"),
        scores=list(map(_scored, read_csv(path / "scores.csv"))),
        split={key: list(map(str, split[key])) for key in islice(split, MOST_PARTS) if isinstance(split[key], list)},
        memory=memory if memory.keys() & KINDS and memory.get("parameters", 0) > 0 else {},
    )


def spacing_words(spacing: Any) -> str:
    """`1x1x2 mm`; "" for what is no list."""
    return f"{'x'.join(map(str, spacing))} mm" if isinstance(spacing, list) else ""


def best_of(records: Sequence[Record]) -> Record:
    """The validation with the highest mean Dice, the first of equals, as for best.pt; empty if there is none."""
    scored = [(dice, record) for record in records if (dice := as_number(record.get("val/dice_mean"))) is not None]
    scored = [pair for pair in scored if not math.isnan(pair[0])]
    return max(scored, key=lambda pair: pair[0], default=(None, {}))[1]


def headline(run: RunFolder) -> dict[str, Any]:
    """The few numbers of a run that dashboards sort by; bytes are of a step, all of tensors unless `kind` says more."""
    best = run.best_validation
    found = {
        "val/dice_mean": as_number(run.last_validation.get("val/dice_mean")),
        "val/dice_mean_best": as_number(best.get("val/dice_mean")),
        "val/best_step": best.get("step"),
        "train/loss": next(reversed(run.values("train/loss")), None),
        "steps": max((record["step"] for record in run.records), default=None),
        "parameters": run.memory.get("parameters"),
        "memory/error_bytes": run.memory.get("error_bytes"),
        "own_grid/dice_mean": run.dice_mean if run.has_own_grids else None,
    }
    found |= {f"memory/peak_{kind}_bytes": run.memory[kind]["peak_bytes"] for kind in KINDS if kind in run.memory}
    found |= {"memory/peak_kind": run.memory_entry["kind"]} if run.memory else {}
    times = {name: run.values(f"time/{name}") for name in ("step_s", "val_s")}
    found |= {f"time/{name}_median": median(values) for name, values in times.items() if values}
    found["time/switches"] = run.switches or None
    return {name: value for name, value in found.items() if value is not None}


def case_table(run: RunFolder) -> tuple[list[str], list[list[Any]]]:
    """scores.csv as columns and rows, with numbers as numbers; the first column names the case."""
    columns = list(run.scores[0]) if run.scores else ["case"]
    numbers = [[as_number(row.get(name)) for name in columns[1:]] for row in run.scores]
    return columns, [[row.get("case"), *cells] for row, cells in zip(run.scores, numbers, strict=True)]


def _is_step(entry: Any) -> bool:
    """Whether an entry of memory.json has what tables and pictures read."""
    if not fits(entry, STEP) or not all(fits(entry[key], DETAILS[key]) for key in DETAILS if key in entry):
        return False
    phases = [entry[key].keys() for key in ("phases", "phase_ends", "phase_categories") if key in entry]
    is_whole = entry["peak_bytes"] > 0 and all(keys == phases[0] for keys in phases) and len(phases[0]) <= MOST_PHASES
    is_whole = is_whole and ("layers" not in entry or "moment" in entry)
    is_whole = is_whole and all(fits(peaks.get("first", 0), int) for peaks in entry["phases"].values())
    return is_whole and ("ledger" not in entry or _is_step(entry["ledger"]))


def _records(metrics: Path) -> list[Record]:
    """The whole records of metrics.jsonl: a kill cuts the last one short."""
    found = (_object(line.decode(errors="replace")) for line in read_lines(metrics) if not line.isspace())
    sound_ones = (one for one in found if fits(one.get("step"), int) and one["step"] >= 0 and is_shallow(one, 1))
    return [{sys.intern(key): value for key, value in one.items()} for one in sound_ones]  # keys are held once


def _scored(row: dict[str, str]) -> dict[str, str]:
    """A row of scores.csv; what is no finite number in a column `metric/class` is no score."""
    for key, cell in row.items():
        if cell and "/" in key and finite(cell) is None:
            row[key] = ""
    return row


def _object(text: str) -> dict[str, Any]:
    """A JSON object; empty if it is damaged, or nested without end."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) and is_shallow(value, DEEPEST) else {}


def _yaml(path: Path) -> Any:
    """Plain values of YAML; None if it is damaged."""
    try:
        return read_yaml(path)
    except UserError:
        return None
