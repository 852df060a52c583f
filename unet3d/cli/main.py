"""The commands of `python -m unet3d`, with exit codes and one line for a mistake."""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unet3d import __version__
from unet3d.base import progress
from unet3d.base.errors import (
    CheckpointError,
    OutOfMemory,
    UserError,
    escaped,
    is_disk_full,
    is_out_of_memory,
    listed,
    make_room,
    not_saved,
    reason,
)
from unet3d.cli import libraries, lifecycle, options, train
from unet3d.config import compose, rules
from unet3d.config.schema import Config

if TYPE_CHECKING:
    from unet3d.data.cases import Case
    from unet3d.run.predict import Segmenter

Run = Callable[[argparse.Namespace], int | None]  # of a command; returns an exit code, None for 0
LISTS = ("overrides", "inputs", "checkpoints", "runs")  # arguments that take any number of words


def main() -> int:
    """Run the command that the arguments name. Returns its exit code."""
    libraries.share_cores()
    if sys.argv[1:2] == ["train"]:
        del sys.argv[1]  # the rest is Hydra's
        return train.main()
    try:
        arguments = _arguments()
        if arguments.run in (_memory, _predict, _publish, _score, _check_data, _report, _compare):
            libraries.load_libraries()
        return arguments.run(arguments) or 0
    except (UserError, CheckpointError) as error:
        return lifecycle.print_error(f"error: {error}", error.exit_code)
    except (OSError, ImportError, RuntimeError, SystemError, MemoryError, OutOfMemory) as error:
        if found := lifecycle.ran_out(error):
            return lifecycle.print_error(*found)
        if not isinstance(error, OSError):
            raise
        # a folder that cannot be made, read or written to, or a full disk
        remedy = f"; {make_room(error)}" if is_disk_full(error) else ""
        text = f"error: {error.filename or 'a file or the output'}: {error.strerror or error}{remedy}"
        return lifecycle.print_error(text, UserError.exit_code)


def _arguments() -> argparse.Namespace:
    """Those of the command line; words may also stand after flags. Raises UserError for an unknown flag."""
    found, left = command_parser().parse_known_args()
    words: list = next((getattr(found, name) for name in LISTS if hasattr(found, name)), [])
    for word in left:
        if word.startswith("-") and hasattr(found, "overrides"):
            raise compose.not_a_flag(word, sys.argv)
        if word.startswith("-") or not any(hasattr(found, name) for name in LISTS):
            raise UserError(f"{word}: not understood; -h lists what is")
        words.append(word if hasattr(found, "overrides") else Path(word))
    out = getattr(found, "out", None)
    if out is not None and out.exists() and not out.is_dir() and found.run is not _publish:
        raise UserError(f"{out}: is a file; -o names a folder")
    if getattr(found, "config_dir", None):
        words.append(compose.search_path(found.config_dir))
    return found


