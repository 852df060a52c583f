"""A run as its folder records it: read once, then handed to tables, figures, loggers and the page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from unet3d.base.errors import UserError
from unet3d.base.files import LARGEST_YAML, read_csv, read_text, read_yaml, refuse_links_out
from unet3d.base.types import tabulated
from unet3d.config import compose, rules
from unet3d.run import run_folder
from unet3d.run.run_folder import KINDS, Values, as_number, finite, fits
from unet3d.training.metrics import NETWORK, NOTE_KEY, mean_of

LARGEST = {"STATUS": 2**20, "env.json": 2**16, "split.json": 2**24, "init.json": 2**22}  # bytes of a file
MOST_PARTS = 20  # Bound of split.json.
RULE = {"kind": str, "low": int | float, "high": int | float, "mean": int | float, "std": int | float}
OF_DATA = {"classes": [str], "channels": [str], "intensity": [RULE], "ignore": int}  # "data" of split.json
OF_INIT = {"loaded": list, "by class": dict, "new": list}  # init.json


@dataclass(frozen=True)
class RunRecord:
    """All that the files of a run folder say; empty where a file is missing or damaged."""

    path: Path
    status: str
    config: str
    settings: Values  # `config` as plain values
    overrides: list[str] | None  # the command line; None if it is not known
    environment: Mapping[str, str]
    records: list[Values]
    scores: list[dict[str, Any]]  # rows of scores.csv: numbers of columns `metric/class`, else text; None for no number
    split: Mapping[str, list[str]]  # names of the cases by what they are for
    memory: Values
    # Facts of the data set: classes, channels, intensity rules, ignored label.
    data: Values = field(default_factory=dict)
    start: Values = field(default_factory=dict)  # Tensors that came from another network, and new ones.

    @property
    def memory_kind(self) -> str:
        """Return "measured" or "predicted": the kind of `memory_entry`."""
        return next(kind for kind in KINDS if kind in self.memory)

    @property
    def memory_entry(self) -> Values:
        """Return the step in memory.json; only if `memory` is not empty."""
        entry: Values = self.memory[self.memory_kind]
        return entry

    @property
    def memory_ledger(self) -> Values:
        """Return the entry that says which tensors hold the bytes: of a measured step on CUDA, the ledger's."""
        ledger: Values = self.memory_entry.get("ledger", self.memory_entry)
        return ledger

    @property
    def last_validation(self) -> Values:
        """Return the record of the last validation; {} without one."""
        return next((record for record in reversed(self.records) if "val/dice_mean" in record), {})

    @property
    def best_validation(self) -> Values:
        """Return the record of the validation with the highest mean Dice; {} without one."""
        return best_of(self.records)

    @property
    def last_step(self) -> int | None:
        """Return the number of optimizer steps that were done; None without records."""
        return run_folder.last_step(self.records)

    @property
    def has_own_grids(self) -> bool:
        """Return whether cases are scored on their files' grids as well as on the network's grid."""
        return bool(self.scores) and any(key.startswith(NETWORK) for key in self.scores[0])

    @property
    def dice_mean(self) -> float | None:
        """Return the mean Dice of the last validation: of its label maps on the files' grids once these are scored."""
        if not self.has_own_grids:
            return as_number(self.last_validation.get("val/dice_mean"))
        keys = [key for key in self.scores[0] if key.startswith("dice/")]
        return mean_of(mean_of(row.get(key) for row in self.scores) for key in keys)

    @property
    def spacing(self) -> str:
        """Return the voxel size of the network's grid, `1x1x2 mm`; "" where it is the files' grid."""
        return run_folder.spacing_words(self.settings.get("data", {}).get("spacing"))

    @property
    def switches(self) -> str:
        """Return the switches of torch that were on as the steps were timed; "" without any."""
        return rules.switched_on(compose.flat(self.settings))


def read_run(path: Path, memory: Values | None = None) -> RunRecord:
    """Read a run folder, whatever of it is missing or damaged. Raises UserError for links out of it and huge files.

    `memory`: the contents of memory.json, where the caller holds them.
    """
    refuse_links_out(path)
    words = _yaml(path / "overrides.yaml")
    if memory is None:
        memory = run_folder.read_memory(path)
    has_memory = memory.keys() & KINDS and memory.get("parameters", 0) > 0
    texts = {name: read_text(path / name, LARGEST[name]) for name in LARGEST}
    versions, parts, start = (run_folder.json_object(texts[name]) for name in ("env.json", "split.json", "init.json"))
    about = parts["data"] if isinstance(parts.get("data"), dict) else {}
    return RunRecord(
        path=path,
        status=run_folder.one_line(texts["STATUS"]),
        config=read_text(path / "config.yaml", LARGEST_YAML),
        settings=run_folder.sound(_yaml(path / "config.yaml")),
        overrides=[str(word) for word in words] if isinstance(words, list) else None,
        environment={key: str(value) for key, value in versions.items() if value is not None},
        records=run_folder.read_records(path / "metrics.jsonl"),
        scores=read_scores(path),
        split={
            name: [str(case) for case in parts[name]]
            for name in islice(parts, MOST_PARTS)
            if isinstance(parts[name], list)
        },
        memory=memory if has_memory else {},
        data={key: about[key] for key, shape in OF_DATA.items() if key in about and fits(about[key], shape)},
        start={key: start[key] for key, kind in OF_INIT.items() if isinstance(start.get(key), kind)},
    )


def read_scores(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of scores.csv, in which each cell of a column `metric/class` is a finite number or None."""
    rows = []
    for row in read_csv(folder / "scores.csv"):
        rows.append({key: finite(cell) if "/" in key else cell for key, cell in row.items()})
    return rows


def _yaml(path: Path) -> Any:
    """Return plain values of YAML; None if it is damaged."""
    try:
        return read_yaml(path)
    except UserError:
        return None


def numbers_of(records: Sequence[Values], key: str) -> list[float]:
    """Return a number's values in records, in their order; NaN and infinity included."""
    numbers = (as_number(record.get(key)) for record in records)
    return [number for number in numbers if number is not None]


def best_of(records: Sequence[Values]) -> Values:
    """Return the validation with the highest mean Dice, the first of equals, as for best.pt; {} without any."""
    scored = [record for record in records if finite(record.get("val/dice_mean")) is not None]
    return max(scored, key=lambda record: float(record["val/dice_mean"]), default={})


def headline(run: RunRecord) -> dict[str, Any]:
    """Return the few numbers that dashboards sort runs by; bytes of a step's tensors, unless its kind says more."""
    best = run.best_validation
    losses = numbers_of(run.records, "train/loss")
    values: dict[str, Any] = {
        "val/dice_mean": as_number(run.last_validation.get("val/dice_mean")),
        "val/dice_mean_best": as_number(best.get("val/dice_mean")),
        "val/best_step": best.get("step"),
        "train/loss": losses[-1] if losses else None,
        "steps": run.last_step,
        "own_grid/dice_mean": run.dice_mean if run.has_own_grids else None,
    }
    values |= run_folder.peaks(run.memory)
    for name in ("step_s", "val_s"):
        times = numbers_of(run.records, f"time/{name}")
        if times:
            values[f"time/{name}_median"] = median(times)
    values["time/switches"] = run.switches or None
    return {name: value for name, value in values.items() if value is not None}


def scores_as_numbers(run: RunRecord) -> tuple[list[str], list[list[Any]]]:
    """Return scores.csv as columns and rows without notes; the first column names the case."""
    return tabulated([{key: cell for key, cell in case.items() if key != NOTE_KEY} for case in run.scores])
