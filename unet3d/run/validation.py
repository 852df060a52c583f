"""Held-out cases: predicted, scored, written as label maps; within a run, by all its ranks.

Every validation scores on the grid that the network sees. Where `data.spacing` makes that another grid than the
files', the label maps of the last validation are scored on the files' grids too.
"""

import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import nn

from unet3d.base import progress, ranks
from unet3d.base.errors import OutOfMemory, Preempted, UserError, is_out_of_memory, not_saved, reason, warn
from unet3d.base.files import read_csv, read_text, write_text
from unet3d.base.signals import Stop
from unet3d.base.types import IGNORE, Regions
from unet3d.config.schema import Config, Loss
from unet3d.config.schema import Data as Options
from unet3d.data.cases import Case, DatasetInfo
from unet3d.data.labels import written_values
from unet3d.data.prepare import PreparedData, Read
from unet3d.data.preprocess import extent, scored_slices
from unet3d.data.restore import ArgmaxCollector, largest_components
from unet3d.data.volume import LabelValues, on_network_grid, read_label_map, stored_spacing
from unet3d.memory import remedies
from unet3d.report import case_plots
from unet3d.report.loggers import Loggers
from unet3d.report.plots import remove_picture
from unet3d.report.scores import ROLES, chosen
from unet3d.run.predict import save_prediction
from unet3d.training import switches
from unet3d.training.inference import Predictor
from unet3d.training.losses import VolumeLoss
from unet3d.training.metrics import CaseScore, both_csv_text, score_case

Keep = Callable[[Case, ArgmaxCollector], None]


def evaluate(
    predictor: Predictor,
    cases: Sequence[Case],
    read: Read,
    classes: int,
    hd95: bool,
    title: str,
    keep: Keep | None = None,
    regions: Regions | None = None,
    loss: Loss | None = None,
    largest: Sequence[int] = (),
) -> Generator[CaseScore]:
    """Yield the score of each case on the network's grid; `title` names the progress bar.

    `classes` is the number of labels in label maps, of which `regions` are made. `keep` gets each case and may take its
    strips, which are then not computed again. With the options of a `loss`, each score has it. Of the classes `largest`
    only the largest component counts.
    """
    for case in progress.track(cases, title, len(cases)):
        prepared = read(case)
        label = prepared.label.numpy()
        volume_loss = None
        probabilities = predictor.strips(prepared.image, case.named)
        if loss is not None and VolumeLoss.exists(loss):
            outputs = classes if regions is None else len(regions.labels)
            volume_loss = VolumeLoss(loss, outputs, regions)
            probabilities = volume_loss.adding(probabilities, label)
        strips = ArgmaxCollector(probabilities, regions)
        if keep is not None:
            keep(case, strips)
        prediction = largest_components(strips.whole(), largest)
        score = score_case(case.id, prediction, label, classes, prepared.spacing, IGNORE, hd95, regions)
        if volume_loss is not None:
            score = score._replace(loss=volume_loss.value())
        yield score
        del prepared, probabilities, strips, prediction, label  # before the next case is read


def score_on_own_grid(case: Case, prediction: np.ndarray, dataset: DatasetInfo) -> CaseScore:
    """Return scores of a label map (X, Y, Z) in the axes of the case's files, against theirs. Raises UserError."""
    count = dataset.label_count
    assert case.label is not None, case.id
    truth, _ = read_label_map(case, case.label, LabelValues.of_files(dataset))
    return score_case(case.id, prediction, truth, count, stored_spacing(case), dataset.ignore, True, dataset.regions)


def has_own_grids(data: PreparedData, options: Options) -> bool:
    """Return whether the network sees a held-out case on another grid than its file's.

    Slices to score are of the network's grid.
    """
    return not options.semi and any(data.headers[case.id].is_resampled for case in data.val)


