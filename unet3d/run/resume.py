"""A run's checkpoints: what they hold, which are kept, and how a run goes on from one."""

import dataclasses
import functools
import itertools
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from unet3d.base import ranks
from unet3d.base.errors import CheckpointError, NotSaved, UserError, escaped, is_out_of_memory
from unet3d.base.types import Batch
from unet3d.config import compose
from unet3d.config.compose import CHECKPOINTS
from unet3d.config.schema import Config, Model
from unet3d.data.prepare import PreparedData
from unet3d.report import run_folder
from unet3d.report.loggers import warn
from unet3d.training import checkpoint, optim

DatasetFingerprint = dict[str, Any]
Checkpoint = dict[str, Any]
LAST, PREVIOUS, BEST = CHECKPOINTS


def seed_per_rank(seed: int, step: int) -> None:
    """From here on, each rank but the first has random numbers of its own: for dropout."""
    if ranks.RANK:
        torch.manual_seed(int(np.random.default_rng([seed, step, ranks.RANK]).integers(2**63)))


def fingerprint(data: PreparedData, dtype: torch.dtype | None) -> DatasetFingerprint:
    """What a run rests on, as plain values; `dtype` is that of mixed precision, None without it."""
    return {
        "classes": list(data.dataset.classes),
        "channels": list(data.dataset.channels),
        "intensity": [dataclasses.asdict(rule) for rule in data.read.intensity],
        "training cases": [case.id for case in data.train],
        "held-out cases": [case.id for case in data.val],
        "mixed precision": str(dtype),
        "files": data.files,
    }


def refuse_other_data(before: Mapping[str, Any], now: DatasetFingerprint) -> None:
    """Raise UserError if the data or the precision has changed since the run began."""
    short = functools.partial(textwrap.shorten, width=200, placeholder=" ...")
    if "files" in before:  # else an older version wrote it; first, as the scale of CT follows from labels
        _refuse_other_files(before["files"], now["files"], short)
    if changed := [name for name in now if name != "files" and before[name] != now[name]]:
        changes = "; ".join(f"{name}: {short(str(before[name]))} -> {short(str(now[name]))}" for name in changed)
        raise UserError(f"resume: the data or the precision changed since the run began: {changes}")


def _refuse_other_files(before: Mapping[str, Any], now: Mapping[str, Any], short: Callable[[str], str]) -> None:
    """The same for the files of the cases; print a warning about those of which not all bytes were compared."""
    others, sampled = {"images": list[str](), "labels": list[str]()}, dict[str, None]()
    for kind, name in itertools.product(others, sorted(before.keys() & now.keys())):
        then, found = before[name][kind], now[name][kind]
        of = "full" if then["full"] and found["full"] else "sample"
        if then[of] != found[of]:
            others[kind].append(name)
        elif of == "sample" and then["times"] != found["times"]:
            sampled[name] = None
    if listed := [f"{kind} of {short(', '.join(names))}" for kind, names in others.items() if names]:
        what = "changed since the run began; put the old files back, or start a new run"
        raise UserError(f"resume: {', '.join(listed)} {what}")
    if sampled:
        what = "times changed, and a sample of the bytes is the same; a run with data.fingerprint=full compares all"
        warn(f"resume: files of {short(', '.join(sampled))}: {what}")


def rate_change(before: Config, now: Config, step: int) -> str:
    """What the learning rate does after `step`, where other options set it than before; "" where it goes on as it was.

    A schedule that has come to its end begins anew high up if it gets more steps.
    """
    if step in (0, now.steps):
        return ""
    was, planned, becomes = (
        optim.learning_rate(config.optim, config.steps, at)
        for config, at in ((before, step - 1), (before, step), (now, step))
    )
    if planned == becomes:
        return ""
    how = "rises to" if becomes > was else "falls to"
    numbers = f"{was:.3g} in step {step}, {how} {becomes:.3g} in step {step + 1}"
    return f"the learning rate, {numbers}: it is now {now.optim.schedule} over {now.steps} steps"


