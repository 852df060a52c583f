"""The training state of a run: what its checkpoints hold, which of them are kept, and how a run is resumed from one."""

import dataclasses
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unet3d.base import ranks
from unet3d.base.errors import CheckpointError, NotSaved, UserError, escaped, is_out_of_memory, warn
from unet3d.base.types import Batch
from unet3d.config import compose
from unet3d.config.compose import CHECKPOINTS
from unet3d.config.schema import Config, Model
from unet3d.data.intensity import Seen
from unet3d.data.prepare import PreparedData
from unet3d.run import checkpoint, run_folder
from unet3d.training import optim
from unet3d.training.trainer import Learner

LAST, PREVIOUS, BEST = CHECKPOINTS
DatasetFingerprint = dict[str, Any]


def seed_per_rank(seed: int, step: int) -> None:
    """Give each rank but the first its own random numbers from here on, for dropout."""
    if ranks.RANK:
        generator = np.random.default_rng([seed, step, ranks.RANK])
        torch.manual_seed(int(generator.integers(2**63)))


def rate_change(before: Config, now: Config, step: int) -> str:
    """Return what the learning rate does after `step` where options changed; "" where it stays as planned before.

    A schedule that has come to its end begins anew high up if it gets more steps.
    """
    if step in (0, now.steps):
        return ""
    last, planned = (optim.learning_rate(before.optim, before.steps, number) for number in (step - 1, step))
    following = optim.learning_rate(now.optim, now.steps, step)
    if planned == following:
        return ""
    direction = "rises to" if following > last else "falls to"
    numbers = f"{last:.3g} in step {step}, {direction} {following:.3g} in step {step + 1}"
    return f"the learning rate, {numbers}: it is now {now.optim.schedule} over {now.steps} steps"


