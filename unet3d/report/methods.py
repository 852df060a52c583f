"""A run as one paragraph for the methods section of a paper: network, patch, recipe, versions, peaks by name."""

from unet3d.base.errors import UserError
from unet3d.base.types import mib
from unet3d.config import compose
from unet3d.config.schema import Config, Data, Inference, Model, Optim
from unet3d.report.record import RunRecord

TITLE = "For a methods section"
LOSS_WORDS = {
    "ce": "cross-entropy",
    "dice": "soft Dice loss",
    "dice_ce": "the sum of soft Dice loss and cross-entropy",
}
NORM_WORDS = {
    "instance": "instance normalisation",
    "batch": "batch normalisation",
    "batch_current": "batch normalisation by the batch's own statistics",
    "group": "group normalisation",
    "none": "no normalisation",
}
INTENSITY_WORDS = {
    "auto": "intensities normalised by channel (CT: clipped and scaled by the training cases' foreground; others: to "
    "mean 0 and standard deviation 1 in each volume)",
    "zscore": "intensities normalised to mean 0 and standard deviation 1 in each volume",
    "ct": "intensities clipped and scaled by the training cases' foreground",
    "none": "intensities as stored",
}
RECOMPUTED_WORDS = {
    "lean": "only the outputs of convolutions kept for the backward pass (recompute=lean)",
    "tiles": "activations recomputed in tiles in the backward pass (recompute=tiles)",
    "auto": "activations recomputed in the backward pass as far as a budget asked for it (recompute=auto)",
}
OPTIMIZER_WORDS = {"sgd": "SGD with Nesterov momentum", "adam": "Adam", "adamw": "AdamW"}
PACKAGES = {"torch": "PyTorch", "monai": "MONAI", "cuda": "CUDA"}


