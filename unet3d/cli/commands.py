"""Commands of `python -m unet3d`: options, publish, score, check-data, report, compare, folds.

And predict: label maps of NIfTI files, one after another; a file that cannot be segmented stops no other.
"""

import argparse
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unet3d.base.errors import UserError, escaped, is_out_of_files, is_out_of_memory, listed, not_saved, reason, warn
from unet3d.base.files import NIFTI_ENDINGS, OTHER_ENDINGS
from unet3d.cli import lifecycle
from unet3d.config import compose, rules
from unet3d.config.compose import read_plan
from unet3d.config.schema import FACTS, LAYOUTS, Config, options_with
from unet3d.config.words import plain

if TYPE_CHECKING:
    from unet3d.data.cases import Case
    from unet3d.run.predict import Segmenter
    from unet3d.run.predicted_files import Origins

USAGE = """python train.py                                           train on phantoms, made once under data/
python train.py data=nnunet data.root=PATH amp=true       train on a data set of your own
python train.py resume=outputs/DATE/TIME-ID steps=300     go on with a run, here for longer

python train.py OPTION=VALUE ...    (installed: unet3d train OPTION=VALUE ...)

Several jobs: -m ckpt=0,2. What would run: --cfg job. A folder of your own YAML files: --config-dir FOLDER.
model=NAME, data=NAME, loss=NAME, optim=NAME and experiment=NAME choose files of configs/.
"""
SHARD = re.compile(r"(\d{1,20})/(\d{1,20})", re.ASCII)
TITLE = (
    "# Options\n\nWritten by `python -m unet3d options` from `unet3d/config/schema.py` and the default YAML files.\n"
)


def config_with_warnings(overrides: Sequence[str]) -> Config:
    """Return the config, after a warning for each option that does nothing. Raises UserError."""
    config = compose.compose(overrides)
    for line in rules.warnings(config):
        warn(line)
    return config


def counted(number: int, noun: str) -> str:
    """Return `no problems`, `1 problem`, `2 problems`."""
    ending = "" if number == 1 else "s"
    return f"{number or 'no'} {noun}{ending}"


def tables_of_options(node: Any, prefix: str = "") -> Iterator[tuple[str, list[list[str]]]]:
    """Yield each group of options, with a row an option: name, values that it takes, default in `node`, meaning."""
    rows = []
    groups = {}
    for item in fields(node):
        name = f"{prefix}{item.name}"
        value = getattr(node, item.name)
        if is_dataclass(value):
            groups[name] = value
            continue
        facts = FACTS[name]
        kind = facts["kind"] or facts["type"].replace(" | None", " or null")
        length = f"{facts['size']} items" if facts["size"] else ""
        values = ", ".join(filter(None, [*(facts["among"] or [kind]), rules.bounds(facts), length]))
        rows.append([name, values, plain(value), facts["about"]])
    yield f"{prefix.rstrip('.') or 'run'}: {type(node).__doc__}", rows
    for name, group in groups.items():
        yield from tables_of_options(group, f"{name}.")


def help_text() -> str:
    """Return what `python train.py --help` prints."""
    lines = [USAGE]
    for title, rows in tables_of_options(compose.compose([])):
        lines += ["", title]
        for name, values, default, meaning in rows:
            lines += [f"  {name}={default}  ({values})", f"      {meaning}"]
    return "\n".join(lines)


def print_options(_: argparse.Namespace) -> None:
    """Print every option as Markdown, the content of docs/options.md: a table a group."""
    print(TITLE)
    for title, rows in tables_of_options(compose.compose([])):
        print(f"\n## {title}\n\n| option | values | default | meaning |\n|---|---|---|---|")
        for row in rows:
            print(f"| {' | '.join(row)} |")


def publish(arguments: argparse.Namespace) -> None:
    """Write a network alone, without what else its run held."""
    from unet3d.run import publish

    publish.publish(arguments.checkpoints, arguments.out, arguments.model)
    print(f"{escaped(arguments.out)}: {arguments.out.stat().st_size / 1e6:.1f} MB")


def score(arguments: argparse.Namespace) -> None:
    """Score a checkpoint on held-out cases."""
    config = config_with_warnings(arguments.overrides)
    given = compose.compose_tree(arguments.overrides).names_set("score")
    if config.plan is not None:
        given |= read_plan(config.plan).options.keys()
    from unet3d.report import report
    from unet3d.run import publish, record

    title = publish.score(arguments.checkpoint, config, arguments.out, arguments.model, given)
    report.print_scores(record.read_run(arguments.out), title)


