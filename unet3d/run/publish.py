"""Checkpoints for others: published without paths, scored on labelled cases, or those of a cross-validation as one.

Post-processing is chosen by out-of-fold cases: the largest component alone, of classes whose Dice it raises. To remove
voxels of one class changes the Dice of no other, so that each class is decided for itself.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from unet3d.base import progress
from unet3d.base.errors import UserError, escaped, saving, warn
from unet3d.base.files import read_yaml, write_text
from unet3d.base.types import Table
from unet3d.config import compose, rules
from unet3d.config.data_rules import label_sources
from unet3d.config.schema import FACTS, Config, Data, options_with
from unet3d.data.cases import Case, DatasetInfo, read_dataset
from unet3d.data.check import check_cases
from unet3d.data.intensity import Seen
from unet3d.data.labels import as_option, written_values
from unet3d.data.prepare import CaseReader
from unet3d.data.restore import ArgmaxCollector, largest_components
from unet3d.data.splits import split
from unet3d.data.volume import ImageFiles, LabelValues, read_label_map
from unet3d.memory.simulate import refuse_large_window
from unet3d.report import compare
from unet3d.report.compared_runs import not_comparable
from unet3d.report.held_out import OWN_GRIDS, SCORES_TITLE
from unet3d.report.report import METHODS, listed
from unet3d.run import predict
from unet3d.run.checkpoint import TrainedNetworks, read_networks, save_checkpoint, split_of
from unet3d.run.record import read_run
from unet3d.run.run_folder import is_done
from unet3d.run.validation import evaluate, score_on_own_grid
from unet3d.training import metrics

SCORES = "scores.csv"
LAST = Path("checkpoints", "last.pt")  # the weights, or their average, that out-of-fold cases were scored with
TITLE = "The largest component alone, by class: Dice of the out-of-fold cases, mean"
HEADS = ("class", "cases", "changed", "as predicted", "largest component", "kept")
LEARNED = options_with("learned")


def publish(
    paths: Sequence[Path],
    out: Path,
    model_path: str | None = None,
    largest: Sequence[int] | None = None,
) -> None:
    """Write the networks of these checkpoints to one file without any path; several predict their mean logits.

    `largest`: classes of which label maps will have the largest component alone; None: as the checkpoints say. Raises
    UserError, CheckpointError.
    """
    if out.exists():
        raise UserError(f"{out}: is there already; give another file")
    networks = [read_networks(path, model_path) for path in paths]
    one = networks[0]
    one_options = compose.flat(compose.to_plain(one.config))
    for trained in networks:
        parts = ("classes", "channels", "intensity", "largest")
        different = [name for name in parts if getattr(trained, name) != getattr(one, name)]
        options = compose.flat(compose.to_plain(trained.config))
        different += [name for name in options_with("sees") if options[name] != one_options[name]]
        if different:
            pair = f"{trained.path}: differs from {one.path}"
            raise UserError(f"{pair} in {', '.join(different)}; publish it alone")
        predict.segmenter(trained, "cpu", None)  # so that what is published can be used
    first, *others = [weights for trained in networks for weights in trained.weights]
    splits = []
    for held_out in chain.from_iterable(trained.splits for trained in networks):
        splits.append({name: "a file" if name in ("split", "groups") else held_out[name] for name in held_out})
    known = [trained.seen for trained in networks if trained.seen is not None]
    state = {
        "config": _without_private(compose.to_plain(one.config)),
        "model_options": asdict(one.config.model),
        "classes": list(one.classes),
        "channels": list(one.channels),
        "intensity": [asdict(rule) for rule in one.intensity],
        "step": one.step,
        "model": first,
        "average": {},
        "others": others,
        "splits": splits,
        "seen": asdict(Seen.merged(known)) if known else None,
        "largest": list(one.largest if largest is None else largest),
    }
    save_checkpoint(out, state)


def _without_private(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return options without those that hold a path or say how the run went along."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        facts = FACTS.get(f"{prefix}{name}")
        if facts is None and isinstance(value, Mapping):
            kept[name] = _without_private(value, f"{prefix}{name}.")
        elif facts is not None and not facts.get("private") and facts.get("untold") != "course":
            kept[name] = value
    return kept


def score(
    path: Path,
    config: Config,
    out: Path,
    model_path: str | None = None,
    given: Collection[str] = LEARNED,
) -> str:
    """Score the cases that `config` holds out, predicted as the checkpoint says, in out/scores.csv. Return its title.

    Options that a checkpoint knows are its own unless `given`, of which a line is printed. Scores are on the files' own
    grids, and where the network's grid is another, on that too.
    """
    if config.data.semi:
        raise UserError("data.semi holds out slices of the training cases; the run's own scores.csv has their scores")
    if (out / SCORES).exists():
        raise UserError(f"{out / SCORES}: is there already; give another folder")
    networks = read_networks(path, model_path)
    config = replace(config, data=_read_as_learned(networks, config.data, given))
    rules.check(config)
    dataset = read_dataset(config.data)
    _, held_out = split(dataset, config.data)
    _refuse_other_dataset(networks, dataset)
    as_seen = replace(config.data, spacing=networks.config.data.spacing)
    headers = check_cases(dataset, held_out, as_seen).sound_headers()
    for line in _doubts(networks, dataset, held_out, config.data):
        warn(f"{path}: {line}")
    segmenter = predict.segmenter(networks, config.device, mirror=None)
    refuse_large_window(segmenter.predictor, path)
    has_own_grids = any(header.is_resampled for header in headers.values())
    files = ImageFiles(config.data)
    reader = CaseReader(dataset, segmenter.options.spacing, segmenter.intensity, cache=None, files=files)
    own_grid_scores: list[metrics.CaseScore] = []

    def score_files(case: Case, strips: ArgmaxCollector) -> None:
        if has_own_grids:
            own_grid_scores.extend(score_on_own_grid(case, [segmenter.on_own_grid(strips, case)], dataset))

    with saving(out / SCORES):
        out.mkdir(parents=True, exist_ok=True)
        scores = evaluate(segmenter, held_out, reader, hd95=True, title="scoring", keep=score_files)
        text = metrics.csv_text([*scores], dataset.classes)
        if has_own_grids:
            text = metrics.both_csv_text(own_grid_scores, dataset.classes, text)
        write_text(out / SCORES, text)
    count = len(networks.weights)
    average = ", average of the weights" if networks.is_average else ""
    which = f"mean of {count} networks" if count > 1 else f"step {networks.step}{average}"
    return f"{SCORES_TITLE}, {path} ({which}){f', {OWN_GRIDS}' if has_own_grids else ''}"


def _read_as_learned(networks: TrainedNetworks, options: Data, given: Collection[str]) -> Data:
    """Return the options with those of the checkpoint that are not given; data.affine counts as given unless auto.

    Prints which it takes, and warns of another data.affine. Options that follow from a given one are not taken.
    """
    learned = networks.config.data
    taken = dict[str, Any]()
    is_other_layout = "data.format" in given and learned.format != options.format  # Its labels may mean other things.
    names_labels = any(LEARNED.get(option) == "labels" for option in given)  # who gives one means the rest, too
    for option, what in LEARNED.items():
        name = option.removeprefix("data.")
        is_given = option in given or (what != "files" and (names_labels or is_other_layout))
        if not is_given and getattr(learned, name) != getattr(options, name):
            taken[name] = getattr(learned, name)
    if taken:
        words = {name: f"data.{name}={value}" for name, value in taken.items()}
        if taken.get("label_map"):
            words["label_map"] = as_option(label_sources(taken["label_map"]))
        print(escaped(f"{networks.path}: as it learned: {', '.join(words.values())}"), flush=True)
    if options.affine == "auto":
        taken["affine"] = learned.affine
    elif options.affine != learned.affine and (learned.affine, options.affine) != ("auto", "sform"):
        warn(f"{networks.path}: it learned with data.affine={learned.affine}, and is scored with {options.affine}")
    return replace(options, **taken)


def _refuse_other_dataset(networks: TrainedNetworks, dataset: DatasetInfo) -> None:
    """Raise UserError for other classes or another number of channels than the network's."""
    has_same_classes = networks.classes == dataset.classes
    if networks.regions != dataset.regions and has_same_classes:
        learned = f"regions of the labels {networks.config.model.regions}"
        if networks.regions is None:
            learned = "classes that exclude each other"
        raise UserError(f"{networks.path}: a network of {learned}; the data has others of the same names")
    if not has_same_classes or len(networks.channels) != len(dataset.channels):
        learned = f"{len(networks.channels)} channels and the classes {', '.join(networks.classes)}"
        given = f"{len(dataset.channels)} and {', '.join(dataset.classes)}"
        label_map = networks.config.data.label_map
        hint = f"; it learned with {as_option(label_sources(label_map))}" if label_map is not None else ""
        raise UserError(f"{networks.path}: a network of {learned}; the data has {given}{hint}")


