"""Checkpoints for others: published without paths, scored on labelled cases."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from unet3d.base.errors import UserError, escaped, not_saved, warn
from unet3d.base.files import write_text
from unet3d.config import compose, rules
from unet3d.config.data_rules import label_sources
from unet3d.config.schema import FACTS, Config, Data, options_with
from unet3d.data.cases import Case, DatasetInfo, read_dataset
from unet3d.data.check import check_headers
from unet3d.data.intensity import Seen
from unet3d.data.labels import as_option
from unet3d.data.nifti import ValidationRules
from unet3d.data.preprocess import CaseReader
from unet3d.data.restore import ArgmaxCollector
from unet3d.data.splits import split
from unet3d.data.volume import is_resampled
from unet3d.memory.simulate import refuse_large_window
from unet3d.report.scores import OWN_GRIDS, SCORES_TITLE
from unet3d.run import predict
from unet3d.run.checkpoint import TrainedNetworks, read_networks, split_of
from unet3d.run.predict import Segmenter
from unet3d.run.validation import evaluate, score_on_own_grid
from unet3d.training import checkpoint, metrics

SCORES = "scores.csv"
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
    for trained in networks:
        _refuse_different(trained, one)
        predict.segmenter(trained, "cpu", None)  # so that what is published can be used
    first, *others = [weights for trained in networks for weights in trained.weights]
    hidden = {"split": "a file", "groups": "a file"}
    splits = []
    for held_out in (held_out for trained in networks for held_out in trained.splits):
        splits.append({name: hidden.get(name, value) for name, value in held_out.items()})
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
    checkpoint.save_checkpoint(out, state)


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


def _refuse_different(trained: TrainedNetworks, first: TrainedNetworks) -> None:
    """Raise UserError where a network would see an image in another way than the first."""
    parts = ("classes", "channels", "intensity", "largest")
    different = [name for name in parts if getattr(trained, name) != getattr(first, name)]
    options, first_options = (compose.flat(compose.to_plain(one.config), ".") for one in (trained, first))
    different += [name for name in options_with("sees") if options[name] != first_options[name]]
    if different:
        paths = f"{trained.path}: differs from {first.path}"
        raise UserError(f"{paths} in {', '.join(different)}; publish it alone")


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
    check_headers(dataset, held_out, config.data).sound_headers()
    for line in _doubts(networks, dataset, held_out, config.data):
        warn(f"{path}: {line}")
    segmenter = predict.segmenter(networks, config.device, mirror=None)
    refuse_large_window(segmenter.predictor, path)
    has_own_grids = any(is_resampled(case, segmenter.options.spacing) for case in held_out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        text = _scores(segmenter, held_out, dataset, config.data, has_own_grids)
        write_text(out / SCORES, text)
    except OSError as error:
        raise not_saved(out / SCORES, error) from error
    return _title(networks, has_own_grids)


def _read_as_learned(networks: TrainedNetworks, options: Data, given: Collection[str]) -> Data:
    """Return the options with those of the checkpoint that are not given; data.affine counts as given unless auto.

    Prints which it takes, and warns of another data.affine. Options that follow from a given one are not taken.
    """
    learned = networks.config.data
    taken = dict[str, Any]()
    is_other_layout = "data.format" in given and learned.format != options.format  # whose labels may mean other things
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


def _scores(
    segmenter: Segmenter,
    held_out: Sequence[Case],
    dataset: DatasetInfo,
    options: Data,
    has_own_grids: bool,
) -> str:
    """Return scores.csv of the cases; where files have grids of their own, these come first."""
    accepted = ValidationRules.of(options)
    reader = CaseReader(dataset, segmenter.options.spacing, segmenter.intensity, cache=None, rules=accepted)
    own_grid_scores: list[metrics.CaseScore] = []

    def score_files(case: Case, strips: ArgmaxCollector) -> None:
        own_grid_scores.extend(score_on_own_grid(case, [segmenter.on_own_grid(strips, case)], dataset))

    keep = score_files if has_own_grids else None
    scores = evaluate(segmenter, held_out, reader, hd95=True, title="scoring", keep=keep)
    text = metrics.csv_text([*scores], dataset.classes)
    return metrics.both_csv_text(own_grid_scores, dataset.classes, text) if has_own_grids else text


def _title(networks: TrainedNetworks, has_own_grids: bool) -> str:
    grid = f", {OWN_GRIDS}" if has_own_grids else ""
    count = len(networks.weights)
    average = ", average of the weights" if networks.is_average else ""
    which = f"mean of {count} networks" if count > 1 else f"step {networks.step}{average}"
    return f"{SCORES_TITLE}, {networks.path} ({which}){grid}"


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
    maps = []
    for one in (networks.config.data, options):
        sources = label_sources(one.label_map or {number: number for number in range(1, dataset.label_count)})
        maps.append({label: sorted(sources[label]) for label in sorted(sources) if label})
    learned_map, asked_map = maps
    if learned_map != asked_map:
        words = f"it learned with {as_option(learned_map)}, and is scored with {as_option(asked_map)}"
        yield f"its classes are other labels of the files: {words}"
    others = sum(split != split_of(options) for split in networks.splits)
    if others:
        trained = f"{others} of {len(networks.splits)} networks were trained with another split, or with an unknown one"
        yield f"{trained}; they may have seen the cases that are scored"
    seen = [case.id for case in held_out if case.id in networks.trained_on]
    if seen:
        names = shorten(", ".join(seen), 200, placeholder=" ...")
        yield f"learned from {len(seen)} of the {len(held_out)} cases that are scored: {names}"
