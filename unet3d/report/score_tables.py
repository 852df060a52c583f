"""Tables of a run's scores, a row for each class, with titles that name the weights and the grid."""

from collections.abc import Mapping, Sequence
from typing import Any

from unet3d.base.types import Table
from unet3d.report.case_scores import METRICS, shown
from unet3d.run.record import RunRecord
from unet3d.run.shapes import finite
from unet3d.training.metrics import NETWORK, mean_of

SCORES_TITLE = "Scores on the held-out cases"
OWN_GRIDS = "on the files' own grids"


def score_title(run: RunRecord) -> str:
    """Return the title of the table of scores: which weights, whether they are also the best, and on which grid."""
    parts = [SCORES_TITLE, validated_weights(run), validated_grid(run)]
    return ", ".join(part for part in parts if part)


def cases_title(run: RunRecord) -> str:
    """Return the title of the table of cases: which weights, and on which grid."""
    parts = ["Cases", validated_weights(run), validated_grid(run)]
    return ", ".join(part for part in parts if part)


def validated_weights(run: RunRecord) -> str:
    """Return which weights the last validation scored; "" without a validation."""
    if not run.last_validation:
        return ""
    step = run.last_validation["step"]
    optim = run.settings.get("optim")
    weights = "last checkpoint" if step == run.last_step else "checkpoint"
    if isinstance(optim, dict) and optim.get("average") is not None:
        weights = "average of the weights"
    is_best = run.best_validation.get("step") == step
    return f"{weights} (step {step}; also the best)" if is_best else f"{weights} (step {step})"


def validated_grid(run: RunRecord) -> str:
    """Return on which grid the last validation scored; "" where the network's grid is the files'."""
    if not run.last_validation:
        return ""
    if run.has_own_grids:
        return OWN_GRIDS
    return f"at {run.spacing}" if run.spacing else ""


def score_table(run: RunRecord) -> Table:
    """Return one row per class, means over the cases of scores.csv, else of the last validation; and their mean."""
    if run.scores:
        return _means(_columns(run), counts_cases=True)
    return _means({key: [value] for key, value in run.last_validation.items()})


def network_scores(run: RunRecord) -> tuple[str, Table]:
    """Return title and scores on the network's grid, of a run with others on the files' grids."""
    columns = {}
    for key, cells in _columns(run).items():
        if key.startswith(NETWORK):
            columns[key.removeprefix(NETWORK)] = cells
    spacing = f", {run.spacing}" if run.spacing else ""
    return f"The same on the network's grid{spacing}", _means(columns, counts_cases=True)


def best_scores(run: RunRecord) -> tuple[str, Table] | None:
    """Return title and scores of the best weights, from their validation; None if they are the last, or without any."""
    best = run.best_validation
    if not best or best["step"] == run.last_validation["step"]:
        return None
    has_file = (run.path / "checkpoints" / "best.pt").is_file()
    where = ", checkpoints/best.pt" if has_file else ""
    spacing = f", at {run.spacing}" if run.spacing else ""
    title = f"Best checkpoint (step {best['step']}{where}){spacing}"
    return title, _means({key: [value] for key, value in best.items()})


def _columns(run: RunRecord) -> dict[str, list[Any]]:
    """Return the columns of scores.csv."""
    return {str(key): [row.get(key) for row in run.scores] for key in run.scores[0]}


def _means(columns: Mapping[str, Sequence[Any]], counts_cases: bool = False) -> Table:
    """Return means of columns `metric/class` or `val/metric/class`, one row per class.

    In brackets stands how many cases have an HD95, unless all have one.
    """
    scores = _finite_scores(columns)
    classes = [key.removeprefix("dice/") for key in scores if key.startswith("dice/")]
    metrics = [metric for metric in METRICS if any(key.startswith(f"{metric}/") for key in scores)]
    by_class = []
    rows = []
    for name in classes:
        means = [mean_of(scores.get(f"{metric}/{name}", ())) for metric in metrics]
        by_class.append(means)
        row = [name, *map(shown, metrics, means)]
        if counts_cases:
            cases = len(scores[f"dice/{name}"])
            distances = len(scores.get(f"hd95_mm/{name}", ()))
            if 0 < distances != cases:
                row[-1] += f" ({distances})"
            row.append(str(cases))
        rows.append(row)
    if len(classes) > 1:
        of_classes = [mean_of(means) for means in zip(*by_class, strict=True)]
        row = ["mean of classes", *map(shown, metrics, of_classes)]
        rows.append([*row, ""] if counts_cases else row)
    heads = ["class", *(METRICS[metric][0] for metric in metrics)]
    return Table([*heads, "cases"] if counts_cases else heads, rows)


def _finite_scores(columns: Mapping[str, Sequence[Any]]) -> dict[str, list[float]]:
    scores = {}
    for key, cells in columns.items():
        numbers = (finite(cell) for cell in cells)
        scores[key.removeprefix("val/")] = [number for number in numbers if number is not None]
    return scores
