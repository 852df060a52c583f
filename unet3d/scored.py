"""Which weights the scores of a run belong to: those of its last validation; and how its best weights scored."""

from unet3d import readback
from unet3d.readback import Record, RunFolder
from unet3d.table import Table

TITLE = "Scores on the held-out cases"


def title(run: RunFolder) -> str:
    """Of the table of scores: which weights, and whether they are also the best."""
    if not (last := readback.last_validation(run)):
        return TITLE
    top = _best(run)
    also = ", also the best" if top and top["step"] == last["step"] else ""
    return f"{TITLE}, {_weights(run, last['step'])} (step {last['step']}){also}"


def best(run: RunFolder) -> tuple[str, Table] | None:
    """Title and scores of the best weights, from their validation; None where they are the last, or there are none."""
    top = _best(run)
    if not top or top["step"] == readback.last_validation(run)["step"]:
        return None
    where = ", checkpoints/best.pt" if (run.path / "checkpoints" / "best.pt").is_file() else ""
    return f"Best weights (step {top['step']}{where})", readback.validation_table(top)


def _best(run: RunFolder) -> Record:
    """The validation of the highest mean Dice, the first of equal ones, as with best.pt; empty where there is none."""
    scored = [record for record in run.records if readback.as_number(record.get("val/dice_mean")) is not None]
    return max(scored, key=lambda record: float(record["val/dice_mean"]), default={})


def _weights(run: RunFolder, step: int) -> str:
    optim = readback.config(run).get("optim")
    if isinstance(optim, dict) and optim.get("average") is not None:
        return "average of the weights"
    is_last = step == max(record["step"] for record in run.records)
    return "last weights" if is_last else "weights"
