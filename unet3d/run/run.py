"""One training run in its folder, from built objects to the last file."""

import functools
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any

from unet3d import build
from unet3d.compose import flat
from unet3d.config import Config, Model
from unet3d.data.cases import Case
from unet3d.data.loader import batches, lost
from unet3d.data.patches import Patches, PreparedCase
from unet3d.errors import NonFiniteLoss, NotSaved, OutOfMemory, Preempted, is_out_of_memory
from unet3d.files import write_text
from unet3d.memory import budget
from unet3d.memory.meter import open_meter
from unet3d.model import geometry
from unet3d.report import memory_plots, run_folder
from unet3d.report.loggers import Loggers, TerminalLogger, open_loggers
from unet3d.run.resume import Checkpoints, TrainingState, fingerprint
from unet3d.run.validate import Predictions, evaluate
from unet3d.signals import Stop
from unet3d.train import metrics, optim
from unet3d.train.metrics import CaseScore
from unet3d.train.trainer import Trainer
from unet3d.types import IGNORE, Batch


class Run:
    """Builds everything of a run; with `config.resume`, goes on from its last snapshot. Use it in a `with`."""

    def __init__(
        self, config: Config, folder: Path, data: build.Data, options: Model, starts: tuple[int, ...], stop: Stop
    ) -> None:
        self.config, self.folder, self.data, self.options, self.stop = config, folder, data, options, stop
        device = build.device(config)
        loss = build.loss(config, len(data.dataset.classes))
        policy = build.policy(config, device.type, starts)
        self.model = build.model(self.options, config.seed).to(device)
        self.optimizer = optim.optimizer(config.optim, self.model)
        self.predictor = build.predictor(config, [self.model], self.options, policy)
        self.predictions = Predictions(folder, data, config.data)
        self.scaler = policy.scaler()
        rests_on = fingerprint(data, policy.dtype)
        self.moment = TrainingState(config, options, rests_on, self.model, self.optimizer, self.scaler)
        self.checkpoints = Checkpoints(folder, self._state)
        step, paused = self.checkpoints.restore(self.moment.put_back) if config.resume else (0, 0)
        self.first = step
        self.memory_before = run_folder.read_memory(folder) if config.resume else {}
        self.has_firsts = self.is_measured = False  # memory.json has the first steps; the last, and memory/, too
        self.is_done = step >= config.steps and run_folder.is_done(folder)
        self.meter = open_meter(self.model, self.optimizer)
        self.sinks = Loggers([])
        if not self.is_done:  # else it is left as it is
            run_folder.start_folder(folder, config, device)
            self.sinks = open_loggers(config, folder)
            self.sinks.add(TerminalLogger(config.steps))
        rate = functools.partial(optim.learning_rate, config.optim, config.steps)
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
            paused,
        )

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.meter.close()
        self.sinks.close(0 if kind is None else getattr(kind, "exit_code", 1))

    def averaged(self) -> AbstractContextManager[None]:
        """The weights to predict with: their running average, if the run keeps one."""
        return optim.averaged(self.model, self.optimizer)

    def keep_measured(self) -> None:
        """memory.json with what the steps taken here needed, if any were; after the last one, memory/ as well."""
        if self.trainer.step == self.first or self.is_measured:
            return
        parameters = sum(p.numel() for p in self.model.parameters())
        run_folder.add_measured(self.folder, parameters, self.meter.summary(), self.memory_before)
        if self.trainer.step == self.config.steps:
            memory_plots.write_ledger_files(self.meter.ledger, self.folder.name, self.folder)
            self.is_measured = True

    def _keep_measured_early(self) -> bool:
        """A run that is stopped or killed now may take no step again, and never again its first. Whether it is kept."""
        try:
            self.keep_measured()
        except OSError:  # the disk is full: a run that comes to its end says so
            return False
        return True

    def _keep_firsts(self) -> None:
        """memory.json with the first steps, once."""
        if not self.has_firsts:
            self.has_firsts = self._keep_measured_early() and self.meter.is_steady

    def fit(self) -> None:
        """Train to the end, pausing to validate and to save. Raises Preempted, once saved, when asked to stop."""
        if self.config.data.sparse is not None and self.config.resume is None:
            shares = [(self.data.read_train(case).label != IGNORE).float().mean().item() for case in self.data.train]
            self.sinks.scalars({"data/labelled_share": fmean(shares)}, 0)
        try:
            self._train(self._stream())
        except NonFiniteLoss as error:
            raise NonFiniteLoss(f"{error}; {self.checkpoints.dump(self.trainer.step + 1, error)}") from None
        except (RuntimeError, MemoryError) as error:
            if dead := lost(error):
                raise dead from error
            if not is_out_of_memory(error):
                raise
            told = [str(error).partition("\n")[0], *budget.oom_moment(self.meter.ledger)]
            traceback.clear_frames(error.__traceback__)  # they hold the step's tensors
        else:
            return
        self.meter.close()
        self.optimizer.zero_grad(set_to_none=True)  # room for the dry runs, outside of the except block
        raise OutOfMemory("\n".join([*told, *budget.oom_suggestions(self.config, self.options)]))

    def _stream(self) -> Iterator[list[Batch]]:
        """The batches from this step on."""
        config, data = self.config, self.data
        read = functools.partial(_read_nth, data.read_train, data.train)
        tile = geometry.output_size(config.data.patch, self.options)
        transforms = build.import_all(config)["data.transforms"]
        patches, cases = Patches(read, config.data, config.seed, tile, transforms), [case.id for case in data.train]
        first, pin = self.trainer.step, self.trainer.policy.device_type == "cuda"
        return batches(patches, cases, config.batch, config.accumulate, config.seed, config.workers, first, pin=pin)

    def _train(self, stream: Iterator[list[Batch]]) -> None:
        every, steps = self.config.eval_every, self.config.steps
        with self.stop.deferred():
            try:
                self.trainer.fit(stream, steps, every, self._pause, self.stop, self._save)
            except Preempted:  # within a validation, which the resumed run takes again
                assert self.stop()
            if self.stop.asked:
                self._leave(self.stop.asked.name)

    def _leave(self, signal: str) -> None:
        """Save where the run is, without a validation. Raises Preempted."""
        stopped = f"stopped by {signal} after step {self.trainer.step} of {self.config.steps}"
        try:
            self.checkpoints.save_last()
            self._keep_measured_early()
        except NotSaved as error:
            stopped += f", which is not saved: {error}"
        raise Preempted(stopped)

    def _save(self) -> None:
        """Save between validations, when it is time."""
        every = self.config.save_every
        if every and self.trainer.step % every == 0:
            self._save_now()

    def _save_now(self) -> None:
        self._keep_firsts()
        try:
            self.checkpoints.save_last()
        except NotSaved as error:
            self.checkpoints.warn(error)

    def _pause(self) -> None:
        """Validate, keep the best, save the last. The last validation also measures distances and writes label maps."""
        started = time.perf_counter()
        step, task = self.trainer.step, self.data.dataset
        self._keep_firsts()
        if step == self.config.steps:
            self._keep_measured_early()
        if step == self.config.steps or self.checkpoints.saved is None:
            self._save_now()  # of this validation's volumes memory may not hold one
        with self.averaged(), self.stop.interruptible():
            scores = self._scores()
        values = metrics.summarise(scores, task.classes)
        # told before it is saved: a run killed in between takes this validation again, and its record with it
        self.sinks.scalars({**values, "time/val_s": time.perf_counter() - started}, step)
        self.trainer.paused = step
        try:
            # the snapshot last: a run that goes on from it does not take this validation again
            write_text(self.folder / "scores.csv", metrics.csv_text(scores, task.classes))
            self.checkpoints.keep(values["val/dice_mean"])
        except (NotSaved, OSError) as error:
            if step < self.config.steps:
                self.checkpoints.warn(error)
            elif isinstance(error, NotSaved):
                raise
            else:
                raise NotSaved(f"scores.csv: not saved ({error})") from error

    def _scores(self) -> list[CaseScore]:
        """Of the held-out cases. Raises OutOfMemory."""
        data, keep = self.data, None
        if self.trainer.step == self.config.steps:
            self.predictions.clear()
            keep = self.predictions.try_add
        try:
            hd95 = self._measures_surfaces()
            return evaluate(self.predictor, data.val, data.read_val, len(data.dataset.classes), hd95, keep)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            told = [str(error).partition("\n")[0], *budget.oom_in_validation(self.config, self.trainer.step)]
            raise OutOfMemory("\n".join(told)) from None

    def _measures_surfaces(self) -> bool:
        """At the last validation, where whole volumes are scored: slices have no surface."""
        return self.trainer.step == self.config.steps and not self.config.data.semi

    def _state(self) -> dict[str, Any]:
        return self.moment.state(self.trainer.step, self.trainer.paused, self.checkpoints.best)


