"""The short commands of `python -m unet3d`: options, publish, score, check-data, report, compare, folds."""

import argparse
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any

from unet3d.base.errors import UserError, escaped, listed, warn
from unet3d.config import compose, rules
from unet3d.config.compose import read_plan
from unet3d.config.schema import FACTS, Config, options_with
from unet3d.config.words import plain

USAGE = """python train.py                                           train on phantoms, made once under data/
python train.py data=nnunet data.root=PATH amp=true       train on a data set of your own
python train.py resume=outputs/DATE/TIME-ID steps=300     go on with a run, here for longer

python train.py OPTION=VALUE ...    (installed: unet3d train OPTION=VALUE ...)

Several jobs: -m ckpt=0,2. What would run: --cfg job. A folder of your own YAML files: --config-dir FOLDER.
model=NAME, data=NAME, loss=NAME, optim=NAME and experiment=NAME choose files of configs/.
"""
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
    """Yield each group of options, with a row an option: name, type, allowed values, default in `node`, meaning."""
    rows = []
    groups = {}
    for item in fields(node):
        name = f"{prefix}{item.name}"
        value = getattr(node, item.name)
        if is_dataclass(value):
            groups[name] = value
            continue
        facts = FACTS[name]
        kind = facts.get("kind") or facts["type"].replace(" | None", " or null")
        length = f"{facts['size']} items" if facts["size"] else ""
        allowed = ", ".join(filter(None, [*facts["among"], rules.bounds(facts), length]))
        rows.append([name, kind, allowed, plain(value), facts["about"]])
    yield f"{prefix.rstrip('.') or 'run'}: {type(node).__doc__}", rows
    for name, group in groups.items():
        yield from tables_of_options(group, f"{name}.")


def help_text() -> str:
    """Return what `python train.py --help` prints."""
    lines = [USAGE]
    for title, rows in tables_of_options(compose.compose([])):
        lines += ["", title]
        for name, kind, allowed, default, meaning in rows:
            values = f"{kind}; {allowed}" if allowed else kind
            lines += [f"  {name}={default}  ({values})", f"      {meaning}"]
    return "\n".join(lines)


def print_options(_: argparse.Namespace) -> None:
    """Print every option as Markdown, the content of docs/options.md: a table a group."""
    print(TITLE)
    for title, rows in tables_of_options(compose.compose([])):
        print(f"\n## {title}\n\n| option | type | allowed | default | meaning |\n|---|---|---|---|---|")
        for row in rows:
            print(f"| {' | '.join(row)} |")


def publish(arguments: argparse.Namespace) -> None:
    """Write a network without what its run held beside it."""
    from unet3d.run import publish

    publish.publish(arguments.checkpoints, arguments.out, arguments.model)
    size = arguments.out.stat().st_size
    print(f"{escaped(arguments.out)}: {size / 1e6:.1f} MB")


def score(arguments: argparse.Namespace) -> None:
    """Score a checkpoint on held-out cases."""
    config = config_with_warnings(arguments.overrides)
    given = compose.compose_tree(arguments.overrides).names_set("score")
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
    found = check.check_cases(dataset, dataset.cases, config.data, voxels=True)
    advice = check.mostly_padding(config.model, config.data.patch, [found.headers[case.id].target for case in train])
    warnings = found.warnings if advice is None else [*found.warnings, advice]
    summary = check.summary(dataset, train, val, found.headers)
    if len(found.problems) <= bool(found.options):  # which mend the labels, one problem
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
