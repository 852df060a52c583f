"""Everything that a run needs, built in order: the network and what updates it, its state, folder and loggers."""

import functools
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unet3d import build
from unet3d.base import ranks
from unet3d.base.files import write_json
from unet3d.base.signals import Stop
from unet3d.config import compose, rules
from unet3d.config.schema import Config, Model
from unet3d.data.prepare import PreparedData
from unet3d.memory.meter import MEASURED_STEPS, LedgerMeter, open_meter
from unet3d.model.unet import UNet3D
from unet3d.recomputing.plans import Technique
from unet3d.recomputing.prepare import bound
from unet3d.recomputing.program import Program
from unet3d.report.loggers import Loggers, open_loggers
from unet3d.report.terminal_logger import TerminalLogger
from unet3d.run import run_folder
from unet3d.run.predict import fitted_predictor
from unet3d.run.pretrained import PretrainedWeights
from unet3d.run.run import Run
from unet3d.run.run_folder import MemoryFile
from unet3d.run.training_state import CheckpointManager, TrainingState, fingerprint, seed_per_rank
from unet3d.run.validation import Validator, has_own_grids
from unet3d.training import optim, switches
from unet3d.training.trainer import Learner, Trainer


def open_run(
    config: Config,
    folder: Path,
    data: PreparedData,
    model_config: Model,
    technique: Technique,
    stop: Stop,
    pretrained: PretrainedWeights | None = None,
) -> Run:
    """Build a run that goes on from its last checkpoint with `config.resume`, or begins with `pretrained` weights."""
    device = build.device(config)
    learner = _learner(config, data, model_config, technique, pretrained, device)
    predictor = fitted_predictor(config, [learner.model], model_config, learner.policy, device)
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
    return Run(
        config=config,
        folder=folder,
        data=data,
        model_config=model_config,
        stop=stop,
        trainer=trainer,
        validator=Validator(config, folder, data, learner.model, predictor, loggers, stop),
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
    is_known = isinstance(model, UNet3D) and all(parameter.requires_grad for parameter in model.parameters())
    if is_known:
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
    split = {"train": data.train, "val": data.val}  # as data.split reads it
    parts: dict[str, Any] = {use: [case.id for case in cases] for use, cases in split.items()}
    write_json(folder / "split.json", parts | {"data": _about_data(data)})
    loggers = open_loggers(config, folder)
    grid = ""
    if has_own_grids(data, config.data):
        grid = f"at {run_folder.spacing_words(config.data.spacing)}"
    loggers.add(TerminalLogger(config.steps, switches=rules.switches_of(config), grid=grid))
    return loggers


def _about_data(data: PreparedData) -> dict[str, Any]:
    """Return what of the data set the config does not say, for the report."""
    dataset = data.dataset
    return {
        "classes": dataset.classes,
        "channels": dataset.channels,
        "intensity": [asdict(rule) for rule in data.read.intensity],
        "ignore": dataset.ignore,
    }


def _mark(config: Config, model: nn.Module, meter: LedgerMeter, phase: str) -> None:
    """Tell the meter; compile the network once it has observed its steps: it would see no operations then."""
    meter.mark(phase)
    if config.compile and meter.steps >= MEASURED_STEPS and not switches.is_compiled(model):
        model.compile()