@dataclass
class Predictions:
    """predictions/ and the pictures of some of them in figures/: made by the last validation, then completed."""

    folder: Path
    data: PreparedData
    options: Options

    @property
    def pictures(self) -> list[Path]:
        """Existing pictures: of the best, the median and the worst case, or of the only one."""
        return [path for path in map(self._picture, ("", *ROLES)) if path.exists()]

    def clear(self) -> None:
        """Remove what an earlier end of this run left: it belongs to other weights."""
        for path in self.pictures:
            remove_picture(path)
        for case in self.data.val:
            self._path(case).unlink(missing_ok=True)

    def try_add(self, case: Case, strips: ArgmaxCollector) -> None:
        """Write the label map of a case, if that is possible; `complete` makes up for it, or raises."""
        try:
            with suppress(UserError):
                self._add(case, strips)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise

    def complete(self, predictor: Predictor) -> None:
        """Add what is missing, as after a kill or on a disk that was full. Raises NotSaved, UserError."""
        missing = [case for case in self.data.val if not self._path(case).exists()]
        for case in progress.track(missing, "predicting cases", len(missing)) if missing else ():
            image = self.data.read_val(case).image
            strips = ArgmaxCollector(predictor.strips(image, case.named), self.data.dataset.regions)
            self._add(case, strips)
            strips.whole()
        if has_own_grids(self.data, self.options):
            self._score()
        for role, (case, title) in self._shown().items():
            path = self._picture(role)
            if not path.exists():
                with _saving(path):
                    labels, header = read_label_map(case, self._path(case), LabelValues.written(self._values))
                    self.draw(case, on_network_grid(labels, case, header, self.options.spacing, None), path, title)

    @property
    def _values(self) -> tuple[int, ...]:
        """The value of each class in the label maps."""
        return written_values(self.options, self.data.dataset.label_count)

    def _add(self, case: Case, strips: ArgmaxCollector) -> None:
        path = self._path(case)
        if not path.exists():
            with _saving(path):
                files, regions = self.data.read.files, self.data.dataset.regions
                save_prediction(
                    path, strips, case, self.options.spacing, values=self._values, files=files, regions=regions
                )

    def _score(self) -> None:
        """Put the scores of the label maps on the files' own grids first in scores.csv, a case at a time in memory."""
        path = self.folder / "scores.csv"
        scores = []
        for case in progress.track(self.data.val, "scoring", len(self.data.val)):
            prediction, _ = read_label_map(case, self._path(case), LabelValues.written(self._values))
            scores.append(score_on_own_grid(case, prediction, self.data.dataset))
        with _saving(path):
            write_text(path, both_csv_text(scores, self.data.dataset.classes, read_text(path)))

    def _path(self, case: Case) -> Path:
        return self.folder / "predictions" / f"{case.id}.nii.gz"

    def _picture(self, role: str) -> Path:
        name = f"prediction_{role}.png" if role else "prediction.png"
        return self.folder / "figures" / name

    def _shown(self) -> dict[str, tuple[Case, str]]:
        """Return the cases to draw and their titles, chosen by the scores of the last validation."""
        cases = {case.id: case for case in self.data.val}
        rows = [row for row in read_csv(self.folder / "scores.csv") if row.get("case") in cases]
        shown = {}
        for role, score in chosen(rows or [{"case": self.data.val[0].id}]).items():
            rank = f"the {role} of {len(cases)} held-out cases" if role else "held-out case"
            dice = "no class to score"
            if score.mean is not None:
                by_class = [f"{name} {value:.3f}" for name, value in score.classes.items()]
                dice = f"mean Dice {score.mean:.3f} ({', '.join(by_class)})"
            shown[role] = (cases[score.name], f"{score.title}, {rank}: {dice}")
        return shown

    def draw(self, case: Case, prediction: np.ndarray, path: Path, title: str) -> None:
        """Draw a case with its label map (X, Y, Z); with sparse labels, at the scored slices nearest to its middle."""
        prepared = self.data.read(case)
        layers = {"truth": prepared.label.numpy(), "prediction": prediction}
        where = None
        if self.options.semi:
            layers = {"learned": self.data.read_train(case).label.numpy()} | layers
            slices = scored_slices(prepared.label, self.options)
            where = [(low + high) // 2 for low, high in extent(prepared.label)]
            for axis, indices in enumerate(slices):
                distances = {index: abs(index - where[axis]) for index in indices}
                where[axis] = min(distances, key=distances.__getitem__, default=where[axis])
        image = prepared.image[0].numpy()
        dataset = self.data.dataset
        labels_of = None if dataset.regions is None else dataset.regions.labels
        case_plots.segmentation(image, layers, prepared.spacing, dataset.classes, path, title, where, labels_of)


@contextmanager
def _saving(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise not_saved(path, error) from error


def signal_on_any_rank(stop: Stop) -> int:
    """Return the number of the signal that asked any rank to stop, 0 without one. All ranks call this."""
    return ranks.all_reduce_max(stop.asked or 0)


@dataclass
class Validator:
    """Scores the held-out cases; the last validation also measures surface distances and writes label maps."""

    config: Config
    folder: Path
    data: PreparedData
    model: nn.Module
    predictor: Predictor
    loggers: Loggers
    stop: Stop
    first_case: ArgmaxCollector | None = field(default=None, init=False)  # of the validation that runs

    @property
    def predictions(self) -> Predictions:
        """The label maps of the run, and pictures of some."""
        return Predictions(self.folder, self.data, self.config.data)

    def scores(self, step: int) -> list[CaseScore]:
        """Return the scores of all held-out cases after a step. Raises OutOfMemory, Preempted."""
        is_last = step == self.config.steps
        if is_last:
            ranks.on_rank0(self.predictions.clear)
        try:
            with switches.without_compiler(self.model), closing(self._own_scores(is_last)) as scores:
                return list(self._gathered(scores))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            advice = remedies.oom_in_validation(self.config, step, self.predictor.batch)
            lines = [str(error).partition("\n")[0], *advice]
            raise OutOfMemory("\n".join(lines)) from None

    def _own_scores(self, is_last: bool) -> Generator[CaseScore]:
        """Return the generator of the scores of this rank's cases."""
        return evaluate(
            self.predictor,
            self.data.val[ranks.RANK :: ranks.SIZE],
            self.data.read_val,
            classes=self.data.dataset.label_count,
            hd95=is_last and not self.config.data.semi,  # slices have no surface
            title="validation",
            keep=functools.partial(self._keep_strips, is_last),
            regions=self.data.dataset.regions,
            loss=self.config.loss,
        )

    def _gathered(self, own_scores: Iterator[CaseScore]) -> Iterator[CaseScore]:
        """Yield the scores of all ranks' cases. Raises Preempted where a signal ends the validation of any."""
        for _ in range(0, len(self.data.val), ranks.SIZE):
            own_score = None
            with suppress(Preempted), self.stop.interruptible():
                own_score = next(own_scores, None)
            if signal_on_any_rank(self.stop):
                raise Preempted("stopped within a validation")
            for score in ranks.gather(own_score):
                if score is not None:
                    yield score

    def _keep_strips(self, is_last: bool, case: Case, strips: ArgmaxCollector) -> None:
        """Write the last label maps; note the first case's of each validation, where a logger takes its picture."""
        if case == self.data.val[0] and self.loggers.wants_images:
            self.first_case = strips
        if is_last:
            self.predictions.try_add(case, strips)

    def log_first_case(self, step: int, dice: float | None) -> None:
        """Log a picture of the first held-out case with the mean Dice of all, on the rank that has a logger for it.

        It is left out where disk or memory have no room for it.
        """
        strips, self.first_case = self.first_case, None
        if ranks.RANK or strips is None:
            return
        case = self.data.val[0]
        path = self.folder / "figures" / "validation.png"
        mean = "" if dice is None else f", mean Dice of all {dice:.3f}"
        try:
            self.predictions.draw(case, strips.whole(), path, f"{case.id}, step {step}{mean}")
        except OSError as error:
            warn(not_saved(path, error))
        except (UserError, RuntimeError, MemoryError) as error:
            if not (isinstance(error, UserError) or is_out_of_memory(error)):
                raise
            warn(f"{path}: not drawn ({reason(error)})")
        else:
            self.loggers.image("val/prediction", path, step)
