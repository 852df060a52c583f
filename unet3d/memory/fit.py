"""`python -m unet3d memory fit`: of all ways to take the same step, those that fit a budget at the least cost."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from unet3d.checks import budget_bytes
from unet3d.config import Config, Model
from unet3d.console import WIDE, paper, terminal_table
from unet3d.errors import UserError
from unet3d.memory.look import Look
from unet3d.memory.plan import is_allowed, knows_the_batch, lean_options, levers, price
from unet3d.memory.profile import profile
from unet3d.memory.segments import SLACK, cuts, peak, recomputed
from unet3d.progress import track
from unet3d.table import Table, mib

FRONT = 12  # rows shown


class Point(NamedTuple):
    """One way to take the step: overrides, estimated bytes, and convolution FLOPs done again as a share of a step's."""

    overrides: tuple[str, ...]
    segments: int
    peak: int
    again: float
    is_same: bool  # the result, but for rounding


def fit(subject: Look, words: Sequence[str]) -> str:
    """Print the front of peak against cost; returns the command line that fits. UserError if none does."""
    config, options = subject.config, subject.options
    if config.budget is None:
        raise UserError("memory fit needs a budget, e.g. budget=8GiB")
    budget = budget_bytes(config.budget)
    points = list(search(config, options))
    print_front([*front([p for p in points if p.is_same]), *front([p for p in points if not p.is_same])], budget)
    tried: dict[tuple[str, ...], Point] = {}
    for point in sorted((p for p in points if p.peak <= SLACK * budget), key=_cost):
        tried.setdefault(point.overrides, point)  # the cheapest cut of a command: `ckpt=auto` chooses among them
    for point in track(tried.values(), "commands that may fit, at most", len(tried)):
        added = point.overrides if "ckpt=auto" in point.overrides else (*point.overrides, "ckpt=0")
        if price(*_applied(config, options, point)).peak <= budget:
            return command(words, added)
    return _beyond(config, options, budget, words)


def search(config: Config, options: Model) -> Iterator[Point]:
    """Mixed precision x batch in parts x lean operations x every cut into segments."""
    found = list(ways(config, options))
    for way in track(found, "ways to take the step", len(found)):
        uncut = profile(way.config, way.options)
        is_same = way.config.batch == config.batch or not knows_the_batch(config, way.options)
        yield Point(way.overrides, 1, peak(uncut, (0,)), 0, is_same)
        for starts in cuts(len(uncut.forward), len(uncut.forward)):
            again = recomputed(uncut, starts) / 3
            yield Point((*way.overrides, "ckpt=auto"), len(starts), peak(uncut, starts), again, is_same)


class Way(NamedTuple):
    """To take the step without checkpointing: overrides, and the config and network that they lead to."""

    overrides: tuple[str, ...]
    config: Config
    options: Model


def ways(config: Config, options: Model) -> Iterator[Way]:
    """Mixed precision x batch in parts x lean operations."""
    whole = config.batch * config.accumulate
    leaner = [((), options), *(((override,), lean) for override, lean in lean_options(options))]
    for amp in {config.amp, True}:
        for batch in (n for n in range(1, config.batch + 1) if config.batch % n == 0):
            changed = replace(config, amp=amp, batch=batch, accumulate=whole // batch)
            split = (f"batch={batch}", f"accumulate={whole // batch}") if batch != config.batch else ()
            precision = ("amp=true",) if amp != config.amp else ()
            for lean, slim in leaner:
                if is_allowed(changed, slim):
                    yield Way((*precision, *split, *lean), changed, slim)


def _cost(point: Point) -> tuple[bool, float, int, int]:
    """The same result first, then less computed again, then fewer changes to the command."""
    return not point.is_same, point.again, len(point.overrides), point.peak


def front(points: Sequence[Point]) -> list[Point]:
    """Those of which no other needs less at no more cost, cheapest first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.again, p.peak, len(p.overrides))):
        if not best or point.peak < best[-1].peak:
            best.append(point)
    return best


def print_front(points: Sequence[Point], budget: int) -> None:
    """As a table, thinned where it is long."""
    step = max(1, -(-len(points) // FRONT))
    shown = points[::step]
    rows = [
        [
            mib(p.peak),
            "yes" if p.peak <= budget else "",
            f"{p.again:+.0%}",
            str(p.segments) if p.segments > 1 else "",
            "" if p.is_same else "statistics",
            " ".join(p.overrides),
        ]
        for p in shown
    ]
    columns = ["peak (MiB, estimated)", "fits", "FLOPs", "segments", "changes", "overrides"]
    paper(WIDE).print(terminal_table("Least memory by cost", Table(columns, rows)))


def _applied(config: Config, options: Model, point: Point) -> tuple[Config, Model]:
    given = dict(word.split("=", 1) for word in point.overrides)
    config = replace(
        config,
        amp=config.amp or "amp" in given,
        batch=int(given["batch"]) if "batch" in given else config.batch,
        accumulate=int(given["accumulate"]) if "accumulate" in given else config.accumulate,
        ckpt="auto" if "ckpt" in given else 0,
    )
    lean = [slim for override, slim in lean_options(options) if override in point.overrides]
    return config, lean[-1] if lean else options


def command(words: Sequence[str], added: Sequence[str]) -> str:
    """The command line with overrides added in the place of those that they replace, ready to paste."""
    replaced = {word.partition("=")[0] for word in added}
    kept = [word for word in words if word.partition("=")[0] not in replaced]
    return shlex.join(["python", "train.py", *kept, *added])


def _beyond(config: Config, options: Model, budget: int, words: Sequence[str]) -> str:
    """Another network or patch, where the same result does not fit. UserError where that does not fit either."""
    given: dict[str, str] = {}
    before = price(config, options)
    smallest = before.peak
    for lever, now in levers(config, options, before):
        smallest = now.peak
        for word in lever.override.split():
            given[word.partition("=")[0]] = word
        if smallest <= budget:
            return command(words, list(given.values()))
    raise UserError(f"budget={config.budget}: nothing tried fits; the smallest peak among it is {mib(smallest)} MiB")
