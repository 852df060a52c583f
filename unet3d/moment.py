"""A moment of a run: all of its state, as a snapshot holds it, and how it is put back."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unet3d import averaging, compose, resuming, snapshot
from unet3d.config import Config, Model
from unet3d.grounds import Grounds, refuse_others

State = dict[str, Any]


@dataclass(frozen=True)
class Moment:
    """What changes as a run goes on, with what it is built from: `options` are the model's, with nothing left open."""

    config: Config
    options: Model
    grounds: Grounds
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler

    def state(self, step: int, paused: int, best: float | None) -> State:
        """The run at this step, as tensors and plain values; `best` is its highest mean Dice."""
        return {
            "config": compose.to_plain(self.config),
            "model_options": dataclasses.asdict(self.options),
            **{name: self.grounds[name] for name in ("classes", "channels", "intensity")},
            "grounds": self.grounds,
            "step": step,
            "paused": paused,
            "best": best,
            "model": self.model.state_dict(),
            "average": averaging.averages(self.model, self.optimizer),  # shares the optimizer's storages, also on disk
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else [],
        }

    def put_back(self, state: State, path: Path) -> list[str]:
        """Put a snapshot's state back, the random state last: building things draws from it. Returns other options.

        Raises UserError where the run would not be the same, SnapshotError where the weights do not fit.
        """
        changes = resuming.refuse_changes(state["config"], compose.to_plain(self.config))
        if "grounds" in state:  # else an older version wrote it
            refuse_others(state["grounds"], self.grounds)
        resuming.refuse_fewer_steps(state["step"], self.config.steps)
        if state["step"] == self.config.steps != state["config"]["steps"]:
            state["paused"] = state["step"] - 1  # the last validation measures more than the one taken here
        snapshot.load_weights(self.model, state["model"], path)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] and self._device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"][0], self._device)  # of other devices nothing is drawn
        return changes

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device
