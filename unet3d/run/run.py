"""One training run in its folder: built, fitted, finished."""

import functools
import math
import signal
import time
import traceback
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from unet3d import build
from unet3d.base import ranks
from unet3d.base.errors import (
    NonFiniteLoss,
    NotSaved,
    OutOfMemory,
    Preempted,
    UserError,
    is_out_of_memory,
    not_saved,
    reason,
)
from unet3d.base.files import write_json, write_text
from unet3d.base.signals import Stop
from unet3d.base.types import IGNORE, Batch
from unet3d.config import rules
from unet3d.config.compose import flat
from unet3d.config.schema import Config, Model
from unet3d.data.cases import Case
from unet3d.data.loader import batches, lost
from unet3d.data.patches import Patches, PreparedCase
from unet3d.data.prepare import PreparedData, Read
from unet3d.data.restore import ArgmaxCollector
from unet3d.memory import budget
from unet3d.memory.meter import MEASURED_STEPS, CudaMeter, open_meter
from unet3d.memory.simulate import fitted
from unet3d.model import geometry
from unet3d.report import memory_plots, run_folder
from unet3d.report.loggers import Loggers, TerminalLogger, open_loggers, warn
from unet3d.run.pretrained import Start
from unet3d.run.resume import BEST, Checkpoints, TrainingState, fingerprint, seed_per_rank
from unet3d.run.validation import Predictions, evaluate, has_own_grids
from unet3d.training import metrics, optim, switches
from unet3d.training.inference import free_bytes
from unet3d.training.metrics import CaseScore
from unet3d.training.trainer import Learner, Trainer


