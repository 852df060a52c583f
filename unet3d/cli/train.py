"""`unet3d train`: one line for a mistake, a run folder and an exit code for a job. And `unet3d.train`, from Python."""

import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from unet3d.base import process, ranks
from unet3d.base.errors import UserError, escaped
from unet3d.base.signals import Stop
from unet3d.cli import commands, lifecycle, plan, sweep
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.report import wandb_logger

if TYPE_CHECKING:
    from unet3d.run.record import RunRecord


def main(words: Sequence[str] | None = None) -> int:
    """Run what the words of the command line ask for. Return the exit code, of a sweep the highest of its jobs'."""
    process.prepare()
    process.install_safe_streams()
    if ranks.RANK:
        return lifecycle.run_as_follower_rank(job)
    try:
        return _run(sys.argv[1:] if words is None else words)
    except UserError as error:
        return lifecycle.print_error(f"error: {error}", error.exit_code)
    finally:
        ranks.cancel_job()


def _run(words: Sequence[str]) -> int:
    """Plan what the words ask for, then run it. Return the exit code. Raises UserError before anything begins."""
    if "-h" in words or "--help" in words:
        print(commands.help_text())
        return 0
    arguments = plan.parse(words)
    if arguments.only_shows:
        if arguments.is_checked:
            for overrides in compose.sweep(arguments.overrides):
                compose.compose(overrides)
        plan.show(words)
        return 0
    jobs = plan.plan(arguments)
    if jobs[0].number is not None:
        return sweep.run(jobs, lambda: sweep.launch(jobs, arguments.overrides, job_of_sweep))
    (alone,) = jobs
    return lifecycle.run(job, alone.config, alone.folder, alone.composed.all_overrides).code


@dataclass(frozen=True)
class TrainedRun:
    """A run that has ended well, in its `folder`; all figures come from its files."""

    folder: Path

    @property
    def scores(self) -> list[dict[str, str]]:
        """scores.csv: one row per held-out case, such as {"case": "a", "dice/organ": "0.93", ...}."""
        return self._files().scores

    @property
    def dice(self) -> float | None:
        """Mean Dice of the last validation, on the files' own grids; None without one."""
        return self._files().dice_mean

    @property
    def memory(self) -> Mapping[str, Any]:
        """memory.json: "predicted" and "measured", each with "peak_bytes", "phases", "layers" and more, in bytes."""
        return self._files().memory

    @property
    def checkpoint(self) -> Path:
        """The weights with the best mean Dice."""
        return self.folder / "checkpoints" / "best.pt"

    def _files(self) -> "RunRecord":
        from unet3d.run.record import read_run

        return read_run(self.folder)


def train(overrides: Sequence[str] = ()) -> TrainedRun:
    """Train in this process as `python train.py OVERRIDES` does: this is `unet3d.train`.

    Prints and writes what the command does. Raises UserError and the errors that would end the command.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UserError(
            "unet3d.train: runs in a program's main thread, which alone gets signals; start a process for it"
        )
    if ranks.SIZE > 1:
        raise UserError("unet3d.train: trains in one process; for several ranks: torchrun train.py")
    if isinstance(overrides, str):
        raise UserError(f"unet3d.train: give a list of options, such as [{overrides!r}]")
    words = [str(word) for word in overrides]
    for word in words:
        if word.startswith("-"):
            raise UserError(f"{word}: unet3d.train takes options alone; a sweep is for the command line")
    planned = plan.plan(plan.parse(words))[0]
    if planned.number is not None:
        raise UserError(f"{words}: is a sweep; unet3d.train runs one training, a sweep is for the command line")
    outcome = lifecycle.run(job, planned.config, planned.folder, planned.composed.all_overrides)
    if outcome.error is not None:
        raise outcome.error
    return TrainedRun(planned.folder)


def job(config: Config, folder: Path, stop: Stop) -> None:
    """Train once in the folder, in this process or on several ranks, which all call this. Ends early once `stop`."""
    if ranks.RANK == 0 and not config.dry_run:
        wandb_logger.preload(config)
    with process.loading("torch"):
        import torch._dynamo  # noqa: F401 (the optimizer of the prediction loads it)

        from unet3d.run import job  # a wrong option was answered before

    job.run(config, folder, stop)


def job_of_sweep(tree: DictConfig) -> None:
    """Run a sweep's job, in the process that the launcher gave it. Neither raises nor exits: the others are to run."""
    asked = HydraConfig.get()
    folder = Path(asked.runtime.output_dir)
    if sweep.stopped.is_set():
        with suppress(OSError):
            folder.rmdir()  # Hydra has made it
        return
    overrides = list(asked.overrides.task)
    searched = [word for word in asked.overrides.hydra if word.startswith(compose.SEARCH_PATH)]
    print(f"job {asked.job.num}: {escaped(' '.join(overrides))}", flush=True)
    if tree.dry_run:  # in this process: fake tensors leave nothing behind, and torch need not load for each job
        config = sweep.config_of_job(tree)
        with sweep.log_of(folder) as log, redirect_stdout(log or sys.stdout):
            lifecycle.run(job, config, folder, [*searched, *overrides])
    else:
        sweep.run_job(folder, overrides, searched)
    sweep.print_result(asked.job.num, folder)


if __name__ == "__main__":
    raise SystemExit(main())
