"""The short commands of `python -m unet3d`: options, publish, score, check-data, report, compare, folds."""

import argparse
import shlex
from collections.abc import Sequence
from contextlib import suppress

from unet3d.base.errors import UserError, escaped, listed
from unet3d.cli import lifecycle, options
from unet3d.config import compose, rules
from unet3d.config.plan_file import read_plan
from unet3d.config.schema import Config, options_with


def config_with_warnings(overrides: Sequence[str]) -> Config:
    """Return the config, after a warning for each option that does nothing. Raises UserError."""
    config = compose.compose(overrides)
    _print_warnings(rules.warnings(config))
    return config


def _print_warnings(lines: Sequence[str]) -> None:
    for line in lines:
        lifecycle.print_error(f"warning: {escaped(line)}")


def counted(number: int, noun: str) -> str:
    """Return `no problems`, `1 problem`, `2 problems`."""
    ending = "" if number == 1 else "s"
    return f"{number or 'no'} {noun}{ending}"


def print_options(_: argparse.Namespace) -> None:
    """Print every option as Markdown."""
    print(options.as_markdown())


def publish(arguments: argparse.Namespace) -> None:
    """Write a network without what its run held beside it."""
    from unet3d.run import publish

    publish.publish(arguments.checkpoints, arguments.out, arguments.model)
    size = arguments.out.stat().st_size
    print(f"{escaped(arguments.out)}: {size / 1e6:.1f} MB")


def score(arguments: argparse.Namespace) -> None:
    """Score a checkpoint on held-out cases."""
    composed = compose.compose_tree(arguments.overrides)
    config = compose.load(composed.options)
    _print_warnings(rules.warnings(config))
    given = composed.names_set("score")
    if config.plan is not None:
        given |= read_plan(config.plan).options.keys()
    from unet3d.report import summary
    from unet3d.run import publish, record

    title = publish.score(arguments.checkpoint, config, arguments.out, arguments.model, given)
    summary.print_scores(record.read_run(arguments.out), title)


def check_data(arguments: argparse.Namespace) -> int:
    """Read every voxel of every case. Return 2 if there is a problem."""
    config = config_with_warnings(arguments.overrides)
    from unet3d.data import cases, check, splits

    dataset = cases.dataset_to_check(config.data)
    train: Sequence[cases.Case] = ()
    val: Sequence[cases.Case] = ()
    with suppress(UserError):  # check_cases lists it too
        train, val = splits.split(dataset, config.data)
    headers, lines, options = check.check_cases(dataset, dataset.cases, config.data)
    advice = check.mostly_padding(config.model, config.data.patch, [headers[case.id].target for case in train])
    if advice is not None:
        lines.append(f"{cases.WARNING}{advice}")
    problems = [line for line in lines if not line.startswith(cases.WARNING)]
    summary = check.summary(dataset, train, val, headers)
    if len(problems) <= bool(options):  # which mend the labels, one problem
        summary += _plan_command(arguments.overrides, options)
    for line in [*summary, *listed(lines)]:
        print(escaped(line))
    print(f"{counted(len(problems), 'problem')}, {counted(len(lines) - len(problems), 'warning')}")
    return UserError.exit_code if problems else 0


def _plan_command(overrides: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return a line with the command that plans for the data set of these overrides; none where they do not say it.

    `options` of the labels take the place of those that are given.
    """
    words = ["python", "-m", "unet3d", "plan"]
    names = set()
    changed = {option.partition("=")[0] for option in options}
    for text, word in zip(overrides, compose.parsed(overrides), strict=True):
        name = word.key_or_group
        names.add(name)
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
    from unet3d.run import cross_validation

    for line in cross_validation.report(
        arguments.runs,
        arguments.out,
        arguments.components,
        arguments.publish,
        arguments.model,
    ):
        print(escaped(line))