def _doubts(
    networks: TrainedNetworks,
    dataset: DatasetInfo,
    held_out: Sequence[Case],
    options: Data,
) -> Iterator[str]:
    """Yield in what the data may be others than the networks learned, and which cases they may have seen."""
    if len(dataset.channels) > 1 and networks.channels != dataset.channels:  # each layout has its own names
        channels = f"{', '.join(networks.channels)}, those of the data {', '.join(dataset.channels)}"
        yield f"its channels are {channels}; they are taken in this order"
    learned, asked = (_sources(one, dataset) for one in (networks.config.data, options))
    if learned != asked:
        words = f"it learned with {as_option(learned)}, and is scored with {as_option(asked)}"
        yield f"its classes are other labels of the files: {words}"
    others = sum(split != split_of(options) for split in networks.splits)
    if others:
        trained = f"{others} of {len(networks.splits)} networks were trained with another split, or with an unknown one"
        yield f"{trained}; they may have seen the cases that are scored"
    seen = [case.id for case in held_out if case.id in networks.trained_on]
    if seen:
        names = shorten(", ".join(seen), 200, placeholder=" ...")
        yield f"learned from {len(seen)} of the {len(held_out)} cases that are scored: {names}"


def _sources(options: Data, dataset: DatasetInfo) -> dict[int, list[int]]:
    """Return the files' labels of each class."""
    sources = label_sources(options.label_map or {number: number for number in range(1, dataset.label_count)})
    return {label: sorted(sources[label]) for label in sorted(sources) if label}


