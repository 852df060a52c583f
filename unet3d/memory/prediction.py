"""Memory before a run: estimates of configs, and what a run prints before it starts."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unet3d import build
from unet3d.base.errors import UserError, warn
from unet3d.base.progress import counting
from unet3d.base.types import host_bytes, mib
from unet3d.config import compose
from unet3d.config.schema import Config, Model
from unet3d.memory import tables
from unet3d.memory.fake_tensors import fake_mode
from unet3d.memory.ledger import Ledger
from unet3d.memory.meter import MEASURED_STEPS, STEPS_FOR_PEAK, LedgerMeter, Peak, peak_of
from unet3d.memory.remedies import Candidate, refuse_over_budget, refuse_over_card
from unet3d.memory.simulate import fake_batch, fake_model, simulate, validation_peak
from unet3d.memory.technique import choose_technique, saved, step_peak, window_program
from unet3d.recomputing.program import PLAIN, Program, Technique, work_line
from unet3d.training import switches

ADAM = 16  # bytes per parameter in float32: weight 4, gradient 4, two moments 8


@dataclass(frozen=True)
class MemoryEstimate(Candidate):
    """One network at one patch, batch and policy, with the ledger of its steps. `dtype` is that of weights and images.

    STEPS_FOR_PEAK steps are enough for a peak.
    """

    name: str = "run"
    dtype: torch.dtype = torch.float32
    steps: int = MEASURED_STEPS
    before: Mapping[str, Any] | None = None  # The schedule of the run that is resumed.

    @cached_property
    def technique(self) -> Technique:
        return choose_technique(self.config, self.model, self.dtype, self.before)

    @cached_property
    def meter(self) -> LedgerMeter:
        return simulate(self.config, self.model, self.technique, self.dtype, steps=self.steps)

    @property
    def ledger(self) -> Ledger:
        return self.meter.ledger

    @cached_property
    def entry(self) -> dict[str, Any]:
        """Return what memory.json has under "predicted"."""
        return self.meter.summary()

    @cached_property
    def step(self) -> Peak:
        """Return the most bytes at once."""
        return peak_of(self.ledger)

    @property
    def parameters(self) -> int:
        return self.meter.parameters

    def without(self) -> dict[str, int]:
        """Return the peak without each memory option that the step uses, in bytes, by its override.

        With `recompute=auto` it is that option alone: another step would follow another schedule.
        """
        if self.dtype is not torch.float32:
            return {}
        config = self.config
        by_program = self.technique.program is not None
        way = None if by_program else self.technique  # another step has a program of the same plan for its own maps
        others: dict[str, tuple[Config, Technique | None]] = {}
        if not by_program or config.recompute != "auto":
            if config.amp:
                others["amp=true"] = replace(config, amp=False), way
            if config.accumulate > 1:
                whole = replace(config, batch=config.batch * config.accumulate, accumulate=1)
                others[f"accumulate={config.accumulate}"] = whole, way
        if self.technique != PLAIN:
            own = f"recompute={config.recompute}" if by_program else f"ckpt={config.ckpt}"
            others[own] = replace(config, recompute="none", ckpt=0), PLAIN
        return {name: step_peak(other, self.model, its_way).tensors for name, (other, its_way) in others.items()}


def usual_estimates(subject: MemoryEstimate) -> dict[str, int]:
    """Return bytes by estimate, from what modules return in one forward pass without checkpointing."""
    outputs = Counter[str]()

    def count(module: nn.Module, _: Any, output: Any) -> None:
        # The map that flows on comes first; skips that a state also carries are other modules' outputs.
        size = next((leaf.nbytes for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), 0)
        outputs["modules"] += size
        if any(module.children()):
            return
        outputs["layers"] += size
        if not getattr(module, "inplace", False):
            outputs["new"] += size
        if any(parameter.numel() for parameter in module.parameters()):
            outputs["weighted"] += size

    with fake_mode(build.device_type(subject.config)):
        policy = build.policy(subject.config, "cpu")
        model = fake_model(subject.config, subject.model, subject.dtype).train()
        for module in model.modules():
            module.register_forward_hook(count)
        policy.forward(model, fake_batch(subject.config, subject.model, subject.dtype).image)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    last_starts = {name: start for start, name in subject.ledger.marks}
    saved = subject.ledger.categories_at(last_starts["backward"])["activations"]
    adam = ADAM * subject.parameters
    return {
        "4 x parameters (weights, gradients, Adam)": 4 * weights,
        "modelsize, forward: weights + outputs of layers": weights + outputs["new"],
        "modelsize, with backward: weights + 2 x those": weights + 2 * outputs["new"],
        "torchinfo: weights + 2 x outputs of layers with weights": weights + 2 * outputs["weighted"],
        "hooks: 16 B/parameter + outputs of layers": adam + outputs["layers"],
        "hooks: 16 B/parameter + outputs of all modules": adam + outputs["modules"],
        "16 B/parameter + what autograd saves": adam + saved,
    }


def estimate(overrides: Sequence[str], half: bool) -> MemoryEstimate:
    """Return the memory of `python train.py OVERRIDES`; with `half`, weights and images are float16.

    Raises UserError.
    """
    composed = compose.compose_tree(overrides)
    config = compose.load(composed.options)
    if half and config.amp:
        raise UserError("--half makes the whole network half precision, which leaves nothing to amp=true; drop one")
    model_config = build.model_config_from_headers(config)
    name = model_config.path or composed.choice("model")
    return MemoryEstimate(config, model_config, name=name, dtype=torch.float16 if half else torch.float32)


class Validation(NamedTuple):
    """A prediction of what a validation needs."""

    bytes: int  # Most bytes at once.
    windows: int  # Windows that a pass sees at once.
    is_by_program: bool = False  # Passes follow a program, too.


class Preflight(NamedTuple):
    """The result of `preflight`: how the step saves memory, and memory.json's first entries.

    Ranks send it to each other.
    """

    segment_starts: tuple[int, ...]  # the first stage of each checkpointed segment
    memory: dict[str, Any]  # Its "schedule" is what recompute follows.

    def technique(self, config: Config, model_config: Model) -> Technique:
        """Return what a rank's step does."""
        schedule = self.memory.get("schedule")
        if schedule is None:
            return Technique(self.segment_starts)
        technique = choose_technique(config, model_config, before=schedule)
        if schedule["windows"]:
            technique = technique._replace(window_program=window_program(config, model_config))
        return technique


