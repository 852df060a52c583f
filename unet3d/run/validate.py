"""Held-out cases: predicted, scored, written as label maps."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from unet3d import progress
from unet3d.build import Data
from unet3d.config import Data as Options
from unet3d.data import preprocess
from unet3d.data.cases import Case
from unet3d.data.nifti import label_kind
from unet3d.data.patches import PreparedCase
from unet3d.errors import NotSaved, UserError, is_out_of_memory
from unet3d.files import replacing
from unet3d.report import plots
from unet3d.run.predict import save_prediction
from unet3d.train.inference import Predictor
from unet3d.train.metrics import CaseScore, score_case
from unet3d.types import IGNORE

Read = Callable[[Case], PreparedCase]


Keep = Callable[[Case, Tensor], None]


def evaluate(
    predictor: Predictor,
    cases: Sequence[Case],
    read: Read,
    classes: int,
    hd95: bool,
    keep: Keep | None = None,
    what: str = "validation",
) -> list[CaseScore]:
    """One score a case, on the grid the network sees; `hd95` costs about as much as the prediction.

    `keep` gets each case with its probabilities K X Y Z; those of one case are in memory at a time.
    """
    scores = []
    with progress.counting(what, len(cases)) as counter:
        for case in cases:
            scores.append(_score(predictor, case, read(case), classes, hd95, keep))
            counter.advance()
    return scores


def _score(
    predictor: Predictor, case: Case, found: PreparedCase, classes: int, hd95: bool, keep: Keep | None
) -> CaseScore:
    probabilities = predictor.probabilities(found.image)
    if keep is not None:
        keep(case, probabilities)
    prediction = probabilities.argmax(0).numpy()
    del probabilities  # the distances need memory of their own
    return score_case(case.id, prediction, found.label.numpy(), classes, found.spacing, IGNORE, hd95)


@dataclass
class Predictions:
    """predictions/ and figures/prediction.png of the run in `folder`.

    The last validation writes the label maps as it predicts the cases; `complete` adds what is missing then.
    """

    folder: Path
    data: Data
    options: Options
    first: np.ndarray | None = None  # classes of the first case on the network's grid, for the picture

    @property
    def picture(self) -> Path:
        return self.folder / "figures" / "prediction.png"

    def clear(self) -> None:
        """Remove what an earlier end of this run left: it belongs to other weights."""
        for path in (self.picture, *map(self._path, self.data.val)):
            path.unlink(missing_ok=True)

    def try_add(self, case: Case, probabilities: Tensor) -> None:
        """Write the label map of a case, if that is possible; if not, `complete` tries again and says what is wrong."""
        try:
            self._add(case, probabilities)
        except UserError:
            return
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise

    def complete(self, predictor: Predictor) -> None:
        """Add what is missing, as after a kill or on a disk that was full. Raises NotSaved, UserError."""
        if missing := [case for case in self.data.val if not self._is_there(case)]:
            self._add_all(missing, predictor)
        if self.first is not None:
            with _saving(self.picture):
                self._draw(self.data.val[0], self.first)

    def _add_all(self, cases: Sequence[Case], predictor: Predictor) -> None:
        with progress.counting("predicting", len(cases)) as counter:
            for case in cases:
                self._add(case, predictor.probabilities(self.data.read_val(case).image))
                counter.advance()

    def _is_there(self, case: Case) -> bool:
        is_drawn = case != self.data.val[0] or self.first is not None or self.picture.exists()
        return is_drawn and self._path(case).exists()

    def _add(self, case: Case, probabilities: Tensor) -> None:
        if case == self.data.val[0]:
            self.first = probabilities.argmax(0).numpy().astype(label_kind(len(probabilities) - 1))
        if not (path := self._path(case)).exists():
            with _saving(path):
                save_prediction(path, probabilities, case, self.options.spacing)

    def _path(self, case: Case) -> Path:
        return self.folder / "predictions" / f"{case.id}.nii.gz"

    def _draw(self, case: Case, labels: np.ndarray) -> None:
        found, classes = self.data.read(case), self.data.dataset.classes
        layers = self._learned(case) | {"truth": found.label.numpy(), "prediction": labels}
        where = self._plane_of_scores(found.label)
        with replacing(self.picture) as file:
            plots.segmentation(found.image[0].numpy(), layers, found.spacing, classes, file, case.id, where)

    def _learned(self, case: Case) -> dict[str, np.ndarray]:
        """What of the truth was learned, if that was less than all."""
        return {"learned": self.data.read_train(case).label.numpy()} if self.options.semi else {}

    def _plane_of_scores(self, label: Tensor) -> list[int] | None:
        """A voxel where slices cross that were scored, not learned; None where whole volumes are scored."""
        if not self.options.semi:
            return None
        middle = [(low + high) // 2 for low, high in preprocess.extent(label)]
        slices = preprocess.scored_slices(label, self.options)
        return [
            min(found, key=lambda index: abs(index - m), default=m) for found, m in zip(slices, middle, strict=True)
        ]


@contextmanager
def _saving(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NotSaved(f"{path}: not saved ({error.strerror})") from error