def command_parser() -> argparse.ArgumentParser:
    """The commands and their arguments; `run` is the function of the command."""
    parser = argparse.ArgumentParser(prog="python -m unet3d", description="Train 3D U-Nets, explain memory, apply.")
    parser.add_argument("--version", action="version", version=f"unet3d {__version__}")
    parser.set_defaults(run=lambda _: parser.print_help())  # the default of a command takes its place
    commands = parser.add_subparsers(metavar="command")

    def command(name: str, run: Run, about: str, **out: Any) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=about)
        found.set_defaults(run=run)
        if out:
            found.add_argument("-o", "--out", type=Path, **out)
        return found

    commands.add_parser("train", help="train a network, as python train.py does; train --help lists every option")
    command("options", _options, "print every option as Markdown: docs/options.md")
    memory = command("memory", _memory, "explain the memory of a training step", help="folder for report and tables")
    _add_overrides(memory, "model=forum_mid amp=true; before them, fit: find what fits budget=8GiB")
    memory.add_argument("--half", action="store_true", help="weights and images in float16, instead of amp")
    memory.add_argument("--curves", action="store_true", help="with -o: peak against batch size, width and patch")
    memory.add_argument("--module", help="any network instead, package.module:name; with it amp=true, device=cuda")
    memory.add_argument("--args", default="{}", metavar="JSON", help="of --module: keywords that make the network")
    memory.add_argument("--input", metavar="SHAPE", help="of --module: N, C, D, H, W of its input, 1x1x96x96x96")
    memory.add_argument("--measure", action="store_true", help="of --module: run the step, too")
    memory.add_argument("--depth", type=int, metavar="N", help="of --module: cut layers' names to N parts")
    about = "segment NIfTI files with a run's checkpoint"
    predict = command("predict", _predict, about, required=True, help="folder for the label maps")
    predict.add_argument("checkpoint", type=Path, help="RUN/checkpoints/best.pt")
    predict.add_argument("inputs", type=Path, nargs="+", help="NIfTI files, or folders of them")
    predict.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    predict.add_argument("--mirror", action=argparse.BooleanOptionalAction, help="average over mirrorings")
    predict.add_argument("--batch", metavar="N", help="windows in one forward pass, or auto; default: as in validation")
    overlap = "least share of a window that its neighbour covers too, 0 to 0.9; default: as in validation"
    predict.add_argument("--overlap", metavar="SHARE", help=overlap)
    predict.add_argument("--overwrite", action="store_true", help="replace existing files")
    predict.add_argument("--probabilities", action="store_true", help="also write CASE_probabilities.nii: X Y Z CLASS")
    predict.add_argument("--shard", default="0/1", metavar="i/n", help="of all cases every n-th, from the i-th on")
    about = "write the network alone, without any path, to share it"
    publish = command("publish", _publish, about, required=True, help="the file to write")
    publish.add_argument("checkpoints", type=Path, nargs="+", help="RUN/checkpoints/best.pt; several predict as one")
    about = "score a checkpoint on the cases that a config holds out"
    score = command("score", _score, about, required=True, help="folder for scores.csv")
    score.add_argument("checkpoint", type=Path, help="RUN/checkpoints/best.pt, or a published one")
    _add_overrides(score, "data=decathlon data.root=PATH data.fold=0", "+")
    for parser_ in (predict, publish, score):
        parser_.add_argument("--model", help="your own network, package.module:name, where the checkpoint holds one")
    _add_overrides(command("check-data", _check_data, "list every problem of a data set"), "data=nnunet data.root=PATH")
    report = command("report", _report, "write the figures and report.html of a run")
    report.add_argument("folder", type=Path, help="the run's folder")
    compare = command("compare", _compare, "set runs side by side", help="folder for compare.csv, .png and .html")
    compare.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders, or the folders of sweeps")
    return parser


def _add_overrides(parser: argparse.ArgumentParser, example: str, count: str = "*") -> None:
    parser.add_argument("overrides", nargs=count, help=f"as for train: {example}")
    parser.add_argument("--config-dir", metavar="FOLDER", help="a folder of your own YAML files")


def _options(_: argparse.Namespace) -> None:
    print(options.as_markdown())


def _composed(overrides: list[str]) -> Config:
    """The config, with a warning for each option that does nothing."""
    config = compose.compose(overrides)
    for line in rules.warnings(config):
        lifecycle.print_error(f"warning: {escaped(line)}")
    return config


def _memory(arguments: argparse.Namespace) -> None:
    """Explain one config; set several, as `batch=1,2,4`, side by side."""
    is_fit, out = arguments.overrides[:1] == ["fit"], arguments.out
    if out is not None and any((out / name).exists() for name in ("STATUS", "metrics.jsonl")):
        raise UserError(f"{out}: holds a run; -o needs a folder of its own")
    if arguments.module is not None:
        return _memory_of_module(arguments)
    if arguments.input or arguments.measure or arguments.depth is not None or arguments.args != "{}":
        raise UserError("--args, --input, --measure and --depth are of --module; name it")
    jobs = compose.sweep(arguments.overrides[is_fit:])
    _refuse_all(jobs)
    if is_fit and (arguments.curves or out or arguments.half or len(jobs) > 1):
        what = "it tries amp, batch, ckpt, lean and slab itself"
        raise UserError(f"memory fit prints one command for train.py; remove -o, --curves, --half and commas: {what}")
    if arguments.curves and out is None:
        raise UserError("--curves writes a picture and a table; add -o FOLDER")
    from unet3d.cli import memory

    if is_fit:
        memory.print_fit(jobs[0])
    elif arguments.curves:
        memory.print_curves(jobs, arguments.half, out)
    elif len(jobs) > 1:
        memory.print_peaks(jobs, arguments.half, out)
    else:
        memory.print_explanation(jobs[0], arguments.half, out)


