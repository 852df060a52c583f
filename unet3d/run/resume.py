"""A run's snapshots: what they hold, which are kept, and how a run goes on from one."""

import dataclasses
import functools
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unet3d import compose
from unet3d.build import Data
from unet3d.compose import SNAPSHOTS
from unet3d.config import Config, Model
from unet3d.errors import NonFiniteLoss, NotSaved, SnapshotError, UserError, escaped
from unet3d.report import run_folder
from unet3d.report.loggers import warn
from unet3d.train import checkpoint, optim

DatasetFingerprint = dict[str, Any]
Snapshot = dict[str, Any]
LAST, PREVIOUS, BEST = SNAPSHOTS


def fingerprint(data: Data, dtype: torch.dtype | None) -> DatasetFingerprint:
    """What a run rests on, as plain values; `dtype` is that of mixed precision, None without it."""
    return {
        "classes": list(data.dataset.classes),
        "channels": list(data.dataset.channels),
        "intensity": [dataclasses.asdict(rule) for rule in data.read.intensity],
        "training cases": [case.id for case in data.train],
        "held-out cases": [case.id for case in data.val],
        "mixed precision": str(dtype),
    }


def refuse_other_data(before: Mapping[str, Any], now: DatasetFingerprint) -> None:
    """Raise UserError if the data or the precision has changed since the run began."""
    short = functools.partial(textwrap.shorten, width=200, placeholder=" ...")
    if changed := [name for name in now if before[name] != now[name]]:
        changes = "; ".join(f"{name}: {short(str(before[name]))} -> {short(str(now[name]))}" for name in changed)
        raise UserError(f"resume: the data or the precision changed since the run began: {changes}")


@dataclass(frozen=True)
class TrainingState:
    """What changes as a run goes on, with what it is built from: `options` are the model's, with nothing left open."""

    config: Config
    options: Model
    fingerprint: DatasetFingerprint
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler

    def state(self, step: int, last_validation: int, best: float | None) -> Snapshot:
        """The run at this step, as tensors and plain values; `best` is its highest mean Dice."""
        device = next(self.model.parameters()).device
        return {
            "config": compose.to_plain(self.config),
            "model_options": dataclasses.asdict(self.options),
            **{name: self.fingerprint[name] for name in ("classes", "channels", "intensity")},
            "grounds": self.fingerprint,
            "step": step,
            "paused": last_validation,
            "best": best,
            "model": self.model.state_dict(),
            "average": optim.averages(self.model, self.optimizer),  # shares the optimizer's storages, also on disk
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": [torch.cuda.get_rng_state(device)] if device.type == "cuda" else [],
        }

    def put_back(self, state: Snapshot, path: Path) -> list[str]:
        """Put a snapshot's state back. Returns the changed options. Raises UserError, SnapshotError for another run."""
        changes = compose.refuse_changes(state["config"], compose.to_plain(self.config))
        if "grounds" in state:  # else an older version wrote it
            refuse_other_data(state["grounds"], self.fingerprint)
        if (reached := state["step"]) > (steps := self.config.steps):
            raise UserError(f"steps={steps}: the run is at step {reached} already; give as many or more")
        if state["step"] == self.config.steps != state["config"]["steps"]:
            state["paused"] = state["step"] - 1  # the last validation measures more than the one at this step did
        checkpoint.load_weights(self.model, state["model"], path)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["rng"])  # last: building things draws from it
        device = next(self.model.parameters()).device
        if state["cuda_rng"] and device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"][0], device)  # nothing is drawn on other devices
        return changes


@dataclass
class Checkpoints:
    """checkpoints/ of the run in `folder`; `state` gives the run's state."""

    folder: Path
    state: Callable[[], Snapshot]
    best: float | None = None  # highest mean Dice so far
    saved: tuple[int, int] | None = None  # step of last.pt, and of the last validation before it

    def keep(self, dice: float | None) -> None:
        """Save after a validation: the best snapshot first, since the last one records its Dice. Raises NotSaved."""
        before = self.best
        if dice is not None and (before is None or dice > before):
            self.best = dice
            try:
                checkpoint.save_snapshot(self._path(BEST), self.state())
            except NotSaved:
                self.best = before
                raise
        self.save_last()

    def save_last(self) -> None:
        """Save the run as it is, unless it is saved. Raises NotSaved."""
        state = self.state()
        now = state["step"], state["paused"]
        if now != self.saved:
            # previous.pt is for a damaged last.pt; one of the same step would not be older
            is_older = self.saved is not None and self.saved[0] < state["step"]
            checkpoint.save_snapshot(self._path(LAST), state, self._path(PREVIOUS) if is_older else None)
            self.saved = now

    def warn(self, error: Exception) -> None:
        """Print that the run is not saved, and what its last snapshot is."""
        what = f"the last snapshot is of step {self.saved[0]}" if self.saved else "there is no snapshot yet"
        warn(f"{error}; training goes on, {what}")

    def restore(self, put_back: Callable[[Snapshot, Path], list[str]]) -> tuple[int, int]:
        """Put back the newest whole snapshot, drop later records. Returns its step and that of its last validation."""
        state, wrong = checkpoint.load_any(self.folder / "checkpoints", SNAPSHOTS)
        path = self._path(SNAPSHOTS[len(wrong)])
        try:
            changes = put_back(state, path)
            step, validated, self.best = state["step"], state.get("paused", state["step"]), state["best"]
        except (UserError, SnapshotError):
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise SnapshotError(f"{path}: not all of a run's state, or of another run ({error!r})") from error
        for orphan in (*self.folder.glob("**/.*.tmp"), *self.folder.glob("checkpoints/*.tmp")):
            orphan.unlink(missing_ok=True)  # what a killed run left unfinished
        last = run_folder.forget_after(self.folder / "metrics.jsonl", step, validated)
        if wrong:
            lost = f"; steps {step + 1} to {last} are taken again" if last > step else ""
            warn(f"{'; '.join(wrong)}; going on from {path.name}, step {step}{lost}")
        else:
            self.saved = step, validated
        if changes:
            print(f"from step {step} on with other options: {escaped('; '.join(changes))}", flush=True)
        return step, validated

    def dump(self, step: int, error: NonFiniteLoss) -> str:
        """Keep the batches whose update was refused. Returns where they are."""
        path = self.folder / "nan_batch.pt"
        batches = [{**batch._asdict(), "cases": list(batch.cases)} for batch in error.batches]
        try:
            checkpoint.save_snapshot(path, {"step": step, "batches": batches})
        except NotSaved as full:
            return str(full)
        return f"the batch is in {path}"

    def _path(self, name: str) -> Path:
        return self.folder / "checkpoints" / name
