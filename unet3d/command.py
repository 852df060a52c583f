"""The command face of training: one line for a mistake, a run folder and an exit code for a job. Hydra in here."""

import secrets
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser  # the only place that knows which flags take a value
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from unet3d import compose, process
from unet3d.compose import CONFIG_NAME, VERSION_BASE
from unet3d.config import Config
from unet3d.errors import LoaderError, NonFiniteLoss, OutOfMemory, SnapshotError, UserError, is_out_of_memory
from unet3d.process import INTERRUPTED
from unet3d.resuming import refuse_changes

Job = Callable[[Config, Path], None]
OVERRIDES = "overrides.yaml"  # what the command line said, for `resume`


def main(job: Job) -> int:
    """Check what every job of the command line asks for, then run them. Returns the highest exit code."""
    OmegaConf.register_new_resolver("uid", _uid, use_cache=True, replace=True)
    try:
        arguments = _checked(sys.argv[1:])
    except UserError as error:
        return _say(f"error: {error}", error.exit_code)
    codes: list[int] = []
    swept: dict[Path, Config] = {}  # run folder -> config
    sweep_folder = Path()

    @hydra.main(version_base=VERSION_BASE, config_path=str(compose.config_folder()), config_name=CONFIG_NAME)
    def task(tree: DictConfig) -> None:
        nonlocal sweep_folder
        asked, config = HydraConfig.get(), compose.load(tree)
        folder, overrides = Path(asked.runtime.output_dir), list(asked.overrides.task)
        if asked.mode != RunMode.MULTIRUN:
            codes.append(_guarded(job, config, folder, overrides))
            return
        sweep_folder, swept[folder] = Path(asked.runtime.cwd, asked.sweep.dir), config
        print(f"job {asked.job.num}: {' '.join(overrides)}", flush=True)
        codes.append(_job_of_sweep(job, config, folder, overrides))
        if codes[-1] == INTERRUPTED:
            ready = f"python -m unet3d compare {shlex.quote(str(sweep_folder))}"
            sys.exit(_say(f"sweep interrupted; to compare what there is: {ready}", INTERRUPTED))

    sys.argv[1:] = arguments
    task()
    if swept:
        from unet3d import compare

        compare.finish_sweep(swept, sweep_folder)
    return max(codes, default=0)


def _checked(arguments: Sequence[str]) -> list[str]:
    """The arguments to hand to Hydra. Raises UserError before any folder is made."""
    flags = get_args_parser().parse_intermixed_args(list(arguments))
    if flags.shell_completion or flags.hydra_help:
        return list(arguments)
    ordered = _overrides_first(arguments, flags.overrides)
    added = [] if flags.cfg or flags.info or flags.help else compose.added_sweep(flags.overrides)
    if flags.multirun or added:
        for overrides in compose.sweep([*flags.overrides, *added]):
            if compose.compose(overrides).resume is not None:
                raise UserError("resume goes on with one run; leave -m away")
        return [*flags.overrides, *added, *ordered[len(flags.overrides) :], *["-m"] * (not flags.multirun)]
    config = compose.compose(flags.overrides)
    if config.resume is None or flags.cfg or flags.info or flags.help:
        return ordered
    return resumed(Path(config.resume), flags.overrides)


def _overrides_first(arguments: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The same arguments with the overrides in one row: Hydra takes no flag between them."""
    flags = list(arguments)
    for override in overrides:
        flags.remove(override)
    return [*overrides, *flags]


def resumed(folder: Path, overrides: Sequence[str]) -> list[str]:
    """The overrides of the run in `folder`, then the new ones, in the same folder. Raises UserError."""
    told = folder / OVERRIDES
    if not told.is_file() or not (folder / "checkpoints" / "last.pt").is_file():
        raise UserError(f"resume={folder}: no run with a snapshot there; give a run folder, outputs/DATE/TIME-ID")
    before = [*map(str, OmegaConf.load(told))]
    if any(word.startswith("-") or word.lstrip("+~").startswith("hydra") for word in before):
        raise UserError(f"{told}: holds more than options; it is not as a run has written it")
    arguments = [*before, *overrides]
    now = compose.to_plain(compose.compose(arguments))
    config = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    assert isinstance(config, dict)
    refuse_changes(config, now)
    return [*arguments, _run_in(folder)]


def _run_in(folder: Path) -> str:
    """The override that makes `folder` the run's."""
    quoted = str(folder.resolve()).replace("\\", "\\\\").replace("'", "\\'")
    return f"hydra.run.dir='{quoted}'"


def _job_of_sweep(job: Job, config: Config, folder: Path, overrides: list[str]) -> int:
    """Run a sweep's job in a process of its own, so that nothing of it leaks into another. Returns its exit code.

    One that only predicts stays here: tensors without data leave nothing behind, and torch need not load again.
    """
    if not config.dry_run:
        script = Path(HydraConfig.get().runtime.cwd, sys.argv[0])
        code = process.run([sys.executable, str(script), *overrides, _run_in(folder)])
        if code == 0 or _has_ended(folder):
            return code
        OmegaConf.save(OmegaConf.create(overrides), folder / OVERRIDES)
        return _end(folder, f"failed: {process.fate(code)}", code)
    try:
        return _guarded(job, config, folder, overrides)
    except Exception:  # Hydra would tell it after the last job, and end the sweep with it
        traceback.print_exc()
        return 1


def _has_ended(folder: Path) -> bool:
    """Whether the run could still say how it ended."""
    status = folder / "STATUS"
    return status.is_file() and status.read_text() != "running\n"


def _guarded(job: Job, config: Config, folder: Path, overrides: list[str]) -> int:
    """Run the job; turn what can be foreseen into a last line, STATUS and an exit code."""
    if config.resume is None and (folder / "metrics.jsonl").exists():
        used = UserError(f"{folder}: holds a run already; choose another folder, or resume it")
        return _say(f"error: {used}", used.exit_code)
    said = [override for override in overrides if not override.startswith("resume=")]
    OmegaConf.save(OmegaConf.create(said), folder / OVERRIDES)
    try:
        job(config, folder)
    except (UserError, SnapshotError, NonFiniteLoss) as error:
        if config.resume is not None and not isinstance(error, NonFiniteLoss):
            return _say(f"error: {error}", error.exit_code)  # the run in the folder is as it was
        return _end(folder, f"error: {error}", error.exit_code)
    except LoaderError as error:
        return _end(folder, f"failed: {error}\n{_how_to_go_on(folder)}", error.exit_code)
    except OutOfMemory as error:
        return _end(folder, f"out of memory: {error}\n{_how_to_go_on(folder)}", error.exit_code)
    except KeyboardInterrupt:
        return _end(folder, f"interrupted; {_how_to_go_on(folder)}", INTERRUPTED)
    except Exception as error:
        if not is_out_of_memory(error):
            _end(folder, f"failed: {error!r}", 1)
            raise
        return _end(folder, f"out of memory: {str(error).splitlines()[0]}", OutOfMemory.exit_code)
    return _end(folder, None, 0)


def _how_to_go_on(folder: Path) -> str:
    if (folder / "checkpoints" / "last.pt").exists():
        return f"to go on: python train.py resume={shlex.quote(str(folder))}"
    return "there is no snapshot yet to go on from"


def _end(folder: Path, line: str | None, code: int) -> int:
    from unet3d import record

    record.end(folder, line or "done", code)
    return _say(line, code) if line else code


def _say(line: str, code: int) -> int:
    print(line, file=sys.stderr)
    return code


def _uid() -> str:
    return secrets.token_hex(3)
