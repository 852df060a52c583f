"""One training from its config to its report: everything that it needs is built in order, then it runs. Loads torch."""

import functools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

from unet3d import build
from unet3d.base import ranks, signals
from unet3d.base.errors import UserError, warn
from unet3d.base.files import write_json
from unet3d.base.signals import Stop
from unet3d.config import compose, rules
from unet3d.config.compose import read_plan
from unet3d.config.schema import GENERATED, Config, Model
from unet3d.data.cases import read_dataset
from unet3d.data.check import mostly_padding, read_grids
from unet3d.data.grids import Grid
from unet3d.data.prepare import PreparedData, prepare_data
from unet3d.data.splits import split
from unet3d.memory import prediction
from unet3d.memory.meter import MEASURED_STEPS, LedgerMeter, open_meter
from unet3d.memory.tables import SavedSchedule
from unet3d.model.unet import UNet3D
from unet3d.recomputing.plans import Technique
from unet3d.recomputing.prepare import bound
from unet3d.recomputing.program import Program
from unet3d.report import report, summary
from unet3d.report.loggers import Loggers, TerminalLogger, open_loggers
from unet3d.report.summary import plan_entry
from unet3d.run import run_folder
from unet3d.run.predict import Segmenter, fitted_predictor
from unet3d.run.pretrained import PretrainedWeights, load_pretrained
from unet3d.run.record import RunRecord, read_run
from unet3d.run.run import Run
from unet3d.run.run_folder import MemoryFile
from unet3d.run.training_state import CheckpointManager, TrainingState, fingerprint, seed_per_rank
from unet3d.run.validation import Validator, has_own_grids
from unet3d.training import optim, switches
from unet3d.training.trainer import Learner, Trainer


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
        goes_on = config.resume is not None and config.recompute != "none"
        before = run_folder.saved_schedule(folder) if goes_on else None
        predicted = ranks.on_rank0(lambda: _preflight(config, model_config, before))
        signals.raise_again()
        if data is None:
            ranks.on_rank0(lambda: MemoryFile(folder).update(predicted.memory))
            return
        technique = predicted.technique(config, model_config)
        with open_run(config, folder, data, model_config, technique, stop, start) as opened:
            record = _record_of(opened, predicted)
        if record is not None:
            signals.raise_again()
            report.write_page(record)
            summary.print_summary(record)


def _record_of(run: Run, predicted: prediction.Preflight) -> RunRecord | None:
    """Train to the last step and score; a run that is done gets its report alone, and None where it has that.

    None on all ranks but the first.
    """
    if run.is_done:
        print(f"nothing to do: step {run.start_step} of {run.config.steps} is done; to train longer, set steps=N")
        if (run.folder / "report.html").exists():  # else the run was killed as it wrote it
            return None
    else:
        ranks.on_rank0(lambda: run.memory.update(predicted.memory))
        run.fit()
    ranks.leave()
    if ranks.RANK:
        return None
    if not run.is_done:
        return run.finish()
    record = read_run(run.folder)
    report.draw_figures(record)
    return record


def _preflight(config: Config, model_config: Model, before: SavedSchedule | None) -> prediction.Preflight:
    """Return the prediction of the run, with what its plan promised, which a resumed run has in memory.json."""
    predicted = prediction.preflight(config, model_config, before)
    if config.plan is None or config.resume is not None:
        return predicted
    plan = read_plan(config.plan)
    values = compose.flat(compose.to_plain(config), ".")
    entry = plan_entry(plan.options, plan.promise, values)
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


