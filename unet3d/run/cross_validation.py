"""A finished cross-validation: its tables, its post-processing, and its networks published as one."""

from collections.abc import Sequence
from pathlib import Path

from unet3d.base.errors import UserError
from unet3d.report import fold_tables
from unet3d.report.compare import not_comparable
from unet3d.report.fold_tables import Method
from unet3d.report.methods import TITLE as METHODS
from unet3d.report.methods import listed
from unet3d.run.postprocess import TITLE, Gain, component_gains, gains_table
from unet3d.run.publish import publish

LAST = Path("checkpoints", "last.pt")  # the weights, or their average, that out-of-fold cases were scored with


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
            gains = component_gains([run.folder for run in method.row.folds])
            if has_components and not gains:
                raise UserError(f"--components: {method.name} predicts regions, which overlap; leave it out")
            of_method = f", {method.name}" if len(methods) > 1 else ""
            tables.append((f"{TITLE}{of_method}", gains_table(gains)))
            lines += _for_methods_section(gains, of_method)
    lines += [line for method in methods for line in fold_tables.problems(method)]
    runs = [run for method in methods for run in method.row.folds]
    lines += [f"not comparable: {line}" for line in not_comparable(runs)]
    fold_tables.print_tables(tables, lines)
    written = []
    if out is not None:
        written.append(str(fold_tables.write_tables(methods, tables, lines, out)))
    if published is not None:
        (method,) = methods
        largest = [gain.number for gain in gains if gain.is_kept]
        publish([run.folder / LAST for run in method.row.folds], published, model_path, largest)
        written.append(_published(published, method, gains))
    return written


def _for_methods_section(gains: Sequence[Gain], of_method: str) -> list[str]:
    """Return the sentence on components for a paper, which the paragraph of one fold cannot have; [] without any."""
    kept = [gain.name for gain in gains if gain.is_kept]
    if not kept:
        return []
    which = f"only the largest connected component of {listed(kept)} was kept"
    return [f"{METHODS}{of_method}: in the predictions, {which}, which raised the mean Dice of held-out cases."]


def _refuse_publishing(methods: Sequence[Method], path: Path) -> None:
    """Raise UserError where these methods cannot be published as one file."""
    if len(methods) > 1:
        raise UserError(f"--publish {path}: there are {len(methods)} methods; give the folder of one")
    problems = fold_tables.problems(methods[0])
    if problems:
        raise UserError(f"--publish {path}: {problems[0]}; finish it first")
    if path.exists():
        raise UserError(f"{path}: is there already; give another file")


def _published(path: Path, method: Method, gains: Sequence[Gain]) -> str:
    kept = ", ".join(gain.name for gain in gains if gain.is_kept) or "no class"
    size = path.stat().st_size / 1e6
    return f"{path}: {size:.1f} MB, {len(method.row.folds)} networks; the largest component alone of: {kept}"
