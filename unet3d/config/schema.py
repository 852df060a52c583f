"""Every option of a run: its type, range and meaning. This is Hydra's schema; rules.py checks several together."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from unet3d.base.types import Regions

PLANS = ("none", "lean", "tiles", "auto")  # Choices of recompute.
ACTIVATIONS = ("relu", "leaky_relu", "prelu", "silu", "swish", "swish_lean")
INTENSITIES = ("auto", "zscore", "ct", "none")


def _decorated(path: Path, decorator: str) -> dict[str, dict[str, Any]]:
    """Return what `@decorator(...)` in a file says of each function, without loading the file."""
    known = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        for call in getattr(node, "decorator_list", []):
            if isinstance(node, ast.FunctionDef) and isinstance(call, ast.Call) and ast.unparse(call.func) == decorator:
                known[node.name] = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    return known


def _known_layouts(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what `@layout(...)` says of each data.format, and the module of its function: generated ones first."""
    known = {}
    for path in sorted(folder.glob("*.py")):
        for name, facts in _decorated(path, "layout").items():
            known[name] = {"module": path.stem, "names_classes": True, **facts}
    return dict(sorted(known.items(), key=lambda item: ("generated" not in item[1], not item[1]["names_classes"])))


PACKAGE = Path(__file__).parents[1]
LOSSES = _decorated(PACKAGE / "training" / "losses.py", "loss")
LAYOUTS = _known_layouts(PACKAGE / "data" / "layouts")
GENERATED = tuple(name for name, facts in LAYOUTS.items() if "generated" in facts)


WORDS = {  # Each word holds for an option, or for a group's options but those with -word.
    "ascending": "two numbers: smallest, largest",
    "any_network": "counts beside model.path",
    "by_level": "may have an entry for each level",
    "module_memory": "`unet3d memory` takes it with --module",
    "module_plan": "`unet3d plan` takes it with --module",
    "fixed": "a resumed run with another value would be another run",
    "kept": "a plan may set it; it may name no file, no code, no account",
    "read": "counts as a plan is made, and is not kept",
    "ignored": "may be said as a plan is made, and does nothing",
    "pace": "sets the number of steps and validations",
    "switch": "changes how long a step takes",
    "same": "runs with other values are not comparable: other data, or another length or course of training",
    "sees": "changes how a network sees images, or what its classes are",
    "private": "holds a path: it is not published, and not in a private wandb run",
    "imports": "names code, which is called with the arguments after the colon",
    "example": "a map, such as the one after the colon",
    "letters": "a name that wandb accepts has at most so many",
    "learned": "a checkpoint says how files are read, what labels are, or what goes with_labels",
}
UNTOLD = {  # words, too: why an option is none of a methods paragraph's business
    "speed": "the same numbers, perhaps rounded otherwise, in other time or memory",
    "place": "where files lie",
    "course": "how the run went along, not what it learned",
    "chosen": "what was chosen for it is in the config",
    "found": "env.json has what was found, which the paragraph names",
    "last": "scores are those of the last weights",
}


def facts_of(words: str) -> dict[str, Any]:
    """Return what words say of an option, or of a group: those of WORDS and UNTOLD, and which values it may have.

    These are `same|valid`, or an inclusive range, of a list's items too, as in `>=0 <=1`, and `x3`, a list's length.
    After a colon stands what else a word says, as in `letters:64`.
    """
    facts: dict[str, Any] = {}
    for word in words.split():
        name, colon, said = word.removeprefix("-").partition(":")
        if name == "imports":
            facts[name] = tuple(said.split(","))
        elif colon:
            facts[name] = int(said) if said.isdecimal() else said
        elif "|" in word:
            facts["among"] = tuple(word.split("|"))
        elif word.startswith((">=", "<=")):
            facts["low" if word[0] == ">" else "high"] = ast.literal_eval(word[2:])
        elif word.removeprefix("x").isdecimal():
            facts["size"] = int(word[1:])
        elif name in UNTOLD:
            facts["untold"] = name if name == word else ""
        else:
            assert name in WORDS, name
            facts[name] = name == word
    return facts


