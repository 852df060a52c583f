"""Ranges and combinations of options. One UserError a mistake: what is wrong, where, what to do. Free of torch."""

import difflib
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unet3d.base import ranks
from unet3d.base.errors import UserError
from unet3d.base.types import budget_bytes
from unet3d.config.data_rules import check_classes_of_new_run, check_data, check_regions
from unet3d.config.schema import FACTS, GENERATED, LOSSES, Config, Data, Model, names_classes, options, options_with
from unet3d.model import geometry

MOST_LEVELS = 12
IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")  # package.module:name
LARGEST_NUMBER = 2**32  # Bound where an option has none: no arithmetic overflows, no float loses it
SIZES = {2: "two", 3: "three"}
WANDB_VARIABLES = {  # Keys are the options that variables stand for.
    "project": "WANDB_PROJECT",
    "entity": "WANDB_ENTITY",
    "name": "WANDB_NAME",
    "group": "WANDB_RUN_GROUP",
    "job_type": "WANDB_JOB_TYPE",
    "tags": "WANDB_TAGS",  # Commas separate its tags.
}
WANDB_MODES = ("online", "offline", "disabled", "shared", "run", "dryrun")  # Values of the variable.


def check(config: Config, here: bool = True) -> None:
    """Raise UserError for the first option out of its range or at odds with another.

    `here`: for a run in this place, whose paths must exist, and of as many ranks as there are.
    """
    check_options(config)
    config = replace(config, model=effective_model(config.model))
    check_outputs(config.model)
    if config.model.path is None:
        check_model(config.model)
        check_patch(config.model, config.data, config.inference.mirror, config.batch)
    _check_segments(config)
    if config.optim.average is not None and config.model.norm == "batch":
        raise UserError("optim.average is of weights, not of model.norm=batch's statistics; use another norm, or null")
    if here:
        check_ranks(config)
        _check_weights(config)
    if config.model.norm == "batch_current" and config.inference.batch not in ("auto", 1):
        raise mixed_windows(config.inference.batch, "model.norm=batch_current")
    _check_switches(config)
    check_data(config.data)
    if config.budget is not None:
        budget_bytes(config.budget)
    if here:
        _check_place(config)
    if here and config.resume is None:
        check_classes_of_new_run(config.data)


def check_options(config: Config) -> None:
    """Raise UserError for the first option out of its range."""
    for name, value, facts in options(config):
        _check_range(name, value, facts)
        if facts["kind"] == "int or auto" and value != "auto" and type(value) is not int:
            raise UserError(f"{name}={value}: use a number, or auto ({facts['about']})")
        if facts.get("ascending") and value[0] > value[1]:
            raise UserError(f"{name}={value}: give [smallest, largest]")


def warnings(config: Config) -> list[str]:
    """Return a line for each option that differs from its default and does nothing beside the others."""
    given = {name: value for name, value, _ in options(config) if value != FACTS[name]["default"]}
    counted = replace(config, model=effective_model(config.model))
    lines = {}
    for name, reason, is_idle in _idle(counted):
        if name in given and is_idle:
            lines[name] = f"{name}={given[name]} does nothing {reason}"
    of_the_unet = [name for name in given if name.startswith("model.") and name not in options_with("any_network")]
    if config.model.path and of_the_unet:
        names = ", ".join(of_the_unet)
        lines["model"] = f"{names}: does nothing beside model.path, which is called with channels and classes"
    return list(lines.values())


