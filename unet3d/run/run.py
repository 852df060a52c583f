"""One training run in its folder: fitted, then finished. `open_run` builds it."""

import functools
import signal
import time
import traceback
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from unet3d import build
from unet3d.base import ranks
from unet3d.base.errors import NonFiniteLoss, NotSaved, OutOfMemory, Preempted, is_out_of_memory
from unet3d.base.files import write_text
from unet3d.base.signals import Stop
from unet3d.base.types import IGNORE, Batch
from unet3d.config.schema import Config, flat
from unet3d.data.cases import Case
from unet3d.data.loader import batches, lost
from unet3d.data.patches import Patches, PreparedCase
from unet3d.data.prepare import PreparedData, Read
from unet3d.memory import remedies
from unet3d.memory.meter import MEASURED_STEPS, CudaMeter, LedgerMeter
from unet3d.model import geometry
from unet3d.report import memory_plots, report
from unet3d.report.loggers import Loggers
from unet3d.run import run_folder
from unet3d.run.record import RunRecord, headline, read_run, scores_as_numbers
from unet3d.run.run_folder import MemoryFile, peaks
from unet3d.run.training_state import BEST, CheckpointManager
from unet3d.run.validation import Validator, saving, signal_on_any_rank
from unet3d.training import metrics, optim, switches
from unet3d.training.trainer import Trainer


