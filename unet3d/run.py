"""One training run in its folder: what is built for it, when it pauses, what is kept of it."""

import dataclasses
import functools
import time
import traceback
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from unet3d import averaging, build, compose, metrics, record, resuming, schedules, snapshot
from unet3d.config import Config, Model
from unet3d.console import Console
from unet3d.data.cases import Case
from unet3d.data.loader import batches, lost
from unet3d.data.patches import Patches, Prepared
from unet3d.errors import OutOfMemory, is_out_of_memory
from unet3d.evaluation import evaluate
from unet3d.losses import IGNORE
from unet3d.memory import distress
from unet3d.memory.meter import open_meter
from unet3d.model import geometry
from unet3d.sinks import Sinks, open_sinks
from unet3d.trainer import Trainer


class Run:
    """Builds everything of a run; with `config.resume`, goes on from its last snapshot. Use it in a `with`."""

    def __init__(self, config: Config, folder: Path, data: build.Data, options: Model, starts: tuple[int, ...]) -> None:
        self.config, self.folder, self.data, self.options = config, folder, data, options
        device = build.device(config)
        loss = build.loss(config, len(data.task.classes))
        policy = build.policy(config, device.type, starts)
        build.refuse_wrong_gradients(config, options)
        self.model = build.model(self.options, config.seed).to(device)
        self.optimizer = build.optimizer(config.optim, self.model)
        self.predictor = build.predictor(config, self.model, self.options, policy)
        self.scaler = policy.scaler()
        self.best: float | None = None
        step = self._restore(folder / "checkpoints" / "last.pt") if config.resume else 0
        self.meter = open_meter(self.model, self.optimizer)
        self.sinks = Sinks([])
        if step < config.steps:  # a finished run is left as it is
            record.start(folder, config, device)
            self.sinks = open_sinks(config, folder)
            self.sinks.add(Console(config.steps))
        rate = functools.partial(schedules.learning_rate, config.optim, config.steps)
        self.trainer = Trainer(
            self.model,
            loss,
            self.optimizer,
            self.scaler,
            policy,
            rate,
            config.optim.clip,
            self.meter.mark,
            self.sinks.scalars,
            step,
        )

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.meter.close()
        self.sinks.close(0 if kind is None else 1)

    @property
    def is_done(self) -> bool:
        """Whether a resumed run has no step left."""
        return self.trainer.step >= self.config.steps

    def averaged(self) -> AbstractContextManager[None]:
        """The weights to predict with: their running average, if the run keeps one."""
        return averaging.averaged(self.model, self.optimizer)

    def fit(self) -> None:
        """Train to the end, pausing to validate and to save."""
        config, data = self.config, self.data
        read = functools.partial(_read_nth, data.learn, data.train)
        tile = geometry.output_size(config.data.patch, self.options)
        patches = Patches(read, config.data, config.seed, tile)
        cases, first = [case.id for case in data.train], self.trainer.step
        if config.data.sparse is not None and not first:
            shares = [(data.learn(case).label != IGNORE).float().mean().item() for case in data.train]
            self.sinks.scalars({"data/labelled_share": fmean(shares)}, 0)
        stream = batches(patches, cases, config.batch, config.accumulate, config.seed, config.workers, first)
        try:
            self.trainer.fit(stream, config.steps, config.eval_every, self._pause)
        except (RuntimeError, MemoryError) as error:
            if dead := lost(error):
                raise dead from error
            if not is_out_of_memory(error):
                raise
            told = [str(error).partition("\n")[0], *distress.moment(self.meter.ledger)]
            traceback.clear_frames(error.__traceback__)  # they hold the step's tensors
        else:
            return
        self.meter.close()
        self.optimizer.zero_grad(set_to_none=True)  # room for the dry runs, outside of the except block
        raise OutOfMemory("\n".join([*told, *distress.remedies(config, self.options)]))

    def _pause(self) -> None:
        """Validate, keep the best, save the last. The last validation also measures surface distances."""
        started = time.perf_counter()
        step, task = self.trainer.step, self.data.task
        with self.averaged():
            scores = evaluate(
                self.predictor, map(self.data.score, self.data.val), len(task.classes), hd95=self._measures_surfaces()
            )
        values = metrics.summarise(scores, task.classes)
        metrics.write_csv(self.folder / "scores.csv", scores, task.classes)
        dice = values["val/dice_mean"]
        is_best = dice is not None and (self.best is None or dice > self.best)
        self.best = dice if is_best else self.best
        for name in ("best", "last") if is_best else ("last",):
            snapshot.save(self.folder / "checkpoints" / f"{name}.pt", self._state())
        self.sinks.scalars({**values, "time/val_s": time.perf_counter() - started}, step)

    def _measures_surfaces(self) -> bool:
        """At the last validation, where whole volumes are scored: slices have no surface."""
        return self.trainer.step == self.config.steps and not self.config.data.semi

    def _state(self) -> dict[str, Any]:
        return {
            "config": compose.to_plain(self.config),
            "model_options": dataclasses.asdict(self.options),
            "classes": list(self.data.task.classes),
            "channels": list(self.data.task.channels),
            "intensity": [dataclasses.asdict(rule) for rule in self.data.read.intensity],
            "step": self.trainer.step,
            "best": self.best,
            "model": self.model.state_dict(),
            "average": averaging.averages(self.model, self.optimizer),  # shares the optimizer's storages, also on disk
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def _restore(self, path: Path) -> int:
        """Put a snapshot's state back, the random state last: building things draws from it. Returns the step."""
        state = snapshot.load(path)
        resuming.refuse_changes(state["config"], compose.to_plain(self.config))
        snapshot.load_weights(self.model, state["model"], path)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.best = state["best"]
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda_rng"])
        step: int = state["step"]
        record.forget_after(self.folder / "metrics.jsonl", step)
        return step


def _read_nth(read: build.Read, cases: tuple[Case, ...], index: int) -> Prepared:
    return read(cases[index])