def _refuse_all(jobs: list[list[str]]) -> None:
    """Raise UserError, before torch loads, where none of these configs makes sense; one that does not is skipped."""
    reasons = []
    for job in jobs:
        try:
            _composed(job)
        except UserError as error:
            reasons.append(str(error))
    if len(reasons) == len(jobs):
        raise UserError("; ".join(dict.fromkeys(reasons)))


def _memory_of_module(arguments: argparse.Namespace) -> None:
    """Explain any network that can be imported."""
    words = arguments.overrides
    if others := [word for word in words if word.partition("=")[0] not in ("amp", "amp_dtype", "device")]:
        raise UserError(f"{others[0]}: with --module only amp, amp_dtype and device count")
    if arguments.half or arguments.curves:
        raise UserError("--half and --curves are for the package's own networks; remove them")
    config, shape = _composed(words), re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5}){2,4}", arguments.input or "")
    if shape is None:
        raise UserError(f"--input {arguments.input}: give the sizes N, C, D, H, W of the input, such as 1x1x96x96x96")
    try:
        keywords = json.loads(arguments.args)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--args: is not JSON ({error}); give keywords, such as '{{\"in_channels\": 1}}'") from error
    if not isinstance(keywords, dict):
        raise UserError(f"--args {arguments.args}: give keywords, such as '{{\"in_channels\": 1}}'")
    from unet3d.cli import memory

    sizes = [int(size) for size in shape[0].split("x")]
    memory.print_module(arguments.module, keywords, sizes, config, arguments.measure, arguments.out, arguments.depth)


def _predict(arguments: argparse.Namespace) -> int:
    """Segment every file; returns 2 if one could not be segmented."""
    shard = _shard(arguments.shard)
    from unet3d.memory.simulate import refuse_large_window
    from unet3d.run import predict

    segmenter = predict.open_segmenter(
        arguments.checkpoint,
        arguments.device,
        arguments.mirror,
        arguments.model,
        _number_or_word(arguments.batch),
        _share_or_word(arguments.overlap),
    )
    refuse_large_window(segmenter.predictor, arguments.checkpoint)
    cases, problems = predict.find_cases(arguments.inputs, len(segmenter.intensity), segmenter.by_channel, shard)
    images = set(map(os.path.realpath, predict.files_in(arguments.inputs)[0]))  # Path.resolve raises for a circle
    for problem in problems:
        lifecycle.print_error(f"error: {escaped(problem)}")
    failed, written, left = len(problems), 0, 0
    with progress.counting("predicting cases", len(cases)) as counter:
        for case in cases:
            names = [f"{case.id}.nii.gz", *[f"{case.id}_probabilities.nii"] * arguments.probabilities]
            paths = [arguments.out / name for name in names]
            if taken := [path for path in paths if os.path.realpath(path) in images]:
                raise UserError(f"{taken[0]}: is an image to segment; give another folder for the label maps")
            missing = [path for path in paths if arguments.overwrite or not path.exists()]
            if paths[0] in missing:
                is_written = _segment(segmenter, case, *missing)
                written, failed = written + is_written, failed + (not is_written)
            else:
                left += 1
                print(f"{escaped(paths[0])}: exists, left alone (--overwrite replaces it)")
                if missing:
                    print(f"{escaped(missing[0])}: not written, since its label map was left alone (--overwrite)")
            counter.advance()
    ends = f"{left} left alone" * bool(left), f"{failed} not segmented" * bool(failed)
    values = f"; values: {escaped(segmenter.written)}" if written else ""
    print(", ".join(filter(None, (f"{_count(written, 'label map')} written", *ends))) + values)
    return UserError.exit_code if failed else 0


