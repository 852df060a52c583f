"""Options that do nothing beside the others: a warning, not an error."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from unet3d.config.rules import effective_model, options
from unet3d.config.schema import UNNAMED, Config


class Idle(NamedTuple):
    """An option, when it does nothing, and why."""

    name: str
    is_idle: Callable[[Config], bool]
    reason: str


def _sweeps_folds(config: Config) -> bool:
    return any("data.fold=" in word for word in config.sweep or [])


def _names_classes(config: Config) -> bool:
    return config.data.format in UNNAMED or config.data.label_map is not None


IDLE = (
    Idle("model.inplace", lambda c: c.model.activation not in ("relu", "leaky_relu"), "for this model.activation"),
    Idle("model.residual", lambda c: c.model.blocks is not None, "beside model.blocks, which are residual"),
    Idle("inference.mirror", lambda c: not c.data.augment.mirror, "with data.augment.mirror=[]"),
    Idle(
        "inference.overlap",
        lambda c: c.model.padding == "valid",
        "for model.padding=valid, whose tiles do not overlap",
    ),
    Idle("loss.name", lambda c: c.loss.path is not None, "beside loss.path"),
    Idle("loss.weights", lambda c: c.loss.name == "dice" and c.loss.path is None, "for loss=dice"),
    Idle("data.cache_root", lambda c: c.data.cache != "disk", "without data.cache=disk"),
    Idle(
        "data.classes",
        lambda c: not _names_classes(c),
        "for this data.format: dataset.json names the classes",
    ),
    Idle("data.folds", lambda c: c.data.fold is None and not _sweeps_folds(c), "without data.fold"),
    Idle(
        "data.val_fraction",
        lambda c: c.data.fold is not None or c.data.split is not None,
        "beside data.fold or data.split",
    ),
    Idle("data.val_fraction", lambda c: c.data.semi, "with data.semi=true, which holds no case out"),
    Idle("data.groups", lambda c: c.data.semi, "with data.semi=true, which holds no case out"),
    Idle("optim.init_names", lambda c: c.optim.init_lr == 1, "without optim.init_lr"),
    Idle("data.scored", lambda c: not c.data.semi, "without data.semi=true"),
    Idle(
        "data.scored",
        lambda c: c.data.sparse_fold is not None,
        "beside data.sparse_fold, which scores that part",
    ),
    Idle("data.sparse_folds", lambda c: c.data.sparse_fold is None, "without data.sparse_fold"),
)
OF_ANY_NETWORK = (  # options that count beside model.path
    *("model.path", "model.in_channels", "model.classes"),
    *("model.regions", "model.regions_class_order"),
)


def warnings(config: Config) -> list[str]:
    """Return a line for each option that differs from its default and does nothing beside the others."""
    defaults = {name: value for name, value, _ in options(Config())}
    given = {name: value for name, value, _ in options(config) if value != defaults[name]}
    counted = replace(config, model=effective_model(config.model))
    lines = {}
    for name, is_idle, reason in IDLE:
        if name in given and is_idle(counted):
            lines[name] = f"{name}={given[name]} does nothing {reason}"
    of_the_unet = [name for name in given if name.startswith("model.") and name not in OF_ANY_NETWORK]
    if config.model.path and of_the_unet:
        names = ", ".join(of_the_unet)
        lines["model"] = f"{names}: does nothing beside model.path, which is called with channels and classes"
    return list(lines.values())
