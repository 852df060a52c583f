"""One training from its config to its report: everything that it needs is built in order, then it runs. Loads torch."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from unet3d import build
from unet3d.base import ranks, signals
from unet3d.base.errors import UserError, warn
from unet3d.base.signals import Stop
from unet3d.config import compose, rules
from unet3d.config.compose import read_plan
from unet3d.config.schema import GENERATED, Config, Model
from unet3d.data.cases import read_dataset
from unet3d.data.check import mostly_padding, read_grids
from unet3d.data.prepare import PreparedData, prepare_data
from unet3d.data.splits import split
from unet3d.data.volume import Grid
from unet3d.memory import prediction
from unet3d.memory.tables import SavedSchedule
from unet3d.report import report
from unet3d.report.report import plan_entry
from unet3d.run.pretrained import load_pretrained
from unet3d.run.record import RunRecord, read_run
from unet3d.run.run import Run
from unet3d.run.run_folder import MemoryFile, read_memory
from unet3d.training import switches


def run(config: Config, folder: Path, stop: Stop) -> None:
    """Train in the folder, in this process or on several ranks, which all call this. Ends early once `stop`."""
    if build.device_type(config) == "cuda":
        rules.refuse_indeterminate(config)
    for line in rules.warnings(config):
        warn(line)
    ranks.broadcast_job([compose.to_plain(config), str(folder.resolve())])
    joined = ranks.joined(build.device_type(config), config.rank_timeout)
    with switches.switched(config.cuda, config.deterministic), joined:
        build.import_all(config)  # a wrong path is answered now; tensors of an imported module are real, not fake ones
        data = None if config.dry_run else prepare_data(config.data)
        if data is None:
            model_config = ranks.on_rank0(lambda: build.model_config_from_headers(config))
        else:
            model_config = build.model_options(config, data.dataset, data.spacing)
        if config.resume is None and not ranks.RANK:
            _warn_of_patch(config, data)
        start = None
        if config.init is not None and config.resume is None:
            start = ranks.on_rank0(lambda: load_pretrained(config, model_config, data))
            config = start.config
        predicted = ranks.on_rank0(lambda: _preflight(config, model_config, folder))
        signals.raise_again()
        if data is None:
            ranks.on_rank0(lambda: MemoryFile(folder).update(predicted.memory))
            return
        technique = predicted.technique(config, model_config)
        with Run(config, folder, data, model_config, technique, stop, start) as opened:
            if not opened.is_done:
                ranks.on_rank0(lambda: opened.memory.update(predicted.memory))
                opened.fit()
            record = _record_of(opened)
        if record is not None:
            signals.raise_again()
            report.write_page(record)
            report.print_summary(record)


def _record_of(run: Run) -> RunRecord | None:
    """Score a run that has been trained; one that was done gets its report alone, and None where it has that.

    None on all ranks but the first.
    """
    if run.is_done:
        print(f"nothing to do: step {run.start_step} of {run.config.steps} is done; to train longer, set steps=N")
        if (run.folder / "report.html").exists():  # else the run was killed as it wrote it
            return None
    ranks.leave()
    if ranks.RANK:
        return None
    if not run.is_done:
        return run.finish()
    record = read_run(run.folder)
    report.draw_figures(record)
    return record


def _preflight(config: Config, model_config: Model, folder: Path) -> prediction.Preflight:
    """Return the prediction of the run, with what its plan promised, which a resumed run has in memory.json."""
    schedule = None
    if config.resume is not None and config.recompute != "none":
        schedule = read_memory(folder).get("schedule")
    predicted = prediction.preflight(config, model_config, schedule and SavedSchedule(**schedule))
    if config.plan is None or config.resume is not None:
        return predicted
    plan = read_plan(config.plan)
    entry = plan_entry(plan.options, plan.promise, compose.flat(compose.to_plain(config)))
    return predicted._replace(memory={**predicted.memory, "plan": entry})


def _warn_of_patch(config: Config, data: PreparedData | None) -> None:
    """Print a line where the patch is mostly padding in the training cases; a dry run reads their headers alone."""
    grids: Sequence[Grid] = () if data is None else data.train_grids
    if data is None and config.data.format not in GENERATED:
        with suppress(UserError):
            train, _ = split(read_dataset(config.data), config.data)
            grids = read_grids(train, config.data.spacing)
    advice = mostly_padding(config.model, config.data.patch, grids)
    if advice:
        warn(advice)
