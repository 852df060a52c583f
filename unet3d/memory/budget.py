"""What fits a memory budget: one search, for `budget=`, for `memory fit`, and for a run that ran out of memory."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice, product
from math import inf
from typing import NamedTuple, NoReturn

from unet3d import build
from unet3d.base.errors import UserError
from unet3d.base.progress import track
from unet3d.base.types import budget_bytes, mib
from unet3d.config.rules import check, check_ranks
from unet3d.config.schema import Config, Model
from unet3d.memory import analysis, checkpoint_plan
from unet3d.memory.ledger import Ledger
from unet3d.memory.meter import STEPS_FOR_PEAK
from unet3d.memory.simulate import memoized, simulate
from unet3d.memory.tables import NAMES

PASSES = 3  # forward passes in a step's FLOPs: backward counts as two
RESUMABLE = {"ckpt=auto", "ckpt=0", "lean=true", "lean=false", "slab=auto", "slab=0"}  # by a resumed run
LEVERS = ((True, 0), (False, "auto"))  # lean, slab
SMALLEST = 8  # channels of the narrowest level, and voxels of a patch's side, that are still suggested
CHANGES = {"nothing": 0, "rounding": 0, "statistics": 1, "the network": 2, "the patch": 3}  # in the result, by rank
GROUPS, SUGGESTIONS = 5, 4  # lines after out of memory
PATIENCE = 20.0  # seconds of search then
HEAD = f"what would need less (predicted; ~: estimated)\n{'peak MiB':>12} {'saves MiB':>10} {'more FLOPs':>10}  changes"


class Option(NamedTuple):
    """A way to take the step: what it changes, and what it needs."""

    overrides: tuple[str, ...]  # to add to the command line
    changes: str  # in the result, a key of CHANGES
    config: Config
    model: Model
    peak_bytes: int = 0
    recompute_fraction: float = 0  # convolution FLOPs computed twice, as a share of a step's
    segments: int = 1
    is_simulated: bool = True  # else the peak is estimated, see `checkpoint_plan.estimated_peak`
    reserved_bytes: int = 0  # by CUDA's allocator; 0 on the CPU, and where it is not known

    @property
    def occupied_bytes(self) -> int:
        """What a budget is of: tensors on the CPU, what the allocator reserves on CUDA."""
        return max(self.peak_bytes, self.reserved_bytes)

    @property
    def reserves(self) -> str:
        """Words to add to the peak: what the allocator reserves for it; "" on the CPU."""
        return f", reserves {mib(self.reserved_bytes)} MiB" if self.reserved_bytes else ""

    def cost(self) -> tuple[int, float, int, int]:
        """Order of preference: the same result, then less recomputation, then fewer overrides."""
        return CHANGES[self.changes], self.recompute_fraction, len(self.overrides), self.peak_bytes


@memoized
def simulated(option: Option) -> Option:
    """The option as a run takes it: with the segments that it chooses, and the peak of its second step."""
    if option.config.lean or option.config.slab:
        peak, reserved, again = checkpoint_plan.in_slabs(option.config, option.model)
        return Option(*option[:4], peak, again / PASSES, reserved_bytes=reserved)
    segment_starts, fraction = checkpoint_plan.choose_segments(option.config, option.model)
    if segment_starts:
        ledger = simulate(option.config, option.model, segment_starts, steps=STEPS_FOR_PEAK).ledger
        peak = ledger.peak_bytes()
        reserved = checkpoint_plan.reserved_bytes(option.config, ledger)
    else:
        profile = checkpoint_plan.profile_stages(option.config, option.model)
        peak = profile.peak
        reserved = profile.reserved
    return Option(*option[:4], peak, fraction / PASSES, max(1, len(segment_starts)), reserved_bytes=reserved)


def without_levers(config: Config, options: Model, segment_starts: checkpoint_plan.SegmentStarts) -> dict[str, int]:
    """The peak of the same step without each way to save memory that it uses, by the word for that."""
    plain, parts = replace(config, lean=False, slab=0, ckpt=0), config.accumulate
    ways: list[tuple[bool, str, Config]] = [
        (config.amp, "amp=true", replace(config, amp=False)),
        (parts > 1, f"accumulate={parts}", replace(config, batch=config.batch * parts, accumulate=1)),
        (bool(segment_starts), f"ckpt={config.ckpt}", plain),
        (config.lean, "lean=true", plain),
        (bool(config.slab), f"slab={config.slab}", plain),
    ]
    found = {}
    for is_used, word, way in ways:
        if is_used and way is plain:
            found[word] = checkpoint_plan.profile_stages(plain, options).peak
        elif is_used:
            found[word] = simulate(way, options, segment_starts, steps=STEPS_FOR_PEAK).ledger.peak_bytes()
    return found


def single_techniques(asked: Option) -> list[Option]:
    """What the step needs with each further way to save memory, by itself, that changes rounding at most."""
    config = asked.config
    ways = [("amp=true", replace(config, amp=True))]
    if not (config.ckpt or config.lean or config.slab):
        ways += [("ckpt=2", replace(config, ckpt=2)), ("lean=true", replace(config, lean=True))]
        ways += [("slab=auto", replace(config, slab="auto"))]
    new = [(word, way) for word, way in ways if way != config and is_allowed(way, asked.model)]
    found = []
    for word, way in track(new, "ways to save memory", len(new)):
        with suppress(UserError):  # a user's network that is no sequence of stages
            found.append(simulated(Option((word,), "nothing" if word == "ckpt=2" else "rounding", way, asked.model)))
    return found


def search(asked: Option, enough: int = 0, until: float = inf) -> list[Option]:
    """Mixed precision x batch in parts x (slabs, or thriftier operations x segments), the cheapest first.

    Peaks of slabs and segments are estimated. Once one is at most `enough` bytes, what can only cost more is left out;
    so is what comes after the time `until`, of `time.monotonic`.
    """
    found, ways, ckpt = list[Option](), sorted(_unsegmented(asked), key=_least_cost), asked.config.ckpt
    for way in track(ways, "ways to take the step", len(ways)):
        if any(option.cost()[:2] < _least_cost(way) for option in found if option.occupied_bytes <= enough):
            break
        if time.monotonic() > until:
            break
        if way.config.lean or way.config.slab:
            try:
                peak, again = checkpoint_plan.estimated_in_slabs(way.config, way.model)
            except UserError:  # a part of the user's own, for which slabs have no rule
                continue
            found.append(way._replace(peak_bytes=peak, recompute_fraction=again / PASSES, is_simulated=False))
            continue
        profile = checkpoint_plan.profile_stages(way.config, way.model)
        plain = way.overrides + ("ckpt=0",) * (ckpt != 0)
        found.append(way._replace(overrides=plain, peak_bytes=profile.peak, reserved_bytes=profile.reserved))
        words, config = way.overrides + ("ckpt=auto",) * (ckpt != "auto"), replace(way.config, ckpt="auto")
        for choice in checkpoint_plan.partitions(len(profile.forward), len(profile.forward)):
            peak, fraction = (
                checkpoint_plan.estimated_peak(profile, choice),
                checkpoint_plan.recompute_fraction(profile, choice),
            )
            found.append(Option(words, way.changes, config, way.model, peak, fraction / PASSES, len(choice), False))
    return sorted(found, key=Option.cost)


def _least_cost(way: Option) -> tuple[int, float]:
    """The least that the first two parts of a way's `cost` can be.

    In slabs, a network of several levels computes some of them again, which costs more than 0.
    """
    return CHANGES[way.changes], sys.float_info.min * bool(way.config.slab and len(way.model.features) > 1)


def _unsegmented(asked: Option) -> Iterator[Option]:
    """Mixed precision x batch in parts x (slabs, or thriftier operations), without checkpointing."""
    config, parts, lean = asked.config, asked.config.batch * asked.config.accumulate, cheaper_activation(asked.model)
    batches = [batch for batch in range(config.batch, 0, -1) if config.batch % batch == 0]
    own = [(False, 0, word, model) for word, model in [("", asked.model), *lean]]
    single_techniques = [*own, *((is_lean, slab, "", asked.model) for is_lean, slab in LEVERS)]
    for amp, batch, (is_lean, slab, word, model) in product(sorted({config.amp, True}), batches, single_techniques):
        changed = replace(config, amp=amp, batch=batch, accumulate=parts // batch, ckpt=0, lean=is_lean, slab=slab)
        rounds = amp != config.amp or (is_lean, slab) != (config.lean, config.slab)
        splits, is_in_slabs = batch != config.batch, bool(is_lean or slab)
        words = ("amp=true",) * (amp != config.amp) + (f"batch={batch}", f"accumulate={parts // batch}") * splits
        words += (f"lean={is_lean}".lower(),) * (is_lean != config.lean) + (f"slab={slab}",) * (slab != config.slab)
        words += ("ckpt=0",) * (is_in_slabs and config.ckpt != 0)
        changes = "statistics" if splits and depends_on_batch(config, model) else "rounding" if rounds else "nothing"
        if is_allowed(changed, model):
            yield Option(asked.overrides + words + (word,) * bool(word), changes, changed, model)


def untried(asked: Option) -> list[str]:
    """Why the search leaves out slabs or thriftier operations, where a run of them would be refused."""
    found = []
    for is_lean, slab in LEVERS:
        try:
            _refuse_step(replace(asked.config, model=asked.model, ckpt=0, lean=is_lean, slab=slab))
        except UserError as error:
            found.append(str(error))
    return found


def pareto_front(found: Iterable[Option]) -> list[Option]:
    """Of options by cost, those with a lower peak than all cheaper ones that change the result in the same way."""
    kept: list[Option] = []
    for option in found:
        if not kept or option.cost()[0] != kept[-1].cost()[0] or option.peak_bytes < kept[-1].peak_bytes:
            kept.append(option)
    return kept


def find_fit(asked: Option, budget: int, thorough: bool = True) -> tuple[list[Option], Option]:
    """The pareto_front of options, and the cheapest that fits the bytes, or that with the smallest peak, simulated.

    On CUDA the bytes are those that the allocator reserves.

    Unless `thorough`, options that cost more than what fits may be missing.
    """
    found = search(asked, 0 if thorough else budget)
    may_lack = not thorough and any(option.occupied_bytes <= budget for option in found)
    likely = {o.overrides: o for o in reversed(found) if o.peak_bytes <= checkpoint_plan.SLACK * budget}
    for option in track(sorted(likely.values(), key=Option.cost), "options that may fit, at most", len(likely)):
        best = simulated(option)
        if best.occupied_bytes <= budget:
            return pareto_front(found), best
        found = sorted([*(o for o in found if o.overrides != best.overrides), best], key=Option.cost)
    if may_lack:  # and no estimate was right
        return find_fit(asked, budget)
    rows = pareto_front(found)
    for best in smaller(found):
        rows.append(best)
        if best.occupied_bytes <= budget:
            break
    return rows, best


def smaller(found: Iterable[Option]) -> Iterator[Option]:
    """The lowest peak, then smaller networks and patches, simulated, each with a lower peak than those before."""
    halves, lowest = [min(found, key=lambda option: option.peak_bytes)], float("inf")
    while half := _halved(halves[-1]):
        halves.append(half)
    for half in track(halves, "smaller networks and patches, at most", len(halves)):
        if (now := simulated(half)).peak_bytes < lowest:
            lowest = now.peak_bytes
            yield now


def _halved(option: Option) -> Option | None:
    """With half the widths, else with half the patch's longest side; None if neither is known to be a network."""
    config, model, patch = option.config, option.model, list(option.config.data.patch)
    narrower, at = resized(model, lambda level, width: max(1, width // 2)), patch.index(max(patch))
    if min(model.features, default=0) >= 2 * SMALLEST and is_allowed(config, narrower):
        words = replaced(option.overrides, width_overrides(narrower))
        return option._replace(overrides=words, changes="the network", model=narrower)
    patch[at] //= 2
    changed = replace(config, data=replace(config.data, patch=patch))
    is_fixed = "auto" not in (config.model.kernels, config.model.strides) and model.features  # for any patch
    if not is_fixed or patch[at] < SMALLEST or not is_allowed(changed, model):
        return None
    words = replaced(option.overrides, [f"data.patch={patch}".replace(" ", "")])
    return option._replace(overrides=words, changes="the patch", config=changed)


def replaced(words: Iterable[str], added: Sequence[str]) -> tuple[str, ...]:
    """Overrides with others in the place of those of the same option."""
    names = {word.partition("=")[0] for word in added}
    return (*(word for word in words if word.partition("=")[0] not in names), *added)


def resized(options: Model, change: Callable[[int, int], int]) -> Model:
    """The network with other widths: `change` is given a level and its width, of encoder and decoder."""
    features = [change(level, width) for level, width in enumerate(options.features)]
    decoder = options.decoder and [change(level, width) for level, width in enumerate(options.decoder)]
    return replace(options, features=features, decoder=decoder)


def width_overrides(options: Model) -> list[str]:
    widths = {"features": options.features, "decoder": options.decoder}
    return [f"model.{name}={given}".replace(" ", "") for name, given in widths.items() if given is not None]


def is_allowed(config: Config, options: Model) -> bool:
    """Whether a run of this network would start."""
    with suppress(UserError):
        _refuse_step(replace(config, model=options))
        return True
    return False


def _refuse_step(config: Config) -> None:
    """Raise UserError where a run of this config would not start; its paths need not exist."""
    check(config, here=False)
    check_ranks(config)


def depends_on_batch(config: Config, options: Model) -> bool:
    """Whether a norm, Dice or mean is over the whole batch, so that parts change it; assumed of a user's network."""
    norm, loss = options.norm if options.features else "batch", config.loss
    return norm.startswith("batch") or loss.batch_dice or (loss.path or loss.name) != "dice"


def cheaper_activation(options: Model) -> list[tuple[str, Model]]:
    """The override, if any, that keeps less for backward and computes the same function, and its network."""
    if options.activation == "swish":
        return [("model.activation=swish_lean", replace(options, activation="swish_lean"))]
    if options.inplace and options.norm == "instance":  # whose output is a view: autograd copies what changes it
        return [("model.inplace=false", replace(options, inplace=False))]
    if not options.inplace and options.norm != "instance" and options.activation == "leaky_relu":
        return [("model.inplace=true", replace(options, inplace=True))]
    return []


def refuse_over_budget(asked: Option) -> None:
    """Raise UserError if the step, whose peak is known, does not fit `budget`, with what would need less."""
    given = asked.config.budget
    if given is not None and asked.occupied_bytes > budget_bytes(given):
        _refuse(asked, budget_bytes(given), f"budget={given}: the step does not fit")


def refuse_over_card(asked: Option, validation: int, windows: int, free: int, total: int) -> None:
    """Raise UserError if the step or a validation, of so many bytes, does not fit what is free of a GPU's memory.

    The validation sees so many windows at once.
    """
    card = f"this GPU has {mib(free)} of {mib(total)} MiB free"
    if asked.occupied_bytes > free:
        _refuse(asked, free, f"device=cuda: {card}; the step would reserve {mib(asked.occupied_bytes)} MiB (predicted)")
    if validation > free:
        held = f"a validation of {windows} windows at once" if windows > 1 else "a validation window"
        held = f"{held} would hold {mib(validation)} MiB in tensors (predicted)"
        advice = "inference.batch=1, or a smaller data.patch" if windows > 1 else "a smaller data.patch"
        raise UserError(f"device=cuda: {card}; {held}; use {advice}")


def warn_over_card(asked: Option, workspaces: int, free: int) -> None:
    """Warn if the step fits what is free of a GPU's memory, and may not with workspaces of at most so many bytes."""
    if asked.occupied_bytes + workspaces > free:
        step = f"the step would reserve {mib(asked.occupied_bytes)} of {mib(free)} MiB free (predicted)"
        may = f"with convolutions' workspaces, at most {mib(workspaces)} MiB (bound), it may not fit"
        print(f"warning: {step}; {may}", file=sys.stderr, flush=True)


def _refuse(asked: Option, budget: int, problem: str) -> NoReturn:
    """Raise UserError with the ways that need less than the step, up to the first that fits."""
    found, best = find_fit(asked, budget, thorough=False)
    cheaper = {row.overrides: row for row in found if row.cost() < best.cost() and row.overrides != best.overrides}
    rows = [asked, *(row for row in (*cheaper.values(), best) if row.peak_bytes < asked.peak_bytes)]
    if best.occupied_bytes <= budget:
        end = f"  (fits{best.reserves})"
    else:
        end = f"\nnone of these fits; the smallest peak is {mib(best.peak_bytes)} MiB{best.reserves}"
    raise UserError("\n".join((f"{problem}; {HEAD}", *_lines(asked, rows))) + end)


def _lines(asked: Option, rows: Iterable[Option]) -> Iterator[str]:
    for row in rows:
        peak = f"{'' if row.is_simulated else '~'}{mib(row.peak_bytes)}"
        saves = mib(asked.peak_bytes - row.peak_bytes) if row is not asked else ""
        changes = f"{row.changes + ':':<12} {' '.join(row.overrides)}" if row is not asked else "as asked"
        yield f"  {peak:>10} {saves:>10} {row.recompute_fraction:>10.0%}  {changes}"


def oom_suggestions(config: Config, options: Model, seconds: float = PATIENCE) -> Iterator[str]:
    """What would need less; first what a resumed run may change. The budget goes: it was too high for `ckpt=auto`.

    The search ends after so many seconds, but for the way that it is at.
    """
    until = time.monotonic() + seconds
    asked = simulated(Option((), "nothing", config, options))
    words = () if config.budget is None else ("budget=null",)
    free = simulated(asked._replace(overrides=words, config=replace(config, budget=None)))
    found = search(free, until=until)
    allowed = {row.overrides: row for row in reversed(found) if {*row.overrides} - {*words} <= RESUMABLE}
    resumed = (free, *sorted(allowed.values(), key=Option.cost))
    rows = [asked]
    for row in _in_time(resumed, until):
        row = simulated(row)
        rows += [row] if row.peak_bytes < rows[-1].peak_bytes else []
    yield from (*HEAD.splitlines(), *_lines(asked, rows))
    lowest = {row.overrides: row for row in pareto_front(row for row in found if row.overrides not in allowed)}.values()
    halves = islice(smaller(found), 1, None) if found else iter(())
    new = chain((row for row in lowest if row.peak_bytes < rows[-1].peak_bytes), halves)
    for number, line in enumerate(_lines(asked, islice(_in_time(new, until), SUGGESTIONS))):
        yield from (line,) if number else ("in a new run, because a resumed one cannot change these:", line)
    if time.monotonic() > until:
        yield f"searched for {seconds:.0f} s; more: python -m unet3d memory fit ... budget=SIZE"


def _in_time(options: Iterable[Option], until: float) -> Iterator[Option]:
    """The options, as long as the time is not over."""
    for option in options:
        yield option
        if time.monotonic() > until:
            return


def oom_moment(ledger: Ledger) -> Iterator[str]:
    """When it was, and the largest groups of tensors then. Call it before the frames of the error are cleared."""
    now, done, phase = len(ledger.events), sum(name == "end" for _, name in ledger.marks), ledger.marks[-1][1]
    if phase == "end":  # the ledger has stopped: later steps repeat the first ones
        now = ledger.peak_moment()
        yield f"not in the first {done} steps, whose peak was in {analysis.describe(ledger, now)['words']}; held then:"
    else:
        when = f"before step {done + 1}" if phase == "before" else f"in {phase} of step {done + 1}"
        yield f"{when}, {mib(ledger.alive_bytes()[now])} MiB of tensors alive:"
    for group in analysis.held(ledger, now)[:GROUPS]:
        yield f"  {mib(group.bytes):>10} MiB  {group.number} x {group.shape} {group.dtype}, {NAMES[group.category]}"


def oom_in_validation(config: Config, step: int, windows: int = 1) -> Iterator[str]:
    """Lines for the validation after a step, of so many windows at once. `ckpt` changes nothing there."""
    window = "x".join(map(str, config.data.patch))
    times = "one at a time" if windows == 1 else f"{windows} at once"
    yield f"in the validation after step {step}, of windows of {window} voxels on the device, {times},"
    there = "on the device where they fit, else " if build.device_type(config) == "cuda" else ""
    yield f"and of strips of windows {there}in host memory, with 4 bytes for each class of each voxel;"
    yield "a new run needs less with a smaller data.patch (both), a wider data.spacing or smaller volumes (host);"
    ways = "with inference.batch=1 (device), or " if windows > 1 else ""
    if build.device_type(config) == "cpu":  # else no slabs run there
        ways += "with lean=true or slab=auto (device), or "
    yield f"this run can be resumed {ways}where there is more memory, and predict and score can use its last.pt"
