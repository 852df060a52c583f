"""A finished cross-validation: its tables, its post-processing, and its networks published as one.

Post-processing is chosen by out-of-fold cases: the largest component alone, of classes whose Dice it raises. To remove
voxels of one class changes the Dice of no other, so that each class is decided for itself.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from unet3d.base import progress
from unet3d.base.errors import UserError
from unet3d.base.files import read_yaml
from unet3d.base.types import Table
from unet3d.config import compose
from unet3d.data.cases import Case, DatasetInfo, read_dataset
from unet3d.data.labels import written_values
from unet3d.data.restore import largest_components
from unet3d.data.volume import LabelValues, read_label_map
from unet3d.report import fold_tables
from unet3d.report.compare import not_comparable, print_tables
from unet3d.report.compared_runs import ComparedRun
from unet3d.report.summary import METHODS, listed
from unet3d.run.publish import publish
from unet3d.run.record import read_run
from unet3d.run.run_folder import is_done
from unet3d.run.validation import score_on_own_grid
from unet3d.training.metrics import CaseScore, mean_of

LAST = Path("checkpoints", "last.pt")  # the weights, or their average, that out-of-fold cases were scored with
TITLE = "The largest component alone, by class: Dice of the out-of-fold cases, mean"
HEADS = ("class", "cases", "changed", "as predicted", "largest component", "kept")
DIGITS = 5


class Gain(NamedTuple):
    """What the largest component alone of a class does to the Dice of all out-of-fold cases."""

    number: int  # of the class
    name: str
    cases: int  # with a Dice
    changed: int  # of which the Dice is another
    before: float | None  # mean Dice
    after: float | None

    @property
    def is_kept(self) -> bool:
        """Return whether the mean Dice rises."""
        return self.before is not None and self.after is not None and self.after > self.before


class Fold(NamedTuple):
    """A finished run, and the cases that it held out and wrote label maps of."""

    folder: Path
    dataset: DatasetInfo
    held_out: tuple[Case, ...]
    values: tuple[int, ...]  # of the classes in its label maps


def read_fold(folder: Path) -> Fold:
    """Return a fold from its run folder. Raises UserError where it is not finished, or the data are not there."""
    values = read_yaml(folder / "config.yaml")
    if not is_done(folder) or not isinstance(values, dict):
        raise UserError(f"{folder}: this fold is not finished; go on with: python train.py resume={folder}")
    options = compose.from_plain(values).data
    if options.semi:
        raise UserError(f"{folder}: data.semi holds out slices, whose components are none of volumes")
    dataset = read_dataset(options)
    cases = {case.id: case for case in dataset.cases if case.label is not None}
    names = read_run(folder).split.get("val", [])
    missing = [name for name in names if name not in cases]
    if missing or not names:
        what = f"no labelled case {missing[0]} in the data" if missing else "split.json names no case"
        raise UserError(f"{folder}: {what}; give the data set that the run had")
    held_out = tuple(cases[name] for name in names)
    return Fold(folder, dataset, held_out, written_values(options, len(dataset.classes)))


def component_gains(folders: Sequence[Path]) -> list[Gain]:
    """Return the gain of each foreground class, by the label maps of these folds and the files' own labels.

    Of regions none: they overlap, and a voxel that leaves one may still be in another. Raises UserError.
    """
    folds = [read_fold(folder) for folder in folders]
    if any(fold.dataset.regions is not None for fold in folds):
        return []
    classes = folds[0].dataset.classes
    if any(fold.dataset.classes != classes for fold in folds):
        raise UserError(f"{folders[0]}: the folds have different classes; compare those of one data set")
    pairs = [(fold, case) for fold in folds for case in fold.held_out]
    scores = [_scores(fold, case) for fold, case in progress.track(pairs, "removing components", len(pairs))]
    gains = []
    for number, name in enumerate(classes[1:], start=1):
        before = [old.dice[number - 1] for old, _ in scores]
        after = [new.dice[number - 1] for _, new in scores]
        cases = sum(value is not None for value in before)
        changed = sum(old != new for old, new in zip(before, after, strict=True))
        gains.append(Gain(number, name, cases, changed, mean_of(before), mean_of(after)))
    return gains


def _scores(fold: Fold, case: Case) -> tuple[CaseScore, CaseScore]:
    """Return the scores of a label map as it is, and of the largest components alone."""
    path = fold.folder / "predictions" / f"{case.id}.nii.gz"
    if not path.is_file():
        raise UserError(f"{path}: no such label map; write it again: python train.py resume={fold.folder}")
    prediction, _ = read_label_map(case, path, LabelValues.written(fold.values))
    cleaned = largest_components(prediction, range(1, len(fold.dataset.classes)))
    before, after = score_on_own_grid(case, [prediction, cleaned], fold.dataset, hd95=False)
    return before, after


def gains_table(gains: Sequence[Gain]) -> Table:
    """Return one row per class as text."""
    rows = []
    for gain in gains:
        means = ["n/a" if mean is None else f"{mean:.{DIGITS}f}" for mean in (gain.before, gain.after)]
        rows.append([gain.name, str(gain.cases), str(gain.changed), *means, "yes" if gain.is_kept else "no"])
    return Table(list(HEADS), rows)


def report(
    paths: Sequence[Path],
    out: Path | None,
    has_components: bool = False,
    published: Path | None = None,
    model_path: str | None = None,
) -> list[str]:
    """Print the tables of the cross-validations among these runs and sweeps; return lines about what was written.

    `out`: a folder for the tables. `has_components`: decide for which classes the largest component alone raises Dice.
    `published`: a file for the networks of all folds, with that decision. Raises UserError.
    """
    methods = fold_tables.read_methods(paths)
    if published is not None:
        _refuse_publishing(methods, published)
    tables = fold_tables.titled_tables(methods)
    gains: list[Gain] = []
    lines: list[str] = []
    if has_components or published is not None:
        for method in methods:
            gains = component_gains([run.folder for run in method.folds])
            if has_components and not gains:
                raise UserError(f"--components: {method.name} predicts regions, which overlap; leave it out")
            of_method = f", {method.name}" if len(methods) > 1 else ""
            tables.append((f"{TITLE}{of_method}", gains_table(gains)))
            kept = [gain.name for gain in gains if gain.is_kept]
            if kept:  # what the paragraph of one fold cannot have
                which = f"only the largest connected component of {listed(kept)} was kept"
                raised = "which raised the mean Dice of held-out cases"
                lines.append(f"{METHODS}{of_method}: in the predictions, {which}, {raised}.")
    lines += [line for method in methods for line in fold_tables.problems(method)]
    runs = [run for method in methods for run in method.folds]
    lines += [f"not comparable: {line}" for line in not_comparable(runs)]
    print_tables(tables, lines)
    written = []
    if out is not None:
        written.append(str(fold_tables.write_tables(methods, tables, lines, out)))
    if published is not None:
        (method,) = methods
        largest = [gain.number for gain in gains if gain.is_kept]
        publish([run.folder / LAST for run in method.folds], published, model_path, largest)
        size = published.stat().st_size / 1e6
        names = ", ".join(gain.name for gain in gains if gain.is_kept) or "no class"
        parts = f"{size:.1f} MB, {len(method.folds)} networks; the largest component alone of: {names}"
        written.append(f"{published}: {parts}")
    return written


def _refuse_publishing(methods: Sequence[ComparedRun], path: Path) -> None:
    """Raise UserError where these methods cannot be published as one file."""
    if len(methods) > 1:
        raise UserError(f"--publish {path}: there are {len(methods)} methods; give the folder of one")
    problems = fold_tables.problems(methods[0])
    if problems:
        raise UserError(f"--publish {path}: {problems[0]}; finish it first")
    if path.exists():
        raise UserError(f"{path}: is there already; give another file")
