"""Options of the U-Net at odds with each other, or with the patch."""

from unet3d.base.errors import UserError
from unet3d.config.data_rules import checked_regions
from unet3d.config.schema import Data, Model
from unet3d.model import geometry

MOST_LEVELS = 12


def check_outputs(model: Model) -> None:
    """Raise UserError for a number of outputs, or labels of them, that no data can have."""
    if model.regions is None:
        if model.regions_class_order is not None:
            raise UserError("model.regions_class_order is set, but model.regions is not; give both, or neither")
        if model.classes == 1:
            raise UserError("model.classes=1: one class is background alone; give 2 or more, or model.regions")
        return
    option = f"model.regions={model.regions}"
    if not isinstance(model.regions, list):
        raise UserError(f"{option}: give the labels of each region, e.g. [[1,2,3],[2,3],[3]]")
    labels_of = dict(enumerate(model.regions, start=1))
    checked_regions(labels_of, model.regions_class_order, option, "model.regions_class_order")
    if model.classes not in (None, len(model.regions)):
        raise UserError(f"model.classes={model.classes}: {option} are {len(model.regions)}; make them agree")


def check_model(model: Model) -> None:
    """Raise UserError for the first option that another does not allow."""
    levels = len(model.features)
    if not levels:
        raise UserError("model.features=[] has no level; give one width a level, e.g. [16,32,64]")
    if levels > MOST_LEVELS:
        raise UserError(f"model.features has {levels} levels; use at most {MOST_LEVELS}, which halve 2048 voxels to 1")
    if model.decoder is not None and len(model.decoder) != levels - 1:
        raise UserError(f"model.decoder has {len(model.decoder)} widths; {levels} levels need {levels - 1}")
    if model.blocks is not None and len(model.blocks) != levels:
        count = len(model.blocks)
        raise UserError(f"model.blocks has {count} numbers; {levels} levels need {levels}, as model.features")
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
