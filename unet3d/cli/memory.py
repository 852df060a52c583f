"""`unet3d memory`: the command. Its arguments are checked before torch loads."""

import argparse
import json
import re
from collections.abc import Sequence
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


def run(arguments: argparse.Namespace) -> int:
    """Explain one config; set several, as `batch=1,2,4`, side by side; find what fits; or check a limit.

    Return the exit code. Raises UserError.
    """
    _refuse_run_folder(arguments.out)
    _refuse_flags(arguments)
    if arguments.module is not None:
        return _explain_module(arguments)
    if arguments.input or arguments.measure or arguments.args != "{}":
        raise UserError("--args, --input and --measure are of --module; name it")
    overrides = list(arguments.overrides)
    is_fit = overrides[:1] == ["fit"]
    if is_fit:
        del overrides[0]
    jobs = compose.sweep(overrides)
    _refuse_all(jobs)
    if is_fit and (arguments.curves or arguments.out or arguments.half or len(jobs) > 1):
        reason = "it tries amp, batch, ckpt and recompute itself"
        raise UserError(f"memory fit prints one command for train.py; remove -o, --curves, --half and commas: {reason}")
    if arguments.curves and arguments.out is None:
        raise UserError("--curves writes a picture and a table; add -o FOLDER")
    if arguments.depth is not None and (is_fit or arguments.curves or len(jobs) > 1):
        raise UserError("--depth is of the layers of one config; remove it, or fit, --curves and commas")
    if arguments.below is not None:
        if is_fit or len(jobs) > 1:
            raise UserError("--below checks one config; remove fit and commas")
        _refuse_budget(jobs[0])
        from unet3d.cli import memory_of_module

        return memory_of_module.check_config(
            jobs[0],
            arguments.half,
            budget_bytes(arguments.below, BELOW),
            arguments.depth,
            as_json=arguments.json,
        )
    from unet3d.cli import memory_of_config, memory_of_several

    if is_fit:
        memory_of_several.print_fit(jobs[0])
    elif arguments.curves:
        memory_of_several.print_curves(jobs, arguments.half, arguments.out)
    elif len(jobs) > 1:
        memory_of_several.print_peaks(jobs, arguments.half, arguments.out)
    else:
        memory_of_config.print_explanation(jobs[0], arguments.half, arguments.out, arguments.depth)
    return 0


def _refuse_flags(arguments: argparse.Namespace) -> None:
    """Raise UserError for a limit or depth that is none, and for flags that do not go together."""
    if arguments.depth is not None and arguments.depth < 1:
        raise UserError(f"--depth {arguments.depth}: give the number of parts of layers' names, from 1 on")
    if arguments.below is None:
        if arguments.json:
            raise UserError("--json is of --below; name a limit, such as --below 8GiB")
        return
    budget_bytes(arguments.below, BELOW)
    if arguments.out or arguments.curves or arguments.measure:
        raise UserError("--below prints one line; remove -o, --curves and --measure")


def _refuse_budget(overrides: Sequence[str]) -> None:
    """Raise UserError for a budget beside --below that no option of the config follows."""
    config = compose.compose(overrides)
    if config.budget is not None and config.recompute != "auto":
        raise UserError("--below is the limit; remove budget=, or add recompute=auto")


def _refuse_run_folder(out: Path | None) -> None:
    """Raise UserError where the folder to write to holds a run, whose memory.json would be replaced."""
    if out is None:
        return
    if (out / "STATUS").exists() or (out / "metrics.jsonl").exists():
        raise UserError(f"{out}: holds a run; -o needs a folder of its own")


def _refuse_all(jobs: Sequence[Sequence[str]]) -> None:
    """Raise UserError, before torch loads, where none of these configs makes sense; one that does not is skipped."""
    reasons = []
    for job in jobs:
        try:
            config_with_warnings(job)
        except UserError as error:
            reasons.append(str(error))
    if len(reasons) == len(jobs):
        raise UserError("; ".join(dict.fromkeys(reasons)))


def _explain_module(arguments: argparse.Namespace) -> int:
    """Explain or check any network that can be imported. Return the exit code. Raises UserError."""
    refuse_for_module(arguments.overrides, "memory")
    for word in arguments.overrides:
        if "auto" in word and word.startswith("recompute="):
            raise UserError(f"{word}: with --module give none, lean or tiles; auto follows a budget, with model.path=")
    if arguments.half or arguments.curves:
        raise UserError("--half and --curves are for the package's own networks; remove them")
    jobs = compose.sweep(arguments.overrides)
    if len(jobs) > 1 and (arguments.below is not None or arguments.measure or arguments.out or arguments.depth):
        raise UserError("--below, --measure, -o and --depth are of one step; remove them, or the commas")
    config, *others = map(config_with_warnings, jobs)
    if SHAPE.fullmatch(arguments.input or "") is None:
        example = "give the sizes N, C, D, H, W of the input, such as 1x1x96x96x96"
        raise UserError(f"--input {arguments.input}: {example}")
    shape = [int(size) for size in arguments.input.split("x")]
    keywords = network_keywords(arguments.args)
    from unet3d.cli import memory_of_module

    if arguments.below is not None:
        return memory_of_module.check_module(
            arguments.module,
            keywords,
            shape,
            config,
            budget_bytes(arguments.below, BELOW),
            arguments.depth,
            as_json=arguments.json,
        )
    if others:
        memory_of_module.print_peaks(arguments.module, keywords, shape, jobs, [config, *others])
        return 0
    memory_of_module.print_module(
        arguments.module,
        keywords,
        shape,
        config,
        measures=arguments.measure,
        out=arguments.out,
        depth=arguments.depth,
    )
    return 0


def refuse_for_module(overrides: Sequence[str], command: str) -> None:
    """Raise UserError for an option that this command does not take with --module."""
    taken = sorted(options_with(f"module_{command}"))
    for word in overrides:
        if word.partition("=")[0] not in taken:
            raise UserError(f"{word}: with --module only {', '.join(taken)} count")


def network_keywords(text: str) -> dict[str, Any]:
    """Return the keywords that make a network, from JSON. Raises UserError."""
    try:
        keywords = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--args: is not JSON ({error}); give keywords, {EXAMPLE}") from error
    if not isinstance(keywords, dict):
        raise UserError(f"--args {text}: give keywords, {EXAMPLE}")
    return keywords
