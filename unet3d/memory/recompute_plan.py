"""The program of a config's network: its schedules, and which of them a run takes."""

from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.base.progress import track
from unet3d.base.types import budget_bytes
from unet3d.config.schema import Config, Loss, Model, Optim
from unet3d.memory.fake_tensors import fake_mode
from unet3d.memory.peak import step_peak
from unet3d.memory.simulate import fake_batch, fake_model, memoized, step_key
from unet3d.memory.stage_profile import profile_stages
from unet3d.recomputing import plans, search
from unet3d.recomputing.instructions import SavedSchedule
from unet3d.recomputing.plans import PLAIN, Technique, by_plan, without_backward
from unet3d.recomputing.prepare import has_larger_tiles, prepare
from unet3d.recomputing.program import Program
from unet3d.recomputing.schedule import compile_schedule, is_sound
from unet3d.training import optim

CURVE_POINTS = 8


def saved(config: Config, program: Program, by_windows: bool = False) -> SavedSchedule:
    """Return the schedule of a program as memory.json has it; `by_windows`: validation follows a program, too."""
    masks = []
    for stays in program.schedule.keep:
        masks.append(f"{sum(1 << index for index in stays):x}")
    return SavedSchedule(config.recompute, config.budget, masks, by_windows)


def choose_program(
    config: Config,
    model_config: Model,
    dtype: torch.dtype = torch.float32,
    before: SavedSchedule | None = None,
) -> Technique:
    """Return the program of `recompute`; a resumed run with the same options gets the schedule `before` again.

    `auto`: no program where the plain step fits into the budget, else the schedule of least work with which it fits;
    the one of least memory where none does. Raises UserError for a network that cannot be traced.
    """
    program = prepared(config, model_config, dtype)
    again = None if before is None else _as_before(config, program, before)
    if again is not None:
        return technique(again)
    if config.recompute != "auto":
        return technique(by_plan(program, config.recompute))
    assert config.budget is not None
    budget = budget_bytes(config.budget)
    if step_peak(replace(config, recompute="none"), model_config, PLAIN).occupied_bytes <= budget:
        return PLAIN
    return _within(config, model_config, program, budget)


def _as_before(config: Config, program: Program, before: SavedSchedule) -> Program | None:
    """Return the program by a saved schedule; None for one of other options, or of another network."""
    sizes = program.sizes
    assert sizes is not None
    if (before.recompute, before.budget) != (config.recompute, config.budget):
        return None
    if len(before.keep) != sizes.count + 1:
        return None
    table = []
    for mask in before.keep:
        try:
            bits = int(mask, 16)
        except ValueError:
            return None
        table.append({index for index in range(sizes.count) if bits >> index & 1})
    schedule = compile_schedule(sizes, table)
    return program.by(schedule) if is_sound(sizes, schedule) else None


def technique(program: Program) -> Technique:
    """Return what a step does that follows a program."""
    return Technique(program=program, forward_recompute_fraction=max(0.0, program.schedule.work - 1))


class CurvePoint(NamedTuple):
    """A schedule that could be taken."""

    work: float  # forward passes in a step; 1: no map is made twice
    peak_bytes: int  # of the simulated step


def curve(config: Config, model_config: Model, dtype: torch.dtype = torch.float32) -> list[CurvePoint]:
    """Return some of the schedules of a config's network, evenly spaced in bytes, from the least work on."""
    program = prepared(config, model_config, dtype)
    bearable = [schedule for schedule in program.schedules if schedule.work <= search.MOST_WORK]
    most = bearable[0].peak_bytes
    least = bearable[-1].peak_bytes
    chosen = []
    for number in range(CURVE_POINTS):
        room = most - (most - least) * number // (CURVE_POINTS - 1)
        schedule = plans.within(bearable, room)
        if schedule is not None and schedule not in chosen:
            chosen.append(schedule)
    points = []
    for schedule in track(chosen, "schedules", len(chosen)):
        peak = step_peak(config, model_config, technique(program.by(schedule)))
        points.append(CurvePoint(schedule.work, peak.peak_bytes))
    return points


