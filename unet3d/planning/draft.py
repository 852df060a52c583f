"""A plan as it is made: the config so far, the options that it sets, and the decisions with their reasons."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from unet3d import build
from unet3d.config.schema import Config
from unet3d.planning.fingerprint import Fingerprint

Triple = tuple[float, float, float]


class Decision(NamedTuple):
    """A line of a plan."""

    name: str
    choice: str
    reason: str
    instead: str  # the next best choice; "" without one


@dataclass
class Draft:
    """What has been decided, and what it follows from."""

    config: Config  # of the run, as far as it is decided; its model has channels and classes
    given: Collection[str]  # options of the command line, which stay as they are
    fingerprint: Fingerprint
    budget: int  # bytes
    seconds: float | None  # that the run may take
    options: dict[str, Any] = field(default_factory=dict)  # that the plan sets, by dotted name
    promise: dict[str, Any] = field(default_factory=dict)  # what is predicted of the run
    decisions: list[Decision] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # of what the budget or the time left undone

    @property
    def device(self) -> str:
        """Return the type of device that the run is for, cpu or cuda."""
        return build.device_type(self.config)

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


def changed(node: Any, name: str, value: Any) -> Any:
    """Return a config, or a group of its options, with another value of one option by its dotted name."""
    head, _, rest = name.partition(".")
    if not rest:
        return replace(node, **{head: value})
    return replace(node, **{head: changed(getattr(node, head), rest, value)})


def sizes_text(sizes: Sequence[float]) -> str:
    """Return `32x48x32`."""
    return "x".join(f"{size:g}" for size in sizes)
