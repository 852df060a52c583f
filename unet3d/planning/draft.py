"""A plan in the making, and its file: the config so far, and decisions, each with its reason."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf

from unet3d import build
from unet3d.base.errors import escaped
from unet3d.config.schema import Config
from unet3d.model.architecture import Spacing, median_shape, target_spacing
from unet3d.planning.fingerprint import Fingerprint


class Decision(NamedTuple):
    """A line of a plan."""

    name: str
    choice: str
    reason: str
    instead: str  # The next best choice; "" without one.

    def __str__(self) -> str:
        next_best = f"; next best: {self.instead}" if self.instead else ""
        return f"{self.name}: {self.choice}: {self.reason}{next_best}"


@dataclass
class Draft:
    """Decisions so far, and what they follow from."""

    config: Config  # Of the run, as far as it is decided; its model has channels and classes.
    given: Collection[str]  # Options of the command line, which stay as they are.
    fingerprint: Fingerprint
    budget: int  # Bytes.
    seconds: float | None  # That the run may take.
    options: dict[str, Any] = field(default_factory=dict)  # That the plan sets, by dotted name.
    promise: dict[str, Any] = field(default_factory=dict)  # What is predicted of the run.
    decisions: list[Decision] = field(default_factory=list)
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
        """Add a line."""
        self.decisions.append(Decision(name, choice, reason, instead))

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
        reasons = [f"# {escaped(str(decision))}" for decision in self.decisions]
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


def sizes_text(sizes: Sequence[float]) -> str:
    """Return `32x48x32`."""
    return "x".join(f"{size:g}" for size in sizes)
