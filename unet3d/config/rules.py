"""Ranges and combinations of options. One UserError a mistake: what is wrong, where, what to do. Free of torch."""

import difflib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unet3d.base import ranks
from unet3d.base.errors import UserError
from unet3d.base.types import budget_bytes
from unet3d.config.schema import Config, Data, Model
from unet3d.model import geometry

IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")  # package.module:name
UNTYPED = ("model.kernels", "model.strides", "ckpt", "slab", "data.label_map")  # have rules of their own
MAX_LABEL = 65535  # label maps are uint16 at most
MOST = 2**32  # of a number without an upper bound of its own: no arithmetic overflows, no float loses it
MOST_LEVELS = 12
SIZES = {2: "two", 3: "three"}
SWITCHES = ("cuda.benchmark", "cuda.tf32", "deterministic", "compile", "channels_last", "optim.fused")
IMPORTS = ("model.path", "loss.path", "data.transforms", "loggers")  # options that name code to import
IDLE: tuple[tuple[str, Callable[[Config], bool], str], ...] = (  # option, when it does nothing, why
    ("model.inplace", lambda c: c.model.activation not in ("relu", "leaky_relu"), "for this model.activation"),
    ("inference.mirror", lambda c: not c.data.augment.mirror, "with data.augment.mirror=[]"),
    ("inference.overlap", lambda c: c.model.padding == "valid", "for model.padding=valid, whose tiles do not overlap"),
    ("loss.name", lambda c: c.loss.path is not None, "beside loss.path"),
    ("loss.weights", lambda c: c.loss.name == "dice" and c.loss.path is None, "for loss=dice"),
    ("data.cache_root", lambda c: c.data.cache != "disk", "without data.cache=disk"),
    (
        "data.classes",
        lambda c: c.data.format != "folders" and c.data.label_map is None,
        "for this data.format: dataset.json names the classes",
    ),
    ("data.folds", lambda c: c.data.fold is None and "data.fold=" not in " ".join(c.sweep or []), "without data.fold"),
    ("data.fold", lambda c: c.data.split is not None, "beside data.split"),
    ("data.val_fraction", lambda c: (c.data.fold, c.data.split) != (None, None), "beside data.fold or data.split"),
    ("data.val_fraction", lambda c: c.data.semi, "with data.semi=true, which holds no case out"),
    ("optim.init_names", lambda c: c.optim.init_lr == 1, "without optim.init_lr"),
    ("data.scored", lambda c: not c.data.semi, "without data.semi=true"),
    ("data.scored", lambda c: c.data.sparse_fold is not None, "beside data.sparse_fold, which scores that part"),
    ("data.sparse_folds", lambda c: c.data.sparse_fold is None, "without data.sparse_fold"),
)


def warnings(config: Config) -> list[str]:
    """A line for each option that differs from its default and does nothing beside the others."""
    defaults = {name: value for name, value, _ in options(Config())}
    given = {name: value for name, value, _ in options(config) if value != defaults[name]}
    counted = replace(config, model=network(config.model))
    lines = {n: f"{n}={given[n]} does nothing {why}" for n, is_idle, why in IDLE if n in given and is_idle(counted)}
    kept = ("model.path", "model.in_channels", "model.classes")
    if config.model.path and (idle := [name for name in given if name.startswith("model.") and name not in kept]):
        lines["model"] = f"{', '.join(idle)}: does nothing beside model.path, which is called with channels and classes"
    return list(lines.values())


def network(model: Model) -> Model:
    """The options that count: for a network of the user's own, channels and classes alone; it has no levels."""
    if model.path is None:
        return model
    return Model(path=model.path, in_channels=model.in_channels, classes=model.classes, features=[])


