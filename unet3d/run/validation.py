"""Held-out cases: predicted, scored, written as label maps; within a run, by all its ranks.

Every validation scores on the grid that the network sees. Where `data.spacing` makes that another grid than the
files', the label maps of the last validation are scored on the files' grids too.
"""

import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.base import progress, ranks
from unet3d.base.errors import OutOfMemory, Preempted, UserError, is_out_of_memory, not_saved, reason, saving, warn
from unet3d.base.files import read_text, write_text
from unet3d.base.signals import Stop
from unet3d.base.types import IGNORE, ProbabilityBlock
from unet3d.config.schema import Config, Loss
from unet3d.config.schema import Data as Options
from unet3d.data.cases import Case, DatasetInfo
from unet3d.data.prepare import PreparedData, Read, chosen_slices, extent
from unet3d.data.restore import ArgmaxCollector, largest_components
from unet3d.data.volume import LabelValues, on_network_grid, read_label_map, stored_spacing
from unet3d.memory import remedies
from unet3d.report import held_out
from unet3d.report.held_out import ROLES, chosen
from unet3d.report.loggers import Loggers
from unet3d.report.plots import remove_picture
from unet3d.run.predict import Segmenter
from unet3d.run.record import read_scores
from unet3d.training import switches
from unet3d.training.losses import VolumeLoss
from unet3d.training.metrics import CaseScore, both_csv_text, score_case

Keep = Callable[[Case, ArgmaxCollector], None]


def evaluate(
    segmenter: Segmenter,
    cases: Sequence[Case],
    read: Read,
    hd95: bool,
    title: str,
    keep: Keep,
    loss: Loss | None = None,
) -> Generator[CaseScore]:
    """Yield the score of each case on the network's grid; `title` names the progress bar.

    `keep` gets each case and may take its strips, which are then not computed again. With the options of a `loss`, each
    score has it.
    """
    regions = segmenter.regions
    for case in progress.track(cases, title, len(cases)):
        prepared = read(case)
        label = prepared.label.numpy()
        volume_loss = None
        probabilities = segmenter.predictor.strips(prepared.image, case.named)
        if loss is not None and VolumeLoss.exists(loss):
            volume_loss = VolumeLoss(loss, segmenter.outputs, regions)
            probabilities = volume_loss.adding(probabilities, label)
        strips = ArgmaxCollector(probabilities, regions)
        keep(case, strips)
        prediction = largest_components(strips.whole(), segmenter.largest)
        score = score_case(case.id, prediction, label, segmenter.label_count, prepared.spacing, IGNORE, hd95, regions)
        if volume_loss is not None:
            score = score._replace(loss=volume_loss.value())
        yield score
        del prepared, probabilities, strips, prediction, label  # before the next case is read


def score_on_own_grid(
    case: Case,
    predictions: Iterable[np.ndarray],
    dataset: DatasetInfo,
    hd95: bool = True,
) -> list[CaseScore]:
    """Return scores of label maps (X, Y, Z) in the axes of the case's files, against theirs. Raises UserError."""
    assert case.label is not None, case.id
    truth, _ = read_label_map(case, case.label, LabelValues.of_files(dataset))
    count, spacing, regions = dataset.label_count, stored_spacing(case), dataset.regions
    return [score_case(case.id, found, truth, count, spacing, dataset.ignore, hd95, regions) for found in predictions]


def has_own_grids(data: PreparedData, options: Options) -> bool:
    """Return whether the network sees a held-out case on another grid than its file's.

    Slices to score are of the network's grid.
    """
    return not options.semi and any(data.headers[case.id].is_resampled for case in data.val)


def signal_on_any_rank(stop: Stop) -> int:
    """Return the number of the signal that asked any rank to stop, 0 without one. All ranks call this."""
    return ranks.all_reduce_max(stop.asked or 0)


