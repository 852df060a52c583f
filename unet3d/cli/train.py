"""`unet3d train`: one line for a mistake, a run folder and an exit code for a job. And `unet3d.train`, from Python.

What the words ask for, a run or the jobs of a sweep, is composed and checked once.
"""

import argparse
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser  # the only place that knows which flags take a value
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from unet3d.base import process, ranks
from unet3d.base.errors import UserError, escaped, is_disk_full, make_room, warn
from unet3d.base.files import from_here, read_csv
from unet3d.base.signals import Stop
from unet3d.cli import commands, lifecycle, sweep
from unet3d.config import compose
from unet3d.config.compose import Composed
from unet3d.config.schema import Config
from unet3d.config.words import as_written, not_a_flag

FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "resume")  # options that would else mean the current folder
FIRST_FILES = 2**16  # bytes, generously, of those that a run writes before it trains
# Hydra's own options that count. Others are for what its application does around a job, which a run does by itself.
HYDRA_OPTIONS = (
    "hydra.run.",
    "hydra.sweep.",
    "hydra.searchpath=",
    "hydra.mode=",
    "hydra.launcher.",
    "hydra/launcher=",
    "hydra.sweeper.",
)


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
    arguments = parse(words)
    if arguments.only_shows:
        for overrides in compose.sweep(arguments.overrides):
            compose.compose(overrides)
        # Where Hydra looks for them; the process ends with this.
        sys.argv[1:] = [as_written(word) for word in words]
        hydra.main(str(compose.config_folder()), compose.CONFIG_NAME, compose.VERSION_BASE)(lambda _: None)()
        return 0
    jobs = plan(arguments)
    if jobs[0].number is not None:
        return sweep.run(jobs, lambda: sweep.launch(jobs, arguments.overrides, job_of_sweep))
    return _run_alone(jobs[0])[0]


def _run_alone(planned: sweep.Job) -> tuple[int, BaseException | None]:
    return lifecycle.run(job, planned.config, planned.folder, planned.composed.all_overrides)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return what the words of a command line ask for, before anything is composed. Raises UserError.

    It has what Hydra's flags say. `overrides` are the words without flags; --config-dir is one of them. `only_shows`: a
    flag shows something and runs nothing.
    """
    parser = get_args_parser()
    parser.error = _refuse_flag  # type: ignore[method-assign]
    flags, unknown = parser.parse_known_intermixed_args(list(words))
    if unknown:
        raise not_a_flag(unknown[0], words)
    flags.only_shows = bool(flags.cfg or flags.info or flags.shell_completion or flags.hydra_help)
    if flags.shell_completion or flags.hydra_help:
        flags.overrides = []
        return flags
    for override in flags.overrides:
        name, _, value = override.partition("=")
        if "${" in override and not override.lstrip("+~").startswith("hydra."):  # resuming would replace it again
            raise UserError(f"{override}: a run keeps what it was given; let the shell replace it: data.root=$PLACE/a")
        if name in FOLDERS and not value.strip("'\" "):
            raise UserError(f"{override}: is empty; give {name}=FOLDER, or leave it out")
        if override.startswith("~") and (compose.config_folder() / name[1:]).is_dir():
            raise UserError(f"{override}: cannot be removed; leave it out, or choose another")
    for name in ("config_name", "config_path", "experimental_rerun"):
        if getattr(flags, name):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag}: a run has the package's own config.yaml; choose files by experiment=NAME")
    if flags.config_dir:
        flags.overrides.insert(0, compose.search_path(flags.config_dir))
    return flags


def _refuse_flag(message: str) -> NoReturn:
    """Raise UserError in place of argparse's error, which prints every flag of Hydra."""
    raise UserError(f"{message}; options are written without dashes: batch=4")


def plan(arguments: argparse.Namespace) -> list[sweep.Job]:
    """Return the run that a command line asks for, or the jobs of its sweep. Raises UserError before any begins."""
    overrides = arguments.overrides
    if not arguments.multirun and "hydra.mode=MULTIRUN" not in overrides:
        composed = compose.compose_tree(overrides)
        added = compose.added_sweep(overrides, [composed])
        if not added:
            run = _planned(composed)
            refuse_unwritable(run.folder, "hydra.run.dir")
            return [run]
        overrides = [*overrides, *added]
    if ranks.SIZE > 1:
        raise UserError("torchrun starts one run, a sweep several; leave out one of them")
    jobs = sweep.plan(overrides)
    refuse_unwritable(jobs[0].composed.sweep_folder, "hydra.sweep.dir")
    return jobs