def _read_nth(read: build.Read, cases: tuple[Case, ...], index: int) -> PreparedCase:
    return read(cases[index])


def finish_run(run: Run) -> None:
    """Write everything that is known at the end; predictions are those of the last weights, or of their average."""
    run.keep_measured()
    if "measured" in (
        memory := run_folder.read_memory(run.folder)
    ):  # by steps taken before the run was stopped, perhaps
        _tell_memory(run, memory)
    with run.averaged():
        run.predictions.complete(run.predictor)
    if run.predictions.picture.exists():
        run.sinks.image("val/prediction", run.predictions.picture, run.trainer.step)
    (run.folder / "report.html").unlink(missing_ok=True)  # of an earlier end; one is written next
    run_folder.write_status(run.folder, "done", 0)


def _tell_memory(run: Run, memory: Mapping[str, Any]) -> None:
    """Files and pictures of the measured steps; the same to the sinks, as tables, pictures and summary."""
    measured, pictures = memory["measured"], run.folder / "figures"
    memory_plots.phase_plot(measured, pictures / "memory_phases.png")
    seen = measured.get("ledger", measured)
    memory_plots.layer_plot(seen, pictures / "memory_layers.png")
    for name in ("phases", "timeline", "layers"):
        if (path := pictures / f"memory_{name}.png").exists():
            run.sinks.image(f"memory/{name}_picture", path, run.trainer.step)
    rows = [[phase, peaks["first"], peaks["steady"]] for phase, peaks in measured["phases"].items()]
    run.sinks.table("memory/phases", ["phase", "first step (bytes)", "later steps (bytes)"], rows)
    for name in ("levels", "layers"):
        head = [key if key in ("level", "module", "bytes") else f"{key} (bytes)" for key in seen[name][0]]
        run.sinks.table(f"memory/{name}", head, [list(row.values()) for row in seen[name]])
    run.sinks.scalars({"memory/peak_allocated_bytes": measured["peak_bytes"]}, run.trainer.step)
    scalars = {key: value for key, value in flat(memory, "/", "memory/").items() if not isinstance(value, list)}
    run.sinks.summary(scalars)
