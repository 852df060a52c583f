"""`unet3d memory` of any network (`--module`), and a predicted peak beside a limit (`--below`), of a config, too."""

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from typing import Any

from torch import nn

from unet3d import build
from unet3d.base.errors import ForeseenError, UserError, escaped, is_out_of_memory, reason, warn
from unet3d.base.progress import track
from unet3d.base.terminal import NARROW, narrow_tables, paper
from unet3d.base.types import Table, budget_bytes, mib
from unet3d.cli.memory_of_several import own_words
from unet3d.config.schema import Config
from unet3d.memory import any_network
from unet3d.memory.any_network import Check, Explanation
from unet3d.memory.prediction import MemoryEstimate, left_out, recompute_line
from unet3d.memory.tables import guessed
from unet3d.recomputing.module import Recomputed, schedules_of
from unet3d.recomputing.program import Program
from unet3d.report import explained

ABOVE = 1  # the exit code where the peak is more than the limit


class OwnNetwork:
    """A network that a name such as package.module:name makes. Whatever it raises becomes a UserError of one line."""

    def __init__(self, path: str, keywords: Mapping[str, Any]) -> None:
        self.path = path
        make = build.import_object("--module", path)
        with self._failures_refused(f"cannot be made with --args {json.dumps(keywords)}"):
            network = make(**keywords)
        if not isinstance(network, nn.Module):
            raise UserError(f"--module {path}: made {type(network).__name__}, not a torch.nn.Module")
        self.network = network
        self._prepared: dict[Any, Program] = {}  # what the plans of recompute share

    def predict(self, shape: Sequence[int], config: Config, depth: int | None = None) -> Explanation:
        """Return the prediction of a step with an input of N C D H W; its `guesses` are no warnings."""
        with self._step_refused(shape), warnings.catch_warnings(action="ignore"):
            device_type = build.device_type(config)
            return any_network.predict(self._trained(config), shape, amp=_amp(config), device=device_type, depth=depth)

    def measure(self, shape: Sequence[int], config: Config, depth: int | None) -> Explanation:
        """Return what steps on the config's device have measured."""
        device = build.device(config)
        with self._step_refused(shape):
            self.network.to(device)
            return any_network.explain(self._trained(config), shape, amp=_amp(config), depth=depth)

    def _trained(self, config: Config) -> nn.Module:
        """Return the network as the config's recompute has it: it shares the network's weights."""
        plan: Any = config.recompute
        if plan == "none":
            return self.network
        trained = Recomputed(self.network, plan)
        schedules_of(trained).prepared = self._prepared
        return trained

    def _step_refused(self, shape: Sequence[int]) -> AbstractContextManager[None]:
        return self._failures_refused(f"a step with --input {'x'.join(map(str, shape))} fails")

    @contextmanager
    def _failures_refused(self, problem: str) -> Iterator[None]:
        """Raise UserError for whatever a stranger's network raises within, unless memory ran out."""
        try:
            yield
        except Exception as error:
            if isinstance(error, ForeseenError) or is_out_of_memory(error):
                raise
            text = f"{problem}: {reason(error)}"
            if isinstance(error, ImportError):  # MONAI goes on with advice and a trace
                text = f"needs a package that is not installed: {escaped(str(error).partition(chr(10))[0])}"
            raise UserError(f"--module {self.path}: {text}") from error


def _amp(config: Config) -> bool | str:
    """Return mixed precision as `unet3d.memory.predict` takes it."""
    return config.amp_dtype if config.amp and config.amp_dtype != "auto" else config.amp


def print_module(own: OwnNetwork, shape: Sequence[int], config: Config, flags: argparse.Namespace) -> None:
    """Print where the memory of a step goes; with `flags.out`, also write a page there. Raises UserError."""
    explanations = [own.predict(shape, config, flags.depth)]
    if flags.measure:
        explanations.append(own.measure(shape, config, flags.depth))
    print(*explanations, sep="\n\n")
    if explanations[0].program is not None:
        print(recompute_line(config, explanations[0].program))
    if flags.out is not None:
        print(escaped(explained.write_page(explanations[-1], flags.out)))


def print_peaks(
    own: OwnNetwork,
    shape: Sequence[int],
    jobs: Sequence[Sequence[str]],
    configs: Sequence[Config],
) -> None:
    """Print one row a config for a step of any network. Raises UserError for a network that cannot be run."""
    rows: list[list[str]] = []
    first_peak = 0
    for words, config in track(list(zip(own_words(jobs), configs, strict=True)), "steps"):
        found = own.predict(shape, config)
        first_peak = first_peak or found.peak_bytes
        program = found.program
        work = "" if program is None else f"{program.schedule.work - 1:+.0%}" if program.saves_memory else "runs plain"
        row = [" ".join(words), mib(found.peak_bytes), f"{found.peak_bytes / first_peak - 1:+.1%}", work]
        if "reserved_bytes" in found.entry:
            row.append(mib(found.entry["reserved_bytes"]))
        rows.append(row)
    heads = ["config", "peak (MiB, predicted)", "change", "forward work", "reserved (MiB)"][: max(map(len, rows))]
    rows = [row + [""] * (len(heads) - len(row)) for row in rows]
    print(f"{type(own.network).__name__}: input {'x'.join(map(str, shape))}")
    console = paper(NARROW)
    console.print(narrow_tables("Predicted peak of a step", Table(heads, rows), console.width))


def print_check(predict: Callable[[], Explanation | MemoryEstimate], config: Config, flags: argparse.Namespace) -> int:
    """Print whether a step stays within `flags.below`. Return the exit code. Raises UserError.

    Stdout is for the answer alone: what it leaves out, and what a user's network prints, goes to stderr.
    """
    with redirect_stdout(sys.stderr):
        subject = predict()
        check = Check(subject.meter, subject.name, budget_bytes(flags.below))
    notes = [*left_out(config), *check.meter.notes]
    if check.meter.guesses:
        notes.append(guessed({"guesses": check.meter.guesses}))
    for note in notes:
        warn(note)
    print(json.dumps(check.as_json(flags.depth), indent=2) if flags.json else escaped(check.line))
    return 0 if check.fits else ABOVE