def _idle(config: Config) -> Iterator[tuple[str, str, bool]]:
    """Yield options with what makes each do nothing, and whether that is so."""
    model = config.model
    data = config.data
    has_no_fold = data.fold is None and not any("data.fold=" in word for word in config.sweep or [])
    is_named = names_classes(data) and data.label_map is None
    has_no_entropy = config.loss.path is None and not LOSSES[config.loss.name].get("ce")
    yield "model.inplace", "for this model.activation", model.activation not in ("relu", "leaky_relu")
    yield "model.residual", "beside model.blocks, which are residual", model.blocks is not None
    yield "data.classes", "for this data.format, whose files name the classes", is_named
    yield "data.cache_root", "without data.cache=disk", data.cache != "disk"
    yield "data.val_fraction", "beside data.fold or data.split", data.fold is not None or data.split is not None
    for name in ("data.val_fraction", "data.groups"):
        yield name, "with data.semi=true, which holds no case out", data.semi
    yield "data.folds", "without data.fold", has_no_fold
    yield "data.scored", "without data.semi=true", not data.semi
    yield "data.scored", "beside data.sparse_fold, which scores that part", data.sparse_fold is not None
    yield "data.sparse_folds", "without data.sparse_fold", data.sparse_fold is None
    yield "loss.name", "beside loss.path", config.loss.path is not None
    yield "loss.weights", "for a loss without cross-entropy", has_no_entropy
    yield "optim.init_names", "without optim.init_lr", config.optim.init_lr == 1
    yield "inference.overlap", "for model.padding=valid, whose tiles do not overlap", model.padding == "valid"
    yield "inference.mirror", "with data.augment.mirror=[]", not data.augment.mirror


def _check_place(config: Config) -> None:
    """Raise UserError for files and packages that are not here, and for names that wandb refuses later."""
    _check_wandb(config)
    if config.init is None and (config.optim.init_lr != 1 or config.optim.init_names):
        name = "init_names" if config.optim.init_names else "init_lr"
        raise UserError(f"optim.{name}: is for what init has loaded; give init=net.pt, or leave it out")
    if config.init is not None and config.resume is None and not Path(config.init).is_file():
        missing = f"init={config.init}: no such file{_here(config.init)}"
        raise UserError(f"{missing}; give RUN/checkpoints/best.pt, or a published one")
    if config.tensorboard and find_spec("tensorboard") is None:
        command = 'python -m pip install -c constraints.txt -e ".[tensorboard]"'
        raise UserError(f"tensorboard=true: the package tensorboard is not installed; install it: {command}")
    if config.data.format in GENERATED:
        return
    root = config.data.root
    if root is None:
        raise UserError(f"data.root is not set: data={config.data.format} needs it; add data.root=PATH")
    if not Path(root).is_dir():
        raise UserError(f"data.root={root}: no such folder{_here(root)}; give the folder that holds the data set")


def _here(path: str) -> str:
    """Return where a path that is relative was looked for, which is not where a resumed run began."""
    return "" if Path(path).is_absolute() else f" in {Path.cwd()}"


def _check_wandb(config: Config) -> None:
    """Raise UserError for a name that wandb refuses, at the start of a run or during the upload."""
    mode = os.environ.get("WANDB_MODE")
    if mode and mode not in WANDB_MODES:
        raise UserError(f"WANDB_MODE={mode}: use one of {', '.join(WANDB_MODES[:3])}, or unset it")
    given: list[tuple[str, str, Any]] = []
    for option in options_with("letters"):
        given.append((option, option, getattr(config.wandb, option.removeprefix("wandb."))))
    if (mode or config.wandb.mode) != "disabled":
        for name, variable in WANDB_VARIABLES.items():
            text = os.environ.get(variable) or None
            given.append((variable, f"wandb.{name}", text.split(",") if text and name == "tags" else text))
    for place, option, words in given:
        for word in words if isinstance(words, list) else [words]:
            most = FACTS[option]["letters"]
            if word is None:
                continue
            if not word.strip():
                raise UserError(f"{place}={word}: is empty; give 1 to {most} letters, or leave it out")
            if len(word) > most:
                raise UserError(f"{place}={word[:40]}...: has {len(word)} letters; wandb takes at most {most}")
            found = [sign for sign in "/\\#?%:" if sign in word]
            if option in ("wandb.project", "wandb.entity") and found:
                raise UserError(f"{place}={word}: holds {' '.join(found)}; wandb takes none of / \\ # ? % :")


def effective_model(model: Model) -> Model:
    """Return the options that count: of a network of the user's own, channels and outputs alone; it has no levels."""
    if model.path is None:
        return model
    names = [option.removeprefix("model.") for option in options_with("any_network")]
    return Model(features=[], **{name: getattr(model, name) for name in names})


def stages(model: Model) -> int:
    """Return the number of stages of the U-Net, the units of checkpointing: inc, downs, ups, outc."""
    return 2 * len(model.features)


