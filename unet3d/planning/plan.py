"""A plan in the making, its file, and what follows from a data set's fingerprint or from the time."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, prod
from operator import attrgetter
from typing import Any

import numpy as np
import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf

from unet3d import build
from unet3d.base.errors import UserError, escaped
from unet3d.base.progress import duration
from unet3d.base.types import sizes_text
from unet3d.config.schema import Config
from unet3d.data.nifti import MAX_VOXELS
from unet3d.data.volume import MAX_GROWTH
from unet3d.model.architecture import COARSE, FINER_PERCENTILE, Spacing, median_shape, target_spacing
from unet3d.planning.fingerprint import Fingerprint
from unet3d.planning.steps import is_here, level_options, nnunet_plan, step_time
from unet3d.training.inference import even_corners

SPACING_VARIATION = 1.1  # Ratio of the spacings of cases from which on they are resampled.
FINER = 0.99  # Times the median: an axis below it has another percentile, and is not just rounded.
COARSER = 1.05  # Times the spacing, at once, while a run would refuse it.
DEFAULT_STEPS = 2000  # Without a time.
MOST_STEPS = 250_000  # nnU-Net's number.
FEW = 300  # Steps of a given time, below which a line warns.
VALIDATIONS = 2
MIRROR_SHARE = 0.1  # Of the time, at most, for validations that average over mirrorings.
FORWARD = 1 / 3  # Of the time of a step: backward takes two of them.
LONG = 10_000  # Steps from which on the learning rate is lower.
LONG_RATE = 1e-3
UNITS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}
AXES = ("x (left-right)", "y (back-front)", "z (down-up)")


@dataclass
class Draft:
    """Decisions so far, and what they follow from."""

    config: Config  # The run's, with what is decided so far; its model has channels and classes.
    given: Collection[str]  # Options of the command line, which stay as they are.
    fingerprint: Fingerprint
    budget: int  # Bytes.
    seconds: float | None  # That the run may take.
    options: dict[str, Any] = field(default_factory=dict)  # That the plan sets, by dotted name.
    promise: dict[str, Any] = field(default_factory=dict)  # What is predicted of the run.
    decisions: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # Of what the budget or the time left undone.

    @property
    def device(self) -> str:
        """Return the type of device that the run is for, cpu or cuda."""
        return build.device_type(self.config)

    @property
    def spacing(self) -> Spacing:
        """Return the spacing (mm) that the network sees, of the median case where it is as stored."""
        if self.config.data.spacing is None:
            return target_spacing(self.fingerprint.shapes, self.fingerprint.spacings)
        x, y, z = self.config.data.spacing
        return x, y, z

    @property
    def shape(self) -> Spacing:
        """Return the median shape (voxels) that the network sees."""
        return median_shape(self.fingerprint.shapes, self.fingerprint.spacings, self.spacing)

    def decide(self, name: str, choice: str, reason: str, instead: str = "") -> None:
        """Add a line; `instead`: the next best choice, "" without one."""
        next_best = f"; next best: {instead}" if instead else ""
        self.decisions.append(f"{name}: {choice}: {reason}{next_best}")

    def is_given(self, *names: str) -> bool:
        """Return whether the command line sets one of these options."""
        return any(name in self.given for name in names)

    def set(self, name: str, value: Any) -> None:
        """Set an option, of the config and of the plan, unless the command line does."""
        if name in self.given:
            return
        self.options[name] = value
        self.config = changed(self.config, name, value)

    def as_yaml(self, command: str) -> str:
        """Return the plan's file: what the command line gave, what was decided, and what is promised."""
        given = {name: attrgetter(name)(self.config) for name in sorted(self.given)}
        options = OmegaConf.create()
        for name, value in {**given, **self.options}.items():
            OmegaConf.update(options, name, value)
        content = {"options": OmegaConf.to_container(options), "promise": self.promise}
        text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=110)
        reasons = [f"# {escaped(decision)}" for decision in self.decisions]
        return "\n".join([f"# Written by: {escaped(command)}", *reasons, text])


def with_options(config: Config, options: Mapping[str, Any], given: Collection[str]) -> Config:
    """Return the config with other values of options, by their dotted names, but for those that are given."""
    for name, value in options.items():
        if name not in given:
            config = changed(config, name, value)
    return config


def changed(node: Any, name: str, value: Any) -> Any:
    """Return a config, or a group of its options, with another value of one option by its dotted name."""
    head, _, rest = name.partition(".")
    if not rest:
        return replace(node, **{head: value})
    return replace(node, **{head: changed(getattr(node, head), rest, value)})


