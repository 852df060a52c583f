"""What would fit a budget: levers on top of each other, each with its price; the predictions are dry runs."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from unet3d import build
from unet3d.checks import check
from unet3d.config import Config, Model
from unet3d.errors import UserError
from unet3d.memory.advise import overrides, resized
from unet3d.memory.ledger import levels
from unet3d.memory.rehearsal import rehearse
from unet3d.memory.segments import cut
from unet3d.table import mib

SMALLEST = 8  # channels of the narrowest level, and voxels of a patch's side, that are still proposed


class Lever(NamedTuple):
    """Overrides to add, what they change in what is computed, and the config and network that they lead to."""

    override: str
    changes: str
    config: Config
    options: Model


class Price(NamedTuple):
    """Predicted bytes of a step, and convolution FLOPs done again as a share of a step's."""

    peak: int
    again: float


def price(config: Config, options: Model) -> Price:
    """Rehearse the step as it would be cut. A backward pass is counted as two forward ones."""
    starts, again = cut(config, options)
    return Price(max(levels(rehearse(config, options, starts).ledger)), again / 3)


def plan(config: Config, options: Model, budget: int) -> str:
    """The levers in order until the step fits, or the smallest peak that they reach."""
    before = price(config, options)
    lines = [
        f"budget={config.budget}: the step does not fit. Levers, each on top of those before (predicted)",
        f"  {'peak MiB':>10} {'saves MiB':>10} {'more FLOPs':>10}  changes",
        f"  {mib(before.peak):>10} {'':>10} {before.again:>10.0%}  as asked",
    ]
    smallest = before.peak
    for lever in levers(config, options):
        now = price(lever.config, lever.options)
        smallest = min(smallest, now.peak)
        fits = "  (fits)" if now.peak <= budget else ""
        saves = mib(before.peak - now.peak)
        lines.append(
            f"  {mib(now.peak):>10} {saves:>10} {now.again:>10.0%}  {lever.changes + ':':<12} {lever.override}{fits}"
        )
        if fits:
            return "\n".join(lines)
        before = now
    return "\n".join([*lines, f"nothing of this fits; the smallest peak among these is {mib(smallest)} MiB"])


def levers(config: Config, options: Model) -> Iterator[Lever]:
    """Each on top of the last: what leaves the result as it is but for rounding, then smaller batches, widths, patches.

    Those that this network and device cannot take are left out.
    """
    for override, lean in lean_options(options):
        options = lean
        yield Lever(override, "nothing", config, options)
    if not config.amp and is_allowed(with_amp := replace(config, amp=True), options):
        config = with_amp
        yield Lever("amp=true", "rounding", config, options)
    if config.ckpt != "auto":
        config = replace(config, ckpt="auto")
        yield Lever("ckpt=auto", "nothing", config, options)
    if config.batch > 1 and is_allowed(single := replace(config, batch=1), options):
        parts = config.batch * config.accumulate
        config = replace(single, accumulate=parts)
        changes = "statistics" if knows_the_batch(config, options) else "nothing"
        yield Lever(f"batch=1 accumulate={parts}", changes, config, options)
    while min(options.features) >= 2 * SMALLEST:
        narrower = resized(options, lambda level, width: max(1, width // 2))
        if not is_allowed(config, narrower):
            break
        options = narrower
        yield Lever(overrides(options), "the network", config, options)
    while (smaller := _smaller_patch(config, options)) is not None:
        config = smaller
        yield Lever(f"data.patch={config.data.patch}".replace(" ", ""), "the patch", config, options)


def is_allowed(config: Config, options: Model) -> bool:
    """Whether a run of this would start."""
    try:
        check(replace(config, model=options), here=False)
        build.refuse_wrong_gradients(config, options)
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


def _smaller_patch(config: Config, options: Model) -> Config | None:
    """Half the longest side, if the network takes such a patch."""
    patch = list(config.data.patch)
    longest = patch.index(max(patch))
    patch[longest] //= 2
    smaller = replace(config, data=replace(config.data, patch=patch))
    return smaller if patch[longest] >= SMALLEST and is_allowed(smaller, options) else None
