"""Peaks of training steps by schedule and patch, simulated once each: of a config's network, or of any other."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from unet3d import build
from unet3d.base.types import MIB
from unet3d.config.schema import Config, Model
from unet3d.memory.ledger import Ledger
from unet3d.memory.meter import STEPS_FOR_PEAK
from unet3d.memory.peak import Peak, peak_of
from unet3d.memory.technique import predicted
from unet3d.memory.variants import refuse_step
from unet3d.model.geometry import Triple

USUAL_BYTES = 2600  # a voxel of a patch, of nnU-Net's step in float32; only a first guess


class Schedule(NamedTuple):
    """A way to take a step, and what it usually needs."""

    amp: bool
    recompute: str
    usual: float  # share of the bytes in float32; only a first guess


SCHEDULES = (
    Schedule(False, "none", 1.0),
    Schedule(True, "none", 0.52),
    Schedule(True, "lean", 0.27),
    Schedule(True, "tiles", 0.22),
)
AUTO = Schedule(True, "auto", 0.22)  # the least work that fits a budget
AS_NNUNET = SCHEDULES[1]


class Steps(ABC):
    """The training steps of a network. Each is simulated once."""

    def __init__(self, config: Config) -> None:
        self.config = replace(config, budget=None)
        self.device_type = build.device_type(config)
        self._peaks: dict[tuple[Schedule, Triple, int | None], Peak] = {}

    def peaks(self, schedule: Schedule, patch: Triple, budget: int) -> Peak:
        """Return what a step needs. The budget (bytes) counts for `recompute=auto`. Raises UserError."""
        key = (schedule, patch, budget if schedule.recompute == "auto" else None)
        if key not in self._peaks:
            self._peaks[key] = peak_of(self.ledger(schedule, patch, budget))
        return self._peaks[key]

    @property
    def batch(self) -> int:
        """Return the patches in a step."""
        return self.config.batch

    @property
    def simulated(self) -> int:
        """Return the number of steps simulated so far."""
        return len(self._peaks)

    @abstractmethod
    def ledger(self, schedule: Schedule, patch: Triple, budget: int) -> Ledger:
        """Return the ledger of simulated steps. Raises UserError."""


class ConfigSteps(Steps):
    """The steps of a config whose network may depend on the patch."""

    def __init__(self, config: Config, network: Callable[[Triple], Model]) -> None:
        super().__init__(config)
        self.network = network

    def ledger(self, schedule: Schedule, patch: Triple, budget: int) -> Ledger:
        model = self.network(patch)
        config = replace(
            self.config,
            model=model,
            data=replace(self.config.data, patch=list(patch)),
            amp=schedule.amp,
            recompute=schedule.recompute,
        )
        if schedule.recompute == "auto":
            config = replace(config, budget=f"{budget / MIB:.6f}MiB")
        refuse_step(config)
        return predicted(config, model, steps=STEPS_FOR_PEAK).ledger