def estimated_step(config: Config, model_config: Model) -> tuple[int, float]:
    """Return the estimated peak of a step with `recompute` (bytes), and the share of a forward pass that it recomputes.

    The loss's own tensors are left out; a peak early in backward is overestimated by the gradients of micro-batches
    before. Raises UserError where no schedule keeps the budget of `auto`.
    """
    program = prepared(config, model_config)
    profile = profile_stages(replace(config, recompute="none"), model_config)
    beside = profile.optimizer_state
    others = config.accumulate - 1
    if others:
        micro_batch = 0
        if build.device_type(config) == "cpu":
            voxels = build.patches_per_rank(config) * prod(config.data.patch)
            micro_batch = voxels * (4 * (model_config.in_channels or 0) + 2)
        assert program.sizes is not None
        gradients = sum(program.sizes.of_weights)
        beside += others * micro_batch + gradients
    budget = None if config.budget is None else budget_bytes(config.budget) - beside
    program = by_plan(program, config.recompute, budget)
    return max(profile.update, program.peak_bytes + beside), max(0.0, program.schedule.work - 1)


def prepared(config: Config, model_config: Model, dtype: torch.dtype = torch.float32) -> Program:
    """Return the program of a config's network without a choice of its schedule. Equal networks are traced once."""
    frozen = config.optim.init_names if config.optim.init_lr == 0 else None
    plan = config.recompute
    on_cpu = build.device_type(config) == "cpu"
    if not has_larger_tiles(plan, build.policy(config, "cpu").dtype or dtype, on_cpu):
        plan = "tiles"  # all other plans choose from the same schedules
    key = replace(step_key(config), optim=Optim(init_names=frozen), loss=Loss(), accumulate=1, recompute=plan)
    try:
        return _prepared(key, model_config, dtype)
    except UserError as error:
        raise UserError(f"recompute={config.recompute}: {error}") from error


@memoized
def window_program(config: Config, model_config: Model) -> Program:
    """Return the program of a validation's passes, each over one window."""
    model, image = _fakes(config, model_config, torch.float32)
    model.eval().requires_grad_(False)
    return without_backward(_prepare(config, model, image[:1]))


@memoized
def _prepared(config: Config, model_config: Model, dtype: torch.dtype) -> Program:
    model, image = _fakes(config, model_config, dtype)
    for name, parameter in model.train().named_parameters():
        if optim.is_named(name, config.optim.init_names or ()):
            parameter.requires_grad_(False)
    return _prepare(config, model, image)


def _fakes(config: Config, model_config: Model, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """Return the network and a micro-batch's image N C D H W, without data."""
    with torch.random.fork_rng([]), fake_mode(build.device_type(config)):
        return fake_model(config, model_config, dtype), fake_batch(config, model_config, dtype).image


def _prepare(config: Config, model: nn.Module, image: Tensor) -> Program:
    """Return the program of a network in its present mode, with the config's precision and device."""
    on_cpu = build.device_type(config) == "cpu"
    return prepare(model, image, build.policy(config, "cpu").dtype, on_cpu, config.recompute)


def _within(config: Config, model_config: Model, program: Program, budget: int) -> Technique:
    """Return a step by the schedule of least work that keeps the budget, or by that of least memory where none does."""
    chosen = program.by(plans.least_memory(program.schedules))
    excess = _occupied(config, model_config, chosen) - budget
    room = chosen.schedule.peak_bytes - excess
    while excess <= 0:
        schedule = plans.within(program.schedules, room)
        assert schedule is not None
        candidate = program.by(schedule)
        excess_of_candidate = _occupied(config, model_config, candidate) - budget
        if excess_of_candidate <= 0:
            return technique(candidate)
        room = min(room, schedule.peak_bytes) - max(1, excess_of_candidate)
        room = max(room, chosen.schedule.peak_bytes)
    return technique(chosen)


def _occupied(config: Config, model_config: Model, program: Program) -> int:
    """Return the bytes that a budget limits, of a step by a program."""
    return step_peak(config, model_config, technique(program)).occupied_bytes
