"""`unet3d train`: one line for a mistake, a run folder and an exit code for a job."""

import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser  # the only place that knows which flags take a value
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from unet3d.base import ranks
from unet3d.base.errors import UserError, escaped, is_disk_full, make_room
from unet3d.base.files import read_yaml, refuse_links_out
from unet3d.base.signals import Stop
from unet3d.cli import libraries, lifecycle, options, sweep
from unet3d.config import compose, rules
from unet3d.config.schema import Config

if TYPE_CHECKING:
    from unet3d.data.grids import Grid
    from unet3d.report.run_folder import RunFolder

FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "resume")  # options that would else mean the current folder
SEARCHED = "hydra.searchpath="  # folders of the user's own YAML files
FIRST_FILES = 2**16  # bytes, generously, of those that a run writes before it trains


def main() -> int:
    """Check what every job of the command line asks for, then run them. Returns the highest exit code of a sweep."""
    libraries.share_cores()
    lifecycle.install_safe_streams()
    if ranks.RANK:
        return lifecycle.run_as_follower_rank(job)
    try:
        if {"-h", "--help"} & {*sys.argv[1:]}:
            print(options.as_text())
            return 0
        try:
            words = checked_arguments(sys.argv[1:])
            refuse_unwritable(words)
            planned = sweep.plan(words) if {"-m", "--multirun"} & {*words} else []
            sys.argv[1:] = sweep.arguments(words, planned) if planned else words
        except UserError as error:
            return lifecycle.print_error(f"error: {error}", error.exit_code)
        flags = {word for word in words if word.startswith("-")}
        if planned and flags <= {"-m", "--multirun"}:
            return sweep.run(planned, _with_hydra(job_of_sweep))
        _with_hydra(single_job)()
        return 0
    finally:
        ranks.cancel_job()


def _with_hydra(task: Callable[[DictConfig], None]) -> Callable[[], None]:
    """The task for each job of the command line."""
    decorate = hydra.main(str(compose.config_folder()), compose.CONFIG_NAME, compose.VERSION_BASE)
    decorated: Callable[[], None] = decorate(task)
    return decorated


def single_job(tree: DictConfig) -> None:
    """The job of a command line that is no sweep. Raises SystemExit unless it succeeds."""
    asked = HydraConfig.get()
    config = compose.load(tree) if tree.resume is None else resumed_config(Path(tree.resume), sys.argv[1:])
    folder = Path(asked.runtime.output_dir)
    with lifecycle.run_context(config, folder, list(asked.overrides.task)) as stop:
        job(config, folder, stop)


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


def from_python(overrides: Sequence[str] = ()) -> TrainedRun:
    """Train in this process as `python train.py OVERRIDES` does; `unet3d.train` calls it.

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
    words = checked_arguments([str(word) for word in overrides])
    if flags := [word for word in words if word.startswith("-")]:
        raise UserError(f"{flags[0]}: unet3d.train runs one training; a sweep is for the command line")
    refuse_unwritable(words)
    folders: list[Path] = []

    def task(tree: DictConfig) -> None:
        folders.append(Path(HydraConfig.get().runtime.output_dir))
        single_job(tree)

    around = sys.exception()  # that the caller handles
    before, sys.argv = sys.argv, ["unet3d", *words]  # where Hydra looks for them
    try:
        _with_hydra(task)()
    except SystemExit as end:
        error = end.__cause__ or end.__context__
        if error is not None and error is not around:
            raise error from None
        raise
    finally:
        sys.argv = before
    return TrainedRun(folders[0])


def job(config: Config, folder: Path, stop: Stop) -> None:
    """One run in its folder, of this process or of several ranks, which all call this. Ends early once `stop`."""
    libraries.load_libraries()  # before torch and monai, which load here: a wrong option was answered before
    from unet3d import build
    from unet3d.data.planner import unsuitable_patch
    from unet3d.data.prepare import prepare_data
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
        build.import_all(config)  # a wrong path is answered now; tensors of an imported module are real, not fake ones
        data = None if config.dry_run else prepare_data(config.data)
        if data is None:
            network = ranks.on_rank0(lambda: build.model_config_from_headers(config))
        else:
            network = build.model_options(config, data.dataset, data.spacing)
        grids: Sequence[Grid] = ()
        if config.resume is None and not ranks.RANK:
            grids = data.train_grids if data is not None else _listed_grids(config)
        if advice := unsuitable_patch(config, grids):
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


def _listed_grids(config: Config) -> "list[Grid]":
    """Return the grids of training cases on disk, for a dry run, which reads no volume; [] without any."""
    from unet3d.data.cases import read_dataset, split
    from unet3d.data.planner import read_grids

    if config.data.format not in ("phantom", "mni152"):
        with suppress(UserError):
            train, _ = split(read_dataset(config.data), config.data)
            return read_grids(train, config.data.spacing)
    return []


def job_of_sweep(tree: DictConfig) -> None:
    """A sweep's job, in the process that the launcher gave it. Neither raises nor exits: the other jobs are to run."""
    asked = HydraConfig.get()
    folder, overrides = Path(asked.runtime.output_dir), list(asked.overrides.task)
    if sweep.stopped.is_set():
        with suppress(OSError):
            folder.rmdir()  # Hydra has made it
        return
    print(f"job {asked.job.num}: {escaped(' '.join(overrides))}", flush=True)
    if tree.dry_run:  # in this process: fake tensors leave nothing behind, and torch need not load for each job
        with suppress(SystemExit), lifecycle.run_context(config := compose.load(tree), folder, overrides) as stop:
            job(config, folder, stop)
    else:
        sweep.run_job(folder, overrides, [word for word in asked.overrides.hydra if word.startswith(SEARCHED)])