def preflight(config: Config, model_config: Model, before: Mapping[str, Any] | None = None) -> Preflight:
    """Simulate the step and a validation window, and print what they need.

    `before` is the schedule of the run that is resumed. Raises UserError beyond `budget`.
    """
    if not config.dry_run:
        build.device(config)
    is_cuda = build.device_type(config) == "cuda"
    steps = MEASURED_STEPS if is_cuda else STEPS_FOR_PEAK  # an allocator settles later
    subject = MemoryEstimate(config, model_config, steps=steps, before=before)
    with counting("predicting memory", 2) as counter:
        _ = subject.meter  # Simulates.
        counter.advance()
        _print_step(subject)
        refuse_over_budget(subject)
        validation = _fit_validation(subject)
        without = subject.without()
        location = tables.peak_location(subject.entry)
        print(tables.sentence(location, subject.step.tensors))
        if without:
            peaks = [f"without {option}: {mib(size)}" for option, size in without.items()]
            print(f"{', '.join(peaks)} MiB (predicted)")
        technique = subject.technique
        stages = [name for name, _ in subject.meter.model.named_children()]
        segments = [stages[start] for start in technique.segment_starts]
        memory: dict[str, Any] = {
            "parameters": subject.parameters,
            "predicted": subject.entry,
            "advice": location,
            "predicted_validation_bytes": validation.bytes,
            "without": without,
            "segments": segments,
        }
        if subject.model.output_regions is not None:
            memory["regions"] = len(subject.model.output_regions.labels)
        if segments:
            print(segment_line(stages, technique.segment_starts))
        if technique.program is not None:
            segments.append(recompute_line(config, technique.program))
            print(segments[-1])
            memory["schedule"] = saved(config, technique.program, validation.is_by_program)
        if validation.bytes > subject.step.tensors:
            _print_validation(validation, is_cuda)
        if not is_cuda and max(subject.step.tensors, validation.bytes) > host_bytes():
            print(f"this machine has {mib(host_bytes())} MiB of memory, which is less", flush=True)
        counter.advance()
    return Preflight(technique.segment_starts, memory)


