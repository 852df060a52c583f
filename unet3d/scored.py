"""Which weights the scores of a run belong to: those of its last validation; and how its best weights scored."""

from typing import NamedTuple

from unet3d import readback
from unet3d.readback import Record, RunFolder
from unet3d.table import Table

TITLE = "Scores on the held-out cases"


class Validation(NamedTuple):
    """A validation's mean Dice, and its whole record."""

    step: int
    dice: float
    record: Record


def title(run: RunFolder) -> str:
    """Of the table of scores: which weights, and whether they are also the best."""
    if not (found := _validations(run)):
        return TITLE
    step = found[-1].step
    return f"{TITLE}, {_weights(run, step)} (step {step})" + ", also the best" * (_best(found).step == step)


def best(run: RunFolder) -> tuple[str, Table] | None:
    """Title and scores of the best weights, as they were when they were validated; None where they are the last."""
    found = _validations(run)
    if not found or (top := _best(found)).step == found[-1].step:
        return None
    where = ", checkpoints/best.pt" if (run.path / "checkpoints" / "best.pt").is_file() else ""
    return f"Best weights (step {top.step}{where})", readback.validation_table(top.record)


def _validations(run: RunFolder) -> list[Validation]:
    """Those with a mean Dice."""
    dice = [(record, readback.as_number(record.get("val/dice_mean"))) for record in run.records]
    return [Validation(record["step"], value, record) for record, value in dice if value is not None]


def _best(validations: list[Validation]) -> Validation:
    """The first of equal ones, as best.pt is written for a higher Dice only."""
    return max(validations, key=lambda found: found.dice)


def _weights(run: RunFolder, step: int) -> str:
    optim = readback.config(run).get("optim")
    if isinstance(optim, dict) and optim.get("average") is not None:
        return "average of the weights"
    is_last = step == max(record["step"] for record in run.records)
    return "last weights" if is_last else "weights"
