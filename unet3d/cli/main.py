"""The commands of `python -m unet3d`, with exit codes and one line for a mistake."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from unet3d import __version__
from unet3d.base import process
from unet3d.base.errors import UserError
from unet3d.cli import commands, lifecycle, memory, plan_command, train
from unet3d.config import compose
from unet3d.config.words import not_a_flag

Command = Callable[[argparse.Namespace], int | None]  # returns an exit code, None for 0
LISTS = ("overrides", "inputs", "checkpoints", "runs")  # arguments that take any number of words
WRITE_FILES = (commands.publish, plan_command.run, commands.predict)  # commands whose -o may name a file
EXAMPLES = """examples:
  python -m unet3d train model=unet_small amp=true
  python -m unet3d check-data data=nnunet data.root=PATH
  python -m unet3d plan data=nnunet data.root=PATH budget=11GiB
  python -m unet3d memory model=forum_mid amp=true
  python -m unet3d memory model=forum_mid --below 8GiB
  python -m unet3d memory fit model=forum_mid budget=8GiB
  python -m unet3d predict outputs/DATE/TIME-ID/checkpoints/best.pt IMAGES -o LABELS
"""


def main() -> int:
    """Run the command that the arguments name. Return its exit code."""
    process.prepare()
    if sys.argv[1:2] == ["train"]:
        return train.main(sys.argv[2:])
    try:
        arguments = _arguments()
        return arguments.run(arguments) or 0
    except Exception as error:
        place = "a file or the output"
        ending = lifecycle.foreseen(error, place)
        if ending is None and isinstance(error, OSError):  # a folder that cannot be made, read or written to
            ending = f"error: {error.filename or place}: {error.strerror or error}", UserError.exit_code
        if ending is None:
            raise
        return lifecycle.print_error(*ending)


def _arguments() -> argparse.Namespace:
    """Parse the command line; words may also stand after flags. Raises UserError for an unknown flag."""
    arguments, unknown = command_parser().parse_known_args()
    lists = [name for name in LISTS if hasattr(arguments, name)]
    words: list = getattr(arguments, lists[0]) if lists else []
    takes_overrides = hasattr(arguments, "overrides")
    for word in unknown:
        if word.startswith("-") and takes_overrides:
            raise not_a_flag(word, sys.argv)
        if word.startswith("-") or not lists:
            raise UserError(f"{word}: not understood; -h lists what is")
        words.append(word if takes_overrides else Path(word))
    out = getattr(arguments, "out", None)
    if out is not None and out.exists() and not out.is_dir() and arguments.run not in WRITE_FILES:
        raise UserError(f"{out}: is a file; -o names a folder")
    if getattr(arguments, "config_dir", None):
        words.append(compose.search_path(arguments.config_dir))
    return arguments


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; `run` is the function of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m unet3d",
        description="Train 3D U-Nets, explain memory, apply.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"unet3d {__version__}")
    parser.set_defaults(run=lambda _: parser.print_help())  # a command replaces them
    subparsers = parser.add_subparsers(metavar="command")
    subparsers.add_parser("train", help="train a network, as python train.py does; train --help lists every option")

    def command(name: str, run: Command, about: str) -> argparse.ArgumentParser:
        subparser: argparse.ArgumentParser = subparsers.add_parser(name, help=about)
        subparser.set_defaults(run=run)
        return subparser

    command("options", commands.print_options, "print every option as Markdown: docs/options.md")
    plan = command("plan", plan_command.run, "from a data set, budget=11GiB and time=8h to a plan that train.py keeps")
    plan_command.add_arguments(plan)
    _add_out(plan, "the file to write; default: plan.yaml")
    _add_overrides(plan, "data=nnunet data.root=PATH budget=11GiB time=8h")
    _add_memory_arguments(command("memory", memory.run, "explain the memory of a training step"))
    _add_predict_arguments(command("predict", commands.predict, "segment NIfTI files with a run's checkpoint"))
    publish = command("publish", commands.publish, "write the network alone, without any path, to share it")
    _add_out(publish, "the file to write", is_required=True)
    publish.add_argument("checkpoints", type=Path, nargs="+", help="RUN/checkpoints/best.pt; several predict as one")
    _add_network(publish)
    score = command("score", commands.score, "score a checkpoint on the cases that a config holds out")
    _add_out(score, "folder for scores.csv", is_required=True)
    score.add_argument("checkpoint", type=Path, help="RUN/checkpoints/best.pt, or a published one")
    _add_overrides(score, "data=decathlon data.root=PATH data.fold=0", count="+")
    _add_network(score)
    check_data = command("check-data", commands.check_data, "list every problem of a data set")
    _add_overrides(check_data, "data=nnunet data.root=PATH")
    report = command("report", commands.report, "write the figures and report.html of a run")
    report.add_argument("folder", type=Path, help="the run's folder")
    compare = command("compare", commands.compare, "set runs side by side")
    _add_out(compare, "folder for compare.csv, .png and .html")
    compare.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders, or the folders of sweeps")
    _add_fold_arguments(command("folds", commands.folds, "one table of all cases of a cross-validation; test; publish"))
    return parser


def _add_fold_arguments(parser: argparse.ArgumentParser) -> None:
    _add_out(parser, "folder for cross_validation.md, .csv, .tex, cases.csv, and of two methods paired.csv")
    about = "the folder of a sweep over data.fold, or run folders; of several methods each is tested against the first"
    parser.add_argument("runs", type=Path, nargs="+", metavar="SWEEP", help=about)
    components = "say for which classes the largest component alone raises Dice; reads label maps and data"
    parser.add_argument("--components", action="store_true", help=components)
    ensemble = "write all folds as one network, which keeps the largest component alone of these classes"
    parser.add_argument("--publish", type=Path, metavar="FILE", help=ensemble)
    _add_network(parser)


def _add_memory_arguments(parser: argparse.ArgumentParser) -> None:
    _add_out(parser, "folder for report and tables")
    _add_overrides(parser, "model=forum_mid amp=true; before them, fit: find what fits budget=8GiB")
    parser.add_argument("--half", action="store_true", help="weights and images in float16, instead of amp")
    parser.add_argument("--curves", action="store_true", help="with -o: peak against batch size, width and patch")
    parser.add_argument("--module", help="instead of model=: any network, package.module:name")
    parser.add_argument("--args", metavar="JSON", help="keywords that make the network (needs --module)")
    parser.add_argument("--input", metavar="SHAPE", help="N, C, D, H, W of its input: 1x1x96x96x96 (needs --module)")
    parser.add_argument("--measure", action="store_true", help="measure as well as predict (needs --module)")
    parser.add_argument("--depth", type=int, metavar="N", help="sum layers up by N parts of their names")
    over = "check one config or --module: one line, exit code 1 where the predicted peak is more than 8GiB, say"
    parser.add_argument("--below", metavar="SIZE", help=over)
    parser.add_argument("--json", action="store_true", help="a JSON object instead of the line (needs --below)")


def _add_predict_arguments(parser: argparse.ArgumentParser) -> None:
    _add_out(parser, "folder for the label maps; of a single case also a file, LABELS.nii.gz", is_required=True)
    parser.add_argument("checkpoint", type=Path, help="RUN/checkpoints/best.pt")
    parser.add_argument("inputs", type=Path, nargs="+", help="NIfTI files, or folders of them")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--mirror", action=argparse.BooleanOptionalAction, help="average over mirrorings")
    parser.add_argument("--batch", metavar="N", help="windows in one forward pass, or auto; default: as in validation")
    overlap = "least share of a window that its neighbour covers too, 0 to 0.9; default: as in validation"
    parser.add_argument("--overlap", metavar="SHARE", help=overlap)
    parser.add_argument("--overwrite", action="store_true", help="replace existing files, also those of other networks")
    parser.add_argument("--probabilities", action="store_true", help="also write CASE_probabilities.nii: X Y Z CLASS")
    parser.add_argument("--shard", default="0/1", metavar="i/n", help="of all cases every n-th, from the i-th on")
    _add_network(parser)


def _add_out(parser: argparse.ArgumentParser, about: str, is_required: bool = False) -> None:
    parser.add_argument("-o", "--out", type=Path, required=is_required, help=about)


def _add_network(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="your own network, package.module:name, where the checkpoint holds one")


def _add_overrides(parser: argparse.ArgumentParser, example: str, count: str = "*") -> None:
    parser.add_argument("overrides", nargs=count, help=f"as for train: {example}")
    parser.add_argument("--config-dir", metavar="FOLDER", help="a folder of your own YAML files")