def option(default: Any, about: str, words: str = "", among: tuple[str, ...] = (), kind: str = "") -> Any:
    """Return a dataclass field: its default, its meaning, and what `facts_of` its words says.

    `among`: the values that it may have, where words do not list them. `kind`: the type in words, of a value of several
    types, which has its own rule.
    """
    metadata = {"about": about, "low": None, "high": None, "among": among, "size": 0, "kind": kind, **facts_of(words)}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def names_classes(data: "Data") -> bool:
    """Return whether files of this layout name the classes, so that data.classes need not."""
    return bool(LAYOUTS.get(data.format, {}).get("names_classes", True))


def with_numbers(label_map: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a map of labels with integers as keys, where JSON has made them texts."""

    def number(key: Any) -> Any:
        return int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key

    return {number(key): olds for key, olds in label_map.items()}


def flat(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return `{a: {b: 1}}` as `{a.b: 1}`; a map of labels is a value, whose keys JSON makes texts.

    A map of regions is a value, too.
    """
    values: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if not isinstance(value, Mapping):
            values[name] = value
        elif key in ("label_map", "regions"):
            values[name] = with_numbers(value) if key == "label_map" else dict(value)
        else:
            values |= flat(value, f"{name}.")
    return values


@dataclass
class Model:
    """The U-Net. Lists run from the shallowest level (full resolution) to the deepest."""

    path: str | None = option(
        None,
        "your own network, package.module:name, called as name(in_channels, classes)",
        "-kept any_network imports:in_channels,classes",
    )
    features: list[int] = option([16, 32, 64, 128], "channels of each level's encoder; its length is the depth", ">=1")
    decoder: list[int] | None = option(None, "channels of each decoder level; null: the encoder's", "by_level >=1")
    blocks: list[int] | None = option(
        None,
        "residual blocks of each encoder level, after a stem, and one convolution a decoder level, as in "
        "nnU-Net's ResEnc; null: two convolutions a level",
        "by_level >=1 <=64",
    )
    in_channels: int | None = option(None, "image channels; null: the data's", "any_network >=1")
    classes: int | None = option(
        None, "classes with background, or regions; null: the data's", "any_network same >=1 <=32767"
    )
    regions: Any = option(
        None,
        "labels of each output, [[1,2,3],[2,3],[3]], where classes overlap; null: the data's",
        "any_network",
        kind="list or null",
    )
    regions_class_order: list[int] | None = option(
        None,
        "label that each of these regions is drawn as, later ones over earlier ones; null: the data's",
        "any_network >=1 <=65535",
    )
    kernels: Any = option(
        3,
        "kernel size of each level (voxels): 3, [3,3,3], or a list of them; auto: from the first case's spacing",
        "by_level",
        kind="int, list or auto",
    )
    strides: Any = option(
        2,
        "stride from each level to the next: 2, [2,2,1], or a list of them; auto: from the spacing",
        "by_level",
        kind="int, list or auto",
    )
    padding: str = option("same", "same: output as large as the input; valid: unpadded", "same|valid")
    conv_bias: bool = option(True, "bias in the convolutions of the blocks")
    widen: str = option(
        "first",
        "which convolution of an encoder block increases the channels; second: as in Cicek et al. 2016",
        "first|second",
    )
    norm: str = option(
        "instance",
        "normalisation; batch_current takes the batch's own statistics in evaluation, too",
        "instance|batch|batch_current|group|none",
    )
    norm_affine: bool = option(True, "learned scale and shift in the normalisation")
    groups: int = option(8, "groups of norm=group", ">=1")
    activation: str = option("relu", "swish: x*sigmoid(x); swish_lean: keeps only x for backward", among=ACTIVATIONS)
    negative_slope: float = option(0.01, "slope of leaky_relu below zero", ">=0 <=1")
    inplace: bool = option(False, "activation in place (relu, leaky_relu)", "speed")
    downsampling: str = option("max_pool", "between levels", "max_pool|strided_conv")
    upsampling: str = option("transposed", "between levels", "transposed|trilinear|nearest")
    up_reduce: bool = option(True, "reduce channels to the skip's while upsampling (1x1x1 convolution if interpolated)")
    up_bias: bool = option(True, "bias of the upsampling convolution")
    residual: bool = option(False, "blocks add their input (1x1x1 projection where channels or stride change)")
    dropout: float = option(0.0, "probability to drop a whole channel after an activation in a block", ">=0 <=0.95")
    deep_supervision: bool = option(False, "a head and a loss at every decoder level")

    @property
    def output_regions(self) -> Regions | None:
        """Return the regions of the outputs, which are then sigmoids; None where classes exclude each other."""
        if self.regions is None or self.regions_class_order is None:
            return None
        labels = tuple(tuple(labels) for labels in self.regions)
        return Regions(labels, tuple(self.regions_class_order))


@dataclass
class Augment:
    """Training-time augmentation. Each `*_p` is the probability that a patch gets it."""

    spatial_p: float = option(0.3, "rotation, scaling and elastic deformation, in one resampling", ">=0 <=1")
    rotation: float = option(30.0, "largest about each axis (degrees); a thin patch is never tilted", ">=0 <=180")
    scaling: list[float] = option([0.7, 1.4], "zoom range; below 1 shrinks the image", "ascending >=0.1 <=10 x2")
    elastic: float = option(0.0, "std of the B-spline deformation's control vectors (voxels)", ">=0")
    elastic_grid: int = option(32, "spacing of its control points (voxels)", ">=4")
    mirror: list[int] = option([0, 1, 2], "axes mirrored with probability 0.5 each; 0: x, left-right", "sees >=0 <=2")
    noise_p: float = option(0.1, "Gaussian noise", ">=0 <=1")
    noise: float = option(0.1, "its largest std (intensities have unit std)", ">=0")
    blur_p: float = option(0.1, "Gaussian blur", ">=0 <=1")
    blur: list[float] = option([0.5, 1.0], "its sigma range (voxels)", "ascending >=0 x2")
    contrast_p: float = option(0.15, "a factor on all intensities", ">=0 <=1")
    contrast: list[float] = option([0.75, 1.25], "range of these factors", "ascending >=0 x2")
    gamma_p: float = option(0.15, "gamma correction", ">=0 <=1")
    gamma: list[float] = option([0.7, 1.5], "range of its exponent", "ascending >=0.1 <=10 x2")
    low_resolution_p: float = option(0.0, "downsampled and back, as if scanned with fewer voxels", ">=0 <=1")
    low_resolution: list[float] = option([0.5, 1.0], "share of the voxels along each axis", "ascending >=0.1 <=1 x2")


@dataclass
class Phantom:
    """The embedded data set, generated once under data/."""

    cases: int = option(16, "volumes generated", ">=2 <=1000")
    shape: list[int] = option([64, 64, 32], "voxels along x, y, z", ">=16 <=512 x3")
    seed: int = option(0, "same seed, same bytes", ">=0")


@dataclass
class Data:
    """The data set, its split, and how patches are cut."""

    format: str = option("phantom", "layout on disk", "learned:files", among=tuple(LAYOUTS))
    root: str | None = option(None, "folder of the data set", "-fixed private place")
    images: str = option("images", "folders: sub-folder of the images", "private place")
    labels: str = option("labels", "folders: sub-folder of the label maps", "private place")
    classes: list[str] | None = option(
        None, "folders, or with label_map: class names, background first", "learned:labels"
    )
    label_map: Any = option(
        None,
        "new label: the files' label or labels, as {1: [1,2], 2: 4}; null: as stored",
        "sees learned:labels example:{1:[1,2],2:4}",
        kind="map or null",
    )
    regions: Any = option(
        None,
        "classes that overlap: name and labels, as {whole: [1,2], core: 2}; null: none, or dataset.json's",
        "learned:labels example:{whole:[1,2],core:2}",
        kind="map or null",
    )
    regions_class_order: list[int] | None = option(
        None,
        "with regions: label that each is drawn as, later ones over earlier ones",
        ">=1 <=65535 learned:with_labels",
    )
    ignore: int | None = option(
        None, "label that is not learned or scored; null: dataset.json's", ">=0 <=65535 learned:files"
    )
    nonfinite: str = option("error", "NaN and infinite voxels; zero: 0 takes their place", "-same error|zero")
    affine: str = option(
        "auto",
        "what places voxels where sform, qform and pixdim disagree; auto: the first that a file has, with a warning",
        "sees auto|sform|qform|pixdim",
    )
    affine_check: str = option(
        "error",
        "files of a case that lie apart in space: error refuses them, warn pairs them voxel by voxel",
        "-same error|warn",
    )
    allow_outside: bool = option(
        False, "read files that dataset.json or links name outside of data.root", "-same -fixed -kept read place"
    )
    cache: str = option("memory", "what keeps prepared cases; off: nothing", "-same -fixed speed memory|disk|off")
    cache_root: str | None = option(
        None,
        "folder of cache=disk; null: unet3d in $XDG_CACHE_HOME, or in ~/.cache",
        "-same -fixed -kept read private place",
    )
    fingerprint: str = option(
        "sample", "what resume compares of each file; full: all bytes", "-same -fixed course sample|full"
    )
    patch: list[int] = option(
        [64, 64, 32],
        "patch and window x,y,z (voxels), in RAS: left-right, posterior-anterior, inferior-superior",
        "sees >=1 <=2048 x3",
    )
    spacing: list[float] | None = option(
        None, "resample to this (mm); null: as stored", "sees >=1e-7 <=10000000 x3 learned:files"
    )
    intensity: str = option(
        "auto", "auto: CT channels as ct, others zscore; data=folders: say ct", "-same", among=INTENSITIES
    )
    val_fraction: float = option(0.2, "share of the cases held out", ">=0.01 <=0.9")
    folds: int = option(5, "folds of the cross-validation", ">=2 <=100")
    fold: int | None = option(None, "which fold is held out; null: val_fraction instead", ">=0")
    split: str | None = option(
        None,
        "JSON file {train: [ids], val: [ids]} instead of both, or a list of such splits: data.fold says which",
        "-fixed -kept read private",
    )
    groups: str | None = option(
        None,
        "cases that stay together, as scans of one patient: a CSV file case,group, a JSON file {case: "
        "group}, or a regular expression for that part of a case's name; null: each for itself",
        "-fixed -kept read private",
    )
    sparse: list[int] | None = option(
        None, "number of annotated slices across x, y and z; null: every voxel is annotated", ">=0 x3"
    )
    semi: bool = option(False, "with sparse: learn from these slices of every case, score others of the same cases")
    scored: list[int] = option([4, 4, 4], "semi: slices scored, across x, y, z", ">=0 x3")
    sparse_folds: int = option(3, "semi: folds of the annotated slices; all but one are learned from", ">=2")
    sparse_fold: int | None = option(None, "semi: which of these folds is scored; null: the slices of scored", ">=0")
    foreground: float = option(
        0.33, "share of patches centred on a voxel of a random foreground class", "-same >=0 <=1"
    )
    transforms: list[str] = option(
        [],
        "your own, package.module:name, applied to training patches after augmentation",
        "-same -kept imports:image,label,rng",
    )
    augment: Augment = field(default_factory=Augment, metadata=facts_of("-same"))
    phantom: Phantom = field(default_factory=Phantom)

    def __post_init__(self) -> None:
        """Accept `true` and `false` for data.cache, since YAML reads off as false."""
        self.cache = {"true": "memory", "false": "off"}.get(str(self.cache).lower(), self.cache)
        if isinstance(self.label_map, dict):
            self.label_map = with_numbers(self.label_map)
        if isinstance(self.regions, dict):
            self.regions = {str(name): labels for name, labels in self.regions.items()}


@dataclass
class Loss:
    """The loss, computed in float32."""

    name: str = option(
        "dice_ce", "cross-entropy, soft Dice, their sum, or another of training/losses.py", among=tuple(LOSSES)
    )
    path: str | None = option(
        None,
        "your own function, package.module:name, called as name(logits, label, options)",
        "-kept imports:logits,label,options",
    )
    weights: list[float] | None = option(None, "one weight per class for the cross-entropy", ">=0")
    batch_dice: bool = option(True, "Dice over the batch as one volume; false: mean over its samples")


@dataclass
class Optim:
    """Optimizer and learning-rate schedule."""

    name: str = option("adamw", "optimizer", "fixed sgd|adam|adamw")
    lr: float = option(1e-3, "peak learning rate", ">=0 <=100")
    weight_decay: float = option(1e-5, "L2 (sgd, adam) or decoupled (adamw)", "fixed >=0 <=1")
    momentum: float = option(0.99, "sgd, Nesterov's", "fixed >=0 <=0.9999")
    betas: list[float] = option([0.9, 0.999], "adam, adamw", "fixed >=0 <=0.999999 x2")
    schedule: str = option("poly", "of the learning rate", "poly|cosine|one_cycle|constant")
    warmup: float = option(0.1, "one_cycle: share of the steps that rises", ">=0 <=0.9")
    clip: float | None = option(12.0, "largest gradient norm; null: no clipping", ">=1e-6")
    init_lr: float = option(1.0, "factor on the rate of what init loaded; 0: it is frozen", "fixed >=0 <=100")
    init_names: list[str] | None = option(
        None, "what init_lr is for, as [inc,down1]; null: all that init loaded", "fixed"
    )
    fused: bool = option(False, "one kernel updates all weights; changes rounding", "switch speed")
    average: float | None = option(
        None,
        "EMA decay; the averaged weights are used for validation and prediction; null: none",
        "fixed >=0 <=0.99999",
    )


@dataclass
class Inference:
    """The sliding window."""

    overlap: float = option(0.5, "overlap of neighbouring windows, as a share of the window", "sees >=0 <=0.9")
    mirror: bool = option(
        False, "average over the mirrorings of data.augment.mirror: 8 times the cost for three axes", "sees"
    )
    batch: Any = option(
        "auto",
        "windows per forward pass; auto: on CUDA as many as a micro-batch has patches, else 1",
        "speed >=1 <=4096",
        kind="int or auto",
    )


@dataclass
class Cuda:
    """How a GPU computes; on the CPU nothing of it counts."""

    benchmark: bool = option(
        False, "cuDNN tries its kernels for each shape, in more memory, and keeps the fastest", "switch speed"
    )
    tf32: bool = option(
        True, "float32 convolutions with 10 bits of mantissa, on Ampere and later; false: with all 23", "switch"
    )


@dataclass
class Wandb:
    """Tracking. Offline by default: no account, no network."""

    mode: str = option("offline", "online needs an account", "offline|online|disabled")
    project: str = option("unet3d", "project; unless set, WANDB_PROJECT comes first", "letters:128")
    entity: str | None = option(None, "user or team; null: the account's, or WANDB_ENTITY", "letters:128")
    name: str | None = option(None, "of the run; null: the run folder's, or WANDB_NAME", "letters:128")
    group: str | None = option(None, "of runs; null: the sweep's folder, or WANDB_RUN_GROUP", "letters:128")
    job_type: str | None = option(None, "of the run, for filters; null: none, or WANDB_JOB_TYPE", "letters:64")
    tags: list[str] = option([], "of the run, for filters", "letters:64")
    notes: str | None = option(None, "a text with the run; null: none, or WANDB_NOTES")
    artifact: bool = option(False, "also record the best checkpoint, as an artifact")
    private: bool = option(True, "record nothing about this machine: host, program path, console, packages")


@dataclass
class Config:
    """One run."""

    model: Model = field(default_factory=Model, metadata=facts_of("fixed kept sees"))
    data: Data = field(default_factory=Data, metadata=facts_of("fixed kept same"))
    loss: Loss = field(default_factory=Loss, metadata=facts_of("fixed kept"))
    optim: Optim = field(default_factory=Optim, metadata=facts_of("kept"))
    inference: Inference = field(default_factory=Inference, metadata=facts_of("kept"))
    cuda: Cuda = field(default_factory=Cuda)
    wandb: Wandb = field(default_factory=Wandb, metadata=facts_of("course"))
    amp: bool = option(False, "automatic mixed precision", "fixed kept sees module_memory")
    amp_dtype: str = option(
        "auto", "auto: bf16; fp16 on a GPU that emulates bf16", "kept sees module_memory module_plan auto|bf16|fp16"
    )
    compile: bool = option(
        False, "torch.compile of the network in training, once memory is measured; takes minutes", "switch speed"
    )
    channels_last: bool = option(
        False, "weights and activations: channels of a voxel side by side, for tensor cores", "fixed kept switch speed"
    )
    ckpt: Any = option(
        0, "gradient (activation) checkpointing in at most this many segments; 0: off", "kept", kind="int"
    )
    recompute: str = option(
        "none",
        "what backward computes again, of any network: lean: little; tiles: what the least memory needs, or "
        "nearly; auto: as little as budget allows",
        "kept module_memory module_plan",
        among=PLANS,
    )
    seed: int = option(0, "of weights, batches and augmentation", "fixed kept same >=0 <=4294967295")
    deterministic: bool = option(False, "bit-identical repetition, also on a GPU; on the CPU it is so anyway", "switch")
    device: str = option("auto", "where to run", "kept module_memory module_plan found auto|cpu|cuda")
    steps: int = option(100, "optimizer steps", "kept same pace >=1")
    batch: int = option(2, "patches per step (with accumulate: per micro-batch)", "fixed kept module_plan >=1 <=4096")
    accumulate: int = option(1, "micro-batches per step", "fixed kept >=1 <=4096")
    workers: Any = option(
        "auto", "processes that prepare batches; auto: 1, on CUDA by the cores", "speed >=0 <=256", kind="int or auto"
    )
    eval_every: int = option(50, "steps between validations; 0: only at the end", "kept pace last >=0")
    save_every: int = option(0, "steps between checkpoints, besides those of validations; 0: none", "course >=0")
    dry_run: bool = option(
        False, "predict the memory of a step, then stop before the network is built", "ignored course"
    )
    budget: str | None = option(
        None,
        "refuse a run with a larger predicted peak (CPU: tensors; CUDA: reserved by PyTorch); e.g. 8GiB",
        "kept module_plan chosen",
    )
    rank_timeout: float = option(600.0, "under torchrun: seconds that a process waits for another", "course >=1 <=1e6")
    plan: str | None = option(
        None, "plan.yaml of `unet3d plan`, whose options count where no other word sets them", "ignored private chosen"
    )
    init: str | None = option(
        None, "start from the weights of this checkpoint (of a run, or published)", "fixed private"
    )
    resume: str | None = option(
        None, "run folder to continue; auto: that of hydra.run.dir, or a new run there", "ignored private course"
    )
    tensorboard: bool = option(
        False, "also record for TensorBoard, in the run folder; needs the extra tensorboard", "course"
    )
    loggers: list[str] = option(
        [],
        "your own, package.module:name, called with the config and the run folder",
        "course imports:config,folder",
    )
    sweep: list[str] | None = option(
        None, "of an experiment: overrides with several values, one job each, as for -m", "ignored course"
    )
    requeue: bool = option(False, "under Slurm: put the job back in the queue once a signal has stopped it", "course")


def options(node: Any, prefix: str = "", of_group: Mapping[str, Any] | None = None) -> Iterator[tuple[str, Any, Any]]:
    """Yield every option below `node`, in a group with these facts, as (dotted name, value, facts)."""
    for item in fields(node):
        value = getattr(node, item.name)
        facts = {**(of_group or {}), **item.metadata}
        if is_dataclass(value):
            yield from options(value, f"{prefix}{item.name}.", facts)
        else:
            type_name = item.type.__name__ if isinstance(item.type, type) else str(item.type)
            yield f"{prefix}{item.name}", value, {"type": type_name, **facts}


# What is known of each option, its default, type, range and meaning among it.
FACTS: dict[str, dict[str, Any]] = {name: {"default": value, **facts} for name, value, facts in options(Config())}
KINDS = {name: facts["type"] for name, facts in FACTS.items()}
TEXTS = ("str", "str | None", "list[str]", "list[str] | None")  # kinds


@cache
def options_with(fact: str) -> Mapping[str, Any]:
    """Return this fact of each option that has it."""
    return {name: facts[fact] for name, facts in FACTS.items() if facts.get(fact)}
