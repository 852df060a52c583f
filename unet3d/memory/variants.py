"""Changes of a config's network: its widths and activations, and whether a run of the changed one would start."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from unet3d.base.errors import UserError
from unet3d.config.rules import check, check_ranks
from unet3d.config.schema import LOSSES, Config, Model


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
