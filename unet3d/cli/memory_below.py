"""`unet3d memory --below`: a predicted peak beside a limit, as one line or as JSON, and the exit code."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from typing import Any

from unet3d import build
from unet3d.base.errors import escaped
from unet3d.cli import lifecycle, memory_of_module
from unet3d.config.schema import Config
from unet3d.memory.check import Check, check_step
from unet3d.memory.meter import STEPS_FOR_PEAK
from unet3d.memory.preflight import estimate, left_out
from unet3d.memory.tables import guessed
from unet3d.run.pretrained import with_init_names

ABOVE = 1  # the exit code where the peak is more than the limit


def check_config(overrides: Sequence[str], half: bool, limit: int, depth: int | None, *, as_json: bool) -> int:
    """Print whether a step of a config stays within a limit (bytes). Return the exit code. Raises UserError."""
    with _stdout_to_stderr():
        subject = estimate(with_init_names(overrides), half)
        if build.device_type(subject.config) == "cpu":  # an allocator settles later
            subject = replace(subject, steps=STEPS_FOR_PEAK)
        check = check_step(subject.meter, subject.name, limit)
    for line in left_out(subject.config):
        lifecycle.print_error(f"warning: {line}")
    return _print_check(check, depth, as_json)


def check_module(
    path: str,
    keywords: Mapping[str, Any],
    shape: Sequence[int],
    config: Config,
    limit: int,
    depth: int | None,
    *,
    as_json: bool,
) -> int:
    """Print whether a step of any network stays within a limit (bytes). Return the exit code. Raises UserError."""
    with _stdout_to_stderr():
        network = memory_of_module.made(path, keywords)
        explanation = memory_of_module.prediction(path, network, shape, config)
        check = check_step(explanation.meter, explanation.name, limit)
    return _print_check(check, depth, as_json)


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send what a user's network prints to stderr: stdout is for the answer alone."""
    with redirect_stdout(sys.stderr):
        yield


def _print_check(check: Check, depth: int | None, as_json: bool) -> int:
    """Print the answer on stdout, and what it leaves out on stderr."""
    for note in check.notes:
        lifecycle.print_error(f"warning: {note}")
    if check.guesses:
        lifecycle.print_error(f"warning: {guessed({'guesses': check.guesses})}")
    print(json.dumps(check.as_json(depth), indent=2) if as_json else escaped(check.line))
    return 0 if check.fits else ABOVE
