"""A plan from a data set's fingerprint, a budget and a time: its decisions, and its file of plain values."""

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import yaml  # type: ignore[import-untyped]

from unet3d.base.errors import UserError, escaped
from unet3d.config.schema import Config
from unet3d.data.grids import MAX_GROWTH
from unet3d.planning.draft import Draft, changed, sizes_text
from unet3d.planning.fingerprint import Fingerprint
from unet3d.planning.for_budget import choose_precision, choose_step, plain_sizes
from unet3d.planning.for_time import choose_steps
from unet3d.planning.from_fingerprint import (
    choose_intensity,
    choose_mirrors,
    choose_rotation,
    choose_spacing,
    growth,
)
from unet3d.planning.nnunet import nnunet_plan
from unet3d.planning.reasons import note_step

ACTIVATION = "leaky_relu"


def make_plan(
    config: Config,
    given: Collection[str],
    fingerprint: Fingerprint,
    budget: int,
    seconds: float | None = None,
) -> Draft:
    """Return the plan of a run in `budget` bytes and, if given, so many seconds; `given` options stay as they are.

    Raises UserError where no patch fits.
    """
    model = replace(config.model, **fingerprint.model)
    draft = Draft(replace(config, model=model), given, fingerprint, budget, seconds)
    draft.set("model.activation", ACTIVATION)
    choose_spacing(draft)
    choose_intensity(draft)
    choose_mirrors(draft)
    choose_rotation(draft)
    choose_precision(draft)
    note_step(draft, choose_step(draft))
    choose_steps(draft)
    return draft


def like_nnunet(config: Config, given: Collection[str], fingerprint: Fingerprint) -> tuple[Config, set[str]]:
    """Return the config as nnU-Net's planner would choose it, but for `given` options, and all that is then given.

    Raises UserError for a spacing that no run takes.
    """
    chosen = nnunet_plan(
        fingerprint.shapes,
        fingerprint.spacings,
        fingerprint.model["classes"],
        cases=fingerprint.cases,
    )
    most = max(map(partial(growth, target=chosen.spacing), fingerprint.shapes, fingerprint.spacings))
    if most > MAX_GROWTH and "data.spacing" not in given:
        spacing = sizes_text(chosen.spacing)
        problem = f"{most:,.0f} times the voxels of a case, and a run takes {MAX_GROWTH} times at most"
        raise UserError(f"like=nnunet: a spacing of {spacing} mm makes {problem}; leave it out, or give data.spacing")
    options = {
        "data.spacing": list(chosen.spacing),
        "data.patch": list(chosen.patch),
        "model.features": chosen.levels.features,
        "model.kernels": plain_sizes(chosen.levels.kernels, 3),
        "model.strides": plain_sizes(chosen.levels.strides, 2),
        "batch": chosen.batch,
    }
    for name, value in options.items():
        if name not in given:
            config = changed(config, name, value)
    return config, {*given, *options}


def decision_lines(draft: Draft) -> list[str]:
    """Return a line for each decision: its choice, its reason, and the next best choice."""
    lines = []
    for name, choice, reason, instead in draft.decisions:
        next_best = f"; next best: {instead}" if instead else ""
        lines.append(f"{name}: {choice}: {reason}{next_best}")
    return lines


def as_yaml(draft: Draft, command: str) -> str:
    """Return the plan's file: what the command line gave, what was decided, and what is promised."""
    values = {name: _value(draft.config, name) for name in sorted(draft.given)}
    options: dict[str, Any] = {}
    for name, value in {**values, **draft.options}.items():
        *groups, last = name.split(".")
        place = options
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = value
    content = {"options": options, "promise": draft.promise}
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=110)
    reasons = [f"# {escaped(line)}" for line in decision_lines(draft)]
    return "\n".join([f"# Written by: {escaped(command)}", *reasons, text])


def _value(node: Any, name: str) -> Any:
    """Return an option of a config by its dotted name."""
    for part in name.split("."):
        node = getattr(node, part)
    return node