def switches_of(config: Config) -> str:
    """Return what `switched_on` says of a config."""
    return switched_on({name: value for name, value, _ in options(config)})


def switched_on(values: Mapping[str, Any]) -> str:
    """Return the switches that change how long a step takes and differ from their default, `compile=true`; "" if none.

    `values` are options by their dotted names.
    """
    defaults = {name: FACTS[name]["default"] for name in options_with("switch")}
    changed = [name for name in defaults if values.get(name, defaults[name]) != defaults[name]]
    return ", ".join(f"{name}={values[name]}".lower() for name in changed)


def _check_range(name: str, value: Any, facts: Any) -> None:
    """Raise UserError for a value, or an item of a list, out of the range of its option."""
    about = facts["about"]
    among = facts["among"]
    low = -math.inf if facts["low"] is None else facts["low"]
    high = math.inf if facts["high"] is None else facts["high"]
    if among and value not in among:
        close = difflib.get_close_matches(str(value), among, n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"{name}={value}: use one of {', '.join(among)}{meant}")
    if facts["size"] and value is not None and len(value) != facts["size"]:
        comma = "; the decimal sign is a point" if len(value) == 2 * facts["size"] else ""
        raise UserError(f"{name}={value}: give {SIZES[facts['size']]}{comma} ({about})")
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict | list) and not facts["kind"]:  # OmegaConf lets them into lists of numbers
            raise UserError(f"{name}={value}: give numbers or words, nothing nested ({about})")
        if "imports" in facts and isinstance(item, str) and not IMPORT_PATH.fullmatch(item):
            raise UserError(f"{name}={item}: give package.module:name, as in {name}=mypkg.parts:mine")
        if isinstance(item, int) and facts["high"] is None and abs(item) > LARGEST_NUMBER:
            raise UserError(f"{name}={str(value)[:60]}: must be at most {LARGEST_NUMBER:,} ({about})")
        if isinstance(item, int | float) and not low <= item <= high:  # NaN, too
            raise UserError(f"{name}={value}: must be {bounds(facts)} ({about})")


def bounds(metadata: Any) -> str:
    """Return the range of an option: `>= 0 and <= 1`; "" where it has none."""
    limits = ((">=", metadata["low"]), ("<=", metadata["high"]))
    return " and ".join(f"{sign} {limit}" for sign, limit in limits if limit is not None)


def check_ranks(config: Config) -> None:
    """Raise UserError for a step that several ranks cannot share. What a file holds was another run's step."""
    if ranks.SIZE == 1:
        return
    if config.batch % ranks.SIZE:
        raise UserError(f"batch={config.batch}: {ranks.SIZE} ranks share a batch; use a multiple of {ranks.SIZE}")
    if config.recompute != "none" and config.model.norm.startswith("batch"):
        way = f"recompute={config.recompute}"
        raise UserError(f"{way} and model.norm={config.model.norm}: not over several ranks; use model.norm=instance")
    for name in ("compile", "channels_last"):
        if getattr(config, name):
            raise UserError(f"{name}=true: not over several ranks, of which there are {ranks.SIZE}; set it to false")


def _check_weights(config: Config) -> None:
    """Raise UserError for weights of classes that leave nothing to learn."""
    weights = config.loss.weights
    facts = LOSSES[config.loss.name]
    if weights is None or config.loss.path is not None or not facts.get("ce"):
        return
    if not all(map(math.isfinite, weights)):
        raise UserError(f"loss.weights={weights}: give finite numbers, one a class")
    learned = [weight for weight in weights if weight > 0]
    if not learned:
        advice = "use loss=dice, or give weights" if facts.get("dice") else "give weights"
        raise UserError(f"loss.weights={weights}: no class counts in the cross-entropy; {advice} above 0, or null")
    if len(learned) == 1 and not facts.get("dice"):
        problem = "one class alone counts, and is then right everywhere"
        raise UserError(f"loss.weights={weights}: {problem}; give two classes or more a weight above 0")