def methods_paragraph(run: RunRecord) -> str:
    """Return the paragraph; "" for a folder without a whole config, or of no training."""
    if not {"model", "data", "optim", "steps", "batch"} <= run.settings.keys() or run.last_step is None:
        return ""
    try:
        config = compose.from_plain(run.settings)
    except UserError:
        return ""
    sentences = [
        f"{_network(config.model, run)} was trained {_cases(config, run)}.",
        f"{_images(config.data)}.",
        f"{_recipe(config, run)}.",
        f"{_inference(config.inference, config.data)}.",
        _peaks(run),
        _software(run),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _network(model: Model, run: RunRecord) -> str:
    parameters = f"{run.memory['parameters']:,} parameters" if run.memory else ""
    if model.path is not None:
        return f"The network {model.path} ({parameters})" if parameters else f"The network {model.path}"
    parts = [
        f"channels {'-'.join(map(str, model.features))}",
        f"kernels {_sizes(model.kernels)}",
        f"strides {_sizes(model.strides)}",
        NORM_WORDS[model.norm],
        f"{model.activation} activation",
        f"{model.downsampling.replace('_', ' ')} between levels",
        f"{model.upsampling} upsampling",
    ]
    if model.blocks is not None:
        parts.append(f"residual encoder with {'-'.join(map(str, model.blocks))} blocks")
    elif model.residual:
        parts.append("residual blocks")
    if model.deep_supervision:
        parts.append("deep supervision")
    if model.dropout:
        parts.append(f"dropout {model.dropout:g}")
    if parameters:
        parts.append(parameters)
    return f"A 3D U-Net ({', '.join(parts)})"


def _sizes(value: object) -> str:
    """Return sizes of all levels, `3`, `3x3x3`, or of each, `3x3x1 3x3x3`."""
    if not isinstance(value, list):
        return str(value)
    if any(isinstance(item, list) for item in value):
        return " ".join(map(_sizes, value))
    return "x".join(map(str, value))


def _cases(config: Config, run: RunRecord) -> str:
    counts = {part: len(names) for part, names in run.split.items()}
    data = config.data
    learned = f"on {counts['train']} cases" if "train" in counts else ""
    if learned and data.semi:
        return f"{learned}, of which it saw the labels of some slices, and was scored on others"
    held_out = f"{counts['val']} others were held out" if "val" in counts else ""
    if held_out and data.fold is not None and data.split is None:
        held_out += f" (fold {data.fold} of {data.folds}, counted from 0)"
    if data.groups is not None and not data.semi:
        held_out += ", with all cases of a group in one part"
    return "; ".join(part for part in (learned, held_out) if part) or "on labelled volumes"


def _images(data: Data) -> str:
    grid = "Volumes kept their voxel spacing"
    if data.spacing is not None:
        grid = f"Volumes were resampled to {_sizes(data.spacing)} mm"
    augment = data.augment
    given = {
        "rotation, scaling and elastic deformation": augment.spatial_p,
        "mirroring": len(augment.mirror),
        "noise": augment.noise_p,
        "blur": augment.blur_p,
        "contrast": augment.contrast_p,
        "gamma correction": augment.gamma_p,
        "low resolution": augment.low_resolution_p,
    }
    names = [name for name, share in given.items() if share]
    if not augment.elastic and augment.spatial_p:
        names[0] = "rotation and scaling" if augment.rotation else "scaling"
    used = f"; augmentation by {', '.join(names)}" if names else "; no augmentation"
    return f"{grid}, with {INTENSITY_WORDS[data.intensity]}{used}"


def _recipe(config: Config, run: RunRecord) -> str:
    optim = config.optim
    patches = config.batch * config.accumulate
    loss = f"the loss {config.loss.path}" if config.loss.path else LOSS_WORDS[config.loss.name]
    if config.data.regions is not None or "regions" in run.memory:  # in memory.json also those of a dataset.json
        loss += " of overlapping regions"
    steps = f"{run.last_step:,} optimizer steps"
    patch = _sizes(config.data.patch)
    noun = "patch" if patches == 1 else "patches"
    parts = [
        f"Each of {steps} saw {patches} {noun} of {patch} voxels and minimised {loss}, by {_optimizer(optim)}",
        _precision(config),
    ]
    if config.accumulate > 1:
        parts.append(f"gradients accumulated over {config.accumulate} micro-batches")
    if config.ckpt:
        parts.append(f"activation checkpointing (ckpt={config.ckpt})")
    if config.recompute != "none":
        parts.append(RECOMPUTED_WORDS[config.recompute])
    if optim.average is not None:
        parts.append(f"weights averaged with decay {optim.average:g}")
    return ", ".join([*parts, f"seed {config.seed}"])


def _optimizer(optim: Optim) -> str:
    momentum = f" {optim.momentum:g}" if optim.name == "sgd" else f" (betas {optim.betas[0]:g}, {optim.betas[1]:g})"
    schedule = f"{optim.schedule} schedule" if optim.schedule != "constant" else "constant"
    parts = [
        f"{OPTIMIZER_WORDS[optim.name]}{momentum}",
        f"learning rate {optim.lr:g} ({schedule})",
        f"weight decay {optim.weight_decay:g}",
    ]
    if optim.clip is not None:
        parts.append(f"gradients clipped at norm {optim.clip:g}")
    return ", ".join(parts)


def _precision(config: Config) -> str:
    if not config.amp:
        return "in float32"
    return "in mixed precision" if config.amp_dtype == "auto" else f"in mixed precision ({config.amp_dtype})"


def _inference(inference: Inference, data: Data) -> str:
    text = f"Whole volumes were segmented by a sliding window of the same size, overlapping by {inference.overlap:.0%}"
    if inference.mirror and data.augment.mirror:
        text += ", averaged over mirrorings"
    return text


def _peaks(run: RunRecord) -> str:
    """Return each peak of a training step that is known, by name; "" without any."""
    parts = []
    for kind in ("predicted", "measured"):
        entry = run.memory.get(kind)
        if not entry:
            continue
        parts.append(f"{mib(entry['peak_bytes'])} MiB {kind} ({entry['kind']})")
        if "reserved_bytes" in entry:
            parts.append(f"{mib(entry['reserved_bytes'])} MiB {kind} as reserved by the allocator")
    return f"Peak memory of a training step: {', '.join(parts)}." if parts else ""


def _software(run: RunRecord) -> str:
    """Return versions and the device, as env.json has them; "" without it."""
    versions = run.environment
    if "torch" not in versions:
        return ""
    name = f"unet3d {versions['unet3d']}" if "unet3d" in versions else "unet3d"
    if "commit" in versions:
        name += f" (commit {versions['commit'][:12]})"
    packages = [f"{title} {versions[key]}" for key, title in PACKAGES.items() if key in versions]
    python = [f"Python {versions['python']}"] if "python" in versions else []
    device = versions.get("gpu") or (f"a CPU with {versions['cpu']}" if "cpu" in versions else "")
    where = f", on {device}" if device else ""
    return f"Software: {', '.join([name, *packages, *python])}{where}."
