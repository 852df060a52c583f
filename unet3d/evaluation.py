"""Predict held-out volumes and score them."""

from collections.abc import Iterable

from unet3d.data.patches import Prepared
from unet3d.inference import Predictor
from unet3d.losses import IGNORE
from unet3d.metrics import CaseScore, score_case


def evaluate(predictor: Predictor, cases: Iterable[Prepared], classes: int, hd95: bool) -> list[CaseScore]:
    """One score a case, on the grid the network sees; `hd95` costs about as much as the prediction."""
    return [_score(predictor, case, classes, hd95) for case in cases]


def _score(predictor: Predictor, case: Prepared, classes: int, hd95: bool) -> CaseScore:
    prediction = predictor.probabilities(case.image).argmax(0).numpy()
    return score_case(case.case, prediction, case.label.numpy(), classes, case.spacing, IGNORE, hd95)
