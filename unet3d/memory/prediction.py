"""Memory before a run: estimates of configs, and what a run prints before it starts."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.base.progress import counting
from unet3d.base.types import host_bytes, mib
from unet3d.config import compose
from unet3d.config.schema import Config, Model
from unet3d.memory.allocator import read_settings
from unet3d.memory.fake_tensors import fake_mode
from unet3d.memory.ledger import Ledger
from unet3d.memory.meter import MEASURED_STEPS, STEPS_FOR_PEAK, LedgerMeter
from unet3d.memory.peak import Peak, peak_of
from unet3d.memory.remedies import refuse_over_budget, refuse_over_card
from unet3d.memory.simulate import fake_batch, fake_model, simulate, validation_peak
from unet3d.memory.tables import (
    SavedSchedule,
    cuda_sizes,
    guessed,
    moment,
    peak_location,
    predicted_kind,
    replayed,
    sentence,
    with_workspaces,
)
from unet3d.memory.technique import choose_technique, saved, step_peak, window_program
from unet3d.memory.variants import PASSES, Candidate
from unet3d.recomputing.plans import Technique, work_line
from unet3d.recomputing.program import Program
from unet3d.training import switches

ADAM = 16  # bytes per parameter in float32: weight 4, gradient 4, two moments 8


class LayerCount(NamedTuple):
    """One module in one forward pass; counts are elements, `output_bytes` bytes of the output map."""

    module: str
    parameters: int  # its own, not its children's
    inputs: int
    outputs: int
    output_bytes: int
    is_leaf: bool
    is_in_place: bool


def layer_counts(model: nn.Module, forward: Callable[[], Any]) -> list[LayerCount]:
    """Run `forward` once, which runs `model`, and count every module's input and output in the order they finish."""
    counts: list[LayerCount] = []

    def count(path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        output_map = _first_tensor(output)
        counts.append(
            LayerCount(
                module=path,
                parameters=sum(p.numel() for p in module.parameters(recurse=False)),
                inputs=_first_tensor(inputs).numel(),
                outputs=output_map.numel(),
                output_bytes=output_map.nbytes,
                is_leaf=not any(module.children()),
                is_in_place=bool(getattr(module, "inplace", False)),
            )
        )

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            hook = module.register_forward_hook(partial(count, path))
            hooks.enter_context(hook)
        forward()
    return counts


def _first_tensor(tree: Any) -> Tensor:
    """Return the map that flows on, empty without one; skips that a state also carries are other modules' outputs."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            return leaf
    return torch.empty(0)


def usual_estimates(counts: Sequence[LayerCount], parameters: int, weights: int, saved: int) -> dict[str, int]:
    """Return bytes by estimate.

    `weights`: bytes of the parameters; `saved`: bytes that autograd holds as backward begins.
    """
    leaves = [count for count in counts if count.is_leaf]
    all_outputs = sum(count.output_bytes for count in counts)
    leaf_outputs = sum(count.output_bytes for count in leaves)
    new_outputs = sum(count.output_bytes for count in leaves if not count.is_in_place)
    weighted_outputs = sum(count.output_bytes for count in leaves if count.parameters)
    return {
        "4 x parameters (weights, gradients, Adam)": 4 * weights,
        "modelsize, forward: weights + outputs of layers": weights + new_outputs,
        "modelsize, with backward: weights + 2 x those": weights + 2 * new_outputs,
        "torchinfo: weights + 2 x outputs of layers with weights": weights + 2 * weighted_outputs,
        "hooks: 16 B/parameter + outputs of layers": ADAM * parameters + leaf_outputs,
        "hooks: 16 B/parameter + outputs of all modules": ADAM * parameters + all_outputs,
        "16 B/parameter + what autograd saves": ADAM * parameters + saved,
    }


@dataclass(frozen=True)
class MemoryEstimate:
    """One network at one patch, batch and policy. `dtype` is the type of weights and images.

    STEPS_FOR_PEAK steps are enough for a peak.
    """

    name: str
    config: Config
    options: Model
    dtype: torch.dtype = torch.float32
    steps: int = MEASURED_STEPS
    before: SavedSchedule | None = None  # of the run that is resumed

    @cached_property
    def technique(self) -> Technique:
        return choose_technique(self.config, self.options, self.dtype, self.before)

    @cached_property
    def meter(self) -> LedgerMeter:
        return simulate(self.config, self.options, self.technique, self.dtype, steps=self.steps)

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

    @cached_property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.meter.model.parameters())

    @property
    def saved(self) -> int:
        """Return the bytes that autograd holds as the last backward begins."""
        last_starts = {name: start for start, name in self.ledger.marks}
        return self.ledger.categories_at(last_starts["backward"])["activations"]

    def without(self) -> dict[str, int]:
        """Return the peak without each memory option that the step uses, in bytes."""
        if self.dtype is not torch.float32:
            return {}
        return peaks_without(self.config, self.options, self.technique)

    @property
    def stages(self) -> list[str]:
        """Return the names of the network's stages."""
        return [name for name, _ in self.meter.model.named_children()]

    @property
    def candidate(self) -> Candidate:
        """Return the step as a search for what fits sees it."""
        return Candidate(
            overrides=(),
            changes="nothing",
            config=self.config,
            model=self.options,
            step=self.step,
            step_recompute_fraction=self.technique.forward_recompute_fraction / PASSES,
        )

    def counts(self) -> list[LayerCount]:
        """Return every module's input and output in one forward pass without checkpointing."""
        with fake_mode(build.device_type(self.config)):
            policy = build.policy(self.config, "cpu")
            model = fake_model(self.config, self.options, self.dtype)
            image = fake_batch(self.config, self.options, self.dtype).image
            return layer_counts(model, lambda: policy.forward(model, image))


def peaks_without(config: Config, model_config: Model, technique: Technique) -> dict[str, int]:
    """Return the peak of the same step without each memory option that it uses, in bytes, by its override.

    With `recompute=auto` it is that option alone: another step would follow another schedule.
    """
    peaks = {}
    parts = config.accumulate
    has_program = technique.program is not None
    is_comparable = not has_program or config.recompute != "auto"
    if config.amp and is_comparable:
        peaks["amp=true"] = _peak_alike(technique, replace(config, amp=False), model_config)
    if parts > 1 and is_comparable:
        together = replace(config, batch=config.batch * parts, accumulate=1)
        peaks[f"accumulate={parts}"] = _peak_alike(technique, together, model_config)
    plain = replace(config, recompute="none", ckpt=0)
    if technique.segment_starts:
        peaks[f"ckpt={config.ckpt}"] = step_peak(plain, model_config).tensors
    if has_program:
        peaks[f"recompute={config.recompute}"] = step_peak(plain, model_config).tensors
    return peaks


def _peak_alike(technique: Technique, config: Config, model_config: Model) -> int:
    """Return the peak of a config with the same segments, or a program of the same plan for its own maps."""
    if technique.program is not None:
        technique = choose_technique(config, model_config)
    return step_peak(config, model_config, technique).tensors


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
    dtype = torch.float16 if half else torch.float32
    return MemoryEstimate(name, config, model_config, dtype)


class Validation(NamedTuple):
    """A prediction of what a validation needs."""

    bytes: int  # at most
    windows: int  # that a pass sees at once
    is_by_program: bool = False  # passes follow a program of their own


class Preflight(NamedTuple):
    """The result of `preflight`: how the step saves memory, and memory.json's first entries.

    Ranks send it to each other.
    """

    segment_starts: tuple[int, ...]  # the first stage of each checkpointed segment
    schedule: SavedSchedule | None  # of recompute
    memory: dict[str, Any]

    def technique(self, config: Config, model_config: Model) -> Technique:
        """Return what a rank's step does."""
        if self.schedule is None:
            return Technique(self.segment_starts)
        technique = choose_technique(config, model_config, before=self.schedule)
        if self.schedule.windows:
            technique = technique._replace(window_program=window_program(config, model_config))
        return technique


def preflight(config: Config, model_config: Model, before: SavedSchedule | None = None) -> Preflight:
    """Simulate the step and a validation window, and print what they need.

    `before` is the schedule of the run that is resumed. Raises UserError beyond `budget`.
    """
    if not config.dry_run:
        build.device(config)
    is_cuda = build.device_type(config) == "cuda"
    steps = MEASURED_STEPS if is_cuda else STEPS_FOR_PEAK  # an allocator settles later
    subject = MemoryEstimate("run", config, model_config, steps=steps, before=before)
    with counting("predicting memory", 2) as counter:
        ledger = subject.ledger
        counter.advance()
        if is_cuda:
            _warn_of_known_bad(config, ledger)
        _print_step(subject)
        if is_cuda:
            _replay_allocator(subject)
        refuse_over_budget(subject.candidate)
        validation = _fit_validation(subject)
        without = subject.without()
        location = peak_location(subject.entry)
        print(sentence(location, subject.step.tensors))
        _print_options(subject, without)
        _print_validation(subject, validation)
        if not is_cuda and max(subject.step.tensors, validation.bytes) > host_bytes():
            print(f"this machine has {mib(host_bytes())} MiB of memory, which is less", flush=True)
        counter.advance()
    technique = subject.technique
    segments = [subject.stages[start] for start in technique.segment_starts]
    if technique.program is not None:
        segments.append(recompute_line(config, technique.program))
    memory: dict[str, Any] = {
        "parameters": subject.parameters,
        "predicted": subject.entry,
        "advice": location,
        "predicted_validation_bytes": validation.bytes,
        "without": without,
        "segments": segments,
    }
    if subject.options.output_regions is not None:
        memory["regions"] = len(subject.options.output_regions.labels)
    schedule = None
    if technique.program is not None:
        schedule = saved(config, technique.program, validation.is_by_program)
        memory["schedule"] = schedule._asdict()
    return Preflight(technique.segment_starts, schedule, memory)


def _warn_of_known_bad(config: Config, ledger: Ledger) -> None:
    """Warn of a fault of the installed libraries in what the step runs on CUDA."""
    dtype = build.policy(config, "cuda").dtype
    warning = switches.cudnn_warning(dtype, ledger.largest_map)
    if warning is not None:
        print(f"warning: {warning}", file=sys.stderr, flush=True)


def _print_step(subject: MemoryEstimate) -> None:
    """Print the predicted peak of the step, and what the prediction leaves out."""
    entry = subject.entry
    config = subject.config
    peak = f"predicted peak of a step {mib(subject.step.tensors)} MiB ({predicted_kind(entry)}), {moment(entry)}"
    print(f"{subject.parameters:,} parameters; {peak}", flush=True)
    if entry.get("guesses"):
        print(guessed(entry), flush=True)
    for line in left_out(config):
        print(line, flush=True)


def left_out(config: Config) -> Iterator[str]:
    """Yield what a prediction for the config leaves out, a line each."""
    if config.compile:
        yield "predicted without compile=true: compiled steps need more or less, which is not known"
    is_cuda = build.device_type(config) == "cuda"
    has_batch_norm = config.model.path or config.model.norm.startswith("batch")
    if config.channels_last and is_cuda and has_batch_norm:
        yield "predicted without the scratch memory that batch norm takes in channels last"


def _replay_allocator(subject: MemoryEstimate) -> None:
    """Add to the entry what CUDA's allocator would hold for the step, and print it."""
    entry = subject.entry
    _, left_out = read_settings(os.environ)
    entry |= {"allocated_bytes": subject.step.allocated, "reserved_bytes": subject.step.reserved}
    print(with_workspaces(entry), replayed(entry), cuda_sizes(entry), *left_out, sep="\n", flush=True)


def _fit_validation(subject: MemoryEstimate) -> Validation:
    """Return what a validation needs.

    Raises UserError where the step or the validation does not fit a GPU's free memory.
    """
    config = subject.config
    validation = _smallest_validation(subject)
    if build.device_type(config) != "cuda" or config.dry_run:
        return validation
    free, total = torch.cuda.mem_get_info(build.device(config))
    is_auto = config.inference.batch == "auto"
    if validation.bytes > free and is_auto and validation.windows > 1:  # a run then sees fewer at once
        single = replace(config, inference=replace(config.inference, batch=1))
        validation = Validation(validation_peak(single, subject.options, _optimizer_bytes(subject)), 1)
    refuse_over_card(subject.candidate, validation.bytes, validation.windows, free, total)
    return validation


def _smallest_validation(subject: MemoryEstimate) -> Validation:
    """Return what a validation needs."""
    windows = build.windows(subject.config, [subject.meter.model])
    return smallest_validation(
        subject.config, subject.options, subject.technique, subject.step.tensors, _optimizer_bytes(subject), windows
    )


def smallest_validation(
    config: Config,
    model_config: Model,
    technique: Technique,
    step_bytes: int,
    optimizer_bytes: int,
    windows: int = 1,
) -> Validation:
    """Return what a validation of so many windows at once needs, beside the bytes of the optimizer's state.

    With recompute, its passes follow a program where they would need more than the step's bytes.
    """
    peak = validation_peak(config, model_config, optimizer_bytes)
    plain = Validation(peak, windows)
    if technique.program is None or windows > 1 or peak <= step_bytes:
        return plain
    by_program = Technique(window_program=window_program(config, model_config))
    peak_by_program = validation_peak(config, model_config, optimizer_bytes, by_program)
    return Validation(peak_by_program, windows, is_by_program=True) if peak_by_program < peak else plain


def _optimizer_bytes(subject: MemoryEstimate) -> int:
    size: int = subject.entry["state"]["optimizer"]
    return size


def _print_options(subject: MemoryEstimate, without: dict[str, int]) -> None:
    """Print what the memory options of the step save, and how it runs with them."""
    if without:
        peaks = [f"without {option}: {mib(size)}" for option, size in without.items()]
        print(f"{', '.join(peaks)} MiB (predicted)")
    technique = subject.technique
    if technique.segment_starts:
        print(segment_line(subject.stages, technique.segment_starts))
    if technique.program is not None:
        print(recompute_line(subject.config, technique.program))
    sys.stdout.flush()


def _print_validation(subject: MemoryEstimate, validation: Validation) -> None:
    """Print what a validation needs, if that is more than the step."""
    if validation.bytes <= subject.step.tensors:
        return
    times = f", {validation.windows} windows at once" if validation.windows > 1 else ""
    print(f"validation needs more than a step: {mib(validation.bytes)} MiB (predicted){times}", flush=True)
    if build.device_type(subject.config) == "cuda":
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
