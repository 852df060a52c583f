"""A run as one paragraph for the methods section of a paper: network, data, recipe, versions, peaks by name.

The schema says `untold=` of the options that it does not tell.
"""

from pathlib import Path

from unet3d.base.errors import UserError
from unet3d.base.types import mib
from unet3d.config import compose
from unet3d.config.schema import LOSSES, Config, Loss, Model, Optim
from unet3d.report.methods_data import cases, counted, images, labels, labels_of, listed, sizes
from unet3d.run.record import RunRecord

TITLE = "For a methods section"
MOST_NAMES = 6  # of parameters; of more, their number
NORM_WORDS = {
    "instance": "instance normalisation",
    "batch": "batch normalisation",
    "batch_current": "batch normalisation by the batch's own statistics",
    "group": "group normalisation",
    "none": "no normalisation",
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
        f"{_network(config.model, run)} was trained {cases(config.data, run)}.",
        *_start(config, run),
        f"{images(config.data, run)}.",
        *labels(config.data, run),
        f"{_recipe(config, run)}.",
        f"{_inference(config)}.",
        _peaks(run),
        _software(run),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _network(model: Model, run: RunRecord) -> str:
    ends = _ends(model, run)
    if run.memory:
        ends.append(f"{run.memory['parameters']:,} parameters")
    if model.path is not None:
        return f"The network {model.path} ({', '.join(ends)})" if ends else f"The network {model.path}"
    return f"A 3D U-Net ({', '.join([*_layers(model), *ends])})"


def _ends(model: Model, run: RunRecord) -> list[str]:
    """Return what the network takes and gives, where that is known."""
    parts = []
    channels = model.in_channels or len(run.data.get("channels", ()))
    if channels:
        parts.append(counted(channels, "input channel"))
    outputs = model.classes or len(run.data.get("classes", ()))
    if outputs:
        parts.append(counted(outputs, "output"))
    if model.regions is not None:
        regions = [labels_of(labels) for labels in model.regions]
        parts.append(f"outputs for {listed(regions)}")
    if model.regions_class_order is not None:
        parts.append(f"drawn in this order as {listed(model.regions_class_order)}")
    return parts


def _layers(model: Model) -> list[str]:
    norm = NORM_WORDS[model.norm]
    if model.norm == "group":
        norm += f" of {model.groups} groups"
    if model.norm != "none" and not model.norm_affine:
        norm += " without learned scale and shift"
    activation = model.activation.replace("_", " ")
    if model.activation == "leaky_relu":
        activation += f" (slope {model.negative_slope:g})"
    upsampling = f"{model.upsampling} upsampling"
    if not model.up_reduce:
        upsampling += " of all channels"
    if not model.up_bias:
        upsampling += " without bias"
    told = {
        f"channels {sizes(model.features, '-')}": True,
        f"{sizes(model.decoder, '-')} in the decoder": model.decoder is not None,
        f"kernels {sizes(model.kernels)}": True,
        f"strides {sizes(model.strides)}": True,
        "unpadded convolutions": model.padding == "valid",
        "convolutions without bias": not model.conv_bias,
        "channels increased by the second convolution of a block": model.widen == "second",
        norm: True,
        f"{activation} activation": True,
        f"{model.downsampling.replace('_', ' ')} between levels": True,
        upsampling: True,
        f"residual encoder with {sizes(model.blocks, '-')} blocks": model.blocks is not None,
        "residual blocks": model.residual and model.blocks is None,
        "deep supervision": model.deep_supervision,
        f"dropout {model.dropout:g}": model.dropout > 0,
    }
    return [words for words, is_told in told.items() if is_told]


def _start(config: Config, run: RunRecord) -> list[str]:
    """Return a sentence on pre-trained weights; [] without any."""
    if config.init is None:
        return []
    loaded = run.start.get("loaded", [])
    by_class = run.start.get("by class", {})
    counts = ""
    if loaded:
        total = len(loaded) + len(by_class) + len(run.start.get("new", []))
        counts = f" ({len(loaded)} of {total} tensors"
        counts += f", and {len(by_class)} of the output layers by the names of classes)" if by_class else ")"
    sentence = f"It began with pre-trained weights, of {Path(config.init).name}{counts}"
    optim = config.optim
    if optim.init_lr != 1:
        names = optim.init_names or []
        which = "which" if not names else listed(names) if len(names) <= MOST_NAMES else f"{len(names)} of them"
        were = "were frozen" if optim.init_lr == 0 else f"learned at {optim.init_lr:g} times the learning rate"
        sentence += f"; {'these' if which == 'which' else which} {were}"
    return [f"{sentence}."]


def _recipe(config: Config, run: RunRecord) -> str:
    data = config.data
    patches = config.batch * config.accumulate
    steps = f"{run.last_step:,} optimizer steps"
    if run.last_step != config.steps:
        steps = f"{run.last_step:,} of {config.steps:,} planned optimizer steps"
    seen = f"{counted(patches, 'patch').replace('patchs', 'patches')} of {sizes(data.patch)} voxels"
    if data.foreground:
        seen += f" (centred on a voxel of a random foreground class with probability {data.foreground:g})"
    parts = [
        f"Each of {steps} saw {seen} and minimised {_loss(config, run)}, by {_optimizer(config.optim)}",
        _precision(config, run),
    ]
    if config.deterministic:
        parts.append("with deterministic algorithms")
    if config.accumulate > 1:
        parts.append(f"gradients accumulated over {config.accumulate} micro-batches")
    if config.ckpt:
        parts.append(f"activation checkpointing (ckpt={config.ckpt})")
    if config.recompute != "none":
        parts.append(RECOMPUTED_WORDS[config.recompute])
    if config.optim.average is not None:
        parts.append(f"weights averaged with decay {config.optim.average:g}")
    return ", ".join([*parts, f"seed {config.seed}"])


def _loss(config: Config, run: RunRecord) -> str:
    loss: Loss = config.loss
    words = f"the loss {loss.path}" if loss.path else LOSSES[loss.name]["about"]
    if config.data.regions is not None or "regions" in run.memory:  # in memory.json also those of a dataset.json
        words += " of overlapping regions"
    details = []
    if loss.path or LOSSES[loss.name].get("dice"):
        details.append(f"Dice over {'the batch as one volume' if loss.batch_dice else 'each patch'}")
    if loss.weights:
        details.append(f"classes weighted {listed([f'{weight:g}' for weight in loss.weights])}")
    return f"{words} ({', '.join(details)})" if details else words


def _optimizer(optim: Optim) -> str:
    momentum = f" {optim.momentum:g}" if optim.name == "sgd" else f" (betas {optim.betas[0]:g}, {optim.betas[1]:g})"
    schedule = "constant"
    if optim.schedule != "constant":
        rise = f", rising for {optim.warmup:g} of the steps" if optim.schedule == "one_cycle" else ""
        schedule = f"{optim.schedule.replace('_', ' ')} schedule{rise}"
    parts = [
        f"{OPTIMIZER_WORDS[optim.name]}{momentum}",
        f"learning rate {optim.lr:g} ({schedule})",
        f"weight decay {optim.weight_decay:g}",
    ]
    if optim.clip is not None:
        parts.append(f"gradients clipped at norm {optim.clip:g}")
    return ", ".join(parts)


def _precision(config: Config, run: RunRecord) -> str:
    if config.amp:
        return "in mixed precision" if config.amp_dtype == "auto" else f"in mixed precision ({config.amp_dtype})"
    return "in float32, with TF32 in convolutions" if config.cuda.tf32 and "gpu" in run.environment else "in float32"


def _inference(config: Config) -> str:
    text = "Whole volumes were segmented by a sliding window of the same size"
    if config.model.padding == "same":
        text += f", overlapping by {config.inference.overlap:.0%}"
    if config.inference.mirror and config.data.augment.mirror:
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