class Run:
    """A run with all its parts. Use it in a `with`.

    With `config.resume` it goes on from its last checkpoint; else it begins with the weights of `start`, unless None.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        data: PreparedData,
        options: Model,
        segment_starts: tuple[int, ...],
        stop: Stop,
        start: Start | None = None,
    ) -> None:
        self.config, self.folder, self.data, self.options, self.stop = config, folder, data, options, stop
        device = build.device(config)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # where page-locked memory and NCCL would else open a context on the first
        loss = build.loss(config, len(data.dataset.classes), device)
        policy = build.policy(config, device.type, segment_starts)
        model = build.model(options, config.seed)
        if start is not None:
            start.load(model)
        self.model = build.prepare_for_ranks(policy.formatted(model.to(device)))
        self.optimizer = optim.optimizer(config.optim, self.model)
        learner = Learner(self.model, loss, self.optimizer, policy.scaler(), policy)
        self.predictor = build.predictor(config, [self.model], options, policy)
        if device.type == "cuda":
            free = free_bytes(device) if config.inference.batch == "auto" else math.inf
            self.predictor = fitted(self.predictor, free)
        self.predictions = Predictions(folder, data, config.data)
        rests_on = fingerprint(data, policy.dtype)
        self.state = TrainingState(config, options, rests_on, self.model, self.optimizer, learner.scaler)
        self.checkpoints = Checkpoints(folder, self._contents)
        self.first, last_validation = self.checkpoints.restore(self.state.load_state_dict) if config.resume else (0, 0)
        if config.resume is None:
            seed_per_rank(config.seed, 0)
        self.memory_before = ranks.on_rank0(lambda: run_folder.read_memory(folder)) if config.resume else {}
        self.has_all_measured = False  # memory.json and memory/ have the last step
        self.is_done = self.first >= config.steps and ranks.on_rank0(lambda: run_folder.is_done(folder))
        self.meter = open_meter(self.model, self.optimizer)
        self.first_case: ArgmaxCollector | None = None  # of the validation that runs
        self.loggers = Loggers([])
        if not self.is_done and ranks.RANK == 0:  # else its folder stays as it is
            run_folder.start_folder(folder, config, device, start.record() if start else None)
            split = {"train": data.train, "val": data.val}  # as data.split reads it
            write_json(folder / "split.json", {use: [case.id for case in cases] for use, cases in split.items()})
            self.loggers = open_loggers(config, folder)
            spacing = run_folder.spacing_words(config.data.spacing)
            grid = f"at {spacing}" if has_own_grids(data, config.data) else ""
            self.loggers.add(TerminalLogger(config.steps, switches=rules.switches_of(config), grid=grid))
        rate = functools.partial(optim.learning_rate, config.optim, config.steps)
        clip, mark, log = config.optim.clip, self._mark, self.loggers.scalars
        self.trainer = Trainer(learner, rate, clip, mark, log, self.first, last_validation)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.meter.close()
        self.loggers.close(0 if kind is None else getattr(kind, "exit_code", 1))

    def fit(self) -> None:
        """Train to the end, with validations and checkpoints. Raises Preempted, once saved, when asked to stop."""
        if self.config.data.sparse is not None and self.config.resume is None:
            shares = [(self.data.read_train(case).label != IGNORE).float().mean().item() for case in self.data.train]
            self.loggers.scalars({"data/labelled_share": fmean(shares)}, 0)
        steps, every = self.config.steps, self.config.eval_every
        try:
            with closing(self._stream()) as stream, self.stop.deferred():
                with suppress(Preempted):  # within a validation, which the resumed run does from its beginning
                    self.trainer.fit(stream, steps, every, self._validate, self._save_in_time, self._stops)
                if self._stops():
                    self._leave()
            return
        except NonFiniteLoss as error:
            batches = [batch for own in ranks.gather(error.batches) for batch in own]
            where = ranks.on_rank0(lambda: self.checkpoints.dump(self.trainer.step + 1, batches))
            raise NonFiniteLoss(f"{error}; {where}") from None
        except (RuntimeError, MemoryError) as error:
            if foreseen := lost(error) or switches.nondeterminism_error(error) or self._not_compiled(error):
                raise foreseen from error
            if not is_out_of_memory(error):
                raise
            lines = [str(error).partition("\n")[0], *budget.oom_moment(self.meter.ledger)]
            traceback.clear_frames(error.__traceback__)  # they hold the step's tensors
        self.meter.close()
        self._free_memory()  # outside of the except block
        raise OutOfMemory("\n".join([*lines, *budget.oom_suggestions(self.config, self.options)]))

    def _mark(self, phase: str) -> None:
        """Tell the meter; compile the network once it has observed its steps: it would see no operations then."""
        self.meter.mark(phase)
        if self.config.compile and self.meter.steps >= MEASURED_STEPS and not switches.is_compiled(self.model):
            self.model.compile()

    def _not_compiled(self, error: Exception) -> UserError | None:
        """Return the error to show where torch.compile failed; None for another error, or where memory ran out."""
        return None if is_out_of_memory(error) else switches.compile_error(error)

    def _free_memory(self) -> None:
        """Let go of gradients, for simulations; on a GPU, which others may wait for, of all tensors."""
        self.optimizer.zero_grad(set_to_none=True)
        if next(self.model.parameters()).device.type == "cuda":
            self.optimizer.state.clear()
            self.model.to_empty(device="meta")
            torch.cuda.empty_cache()

    def _stream(self) -> Generator[list[Batch]]:
        """The batches from this step on; close it to end its workers."""
        config, data = self.config, self.data
        read = functools.partial(_read_nth, data.read_train, data.train)
        tile = geometry.output_size(config.data.patch, self.options)
        transforms = [*zip(config.data.transforms, build.import_all(config)["data.transforms"], strict=True)]
        patches = Patches(read, config.data, config.seed, tile, transforms, len(data.dataset.classes))
        cases = [case.id for case in data.train]
        pin = self.trainer.learner.policy.device_type == "cuda"
        yield from batches(patches, cases, config, self.first, pin)

    def _stops(self) -> bool:
        """Whether a signal has asked any rank to stop."""
        self.asked = ranks.all_reduce_max(self.stop.asked or 0)
        return self.asked > 0

    def _leave(self) -> None:
        """Save where the run is, without a validation. Raises Preempted."""
        name = signal.Signals(self.asked).name
        stopped = f"stopped by {name} after step {self.trainer.step} of {self.config.steps}"
        try:
            self.checkpoints.save_last()
            self._keep_measured_early()
        except NotSaved as error:
            stopped += f", which is not saved: {error}"
        raise Preempted(stopped)

    def _save_in_time(self) -> None:
        """Save between validations, every `save_every` steps."""
        if self.config.save_every and self.trainer.step % self.config.save_every == 0:
            self._save()

    def _save(self) -> None:
        self._keep_measured_early()
        try:
            self.checkpoints.save_last()
        except NotSaved as error:
            self.checkpoints.warn(error)

    def _validate(self) -> None:
        """Validate, keep the best, save the last. The last validation also measures distances and writes label maps."""
        started = time.perf_counter()
        step, classes = self.trainer.step, self.data.dataset.classes
        is_last = step == self.config.steps
        self._keep_measured_early()
        if is_last or self.checkpoints.saved is None:
            self._save()  # of this validation's volumes memory may not hold one
        with optim.averaged(self.model, self.optimizer):
            scores = self._scores(is_last)
        values = metrics.summarise(scores, classes)
        # logged before it is saved: a run killed in between repeats this validation, and its record is replaced
        self.loggers.scalars({**values, "time/val_s": time.perf_counter() - started}, step)
        self.trainer.last_validation = step
        if ranks.RANK == 0 and self.first_case is not None:
            self._show_first(self.first_case.whole(), values["val/dice_mean"])
        self.first_case = None
        try:
            # the checkpoint last: a run that goes on from it does not repeat this validation
            ranks.on_rank0(lambda: write_text(self.folder / "scores.csv", metrics.csv_text(scores, classes)))
            self.checkpoints.save_best_and_last(values["val/dice_mean"])
            self.loggers.summary(
                {"val/dice_mean": values["val/dice_mean"], "val/dice_mean_best": self.checkpoints.best}
            )
        except (NotSaved, OSError) as error:
            problem = error if isinstance(error, NotSaved) else not_saved(self.folder / "scores.csv", error)
            if is_last:
                raise problem from None
            self.checkpoints.warn(problem)

    def _scores(self, is_last: bool) -> list[CaseScore]:
        """Of the held-out cases. Raises OutOfMemory."""
        data, classes, keep = self.data, len(self.data.dataset.classes), functools.partial(self._keep_strips, is_last)
        hd95 = is_last and not self.config.data.semi  # slices have no surface
        if is_last:
            ranks.on_rank0(self.predictions.clear)
        own = data.val[ranks.RANK :: ranks.SIZE]
        try:
            with (
                switches.without_compiler(self.model),
                closing(evaluate(self.predictor, own, data.read_val, classes, hd95, "validation", keep)) as scores,
            ):
                return [*self._in_turns(scores)]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            advice = budget.oom_in_validation(self.config, self.trainer.step, self.predictor.batch)
            lines = [str(error).partition("\n")[0], *advice]
            raise OutOfMemory("\n".join(lines)) from None

    def _keep_strips(self, is_last: bool, case: Case, strips: ArgmaxCollector) -> None:
        """Write the last label maps; note the first case's of each validation, where a logger takes its picture."""
        if case == self.data.val[0] and self.loggers.wants_images:
            self.first_case = strips
        if is_last:
            self.predictions.try_add(case, strips)

    def _show_first(self, prediction: np.ndarray, dice: float | None) -> None:
        """Log a picture of the first held-out case, where disk and memory have room for it."""
        path, step = self.folder / "figures" / "validation.png", self.trainer.step
        mean = "" if dice is None else f", mean Dice of all {dice:.3f}"
        try:
            self.predictions.draw(self.data.val[0], prediction, path, f"{self.data.val[0].id}, step {step}{mean}")
        except OSError as error:
            warn(not_saved(path, error))
        except (UserError, RuntimeError, MemoryError) as error:
            if not (isinstance(error, UserError) or is_out_of_memory(error)):
                raise
            warn(f"{path}: not drawn ({reason(error)})")
        else:
            self.loggers.image("val/prediction", path, step)

    def _in_turns(self, own: Iterator[CaseScore]) -> Iterator[CaseScore]:
        """The scores of all ranks' cases. Raises Preempted where a signal ends the validation of any."""
        for _ in range(0, len(self.data.val), ranks.SIZE):
            found = None
            with suppress(Preempted), self.stop.interruptible():
                found = next(own, None)
            if self._stops():
                raise Preempted("stopped within a validation")
            yield from (score for score in ranks.gather(found) if score is not None)

    def _contents(self) -> dict[str, Any]:
        return self.state.state(self.trainer.step, self.trainer.last_validation, self.checkpoints.best)

    def _keep_measured(self) -> None:
        """memory.json with what the steps taken here needed, if any were; after the last one, memory/ as well."""
        if self.trainer.step == self.first or self.has_all_measured:
            return
        measured = self.meter.summary()
        if self.config.compile:
            measured["kind"] += f", {'compiled' if self._is_measured_compiled() else 'not compiled'}"
        if ranks.count() > 1:
            measured["rank_peak_bytes"] = ranks.gather(measured["peak_bytes"])
        ranks.on_rank0(lambda: self._write_measured(measured))
        self.has_all_measured = self.trainer.step == self.config.steps

    def _is_measured_compiled(self) -> bool:
        """Return whether the peaks are of the compiled network: a GPU allocator's, after the observed steps."""
        return isinstance(self.meter, CudaMeter) and not self.meter.is_observed

    def _write_measured(self, measured: dict[str, Any]) -> None:
        parameters = sum(p.numel() for p in self.model.parameters())
        run_folder.add_measured(self.folder, parameters, measured, self.memory_before)
        if self.trainer.step == self.config.steps:
            memory_plots.write_ledger_files(self.meter.ledger, self.folder.name, self.folder)

    def _keep_measured_early(self) -> None:
        """A run that is stopped or killed now may take no step again, and never again its first."""
        with suppress(OSError):  # the disk is full: `finish` says so
            self._keep_measured()

    def finish(self) -> None:
        """Write everything that is known at the end; predictions are those of the last weights, or of their average."""
        self._keep_measured()
        memory = run_folder.read_memory(self.folder)
        if "measured" in memory:  # by steps taken before the run was stopped, perhaps
            self._log_memory(memory)
        with optim.averaged(self.model, self.optimizer), switches.without_compiler(self.model):
            self.predictions.complete(self.predictor)
        for path in self.predictions.pictures:
            if path.stem != "prediction":  # of the only case, whose picture the last validation has logged
                self.loggers.image(f"val/{path.stem}", path, self.trainer.step)
        found = run_folder.read_run(self.folder)
        self.loggers.table("val/cases", *run_folder.case_table(found))
        self.loggers.summary(run_folder.headline(found))
        best = self.folder / "checkpoints" / BEST
        if self.config.wandb.artifact and best.is_file():
            self.loggers.checkpoint(best)
        run_folder.write_status(self.folder, "done", 0)

    def _log_memory(self, memory: Mapping[str, Any]) -> None:
        """Draw the measured steps; log them as pictures and tables."""
        measured, pictures = memory["measured"], self.folder / "figures"
        ledger = measured.get("ledger", measured)
        memory_plots.phase_plot(measured, pictures / "memory_phases.png")
        memory_plots.layer_plot(ledger, pictures / "memory_layers.png")
        for name in ("phases", "timeline", "layers"):
            if (path := pictures / f"memory_{name}.png").exists():
                self.loggers.image(f"memory/{name}_picture", path, self.trainer.step)
        rows = [[phase, peaks.get("first"), peaks["steady"]] for phase, peaks in measured["phases"].items()]
        self.loggers.table("memory/phases", ["phase", "first step (bytes)", "later steps (bytes)"], rows)
        for name in ("levels", "layers"):
            head = [key if key in ("level", "module", "bytes") else f"{key} (bytes)" for key in ledger[name][0]]
            self.loggers.table(f"memory/{name}", head, [list(row.values()) for row in ledger[name]])
        self.loggers.scalars({"memory/peak_allocated_bytes": measured["peak_bytes"]}, self.trainer.step)
        found = [[key, value] for key, value in flat(memory, ".").items() if not isinstance(value, list)]
        self.loggers.table("memory/all", ["key of memory.json (bytes)", "value"], found)


def _read_nth(read: Read, cases: tuple[Case, ...], index: int) -> PreparedCase:
    return read(cases[index])
