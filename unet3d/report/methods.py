"""A run as one paragraph for the methods section of a paper: network, data, recipe, versions, peaks by name.

Its sentences are in templates/methods.txt. The schema says `untold=` of the options that it does not tell.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unet3d.base.errors import UserError
from unet3d.base.types import mib
from unet3d.config import compose
from unet3d.config.schema import LOSSES, Augment
from unet3d.report.page import render
from unet3d.run.record import RunRecord

TITLE = "For a methods section"
AXES = ("x", "y", "z")
INTENSITY_WORDS = {
    "auto": "intensities normalised by channel (CT: clipped and scaled by the training cases' foreground; others: to "
    "mean 0 and standard deviation 1 in each volume)",
    "zscore": "intensities normalised to mean 0 and standard deviation 1 in each volume",
    "ct": "intensities clipped and scaled by the training cases' foreground",
    "none": "intensities as stored",
}


def methods_paragraph(run: RunRecord) -> str:
    """Return the paragraph; "" for a folder without a whole config, or of no training."""
    if not {"model", "data", "optim", "steps", "batch"} <= run.settings.keys() or run.last_step is None:
        return ""
    try:
        config = compose.from_plain(run.settings)
    except UserError:
        return ""
    model, data = config.model, config.data
    return render(
        "methods.txt",
        c=config,
        run=run,
        channels=model.in_channels or len(run.data.get("channels", ())),
        outputs=model.classes or len(run.data.get("classes", ())),
        output_labels=[labels_of(labels) for labels in model.regions or ()],
        init_name=Path(config.init or "").name,
        intensities=_intensities(data.intensity, run),
        changes=_augmentations(data.augment),
        merged=[f"{new} was the files' {labels_of(old)}" for new, old in (data.label_map or {}).items()],
        regions=[f"{name} ({labels_of(labels)})" for name, labels in (data.regions or {}).items()],
        weights=[f"{weight:g}" for weight in config.loss.weights or ()],
        peak_entries=[(kind, run.memory[kind]) for kind in ("predicted", "measured") if run.memory.get(kind)],
        listed=listed,
        sizes=sizes,
        mib=mib,
        LOSSES=LOSSES,
    )


def listed(words: Sequence[object]) -> str:
    """Return `a`, `a and b`, `a, b and c`."""
    *others, last = [str(word) for word in words]
    return f"{', '.join(others)} and {last}" if others else last


def sizes(value: object, between: str = "x") -> str:
    """Return sizes of all levels, `3`, `3x3x3`, or of each, `3x3x1 3x3x3`."""
    if not isinstance(value, list):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if any(isinstance(item, list) for item in value):
        return " ".join(map(sizes, value))
    return between.join(map(sizes, value))


def labels_of(labels: Any) -> str:
    """Return `label 1`, `labels 1 and 2`."""
    return f"labels {listed(labels)}" if isinstance(labels, list) and len(labels) > 1 else f"label {sizes(labels)}"


def _intensities(option: str, run: RunRecord) -> str:
    """Return the rule that was used for intensities; of several, each with its channels."""
    rules: dict[str, list[str]] = {}
    for channel, rule in zip(run.data.get("channels", []), run.data.get("intensity", []), strict=False):
        words = INTENSITY_WORDS.get(rule["kind"], "")
        if rule["kind"] == "ct":
            words = f"intensities clipped to {rule['low']:g} to {rule['high']:g}, from which the mean {rule['mean']:g} "
            words += f"was subtracted, divided by the standard deviation {rule['std']:g}, all of the training cases' "
            words += "foreground"
        rules.setdefault(words, []).append(channel)
    if len(rules) > 1:
        return listed([f"{words} ({', '.join(names)})" for words, names in rules.items()])
    return next(iter(rules), INTENSITY_WORDS[option])


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
