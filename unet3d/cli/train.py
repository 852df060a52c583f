"""`unet3d train`: one line for a mistake, a run folder and an exit code for a job. And `unet3d.train`, from Python."""

import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from unet3d.base import ranks
from unet3d.base.errors import UserError, escaped
from unet3d.base.signals import Stop
from unet3d.cli import hydra_app, libraries, lifecycle, options, plan, sweep
from unet3d.cli.arguments import parse
from unet3d.config import compose, rules
from unet3d.config.schema import Config

if TYPE_CHECKING:
    from unet3d.data.cases import Case
    from unet3d.report.run_folder import RunFolder


def main(words: Sequence[str] | None = None) -> int:
    """Run what the words of the command line ask for. Return the exit code, of a sweep the highest of its jobs'."""
    libraries.share_cores()
    lifecycle.install_safe_streams()
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
        print(options.as_text())
        return 0
    arguments = parse(words)
    if arguments.only_shows:
        if arguments.is_checked:
            for overrides in compose.sweep(arguments.overrides):
                compose.compose(overrides)
        hydra_app.show(words)
        return 0
    planned = plan.plan_arguments(arguments)
    if isinstance(planned, plan.Run):
        return lifecycle.run(job, planned.config, planned.folder, planned.overrides).code
    folder = sweep.folder_override(planned[0].sweep_folder)
    return sweep.run(planned, lambda: hydra_app.launch(planned, folder, arguments.overrides, job_of_sweep))


@dataclass(frozen=True)
class TrainedRun:
    """A run that has ended well, in its `folder`; all figures come from its files."""

    folder: Path

    @property
    def scores(self) -> list[dict[str, str]]:
        """scores.csv: a row a held-out case, such as {"case": "a", "dice/organ": "0.93", ...}."""
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

    def _files(self) -> "RunFolder":
        from unet3d.report.run_folder import read_run

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
    planned = plan.plan(words)
    if not isinstance(planned, plan.Run):
        raise UserError(f"{words}: is a sweep; unet3d.train runs one training, a sweep is for the command line")
    outcome = lifecycle.run(job, planned.config, planned.folder, planned.overrides)
    if outcome.error is not None:
        raise outcome.error
    return TrainedRun(planned.folder)


def job(config: Config, folder: Path, stop: Stop) -> None:
    """One run in its folder, of this process or of several ranks, which all call this. Ends early once `stop`."""
    libraries.load_libraries()  # before torch and monai, which load here: a wrong option was answered before
    from unet3d import build
    from unet3d.data.validate import unsuitable_patch
    from unet3d.memory.preflight import preflight
    from unet3d.report import report, run_folder
    from unet3d.run.pretrained import load_pretrained
    from unet3d.run.run import Run
    from unet3d.training.switches import switched

    if build.device_type(config) == "cuda":
        rules.refuse_indeterminate(config)
    for line in rules.warnings(config):
        lifecycle.print_error(f"warning: {line}")
    ranks.broadcast_job([compose.to_plain(config), str(folder.resolve())])
    with switched(config), ranks.joined(build.device_type(config), config.rank_timeout):
        data = None if config.dry_run else build.data(config)
        if data is None:
            network = ranks.on_rank0(lambda: build.model_config_from_headers(config))
        else:
            network = build.model_options(config, data.dataset, data.train[0])
        first: Sequence[Case] = ()
        if config.resume is None and not ranks.RANK:
            first = data.train if data is not None else _listed_cases(config)
        if advice := unsuitable_patch(config, first):
            lifecycle.print_error(f"warning: {escaped(advice)}")
        start = None
        if config.init is not None and config.resume is None:
            start = ranks.on_rank0(lambda: load_pretrained(config, network, data))
            config = start.config
        predicted = ranks.on_rank0(lambda: preflight(config, network))
        if data is None:
            ranks.on_rank0(lambda: run_folder.update_memory(folder, predicted.memory))
            return
        with Run(config, folder, data, network, predicted.segment_starts, stop, start) as run:
            if run.is_done:
                print(f"nothing to do: step {run.trainer.step} of {config.steps} is done; to train longer, set steps=N")
                if (folder / "report.html").exists():  # else the run was killed as it wrote it
                    return
            else:
                ranks.on_rank0(lambda: run_folder.update_memory(folder, predicted.memory))
                run.fit()
            ranks.leave()
            if ranks.RANK:
                return
            if not run.is_done:
                run.finish()
        report.write_report(folder)
        report.print_summary(folder)


def _listed_cases(config: Config) -> "tuple[Case, ...]":
    """The training cases of a data set on disk, for a dry run, which reads no volume; () without any."""
    from unet3d.data.cases import read_dataset, split

    if config.data.format not in ("phantom", "mni152"):
        with suppress(UserError):
            return split(read_dataset(config.data), config.data)[0]
    return ()


def job_of_sweep(tree: DictConfig) -> None:
    """Run a sweep's job, in the process that the launcher gave it. Neither raises nor exits: the others are to run."""
    asked = hydra_app.current_job()
    if sweep.stopped.is_set():
        with suppress(OSError):
            asked.folder.rmdir()  # Hydra has made it
        return
    print(f"job {asked.number}: {escaped(' '.join(asked.overrides))}", flush=True)
    if tree.dry_run:  # in this process: fake tensors leave nothing behind, and torch need not load for each job
        lifecycle.run(job, compose.load(tree), asked.folder, asked.overrides)
    else:
        sweep.run_job(asked.folder, asked.overrides, asked.searched)


if __name__ == "__main__":
    raise SystemExit(main())
