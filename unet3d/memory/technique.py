"""How a step saves memory: its segments (`ckpt`) or the schedule of its program (`recompute`), and its peak by them."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.base.fit import fit
from unet3d.base.types import budget_bytes
from unet3d.config.schema import Config, Loss, Model, Optim
from unet3d.memory.fake_tensors import fake_mode
from unet3d.memory.meter import MEASURED_STEPS, STEPS_FOR_PEAK, LedgerMeter
from unet3d.memory.peak import Peak, peak_of
from unet3d.memory.segments import choose_segments, profile_stages
from unet3d.memory.simulate import fake_batch, fake_model, memoized, simulate, step_key
from unet3d.memory.tables import SavedSchedule
from unet3d.recomputing import search
from unet3d.recomputing.plans import PLAIN, Technique, by_plan, without_backward
from unet3d.recomputing.prepare import has_larger_tiles, prepare
from unet3d.recomputing.program import Program
from unet3d.recomputing.schedule import Schedule, compile_schedule
from unet3d.training import optim

CURVE_SCHEDULES = 8


def choose_technique(
    config: Config,
    model_config: Model,
    dtype: torch.dtype = torch.float32,
    before: SavedSchedule | None = None,
) -> Technique:
    """Return the segments of `ckpt`, or the program of `recompute`.

    `dtype` is the type of weights and images; `before` is the schedule of the run that is resumed. Raises UserError
    where the network has neither.
    """
    if config.recompute != "none":
        return choose_program(config, model_config, dtype, before)
    return choose_segments(config, model_config)


def step_peak(config: Config, model_config: Model, technique: Technique | None = None) -> Peak:
    """Return the peak of a step of a config; with a `technique` in place of the config's own, if one is given.

    Equal steps are simulated once. Raises UserError where the network does not have the technique.
    """
    if technique is None:
        technique = choose_technique(config, model_config)
    if technique == PLAIN:
        return profile_stages(config, model_config).step
    return _simulated(step_key(config), model_config, technique)


@memoized
def _simulated(config: Config, model_config: Model, technique: Technique) -> Peak:
    return peak_of(simulate(config, model_config, technique, steps=STEPS_FOR_PEAK).ledger)


def predicted(
    config: Config,
    model_config: Model,
    dtype: torch.dtype = torch.float32,
    steps: int = MEASURED_STEPS,
) -> LedgerMeter:
    """Return the meter with the ledger of the simulated steps. `dtype` is the type of weights and images."""
    return simulate(config, model_config, choose_technique(config, model_config, dtype), dtype, steps=steps)


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
        return by_program(again)
    if config.recompute != "auto":
        return by_program(by_plan(program, config.recompute))
    assert config.budget is not None
    budget = budget_bytes(config.budget)
    if step_peak(replace(config, recompute="none"), model_config).limited <= budget:
        return PLAIN
    techniques = [by_program(program.by(schedule)) for schedule in program.schedules]
    state = _state_bytes(config, program)

    def measure(technique: Technique) -> int:
        return step_peak(config, model_config, technique).limited

    def guess(technique: Technique) -> int:
        assert technique.program is not None
        return technique.program.peak_bytes + state

    number = fit(techniques, measure, budget, guess)
    return techniques[-1 if number is None else number]


def estimated_technique(config: Config, model_config: Model) -> Technique:
    """Return what `choose_technique` does, but the schedule of `recompute=auto` without a simulation.

    Raises UserError where the network has none.
    """
    if config.recompute != "auto":
        return choose_technique(config, model_config)
    assert config.budget is not None
    program = prepared(config, model_config)
    room = budget_bytes(config.budget) - program.fixed_bytes - _state_bytes(config, program)
    number = fit(program.schedules, lambda schedule: schedule.peak_bytes, room)
    return by_program(program.by(program.schedules[-1 if number is None else number]))


def _state_bytes(config: Config, program: Program) -> int:
    """Return about the bytes that the optimizer keeps."""
    assert program.sizes is not None
    kept = optim.state_names(config.optim) - {"step"}
    return len(kept) * sum(program.sizes.of_weights)


def by_program(program: Program) -> Technique:
    """Return what a step does that follows a program."""
    return Technique(program=program, forward_recompute_fraction=max(0.0, program.schedule.work - 1))


def saved(config: Config, program: Program, by_windows: bool = False) -> SavedSchedule:
    """Return the schedule of a program as memory.json has it; `by_windows`: validation follows a program, too."""
    masks = []
    for stays in program.schedule.keep:
        masks.append(f"{sum(1 << index for index in stays):x}")
    return SavedSchedule(config.recompute, config.budget, masks, by_windows)


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
    return program.by(compile_schedule(sizes, table))


def some_schedules(config: Config, model_config: Model, dtype: torch.dtype = torch.float32) -> list[Technique]:
    """Return steps by some of the schedules of a config's network, evenly spaced in bytes, from the least work on."""
    program = prepared(config, model_config, dtype)
    bearable = [schedule for schedule in program.schedules if schedule.work <= search.MOST_WORK]
    most = bearable[0].peak_bytes
    least = bearable[-1].peak_bytes
    chosen: list[Schedule] = []
    for number in range(CURVE_SCHEDULES):
        room = most - (most - least) * number // (CURVE_SCHEDULES - 1)
        first = fit(bearable, lambda schedule: schedule.peak_bytes, room)
        if first is not None and bearable[first] not in chosen:
            chosen.append(bearable[first])
    return [by_program(program.by(schedule)) for schedule in chosen]


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
