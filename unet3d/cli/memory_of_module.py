"""`unet3d memory` of any network (`--module`), and a predicted peak beside a limit (`--below`), of a config, too."""

import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from unet3d import build
from unet3d.base.errors import ForeseenError, UserError, escaped, is_out_of_memory, reason
from unet3d.base.progress import track
from unet3d.base.terminal import NARROW, narrow_tables, paper
from unet3d.base.types import Table, mib
from unet3d.cli import lifecycle
from unet3d.cli.memory_of_several import own_words
from unet3d.config.schema import Config
from unet3d.memory import any_network
from unet3d.memory.any_network import Check
from unet3d.memory.meter import STEPS_FOR_PEAK
from unet3d.memory.prediction import estimate, left_out, recompute_line
from unet3d.memory.tables import guessed
from unet3d.recomputing.module import Recomputed
from unet3d.report import explained
from unet3d.run.pretrained import with_init_names

ABOVE = 1  # the exit code where the peak is more than the limit


def print_module(
    path: str,
    keywords: Mapping[str, Any],
    shape: Sequence[int],
    config: Config,
    *,
    measures: bool,
    out: Path | None,
    depth: int | None = None,
) -> None:
    """Print where the memory of a step goes, with an input of N C D H W; with `out`, also write a page there.

    Raises UserError for a network that cannot be made or run.
    """
    network = made(path, keywords)
    explanations = [prediction(path, network, shape, config, depth)]
    if measures:
        device = build.device(config)
        with _failures_refused(path, _step_fails(shape)):
            trained = _by_plan(network.to(device), config)
            explanations.append(any_network.explain(trained, shape, amp=_amp(config), depth=depth))
    print(*explanations, sep="\n\n")
    if explanations[0].program is not None:
        print(recompute_line(config, explanations[0].program))
    if out is not None:
        print(escaped(explained.write_page(explanations[-1], out)))


def print_peaks(
    path: str,
    keywords: Mapping[str, Any],
    shape: Sequence[int],
    jobs: Sequence[Sequence[str]],
    configs: Sequence[Config],
) -> None:
    """Print one row a config for a step of any network. Raises UserError for a network that cannot be made or run."""
    network = made(path, keywords)
    names = [" ".join(words) for words in own_words(jobs)]
    rows: list[list[str]] = []
    first_peak = 0
    for name, config in track(list(zip(names, configs, strict=True)), "steps", len(jobs)):
        found = prediction(path, network, shape, config)
        first_peak = first_peak or found.peak_bytes
        program = found.program
        work = "" if program is None else f"{program.schedule.work - 1:+.0%}" if program.saves_memory else "runs plain"
        reserved = found.entry.get("reserved_bytes")
        row = [name, mib(found.peak_bytes), f"{found.peak_bytes / first_peak - 1:+.1%}", work]
        rows.append([*row, "" if reserved is None else mib(reserved)])
    heads = ["config", "peak (MiB, predicted)", "change", "forward work", "reserved (MiB)"]
    if not any(row[-1] for row in rows):
        heads, rows = heads[:-1], [row[:-1] for row in rows]
    print(f"{type(network).__name__}: input {'x'.join(map(str, shape))}")
    console = paper(NARROW)
    console.print(narrow_tables("Predicted peak of a step", Table(heads, rows), console.width))


def _by_plan(network: nn.Module, config: Config) -> nn.Module:
    """Return the network as the config's recompute has it: it shares the network's weights."""
    if config.recompute == "none":
        return network
    plan: Any = config.recompute
    return Recomputed(network, plan)


def prediction(
    path: str,
    network: nn.Module,
    shape: Sequence[int],
    config: Config,
    depth: int | None = None,
) -> any_network.Explanation:
    """Return the prediction of a step; its `guesses` are no warnings. Raises UserError where the step fails."""
    with _failures_refused(path, _step_fails(shape)), warnings.catch_warnings(action="ignore"):
        trained = _by_plan(network, config)
        return any_network.predict(trained, shape, amp=_amp(config), device=build.device_type(config), depth=depth)


def _amp(config: Config) -> bool | str:
    """Return mixed precision as `unet3d.memory.predict` takes it."""
    if config.amp and config.amp_dtype != "auto":
        return config.amp_dtype
    return config.amp


@contextmanager
def _failures_refused(path: str, problem: str) -> Iterator[None]:
    """Raise UserError for whatever a stranger's network raises within, unless memory ran out."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ForeseenError) or is_out_of_memory(error):
            raise
        raise _refusal(path, problem, error) from error


def _step_fails(shape: Sequence[int]) -> str:
    """Return the words for a step that fails."""
    return f"a step with --input {'x'.join(map(str, shape))} fails"


def made(path: str, keywords: Mapping[str, Any]) -> nn.Module:
    """Return the network that a name such as package.module:name makes. Raises UserError."""
    make = build.import_object("--module", path)
    with _failures_refused(path, f"cannot be made with --args {json.dumps(keywords)}"):
        network = make(**keywords)
    if not isinstance(network, nn.Module):
        raise UserError(f"--module {path}: made {type(network).__name__}, not a torch.nn.Module")
    return network


def _refusal(path: str, problem: str, error: Exception) -> UserError:
    """Return the error of a network that cannot be made or run, in one line."""
    if isinstance(error, ImportError):
        missing = escaped(str(error).partition("\n")[0])  # MONAI goes on with advice and a trace
        return UserError(f"--module {path}: needs a package that is not installed: {missing}")
    return UserError(f"--module {path}: {problem}: {reason(error)}")


def check_config(overrides: Sequence[str], half: bool, limit: int, depth: int | None, *, as_json: bool) -> int:
    """Print whether a step of a config stays within a limit (bytes). Return the exit code. Raises UserError."""
    with _stdout_to_stderr():
        subject = estimate(with_init_names(overrides), half)
        if build.device_type(subject.config) == "cpu":  # an allocator settles later
            subject = replace(subject, steps=STEPS_FOR_PEAK)
        check = Check(subject.meter, subject.name, limit)
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
        network = made(path, keywords)
        explanation = prediction(path, network, shape, config)
        check = Check(explanation.meter, explanation.name, limit)
    return _print_check(check, depth, as_json)


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send what a user's network prints to stderr: stdout is for the answer alone."""
    with redirect_stdout(sys.stderr):
        yield


def _print_check(check: Check, depth: int | None, as_json: bool) -> int:
    """Print the answer on stdout, and what it leaves out on stderr."""
    for note in check.meter.notes:
        lifecycle.print_error(f"warning: {note}")
    if check.meter.guesses:
        lifecycle.print_error(f"warning: {guessed({'guesses': check.meter.guesses})}")
    print(json.dumps(check.as_json(depth), indent=2) if as_json else escaped(check.line))
    return 0 if check.fits else ABOVE
