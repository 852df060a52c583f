"""What a methods paragraph says of the data: cases, voxels, augmentation and labels."""

from collections.abc import Sequence
from typing import Any

from unet3d.config.schema import GENERATED, Augment, Data
from unet3d.run.record import RunRecord

INTENSITY_WORDS = {
    "auto": "intensities normalised by channel (CT: clipped and scaled by the training cases' foreground; others: to "
    "mean 0 and standard deviation 1 in each volume)",
    "zscore": "intensities normalised to mean 0 and standard deviation 1 in each volume",
    "ct": "intensities clipped and scaled by the training cases' foreground",
    "none": "intensities as stored",
}
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
AXES = ("x", "y", "z")


def listed(words: Sequence[object]) -> str:
    """Return `a`, `a and b`, `a, b and c`."""
    *others, last = [str(word) for word in words]
    return f"{', '.join(others)} and {last}" if others else last


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def sizes(value: object, between: str = "x") -> str:
    """Return sizes of all levels, `3`, `3x3x3`, or of each, `3x3x1 3x3x3`."""
    if not isinstance(value, list):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if any(isinstance(item, list) for item in value):
        return " ".join(map(sizes, value))
    return between.join(map(sizes, value))


def cases(data: Data, run: RunRecord) -> str:
    counts = {part: len(names) for part, names in run.split.items()}
    learned = f"on {counted(counts['train'], 'case')}" if "train" in counts else "on labelled volumes"
    if data.format in GENERATED:
        learned += {"phantom": _phantom(data), "mni152": " made from the MNI152 template"}[data.format]
    if data.semi:
        return f"{learned}, and scored on other slices of the same cases"
    if "val" not in counts:
        return learned
    others = f"{counts['val']:,} {'other was' if counts['val'] == 1 else 'others were'} held out"
    if data.split is not None:
        how = "by a list of cases"
    elif data.fold is None:
        how = f"a share of {data.val_fraction:g} of all"
    elif max(data.fold, data.folds - 1) < len(ORDINALS):
        how = f"the {ORDINALS[data.fold]} of {sizes(data.folds)} folds"
    else:
        how = f"fold {data.fold + 1} of {data.folds}"
    together = ", with all cases of a group in one part" if data.groups is not None else ""
    return f"{learned}; {others} ({how}){together}"


def _phantom(data: Data) -> str:
    phantom = data.phantom
    return f" of {phantom.cases} generated phantoms of {sizes(phantom.shape)} voxels (seed {phantom.seed})"


def images(data: Data, run: RunRecord) -> str:
    grid = "Volumes kept their voxel spacing"
    if data.spacing is not None:
        grid = f"Volumes were resampled to {sizes(data.spacing)} mm"
    if data.affine != "auto":
        grid += f", were placed in space by their headers' {data.affine}"
    if data.affine_check == "warn":
        grid += ", were paired with their labels voxel by voxel also where headers place them apart"
    if data.nonfinite == "zero":
        grid += ", had NaN and infinite voxels set to 0"
    changes = _augmentations(data.augment)
    used = f"augmentation by {listed(changes)}" if changes else "no augmentation"
    if data.transforms:
        used += f", then {listed(data.transforms)}"
    return f"{grid}, with {_intensities(data, run)}; {used}"


def _intensities(data: Data, run: RunRecord) -> str:
    """Return the rule that was used for intensities; of several, each with its channels."""
    rules: dict[str, list[str]] = {}
    channels = run.data.get("channels", [])
    for channel, rule in zip(channels, run.data.get("intensity", []), strict=False):
        words = INTENSITY_WORDS.get(rule["kind"], "")
        if rule["kind"] == "ct":
            words = f"intensities clipped to {rule['low']:g} to {rule['high']:g}, from which the mean {rule['mean']:g} "
            words += f"was subtracted, divided by the standard deviation {rule['std']:g}, all of the training cases' "
            words += "foreground"
        rules.setdefault(words, []).append(channel)
    if not rules:
        return INTENSITY_WORDS[data.intensity]
    if len(rules) == 1:
        return next(iter(rules))
    return listed([f"{words} ({', '.join(names)})" for words, names in rules.items()])


def _augmentations(augment: Augment) -> list[str]:
    """Return each change with its range and probability."""
    spatial = {
        f"rotation by up to {augment.rotation:g} degrees": augment.rotation > 0,
        f"scaling by {_range(augment.scaling)}": augment.scaling != [1, 1],
        f"elastic deformation by {augment.elastic:g} voxels on a grid of {augment.elastic_grid}": augment.elastic > 0,
    }
    moved = [words for words, is_used in spatial.items() if is_used]
    shares = {
        listed(moved) if moved else "": augment.spatial_p,
        f"Gaussian noise of up to {augment.noise:g}": augment.noise_p,
        f"Gaussian blur of {_range(augment.blur)} voxels": augment.blur_p,
        f"contrast by {_range(augment.contrast)}": augment.contrast_p,
        f"gamma correction by {_range(augment.gamma)}": augment.gamma_p,
        f"low resolution of {_range(augment.low_resolution)}": augment.low_resolution_p,
    }
    changes = [f"{words} (probability {share:g})" for words, share in shares.items() if words and share]
    if augment.mirror:
        changes.append(f"mirroring along {listed([AXES[axis] for axis in augment.mirror])}")
    return changes


def _range(values: Sequence[float]) -> str:
    low, high = values
    return f"{low:g} to {high:g}"


def labels(data: Data, run: RunRecord) -> list[str]:
    """Return sentences on what became of the files' labels."""
    sentences = []
    classes = data.classes or run.data.get("classes", [])
    if classes:
        sentences.append(f"The classes were {listed(classes)}.")
    if data.label_map is not None:
        merged = [f"{new} was the files' {labels_of(old)}" for new, old in data.label_map.items()]
        sentences.append(f"Of the labels, {listed(merged)}.")
    if data.regions is not None:
        regions = [f"{name} ({labels_of(labels)})" for name, labels in data.regions.items()]
        drawn = f", drawn in this order as {listed(data.regions_class_order)}" if data.regions_class_order else ""
        sentences.append(f"Classes overlapped: {listed(regions)}{drawn}.")
    ignored = run.data.get("ignore") if data.ignore is None else data.ignore
    if ignored is not None:
        sentences.append(f"Voxels with the label {ignored} were neither learned from nor scored.")
    if data.sparse is not None:
        sentences.append(f"{_sparse(data)}.")
    return sentences


def labels_of(labels: Any) -> str:
    return f"labels {listed(labels)}" if isinstance(labels, list) and len(labels) > 1 else f"label {sizes(labels)}"


def _sparse(data: Data) -> str:
    text = f"Of each training case, labels of {listed(data.sparse or ())} slices across x, y and z were used"
    if data.semi and data.sparse_fold is not None:
        return f"{text}, dealt to {data.sparse_folds} parts, of which number {data.sparse_fold + 1} was scored"
    return f"{text}; {listed(data.scored)} others were scored" if data.semi else text