class Gain(NamedTuple):
    """What the largest component alone of a class does to the Dice of all out-of-fold cases."""

    number: int  # Number of the class.
    name: str
    cases: int  # Cases with a Dice.
    changed: int  # Cases whose Dice changed.
    before: float | None  # mean Dice
    after: float | None

    @property
    def is_kept(self) -> bool:
        """Return whether the mean Dice rises."""
        return self.before is not None and self.after is not None and self.after > self.before

    def row(self) -> list[str]:
        """Return the cells of a table."""
        means = ["n/a" if mean is None else f"{mean:.5f}" for mean in (self.before, self.after)]
        return [self.name, str(self.cases), str(self.changed), *means, "yes" if self.is_kept else "no"]


def _label_maps(folder: Path) -> list[tuple[Case, Path, DatasetInfo, LabelValues]]:
    """Return each held-out case of a fold with its label map, the data set, and the values in the map.

    Raises UserError where the fold is not finished, or the data are not there.
    """
    values = read_yaml(folder / "config.yaml")
    if not is_done(folder) or not isinstance(values, dict):
        raise UserError(f"{folder}: this fold is not finished; go on with: python train.py resume={folder}")
    options = compose.from_plain(values).data
    if options.semi:
        raise UserError(f"{folder}: data.semi holds out slices, whose components are none of volumes")
    dataset = read_dataset(options)
    written = LabelValues.written(written_values(options, dataset.label_count))
    cases = {case.id: case for case in dataset.cases if case.label is not None}
    maps = []
    for name in read_run(folder).split.get("val", []):
        path = folder / "predictions" / f"{name}.nii.gz"
        if name not in cases:
            raise UserError(f"{folder}: no labelled case {name} in the data; give the data set that the run had")
        if not path.is_file():
            raise UserError(f"{path}: no such label map; write it again: python train.py resume={folder}")
        maps.append((cases[name], path, dataset, written))
    if not maps:
        raise UserError(f"{folder}: split.json names no case; give the data set that the run had")
    return maps


