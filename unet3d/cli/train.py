"""`unet3d train`: one line for a mistake, a run folder and an exit code for a job."""

import secrets
import shlex
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser  # the only place that knows which flags take a value
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from unet3d import checks, compose, ranks
from unet3d.cli import libraries, lifecycle, options
from unet3d.config import Config
from unet3d.errors import UserError, escaped, is_disk_full, make_room
from unet3d.files import read_yaml, refuse_links_out
from unet3d.signals import Stop

FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "resume")  # options that would else mean the current folder
FIRST_FILES = 2**16  # bytes, generously, of those that a run writes before it trains


def main() -> int:
    """Check what every job of the command line asks for, then run them. Returns the highest exit code of a sweep."""
    lifecycle.install_safe_streams()
    if ranks.RANK:
        return lifecycle.follow(job)
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(options.as_text())
        return 0
    OmegaConf.register_new_resolver("uid", lambda: secrets.token_hex(3), use_cache=True, replace=True)
    try:
        sys.argv[1:] = words = checked_arguments(sys.argv[1:])
        refuse_unwritable(words)
    except UserError as error:
        return lifecycle.say(f"error: {error}", error.exit_code)
    codes: list[int] = []
    swept: dict[Path, Config] = {}  # run folder -> config
    sweep_folder = Path()

    @hydra.main(str(compose.config_folder()), compose.CONFIG_NAME, compose.VERSION_BASE)
    def task(tree: DictConfig) -> None:
        nonlocal sweep_folder
        asked = HydraConfig.get()
        config = compose.load(tree) if tree.resume is None else resumed_config(Path(tree.resume), words)
        folder, overrides = Path(asked.runtime.output_dir), list(asked.overrides.task)
        if asked.mode != RunMode.MULTIRUN:
            with lifecycle.guarded(config, folder, overrides) as stop:
                job(config, folder, stop)
            return
        sweep_folder, swept[folder] = Path(asked.runtime.cwd, asked.sweep.dir), config
        print(f"job {asked.job.num}: {escaped(' '.join(overrides))}", flush=True)
        code, is_asked = job_of_sweep(config, folder, overrides)
        codes.append(code)
        if is_asked:
            command = f"python -m unet3d compare {shlex.quote(str(sweep_folder))}"
            sys.exit(lifecycle.say(f"sweep interrupted; to compare its finished jobs: {command}", code))

    task()
    if swept:
        from unet3d.report import compare

        try:
            compare.finish_sweep(swept, sweep_folder)
        except OSError as error:
            line = f"error: {sweep_folder}: the comparison is not saved ({error.strerror})"
            codes.append(lifecycle.say(line, UserError.exit_code))
    return max(codes, default=0)


def job(config: Config, folder: Path, stop: Stop) -> None:
    """One run in its folder, of this process or of several ranks, which all call this. Ends early once `stop`."""
    libraries.load_libraries()  # before torch and monai, which load here: a wrong option was answered before
    from unet3d import build

    for line in checks.warnings(config):
        lifecycle.say(f"warning: {line}")
    ranks.hand_over([compose.to_plain(config), str(folder.resolve())])
    with ranks.joined(build.target(config), config.rank_timeout):
        train(config, folder, stop)


def train(config: Config, folder: Path, stop: Stop) -> None:
    """Build the data, predict memory, build the run, fit; then the first rank alone predicts and reports."""
    from unet3d import build
    from unet3d.memory.preflight import preflight
    from unet3d.report import report, run_folder
    from unet3d.run.run import Run

    data = None if config.dry_run else build.data(config)
    network = build.model_options(config, data.dataset, data.train[0]) if data else build.outlined_options(config)
    predicted = ranks.on_first(lambda: preflight(build.of_rank(config), network))
    if data is None:
        ranks.on_first(lambda: run_folder.update_memory(folder, predicted.memory))
        return
    with Run(config, folder, data, network, predicted.segment_starts, stop) as run:
        if run.is_done:
            print(f"nothing to do: step {run.trainer.step} of {config.steps} is done; to train longer, set steps=N")
            if (folder / "report.html").exists():  # else the run was killed as it wrote it
                return
        else:
            ranks.on_first(lambda: run_folder.update_memory(folder, predicted.memory))
            run.fit()
        ranks.leave()
        if ranks.RANK:
            return
        if not run.is_done:
            run.finish()
    report.write_report(folder)
    report.print_summary(folder)


def job_of_sweep(config: Config, folder: Path, overrides: list[str]) -> tuple[int, bool]:
    """Run a sweep's job. Returns its exit code, and whether the sweep was asked to stop meanwhile."""
    if config.dry_run:  # in this process: fake tensors leave nothing behind, and torch need not load for each job
        try:
            with lifecycle.guarded(config, folder, overrides) as stop:
                job(config, folder, stop)
        except SystemExit as ended:
            return int(ended.code or 0), ended.code == lifecycle.INTERRUPTED
        return 0, False
    before, _ = lifecycle.status(folder)
    searched = [word for word in sys.argv if word.startswith("hydra.searchpath=")]
    words = [*overrides, *searched, lifecycle.path_option("hydra.run.dir", folder.resolve())]
    code, is_asked = lifecycle.run_process([sys.executable, "-m", "unet3d.cli.train", *words])
    after, text = lifecycle.status(folder)
    is_refused = code == UserError.exit_code and before == after != 0  # the run that is there stays as it is
    if code and not is_refused and (before == after or text == lifecycle.RUNNING):
        lifecycle.save_overrides(folder, overrides)
        line = f"failed: {lifecycle.fate(code)}"
        lifecycle.write_end(folder, line, lifecycle.say(line, code))
    return code, is_asked


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
    if asked and not (only_shows or flags.multirun) and (folder := compose.compose(asked).resume) is not None:
        if folder != "auto":
            return resumed(Path(folder), flags.overrides)
        place, flags.overrides = compose.run_folder(flags.overrides), [w for w in flags.overrides if w not in asked]
        if lifecycle.snapshots(place):
            return resumed(place, [*flags.overrides, lifecycle.path_option("resume", place)])
    added = compose.added_sweep(flags.overrides) * (not only_shows)  # composes each job, and so checks it
    if (flags.multirun or added) and ranks.SIZE > 1:
        raise UserError("torchrun starts one run, a sweep several; leave out one of them")
    if flags.multirun or added:
        for config in map(compose.compose, compose.sweep([*flags.overrides, *added])):
            if config.resume is not None or config.requeue:
                raise UserError("resume goes on with one run, as does a job with requeue=true; remove it, or -m")
        return [*flags.overrides, *added, *others, *["-m"] * (not flags.multirun)]
    return [*flags.overrides, *others]


def _refuse(message: str) -> NoReturn:
    """In place of argparse's, which prints every flag of Hydra."""
    raise UserError(f"{message}; options are written without dashes: batch=4")


def resumed(folder: Path, overrides: list[str]) -> list[str]:
    """The overrides, and the folder of the run that goes on. Raises UserError before anything is touched."""
    if not lifecycle.snapshots(folder):
        raise UserError(f"resume={folder}: no run with a snapshot there; give a run folder, outputs/DATE/TIME-ID")
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