def like_nnunet(config: Config, given: Collection[str], fingerprint: Fingerprint) -> tuple[Config, set[str]]:
    """Return the config as nnU-Net's planner would choose it, but for `given` options, and all that is then given.

    Raises UserError for a spacing that no run takes.
    """
    chosen = nnunet_plan(fingerprint.shapes, fingerprint.spacings, fingerprint.model["classes"])
    most = max(map(partial(growth, target=chosen.spacing), fingerprint.shapes, fingerprint.spacings))
    if most > MAX_GROWTH and "data.spacing" not in given:
        spacing = sizes_text(chosen.spacing)
        problem = f"{most:,.0f} times the voxels of a case, and a run takes {MAX_GROWTH} times at most"
        raise UserError(f"like=nnunet: a spacing of {spacing} mm makes {problem}; leave it out, or give data.spacing")
    options = {
        "data.spacing": list(chosen.spacing),
        "data.patch": list(chosen.patch),
        "model.features": chosen.levels.features,
        **level_options(chosen.levels),
        "batch": chosen.batch,
    }
    return with_options(config, options, given), {*given, *options}


def choose_spacing(draft: Draft) -> None:
    """Choose the spacing that cases are resampled to: as stored where they agree, else the target of the rules."""
    shapes = draft.fingerprint.shapes
    spacings = draft.fingerprint.spacings
    if draft.is_given("data.spacing"):
        spacing = draft.config.data.spacing
        draft.decide("spacing", "as stored" if spacing is None else f"{sizes_text(spacing)} mm", "as given")
        return
    if (np.max(spacings, axis=0) <= SPACING_VARIATION * np.min(spacings, axis=0)).all():
        reason = f"the cases' spacings differ by less than {SPACING_VARIATION - 1:.0%}: nothing is resampled"
        draft.set("data.spacing", None)
        draft.decide("spacing", "as stored", reason, f"data.spacing=[{_listed(draft.spacing)}]")
        return
    target = list(target_spacing(shapes, spacings))
    reason = "the median of the cases"
    for axis, median in enumerate(np.median(spacings, axis=0)):
        if target[axis] < FINER * median:
            coarse = f"where {median:.3g} mm, the median, is over {COARSE} times as coarse as the other axes"
            reason += f", and along {AXES[axis]}, {coarse}, the {FINER_PERCENTILE}th percentile"
    target = [_rounded(mm) for mm in target]
    taken = target
    while any(growth(shape, mm, taken) > MAX_GROWTH for shape, mm in zip(shapes, spacings, strict=True)):
        taken = [_rounded(COARSER * mm) for mm in taken]
    if taken != target:
        too_many = f"a case would be resampled to over {MAX_GROWTH} times its voxels"
        reason += f", {_listed(target)} mm, made coarser: {too_many}"
    draft.set("data.spacing", taken)
    draft.decide("spacing", f"{sizes_text(taken)} mm", reason, "data.spacing=null, as stored")


def growth(shape: Sequence[int], spacing: Sequence[float], target: Sequence[float]) -> float:
    """Return how many voxels a case has at a target spacing (mm), for each one at its spacing."""
    resampled = median_shape([shape], [spacing], target)
    return prod(resampled) / min(prod(shape), MAX_VOXELS / MAX_GROWTH)


def _rounded(mm: float) -> float:
    return float(f"{mm:.3g}")


def _listed(values: Sequence[float]) -> str:
    return ",".join(f"{value:.3g}" for value in values)


def choose_intensity(draft: Draft) -> None:
    """Choose the rule of intensities: data.intensity=ct also where no name says that the channels are CT."""
    if draft.is_given("data.intensity"):
        return
    channels = draft.fingerprint.channels
    are_named = all(channel.name.upper() == "CT" for channel in channels)
    is_ct = all(channel.is_ct_like for channel in channels)
    choice = "z-score per volume"
    instead = "data.intensity=none, as stored"
    if not is_ct and not are_named:
        has_ct = any(channel.is_ct_like for channel in channels)
        reason = "not every channel is CT" if has_ct else "no channel is CT"
    elif any(channel.foreground and channel.foreground[1] == 0 for channel in channels):
        draft.set("data.intensity", "zscore")
        reason = "the foreground has one value: on a scale of CT every image would become constant"
    else:
        choice = "one scale for all cases"
        instead = "data.intensity=zscore, each volume by its own mean"
        reason = "the data set calls every channel CT"
        if not are_named:
            draft.set("data.intensity", "ct")
            reason = "whole numbers, with air near -1000 and tissue above 0: CT, though no name says so"
    draft.decide("intensity", choice, reason, instead)


def choose_mirrors(draft: Draft) -> None:
    """Choose the axes that training mirrors: not those along which two classes always keep their order."""
    if draft.is_given("data.augment.mirror"):
        return
    ordered = draft.fingerprint.ordered_axes
    mirrored = [axis for axis in range(3) if axis not in ordered]
    draft.set("data.augment.mirror", mirrored)
    reason = "no two classes keep their order along an axis in all sampled cases"
    instead = "data.augment.mirror=[0]"
    if ordered:
        kept = f"along {_names(ordered)} two classes keep their order in all sampled cases"
        reason = f"{kept}: a mirrored patch would swap them"
        instead = "data.augment.mirror=[0,1,2]"
    draft.decide("mirroring", _names(mirrored) or "none", reason, instead)