def _check_segments(config: Config) -> None:
    """Raise UserError for a number of checkpointed segments that the network cannot have."""
    ckpt = config.ckpt
    if ckpt == "auto":
        raise UserError("ckpt=auto: write recompute=auto with a budget=, which needs less memory, or ckpt=2, say")
    most = math.inf if config.model.path else stages(config.model)
    if type(ckpt) is int and (ckpt == 0 or 2 <= ckpt <= most):
        return
    reason, segments = "", "2 or more"
    if config.model.path is None:
        reason, segments = f"this model has {most} stages; ", f"2 to {most}"
    raise UserError(f"ckpt={ckpt}: {reason}use 0 (off) or {segments} segments; one segment saves nothing")


def _check_switches(config: Config) -> None:
    """Raise UserError for ways to save memory or time that do not go together, or that miss what they need."""
    if config.deterministic and config.cuda.benchmark:
        raise UserError("deterministic=true and cuda.benchmark=true: which kernel is fastest is chance; drop one")
    way = f"recompute={config.recompute}"
    if config.recompute == "auto" and config.budget is None:
        raise UserError("recompute=auto: needs the memory to keep to; add budget=6GiB, or use recompute=lean or tiles")
    used = ["compile=true"] if config.compile else []
    used += [way] if config.recompute != "none" else []
    used += [f"ckpt={config.ckpt}"] if config.ckpt else []
    if len(used) > 1:
        raise UserError(f"{used[0]} and {used[1]}: each decides what backward makes again; drop one")
    if config.channels_last and config.recompute != "none":
        problem = "tiles are rows of maps whose channels lie apart"
        raise UserError(f"channels_last=true and {way}: {problem}; drop one")
    if config.channels_last and config.model.path is None and config.model.norm == "group":
        problem = "a GPU copies each map within it, which no prediction sees"
        raise UserError(f"channels_last=true and model.norm=group: {problem}; use another norm, or drop one")
    if config.device == "cuda":
        refuse_indeterminate(config)


def refuse_indeterminate(config: Config) -> None:
    """Raise UserError where a network of the package has a layer that no GPU computes the same way twice.

    For trilinear upsampling PyTorch has another way on a GPU, whose memory is not predicted.
    """
    model = config.model
    if not config.deterministic or model.path is not None or len(model.features) < 2:
        return
    if model.blocks is not None:
        problem = "PyTorch's backward of pooling, in each block with a stride, is not deterministic on a GPU"
        raise UserError(f"deterministic=true and model.blocks={model.blocks}: {problem}; drop one")
    for name, layer, instead in (("downsampling", "max_pool", "strided_conv"), ("upsampling", "trilinear", "nearest")):
        if getattr(model, name) == layer:
            problem = f"PyTorch's backward of it on a GPU is not deterministic; use model.{name}={instead}"
            raise UserError(f"deterministic=true and model.{name}={layer}: {problem}")


def mixed_windows(batch: int, what: str) -> UserError:
    """Return the error for several windows at once in a network that would mix them."""
    return UserError(f"inference.batch={batch}: {what} takes its statistics over all windows of a pass; use 1, or auto")


def check_outputs(model: Model) -> None:
    """Raise UserError for a number of outputs, or labels of them, that no data can have."""
    regions = model.regions
    example = "give the labels of each region, e.g. [[1,2,3],[2,3],[3]]"
    check_regions("model.regions", regions, model.regions_class_order, list, example)
    if regions is None and model.classes == 1:
        raise UserError("model.classes=1: one class is background alone; give 2 or more, or model.regions")
    if regions is not None and model.classes not in (None, len(regions)):
        problem = f"model.regions={regions} are {len(regions)}; make them agree"
        raise UserError(f"model.classes={model.classes}: {problem}")


