"""`unet3d memory`: the command. Its arguments are checked before torch loads."""

import argparse
import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from unet3d.base.errors import UserError
from unet3d.base.types import budget_bytes
from unet3d.cli.commands import config_with_warnings
from unet3d.config import compose
from unet3d.config.schema import options_with

SHAPE = re.compile(r"[1-9]\d{0,5}(x[1-9]\d{0,5}){2,4}")  # N, C, and one to three lengths
BELOW = "--below "
EXAMPLE = "such as '{\"in_channels\": 1}'"
FLAGS = {  # Those that each question takes.
    "fit": "",
    "one config": "--out --half --depth",
    "one config with --below": "--below --half --depth --json",
    "several configs (commas)": "--out --half",
    "--curves": "--curves --out --half",
    "--module": "--module --args --input --out --depth --measure",
    "--module with --below": "--module --args --input --below --depth --json",
    "--module with several configs (commas)": "--module --args --input",
}


def run(arguments: argparse.Namespace) -> int:
    """Explain one config; set several, as `batch=1,2,4`, side by side; find what fits; or check a limit.

    Return the exit code. Raises UserError.
    """
    overrides = list(arguments.overrides)
    is_fit = overrides[:1] == ["fit"]
    jobs = compose.sweep(overrides[is_fit:])
    _refuse_flags(arguments, is_fit, len(jobs) > 1)
    if arguments.module is not None:
        return _explain_module(arguments, jobs)
    configs = []
    reasons = []
    for job in jobs:  # One that makes no sense is skipped; where none makes sense, that is told before torch loads.
        try:
            configs.append(config_with_warnings(job))
        except UserError as error:
            reasons.append(str(error))
    if not configs:
        raise UserError("; ".join(dict.fromkeys(reasons)))
    if arguments.below is not None and configs[0].budget is not None and configs[0].recompute != "auto":
        raise UserError("--below is the limit; remove budget=, or add recompute=auto")
    from unet3d.cli import memory_answers

    if arguments.below is not None:
        predict = partial(memory_answers.estimated, jobs[0], arguments.half)
        return memory_answers.print_check(predict, configs[0], arguments)
    if is_fit:
        memory_answers.print_fit(jobs[0])
    elif arguments.curves:
        memory_answers.print_curves(jobs, arguments.half, arguments.out)
    elif len(jobs) > 1:
        memory_answers.print_peaks(jobs, arguments.half, arguments.out)
    else:
        memory_answers.print_explanation(jobs[0], arguments.half, arguments.out, arguments.depth)
    return 0


def _refuse_flags(arguments: argparse.Namespace, is_fit: bool, are_several: bool) -> None:
    """Raise UserError for a flag that the question does not take, and for a value of one that cannot be."""
    several = "several configs (commas)"
    question = "one config" if arguments.module is None else "--module"
    if is_fit:
        question = "fit"
    elif arguments.curves and arguments.module is None:
        question = "--curves"
    elif are_several:
        question = several if arguments.module is None else f"--module with {several}"
    elif arguments.below is not None:
        question = f"{question} with --below"
    for flag in sorted({flag for taken in FLAGS.values() for flag in taken.split()} - {*FLAGS[question].split()}):
        if getattr(arguments, flag[2:]) not in (None, False):
            takers = [asked for asked, taken in FLAGS.items() if flag in taken.split()]
            raise UserError(f"{flag}: is not for {question}; it is for {', '.join(takers)}")
    if arguments.curves and arguments.out is None:
        raise UserError("--curves writes a picture and a table; add -o FOLDER")
    if arguments.depth is not None and arguments.depth < 1:
        raise UserError(f"--depth {arguments.depth}: give the number of parts of layers' names, from 1 on")
    if arguments.below is not None:
        budget_bytes(arguments.below, BELOW)
    out: Path | None = arguments.out
    if out is not None and ((out / "STATUS").exists() or (out / "metrics.jsonl").exists()):
        raise UserError(f"{out}: holds a run, whose memory.json would be replaced; -o needs a folder of its own")


def _explain_module(arguments: argparse.Namespace, jobs: Sequence[Sequence[str]]) -> int:
    """Explain or check any network that can be imported. Return the exit code. Raises UserError."""
    refuse_for_module(arguments.overrides, "memory")
    for word in arguments.overrides:
        if "auto" in word and word.startswith("recompute="):
            raise UserError(f"{word}: with --module give none, lean or tiles; auto follows a budget, with model.path=")
    configs = [config_with_warnings(job) for job in jobs]
    if SHAPE.fullmatch(arguments.input or "") is None:
        example = "give the sizes N, C, D, H, W of the input, such as 1x1x96x96x96"
        raise UserError(f"--input {arguments.input}: {example}")
    shape = [int(size) for size in arguments.input.split("x")]
    keywords = network_keywords(arguments.args)
    from unet3d.cli.memory_answers import print_check, print_module, print_peaks_of
    from unet3d.memory.any_network import OwnNetwork

    make = partial(OwnNetwork, arguments.module, keywords)
    if arguments.below is not None:
        return print_check(lambda: make().explain(shape, configs[0]), configs[0], arguments)
    if len(jobs) > 1:
        print_peaks_of(make(), shape, jobs, configs)
    else:
        print_module(make(), shape, configs[0], arguments)
    return 0


def refuse_for_module(overrides: Sequence[str], command: str) -> None:
    """Raise UserError for an option that this command does not take with --module."""
    taken = sorted(options_with(f"module_{command}"))
    for word in overrides:
        if word.partition("=")[0] not in taken:
            raise UserError(f"{word}: with --module only {', '.join(taken)} count")


def network_keywords(text: str | None) -> dict[str, Any]:
    """Return the keywords that make a network, from JSON. Raises UserError."""
    try:
        keywords = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise UserError(f"--args: is not JSON ({error}); give keywords, {EXAMPLE}") from error
    if not isinstance(keywords, dict):
        raise UserError(f"--args {text}: give keywords, {EXAMPLE}")
    return keywords