def check(config: Config, here: bool = True) -> None:
    """Raise UserError for the first option out of its range or at odds with another.

    `here`: for a run in this place, whose paths must exist, and of as many ranks as there are.
    """
    for name, value, metadata in options(config):
        _check_range(name, value, metadata)
    config = replace(config, model=network(config.model))
    if config.model.path is None:
        _check_model(config.model)
        _check_patch(config)
    _check_training(config)
    if here:
        check_ranks(config)
        _check_weights(config)
    _check_windows(config)
    _check_count("workers", config.workers, "processes")
    _check_switches(config)
    _check_data(config.data)
    if config.budget is not None:
        budget_bytes(config.budget)
    if here and config.init is None and (config.optim.init_lr != 1 or config.optim.init_names):
        name = "init_names" if config.optim.init_names else "init_lr"
        raise UserError(f"optim.{name}: is for what init has loaded; give init=net.pt, or leave it out")
    if here and config.init is not None and config.resume is None and not Path(config.init).is_file():
        raise UserError(f"init={config.init}: no such file; give RUN/checkpoints/best.pt, or a published one")
    if here and config.tensorboard and find_spec("tensorboard") is None:
        command = 'python -m pip install -c constraints.txt -e ".[tensorboard]"'
        raise UserError(f"tensorboard=true: the package tensorboard is not installed; install it: {command}")
    root = config.data.root
    if here and config.data.format not in ("phantom", "mni152"):
        if root is None:
            raise UserError(f"data.root is not set: data={config.data.format} needs it; add data.root=PATH")
        if not Path(root).is_dir():
            raise UserError(f"data.root={root}: no such folder; give the folder that holds the data set")