def check_data(arguments: argparse.Namespace) -> int:
    """Read every voxel of every case. Return 2 if there is a problem."""
    config = config_with_warnings(arguments.overrides)
    from unet3d.data import cases, check, splits

    dataset = cases.dataset_to_check(config.data)
    train: Sequence[cases.Case] = ()
    val: Sequence[cases.Case] = ()
    with suppress(UserError):  # check_cases lists it too
        train, val = splits.split(dataset, config.data)
    found = check.check_cases(dataset, dataset.cases, config.data, voxels=True)
    advice = check.mostly_padding(config.model, config.data.patch, [found.headers[case.id].target for case in train])
    warnings = found.warnings if advice is None else [*found.warnings, advice]
    summary = check.summary(dataset, train, val, found.headers)
    if len(found.problems) <= bool(found.options):  # Options that mend the labels stand for one problem.
        summary += _plan_command(arguments.overrides, found.options)
    for line in [*summary, *listed([*found.problems, *(f"warning: {line}" for line in warnings)])]:
        print(escaped(line))
    print(f"{counted(len(found.problems), 'problem')}, {counted(len(warnings), 'warning')}")
    return UserError.exit_code if found.problems else 0


def _plan_command(overrides: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return a line with the command that plans for the data set of these overrides; none where they do not say it.

    `options` of the labels take the place of those that are given.
    """
    words = ["python", "-m", "unet3d", "plan"]
    changed = {option.partition("=")[0] for option in options}
    names = [word.key_or_group for word in compose.parsed(overrides)]
    for text, name in zip(overrides, names, strict=True):
        is_of_data = name == "data" or (name.startswith("data.") and name not in options_with("imports"))
        if is_of_data and name != "data.patch" and name not in changed:
            words.append(text)
    return [f"next: {shlex.join([*words, *options])}"] if "data" in names else []


def report(arguments: argparse.Namespace) -> None:
    """Write the report of a run, again."""
    from unet3d.report import report
    from unet3d.run import record

    if not (arguments.folder / "config.yaml").is_file():
        raise UserError(f"{arguments.folder}: not a run folder; give outputs/DATE/TIME-ID")
    print(escaped(report.write_report(record.read_run(arguments.folder))))


def compare(arguments: argparse.Namespace) -> None:
    """Set runs side by side."""
    from unet3d.report import compare

    compare.compare_runs(arguments.runs, arguments.out)


def folds(arguments: argparse.Namespace) -> None:
    """Set all out-of-fold cases of cross-validations in one table; publish the networks of one."""
    from unet3d.run import publish

    asked = (arguments.runs, arguments.out, arguments.components, arguments.publish, arguments.model)
    for line in publish.report_folds(*asked):
        print(escaped(line))


def predict(arguments: argparse.Namespace) -> int:
    """Segment every file. Return 2 if one could not be segmented."""
    parts = SHARD.fullmatch(arguments.shard)
    if parts is None or int(parts[1]) >= int(parts[2]):
        raise UserError(f"--shard {arguments.shard}: is no part; give i/n, part i of n, from 0 on: 0/3, 1/3 or 2/3")
    shard = (int(parts[1]), int(parts[2]))
    is_file = _names_file(arguments.out)
    if is_file and shard != (0, 1):
        raise UserError(f"-o {arguments.out}: names one file, --shard a part of many; give a folder")
    from unet3d.base import progress
    from unet3d.run import predicted_files
    from unet3d.run.predicted_files import RECORD, Origins

    segmenter = _open_segmenter(arguments)
    channels = len(segmenter.intensity)
    by_channel = LAYOUTS[segmenter.options.format].get("by_channel", False)
    affine = segmenter.options.affine
    cases, problems = predicted_files.find_cases(arguments.inputs, channels, by_channel, shard, affine)
    count = len(cases) + len(problems)
    if is_file and count > 1:
        raise UserError(f"-o {arguments.out}: names one file for {counted(count, 'case')}; give a folder")
    for problem in problems:
        lifecycle.print_error(f"error: {escaped(problem)}")
    paths_of = {case.id: _paths(case, arguments, is_file) for case in cases}
    _refuse_images(paths_of.values(), predicted_files.files_in(arguments.inputs)[0], is_file)
    record = arguments.out / RECORD if not is_file else arguments.out.with_name(f".{arguments.out.name}.jsonl")
    origins = Origins(record, segmenter.origin, arguments.checkpoint)
    missing_of = paths_of if arguments.overwrite else _missing(origins, cases, paths_of)
    for line in predicted_files.doubts_about(cases):
        warn(line)
    counts = Counter(failed=len(problems))
    for case in progress.track(cases, "predicting cases"):
        missing = missing_of[case.id]
        label_map = paths_of[case.id][0]
        if label_map in missing:
            counts["written" if _segment(segmenter, case, missing, origins) else "failed"] += 1
            continue
        counts["skipped"] += 1
        print(f"{escaped(label_map)}: skipped, this network wrote it from this image (--overwrite writes it again)")
        for path in missing[:1]:
            print(f"{escaped(path)}: not written, since its label map was skipped (--overwrite)")
    _print_counts(counts, segmenter)
    return UserError.exit_code if counts["failed"] else 0


def _names_file(out: Path) -> bool:
    """Return whether -o names a label map, not a folder. Raises UserError for a file of another kind."""
    if out.is_dir():
        return False
    name = out.name.lower()
    if name.endswith(NIFTI_ENDINGS):
        return True
    if out.exists():
        raise UserError(f"{out}: is a file; -o names a folder")
    if OTHER_ENDINGS.search(name) or name.endswith(".gz"):
        raise UserError(f"-o {out}: label maps are written as .nii.gz; name it so, or give a folder")
    return False


def _missing(
    origins: "Origins", cases: Sequence["Case"], paths_of: Mapping[str, Sequence[Path]]
) -> dict[str, list[Path]]:
    """Return by case the files to write. Raises UserError where others than this network's are there."""
    missing = {}
    others = []
    for case in cases:
        try:
            missing[case.id] = origins.missing(case, paths_of[case.id])
        except ValueError as error:
            others.append(str(error))
    if others:
        more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        raise UserError(f"{others[0]}{more}; give another folder, or --overwrite to replace what is there")
    return missing


def _open_segmenter(arguments: argparse.Namespace) -> "Segmenter":
    """Return the segmenter of the checkpoint. Raises UserError, which names flags, or CheckpointError."""
    from unet3d.run import predict

    try:
        network = predict.load(
            arguments.checkpoint,
            arguments.device,
            mirror=arguments.mirror,
            model=arguments.model,
            batch=_number(int, arguments.batch),
            overlap=_number(float, arguments.overlap),
        )
        return network.segmenter
    except UserError as error:  # about an argument of that function, which is a flag here
        text = re.sub(r"^(batch|overlap)=", r"--\1 ", str(error))
        raise UserError(text.replace("mirror=true: ", "--mirror: ", 1)) from error


def _paths(case: "Case", arguments: argparse.Namespace, is_file: bool) -> list[Path]:
    """Return the files to write for a case: its label map, and its probabilities where they are asked for."""
    from unet3d.data.nifti import stem

    label_map = arguments.out if is_file else arguments.out / f"{case.id}.nii.gz"
    if not arguments.probabilities:
        return [label_map]
    return [label_map, label_map.with_name(f"{stem(label_map)}_probabilities.nii")]


def _refuse_images(outputs: Iterable[Sequence[Path]], images: Sequence[Path], is_file: bool) -> None:
    """Raise UserError where one of the files to write is an image to segment, or would lie among these.

    From then on it would count as one of them. A file that was named may lie there, but not under an image's name.
    """
    from unet3d.data.nifti import stem

    places = {os.path.realpath(path) for path in images}  # Path.resolve raises: a circle
    neighbours = {(os.path.realpath(path.parent), stem(path) if is_file else ""): path for path in images}
    for path in chain.from_iterable(outputs):
        if os.path.realpath(path) in places:
            raise UserError(f"{path}: is an image to segment; give another folder for the label maps")
        image = neighbours.get((os.path.realpath(path.parent), stem(path) if is_file else ""))
        if image is not None:
            what = f"would lie among the images to segment, as {image.name}, and count as one of them"
            raise UserError(f"{path}: {what}; give another folder for the label maps")


def _print_counts(counts: Mapping[str, int], segmenter: "Segmenter") -> None:
    """Print how many label maps were written, what their values mean, and how many were not."""
    line = f"{counted(counts['written'], 'label map')} written"
    for kind, what in (("skipped", "skipped"), ("failed", "not segmented")):
        if counts[kind]:
            line += f", {counts[kind]} {what}"
    if counts["written"]:
        line += f"; values: {escaped(segmenter.written)}"
    if counts["written"] and segmenter.largest:
        kept = ", ".join(segmenter.classes[number] for number in segmenter.largest)
        line += f"; only the largest component is kept of: {escaped(kept)}"
    print(line)


def _number(kind: type[int] | type[float], text: str | None) -> Any:
    """Return a flag's value as a number; other words as they are, for the check of the option."""
    try:
        return kind(text or "")
    except ValueError:
        return text


def _segment(segmenter: "Segmenter", case: "Case", paths: Sequence[Path], origins: "Origins") -> bool:
    """Write the files of a case, and print their paths. Return whether that was possible. Raises NotSaved."""
    from unet3d.data.nifti import replacement
    from unet3d.run import predicted_files

    try:
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        origins.begin(case, paths)
        volume = segmenter.to_file(case, *paths)
        origins.end(case, paths[0])
        warnings = predicted_files.accepted_contradictions(case)
        if volume.nonfinite_voxels:
            warnings.insert(0, f"{case.id}: {replacement(volume.nonfinite_voxels)}")
        for line in warnings:
            warn(line)
        for path in paths:
            print(escaped(path))
        return True
    except UserError as error:
        lifecycle.print_error(f"error: {escaped(error)}")
    except OSError as error:
        if is_out_of_memory(error) or is_out_of_files(error):
            raise
        named = [path for path in paths if str(path) == error.filename]
        raise not_saved(named[0] if named else paths[0], error) from error
    except (RuntimeError, MemoryError) as error:  # perhaps for the size of this volume
        if not is_out_of_memory(error):
            raise
        lifecycle.print_error(f"error: {escaped(case.id)}: out of memory: {reason(error)}")
    return False
