"""checkpoints/ of a run: which are kept, and how a run goes on from the newest that is whole."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unet3d.base import ranks
from unet3d.base.errors import CheckpointError, NotSaved, UserError, escaped, is_out_of_memory, warn
from unet3d.base.types import Batch
from unet3d.config.compose import CHECKPOINTS
from unet3d.run import run_folder
from unet3d.run.checkpoint import Checkpoint
from unet3d.training import checkpoint

LAST, PREVIOUS, BEST = CHECKPOINTS


@dataclass
class CheckpointManager:
    """Keeps the last checkpoint of the run in `folder`, the one before it, and the best."""

    folder: Path
    state_dict: Callable[[], dict[str, Any]]  # gives the run's state
    best: float | None = None  # highest mean Dice so far
    saved: tuple[int, int] | None = None  # step of last.pt, and of the last validation before it

    def save_best_and_last(self, dice: float | None) -> None:
        """Save after a validation: the best checkpoint first, since the last one records its Dice. Raises NotSaved."""
        before = self.best
        if dice is not None and (before is None or dice > before):
            self.best = dice
            try:
                self._save(BEST, self.state_dict())
            except NotSaved:
                self.best = before
                raise
        self.save_last()

    def save_last(self) -> None:
        """Save the run as it is, unless it is saved. Raises NotSaved."""
        state = self.state_dict()
        now = (state["step"], state["last_validation"])
        if now != self.saved:
            # previous.pt is for a damaged last.pt; one of the same step would not be older
            is_older = self.saved is not None and self.saved[0] < state["step"]
            self._save(LAST, state, PREVIOUS if is_older else None)
            self.saved = now

    def _save(self, name: str, state: dict[str, Any], previous: str | None = None) -> None:
        path = self._path(name)
        moved_to = self._path(previous) if previous else None
        ranks.on_rank0(lambda: checkpoint.save_checkpoint(path, state, moved_to))

    def warn(self, error: Exception) -> None:
        """Print that the run is not saved, and what its last checkpoint is."""
        if self.saved is None:
            newest = "there is no checkpoint yet"
        else:
            newest = f"the last checkpoint is of step {self.saved[0]}"
        warn(f"{error}; training goes on, {newest}")

    def restore(self, load_state_dict: Callable[[Checkpoint], list[str]]) -> tuple[int, int]:
        """Load the newest whole checkpoint and drop later records. Return its step and its last validation's.

        Raises CheckpointError where none is whole or the newest is not a run's, UserError where it is another run's.
        """
        newest, problems = ranks.on_rank0(lambda: Checkpoint.read_newest(self.folder / "checkpoints"))
        with _foreign_states_refused(newest.path):
            changes = load_state_dict(newest)
            step = newest.state["step"]
            last_validation = newest.state["last_validation"]
            self.best = newest.state["best"]
        last_recorded = ranks.on_rank0(lambda: self._forget_after(step, last_validation))
        if problems:
            lost = f"; steps {step + 1} to {last_recorded} are taken again" if last_recorded > step else ""
            warn(f"{'; '.join(problems)}; going on from {newest.path.name}, step {step}{lost}")
        else:
            self.saved = (step, last_validation)
        if changes:
            print(f"from step {step} on with other options: {escaped('; '.join(changes))}", flush=True)
        return step, last_validation

    def _forget_after(self, step: int, last_validation: int) -> int:
        """Remove what later steps recorded and what a killed run left unfinished. Return the last step recorded."""
        unfinished = (*self.folder.glob("**/.*.tmp"), *self.folder.glob("checkpoints/*.tmp"))
        for path in unfinished:
            path.unlink(missing_ok=True)
        return run_folder.forget_after(self.folder / "metrics.jsonl", step, last_validation)

    def dump(self, step: int, batches: Sequence[Batch]) -> str:
        """Write the batches whose update was refused to nan_batch.pt. Return a line that says where they are."""
        path = self.folder / "nan_batch.pt"
        plain = [{**batch._asdict(), "cases": list(batch.cases)} for batch in batches]
        try:
            checkpoint.save_checkpoint(path, {"step": step, "batches": plain})
        except NotSaved as full:
            return str(full)
        return f"the batch is in {path}"

    def _path(self, name: str) -> Path:
        return self.folder / "checkpoints" / name


@contextmanager
def _foreign_states_refused(path: Path) -> Iterator[None]:
    """Raise CheckpointError in one line for a state that lacks a part, or has one that torch does not take."""
    try:
        yield
    except (UserError, CheckpointError):
        raise
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointError(f"{path}: not all of a run's state, or of another run ({error!r})") from error
