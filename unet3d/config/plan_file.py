"""A plan's file: options as plain values, and what was predicted of the run. Reading it imports nothing."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unet3d.base.errors import UserError
from unet3d.base.files import read_yaml_as_written
from unet3d.config.hydra_errors import nearest
from unet3d.config.schema import FACTS, flat, options_with
from unet3d.config.words import refuse_misread

SECTIONS = ("options", "promise")
PROMISED = {  # what a plan may promise of its run: the type of each
    "device": str,
    "peak_bytes": int,
    "allocated_bytes": int,
    "reserved_bytes": int,
    "validation_bytes": int,
    "step_s": float,
    "seconds": float,
}


@dataclass(frozen=True)
class PlanFile:
    """A plan that was read and checked."""

    options: Mapping[str, Any]  # by dotted name
    promise: Mapping[str, Any]  # of PROMISED, those that the planner knew

    def beside(self, given: Collection[str], values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that count beside those that are `given`, whose `values` come first.

        Kernels and strides of each level go where the given network has another depth.
        """
        left_out = set(given)
        features = self.options.get("model.features")
        if "model.features" in left_out and features and len(features) != len(values["model.features"]):
            left_out.update(options_with("by_level"))
        return {name: value for name, value in self.options.items() if name not in left_out}


def read_plan(path: str) -> PlanFile:
    """Return the plan in a YAML file. Raises UserError, one line, for what is no plan."""
    place = f"plan={path}"
    if not Path(path).is_file():
        raise UserError(f"{place}: no such file; python -m unet3d plan data=... -o {path} writes one")
    content, written = read_yaml_as_written(Path(path))
    if not isinstance(content, dict) or not isinstance(content.get("options"), dict):
        raise UserError(f"{place}: is no plan; python -m unet3d plan data=... -o {path} writes one")
    for section in content:
        if section not in SECTIONS:
            raise UserError(f"{place}: {section}: no part of a plan; it has {' and '.join(SECTIONS)}")
    if "${" in repr(content):
        raise UserError(f"{place}: holds ${{...}}, which a plan's plain values do not")
    refuse_misread(place, content["options"], written["options"])
    options = flat(content["options"], ".")
    for name in options:
        _refuse_option(place, str(name))
    return PlanFile(options, _promise(place, content.get("promise") or {}))


def _refuse_option(place: str, name: str) -> None:
    """Raise UserError for an option that does not exist, or that a plan may not set."""
    if name not in FACTS:
        raise UserError(f"{place}: {name}: no such option{nearest(name)}")
    if name not in options_with("kept"):
        raise UserError(f"{place}: {name}: a plan does not set this; give it on the command line")


def _promise(place: str, values: Any) -> dict[str, Any]:
    """Return what a plan promises. Raises UserError for entries of other names or types."""
    if not isinstance(values, dict):
        raise UserError(f"{place}: promise: is no mapping; write the plan again")
    for name, value in values.items():
        kind = PROMISED.get(name)
        if kind is None:
            raise UserError(f"{place}: promise.{name}: nothing that a plan promises; remove it")
        is_number = type(value) in (int, float) and math.isfinite(value) and value >= 0
        if (kind is str and not isinstance(value, str)) or (kind is not str and not is_number):
            raise UserError(f"{place}: promise.{name}={value}: is no {kind.__name__}; write the plan again")
    return dict(values)