def open_run(
    config: Config,
    folder: Path,
    data: PreparedData,
    model_config: Model,
    technique: Technique,
    stop: Stop,
    pretrained: PretrainedWeights | None,
) -> Run:
    """Build a run that goes on from its last checkpoint with `config.resume`, or begins with `pretrained` weights."""
    device = build.device(config)
    learner = _learner(config, data, model_config, technique, pretrained, device)
    predictor = fitted_predictor(config, [learner.model], model_config, learner.policy, device)
    segmenter = Segmenter(predictor, data.read.intensity, config.data, data.dataset.classes)
    rests_on = fingerprint(data, learner.policy.dtype)
    parts = (learner.model, learner.optimizer, learner.scaler)
    checkpoints = CheckpointManager(folder, TrainingState(config, model_config, rests_on, *parts, data.read.seen))
    step, last_validation = 0, 0
    if config.resume is None:
        seed_per_rank(config.seed, 0)
    else:
        step, last_validation = checkpoints.restore()
    memory = ranks.on_rank0(lambda: MemoryFile(folder, is_resumed=config.resume is not None))
    is_done = step >= config.steps and ranks.on_rank0(lambda: run_folder.is_done(folder))
    meter = open_meter(learner.model, learner.optimizer)
    loggers = Loggers([])
    if not is_done and ranks.RANK == 0:  # else its folder stays as it is
        loggers = _start_folder(config, folder, data, device, pretrained)
    trainer = Trainer(
        learner,
        learning_rate=functools.partial(optim.learning_rate, config.optim, config.steps),
        clip=config.optim.clip,
        mark=functools.partial(_mark, config, learner.model, meter),
        log=loggers.scalars,
        step=step,
        last_validation=last_validation,
    )
    validator = Validator(config, folder, data, segmenter, loggers, stop)
    return Run(
        config=config,
        folder=folder,
        data=data,
        stop=stop,
        trainer=trainer,
        validator=validator,
        checkpoints=checkpoints,
        meter=meter,
        loggers=loggers,
        memory=memory,
        start_step=step,
        is_done=is_done,
    )


def _learner(
    config: Config,
    data: PreparedData,
    model_config: Model,
    technique: Technique,
    pretrained: PretrainedWeights | None,
    device: torch.device,
) -> Learner:
    """Build the network on the device, and what updates it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # where page-locked memory and NCCL would else open a context on the first
    assert model_config.classes is not None
    loss = build.loss(config, model_config.classes, device, model_config.output_regions)
    policy = build.policy(config, device.type, technique)
    model = build.model(model_config, config.seed)
    if pretrained is not None:
        pretrained.load(model)
    model = build.prepare_for_ranks(policy.formatted(model.to(device)))
    optimizer = optim.optimizer(config.optim, model)
    if technique.program is not None:
        policy = replace(policy, program=_program_of(model.train(), technique.program, policy.dtype))
    if technique.window_program is not None:
        policy = replace(policy, window_program=_program_of(model.eval(), technique.window_program, policy.dtype))
    model.train()
    return Learner(model, loss, optimizer, policy.scaler(), policy)


def _program_of(model: nn.Module, program: Program, autocast: torch.dtype | None) -> Program:
    """Return the program for the run's own network, in its present mode.

    It was prepared for another object; of a user's network, another call may give other constants.
    """
    if isinstance(model, UNet3D) and all(parameter.requires_grad for parameter in model.parameters()):
        return program
    shape = program.maps.graph.image.shape
    image = torch.empty(shape, device=next(model.parameters()).device)
    return bound(program, model, image, autocast)


def _start_folder(
    config: Config,
    folder: Path,
    data: PreparedData,
    device: torch.device,
    pretrained: PretrainedWeights | None,
) -> Loggers:
    """Write what is known as a run begins or goes on; return its loggers."""
    record = pretrained.record() if pretrained is not None else None
    run_folder.start_folder(folder, compose.to_yaml(config), device, config.resume is not None, record)
    about = {
        "classes": data.dataset.classes,
        "channels": data.dataset.channels,
        "intensity": [asdict(rule) for rule in data.read.intensity],
        "ignore": data.dataset.ignore,
    }
    split = {"train": [case.id for case in data.train], "val": [case.id for case in data.val]}  # as data.split reads it
    write_json(folder / "split.json", {**split, "data": about})
    loggers = open_loggers(config, folder)
    grid = ""
    if has_own_grids(data, config.data):
        grid = f"at {run_folder.spacing_words(config.data.spacing)}"
    loggers.add(TerminalLogger(config.steps, switches=rules.switches_of(config), grid=grid))
    return loggers


def _mark(config: Config, model: nn.Module, meter: LedgerMeter, phase: str) -> None:
    """Tell the meter; compile the network once it has observed its steps: it would see no operations then."""
    meter.mark(phase)
    if config.compile and meter.steps >= MEASURED_STEPS and not switches.is_compiled(model):
        model.compile()