def options(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every option below `node` as (dotted name, value, metadata)."""
    for item in fields(node):
        value = getattr(node, item.name)
        if is_dataclass(value):
            yield from options(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", value, item.metadata


def switches_of(config: Config) -> str:
    """Return what `switched_on` says of a config."""
    return switched_on({name: value for name, value, _ in options(config)})


def switched_on(values: Mapping[str, Any]) -> str:
    """Return the switches that change how long a step takes and differ from their default, `compile=true`; "" if none.

    `values` are options by their dotted names.
    """
    defaults = {name: value for name, value, _ in options(Config()) if name in SWITCHES}
    changed = [name for name in SWITCHES if values.get(name, defaults[name]) != defaults[name]]
    return ", ".join(f"{name}={values[name]}".lower() for name in changed)


def _check_range(name: str, value: Any, metadata: Any) -> None:
    low, high, among = metadata["low"], metadata["high"], metadata["among"]
    if among and value not in among:
        close = difflib.get_close_matches(str(value), among, n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"{name}={value}: use one of {', '.join(among)}{meant}")
    if metadata["size"] and value is not None and len(value) != metadata["size"]:
        raise UserError(f"{name}={value}: give {SIZES[metadata['size']]} ({metadata['about']})")
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict | list) and name not in UNTYPED:  # OmegaConf lets them into lists of numbers
            raise UserError(f"{name}={value}: give numbers or words, nothing nested ({metadata['about']})")
        if name in IMPORTS and isinstance(item, str) and not IMPORT_PATH.fullmatch(item):
            raise UserError(f"{name}={item}: give package.module:name, as in {name}=mypkg.parts:mine")
        if isinstance(item, int) and high is None and abs(item) > MOST:
            raise UserError(f"{name}={str(value)[:60]}: must be at most {MOST:,} ({metadata['about']})")
        is_number = isinstance(item, int | float)
        if is_number and (item != item or (low is not None and item < low) or (high is not None and item > high)):
            raise UserError(f"{name}={value}: must be {bounds(metadata)} ({metadata['about']})")


def bounds(metadata: Any) -> str:
    """The range of an option: `>= 0 and <= 1`; "" where it has none."""
    limits = ((">=", metadata["low"]), ("<=", metadata["high"]))
    return " and ".join(f"{sign} {limit}" for sign, limit in limits if limit is not None)


def _check_model(model: Model) -> None:
    levels = len(model.features)
    if not levels:
        raise UserError("model.features=[] has no level; give one width a level, e.g. [16,32,64]")
    if levels > MOST_LEVELS:
        raise UserError(f"model.features has {levels} levels; use at most {MOST_LEVELS}, which halve 2048 voxels to 1")
    if model.decoder is not None and len(model.decoder) != levels - 1:
        raise UserError(f"model.decoder has {len(model.decoder)} widths; {levels} levels need {levels - 1}")
    for name in ("kernels", "strides"):
        if getattr(model, name) != "auto":
            getattr(geometry, name)(model)
    if model.norm == "group":
        widths = {*model.features, *(model.decoder or [])}
        widths |= {w // 2 for w in model.features} if model.widen == "second" else set()
        if bad := sorted(w for w in widths if w % model.groups):
            raise UserError(f"model.groups={model.groups} does not divide {bad[0]} channels; choose a divisor of all")
    if model.deep_supervision and model.padding == "valid":
        raise UserError("model.deep_supervision=true needs model.padding=same: the levels' crops would not align")
    if model.deep_supervision and levels < 3:
        raise UserError(f"model.deep_supervision=true needs 3 levels or more; model.features has {levels}")


def stages(model: Model) -> int:
    """Stages of the U-Net, the units of checkpointing: inc, downs, ups, outc."""
    return 2 * len(model.features)


def check_ranks(config: Config) -> None:
    """Raise UserError for a step that several ranks cannot share. What a file holds was another run's step."""
    if ranks.SIZE == 1:
        return
    if config.batch % ranks.SIZE:
        raise UserError(f"batch={config.batch}: {ranks.SIZE} ranks share a batch; use a multiple of {ranks.SIZE}")
    if (config.lean or config.slab) and config.model.norm.startswith("batch"):
        way = "lean=true" if config.lean else f"slab={config.slab}"
        raise UserError(f"{way} and model.norm={config.model.norm}: not over several ranks; use model.norm=instance")
    for name in ("compile", "channels_last"):
        if getattr(config, name):
            raise UserError(f"{name}=true: not over several ranks, of which there are {ranks.SIZE}; set it to false")


def _check_weights(config: Config) -> None:
    """Raise UserError for weights of classes that leave nothing to learn."""
    weights = config.loss.weights
    if weights is None or config.loss.path is not None or config.loss.name == "dice":
        return
    if not all(map(math.isfinite, weights)):
        raise UserError(f"loss.weights={weights}: give finite numbers, one a class")
    learned = [weight for weight in weights if weight > 0]
    if not learned:
        advice = "use loss=dice, or give weights" if config.loss.name == "dice_ce" else "give weights"
        raise UserError(f"loss.weights={weights}: no class counts in the cross-entropy; {advice} above 0, or null")
    if len(learned) == 1 and config.loss.name == "ce":
        what = "one class alone counts, and is then right everywhere"
        raise UserError(f"loss.weights={weights}: {what}; give two classes or more a weight above 0")


def _check_training(config: Config) -> None:
    own, ckpt, most = config.model.path is not None, config.ckpt, stages(config.model)
    is_count = isinstance(ckpt, int) and not isinstance(ckpt, bool) and (ckpt == 0 or ckpt >= 2)
    if ckpt != "auto" and (not is_count or (ckpt > most and not own)):
        why, most_ = ("", "any number") if own else (f"this model has {most} stages; ", str(most))
        raise UserError(f"ckpt={ckpt}: {why}use 0 (off), 2 to {most_} of segments, or auto; one segment saves nothing")
    _check_slabs(config)
    if config.optim.average is not None and config.model.norm == "batch":
        raise UserError("optim.average is of weights, not of model.norm=batch's statistics; use another norm, or null")


def _check_slabs(config: Config) -> None:
    slab, way = config.slab, "lean=true" if config.lean else f"slab={config.slab}"
    if slab != "auto" and (not isinstance(slab, int) or isinstance(slab, bool) or slab < 0):
        raise UserError(f"slab={slab}: use 0 (off), a number of rows, or auto")
    if slab != "auto" and slab > max(config.data.patch):
        raise UserError(f"slab={slab}: data.patch={config.data.patch} has {max(config.data.patch)} rows; use fewer")
    if config.lean and slab:
        raise UserError(f"lean=true and slab={slab}: slab does what lean does, and more; drop one")
    if not config.lean and not slab:
        return
    if config.ckpt:
        raise UserError(f"{way} and ckpt={config.ckpt}: each decides what backward makes again; drop one")
    if config.optim.init_lr == 0:
        raise UserError(f"{way} and optim.init_lr=0: slabs take the gradients of all tensors; use ckpt=auto, or none")
    if config.model.path is not None:
        raise UserError(f"{way}: runs unet3d's own U-Net by its layers, not model.path={config.model.path}; drop one")


def _check_windows(config: Config) -> None:
    batch = config.inference.batch
    _check_count("inference.batch", batch, "windows")
    if config.model.norm == "batch_current" and batch not in ("auto", 1):
        raise mixed_windows(batch, "model.norm=batch_current")


def _check_count(name: str, value: Any, things: str) -> None:
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool)):
        raise UserError(f"{name}={value}: use a number of {things}, or auto")


