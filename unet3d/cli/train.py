"""`unet3d train`: one line for a mistake, a run folder and an exit code for a job."""

import os
import secrets
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser  # the only place that knows which flags take a value
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from unet3d import compose
from unet3d.cli import lifecycle
from unet3d.cli.lifecycle import INTERRUPTED, OVERRIDES
from unet3d.compose import CONFIG_NAME, VERSION_BASE, refuse_changes
from unet3d.config import Config
from unet3d.errors import NotSaved, Preempted, UserError
from unet3d.signals import Stop

FOLDERS = (("hydra.run.dir", "outputs"), ("hydra.sweep.dir", "multirun"))  # of a run, of a sweep: option, default


def main() -> int:
    """Check what every job of the command line asks for, then run them. Returns the highest exit code."""
    lifecycle.install_safe_streams()
    OmegaConf.register_new_resolver("uid", _uid, use_cache=True, replace=True)
    try:
        arguments = _checked(sys.argv[1:])
        _refuse_unwritable(arguments)
    except UserError as error:
        return lifecycle.say(f"error: {error}", error.exit_code)
    codes: list[int] = []
    swept: dict[Path, Config] = {}  # run folder -> config
    sweep_folder = Path()

    @hydra.main(version_base=VERSION_BASE, config_path=str(compose.config_folder()), config_name=CONFIG_NAME)
    def task(tree: DictConfig) -> None:
        nonlocal sweep_folder
        asked, config = HydraConfig.get(), compose.load(tree)
        folder, overrides = Path(asked.runtime.output_dir), list(asked.overrides.task)
        if asked.mode != RunMode.MULTIRUN:
            codes.append(lifecycle.guarded(job, config, folder, overrides))
            return
        sweep_folder, swept[folder] = Path(asked.runtime.cwd, asked.sweep.dir), config
        print(f"job {asked.job.num}: {' '.join(overrides)}", flush=True)
        code, is_asked = _job_of_sweep(config, folder, overrides)
        codes.append(code)
        if is_asked:
            ready = f"python -m unet3d compare {shlex.quote(str(sweep_folder))}"
            sys.exit(lifecycle.say(f"sweep interrupted; to compare what there is: {ready}", code))

    sys.argv[1:] = arguments
    task()
    if swept:
        from unet3d.report import compare

        try:
            compare.finish_sweep(swept, sweep_folder)
        except OSError as error:
            line = f"error: {sweep_folder}: the comparison is not saved ({error.strerror})"
            codes.append(lifecycle.say(line, NotSaved.exit_code))
    return max(codes, default=0)


def _checked(arguments: Sequence[str]) -> list[str]:
    """The arguments to hand to Hydra. Raises UserError before any folder is made."""
    flags = get_args_parser().parse_intermixed_args(list(arguments))
    if flags.shell_completion or flags.hydra_help:
        return list(arguments)
    ordered = _overrides_first(arguments, flags.overrides)
    shows = flags.cfg or flags.info or flags.help
    _refuse_interpolation(flags.overrides)
    if not (shows or flags.multirun) and (folder := _resumed_folder(flags.overrides)) is not None:
        return resumed(folder, flags.overrides)
    added = [] if shows else compose.added_sweep(flags.overrides)
    if flags.multirun or added:
        for overrides in compose.sweep([*flags.overrides, *added]):
            config = compose.compose(overrides)
            if config.resume is not None:
                raise UserError("resume goes on with one run; leave -m away")
            if config.requeue:
                raise UserError("requeue=true is for a job of one run, which goes on in its folder; leave it away")
        return [*flags.overrides, *added, *ordered[len(flags.overrides) :], *["-m"] * (not flags.multirun)]
    compose.compose(flags.overrides)
    return ordered


def _resumed_folder(overrides: Sequence[str]) -> Path | None:
    """The run to go on with, whose own options the others are for."""
    asked = [word for word in overrides if word.startswith("resume=")]
    found = compose.compose(asked).resume if asked else None
    return None if found is None else Path(found)


def _refuse_interpolation(overrides: Sequence[str]) -> None:
    """Raise UserError for what would be replaced anew when the run is resumed, by something else perhaps."""
    for word in overrides:
        if "${" in word and not word.lstrip("+~").startswith("hydra."):
            raise UserError(
                f"{word}: a run keeps what it was given; let the shell replace it, as in data.root=$PLACE/a"
            )


