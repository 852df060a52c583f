"""One training run in its folder, from its config to its report: its parts are built in order, then it is fitted."""

import functools
import signal
import time
import traceback
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from unet3d import build
from unet3d.base import ranks, signals
from unet3d.base.errors import (
    NonFiniteLoss,
    NotSaved,
    OutOfMemory,
    Preempted,
    UserError,
    is_out_of_memory,
    saving,
    warn,
)
from unet3d.base.files import write_json, write_text
from unet3d.base.signals import Stop
from unet3d.base.types import IGNORE, Batch
from unet3d.config import compose, rules
from unet3d.config.schema import GENERATED, Config, Model, flat
from unet3d.data.cases import Case, read_dataset
from unet3d.data.check import mostly_padding, read_grids
from unet3d.data.loader import batches, lost
from unet3d.data.patches import Patches, PreparedCase
from unet3d.data.prepare import PreparedData, Read, prepare_data
from unet3d.data.splits import split
from unet3d.data.volume import Grid
from unet3d.memory import prediction, remedies
from unet3d.memory.meter import MEASURED_STEPS, CudaMeter, open_meter
from unet3d.model import geometry
from unet3d.model.unet import UNet3D
from unet3d.recomputing.prepare import bound
from unet3d.recomputing.program import Program, Technique
from unet3d.report import memory_plots, report
from unet3d.report.loggers import Loggers, TerminalLogger, open_loggers
from unet3d.run import run_folder
from unet3d.run.predict import Segmenter, fitted_predictor
from unet3d.run.pretrained import PretrainedWeights, load_pretrained
from unet3d.run.record import RunRecord, headline, read_run, scores_as_numbers
from unet3d.run.run_folder import peaks, read_memory, update_memory, without_damaged
from unet3d.run.training_state import BEST, CheckpointManager, fingerprint, seed_per_rank
from unet3d.run.validation import Validator, has_own_grids, signal_on_any_rank
from unet3d.training import metrics, optim, switches
from unet3d.training.trainer import Learner, Trainer