def _planned(composed: Composed) -> sweep.Job:
    """Return the run of a command line; with `resume=auto` it begins, or goes on, in the folder that is named.

    Raises UserError before anything is touched.
    """
    for word in composed.overrides:
        if word.startswith("hydra") and not word.startswith(HYDRA_OPTIONS):
            warn(f"{word}: does nothing for a run, which is not Hydra's to start")
    options = composed.options
    resume = options.get("resume")
    if resume == "auto":
        named = [
            str(word.value()) for word in compose.parsed(composed.overrides) if word.key_or_group == "hydra.run.dir"
        ]
        if not named or "${" in named[-1]:
            raise UserError("resume=auto: goes on in a folder, or begins there; name it: hydra.run.dir=runs/a")
        place = Path(named[-1])
        resume = str(place) if lifecycle.checkpoints(place) else None
    if resume is None:
        options.resume = None
        return sweep.Job(composed, compose.load(options), composed.run_folder)
    folder = Path(resume)
    if not lifecycle.checkpoints(folder):
        raise UserError(f"resume={folder}: no run with a checkpoint there; give a run folder, outputs/DATE/TIME-ID")
    config = compose.resumed(folder, composed)
    if config.dry_run:
        raise UserError("resume goes on with a run, dry_run only predicts; remove one of them")
    return sweep.Job(composed, config, folder.resolve())


def refuse_unwritable(folder: Path, option: str) -> None:
    """Raise UserError, which names the option of the folder, where it cannot be made."""
    path = folder.absolute()
    place = next(part for part in (path, *path.parents) if part.exists())
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(FIRST_FILES))
    except OSError as error:
        remedy = make_room(error) if is_disk_full(error) else f"give {option}=FOLDER"
        raise UserError(f"{from_here(path)}: {place} cannot be written to ({error.strerror}); {remedy}") from error


@dataclass(frozen=True)
class TrainedRun:
    """A run that has ended well, in its `folder`; all figures come from its files."""

    folder: Path

    @property
    def scores(self) -> list[dict[str, str]]:
        """scores.csv: one row per held-out case, such as {"case": "a", "dice/organ": "0.93", ...}."""
        return read_csv(self.folder / "scores.csv")

    @property
    def dice(self) -> float | None:
        """Mean Dice of the last validation, on the files' own grids; None without one."""
        from unet3d.run.record import read_run

        return read_run(self.folder).dice_mean

    @property
    def memory(self) -> Mapping[str, Any]:
        """memory.json: "predicted" and "measured", each with "peak_bytes", "phases", "layers" and more, in bytes."""
        from unet3d.run.record import read_run

        return read_run(self.folder).memory

    @property
    def checkpoint(self) -> Path:
        """The weights with the best mean Dice."""
        return self.folder / "checkpoints" / "best.pt"


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
    planned = plan(parse(words))[0]
    if planned.number is not None:
        raise UserError(f"{words}: is a sweep; unet3d.train runs one training, a sweep is for the command line")
    _, error = _run_alone(planned)
    if error is not None:
        raise error
    return TrainedRun(planned.folder)


def job(config: Config, folder: Path, stop: Stop) -> None:
    """Train once in the folder, in this process or on several ranks, which all call this. Ends early once `stop`."""
    if ranks.RANK == 0 and not config.dry_run:
        from unet3d.report import loggers

        loggers.preload(config)
    with process.loading("torch"):
        import torch._dynamo  # noqa: F401 (the optimizer of the prediction loads it)

        from unet3d.run import run  # a wrong option was answered before

    run.run(config, folder, stop)


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
    if tree.dry_run:  # It stays in this process: fake tensors leave nothing behind.
        whole = tree.copy()
        with open_dict(whole):
            whole.hydra = asked
        composed = Composed(overrides, whole)
        compose.apply_plan(composed)
        config = compose.load(composed.options)
        with sweep.log_of(folder) as log, redirect_stdout(log or sys.stdout):
            lifecycle.run(job, config, folder, [*searched, *overrides])
    else:
        sweep.run_job(folder, overrides, searched)
    sweep.print_result(asked.job.num, folder)


if __name__ == "__main__":
    raise SystemExit(main())
