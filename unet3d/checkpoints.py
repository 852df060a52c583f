"""A run's snapshots: which are kept, and from which it goes on."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unet3d import record, snapshot
from unet3d.errors import NonFiniteLoss, NotSaved, SnapshotError, UserError
from unet3d.resuming import SNAPSHOTS

State = dict[str, Any]
LAST, PREVIOUS, BEST = SNAPSHOTS


@dataclass
class Checkpoints:
    """checkpoints/ of the run in `folder`; `state` is the run's, when it is called."""

    folder: Path
    state: Callable[[], State]
    best: float | None = None  # highest mean Dice so far
    saved: tuple[int, int] | None = None  # step of last.pt, and of the last pause before it

    def keep(self, dice: float | None) -> None:
        """Save this moment; the best one first, as the last one says that it is there. Raises NotSaved."""
        before = self.best
        if dice is not None and (before is None or dice > before):
            self.best = dice
            try:
                snapshot.save(self._path(BEST), self.state())
            except NotSaved:
                self.best = before
                raise
        self.save_last()

    def save_last(self) -> None:
        """Save this moment, unless it is saved. Raises NotSaved."""
        state = self.state()
        now = state["step"], state["paused"]
        if now != self.saved:
            # after a damaged last.pt, previous.pt is the one that is whole; one of the same step is no previous one
            is_older = self.saved is not None and self.saved[0] < state["step"]
            snapshot.save(self._path(LAST), state, self._path(PREVIOUS) if is_older else None)
            self.saved = now

    def warn(self, error: Exception) -> None:
        """Say that this moment is not saved, and which is."""
        what = f"the last snapshot is of step {self.saved[0]}" if self.saved else "there is no snapshot yet"
        print(f"warning: {error}; training goes on, {what}", file=sys.stderr, flush=True)

    def restore(self, put_back: Callable[[State, Path], list[str]]) -> tuple[int, int]:
        """Put back the newest snapshot that is whole. Returns its step and pause; later records are dropped.

        `put_back` returns the options that the run goes on with differently. Raises SnapshotError, UserError.
        """
        state, wrong = snapshot.load_any(self.folder / "checkpoints", SNAPSHOTS)
        path = self._path(SNAPSHOTS[len(wrong)])
        try:
            changes = put_back(state, path)
            step, paused, self.best = state["step"], state.get("paused", state["step"]), state["best"]
        except (UserError, SnapshotError):
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise SnapshotError(f"{path}: not all of a run's state, or of another run ({error!r})") from error
        record.sweep_orphans(self.folder)
        last = record.forget_after(self.folder / "metrics.jsonl", step, paused)
        if wrong:
            lost = f"; steps {step + 1} to {last} are taken again" if last > step else ""
            print(f"warning: {'; '.join(wrong)}; going on from {path.name}, step {step}{lost}", file=sys.stderr)
        else:
            self.saved = step, paused
        if changes:
            print(f"from step {step} on with other options: {'; '.join(changes)}", flush=True)
        return step, paused

    def dump(self, step: int, error: NonFiniteLoss) -> str:
        """Keep the batches that an update was refused for. Returns where they are."""
        path = self.folder / "nan_batch.pt"
        batches = [{**batch._asdict(), "cases": list(batch.cases)} for batch in error.batches]
        try:
            snapshot.save(path, {"step": step, "batches": batches})
        except NotSaved as full:
            return str(full)
        return f"the batch is in {path}"

    def _path(self, name: str) -> Path:
        return self.folder / "checkpoints" / name
