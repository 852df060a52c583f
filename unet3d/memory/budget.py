"""What fits a memory budget, and what would need less memory."""

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from unet3d.checks import check
from unet3d.config import Config, Model
from unet3d.errors import UserError
from unet3d.memory import analysis
from unet3d.memory.ledger import Ledger, alive_at, levels
from unet3d.memory.meter import ENOUGH
from unet3d.memory.segments import (
    SLACK,
    choose_segments,
    estimated_peak,
    partitions,
    profile_stages,
    recompute_fraction,
)
from unet3d.memory.simulate import SegmentStarts, memoized, simulate, step_key
from unet3d.memory.tables import NAMES, Entry
from unet3d.progress import counting, track
from unet3d.types import Table, budget_bytes, mib


def resized(options: Model, change: Callable[[int, int], int]) -> Model:
    """The network with other widths: `change` is given a level and its width, encoder and decoder alike."""
    features = [change(level, width) for level, width in enumerate(options.features)]
    decoder = options.decoder and [change(level, width) for level, width in enumerate(options.decoder)]
    return replace(options, features=features, decoder=decoder)


def halved(config: Config, options: Model, level: int) -> Model | None:
    """The network with half the channels at one level; None where that is no network, as with groups of 8 on 4."""
    if options.path is not None:  # a network of the user's own has no widths to halve
        return None
    narrower = resized(options, lambda at, width: width // 2 if at == level else width)
    try:
        check(replace(config, model=narrower), here=False)
    except UserError:
        return None
    return narrower


def overrides(options: Model) -> str:
    """The widths as a command line has them."""
    given = f"model.features={options.features}".replace(" ", "")
    return given if options.decoder is None else f"{given} model.decoder={options.decoder}".replace(", ", ",")


def peak_location(config: Config, options: Model, entry: Entry, peak: Callable[[Model], int]) -> dict[str, Any]:
    """The level that holds most at the peak, what of, and the peak with half its width, if it has one.

    `peak` predicts the bytes of another network under the same config.
    """
    is_own = options.path is not None  # a network of the user's own has no levels
    row = max((row for row in entry["levels"] if (row["level"] == "other") == is_own), key=lambda row: row["bytes"])
    narrower = halved(config, options, row["level"])
    return {
        "level": row["level"],
        "bytes": row["bytes"],
        "mostly": max(NAMES, key=lambda kind: row[kind]),
        "override": narrower and overrides(narrower),
        "halved_peak_bytes": narrower and peak(narrower),
    }


SMALLEST = 8  # channels of the narrowest level, and voxels of a patch's side, that are still proposed


class Lever(NamedTuple):
    """Overrides to add, what they change in what is computed, and the config and network that they lead to."""

    override: str
    changes: str
    config: Config
    options: Model


Pull = Callable[[Config, Model], Lever | None]


class Price(NamedTuple):
    """Predicted bytes of a step, and convolution FLOPs done again as a share of a step's."""

    peak: int
    again: float


def price(config: Config, options: Model) -> Price:
    """Rehearse the second step, which later ones repeat, cut as a run would. Backward counts as two forward passes."""
    starts, again = choose_segments(config, options)
    peak = _cut_peak(step_key(config), options, starts) if starts else profile_stages(config, options).peak
    return Price(peak, again / 3)


@memoized
def _cut_peak(config: Config, options: Model, starts: SegmentStarts) -> int:
    return max(levels(simulate(config, options, starts, steps=ENOUGH).ledger))


def plan(config: Config, options: Model, budget: int, before: Price) -> str:
    """The levers in order until the step, whose price is known, fits, or the smallest peak that they reach."""
    lines = [
        f"budget={config.budget}: the step does not fit. Levers, each on top of those before (predicted)",
        f"  {'peak MiB':>10} {'saves MiB':>10} {'more FLOPs':>10}  changes",
        f"  {mib(before.peak):>10} {'':>10} {before.again:>10.0%}  as asked",
    ]
    for lever, now in levers(config, options, before):
        fits = "  (fits)" if now.peak <= budget else ""
        saves = mib(before.peak - now.peak)
        lines.append(
            f"  {mib(now.peak):>10} {saves:>10} {now.again:>10.0%}  {lever.changes + ':':<12} {lever.override}{fits}"
        )
        if fits:
            return "\n".join(lines)
        before = now
    return "\n".join([*lines, f"nothing of this fits; the smallest peak among these is {mib(before.peak)} MiB"])


def levers(config: Config, options: Model, before: Price, cut_first: bool = False) -> Iterator[tuple[Lever, Price]]:
    """Each on top of the last: what leaves the result as it is but for rounding, then smaller batches, widths, patches.

    Those that this network and device cannot take are left out, and those that save nothing. `cut_first`: dear, but
    the only one that a run can take on its way.
    """
    exact = (_cut, _lean, _mixed) if cut_first else (_lean, _mixed, _cut)
    pulls = (*exact, _in_parts, _narrower, _smaller_patch)
    with counting("levers, at most", most(pulls, config, options)) as counter:
        for pull in pulls:
            while (lever := pull(config, options)) is not None:
                now = price(lever.config, lever.options)
                counter.advance()
                if now.peak >= before.peak:
                    break
                yield lever, now
                config, options, before = lever.config, lever.options, now


def most(pulls: Iterable[Pull], config: Config, options: Model) -> int:
    """How many levers there are if all of them save."""
    count = 0
    for pull in pulls:
        while (lever := pull(config, options)) is not None:
            count, config, options = count + 1, lever.config, lever.options
    return count


def _lean(config: Config, options: Model) -> Lever | None:
    for override, lean in lean_options(options):
        return Lever(override, "nothing", config, lean)
    return None


def _mixed(config: Config, options: Model) -> Lever | None:
    mixed = replace(config, amp=True)
    return Lever("amp=true", "rounding", mixed, options) if not config.amp and is_allowed(mixed, options) else None


def _cut(config: Config, options: Model) -> Lever | None:
    is_cut = config.ckpt == "auto" or not profile_stages(config, options).forward
    return None if is_cut else Lever("ckpt=auto", "nothing", replace(config, ckpt="auto"), options)


def _in_parts(config: Config, options: Model) -> Lever | None:
    parts = config.batch * config.accumulate
    single = replace(config, batch=1, accumulate=parts)
    if config.batch == 1 or not is_allowed(single, options):
        return None
    changes = "statistics" if knows_the_batch(config, options) else "nothing"
    return Lever(f"batch=1 accumulate={parts}", changes, single, options)


def _narrower(config: Config, options: Model) -> Lever | None:
    """Half the widths."""
    narrower = resized(options, lambda level, width: max(1, width // 2))
    if min(options.features, default=0) < 2 * SMALLEST or not is_allowed(config, narrower):
        return None
    return Lever(overrides(narrower), "the network", config, narrower)


def _smaller_patch(config: Config, options: Model) -> Lever | None:
    """Half the longest side, if the network takes such a patch; `auto` would make another network for it."""
    if "auto" in (config.model.kernels, config.model.strides):
        return None
    patch = list(config.data.patch)
    longest = patch.index(max(patch))
    patch[longest] //= 2
    smaller = replace(config, data=replace(config.data, patch=patch))
    if patch[longest] < SMALLEST or not is_allowed(smaller, options):
        return None
    return Lever(f"data.patch={patch}".replace(" ", ""), "the patch", smaller, options)


def is_allowed(config: Config, options: Model) -> bool:
    """Whether a run of this would start."""
    try:
        check(replace(config, model=options), here=False)
    except UserError:
        return False
    return True


def knows_the_batch(config: Config, options: Model) -> bool:
    """Whether a batch in parts is another step: something looks at the batch as a whole.

    Its normalisation, its Dice, or its cross-entropy, which is a mean over the labelled voxels: of these, parts hold
    different numbers.
    """
    return (
        options.norm.startswith("batch") or config.loss.batch_dice or (config.loss.path or config.loss.name) != "dice"
    )


def lean_options(options: Model) -> Iterator[tuple[str, Model]]:
    """The same function of the input, with less kept for backward."""
    if options.activation == "swish":
        options = replace(options, activation="swish_lean")
        yield "model.activation=swish_lean", options
    if options.inplace and options.norm == "instance":  # whose output is a view: autograd copies what changes it
        yield "model.inplace=false", replace(options, inplace=False)
    if not options.inplace and options.norm != "instance" and options.activation == "leaky_relu":
        yield "model.inplace=true", replace(options, inplace=True)


FRONT = 12  # rows shown


class Option(NamedTuple):
    """One way to take the step: overrides, estimated bytes, and convolution FLOPs done again as a share of a step's."""

    overrides: tuple[str, ...]
    segments: int
    peak: int
    again: float
    is_same: bool  # the result, but for rounding


def find_fit(config: Config, options: Model, words: Sequence[str], show: Callable[[Table], None]) -> str:
    """Show the front of peak against cost; returns the command line that fits. UserError if none does."""
    if config.budget is None:
        raise UserError("memory fit needs a budget, e.g. budget=8GiB")
    budget = budget_bytes(config.budget)
    points = list(search(config, options))
    same, other = ([p for p in points if p.is_same is is_same] for is_same in (True, False))
    show(front_table([*pareto_front(same), *pareto_front(other)], budget))
    tried: dict[tuple[str, ...], Option] = {}
    for point in sorted((p for p in points if p.peak <= SLACK * budget), key=_cost):
        tried.setdefault(point.overrides, point)  # the cheapest cut of a command: `ckpt=auto` chooses among them
    for point in track(tried.values(), "commands that may fit, at most", len(tried)):
        added = point.overrides if "ckpt=auto" in point.overrides else (*point.overrides, "ckpt=0")
        if price(*_applied(config, options, point)).peak <= budget:
            return command_line(words, added)
    return _beyond(config, options, budget, words)


def search(config: Config, options: Model) -> Iterator[Option]:
    """Mixed precision x batch in parts x lean operations x every cut into segments."""
    found = list(ways(config, options))
    for way in track(found, "ways to take the step", len(found)):
        uncut = profile_stages(way.config, way.options)
        is_same = way.config.batch == config.batch or not knows_the_batch(config, way.options)
        yield Option(way.overrides, 1, estimated_peak(uncut, (0,)) if uncut.forward else uncut.peak, 0, is_same)
        for starts in partitions(len(uncut.forward), len(uncut.forward)):
            again = recompute_fraction(uncut, starts) / 3
            yield Option((*way.overrides, "ckpt=auto"), len(starts), estimated_peak(uncut, starts), again, is_same)


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


def _cost(point: Option) -> tuple[bool, float, int, int]:
    """The same result first, then less computed again, then fewer changes to the command."""
    return not point.is_same, point.again, len(point.overrides), point.peak


def pareto_front(points: Sequence[Option]) -> list[Option]:
    """Those of which no other needs less at no more cost, cheapest first."""
    best: list[Option] = []
    for point in sorted(points, key=lambda p: (p.again, p.peak, len(p.overrides))):
        if not best or point.peak < best[-1].peak:
            best.append(point)
    return best


def front_table(points: Sequence[Option], budget: int) -> Table:
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
    return Table(columns, rows)


def _applied(config: Config, options: Model, point: Option) -> tuple[Config, Model]:
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


def command_line(words: Sequence[str], added: Sequence[str]) -> str:
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
            return command_line(words, list(given.values()))
    raise UserError(f"budget={config.budget}: nothing tried fits; the smallest peak among it is {mib(smallest)} MiB")


LARGEST = 5  # groups of tensors named


REMEDIES = 4


def oom_moment(ledger: Ledger) -> Iterator[str]:
    """When it was and the largest owners then alive, by the last event that the ledger saw.

    To be asked before the frames of the error are cleared. The ledger steps aside after the first steps, which repeat.
    """
    now = len(ledger.events)
    alive = sum(storage.bytes for storage in alive_at(ledger, now))
    done = sum(name == "end" for _, name in ledger.marks)
    phase = ledger.marks[-1][1]
    if phase == "end":
        peak = analysis.peak_moment(ledger)
        words = analysis.describe(ledger, peak)["words"]
        yield f"not in the first {done} steps, whose peak was in {words}; held then:"
        now = peak
    else:
        when = f"before step {done + 1}" if phase == "before" else f"in {phase} of step {done + 1}"
        yield f"{when}, {mib(alive)} MiB of tensors alive:"
    for group in analysis.held(ledger, now)[:LARGEST]:
        yield f"  {mib(group.bytes):>10} MiB  {group.number} x {group.shape} {group.dtype}, {NAMES[group.category]}"


def oom_in_validation(config: Config, step: int) -> Iterator[str]:
    """The same for the validation after a step, whose memory is no step's: batch and ckpt change nothing there."""
    window = "x".join(map(str, config.data.patch))
    yield f"in the validation after step {step}, of windows of {window} voxels on the device, one at a time,"
    yield "and of whole volumes in host memory, with 4 bytes for each class of each voxel;"
    yield "what would need less, in a new run: a smaller data.patch there, a wider data.spacing, smaller volumes here;"
    yield "this run can go on where there is more memory, or its last.pt be used by predict and score as it is"


def oom_suggestions(config: Config, options: Model) -> Iterator[str]:
    """What would need less, each on top of those before; first what a run that goes on may change.

    Without the budget, which was too high: `ckpt=auto` would use all of it.
    """
    yield "what would need less, each on top of those before (predicted peak of a step):"
    now, added = price(config, options), ""
    yield f"  {mib(now.peak):>10} MiB  as it was"
    if config.budget is not None:
        config, before, added = replace(config, budget=None), now, " budget=null"
        now = price(config, options)
        if now.peak < before.peak:
            yield f"  {mib(now.peak):>10} MiB {added}"
    is_new = False
    for lever, cost in islice(levers(config, options, now, cut_first=True), REMEDIES):
        if not is_new and not lever.override.startswith("ckpt="):
            yield "and in a new run, for one that goes on stays as it was:"
            is_new = True
        yield f"  {mib(cost.peak):>10} MiB  {lever.override}{added}"