def choose_rotation(draft: Draft) -> None:
    """Choose not to rotate patches where classes meet in a plane of voxels: a rotated one would show another cut."""
    cut = draft.fingerprint.cut_axes
    if not cut or draft.is_given("data.augment.rotation"):
        return
    usual = draft.config.data.augment.rotation
    draft.set("data.augment.rotation", 0.0)
    reason = f"across {_names(cut)} classes meet in a plane of voxels: a rotated patch would show another cut"
    draft.decide("rotation", "none", reason, f"data.augment.rotation={usual:g}")


def _names(axes: Sequence[int]) -> str:
    return ", ".join(AXES[axis] for axis in axes)


def seconds_of(text: str) -> float:
    """Return the seconds of `8h`, `90min`, `1.5 d`. Raises UserError."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|min|m|h|d)", text.strip().lower())
    if match is None or not float(match[1]):
        raise UserError(f"time={text}: give an amount and a unit, min, h or d, e.g. time=8h")
    return float(match[1]) * UNITS[match[2]]


def choose_steps(draft: Draft) -> None:
    """Choose steps and validations from a step that is measured here, if its device is."""
    if not is_here(draft.config):
        _set_steps(draft, DEFAULT_STEPS)
        reason = "the default: how long a step takes is unknown, since this machine has no such device"
        instead = "python -m unet3d plan ... time=8h, on the machine itself"
        draft.decide("steps", f"{draft.config.steps:,}", reason, instead)
        return
    seconds, basis = step_time(draft.config)
    each = f"{seconds:.3g} s each ({basis})"
    draft.promise["step_s"] = round(seconds, 4)
    validation = _mirrored_validation(draft, _validation_seconds(draft, seconds))
    steps = DEFAULT_STEPS
    reason = f"the default without time=; {each}"
    if draft.seconds is not None:
        left = draft.seconds - VALIDATIONS * validation
        steps = max(1, min(MOST_STEPS, int(left / seconds)))
        reason = f"{each}, and {VALIDATIONS} validations of {duration(validation)} (estimated)"
    if draft.is_given("steps"):
        reason = f"as given; {each}"
    _set_steps(draft, steps)
    steps = draft.config.steps
    total = steps * seconds + ceil(steps / (draft.config.eval_every or steps)) * validation
    draft.promise["seconds"] = round(total, 1)
    draft.decide("steps", f"{steps:,}", f"{reason}: {duration(total)} in all (predicted)")
    if draft.seconds is not None and steps < FEW and not draft.is_given("steps"):
        draft.warnings.append(f"steps: {steps} in {duration(draft.seconds)} are few to learn from; give more time")


def _mirrored_validation(draft: Draft, seconds: float) -> float:
    """Choose whether validations average over mirrorings, if there is a time; return the seconds that one takes.

    `seconds` is what one takes without.
    """
    mirrorings = 2 ** len(draft.config.data.augment.mirror)
    if draft.seconds is not None and not draft.is_given("inference.mirror"):
        is_mirrored = VALIDATIONS * seconds * mirrorings <= MIRROR_SHARE * draft.seconds
        draft.set("inference.mirror", is_mirrored)
        reason = f"with {mirrorings} passes a window a validation takes {duration(seconds * mirrorings)} (estimated)"
        choice = f"inference.mirror={is_mirrored}".lower()
        draft.decide("mirrored windows", choice, reason, f"inference.mirror={not is_mirrored}".lower())
    return seconds * mirrorings if draft.config.inference.mirror else seconds


def _set_steps(draft: Draft, steps: int) -> None:
    draft.set("steps", steps)
    draft.set("eval_every", ceil(draft.config.steps / VALIDATIONS))


def choose_rate(draft: Draft) -> None:
    """Choose the learning rate of AdamW's one cycle by the number of steps."""
    if draft.is_given("optim.lr", "optim.name", "optim.schedule"):
        draft.decide("learning rate", f"{draft.config.optim.lr:g}", "as given")
        return
    rate = draft.config.optim.lr
    if draft.config.steps >= LONG:
        rate = min(rate, LONG_RATE)
    draft.set("optim.lr", rate)
    kind = f"{draft.config.optim.name}, {draft.config.optim.schedule}"
    length = f"fewer than {LONG:,} steps" if draft.config.steps < LONG else f"{LONG:,} steps or more"
    reason = f"{kind}, of {length} (a rule of thumb, not measured)"
    draft.decide("learning rate", f"{rate:g}", reason, f"optim.lr={rate / 3:.2g}")


def _validation_seconds(draft: Draft, step_seconds: float) -> float:
    """Return the estimated seconds of a validation without mirrorings: its windows' forward passes."""
    config = draft.config
    windows = 0
    for shape, stored in draft.fingerprint.held_out:
        size = list(map(int, median_shape([shape], [stored], draft.spacing)))
        windows += prod(map(len, even_corners(size, config.data.patch, config.inference.overlap)))
    return windows * FORWARD * step_seconds / (config.batch * config.accumulate)
