"""Held-out cases: predicted, scored, written as label maps."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from unet3d import progress
from unet3d.build import Data, Read
from unet3d.config import Data as Options
from unet3d.data import preprocess
from unet3d.data.cases import Case
from unet3d.data.volume import LabelMap
from unet3d.errors import UserError, is_out_of_memory, not_saved
from unet3d.files import replacing
from unet3d.report import plots
from unet3d.run.predict import save_prediction
from unet3d.train.inference import Predictor
from unet3d.train.metrics import CaseScore, score_case
from unet3d.types import IGNORE

Keep = Callable[[Case, LabelMap], None] | None


def evaluate(
    predictor: Predictor, cases: Sequence[Case], read: Read, classes: int, hd95: bool, what: str, keep: Keep = None
) -> Generator[CaseScore]:
    """One score a case, on the network's grid. `keep` gets each case and may take its strips."""
    with progress.counting(what, len(cases)) as counter:
        for case in cases:
            found = read(case)
            strips = LabelMap(predictor.strips(found.image))
            if keep is not None:
                keep(case, strips)
            prediction, label = strips.whole(), found.label.numpy()
            yield score_case(case.id, prediction, label, classes, found.spacing, IGNORE, hd95)
            del found, strips, prediction, label  # before the next case is read
            counter.advance()


@dataclass
class Predictions:
    """predictions/ and figures/prediction.png of the run in `folder`: made by the last validation, then completed."""

    folder: Path
    data: Data
    options: Options
    first: LabelMap | None = None  # of the first case on the network's grid, for the picture

    @property
    def picture(self) -> Path:
        return self.folder / "figures" / "prediction.png"

    def clear(self) -> None:
        """Remove what an earlier end of this run left: it belongs to other weights."""
        for path in (self.picture, *map(self._path, self.data.val)):
            path.unlink(missing_ok=True)

    def try_add(self, case: Case, strips: LabelMap) -> None:
        """Write the label map of a case, if that is possible; `complete` makes up for it, or raises."""
        try:
            self._add(case, strips)
        except UserError:
            return
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise

    def complete(self, predictor: Predictor) -> None:
        """Add what is missing, as after a kill or on a disk that was full. Raises NotSaved, UserError."""
        if missing := [case for case in self.data.val if not self._is_there(case)]:
            with progress.counting("predicting", len(missing)) as counter:
                for case in missing:
                    strips = LabelMap(predictor.strips(self.data.read_val(case).image))
                    self._add(case, strips)
                    strips.whole()
                    counter.advance()
        if self.first is not None:
            with _saving(self.picture):
                self._draw(self.data.val[0], self.first.whole())

    def _is_there(self, case: Case) -> bool:
        is_drawn = case != self.data.val[0] or self.first is not None or self.picture.exists()
        return is_drawn and self._path(case).exists()

    def _add(self, case: Case, strips: LabelMap) -> None:
        if case == self.data.val[0]:
            self.first = strips
        if not (path := self._path(case)).exists():
            with _saving(path):
                save_prediction(path, strips, case, self.options.spacing)

    def _path(self, case: Case) -> Path:
        return self.folder / "predictions" / f"{case.id}.nii.gz"

    def _draw(self, case: Case, prediction: np.ndarray) -> None:
        """Beside the truth; where slices were learned and others scored, with the former and through the latter."""
        found, where = self.data.read(case), None
        layers = {"truth": found.label.numpy(), "prediction": prediction}
        if self.options.semi:
            layers = {"learned": self.data.read_train(case).label.numpy()} | layers
            middle = [(low + high) // 2 for low, high in preprocess.extent(found.label)]
            slices = preprocess.scored_slices(found.label, self.options)
            where = [min(s, key=lambda index: abs(index - m), default=m) for s, m in zip(slices, middle, strict=True)]
        with replacing(self.picture) as file:
            classes = self.data.dataset.classes
            plots.segmentation(found.image[0].numpy(), layers, found.spacing, classes, file, case.id, where)


@contextmanager
def _saving(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise not_saved(path, error) from error
