"""Other ways to take a config's step: memory options, smaller networks and patches, and what each changes and needs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from unet3d.base.errors import UserError
from unet3d.base.progress import track
from unet3d.base.types import mib
from unet3d.config.rules import check, check_ranks
from unet3d.config.schema import LOSSES, Config, Model
from unet3d.memory.peak import Peak
from unet3d.memory.simulate import memoized
from unet3d.memory.technique import choose_technique, step_peak
from unet3d.recomputing.plans import Technique

PASSES = 3  # forward passes in a step's FLOPs: backward counts as two
SEGMENTS = (2, 3, 4)  # of ckpt, that are tried
PLANS = ("lean", "tiles")  # of recompute, that are tried
WITH_BUDGET = ("auto",)  # the same, where a schedule may be chosen for a budget
SMALLEST = 8  # channels of the narrowest level, and voxels of a patch's side, that are still suggested
CHANGES = {"nothing": 0, "rounding": 0, "statistics": 1, "the network": 2, "the patch": 3}  # in the result, by rank
# The least share of the plain step's bytes that known networks need with each option; that of ckpt is divided by its
# segments. What cannot fit by these is not simulated at first.
SHARES = {"amp": 0.45, "activation": 0.5, "ckpt": 0.9, "lean": 0.25, "tiles": 0.1, "auto": 0.1}


class Candidate(NamedTuple):
    """A way to take the step: what it changes, and what it needs."""

    overrides: tuple[str, ...]  # to add to the command line
    changes: str  # in the result, a key of CHANGES
    config: Config
    model: Model
    step: Peak = Peak(0)
    step_recompute_fraction: float = 0  # convolution FLOPs computed twice, as a share of a step's
    segments: int = 1

    @property
    def reserves(self) -> str:
        """Return words to add to the peak: what the allocator reserves for it; "" on the CPU."""
        if not self.step.reserved:
            return ""
        return f", reserves {mib(self.step.reserved)} MiB"

    def cost(self) -> tuple[int, float, int, int]:
        """Return the order of preference: the same result, then less recomputation, then fewer overrides."""
        return CHANGES[self.changes], self.step_recompute_fraction, len(self.overrides), self.step.tensors


@memoized
def simulated(candidate: Candidate) -> Candidate:
    """Return the candidate as a run takes it: with what it recomputes, and the peak of its second step.

    Raises UserError where its network does not have the technique.
    """
    technique = choose_technique(candidate.config, candidate.model)
    return with_price(candidate, technique)._replace(step=step_peak(candidate.config, candidate.model, technique))


def with_price(candidate: Candidate, technique: Technique) -> Candidate:
    """Return the candidate with what it recomputes by a technique."""
    return candidate._replace(
        step_recompute_fraction=technique.forward_recompute_fraction / PASSES,
        segments=max(1, len(technique.segment_starts)),
    )


def ways(asked: Candidate) -> Iterator[Candidate]:
    """Yield mixed precision x batch in parts x (recompute, or thriftier operations x segments), as a run would start.

    What a candidate needs, and what it recomputes, is left open.
    """
    config = asked.config
    precisions = sorted({config.amp, True})
    batches = [batch for batch in range(config.batch, 0, -1) if config.batch % batch == 0]
    plans = PLANS if config.budget is None else (*PLANS, *WITH_BUDGET)
    networks = [("", asked.model), *cheaper_activation(asked.model)]
    for amp, batch in product(precisions, batches):
        parts = config.batch * config.accumulate // batch
        plain = replace(config, amp=amp, batch=batch, accumulate=parts, ckpt=0, recompute="none")
        for (override, model), ckpt in product(networks, (0, *SEGMENTS)):
            yield from _allowed(asked, replace(plain, ckpt=ckpt), model, override)
        for plan in plans:
            yield from _allowed(asked, replace(plain, recompute=plan), asked.model, "")


def _allowed(asked: Candidate, changed: Config, model: Model, activation: str) -> Iterator[Candidate]:
    """Yield the changed step with its overrides, if a run of it would start; `activation`: one more override."""
    if not is_allowed(changed, model):
        return
    config = asked.config
    added = []
    if changed.amp != config.amp:
        added.append("amp=true")
    if changed.batch != config.batch:
        added += [f"batch={changed.batch}", f"accumulate={changed.accumulate}"]
    if changed.recompute != config.recompute:
        added.append(f"recompute={changed.recompute}")
    if changed.ckpt != config.ckpt:
        added.append(f"ckpt={changed.ckpt}")
    if activation:
        added.append(activation)
    changes = "nothing"
    if (changed.amp, changed.recompute) != (config.amp, config.recompute):
        changes = "rounding"
    if changed.batch != config.batch and depends_on_batch(config, model):
        changes = "statistics"
    yield Candidate(replaced(asked.overrides, added), changes, changed, model)


def least_share(asked: Candidate, way: Candidate) -> float:
    """Return the share of the bytes of the plain step that is asked for, which another way needs at least."""
    share = way.config.batch / asked.config.batch
    if way.config.amp != asked.config.amp:
        share *= SHARES["amp"]
    if way.model != asked.model:
        share *= SHARES["activation"]
    if way.config.ckpt:
        share *= SHARES["ckpt"] / way.config.ckpt
    return share * SHARES.get(way.config.recompute, 1.0)


def untried(asked: Candidate) -> list[str]:
    """Return why recompute is no way, where a run of it would be refused."""
    reasons = []
    for plan in PLANS:
        try:
            refuse_step(replace(asked.config, model=asked.model, ckpt=0, recompute=plan))
        except UserError as error:
            reasons.append(str(error))
    return reasons


def single_techniques(asked: Candidate) -> list[Candidate]:
    """Return the step with each further memory option alone, of those that change rounding at most."""
    config = asked.config
    changed = [("amp=true", replace(config, amp=True))]
    if not config.ckpt and config.recompute == "none":
        changed.append(("ckpt=2", replace(config, ckpt=2)))
        for plan in PLANS:
            changed.append((f"recompute={plan}", replace(config, recompute=plan)))
    new = [(word, way) for word, way in changed if way != config and is_allowed(way, asked.model)]
    candidates = []
    for word, way in track(new, "memory options", len(new)):
        changes = "nothing" if word == "ckpt=2" else "rounding"
        with suppress(UserError):  # a user's network that is no sequence of stages
            candidates.append(simulated(Candidate((word,), changes, way, asked.model)))
    return candidates


def halves(candidate: Candidate) -> Iterator[Candidate]:
    """Yield the candidate with half the widths, again and again, then with half the patch's longest side."""
    half: Candidate | None = candidate
    while half is not None:
        half = _halved(half)
        if half is not None:
            yield half