@dataclass
class CheckpointManager:
    """What training changes of a run and what that was built from: kept in the last checkpoint, an older, and the best.

    `fingerprint` and `seen` are of the run's data.
    """

    folder: Path
    config: Config
    model_config: Model  # Model config with nothing left open.
    fingerprint: DatasetFingerprint
    learner: Learner
    seen: Seen | None = None  # what the training cases are like
    best: float | None = None  # highest mean Dice so far
    saved: tuple[int, int] | None = None  # step of last.pt, and of the last validation before it

    def state_dict(self, step: int, last_validation: int, best: float | None) -> dict[str, Any]:
        """Return the run at this step as tensors and plain values; `best` is its highest mean Dice."""
        model, _, optimizer, scaler, _ = self.learner
        on_gpu = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        first_rank, *other_ranks = ranks.gather((torch.get_rng_state(), on_gpu))
        return {
            "config": compose.to_plain(self.config),
            "model_options": dataclasses.asdict(self.model_config),
            **{name: self.fingerprint[name] for name in ("classes", "channels", "intensity")},
            "seen": None if self.seen is None else dataclasses.asdict(self.seen),
            "fingerprint": self.fingerprint,
            "step": step,
            "last_validation": last_validation,
            "best": best,
            "model": model.state_dict(),
            "average": optim.averages(model, optimizer),  # shares the optimizer's storages, also on disk
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
            "rng": first_rank[0],
            "cuda_rng": first_rank[1],
            "ranks": [list(states) for states in other_ranks],  # `rng` and `cuda_rng` of each other rank
            "threads": torch.get_num_threads(),
        }

    def load_state_dict(self, path: Path, state: dict[str, Any]) -> list[str]:
        """Load a checkpoint's state, whose `last_validation` may change. Return what options change.

        Raises UserError or CheckpointError where it is another run's, or no run's.
        """
        model, _, optimizer, scaler, _ = self.learner
        step = state["step"]
        changes = compose.refuse_changes(state["config"], compose.to_plain(self.config))
        refuse_other_data(state["fingerprint"], self.fingerprint)
        self._refuse_unsound(path, state)
        if step > self.config.steps:
            raise UserError(f"steps={self.config.steps}: the run is at step {step} already; give as many or more")
        if step == self.config.steps != state["config"]["steps"]:
            # The last validation measures more than the one at this step did: it is computed again.
            state["last_validation"] = step - 1
        checkpoint.refuse_misfit(model, state["model"], path)
        model.load_state_dict(state["model"])
        # Moments and counts are the file's; the options in the parameter groups stay those of the config.
        groups = optimizer.state_dict()["param_groups"]
        for own_group, group in zip(groups, state["optimizer"]["param_groups"], strict=True):
            own_group |= {name: group[name] for name in (optim.COUNT,) if name in group}
        optimizer.load_state_dict({"state": state["optimizer"]["state"], "param_groups": groups})
        scaler.load_state_dict(state["scaler"])
        threads = torch.get_num_threads()  # split sums on the CPU
        if self._device.type == "cpu" and ranks.RANK == 0 and state["threads"] != threads:
            remedy = f"OMP_NUM_THREADS={state['threads']} keeps it equal to the bit"
            warn(f"resume: threads: {state['threads']} -> {threads}; the run goes on equal but for rounding; {remedy}")
        self._load_random_state(state)  # last: building things draws from it
        if changes:
            before = compose.from_plain(state["config"] | {"resume": None})
            changes.append(rate_change(before, self.config, step))
        return [*filter(None, changes)]

    def _refuse_unsound(self, path: Path, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError for a training state that no run of this optimizer has written."""
        step = state["step"]
        counts = [step, state["last_validation"]]
        counts += [group[optim.COUNT] for group in state["optimizer"]["param_groups"] if optim.COUNT in group]
        best = state["best"]
        random_states = [(state["rng"], state["cuda_rng"]), *state["ranks"]]
        on_gpus = [on_gpu for _, of_rank in random_states for on_gpu in of_rank]
        device = self._device
        is_sound = {
            "step": all(type(count) is int and 0 <= count <= step for count in counts),
            "best": best is None or (isinstance(best, float) and 0 <= best <= 1),
            "rng": all(_is_like(on_cpu, torch.get_rng_state()) for on_cpu, _ in random_states),
            "cuda_rng": device.type != "cuda"  # On the CPU it is not used.
            or all(_is_like(on_gpu, torch.cuda.get_rng_state(device)) for on_gpu in on_gpus),
            "scaler": state["scaler"].keys() == self.learner.scaler.state_dict().keys()
            and 0 < state["scaler"].get("scale", 1) < math.inf,
            "optimizer": type(step) is int and self._may_hold(state["optimizer"]["state"], step),
            "threads": type(state["threads"]) is int,
        }
        wrong = [name for name in is_sound if not is_sound[name]]
        if wrong:
            problem = f"its training state does not belong to this run ({', '.join(wrong)})"
            raise CheckpointError(f"{path}: {problem}; take an earlier checkpoint")

    def _may_hold(self, moments: Mapping[int, Mapping[str, Any]], steps: int) -> bool:
        """Return whether each tensor is one that `steps` steps of the optimizer leave, and shares no memory."""
        parameters = [parameter for group in self.learner.optimizer.param_groups for parameter in group["params"]]
        names = optim.state_names(self.config.optim)
        step_counter = torch.zeros(())
        addresses = []
        for index, state in moments.items():
            if state.keys() != names:
                return False
            for name, value in state.items():
                is_step = name == "step"
                if (
                    not _is_like(value, step_counter if is_step else parameters[index])
                    or (is_step and value.item() not in range(1, steps + 1))
                    or (name == "exp_avg_sq" and not value.ge(0).all())
                ):
                    return False
                if value.numel():
                    addresses.append(value.untyped_storage().data_ptr())
        return len(addresses) == len(set(addresses))

    @property
    def _device(self) -> torch.device:
        return next(self.learner.model.parameters()).device

    def _load_random_state(self, state: dict[str, Any]) -> None:
        """Load the state of this rank's random numbers; a rank that was not there before gets its own seed."""
        states = [(state["rng"], state["cuda_rng"]), *state["ranks"]]
        if len(states) <= ranks.RANK:
            seed_per_rank(self.config.seed, state["step"])
            return
        on_cpu, on_gpu = states[ranks.RANK]
        torch.set_rng_state(on_cpu)
        if on_gpu and self._device.type == "cuda":
            torch.cuda.set_rng_state(on_gpu[0], self._device)  # nothing is drawn on other devices

    def save_best_and_last(self, step: int, dice: float | None) -> None:
        """Save after a validation: the best checkpoint first, since the last one records its Dice. Raises NotSaved."""
        if dice is not None and (self.best is None or dice > self.best):
            self._save(BEST, step, step, dice)
            self.best = dice
        self.save_last(step, step)

    def save_last(self, step: int, last_validation: int) -> None:
        """Save the run after a step, unless it is saved. Raises NotSaved."""
        if (step, last_validation) == self.saved:
            return
        self._save(LAST, step, last_validation, self.best)
        self.saved = (step, last_validation)

    def _save(self, name: str, step: int, last_validation: int, best: float | None) -> None:
        state = self.state_dict(step, last_validation, best)
        folder = self.folder / "checkpoints"
        # previous.pt is for a damaged last.pt; one of the same step would not be older.
        is_older = name == LAST and self.saved is not None and self.saved[0] < step
        previous = folder / PREVIOUS if is_older else None
        ranks.on_rank0(lambda: checkpoint.save_checkpoint(folder / name, state, previous))

    def warn(self, error: Exception) -> None:
        """Print that the run is not saved, and what its last checkpoint is."""
        newest = "there is no checkpoint yet"
        if self.saved is not None:
            newest = f"the last checkpoint is of step {self.saved[0]}"
        warn(f"{error}; training goes on, {newest}")

    def restore(self) -> tuple[int, int]:
        """Load the newest whole checkpoint and drop later records. Return its step and its last validation's.

        Raises CheckpointError where none is whole or the newest is not a run's, UserError where it is another run's.
        """
        folder = self.folder / "checkpoints"
        state, problems = ranks.on_rank0(lambda: checkpoint.load_any(folder, CHECKPOINTS))
        path = folder / CHECKPOINTS[len(problems)]
        try:
            changes = self.load_state_dict(path, state)
            step, last_validation, self.best = (state[name] for name in ("step", "last_validation", "best"))
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            if isinstance(error, UserError | CheckpointError) or is_out_of_memory(error):
                raise
            problem = f"not all of a run's state, or of another run ({error!r})"
            raise CheckpointError(f"{path}: {problem}") from error
        last_recorded = ranks.on_rank0(lambda: run_folder.forget_after(self.folder, step, last_validation))
        if problems:
            lost = f"; steps {step + 1} to {last_recorded} are taken again" if last_recorded > step else ""
            warn(f"{'; '.join(problems)}; going on from {path.name}, step {step}{lost}")
        else:
            self.saved = (step, last_validation)
        if changes:
            print(f"from step {step} on with other options: {escaped('; '.join(changes))}", flush=True)
        return step, last_validation

    def dump(self, step: int, batches: Sequence[Batch]) -> str:
        """Write the batches whose update was refused to nan_batch.pt. Return a line that says where they are."""
        path = self.folder / "nan_batch.pt"
        plain = [{**batch._asdict(), "cases": list(batch.cases)} for batch in batches]
        try:
            checkpoint.save_checkpoint(path, {"step": step, "batches": plain})
        except NotSaved as full:
            return str(full)
        return f"the batch is in {path}"


def _is_like(value: Any, expected: Tensor) -> bool:
    """Return whether a value of a file is a dense tensor of the same shape and type, of finite numbers."""
    if not checkpoint.is_plain(value) or (value.shape, value.dtype) != (expected.shape, expected.dtype):
        return False
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    is_dense = value.permute(order).is_contiguous()  # In a value with gaps an index may share its number with another.
    return is_dense and checkpoint.is_finite(value)


def fingerprint(data: PreparedData, dtype: torch.dtype | None) -> DatasetFingerprint:
    """Return what a resumed run must have too, as plain values: its cases, hashes of their files, and the precision.

    `dtype` is the type of mixed precision, None without it.
    """
    values = {
        "classes": list(data.dataset.classes),
        "channels": list(data.dataset.channels),
        "intensity": [dataclasses.asdict(rule) for rule in data.read.intensity],
        "training cases": [case.id for case in data.train],
        "held-out cases": [case.id for case in data.val],
        "mixed precision": str(dtype),
        "files": {case_id: header.hashes for case_id, header in data.headers.items()},
    }
    if data.dataset.regions is not None:
        values["regions"] = [list(labels) for labels in (*data.dataset.regions.labels, data.dataset.regions.drawn)]
    return values


def refuse_other_data(before: Mapping[str, Any], now: DatasetFingerprint) -> None:
    """Raise UserError if the data or the precision has changed since the run began.

    Warn where only a sample of files could be compared.
    """
    changed_files = []  # first, as the scale of CT follows from labels
    sampled: dict[str, None] = {}  # cases, in order
    for kind in ("images", "labels"):
        changed = []
        for name in sorted(before["files"].keys() & now["files"].keys()):
            then, today = before["files"][name][kind], now["files"][name][kind]
            extent = "full" if then["full"] and today["full"] else "sample"
            if then[extent] != today[extent]:
                changed.append(name)
            elif extent == "sample" and then["times"] != today["times"]:
                sampled[name] = None
        if changed:
            changed_files.append(f"{kind} of {_short(', '.join(changed))}")
    if changed_files:
        remedy = "put the old files back, or start a new run"
        raise UserError(f"resume: {', '.join(changed_files)} changed since the run began; {remedy}")
    if sampled:
        problem = "times changed, and a sample of the bytes is the same; a run with data.fingerprint=full compares all"
        warn(f"resume: files of {_short(', '.join(sampled))}: {problem}")
    differing = [name for name in now if name != "files" and before.get(name) != now[name]]
    changes = [f"{name}: {_short(before.get(name))} -> {_short(now[name])}" for name in differing]
    if changes:
        raise UserError(f"resume: the data or the precision changed since the run began: {'; '.join(changes)}")


def _short(value: object) -> str:
    return textwrap.shorten(str(value), width=200, placeholder=" ...")