@dataclass(frozen=True)
class TrainingState:
    """What changes as a run goes on, with what it is built from: `options` are the model's, with nothing left open."""

    config: Config
    options: Model
    fingerprint: DatasetFingerprint
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler

    def state(self, step: int, last_validation: int, best: float | None) -> Checkpoint:
        """The run at this step, as tensors and plain values; `best` is its highest mean Dice."""
        device = next(self.model.parameters()).device
        on_gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
        own, *others = ranks.gather((torch.get_rng_state(), on_gpu))
        return {
            "config": compose.to_plain(self.config),
            "model_options": dataclasses.asdict(self.options),
            **{name: self.fingerprint[name] for name in ("classes", "channels", "intensity")},
            "fingerprint": self.fingerprint,
            "step": step,
            "last_validation": last_validation,
            "best": best,
            "model": self.model.state_dict(),
            "average": optim.averages(self.model, self.optimizer),  # shares the optimizer's storages, also on disk
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": own[0],
            "cuda_rng": own[1],
            "ranks": list(map(list, others)),  # what the same two are of the other ranks
            "threads": torch.get_num_threads(),
        }

    def load_state_dict(self, state: Checkpoint, path: Path) -> list[str]:
        """Put a checkpoint's state back. Returns what changes. Raises UserError, CheckpointError for another run."""
        changes = compose.refuse_changes(state["config"], compose.to_plain(self.config))
        if "fingerprint" in state:  # else an older version wrote it
            refuse_other_data(state["fingerprint"], self.fingerprint)
        self._refuse_unsound(state, path)
        if (reached := state["step"]) > (steps := self.config.steps):
            raise UserError(f"steps={steps}: the run is at step {reached} already; give as many or more")
        if state["step"] == self.config.steps != state["config"]["steps"]:
            state["last_validation"] = (
                state["step"] - 1
            )  # the last validation measures more than the one at this step did
        checkpoint.load_weights(self.model, state["model"], path)
        self.optimizer.load_state_dict({"state": state["optimizer"]["state"], "param_groups": self._groups(state)})
        self.scaler.load_state_dict(state["scaler"])
        self._warn_of_other_threads(state.get("threads"))
        self._put_back_random(state)  # last: building things draws from it
        if changes:
            before = compose.from_plain(state["config"] | {"resume": None})
            changes += filter(None, [rate_change(before, self.config, reached)])
        return changes

    def _warn_of_other_threads(self, before: object) -> None:
        """Print a line where sums on the CPU are split in another way than before."""
        now = torch.get_num_threads()
        is_on_cpu = next(self.model.parameters()).device.type == "cpu"
        if is_on_cpu and ranks.RANK == 0 and type(before) is int and before != now:  # an older version wrote none
            same = f"OMP_NUM_THREADS={before} keeps it equal to the bit"
            warn(f"resume: threads: {before} -> {now}; the run goes on equal but for rounding; {same}")

    def _put_back_random(self, state: Checkpoint) -> None:
        """The state of random numbers; a rank that was not there draws numbers of its own."""
        known = [(state["rng"], state["cuda_rng"]), *state.get("ranks", [])]
        if len(known) <= ranks.RANK:
            seed_per_rank(self.config.seed, state["step"])
            return
        on_cpu, on_gpu = known[ranks.RANK]
        torch.set_rng_state(on_cpu)
        device = next(self.model.parameters()).device
        if on_gpu and device.type == "cuda":
            torch.cuda.set_rng_state(on_gpu[0], device)  # nothing is drawn on other devices

    def _groups(self, state: Checkpoint) -> list[dict[str, Any]]:
        """The optimizer's parameter groups: with the config's options, which a checkpoint repeats, and its counts."""
        pairs = zip(self.optimizer.state_dict()["param_groups"], state["optimizer"]["param_groups"], strict=True)
        return [own | {optim.COUNT: found[optim.COUNT]} if optim.COUNT in found else own for own, found in pairs]

    def _refuse_unsound(self, state: Checkpoint, path: Path) -> None:
        """Raise CheckpointError for a state that no run of this network has written."""
        step, validated, best = state["step"], state["last_validation"], state["best"]
        groups, own = state["optimizer"]["param_groups"], self.scaler.state_dict()
        counts = [step, validated, *(group[optim.COUNT] for group in groups if optim.COUNT in group)]
        is_sound = {
            "step": all(type(count) is int and 0 <= count <= step for count in counts),
            "best": best is None or (isinstance(best, float) and 0 <= best <= 1),
            "rng": _is_like(state["rng"], torch.get_rng_state()),
            "cuda_rng": self._fits_cuda(state["cuda_rng"]),
            "ranks": all(
                _is_like(on_cpu, torch.get_rng_state()) and self._fits_cuda(on_gpu)
                for on_cpu, on_gpu in state.get("ranks", [])
            ),
            "scaler": state["scaler"].keys() == own.keys() and 0 < state["scaler"].get("scale", 1) < math.inf,
            "optimizer": self._fits_optimizer(state["optimizer"]["state"], step),
        }
        if wrong := [name for name in is_sound if not is_sound[name]]:
            raise CheckpointError(
                f"{path}: its {', '.join(wrong)} cannot be those of this run; take an earlier checkpoint"
            )

    def _fits_cuda(self, states: list[Any]) -> bool:
        device = next(self.model.parameters()).device
        return device.type != "cuda" or all(_is_like(one, torch.cuda.get_rng_state(device)) for one in states)

    def _fits_optimizer(self, states: Mapping[int, Mapping[str, Any]], reached: Any) -> bool:
        """Return whether each tensor is one that `reached` steps of this optimizer leave, in memory of its own."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        names, one = optim.state_names(self.config.optim), torch.zeros(())
        pairs = [(name, value, parameters[index]) for index, state in states.items() for name, value in state.items()]
        if not all(state.keys() == names for state in states.values()):
            return False
        if not all(_is_like(value, one if name == "step" else like) for name, value, like in pairs):
            return False
        counts = [value.item() for name, value, _ in pairs if name == "step"]
        squares = [value for name, value, _ in pairs if name == "exp_avg_sq"]
        places = [value.untyped_storage().data_ptr() for _, value, _ in pairs if value.numel()]
        is_reached = type(reached) is int and all(count in range(1, reached + 1) for count in counts)
        return is_reached and all(value.ge(0).all() for value in squares) and len(places) == len({*places})


def _is_like(value: Any, wanted: torch.Tensor) -> bool:
    """Whether a value of a file is a tensor of the same size and type, of finite numbers."""
    if not checkpoint.is_plain(value) or (value.shape, value.dtype) != (wanted.shape, wanted.dtype):
        return False
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    is_dense = value.permute(order).is_contiguous()  # else an index may share its number with another
    return is_dense and checkpoint.is_finite(value)


@dataclass
class Checkpoints:
    """checkpoints/ of the run in `folder`; `state` gives the run's state."""

    folder: Path
    state: Callable[[], Checkpoint]
    best: float | None = None  # highest mean Dice so far
    saved: tuple[int, int] | None = None  # step of last.pt, and of the last validation before it

    def save_best_and_last(self, dice: float | None) -> None:
        """Save after a validation: the best checkpoint first, since the last one records its Dice. Raises NotSaved."""
        before = self.best
        if dice is not None and (before is None or dice > before):
            self.best = dice
            try:
                self._save(BEST, self.state())
            except NotSaved:
                self.best = before
                raise
        self.save_last()

    def save_last(self) -> None:
        """Save the run as it is, unless it is saved. Raises NotSaved."""
        state = self.state()
        now = state["step"], state["last_validation"]
        if now != self.saved:
            # previous.pt is for a damaged last.pt; one of the same step would not be older
            is_older = self.saved is not None and self.saved[0] < state["step"]
            self._save(LAST, state, PREVIOUS if is_older else None)
            self.saved = now

    def _save(self, name: str, state: Checkpoint, previous: str | None = None) -> None:
        before = self._path(previous) if previous else None
        ranks.on_rank0(lambda: checkpoint.save_checkpoint(self._path(name), state, before))

    def warn(self, error: Exception) -> None:
        """Print that the run is not saved, and what its last checkpoint is."""
        what = f"the last checkpoint is of step {self.saved[0]}" if self.saved else "there is no checkpoint yet"
        warn(f"{error}; training goes on, {what}")

    def restore(self, put_back: Callable[[Checkpoint, Path], list[str]]) -> tuple[int, int]:
        """Load the newest whole checkpoint and drop later records. Returns its step and its last validation's."""
        state, wrong = ranks.on_rank0(lambda: checkpoint.load_any(self.folder / "checkpoints", CHECKPOINTS))
        path = self._path(CHECKPOINTS[len(wrong)])
        try:
            changes = put_back(state, path)
            step, validated, self.best = state["step"], state.get("last_validation", state["step"]), state["best"]
        except (UserError, CheckpointError):
            raise
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            raise CheckpointError(f"{path}: not all of a run's state, or of another run ({error!r})") from error
        last = ranks.on_rank0(lambda: self._forget_after(step, validated))
        if wrong:
            lost = f"; steps {step + 1} to {last} are taken again" if last > step else ""
            warn(f"{'; '.join(wrong)}; going on from {path.name}, step {step}{lost}")
        else:
            self.saved = step, validated
        if changes:
            print(f"from step {step} on with other options: {escaped('; '.join(changes))}", flush=True)
        return step, validated

    def _forget_after(self, step: int, validated: int) -> int:
        """Remove what later steps recorded and what a killed run left unfinished. Returns the last step recorded."""
        for orphan in (*self.folder.glob("**/.*.tmp"), *self.folder.glob("checkpoints/*.tmp")):
            orphan.unlink(missing_ok=True)
        return run_folder.forget_after(self.folder / "metrics.jsonl", step, validated)

    def dump(self, step: int, batches: Sequence[Batch]) -> str:
        """Keep the batches whose update was refused. Returns where they are."""
        path = self.folder / "nan_batch.pt"
        plain = [{**batch._asdict(), "cases": list(batch.cases)} for batch in batches]
        try:
            checkpoint.save_checkpoint(path, {"step": step, "batches": plain})
        except NotSaved as full:
            return str(full)
        return f"the batch is in {path}"

    def _path(self, name: str) -> Path:
        return self.folder / "checkpoints" / name
