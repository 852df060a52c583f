"""The commands: python -m unet3d train | memory | predict | publish | score | check-data | report | compare"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from unet3d import __version__, compose, progress
from unet3d.errors import NotSaved, OutOfMemory, SnapshotError, UserError, is_out_of_memory, reason

if TYPE_CHECKING:
    from unet3d.data.cases import Case
    from unet3d.run.predict import Segmenter

LISTS = ("overrides", "inputs", "snapshots", "runs")  # arguments that take any number of words


def main() -> int:
    """Run the command that the arguments name. Returns its exit code."""
    try:
        arguments = _arguments()
        code: int = arguments.run(arguments)
        return code
    except (UserError, SnapshotError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a folder that cannot be made, read or written to
        print(f"error: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return UserError.exit_code
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"error: out of memory: {reason(error)}", file=sys.stderr)
        return OutOfMemory.exit_code


def _arguments() -> argparse.Namespace:
    """Those of the command line; words may also stand after flags. Raises UserError for a flag that there is not."""
    found, left = _parser().parse_known_args()
    words: list = next((getattr(found, name) for name in LISTS if hasattr(found, name)), [])
    for word in left:
        if word.startswith("-") or not any(hasattr(found, name) for name in LISTS):
            raise UserError(f"{word}: not understood; -h lists what is")
        words.append(word if hasattr(found, "overrides") else Path(word))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m unet3d", description="Explain memory, apply, check and report.")
    parser.add_argument("--version", action="version", version=f"unet3d {__version__}")
    parser.set_defaults(run=lambda _: _show(parser))  # the default of a command takes its place
    commands = parser.add_subparsers(metavar="command")
    memory = commands.add_parser("memory", help="tell where the memory of a training step goes, without running it")
    memory.add_argument(
        "overrides",
        nargs="*",
        help="as for train.py: model=forum_mid amp=true; before them, fit: find what fits budget=8GiB",
    )
    memory.add_argument("-o", "--out", type=Path, help="folder for report, figures and tables")
    memory.add_argument("--half", action="store_true", help="weights and images in float16, instead of amp")
    memory.add_argument("--curves", action="store_true", help="with -o: peak against batch size, width and patch")
    memory.set_defaults(run=_memory)
    predict = commands.add_parser("predict", help="segment NIfTI files with a run's snapshot")
    predict.add_argument("snapshot", type=Path, help="RUN/checkpoints/best.pt")
    predict.add_argument("inputs", type=Path, nargs="+", help="NIfTI files, or folders of them")
    predict.add_argument("-o", "--out", type=Path, required=True, help="folder for the label maps")
    predict.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    predict.add_argument("--mirror", action=argparse.BooleanOptionalAction, help="average over mirrorings")
    predict.add_argument("--overwrite", action="store_true", help="replace label maps that are there")
    predict.set_defaults(run=_predict)
    publish = commands.add_parser("publish", help="a snapshot to give away: the network alone, without any path")
    publish.add_argument("snapshots", type=Path, nargs="+", help="RUN/checkpoints/best.pt; several predict as one")
    publish.add_argument("-o", "--out", type=Path, required=True, help="the file to write")
    publish.set_defaults(run=_publish)
    score = commands.add_parser("score", help="score a snapshot on the cases that a config holds out")
    score.add_argument("snapshot", type=Path, help="RUN/checkpoints/best.pt, or a published one")
    score.add_argument("overrides", nargs="+", help="as for train.py: data=decathlon data.root=PATH data.fold=0")
    score.add_argument("-o", "--out", type=Path, required=True, help="folder for scores.csv")
    score.set_defaults(run=_score)
    check = commands.add_parser("check-data", help="list every problem of a data set")
    check.add_argument("overrides", nargs="*", help="as for train.py: data=decathlon data.root=PATH")
    check.set_defaults(run=_check_data)
    report = commands.add_parser("report", help="write a run's figures and report.html anew")
    report.add_argument("folder", type=Path, help="the run's folder")
    report.set_defaults(run=_report)
    compare = commands.add_parser("compare", help="set runs side by side")
    compare.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders, or the folders of sweeps")
    compare.add_argument("-o", "--out", type=Path, help="folder for compare.csv, compare.png and compare.html")
    compare.set_defaults(run=_compare)
    return parser


def _show(parser: argparse.ArgumentParser) -> int:
    """What there is, for who names no command."""
    parser.print_help()
    return 0


def _memory(arguments: argparse.Namespace) -> int:
    """One config is explained; several, as `batch=1,2,4`, are set side by side."""
    verb = next((word for word in arguments.overrides[:1] if word == "fit"), None)
    words = arguments.overrides[1:] if verb else arguments.overrides
    jobs = compose.sweep(words)
    for job in jobs:
        compose.compose(job)  # a mistake is answered before torch loads
    _check_memory(arguments, verb)
    if verb and len(jobs) > 1:
        raise UserError(f"memory {verb} takes one config; leave the commas away")
    from unet3d.cli import memory

    if verb == "fit":
        memory.print_fit(jobs[0])
    elif arguments.curves:
        memory.print_curves(jobs, arguments.half, arguments.out)
    elif len(jobs) > 1:
        memory.print_peaks(jobs, arguments.half, arguments.out)
    else:
        memory.explain(jobs[0], arguments.half, arguments.out)
    return 0


def _check_memory(arguments: argparse.Namespace, verb: str | None) -> None:
    out = arguments.out
    if verb and (arguments.curves or out):
        raise UserError(f"memory {verb} prints what it finds; leave -o and --curves away")
    if verb == "fit" and arguments.half:
        raise UserError("memory fit prints a command for train.py, which has no --half; leave it away")
    if arguments.curves and out is None:
        raise UserError("--curves writes a picture and a table; add -o FOLDER")
    if out is not None and out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; -o names a folder")
    if out is not None and any((out / name).exists() for name in ("STATUS", "metrics.jsonl")):
        raise UserError(f"{out}: holds a run; -o needs a folder of its own")


def _predict(arguments: argparse.Namespace) -> int:
    """Every file that can be segmented is; returns 2 if one could not."""
    from unet3d.memory.simulate import refuse_large_window
    from unet3d.run import predict

    if arguments.out.exists() and not arguments.out.is_dir():
        raise UserError(f"{arguments.out}: is a file; -o names the folder for the label maps")
    segmenter = predict.open_segmenter(arguments.snapshot, arguments.device, arguments.mirror)
    refuse_large_window(segmenter.predictor, arguments.snapshot)
    cases, problems = predict.find_cases(arguments.inputs, len(segmenter.intensity), segmenter.by_channel)
    images = {file.resolve() for file in predict.files_in(arguments.inputs)}
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    failed = len(problems)
    with progress.counting("predicting", len(cases)) as counter:
        for case in cases:
            path = arguments.out / f"{case.id}.nii.gz"
            if path.resolve() in images:
                raise UserError(f"{path}: is an image to segment; -o names another folder for the label maps")
            if path.exists() and not arguments.overwrite:
                print(f"{path}: there already, left alone (--overwrite replaces it)")
            else:
                failed += not _segment(segmenter, case, path)
            counter.advance()
    return UserError.exit_code if failed else 0


def _segment(segmenter: "Segmenter", case: "Case", path: Path) -> bool:
    """Write the label map of a case, and print its path. Returns whether that was possible. Raises NotSaved."""
    from unet3d.data.nifti import replacement
    from unet3d.run import predict

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        volume = segmenter.to_file(case, path)
        passed = [f"{case.id}: {replacement(volume.replaced)}"] if volume.replaced else []
        for line in [*passed, *predict.accepted_contradictions(case)]:
            print(f"warning: {line}", file=sys.stderr)
        print(path)
        return True
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        raise NotSaved(f"{path}: not saved ({error.strerror})") from error
    except (RuntimeError, MemoryError) as error:  # of this volume's size, perhaps
        if not is_out_of_memory(error):
            raise
        print(f"error: {case.id}: out of memory: {reason(error)}", file=sys.stderr)
    return False


def _publish(arguments: argparse.Namespace) -> int:
    from unet3d.run import publish

    publish.publish(arguments.snapshots, arguments.out)
    print(f"{arguments.out}: {arguments.out.stat().st_size / 1e6:.1f} MB")
    return 0


def _score(arguments: argparse.Namespace) -> int:
    config = compose.compose(arguments.overrides)
    if arguments.out.exists() and not arguments.out.is_dir():
        raise UserError(f"{arguments.out}: is a file; -o names the folder for scores.csv")
    from unet3d.report import report, run_folder
    from unet3d.run import publish

    title = publish.score(arguments.snapshot, config, arguments.out)
    report.print_scores(run_folder.read_run(arguments.out), title)
    return 0


def _check_data(arguments: argparse.Namespace) -> int:
    """Read every voxel of every case; returns 2 if there is a problem."""
    config = compose.compose(arguments.overrides)
    from unet3d.data import cases, check

    task = cases.read_dataset(config.data)
    try:
        train, val = cases.split(task, config.data)
    except UserError:  # check_cases tells of it, among the rest
        train, val = (), ()
    found = check.check_cases(task, task.cases, config.data, full=True)
    problems = [line for line in found if not line.startswith(check.WARNING)]
    print("\n".join([*check.summary(task, train, val), *found]))
    print(f"{len(problems) or 'no'} problems, {len(found) - len(problems)} warnings")
    return UserError.exit_code if problems else 0


def _report(arguments: argparse.Namespace) -> int:
    from unet3d.report import report

    if not (arguments.folder / "config.yaml").is_file():
        raise UserError(f"{arguments.folder}: not a run folder; give outputs/DATE/TIME-ID")
    print(report.write_report(arguments.folder))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    if arguments.out is not None and arguments.out.exists() and not arguments.out.is_dir():
        raise UserError(f"{arguments.out}: is a file; -o names the folder for the comparison")
    from unet3d.report import compare

    compare.compare_runs(arguments.runs, arguments.out)
    return 0