@dataclass
class Validator:
    """Scores the held-out cases of the run in `folder`.

    The last validation also measures surface distances and writes label maps to predictions/, and pictures of some of
    them to figures/; `complete` adds what it could not write.
    """

    config: Config
    folder: Path
    data: PreparedData
    segmenter: Segmenter
    loggers: Loggers
    stop: Stop
    first_case: ArgmaxCollector | None = field(default=None, init=False)  # First case of the validation that runs.

    def scores(self, step: int) -> list[CaseScore]:
        """Return the scores of all held-out cases after a step. Raises OutOfMemory, Preempted."""
        is_last = step == self.config.steps
        if is_last:
            ranks.on_rank0(self._clear)
        predictor = self.segmenter.predictor
        try:
            own_scores = evaluate(
                self.segmenter,
                self.data.val[ranks.RANK :: ranks.SIZE],
                self.data.read_val,
                hd95=is_last and not self.config.data.semi,  # slices have no surface
                title="validation",
                keep=functools.partial(self._keep_strips, is_last),
                loss=self.config.loss,
            )
            with switches.without_compiler(predictor.models[0]), closing(own_scores) as scores:
                return list(self._gathered(scores))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            advice = remedies.oom_in_validation(self.config, step, predictor.batch)
            lines = [str(error).partition("\n")[0], *advice]
            raise OutOfMemory("\n".join(lines)) from None

    def _clear(self) -> None:
        """Remove what an earlier end of this run left: it belongs to other weights."""
        for path in self.pictures:
            remove_picture(path)
        for case in self.data.val:
            self._path(case).unlink(missing_ok=True)

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
        """Write the last label maps; note the first case's of each validation, where a logger takes its picture.

        `complete` makes up for a label map that cannot be written, or raises.
        """
        if case == self.data.val[0] and self.loggers.wants_images:
            self.first_case = strips
        if not is_last:
            return
        try:
            with suppress(UserError):
                self._add(case, strips)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise

    def complete(self) -> None:
        """Add label maps and pictures that are missing, as after a kill or on a full disk. Raises NotSaved, UserError.

        Where files have other grids, put the scores on these first in scores.csv.
        """
        missing = [case for case in self.data.val if not self._path(case).exists()]
        for case in progress.track(missing, "predicting cases", len(missing)) if missing else ():
            self._add(case, self.segmenter.predictor.strips(self.data.read_val(case).image, case.named))
        if has_own_grids(self.data, self.config.data):
            path = self.folder / "scores.csv"
            scores: list[CaseScore] = []
            for case in progress.track(self.data.val, "scoring", len(self.data.val)):
                scores += score_on_own_grid(case, [self._written(case)[0]], self.data.dataset)
            with saving(path):
                write_text(path, both_csv_text(scores, self.data.dataset.classes, read_text(path)))
        for role, (case, title) in self._shown().items():
            path = self._picture(role)
            if not path.exists():
                with saving(path):
                    labels, header = self._written(case)
                    labels = on_network_grid(labels, case, header, self.config.data.spacing, None)
                    self.draw(case, labels, path, title)

    def _add(self, case: Case, strips: Iterable[ProbabilityBlock]) -> None:
        """Write the label map of a case, unless it is there."""
        path = self._path(case)
        if not path.exists():
            with saving(path):
                self.segmenter.save(strips, case, path, files=self.data.read.files)

    def _written(self, case: Case) -> tuple[np.ndarray, Any]:
        """Return a case's label map (X, Y, Z) from its file, and the file's header."""
        return read_label_map(case, self._path(case), LabelValues.written(self.segmenter.values))

    def _path(self, case: Case) -> Path:
        return self.folder / "predictions" / f"{case.id}.nii.gz"

    @property
    def pictures(self) -> list[Path]:
        """Existing pictures: of the best, the median and the worst case, or of the only one."""
        return [path for path in map(self._picture, ("", *ROLES)) if path.exists()]

    def _picture(self, role: str) -> Path:
        return self.folder / "figures" / (f"prediction_{role}.png" if role else "prediction.png")

    def _shown(self) -> dict[str, tuple[Case, str]]:
        """Return the cases to draw and their titles, chosen by the scores of the last validation."""
        cases = {case.id: case for case in self.data.val}
        rows = [row for row in read_scores(self.folder) if row.get("case") in cases]
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
        if self.config.data.semi:
            layers = {"learned": self.data.read_train(case).label.numpy()} | layers
            slices = chosen_slices(prepared.label, self.config.data, scored=True)
            where = [(low + high) // 2 for low, high in extent(prepared.label)]
            for axis, indices in enumerate(slices):
                distances = {index: abs(index - where[axis]) for index in indices}
                where[axis] = min(distances, key=distances.__getitem__, default=where[axis])
        image = prepared.image[0].numpy()
        dataset = self.data.dataset
        labels_of = None if dataset.regions is None else dataset.regions.labels
        held_out.segmentation(image, layers, prepared.spacing, dataset.classes, path, title, where, labels_of)

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
            self.draw(case, strips.whole(), path, f"{case.id}, step {step}{mean}")
        except OSError as error:
            warn(not_saved(path, error))
        except (UserError, RuntimeError, MemoryError) as error:
            if not (isinstance(error, UserError) or is_out_of_memory(error)):
                raise
            warn(f"{path}: not drawn ({reason(error)})")
        else:
            self.loggers.image("val/prediction", path, step)