def _halved(candidate: Candidate) -> Candidate | None:
    """Return it with half the widths, else with half the patch's longest side; None if neither makes a network."""
    config = candidate.config
    model = candidate.model
    narrower = resized(model, lambda level, width: max(1, width // 2))
    if min(model.features, default=0) >= 2 * SMALLEST and is_allowed(config, narrower):
        overrides = replaced(candidate.overrides, width_overrides(narrower))
        return candidate._replace(overrides=overrides, changes="the network", model=narrower)
    patch = list(config.data.patch)
    longest = patch.index(max(patch))
    patch[longest] //= 2
    smaller = replace(config, data=replace(config.data, patch=patch))
    is_fixed = "auto" not in (config.model.kernels, config.model.strides) and model.features  # for any patch
    if not is_fixed or patch[longest] < SMALLEST or not is_allowed(smaller, model):
        return None
    overrides = replaced(candidate.overrides, [list_override("data.patch", patch)])
    return candidate._replace(overrides=overrides, changes="the patch", config=smaller)


def replaced(overrides: Iterable[str], added: Sequence[str]) -> tuple[str, ...]:
    """Return overrides with `added`, without others of the same options."""
    names = {override.partition("=")[0] for override in added}
    others = [override for override in overrides if override.partition("=")[0] not in names]
    return (*others, *added)


def resized(model_config: Model, change: Callable[[int, int], int]) -> Model:
    """Return the network with other widths: `change` is given a level and its width, of encoder and decoder."""
    features = [change(level, width) for level, width in enumerate(model_config.features)]
    decoder = model_config.decoder
    if decoder:
        decoder = [change(level, width) for level, width in enumerate(decoder)]
    return replace(model_config, features=features, decoder=decoder)


def width_overrides(model_config: Model) -> list[str]:
    """Return the overrides that set a network's widths."""
    overrides = [list_override("model.features", model_config.features)]
    if model_config.decoder is not None:
        overrides.append(list_override("model.decoder", model_config.decoder))
    return overrides


def list_override(name: str, values: Sequence[int]) -> str:
    """Return `data.patch=[96,96,32]`."""
    return f"{name}=[{','.join(map(str, values))}]"


def is_allowed(config: Config, model_config: Model) -> bool:
    """Return whether a run of this network would start."""
    with suppress(UserError):
        refuse_step(replace(config, model=model_config))
        return True
    return False


def refuse_step(config: Config) -> None:
    """Raise UserError where a run of this config would not start; its paths need not exist."""
    check(config, here=False)
    check_ranks(config)


def depends_on_batch(config: Config, model_config: Model) -> bool:
    """Return whether a norm, Dice or mean is over the whole batch, so that parts change it.

    Of a user's own network it is assumed.
    """
    norm = model_config.norm if model_config.features else "batch"
    loss = config.loss
    return norm.startswith("batch") or loss.batch_dice or loss.path is not None or not LOSSES[loss.name].get("by_image")


def cheaper_activation(model_config: Model) -> list[tuple[str, Model]]:
    """Return the override, if any, that keeps less for backward and computes the same function, and its network."""
    is_in_place = model_config.inplace
    is_instance_norm = model_config.norm == "instance"  # whose output is a view: autograd copies what changes it
    if model_config.activation == "swish":
        return [("model.activation=swish_lean", replace(model_config, activation="swish_lean"))]
    if is_in_place and is_instance_norm:
        return [("model.inplace=false", replace(model_config, inplace=False))]
    if not is_in_place and not is_instance_norm and model_config.activation == "leaky_relu":
        return [("model.inplace=true", replace(model_config, inplace=True))]
    return []
