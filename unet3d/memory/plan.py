"""What would fit a budget: levers on top of each other, each with its price; the predictions are dry runs."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from unet3d.checks import check
from unet3d.config import Config, Model
from unet3d.errors import UserError
from unet3d.memory.advise import overrides, resized
from unet3d.memory.ledger import levels
from unet3d.memory.meter import ENOUGH
from unet3d.memory.once import once
from unet3d.memory.profile import profile
from unet3d.memory.rehearsal import Starts, rehearse, step_of
from unet3d.memory.segments import cut
from unet3d.progress import counting
from unet3d.table import mib

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
    starts, again = cut(config, options)
    peak = _cut_peak(step_of(config), options, starts) if starts else profile(config, options).peak
    return Price(peak, again / 3)


@once
def _cut_peak(config: Config, options: Model, starts: Starts) -> int:
    return max(levels(rehearse(config, options, starts, steps=ENOUGH).ledger))


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
    return None if config.ckpt == "auto" else Lever("ckpt=auto", "nothing", replace(config, ckpt="auto"), options)


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
    if min(options.features) < 2 * SMALLEST or not is_allowed(config, narrower):
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
    return options.norm.startswith("batch") or config.loss.batch_dice or config.loss.name != "dice"


def lean_options(options: Model) -> Iterator[tuple[str, Model]]:
    """The same function of the input, with less kept for backward."""
    if options.activation == "swish":
        options = replace(options, activation="swish_lean")
        yield "model.activation=swish_lean", options
    if options.inplace and options.norm == "instance":  # whose output is a view: autograd copies what changes it
        yield "model.inplace=false", replace(options, inplace=False)
    if not options.inplace and options.norm != "instance" and options.activation == "leaky_relu":
        yield "model.inplace=true", replace(options, inplace=True)