@dataclass
class Run:
    """A run with all its parts, made by `open_run`. Use it in a `with`."""

    config: Config
    folder: Path
    data: PreparedData
    stop: Stop
    trainer: Trainer
    validator: Validator
    checkpoints: CheckpointManager
    meter: LedgerMeter
    loggers: Loggers
    memory: MemoryFile  # memory.json, with what steps before the resumption needed
    start_step: int  # at which this process begins
    is_done: bool  # whether an earlier process has finished the run
    is_measured: bool = field(default=False, init=False)  # whether memory.json and memory/ have the last step

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.meter.close()
        self.loggers.close(0 if kind is None else getattr(kind, "exit_code", 1))

    def fit(self) -> None:
        """Train to the end, with validations and checkpoints.

        Raises Preempted, once saved, when asked to stop; NonFiniteLoss, OutOfMemory, LoaderError, UserError.
        """
        self.loggers.summary(peaks(self.memory.contents()))  # what was predicted, also of a run that dies in its steps
        if self.config.data.sparse is not None and self.config.resume is None:
            labels = (self.data.read_train(case).label for case in self.data.train)
            share = fmean((label != IGNORE).float().mean().item() for label in labels)
            self.loggers.scalars({"data/labelled_share": share}, 0)
        try:
            with closing(self._stream()) as stream, self.stop.deferred():
                self._train(stream)
            return
        except NonFiniteLoss as error:
            of_all_ranks = list(chain.from_iterable(ranks.gather(error.batches)))
            where = ranks.on_rank0(lambda: self.checkpoints.dump(self.trainer.step + 1, of_all_ranks))
            raise NonFiniteLoss(f"{error}; {where}") from None
        except (RuntimeError, MemoryError) as error:
            foreseen = lost(error) or switches.nondeterminism_error(error, self.config.deterministic)
            if foreseen is None and not is_out_of_memory(error):
                foreseen = switches.compile_error(error)
            if foreseen is not None:
                raise foreseen from error
            if not is_out_of_memory(error):
                raise
            lines = [str(error).partition("\n")[0], *remedies.oom_moment(self.meter.ledger)]
            traceback.clear_frames(error.__traceback__)  # they hold the step's tensors
        self.meter.close()
        self._free_memory()  # outside of the except block
        try:
            lines.extend(
                remedies.oom_suggestions(self.config, self.checkpoints.state.model_config)
            )  # keeps those before an error
        except MemoryError:  # in the search
            lines.append("there is no memory left to search for what would need less: see unet3d memory fit")
        raise OutOfMemory("\n".join(lines))

    def _train(self, stream: Iterator[list[Batch]]) -> None:
        """Train until all steps are done. Raises Preempted, once saved, when asked to stop."""
        with suppress(Preempted):  # within a validation, which the resumed run does from its beginning
            self.trainer.fit(
                stream,
                self.config.steps,
                self.config.eval_every,
                self._validate,
                self.save_if_due,
                lambda: signal_on_any_rank(self.stop) > 0,
            )
        number = signal_on_any_rank(self.stop)
        if number:
            self.stop_after_save(signal.Signals(number))

    def _stream(self) -> Generator[list[Batch]]:
        """Yield the batches from this step on; close it to end its workers."""
        config = self.config
        data = self.data
        patches = Patches(
            functools.partial(_read_nth, data.read_train, data.train),
            config.data,
            config.seed,
            geometry.output_size(config.data.patch, self.checkpoints.state.model_config),
            [*zip(config.data.transforms, build.import_all(config)["data.transforms"], strict=True)],
            data.dataset.label_count,
        )
        pin = self.trainer.learner.policy.device_type == "cuda"
        yield from batches(patches, [case.id for case in data.train], config, self.start_step, pin)

    def _free_memory(self) -> None:
        """Let go of gradients, for simulations; on a GPU, which others may wait for, of all tensors."""
        model, _, optimizer, _, _ = self.trainer.learner
        optimizer.zero_grad(set_to_none=True)
        if next(model.parameters()).device.type == "cuda":
            optimizer.state.clear()
            model.to_empty(device="meta")
            torch.cuda.empty_cache()

    def stop_after_save(self, asked: signal.Signals) -> None:
        """Save where the run is, without a validation. Raises Preempted."""
        stopped = f"stopped by {asked.name} after step {self.trainer.step} of {self.config.steps}"
        try:
            self.checkpoints.save_last(self.trainer.step, self.trainer.last_validation)
            self._try_write_measured_memory()
        except NotSaved as error:
            stopped += f", which is not saved: {error}"
        raise Preempted(stopped)

    def save_if_due(self) -> None:
        """Save between validations, every `save_every` steps; write what the first steps needed."""
        if self.trainer.step - self.start_step in (1, MEASURED_STEPS):
            self._try_write_measured_memory()
        if self.config.save_every and self.trainer.step % self.config.save_every == 0:
            self._save()

    def _save(self) -> None:
        """Save; where that is not possible, training goes on with a warning."""
        self._try_write_measured_memory()
        try:
            self.checkpoints.save_last(self.trainer.step, self.trainer.last_validation)
        except NotSaved as error:
            self.checkpoints.warn(error)

    def _validate(self) -> None:
        """Validate, keep the best, save the last. The last validation also measures distances and writes label maps."""
        started = time.perf_counter()
        step = self.trainer.step
        self._try_write_measured_memory()
        if step == self.config.steps or self.checkpoints.saved is None:
            self._save()  # of this validation's volumes memory may not hold one
        with optim.averaged(self.trainer.learner.model, self.trainer.learner.optimizer):
            scores = self.validator.scores(step)
        values = metrics.summarise(scores, self.data.dataset.classes)
        # logged before it is saved: a run killed in between repeats this validation, and its record is replaced
        self.loggers.scalars({**values, "time/val_s": time.perf_counter() - started}, step)
        self.trainer.last_validation = step
        dice = values["val/dice_mean"]
        self.validator.log_first_case(step, dice)
        self._save_validated(scores, dice)

    def _save_validated(self, scores: list[metrics.CaseScore], dice: float | None) -> None:
        """Save scores.csv and checkpoints. Raises NotSaved in the last validation, else warns."""
        path = self.folder / "scores.csv"
        text = metrics.csv_text(scores, self.data.dataset.classes)
        try:
            # The checkpoint last: a run that is resumed from it does not repeat this validation.
            with saving(path):
                ranks.on_rank0(lambda: write_text(path, text))
            self.checkpoints.save_best_and_last(self.trainer.step, dice)
            self.loggers.summary({"val/dice_mean": dice, "val/dice_mean_best": self.checkpoints.best})
        except NotSaved as error:
            if self.trainer.step == self.config.steps:
                raise
            self.checkpoints.warn(error)

    def write_measured_memory(self) -> None:
        """Write to memory.json what this process's steps needed, if it took any; after the last step memory/ too.

        Raises OSError.
        """
        step = self.trainer.step
        if step == self.start_step or self.is_measured:
            return
        measured = self.meter.summary()
        if self.config.compile:  # a GPU's allocator measures the steps after the observed ones, which are compiled
            is_compiled = isinstance(self.meter, CudaMeter) and not self.meter.is_observed
            measured["kind"] += f", {'compiled' if is_compiled else 'not compiled'}"
        if ranks.count() > 1:
            measured["rank_peak_bytes"] = ranks.gather(measured["peak_bytes"])
        ranks.on_rank0(lambda: self._write_measured(measured))
        self.is_measured = step == self.config.steps

    def _write_measured(self, measured: dict[str, Any]) -> None:
        parameters = sum(p.numel() for p in self.trainer.learner.model.parameters())
        self.memory.add_measured(parameters, measured)
        self.loggers.summary(peaks(self.memory.contents()))
        if self.trainer.step == self.config.steps:
            memory_plots.write_ledger_files(self.meter.ledger, self.folder)

    def _try_write_measured_memory(self) -> None:
        """Write memory.json now: the run may end here, and a resumed one cannot measure the first step again."""
        with suppress(OSError):  # the disk is full: `finish` says so
            self.write_measured_memory()

    def finish(self) -> RunRecord:
        """Write all that is known at the end, and return it; predictions are of the last weights, or their average."""
        self.write_measured_memory()
        memory = self.memory.contents()
        if "measured" in memory:  # by steps taken before the run was stopped, perhaps
            peak = memory["measured"]["peak_bytes"]
            self.loggers.scalars({"memory/peak_allocated_bytes": peak}, self.trainer.step)
        model = self.trainer.learner.model
        with optim.averaged(model, self.trainer.learner.optimizer), switches.without_compiler(model):
            self.validator.complete()
        record = read_run(self.folder, memory)
        report.draw_figures(record)
        if "measured" in memory:
            self._log_memory(memory)
        for path in self.validator.pictures:
            if path.stem != "prediction":  # of the only case, whose picture the last validation has logged
                self.loggers.image(f"val/{path.stem}", path, self.trainer.step)
        self.loggers.table("val/cases", *scores_as_numbers(record))
        self.loggers.summary(headline(record))
        best = self.folder / "checkpoints" / BEST
        if self.config.wandb.artifact and best.is_file():
            self.loggers.checkpoint(best)
        return replace(record, status=run_folder.write_status(self.folder, "done", 0))

    def _log_memory(self, memory: Mapping[str, Any]) -> None:
        """Log the figures of the measured steps, and tables of them."""
        measured = memory["measured"]
        ledger = measured.get("ledger", measured)
        for name in ("phases", "timeline", "layers"):
            path = self.folder / "figures" / f"memory_{name}.png"
            if path.exists():
                self.loggers.image(f"memory/{name}_picture", path, self.trainer.step)
        rows = [[phase, sizes.get("first"), sizes["steady"]] for phase, sizes in measured["phases"].items()]
        self.loggers.table("memory/phases", ["phase", "first step (bytes)", "later steps (bytes)"], rows)
        for name in ("levels", "layers"):
            head = [key if key in ("level", "module", "bytes") else f"{key} (bytes)" for key in ledger[name][0]]
            self.loggers.table(f"memory/{name}", head, [list(row.values()) for row in ledger[name]])
        entries = flat(memory, ".").items()
        numbers = [[key, value] for key, value in entries if not isinstance(value, list)]
        self.loggers.table("memory/all", ["key of memory.json (bytes)", "value"], numbers)


def _read_nth(read: Read, cases: tuple[Case, ...], index: int) -> PreparedCase:
    return read(cases[index])
