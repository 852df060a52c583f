"""A run's training state as one dictionary, and how a run goes on from it."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from unet3d.base import ranks
from unet3d.base.errors import UserError, warn
from unet3d.config import compose
from unet3d.config.schema import Config, Model
from unet3d.data.seen import Seen
from unet3d.run.checkpoint import Checkpoint
from unet3d.run.fingerprint import DatasetFingerprint, refuse_other_data
from unet3d.training import checkpoint, optim


def seed_per_rank(seed: int, step: int) -> None:
    """Give each rank but the first random numbers of its own from here on, for dropout."""
    if ranks.RANK:
        generator = np.random.default_rng([seed, step, ranks.RANK])
        torch.manual_seed(int(generator.integers(2**63)))


def rate_change(before: Config, now: Config, step: int) -> str:
    """Return what the learning rate does after `step` where options changed; "" where it goes on as it was.

    A schedule that has come to its end begins anew high up if it gets more steps.
    """
    if step in (0, now.steps):
        return ""
    last = optim.learning_rate(before.optim, before.steps, step - 1)
    planned = optim.learning_rate(before.optim, before.steps, step)
    following = optim.learning_rate(now.optim, now.steps, step)
    if planned == following:
        return ""
    direction = "rises to" if following > last else "falls to"
    numbers = f"{last:.3g} in step {step}, {direction} {following:.3g} in step {step + 1}"
    return f"the learning rate, {numbers}: it is now {now.optim.schedule} over {now.steps} steps"


@dataclass(frozen=True)
class TrainingState:
    """The parts of a run that training changes, and what they were built from."""

    config: Config
    model_config: Model  # with nothing left open
    fingerprint: DatasetFingerprint
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    seen: Seen | None = None  # what the training cases are like

    def state_dict(self, step: int, last_validation: int, best: float | None) -> dict[str, Any]:
        """Return the run at this step as tensors and plain values; `best` is its highest mean Dice."""
        on_gpu = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        first_rank, *other_ranks = ranks.gather((torch.get_rng_state(), on_gpu))
        return {
            "config": compose.to_plain(self.config),
            "model_options": dataclasses.asdict(self.model_config),
            "classes": self.fingerprint["classes"],
            "channels": self.fingerprint["channels"],
            "intensity": self.fingerprint["intensity"],
            "seen": None if self.seen is None else dataclasses.asdict(self.seen),
            "fingerprint": self.fingerprint,
            "step": step,
            "last_validation": last_validation,
            "best": best,
            "model": self.model.state_dict(),
            "average": optim.averages(self.model, self.optimizer),  # shares the optimizer's storages, also on disk
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": first_rank[0],
            "cuda_rng": first_rank[1],
            "ranks": [list(states) for states in other_ranks],  # `rng` and `cuda_rng` of each other rank
            "threads": torch.get_num_threads(),
        }

    def load_state_dict(self, source: Checkpoint) -> list[str]:
        """Go on from a checkpoint, whose `last_validation` may change. Return what options change.

        Raises UserError or CheckpointError where it is another run's, or no run's.
        """
        state = source.state
        step = state["step"]
        changes = compose.refuse_changes(state["config"], compose.to_plain(self.config))
        refuse_other_data(state["fingerprint"], self.fingerprint)
        source.refuse_unsound_training(self.optimizer, self.scaler, self.config.optim)
        if step > self.config.steps:
            raise UserError(f"steps={self.config.steps}: the run is at step {step} already; give as many or more")
        was_planned = state["config"]["steps"] == self.config.steps
        if step == self.config.steps and not was_planned:
            # The last validation measures more than the one at this step did: it is made again.
            state["last_validation"] = step - 1
        checkpoint.load_weights(self.model, state["model"], source.path)
        self._load_optimizer(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self._warn_of_other_threads(state["threads"])
        self._load_random_state(state)  # last: building things draws from it
        if changes:
            before = compose.from_plain(state["config"] | {"resume": None})
            line = rate_change(before, self.config, step)
            if line:
                changes.append(line)
        return changes

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        """Load the moments and counts; the options in the parameter groups stay as the config has them."""
        groups = []
        own_groups = self.optimizer.state_dict()["param_groups"]
        for own_group, group in zip(own_groups, state["param_groups"], strict=True):
            if optim.COUNT in group:
                own_group = own_group | {optim.COUNT: group[optim.COUNT]}
            groups.append(own_group)
        self.optimizer.load_state_dict({"state": state["state"], "param_groups": groups})

    def _warn_of_other_threads(self, before: int) -> None:
        """Warn where sums on the CPU are split in another way than before."""
        now = torch.get_num_threads()
        if self._device.type == "cpu" and ranks.RANK == 0 and before != now:
            remedy = f"OMP_NUM_THREADS={before} keeps it equal to the bit"
            warn(f"resume: threads: {before} -> {now}; the run goes on equal but for rounding; {remedy}")

    def _load_random_state(self, state: dict[str, Any]) -> None:
        """Load the state of this rank's random numbers; a rank that was not there before gets a seed of its own."""
        states = [(state["rng"], state["cuda_rng"]), *state["ranks"]]
        if len(states) <= ranks.RANK:
            seed_per_rank(self.config.seed, state["step"])
            return
        on_cpu, on_gpu = states[ranks.RANK]
        torch.set_rng_state(on_cpu)
        if on_gpu and self._device.type == "cuda":
            torch.cuda.set_rng_state(on_gpu[0], self._device)  # nothing is drawn on other devices
