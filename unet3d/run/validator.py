"""The validations within a run: all ranks score the held-out cases."""

import functools
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field

import numpy as np
from torch import nn

from unet3d.base import ranks
from unet3d.base.errors import OutOfMemory, Preempted, UserError, is_out_of_memory, not_saved, reason, warn
from unet3d.base.signals import Stop
from unet3d.config.schema import Config
from unet3d.data.cases import Case
from unet3d.data.prepare import PreparedData
from unet3d.data.restore import ArgmaxCollector
from unet3d.memory import remedies
from unet3d.report.loggers import Loggers
from unet3d.run.validation import Predictions, evaluate
from unet3d.training import switches
from unet3d.training.inference import Predictor
from unet3d.training.metrics import CaseScore


def signal_on_any_rank(stop: Stop) -> int:
    """Return the number of the signal that asked any rank to stop, 0 without one. All ranks call this."""
    return ranks.all_reduce_max(stop.asked or 0)


@dataclass
class Validator:
    """Scores the held-out cases; the last validation also measures surface distances and writes label maps."""

    config: Config
    data: PreparedData
    model: nn.Module
    predictor: Predictor
    predictions: Predictions
    loggers: Loggers
    stop: Stop
    first_case: ArgmaxCollector | None = field(default=None, init=False)  # of the validation that runs

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
        """Log a picture of the first held-out case with the mean Dice of all, on the rank that has a logger for it."""
        strips = self.first_case
        self.first_case = None
        if ranks.RANK == 0 and strips is not None:
            self._draw_first_case(strips.whole(), step, dice)

    def _draw_first_case(self, prediction: np.ndarray, step: int, dice: float | None) -> None:
        """Draw and log the picture, where disk and memory have room for it."""
        case = self.data.val[0]
        path = self.predictions.folder / "figures" / "validation.png"
        mean = "" if dice is None else f", mean Dice of all {dice:.3f}"
        try:
            self.predictions.draw(case, prediction, path, f"{case.id}, step {step}{mean}")
        except OSError as error:
            warn(not_saved(path, error))
        except (UserError, RuntimeError, MemoryError) as error:
            if not (isinstance(error, UserError) or is_out_of_memory(error)):
                raise
            warn(f"{path}: not drawn ({reason(error)})")
        else:
            self.loggers.image("val/prediction", path, step)