@dataclass
class Run:
    """A run with all its parts. Use it in a `with`."""

    config: Config
    folder: Path
    data: PreparedData
    model_config: Model
    technique: Technique
    stop: Stop
    pretrained: PretrainedWeights | None  # A resumed run has its last checkpoint instead.
    is_measured: bool = field(default=False, init=False)  # whether memory.json and memory/ have the last step

    def __post_init__(self) -> None:
        config, data, folder = self.config, self.data, self.folder
        device = build.device(config)
        learner = self._learner(device)
        predictor = fitted_predictor(config, [learner.model], self.model_config, learner.policy, device)
        segmenter = Segmenter(predictor, data.read.intensity, config.data, data.dataset.classes)
        rests_on = fingerprint(data, learner.policy.dtype)
        self.checkpoints = CheckpointManager(folder, config, self.model_config, rests_on, learner, data.read.seen)
        step, last_validation = 0, 0
        if config.resume is None:
            seed_per_rank(config.seed, 0)
        else:
            step, last_validation = self.checkpoints.restore()
        self.start_step = step  # at which this process begins
        self.memory = ranks.on_rank0(lambda: read_memory(folder))
        self.earlier_memory = {} if config.resume is None else dict(self.memory)
        self.is_done = step >= config.steps and ranks.on_rank0(lambda: run_folder.is_done(folder))
        self.meter = open_meter(learner.model, learner.optimizer)
        self.loggers = Loggers([])
        if not self.is_done and ranks.RANK == 0:  # The folder of a finished run stays unchanged.
            self._start_folder(device)
        self.trainer = Trainer(
            learner,
            learning_rate=functools.partial(optim.learning_rate, config.optim, config.steps),
            clip=config.optim.clip,
            mark=self._mark,
            log=self.loggers.scalars,
            step=step,
            last_validation=last_validation,
        )
        self.validator = Validator(config, folder, data, segmenter, self.loggers, self.stop)

    def _learner(self, device: torch.device) -> Learner:
        """Build the network on the device, and what updates it."""
        if device.type == "cuda":
            torch.cuda.set_device(device)  # Page-locked memory and NCCL would open a context on the first GPU.
        config, model_config, technique = self.config, self.model_config, self.technique
        assert model_config.classes is not None
        loss = build.loss(config, model_config.classes, device, model_config.output_regions)
        policy = build.policy(config, device.type, technique)
        model = build.model(model_config, config.seed)
        if self.pretrained is not None:
            self.pretrained.load(model)
        model = build.prepare_for_ranks(policy.formatted(model.to(device)))
        optimizer = optim.optimizer(config.optim, model)
        technique = technique._replace(
            program=_program_of(model.train(), technique.program, policy.dtype),
            window_program=_program_of(model.eval(), technique.window_program, policy.dtype),
        )
        model.train()
        policy = replace(policy, technique=technique)
        return Learner(model, loss, optimizer, policy.scaler(), policy)

    def _start_folder(self, device: torch.device) -> None:
        """Make the subfolders, write what is known before the first step, and open the loggers."""
        config, data, folder = self.config, self.data, self.folder
        for part in ("checkpoints", "figures", "predictions"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        old = ["report.html"]  # It tells of an earlier end; the next one writes it again.
        if config.resume is None:
            old += ["metrics.jsonl", "init.json"]  # That run ended before its first checkpoint.
        for name in old:
            (folder / name).unlink(missing_ok=True)
        if self.pretrained is not None:
            write_json(folder / "init.json", self.pretrained.record())
        write_text(folder / "config.yaml", compose.to_yaml(config))
        write_json(folder / "env.json", run_folder.environment(device))
        write_text(folder / "STATUS", "running\n")
        about = {
            "classes": data.dataset.classes,
            "channels": data.dataset.channels,
            "intensity": [asdict(rule) for rule in data.read.intensity],
            "ignore": data.dataset.ignore,
        }
        names = {"train": [case.id for case in data.train], "val": [case.id for case in data.val]}
        write_json(folder / "split.json", {**names, "data": about})  # data.split reads the names.
        self.loggers = open_loggers(config, folder)
        grid = ""
        if has_own_grids(data, config.data):
            grid = f"at {run_folder.spacing_words(config.data.spacing)}"
        self.loggers.add(TerminalLogger(config.steps, switches=rules.switches_of(config), grid=grid))

    def _mark(self, phase: str) -> None:
        """Tell the meter; compile the network once it has observed its steps: it would see no operations then."""
        self.meter.mark(phase)
        model = self.trainer.learner.model
        if self.config.compile and self.meter.steps >= MEASURED_STEPS and not switches.is_compiled(model):
            model.compile()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.meter.close()
        self.loggers.close(0 if kind is None else getattr(kind, "exit_code", 1))

    def fit(self) -> None:
        """Train to the end, with validations and checkpoints.

        Raises Preempted, once saved, when asked to stop; NonFiniteLoss, OutOfMemory, LoaderError, UserError.
        """
        # What was predicted, also of a run that dies in its steps.
        self.loggers.summary(peaks(without_damaged(self.memory)))
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
            foreseen = lost(error) or switches.foreseen_error(error, self.config.deterministic)
            if foreseen is not None:
                raise foreseen from error
            if not is_out_of_memory(error):
                raise
            lines = [str(error).partition("\n")[0], *remedies.oom_moment(self.meter.ledger)]
            traceback.clear_frames(error.__traceback__)  # they hold the step's tensors
        self.meter.close()
        self._free_memory()  # outside of the except block
        try:
            lines.extend(remedies.oom_suggestions(self.config, self.model_config))  # keeps those before an error
        except MemoryError:  # The search may run out of memory.
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
        if not number:
            return
        stopped = f"stopped by {signal.Signals(number).name} after step {self.trainer.step} of {self.config.steps}"
        try:  # without a validation
            self.checkpoints.save_last(self.trainer.step, self.trainer.last_validation)
            self._try_write_measured_memory()
        except NotSaved as error:
            stopped += f", which is not saved: {error}"
        raise Preempted(stopped)

    def _stream(self) -> Generator[list[Batch]]:
        """Yield the batches from this step on; close it to end its workers."""
        config = self.config
        data = self.data
        patches = Patches(
            functools.partial(_read_nth, data.read_train, data.train),
            config.data,
            config.seed,
            geometry.output_size(config.data.patch, self.model_config),
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

    def save_if_due(self) -> None:
        """Save between validations, every `save_every` steps; write what the first steps needed."""
        if self.trainer.step - self.start_step in (1, MEASURED_STEPS):
            self._try_write_measured_memory()
        if self.config.save_every and self.trainer.step % self.config.save_every == 0:
            self._save()

    def _save(self) -> None:
        """Save; where that is not possible, training continues with a warning."""
        self._try_write_measured_memory()
        try:
            self.checkpoints.save_last(self.trainer.step, self.trainer.last_validation)
        except NotSaved as error:
            self.checkpoints.warn(error)

    def _validate(self) -> None:
        """Validate, keep the best, save the last. The last validation also measures distances and writes label maps.

        Raises NotSaved in the last validation; else what cannot be saved is a warning.
        """
        started = time.perf_counter()
        step = self.trainer.step
        self._try_write_measured_memory()
        if step == self.config.steps or self.checkpoints.saved is None:
            self._save()  # Memory may not hold a volume of this validation.
        with optim.averaged(self.trainer.learner.model, self.trainer.learner.optimizer):
            scores = self.validator.scores(step)
        values = metrics.summarise(scores, self.data.dataset.classes)
        # logged before it is saved: a run killed in between repeats this validation, and its record is replaced
        self.loggers.scalars({**values, "time/val_s": time.perf_counter() - started}, step)
        self.trainer.last_validation = step
        dice = values["val/dice_mean"]
        self.validator.log_first_case(step, dice)
        path = self.folder / "scores.csv"
        text = metrics.csv_text(scores, self.data.dataset.classes)
        try:
            # The checkpoint last: a run that is resumed from it does not repeat this validation.
            with saving(path):
                ranks.on_rank0(lambda: write_text(path, text))
            self.checkpoints.save_best_and_last(step, dice)
            self.loggers.summary({"val/dice_mean": dice, "val/dice_mean_best": self.checkpoints.best})
        except NotSaved as error:
            if step == self.config.steps:
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
        is_last = step == self.config.steps

        def write() -> None:
            parameters = sum(p.numel() for p in self.trainer.learner.model.parameters())
            run_folder.add_measured(self.folder, self.memory, self.earlier_memory, parameters, measured)
            self.loggers.summary(peaks(without_damaged(self.memory)))
            if is_last:
                memory_plots.write_ledger_files(self.meter.ledger, self.folder)

        ranks.on_rank0(write)
        self.is_measured = is_last

    def _try_write_measured_memory(self) -> None:
        """Write memory.json now: the run may end here, and a resumed one cannot measure the first step again."""
        with suppress(OSError):  # the disk is full: `finish` says so
            self.write_measured_memory()

    def finish(self) -> RunRecord:
        """Write all that is known at the end, and return it; predictions are of the last weights, or their average."""
        self.write_measured_memory()
        memory = without_damaged(self.memory)
        if "measured" in memory:  # Steps before a stop may have been measured.
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
            if path.stem != "prediction":  # The last validation has logged the only case's.
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
        entries = flat(memory).items()
        numbers = [[key, value] for key, value in entries if not isinstance(value, list)]
        self.loggers.table("memory/all", ["key of memory.json (bytes)", "value"], numbers)


def _program_of(model: nn.Module, program: Program | None, autocast: torch.dtype | None) -> Program | None:
    """Return the program for the run's own network, in its present mode.

    It was prepared for another object; of a user's network, another call may give other constants.
    """
    is_own = isinstance(model, UNet3D) and all(parameter.requires_grad for parameter in model.parameters())
    if program is None or is_own:
        return program
    shape = program.maps.graph.image.shape
    image = torch.empty(shape, device=next(model.parameters()).device)
    return bound(program, model, image, autocast)


def _read_nth(read: Read, cases: tuple[Case, ...], index: int) -> PreparedCase:
    return read(cases[index])


def run(config: Config, folder: Path, stop: Stop) -> None:
    """Train in the folder, in this process or on several ranks, which all call this. Ends early once `stop`."""
    if build.device_type(config) == "cuda":
        rules.refuse_indeterminate(config)
    for line in rules.warnings(config):
        warn(line)
    ranks.broadcast_job([compose.to_plain(config), str(folder.resolve())])
    joined = ranks.joined(build.device_type(config), config.rank_timeout)
    with switches.switched(config.cuda, config.deterministic), joined:
        build.import_all(config)  # a wrong path is answered now; tensors of an imported module are real, not fake ones
        data = None if config.dry_run else prepare_data(config.data)
        if data is None:
            model_config = ranks.on_rank0(lambda: build.model_config_from_headers(config))
        else:
            model_config = build.model_options(config, data.dataset, data.spacing)
        if config.resume is None and not ranks.RANK:
            _warn_of_patch(config, data)
        start = None
        if config.init is not None and config.resume is None:
            start = ranks.on_rank0(lambda: load_pretrained(config, model_config, data))
            config = start.config
        predicted = ranks.on_rank0(lambda: _preflight(config, model_config, folder))
        signals.raise_again()
        if data is None:
            ranks.on_rank0(lambda: update_memory(folder, read_memory(folder), predicted.memory))
            return
        technique = predicted.technique(config, model_config)
        with Run(config, folder, data, model_config, technique, stop, start) as opened:
            if not opened.is_done:
                ranks.on_rank0(lambda: update_memory(folder, opened.memory, predicted.memory))
                opened.fit()
            record = _record_of(opened)
        if record is not None:
            signals.raise_again()
            report.write_page(record)
            report.print_summary(record)


def _record_of(opened: Run) -> RunRecord | None:
    """Score a run that has been trained; one that was done gets its report alone, and None where it has that.

    None on all ranks but the first.
    """
    if opened.is_done:
        print(f"nothing to do: step {opened.start_step} of {opened.config.steps} is done; to train longer, set steps=N")
        if (opened.folder / "report.html").exists():  # A run that was killed as it wrote the report left none.
            return None
    ranks.leave()
    if ranks.RANK:
        return None
    if not opened.is_done:
        return opened.finish()
    record = read_run(opened.folder)
    report.draw_figures(record)
    return record


def _preflight(config: Config, model_config: Model, folder: Path) -> prediction.Preflight:
    """Return the prediction of the run, with what its plan promised, which a resumed run has in memory.json."""
    schedule = None
    if config.resume is not None and config.recompute != "none":
        schedule = read_memory(folder).get("schedule")
    predicted = prediction.preflight(config, model_config, schedule)
    if config.plan is None or config.resume is not None:
        return predicted
    plan = compose.read_plan(config.plan)
    entry = report.plan_entry(plan.options, plan.promise, compose.flat(compose.to_plain(config)))
    return predicted._replace(memory={**predicted.memory, "plan": entry})


def _warn_of_patch(config: Config, data: PreparedData | None) -> None:
    """Print a line where the patch is mostly padding in the training cases; a dry run reads their headers alone."""
    grids: Sequence[Grid] = () if data is None else data.train_grids
    if data is None and config.data.format not in GENERATED:
        with suppress(UserError):
            train, _ = split(read_dataset(config.data), config.data)
            grids = read_grids(train, config.data.spacing)
    advice = mostly_padding(config.model, config.data.patch, grids)
    if advice:
        warn(advice)