def _refuse_unwritable(arguments: Sequence[str]) -> None:
    """Raise UserError where the run folder cannot be made: Hydra would tell it with a trace."""
    if any(word.startswith("-") and word not in ("-m", "--multirun") for word in arguments):
        return  # only shows something
    is_sweep = any(word in ("-m", "--multirun") for word in arguments)
    option, default = FOLDERS[is_sweep]
    asked = [word.partition("=")[2].strip("'") for word in arguments if word.startswith(f"{option}=")]
    for path in map(Path, asked or [default]):
        place = next(part for part in (path.absolute(), *path.absolute().parents) if part.exists())
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            raise UserError(f"{path}: {place} is no folder that can be written to; give {option}=FOLDER")


def _overrides_first(arguments: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The same arguments with the overrides in one row: Hydra takes no flag between them."""
    flags = list(arguments)
    for override in overrides:
        flags.remove(override)
    return [*overrides, *flags]


def resumed(folder: Path, overrides: Sequence[str]) -> list[str]:
    """The overrides of the run in `folder`, then the new ones, in the same folder. Raises UserError."""
    told = folder / OVERRIDES
    if not told.is_file() or not lifecycle.snapshots(folder):
        raise UserError(f"resume={folder}: no run with a snapshot there; give a run folder, outputs/DATE/TIME-ID")
    before = lifecycle.load_overrides(folder)
    if any(word.startswith("-") or word.lstrip("+~").startswith("hydra") or "${" in word for word in before):
        raise UserError(f"{told}: holds more than options; it is not as a run has written it")
    arguments = [*before, *overrides]
    asked = compose.compose(arguments)
    if asked.dry_run:
        raise UserError("resume goes on with a run, dry_run only predicts; leave one of them away")
    now = compose.to_plain(asked)
    refuse_changes(lifecycle.read_yaml(folder / "config.yaml", dict), now)
    return [*arguments, _run_in(folder)]


def _run_in(folder: Path) -> str:
    """The override that makes `folder` the run's."""
    return f"hydra.run.dir={lifecycle.quoted(folder.resolve())}"


def _job_of_sweep(config: Config, folder: Path, overrides: list[str]) -> lifecycle.ProcessEnd:
    """Run a sweep's job in a process of its own, so that nothing of it leaks into another.

    One that only predicts stays here: tensors without data leave nothing behind, and torch need not load again.
    """
    if not config.dry_run:
        before = lifecycle.started(folder)
        script = Path(HydraConfig.get().runtime.cwd, sys.argv[0])
        code, is_asked = ended = lifecycle.run_process([sys.executable, str(script), *overrides, _run_in(folder)])
        has_begun = lifecycle.started(folder) != before
        refused = code == UserError.exit_code and before is not None and not has_begun  # what is there stays as it is
        if code == 0 or refused or (has_begun and lifecycle.has_ended(folder)):
            return ended
        lifecycle.save_overrides(folder, overrides)
        line = f"failed: {lifecycle.fate(code)}"
        lifecycle.write_end(folder, line, code)
        return lifecycle.ProcessEnd(lifecycle.say(line, code), is_asked)
    try:
        code = lifecycle.guarded(job, config, folder, overrides)
        return lifecycle.ProcessEnd(code, is_asked=code in (INTERRUPTED, Preempted.exit_code))
    except Exception:  # Hydra would tell it after the last job, and end the sweep with it
        traceback.print_exc()
        return lifecycle.ProcessEnd(1, is_asked=False)


def _uid() -> str:
    return secrets.token_hex(3)


def job(config: Config, folder: Path, stop: Stop) -> None:
    """One run in its folder: predict, build, fit, report. Ends early once it is asked to `stop`."""
    from unet3d import build  # torch and monai load here: a wrong option was answered before
    from unet3d.memory.preflight import preflight
    from unet3d.report import report, run_folder
    from unet3d.run.run import Run, finish_run

    data = None if config.dry_run else build.data(config)
    options = build.model_options(config, data.dataset, data.train[0]) if data else build.outlined_options(config)
    told = preflight(config, options)
    if data is None:
        run_folder.update_memory(folder, told.memory)
        return
    with Run(config, folder, data, options, told.segment_starts, stop) as run:
        if run.is_done:
            print(f"nothing to do: step {run.trainer.step} of {config.steps} is done; steps=N goes on")
            if not (folder / "report.html").exists():  # killed as it was written
                report.write_report(folder)
            return
        run_folder.update_memory(folder, told.memory)
        run.fit()
        finish_run(run)
    report.write_report(folder)
    report.print_summary(folder)