def component_gains(folders: Sequence[Path]) -> list[Gain]:
    """Return the gain of each foreground class, by the label maps of these folds and the files' own labels.

    Of regions none: they overlap, and a voxel that leaves one may still be in another. Raises UserError.
    """
    maps = [one for folder in folders for one in _label_maps(folder)]
    datasets = [dataset for _, _, dataset, _ in maps]
    if any(dataset.regions is not None for dataset in datasets):
        return []
    classes = datasets[0].classes
    if any(dataset.classes != classes for dataset in datasets):
        raise UserError(f"{folders[0]}: the folds have different classes; compare those of one data set")
    scores = []
    for case, path, dataset, values in progress.track(maps, "removing components", len(maps)):
        prediction, _ = read_label_map(case, path, values)
        cleaned = largest_components(prediction, range(1, len(classes)))
        scores.append(score_on_own_grid(case, [prediction, cleaned], dataset, hd95=False))
    gains = []
    for number, name in enumerate(classes[1:], start=1):
        before = [old.dice[number - 1] for old, _ in scores]
        after = [new.dice[number - 1] for _, new in scores]
        cases = sum(value is not None for value in before)
        changed = sum(old != new for old, new in zip(before, after, strict=True))
        gains.append(Gain(number, name, cases, changed, metrics.mean_of(before), metrics.mean_of(after)))
    return gains


def report_folds(
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
    methods = compare.read_methods(paths)
    if published is not None:
        if len(methods) > 1:
            raise UserError(f"--publish {published}: there are {len(methods)} methods; give the folder of one")
        for problem in compare.problems(methods[0]):
            raise UserError(f"--publish {published}: {problem}; finish it first")
        if published.exists():
            raise UserError(f"{published}: is there already; give another file")
    tables = compare.titled_tables(methods)
    kept: list[Gain] = []  # Only one method is published.
    lines: list[str] = []
    for method in methods if has_components or published is not None else ():
        gains = component_gains([run.folder for run in method.folds])
        if has_components and not gains:
            raise UserError(f"--components: {method.name} predicts regions, which overlap; leave it out")
        of_method = f", {method.name}" if len(methods) > 1 else ""
        tables.append((f"{TITLE}{of_method}", Table(list(HEADS), [gain.row() for gain in gains])))
        kept = [gain for gain in gains if gain.is_kept]
        if kept:  # what the paragraph of one fold cannot have
            which = f"only the largest connected component of {listed([gain.name for gain in kept])} was kept"
            raised = "which raised the mean Dice of held-out cases"
            lines.append(f"{METHODS}{of_method}: in the predictions, {which}, {raised}.")
    lines += [line for method in methods for line in compare.problems(method)]
    runs = [run for method in methods for run in method.folds]
    lines += [f"not comparable: {line}" for line in not_comparable(runs)]
    compare.print_tables(tables, lines)
    written = []
    if out is not None:
        written.append(str(compare.write_tables(methods, tables, lines, out)))
    if published is not None:
        publish([run.folder / LAST for run in runs], published, model_path, [gain.number for gain in kept])
        size = published.stat().st_size / 1e6
        names = ", ".join(gain.name for gain in kept) or "no class"
        parts = f"{size:.1f} MB, {len(runs)} networks; the largest component alone of: {names}"
        written.append(f"{published}: {parts}")
    return written