def checked_arguments(arguments: list[str]) -> list[str]:
    """The arguments to hand to Hydra, flags last. Raises UserError before any folder is made."""
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    flags, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        raise compose.not_a_flag(unknown[0], arguments)
    if flags.shell_completion or flags.hydra_help:
        return arguments
    others = list(arguments)
    for override in flags.overrides:
        others.remove(override)
        if "${" in override and not override.lstrip("+~").startswith("hydra."):  # resuming would replace it once more
            raise UserError(f"{override}: a run keeps what it was given; let the shell replace it: data.root=$PLACE/a")
    for word in flags.overrides:
        name, _, value = word.partition("=")
        if name in FOLDERS and not value.strip("'\" "):
            raise UserError(f"{word}: is empty; give {name}=FOLDER, or leave it out")
        if word.startswith("~") and (compose.config_folder() / word[1:].partition("=")[0]).is_dir():
            raise UserError(f"{word}: cannot be removed; leave it out, or choose another")
    if flags.config_dir:  # as an override, which a sweep's jobs and the check of this command line take, too
        at = next(i for i, word in enumerate(others) if word.startswith(("--config-dir", "-cd")))
        del others[at : at + 1 + ("=" not in others[at])]
        flags.overrides.insert(0, compose.search_path(flags.config_dir))
    only_shows = flags.cfg or flags.info
    asked = [word for word in flags.overrides if word.startswith("resume=")]
    folder = compose.compose(asked).resume if asked and not (only_shows or flags.multirun) else None
    if folder not in (None, "auto"):
        return resumed(Path(folder), flags.overrides)
    added = compose.added_sweep(flags.overrides) * (not only_shows)  # composes each job, and so checks it
    if folder == "auto" and not added:  # a sweep's jobs are resumed one by one
        place, flags.overrides = compose.run_folder(flags.overrides), [w for w in flags.overrides if w not in asked]
        if lifecycle.checkpoints(place):
            return resumed(place, [*flags.overrides, lifecycle.path_option("resume", place)])
    if (flags.multirun or added) and ranks.SIZE > 1:
        raise UserError("torchrun starts one run, a sweep several; leave out one of them")
    if flags.multirun or added:
        return [*flags.overrides, *added, *others, *["-m"] * (not flags.multirun)]
    return [*flags.overrides, *others]


def _refuse(message: str) -> NoReturn:
    """In place of argparse's, which prints every flag of Hydra."""
    raise UserError(f"{message}; options are written without dashes: batch=4")


def resumed(folder: Path, overrides: list[str]) -> list[str]:
    """The overrides, and the folder of the run that goes on. Raises UserError before anything is touched."""
    if not lifecycle.checkpoints(folder):
        raise UserError(f"resume={folder}: no run with a checkpoint there; give a run folder, outputs/DATE/TIME-ID")
    if resumed_config(folder, overrides).dry_run:
        raise UserError("resume goes on with a run, dry_run only predicts; remove one of them")
    return [*overrides, lifecycle.path_option("hydra.run.dir", folder.resolve())]


def resumed_config(folder: Path, overrides: list[str]) -> Config:
    """The config of the run in `folder` with what these overrides set. Raises UserError."""
    refuse_links_out(folder)
    values = read_yaml(folder / "config.yaml")
    if not isinstance(values, dict):
        raise UserError(f"{folder / 'config.yaml'}: holds no options: it is missing, or damaged")
    return compose.resumed(values, [word for word in overrides if not word.startswith("-")])


def refuse_unwritable(arguments: list[str]) -> None:
    """Raise UserError where the run folder cannot be made: Hydra would print a trace."""
    flags = {word for word in arguments if word.startswith("-")}
    if flags - {"-m", "--multirun"}:
        return  # only shows something
    option, default = ("hydra.sweep.dir", "multirun") if flags else ("hydra.run.dir", "outputs")
    asked = [word.partition("=")[2].strip("'") for word in arguments if word.startswith(f"{option}=")]
    path = Path((asked or [default])[-1])
    place = next(part for part in (path.absolute(), *path.absolute().parents) if part.exists())
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(FIRST_FILES))
    except OSError as error:
        remedy = make_room(error) if is_disk_full(error) else f"give {option}=FOLDER"
        raise UserError(f"{path}: {place} cannot be written to ({error.strerror}); {remedy}") from error


if __name__ == "__main__":
    raise SystemExit(main())