def check_model(model: Model) -> None:
    """Raise UserError for the first option that another does not allow."""
    levels = len(model.features)
    if not levels:
        raise UserError("model.features=[] has no level; give one width a level, e.g. [16,32,64]")
    if levels > MOST_LEVELS:
        raise UserError(f"model.features has {levels} levels; use at most {MOST_LEVELS}, which halve 2048 voxels to 1")
    for name, needed in (("decoder", levels - 1), ("blocks", levels)):
        numbers = getattr(model, name)
        if numbers is not None and len(numbers) != needed:
            raise UserError(f"model.{name} has {len(numbers)} entries; {levels} levels need {needed}")
    if model.blocks is not None and model.padding == "valid":
        raise UserError("model.blocks needs model.padding=same: each block adds its input, which must be as large")
    if model.blocks is not None and model.widen == "second":
        raise UserError("model.blocks needs model.widen=first: the first convolution of a level increases the channels")
    if model.kernels != "auto":
        geometry.kernels(model)
    if model.strides != "auto":
        geometry.strides(model)
    widths = {*model.features, *(model.decoder or [])}
    if model.widen == "second":
        widths |= {width // 2 for width in model.features}
    undivided = [width for width in sorted(widths) if width % model.groups]
    if model.norm == "group" and undivided:
        raise UserError(f"model.groups={model.groups} does not divide {undivided[0]} channels; choose a divisor of all")
    if model.deep_supervision and model.padding == "valid":
        raise UserError("model.deep_supervision=true needs model.padding=same: the levels' crops would not align")
    if model.deep_supervision and levels < 3:
        raise UserError(f"model.deep_supervision=true needs 3 levels or more; model.features has {levels}")


def check_patch(model: Model, data: Data, is_mirrored: bool, batch: int) -> None:
    """Raise UserError for a patch that the network cannot take, mirror or supervise."""
    patch = data.patch
    if "auto" in (model.kernels, model.strides):
        return  # auto needs the data's spacing: it is checked again once that is known
    output = geometry.output_size(patch, model)
    is_odd = any((patch[axis] - output[axis]) % 2 for axis in data.augment.mirror)
    if is_mirrored and is_odd:
        problem = f"data.patch={patch} gives {list(output)}, an odd number of voxels less"
        raise UserError(f"inference.mirror=true: {problem}: mirrored views would lie a voxel apart; set it to false")
    _check_sizes(patch, model)
    _check_lone_voxels(patch, model, batch)


def _check_sizes(patch: list[int], model: Model) -> None:
    """Raise UserError where a stride does not suit the maps that it makes smaller.

    One that does not divide them leaves the labels of a supervised level apart; a block's shortcut takes the mean over
    the stride, which no map may be shorter than.
    """
    sizes = geometry.level_sizes(patch, model)
    takes_means = model.blocks is not None and model.downsampling == "strided_conv"
    for above, below, stride in zip(sizes, sizes[1:], geometry.strides(model), strict=False):
        uneven = [b > 1 and -(-a // b) != s for a, b, s in zip(above, below, stride, strict=True)]
        if model.deep_supervision and any(uneven):
            problem = f"strides of {list(stride)} do not divide maps of {list(above)} voxels"
            advice = "labels would not align; give another data.patch"
            raise UserError(f"model.deep_supervision=true: {problem}; {advice}")
        if takes_means and any(length < step for length, step in zip(above, stride, strict=True)):
            problem = f"a map of {list(above)} voxels is shorter than the stride {list(stride)} that follows"
            raise UserError(f"data.patch={patch} with model.blocks: {problem}; give a larger patch, or fewer levels")


def _check_lone_voxels(patch: list[int], model: Model, batch: int) -> None:
    """Raise UserError where a normalisation would see one number at a time, in a step or in a window."""
    maps = geometry.normalised_maps(patch, model)
    lone = [channels for channels, size in maps if size == geometry.ONES]
    if not lone:
        return
    numbers = {"instance": 1, "batch_current": 1, "batch": batch, "none": 2}
    if numbers.get(model.norm, min(lone) // model.groups) > 1:
        return
    is_group = model.norm == "group"
    advice = f"use data.patch={geometry.larger_patch(patch, model)}"
    all_channels = [channels for channels, _ in maps]
    groups = [n for n in range(1, min(lone)) if not any(channels % n for channels in all_channels)]
    if groups:
        norm = "" if is_group else "model.norm=group "
        advice += f", or {norm}model.groups={groups[-1]}"
    norm = f"{model.norm} model.groups={model.groups}" if is_group else model.norm
    problem = f"leaves one voxel of a map at {len(model.features)} levels: model.norm={norm} has nothing to normalise"
    raise UserError(f"data.patch={patch} {problem}; {advice}")