def _shard(text: str) -> tuple[int, int]:
    """`i/n` as two numbers. Raises UserError."""
    index, _, count = text.partition("/")
    if len(text) > 20 or not (text.isascii() and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise UserError(f"--shard {text}: is no part; give i/n, part i of n, from 0 on: 0/3, 1/3 or 2/3")
    return int(index), int(count)


def _number_or_word(text: str | None) -> int | str | None:
    """Return `4` as a number; other words as they are, for the check of the option."""
    if text is None or len(text) > 20 or not (text.isascii() and text.isdecimal()):
        return text
    return int(text)


def _share_or_word(text: str | None) -> float | str | None:
    """Return `0.25` as a number; other words as they are, for the check of the option."""
    if text is None or re.fullmatch(r"-?(\d{1,9}(\.\d{0,20})?|\.\d{1,20})", text, re.ASCII) is None:
        return text
    return float(text)


def _segment(segmenter: "Segmenter", case: "Case", *paths: Path) -> bool:
    """Write the files of a case, and print their paths. Returns whether that was possible. Raises NotSaved."""
    from unet3d.data.nifti import replacement
    from unet3d.run import predict

    try:
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        volume = segmenter.to_file(case, *paths)
        replaced = [f"{case.id}: {replacement(volume.nonfinite_voxels)}"] if volume.nonfinite_voxels else []
        for line in [*replaced, *predict.accepted_contradictions(case)]:
            lifecycle.print_error(f"warning: {escaped(line)}")
        print(*map(escaped, paths), sep="\n")
        return True
    except UserError as error:
        lifecycle.print_error(f"error: {escaped(error)}")
    except OSError as error:
        if lifecycle.ran_out(error):
            raise
        named = [path for path in paths if str(path) == error.filename]
        raise not_saved((named or paths)[0], error) from error
    except (RuntimeError, MemoryError) as error:  # perhaps for the size of this volume
        if not is_out_of_memory(error):
            raise
        lifecycle.print_error(f"error: {escaped(case.id)}: out of memory: {reason(error)}")
    return False


def _publish(arguments: argparse.Namespace) -> None:
    from unet3d.run import publish

    publish.publish(arguments.checkpoints, arguments.out, arguments.model)
    print(f"{escaped(arguments.out)}: {arguments.out.stat().st_size / 1e6:.1f} MB")


def _score(arguments: argparse.Namespace) -> None:
    config = _composed(arguments.overrides)
    from unet3d.report import report, run_folder
    from unet3d.run import publish

    title = publish.score(arguments.checkpoint, config, arguments.out, arguments.model)
    report.print_scores(run_folder.read_run(arguments.out), title)


def _check_data(arguments: argparse.Namespace) -> int:
    """Read every voxel of every case; returns 2 if there is a problem."""
    config = _composed(arguments.overrides)
    from unet3d.data import cases, planner, validate

    dataset = cases.read_dataset(config.data)
    try:
        train, val = cases.split(dataset, config.data)
    except UserError:  # check_cases lists it too
        train, val = (), ()
    headers, found = validate.check_cases(dataset, dataset.cases, config.data, full=True)
    options = planner.suitable_options(config, [headers[case.id].stored for case in dataset.cases])
    if line := planner.unsuitable_patch(config, [headers[case.id].target for case in train]):
        line = line.partition("; ")[0] if "data.patch=" in " ".join(options) else line  # one patch is named, not two
        found.append(f"{validate.WARNING}{line}")
    problems = [line for line in found if not line.startswith(validate.WARNING)]
    lines = validate.summary(dataset, train, val, headers)
    if options:
        lines.append(f"options that suit it: {' '.join(options)}")
    print(*map(escaped, [*lines, *listed(found)]), sep="\n")
    print(f"{_count(len(problems), 'problem')}, {_count(len(found) - len(problems), 'warning')}")
    return UserError.exit_code if problems else 0


def _count(number: int, what: str) -> str:
    """`no problems`, `1 problem`, `2 problems`."""
    return f"{number or 'no'} {what}{'s' * (number != 1)}"


def _report(arguments: argparse.Namespace) -> None:
    from unet3d.report import report

    if not (arguments.folder / "config.yaml").is_file():
        raise UserError(f"{arguments.folder}: not a run folder; give outputs/DATE/TIME-ID")
    print(escaped(report.write_report(arguments.folder)))


def _compare(arguments: argparse.Namespace) -> None:
    from unet3d.report import compare

    compare.compare_runs(arguments.runs, arguments.out)
