"""Predict held-out volumes and score them."""

from collections.abc import Callable, Sequence

from torch import Tensor

from unet3d import progress
from unet3d.data.cases import Case
from unet3d.data.patches import Prepared
from unet3d.inference import Predictor
from unet3d.losses import IGNORE
from unet3d.metrics import CaseScore, score_case

Read = Callable[[Case], Prepared]
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


def _score(predictor: Predictor, case: Case, found: Prepared, classes: int, hd95: bool, keep: Keep | None) -> CaseScore:
    probabilities = predictor.probabilities(found.image)
    if keep is not None:
        keep(case, probabilities)
    prediction = probabilities.argmax(0).numpy()
    del probabilities  # the distances need memory of their own
    return score_case(case.id, prediction, found.label.numpy(), classes, found.spacing, IGNORE, hd95)
