"""Ranges and combinations of options. One UserError a mistake: what is wrong, where, what to do. Free of torch."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unet3d.config import Config, Data, Inference, Model
from unet3d.errors import UserError
from unet3d.model import geometry
from unet3d.types import budget_bytes


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


def check_data(data: Data) -> None:
    """Raise UserError for the first option of `data` that is at odds with another."""
    for name in ("scaling", "contrast", "gamma", "blur", "low_resolution"):
        pair = getattr(data.augment, name)
        if len(pair) != 2 or pair[0] > pair[1]:
            raise UserError(f"data.augment.{name}={pair}: give [smallest, largest]")
    if data.spacing is not None and len(data.spacing) != 3:
        raise UserError(f"data.spacing={data.spacing}: give three lengths in mm")
    if len(data.phantom.shape) != 3:
        raise UserError(f"data.phantom.shape={data.phantom.shape}: give three lengths x,y,z")
    if len(set(data.augment.mirror)) != len(data.augment.mirror):
        raise UserError(f"data.augment.mirror={data.augment.mirror}: name each axis once")
    if data.classes and data.format != "folders":
        raise UserError(f"data.classes does nothing for data={data.format}: dataset.json names them; leave it null")
    if data.fold is not None and data.split is not None:
        raise UserError("data.fold does nothing beside data.split; leave one of them null")
    if (data.fold is not None or data.split is not None) and data.val_fraction != Data().val_fraction:
        raise UserError("data.val_fraction does nothing beside data.fold or data.split; leave it away")
    if data.fold is not None and data.fold >= data.folds:
        raise UserError(f"data.fold={data.fold}: with data.folds={data.folds} it runs from 0 to {data.folds - 1}")
    _check_sparse(data)
    if data.format == "folders" and not data.classes:
        raise UserError("data.classes is not set: data=folders needs the class names, e.g. [background,organ]")


def _check_sparse(data: Data) -> None:
    for name, counts in (("sparse", data.sparse), ("scored", data.scored)):
        if counts is not None and (len(counts) != 3 or not any(counts)):
            raise UserError(f"data.{name}={counts}: give three numbers of slices, across x, y and z, not all 0")
    if not data.semi:
        if data.scored != Data().scored:
            raise UserError("data.scored does nothing without data.semi=true; leave it away")
        if data.sparse_fold is not None:
            raise UserError("data.sparse_fold does nothing without data.semi=true; leave it null")
        if data.sparse_folds != Data().sparse_folds:
            raise UserError("data.sparse_folds does nothing without data.sparse_fold; leave it away")
        return
    if data.sparse is None:
        raise UserError("data.semi=true needs slices to learn from: add data.sparse=[yz,xz,xy], e.g. [5,5,3]")
    if data.fold is not None or data.split is not None:
        raise UserError("data.semi=true learns from slices of every case; leave data.fold and data.split null")
    if data.val_fraction != Data().val_fraction:
        raise UserError("data.semi=true holds no case out: data.val_fraction does nothing; leave it away")
    if data.sparse_fold is None:
        if data.sparse_folds != Data().sparse_folds:
            raise UserError("data.sparse_folds does nothing without data.sparse_fold; name a part, or leave it away")
        return
    if data.scored != Data().scored:
        raise UserError("data.scored does nothing beside data.sparse_fold, which scores that part; leave it away")
    if data.format == "mni152" and data.sparse[0]:
        raise UserError(
            f"data.sparse={data.sparse}: mni152 is its own mirror image across x, so with data.sparse_fold slices are "
            f"scored whose mirror images are learned; take none across x, e.g. data.sparse=[0,6,12]"
        )
    if data.sparse_fold >= data.sparse_folds:
        raise UserError(
            f"data.sparse_fold={data.sparse_fold}: with data.sparse_folds={data.sparse_folds} it runs from 0 to "
            f"{data.sparse_folds - 1}"
        )
    if max(data.sparse) < data.sparse_folds:
        raise UserError(f"data.sparse={data.sparse}: too few slices for data.sparse_folds={data.sparse_folds} parts")


def check_root(format_: str, root: str | None) -> None:
    """Raise UserError where the folder of the data set is not there."""
    if root is None:
        raise UserError(f"data.root is not set: data={format_} needs the data set's folder; add data.root=PATH")
    if not Path(root).is_dir():
        raise UserError(f"data.root={root}: no such folder; give the folder that holds the data set")