def _check_switches(config: Config) -> None:
    if config.deterministic and config.cuda.benchmark:
        raise UserError("deterministic=true and cuda.benchmark=true: which kernel is fastest is chance; drop one")
    others = (("ckpt", config.ckpt), ("lean", config.lean), ("slab", config.slab))
    used = [f"{name}={value}".lower() for name, value in others if value]
    if config.compile and used:
        raise UserError(f"compile=true and {used[0]}: each decides what backward makes again; drop one")
    in_slabs = [word for word in used if not word.startswith("ckpt")]
    if config.channels_last and in_slabs:
        raise UserError(
            f"channels_last=true and {in_slabs[0]}: slabs are rows of maps whose channels lie apart; drop one"
        )
    if config.channels_last and config.model.path is None and config.model.norm == "group":
        what = "a GPU copies each map within it, which no prediction sees"
        raise UserError(f"channels_last=true and model.norm=group: {what}; use another norm, or drop one")
    if config.device == "cuda":
        refuse_indeterminate(config)


def refuse_indeterminate(config: Config) -> None:
    """Raise UserError where a network of the package has a layer that no GPU computes the same way twice.

    For trilinear upsampling PyTorch has another way on a GPU, whose memory is not predicted.
    """
    model = config.model
    if not config.deterministic or model.path is not None or len(model.features) < 2:
        return
    for name, layer, instead in (("downsampling", "max_pool", "strided_conv"), ("upsampling", "trilinear", "nearest")):
        if getattr(model, name) == layer:
            what = f"PyTorch's backward of it on a GPU is not deterministic; use model.{name}={instead}"
            raise UserError(f"deterministic=true and model.{name}={layer}: {what}")


def mixed_windows(batch: int, what: str) -> UserError:
    """Return the error for several windows at once in a network that would mix them."""
    return UserError(f"inference.batch={batch}: {what} takes its statistics over all windows of a pass; use 1, or auto")


