"""Ranges and combinations of options. One UserError a mistake: what is wrong, where, what to do. Free of torch."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from unet3d.checks_data import check_data, check_root
from unet3d.config import Config, Data, Inference, Model
from unet3d.errors import UserError
from unet3d.model import geometry


def budget_bytes(text: str) -> int:
    """Bytes of `8GiB`, `900 MiB`, `1.5GB`. Raises UserError."""
    units = {"MIB": 2**20, "GIB": 2**30, "MB": 10**6, "GB": 10**9}
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([MG]i?B)", text.strip(), re.IGNORECASE)
    if not found or not float(found[1]):
        raise UserError(f"budget={text}: give an amount and a unit, MiB or GiB, e.g. budget=8GiB")
    return int(float(found[1]) * units[found[2].upper()])


def check(config: Config, here: bool = True) -> None:
    """Raise UserError for the first option out of its range or at odds with another; `here`: paths must exist."""
    for name, value, metadata in options(config):
        _check_range(name, value, metadata)
    _check_model(config.model)
    _check_checkpointing(config)
    _check_patch(config)
    _check_learning(config)
    check_data(config.data)
    if here and config.resume is None:
        _refuse_idle(config)
    if config.budget is not None:
        budget_bytes(config.budget)
    if here and config.data.format not in ("phantom", "mni152"):
        check_root(config.data.format, config.data.root)


def options(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every option below `node` as (dotted name, value, metadata)."""
    for item in dataclasses.fields(node):
        value = getattr(node, item.name)
        if dataclasses.is_dataclass(value):
            yield from options(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", value, item.metadata


def _check_range(name: str, value: Any, metadata: Any) -> None:
    low, high, among = metadata.get("low"), metadata.get("high"), metadata.get("among")
    if among and value not in among:
        raise UserError(f"{name}={value}: use one of {', '.join(among)}")
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, int | float):
            continue
        if item != item or (low is not None and item < low) or (high is not None and item > high):
            bounds = [f">= {low}" if low is not None else "", f"<= {high}" if high is not None else ""]
            raise UserError(f"{name}={value}: must be {' and '.join(b for b in bounds if b)} ({metadata['about']})")


def _check_model(model: Model) -> None:
    levels = len(model.features)
    if not levels:
        raise UserError("model.features=[] has no level; give one width a level, e.g. [16,32,64]")
    if model.decoder is not None and len(model.decoder) != levels - 1:
        raise UserError(f"model.decoder has {len(model.decoder)} widths; {levels} levels need {levels - 1}")
    for name in ("kernels", "strides"):
        if getattr(model, name) != "auto":
            getattr(geometry, name)(model)
    if model.norm == "group":
        widths = {*model.features, *(model.decoder or [])}
        widths |= {w // 2 for w in model.features} if model.widen == "second" else set()
        bad = sorted(w for w in widths if w % model.groups)
        if bad:
            raise UserError(f"model.groups={model.groups} does not divide {bad[0]} channels; choose a divisor of all")
    if model.inplace and model.activation not in ("relu", "leaky_relu"):
        raise UserError(f"model.inplace=true does nothing for model.activation={model.activation}; set it to false")
    if model.deep_supervision and model.padding == "valid":
        raise UserError("model.deep_supervision=true needs model.padding=same: the levels' crops would not align")
    if model.deep_supervision and levels < 3:
        raise UserError(f"model.deep_supervision=true needs 3 levels or more; model.features has {levels}")


def stages(model: Model) -> int:
    """Stages of the model, the units of checkpointing: inc, downs, ups, outc."""
    return 2 * len(model.features)


def _check_learning(config: Config) -> None:
    if config.optim.average is not None and config.model.norm == "batch":
        raise UserError("optim.average is of weights, not of model.norm=batch's statistics; use another norm, or null")
    if len(config.optim.betas) != 2:
        raise UserError(f"optim.betas={config.optim.betas}: give two")
    if config.inference.mirror and not config.data.augment.mirror:
        raise UserError("inference.mirror=true does nothing with data.augment.mirror=[]; name axes, or set it to false")
    if config.loss.weights is not None and config.loss.name == "dice":
        raise UserError("loss.weights does nothing for loss=dice; use loss=dice_ce or loss=ce, or leave it null")


def _refuse_idle(config: Config) -> None:
    """Raise UserError for options that do nothing beside the others. Snapshots and earlier runs may have them."""
    swept = [override.partition("=")[0] for override in config.sweep or []]
    if config.data.folds != Data().folds and config.data.fold is None and "data.fold" not in swept:
        raise UserError(f"data.folds={config.data.folds} does nothing without data.fold; name a fold, or leave it away")
    if config.inference.overlap != Inference().overlap and config.model.padding == "valid":
        raise UserError("inference.overlap does nothing for model.padding=valid, whose tiles meet; leave it away")


def _check_checkpointing(config: Config) -> None:
    most, ckpt = stages(config.model), config.ckpt
    if ckpt == "auto":
        return
    if not isinstance(ckpt, int) or isinstance(ckpt, bool) or ckpt < 0:
        raise UserError(f"ckpt={ckpt}: give a number of segments, 0 (off) or 2 to {most}, or auto")
    if ckpt == 1 or ckpt > most:
        why = "one segment is never checkpointed" if ckpt == 1 else f"this model has {most} stages"
        raise UserError(f"ckpt={ckpt}: {why}; use 0 (off), 2 to {most}, or auto")


def _check_patch(config: Config) -> None:
    model, data = config.model, config.data
    if len(data.patch) != 3:
        raise UserError(f"data.patch={data.patch}: give three lengths D,H,W, e.g. data.patch=[64,64,32]")
    if "auto" in (model.kernels, model.strides):
        return  # needs the data's spacing: checked again once it is known
    output = geometry.output_size(data.patch, model)
    if config.inference.mirror and any((data.patch[axis] - output[axis]) % 2 for axis in data.augment.mirror):
        raise UserError(
            f"inference.mirror=true: of data.patch={data.patch} this network returns {list(output)}, an odd number of "
            f"voxels less, so mirrored views would lie a voxel apart; set it to false"
        )
    sizes = geometry.level_sizes(data.patch, model) if model.deep_supervision else []
    for above, below, stride in zip(sizes, sizes[1:], geometry.strides(model), strict=False):
        if any(b > 1 and -(-a // b) != s for a, b, s in zip(above, below, stride, strict=True)):
            raise UserError(
                f"model.deep_supervision=true: strides of {list(stride)} do not divide maps of {list(above)} voxels; "
                "labels would lie beside them; give another data.patch"
            )
    lone = model.norm in ("instance", "batch_current") or (model.norm == "batch" and config.batch == 1)
    if lone and model.padding == "same" and geometry.level_sizes(data.patch, model)[-1] == (1, 1, 1):
        raise UserError(
            f"data.patch={data.patch} leaves one voxel at the deepest of {len(model.features)} levels, and "
            f"model.norm={model.norm} has nothing to normalise there; use a larger patch, fewer levels, or norm=group"
        )