def _print_step(subject: MemoryEstimate) -> None:
    """Print the predicted peak of the step, on CUDA also of its allocator, and what the prediction leaves out.

    And warn of a fault of the installed libraries in what the step runs on CUDA.
    """
    if subject.meter.for_gpu:
        dtype = build.policy(subject.config, "cuda").dtype
        warning = switches.cudnn_warning(dtype, subject.ledger.largest_map)
        if warning is not None:
            warn(warning)
    entry = subject.entry
    kind = tables.predicted_kind(entry)
    peak = f"predicted peak of a step {mib(subject.step.tensors)} MiB ({kind}), {tables.moment(entry)}"
    entry |= subject.step.of_allocator
    lines = [f"{subject.parameters:,} parameters; {peak}", *tables.guessed(subject.meter.guesses)]
    lines += [*left_out(subject.config), *tables.on_cuda(entry), *subject.meter.notes]
    print("\n".join(lines), flush=True)


def left_out(config: Config) -> Iterator[str]:
    """Yield what a prediction for the config leaves out, a line each."""
    if config.compile:
        yield "predicted without compile=true: compiled steps need more or less, which is not known"
    is_cuda = build.device_type(config) == "cuda"
    has_batch_norm = config.model.path or config.model.norm.startswith("batch")
    if config.channels_last and is_cuda and has_batch_norm:
        yield "predicted without the scratch memory that batch norm takes in channels last"


def _fit_validation(subject: MemoryEstimate) -> Validation:
    """Return what a validation needs.

    Raises UserError where the step or the validation does not fit a GPU's free memory.
    """
    config = subject.config
    optimizer_bytes: int = subject.entry["state"]["optimizer"]
    windows = build.windows(config, [subject.meter.model])
    validation = smallest_validation(subject, optimizer_bytes, windows)
    if build.device_type(config) != "cuda" or config.dry_run:
        return validation
    free, total = torch.cuda.mem_get_info(build.device(config))
    if validation.bytes > free and config.inference.batch == "auto" and windows > 1:  # a run then sees fewer at once
        single = replace(config, inference=replace(config.inference, batch=1))
        validation = Validation(validation_peak(single, subject.model, optimizer_bytes), 1)
    refuse_over_card(subject, validation.bytes, validation.windows, free, total)
    return validation


def smallest_validation(asked: Candidate, optimizer_bytes: int, windows: int = 1) -> Validation:
    """Return what a validation of `windows` windows at once needs, with the bytes of the optimizer's state.

    With recompute, its passes follow a program where they would need more than the step's bytes.
    """
    plain = Validation(validation_peak(asked.config, asked.model, optimizer_bytes), windows)
    if asked.technique.program is None or windows > 1 or plain.bytes <= asked.step.tensors:
        return plain
    by_program = Technique(window_program=window_program(asked.config, asked.model))
    needed = validation_peak(asked.config, asked.model, optimizer_bytes, by_program)
    return Validation(needed, windows, is_by_program=True) if needed < plain.bytes else plain


def _print_validation(validation: Validation, is_cuda: bool) -> None:
    """Print what a validation needs that needs more than the step."""
    times = f", {validation.windows} windows at once" if validation.windows > 1 else ""
    print(f"validation needs more than a step: {mib(validation.bytes)} MiB (predicted){times}", flush=True)
    if is_cuda:
        print("the sums of its windows are kept on the GPU only where they fit, otherwise in host memory", flush=True)


def recompute_line(config: Config, program: Program) -> str:
    """Return what a step by a program computes a second time, and what runs whole."""
    return f"recompute={config.recompute}: {work_line(program)}"


def segment_line(names: list[str], segment_starts: tuple[int, ...]) -> str:
    """Return `recomputed in backward: inc | down1 to up2; kept: up3, outc`, from the names of all stages."""
    segments = []
    for start, end in pairwise([*segment_starts, len(names)]):
        stages = names[start:end]
        segments.append(f"{stages[0]} to {stages[-1]}" if len(stages) > 2 else ", ".join(stages))
    *recomputed, last = segments
    return f"recomputed in backward: {' | '.join(recomputed)}; kept: {last}"
