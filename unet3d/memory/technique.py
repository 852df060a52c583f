"""How a step saves memory: its segments (`ckpt`) or the schedule of its program (`recompute`), and its peak by them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate, combinations, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.base.fit import fit
from unet3d.base.progress import track
from unet3d.base.types import budget_bytes
from unet3d.config.schema import Config, Loss, Model, Optim
from unet3d.memory.breakdown import last_step, stage_of
from unet3d.memory.fake_tensors import fake_mode
from unet3d.memory.ledger import Ledger
from unet3d.memory.meter import STEPS_FOR_PEAK, Peak, peak_of
from unet3d.memory.simulate import fake_batch, fake_model, memoized, simulate, step_key
from unet3d.recomputing import search
from unet3d.recomputing.prepare import has_larger_tiles, prepare
from unet3d.recomputing.program import PLAIN, Program, Technique, by_plan, without_backward
from unet3d.training import optim

CURVE_SCHEDULES = 8
OUTSIDE = ""  # The name of what is in no stage.
SegmentStarts = tuple[int, ...]  # the first stage of each checkpointed segment; () without checkpointing
StageInputs = dict[str, frozenset[int]]  # stage -> storages that enter it from another stage


def choose_technique(
    config: Config,
    model_config: Model,
    dtype: torch.dtype = torch.float32,
    before: Mapping[str, Any] | None = None,
    is_estimate: bool = False,
) -> Technique:
    """Return the segments of `ckpt`, or the program of `recompute`; a resumed run gets the schedule `before` again.

    `auto`: no program where the plain step fits into the budget, else the schedule of least work with which it fits;
    the one of least memory where none does. `dtype` is the type of weights and images; `is_estimate`: no step is
    simulated for the choice. Raises UserError where the network has neither, or cannot be traced.
    """
    if config.recompute == "none":
        return choose_segments(config, model_config)
    program = prepared(config, model_config, dtype)
    again = _as_before(config, program, before or {})
    if again is not None:
        return by_program(again)
    if config.recompute != "auto":
        return by_program(by_plan(program, config.recompute))
    assert config.budget is not None
    budget = budget_bytes(config.budget)
    techniques = [by_program(program.by(schedule)) for schedule in program.schedules]
    assert program.sizes is not None
    state = len(optim.state_names(config.optim) - {"step"}) * sum(program.sizes.of_weights)

    def guess(technique: Technique) -> int:
        assert technique.program is not None
        return technique.program.peak_bytes + state

    if is_estimate:
        number = fit(techniques, guess, budget)
    elif step_peak(replace(config, recompute="none"), model_config).limited <= budget:
        return PLAIN
    else:
        number = fit(techniques, lambda way: step_peak(config, model_config, way).limited, budget, guess)
    return techniques[-1 if number is None else number]


def step_peak(config: Config, model_config: Model, technique: Technique | None = None) -> Peak:
    """Return the peak of a step of a config; with a `technique` in place of the config's own, if one is given.

    Equal steps are simulated once. Raises UserError where the network does not have the technique.
    """
    if technique is None:
        technique = choose_technique(config, model_config)
    if technique == PLAIN:
        return profile_stages(step_key(config), model_config).step
    return _simulated(step_key(config), model_config, technique)


@memoized
def _simulated(config: Config, model_config: Model, technique: Technique) -> Peak:
    return peak_of(simulate(config, model_config, technique, steps=STEPS_FOR_PEAK).ledger)


def by_program(program: Program) -> Technique:
    """Return what a step does that follows a program."""
    return Technique(program=program, forward_recompute_fraction=max(0.0, program.schedule.work - 1))


def saved(config: Config, program: Program, by_windows: bool = False) -> dict[str, Any]:
    """Return the schedule of a program as memory.json has it; `by_windows`: validation follows a program, too.

    `keep` has the maps that stay after each stage, as bits of a hexadecimal number.
    """
    masks = [f"{stays:x}" for stays in program.schedule.keep]
    return {"recompute": config.recompute, "budget": config.budget, "keep": masks, "windows": by_windows}


def _as_before(config: Config, program: Program, before: Mapping[str, Any]) -> Program | None:
    """Return the program by a saved schedule; None for one of other options, or of another network."""
    sizes = program.sizes
    assert sizes is not None
    if any(before.get(name) != getattr(config, name) for name in ("recompute", "budget")):
        return None
    if len(before["keep"]) != sizes.count + 1:
        return None
    try:
        table = [int(mask, 16) & (1 << sizes.count) - 1 for mask in before["keep"]]
    except ValueError:
        return None
    return program.by(search.compile_schedule(sizes, table))


def some_schedules(config: Config, model_config: Model, dtype: torch.dtype = torch.float32) -> list[Technique]:
    """Return steps by some of the schedules of a config's network, evenly spaced in bytes, from the least work on."""
    program = prepared(config, model_config, dtype)
    bearable = [schedule for schedule in program.schedules if schedule.work <= search.MOST_WORK]
    most = bearable[0].peak_bytes
    least = bearable[-1].peak_bytes
    rooms = [most - (most - least) * number // (CURVE_SCHEDULES - 1) for number in range(CURVE_SCHEDULES)]
    numbers = dict.fromkeys(fit(bearable, lambda schedule: schedule.peak_bytes, room) for room in rooms)
    return [by_program(program.by(bearable[number])) for number in numbers if number is not None]


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
    return without_backward(_prepared(config, model_config, torch.float32, for_windows=True))


@memoized
def _prepared(config: Config, model_config: Model, dtype: torch.dtype, for_windows: bool = False) -> Program:
    """Return the program of a network without data, in training or for windows without gradients."""
    device_type = build.device_type(config)
    with torch.random.fork_rng([]), fake_mode(device_type):
        model = fake_model(config, model_config, dtype)
        image = fake_batch(config, model_config, dtype).image
    if for_windows:
        model.eval().requires_grad_(False)
        image = image[:1]
    else:
        for name, parameter in model.train().named_parameters():
            if optim.is_named(name, config.optim.init_names or ()):
                parameter.requires_grad_(False)
    return prepare(model, image, build.policy(config, "cpu").dtype, device_type == "cpu", config.recompute)


def choose_segments(config: Config, model_config: Model) -> Technique:
    """Return two to `ckpt` segments with the lowest peak: more never need more, so another may not help.

    Raises UserError where the network has fewer stages.
    """
    if not config.ckpt:
        return PLAIN
    profile = profile_stages(step_key(config), model_config)
    stages = len(profile.forward)
    if stages < config.ckpt:
        raise UserError(
            f"ckpt={config.ckpt} groups the stages of an nn.Sequential; this network has {stages}; "
            "use fewer, or 0 (off)"
        )

    def rank(way: Technique) -> tuple[int, float]:
        return ranking_peak(profile, way.segment_starts), way.forward_recompute_fraction

    def true_rank(way: Technique) -> tuple[int, float]:
        return step_peak(config, model_config, way).tensors, way.forward_recompute_fraction

    best = []
    for count in range(2, config.ckpt + 1):
        ways = []
        for later_starts in combinations(range(1, stages), count - 1):
            starts = (0, *later_starts)
            recomputed = sum(profile.flops[: starts[-1]]) / max(1, sum(profile.flops))
            ways.append(Technique(starts, forward_recompute_fraction=recomputed))
        best.append(min(ways, key=rank))
    return best[0] if len(best) == 1 else min(track(best, "segment choices", len(best)), key=true_rank)


class StageProfile:
    """The second step without checkpointing, by stage; bytes. Lists are empty where a network has no stages."""

    def __init__(self, ledger: Ledger, inputs: StageInputs) -> None:
        alive = ledger.alive_bytes()
        spans = {phase: range(start, end) for phase, start, end in last_step(ledger)}
        most = Counter[tuple[str, str]]()  # phase and stage -> most alive at its allocations
        begins: dict[tuple[str, str], int] = {}  # -> alive before the first of these
        for phase, events in spans.items():
            for event in events:
                index, change = ledger.events[event]
                stage = stage_of(ledger.storages[index].scope.module)
                place = phase, stage if stage in inputs else OUTSIDE
                if change > 0:
                    begins.setdefault(place, alive[event])
                    most[place] = max(most[place], alive[event + 1])
        forward = spans["forward"]
        flops = Counter[str]()
        for event, module, count in ledger.convolutions:
            if forward.start <= event <= forward.stop:
                flops[stage_of(module)] += count
        saved = Counter[str]()  # made since forward began, and alive as backward begins
        for storage in ledger.alive_at(spans["backward"].start):
            if storage.born >= forward.start and storage.role is None:
                saved[stage_of(storage.scope.module)] += storage.bytes
        self.step = peak_of(ledger)
        self.saved = list(accumulate((saved[stage] for stage in inputs), initial=0))  # By the stages before i.
        self.forward = [most["forward", stage] for stage in inputs]  # most alive while stage i runs forward
        self.backward = [most["backward", stage] for stage in inputs]  # most alive while stage i runs backward
        # Alive as stage i starts backward, minus the initial bytes and what stages 0 to i saved.
        self.waiting = []
        for stage, saved_until in zip(inputs, self.saved[1:], strict=True):
            before = alive[forward.start] + saved_until
            self.waiting.append(begins.get(("backward", stage), before) - before)
        highest = {phase: max(alive[events.start : events.stop + 1]) for phase, events in spans.items()}
        # Most alive in the loss, and in backward outside of all stages; in the optimizer's step and as data arrive.
        self.outside = max(highest["loss"], most["forward", OUTSIDE], most["backward", OUTSIDE])
        self.update = max(highest["step"], highest["data"])
        self.inputs = list(inputs.values())  # storages that enter stage i from another stage
        self.sizes = {index: ledger.storages[index].bytes for index in frozenset[int]().union(*self.inputs)}
        self.flops = [flops[stage] for stage in inputs]  # Of stage i's convolutions, forward.


@memoized
def profile_stages(config: Config, model_config: Model) -> StageProfile:
    """Simulate two steps without checkpointing and profile the second; `config` is a `step_key`."""
    inputs: StageInputs = {}

    def watch(model: nn.Module, ledger: Ledger) -> None:
        if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
            return
        for name, stage in model.named_children():
            inputs[name] = frozenset()
            if len(inputs) > 1:  # the image enters the first
                stage.register_forward_pre_hook(partial(note_inputs, name, ledger))

    def note_inputs(name: str, ledger: Ledger, stage: nn.Module, state: Any) -> None:
        inputs[name] = frozenset(ledger.index(leaf) for leaf in tree_leaves(state) if isinstance(leaf, Tensor))

    return StageProfile(simulate(config, model_config, watch=watch, steps=STEPS_FOR_PEAK).ledger, inputs)


def ranking_peak(profile: StageProfile, segment_starts: SegmentStarts) -> int:
    """Return about the most bytes of a step with these segments, near enough to tell a good split from a bad one.

    A recomputation stops as soon as it has what it needs, and autocast keeps the weights it cast through all of a
    forward pass: the profile knows neither. Off by -2 to +11 % of a simulation in `tests/memory/test_segments.py`.
    """
    count = len(profile.forward)
    input_storages = set[int]()  # Checkpointing keeps those of this segment and of earlier ones.
    peak = profile.update
    for start, end in pairwise([*segment_starts, count]):
        input_storages |= profile.inputs[start]
        freed = profile.saved[start] - sum(profile.sizes[index] for index in input_storages)
        waiting = profile.waiting[end - 1] if end < count else 0
        forward = max(profile.forward[start:end]) + waiting - freed
        backward = max(profile.backward[start:end]) - freed
        peak = max(peak, forward, backward)
        if end == count:
            peak = max(peak, profile.outside - freed)
    return peak