def _check_patch(config: Config) -> None:
    model, data = config.model, config.data
    if "auto" in (model.kernels, model.strides):
        return  # auto needs the data's spacing: it is checked again once that is known
    output = geometry.output_size(data.patch, model)
    if config.inference.mirror and any((data.patch[axis] - output[axis]) % 2 for axis in data.augment.mirror):
        what = f"data.patch={data.patch} gives {list(output)}, an odd number of voxels less"
        raise UserError(f"inference.mirror=true: {what}: mirrored views would lie a voxel apart; set it to false")
    sizes = geometry.level_sizes(data.patch, model)
    for above, below, stride in zip(sizes, sizes[1:], geometry.strides(model), strict=False):
        uneven = any(b > 1 and -(-a // b) != s for a, b, s in zip(above, below, stride, strict=True))
        if model.deep_supervision and uneven:
            what = f"strides of {list(stride)} do not divide maps of {list(above)} voxels"
            advice = "labels would not align; give another data.patch"
            raise UserError(f"model.deep_supervision=true: {what}; {advice}")
    _check_lone_voxels(config)


def _check_lone_voxels(config: Config) -> None:
    """Raise UserError where a normalisation would see one number at a time, in a step or in a window."""
    model, patch = config.model, config.data.patch
    maps = geometry.normalised_maps(patch, model)
    lone = [channels for channels, size in maps if size == geometry.ONES]
    numbers = {"instance": 1, "batch_current": 1, "batch": config.batch, "none": 2}
    if not lone or numbers.get(model.norm, min(lone) // model.groups) > 1:
        return
    advice = f"use data.patch={geometry.larger_patch(patch, model)}"
    if groups := [n for n in range(1, min(lone)) if not any(channels % n for channels, _ in maps)]:
        norm = "" if model.norm == "group" else "model.norm=group "
        advice += f", or {norm}model.groups={groups[-1]}"
    which = f"{model.norm} model.groups={model.groups}" if model.norm == "group" else model.norm
    what = f"leaves one voxel of a map at {len(model.features)} levels: model.norm={which} has nothing to normalise"
    raise UserError(f"data.patch={patch} {what}; {advice}")


def _check_data(data: Data) -> None:
    for name in ("scaling", "contrast", "gamma", "blur", "low_resolution"):
        low, high = getattr(data.augment, name)
        if low > high:
            raise UserError(f"data.augment.{name}=[{low}, {high}]: give [smallest, largest]")
    if len(set(data.augment.mirror)) != len(data.augment.mirror):
        raise UserError(f"data.augment.mirror={data.augment.mirror}: name each axis once")
    for name, index, count in (("fold", data.fold, data.folds), ("sparse_fold", data.sparse_fold, data.sparse_folds)):
        if index is not None and index >= count:
            raise UserError(f"data.{name}={index}: with data.{name}s={count} it runs from 0 to {count - 1}")
    if data.format == "folders" and not data.classes:
        raise UserError("data.classes is not set: data=folders needs the class names, e.g. [background,organ]")
    _check_label_map(data)
    for name, counts in (("sparse", data.sparse), ("scored", data.scored)):
        if counts is not None and not any(counts):
            raise UserError(f"data.{name}={counts}: give numbers of slices across x, y and z, not all 0")
    if data.semi and data.sparse is None:
        raise UserError("data.semi=true needs slices to learn from: add data.sparse=[yz,xz,xy], e.g. [5,5,3]")
    if data.semi and (data.fold, data.split) != (None, None):
        raise UserError("data.semi=true learns from slices of every case; set data.fold and data.split to null")
    if data.sparse_fold is not None:
        if not data.semi or data.sparse is None:
            raise UserError("data.sparse_fold needs data.semi=true: no other run scores a part of the slices")
        if data.format == "mni152" and data.sparse[0]:
            why = "mni152 is its own mirror image across x: data.sparse_fold scores mirror images of learned slices"
            raise UserError(f"data.sparse={data.sparse}: {why}; take none across x, e.g. data.sparse=[0,6,12]")
        if max(data.sparse) < data.sparse_folds:
            raise UserError(f"data.sparse={data.sparse}: too few slices for data.sparse_folds={data.sparse_folds}")


def label_sources(label_map: Any) -> dict[int, list[int]]:
    """`{1: [1, 2], 2: 4}` as `{1: [1, 2], 2: [4]}`. Raises UserError for anything else."""
    example = "give each new label those of the files, as in 'data.label_map={1:[1,2],2:4}'"
    if not isinstance(label_map, dict) or not label_map:
        raise UserError(f"data.label_map={label_map}: {example}")
    found = {new: list(olds) if isinstance(olds, list) else [olds] for new, olds in label_map.items()}
    labels = [old for olds in found.values() for old in olds]
    if any(type(label) is not int or not 0 <= label <= MAX_LABEL for label in (*found, *labels)):
        raise UserError(f"data.label_map={label_map}: labels are whole numbers from 0 to {MAX_LABEL}; {example}")
    if sorted({*found} - {0}) != list(range(1, len({*found} - {0}) + 1)) or not {*found} - {0}:
        raise UserError(f"data.label_map={label_map}: number the new labels 1, 2, 3 ... without a gap; 0 may be there")
    if not all(found.values()):
        raise UserError(f"data.label_map={label_map}: a new label has none of the files; {example}")
    if len({*labels}) < len(labels):
        twice, _ = Counter(labels).most_common(1)[0]
        raise UserError(f"data.label_map={label_map}: {twice} is there twice; it can become one label only")
    return found


def _check_label_map(data: Data) -> None:
    if data.label_map is None:
        return
    count = len(label_sources(data.label_map).keys() | {0})
    if data.classes and len(data.classes) != count:
        what = f"makes {count} classes, background with them, but data.classes has {len(data.classes)} names"
        raise UserError(f"data.label_map={data.label_map}: {what}; make them agree")
