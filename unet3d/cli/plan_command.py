"""`unet3d plan`: from a folder of volumes and a budget to a plan that train.py keeps.

Without data, of a network: a table of the largest patches that it trains on, each verified by simulation. Arguments are
checked before torch loads.
"""

import argparse
import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from unet3d.base import process
from unet3d.base.errors import UserError, escaped, warn
from unet3d.base.files import write_text
from unet3d.base.progress import track
from unet3d.base.types import MIB, Table, budget_bytes, host_bytes, mib, sizes_text
from unet3d.cli.commands import config_with_warnings
from unet3d.cli.memory import network_keywords, refuse_for_module
from unet3d.config import compose, rules
from unet3d.config.schema import FACTS, Config, Model, options_with
from unet3d.config.words import path_option
from unet3d.model import geometry
from unet3d.model.geometry import Triple

if TYPE_CHECKING:
    from unet3d.memory.meter import Peak
    from unet3d.planning.steps import MeasureStep, Padding, Schedule

SHARE_OF_HOST = 0.5  # The share of this machine's memory that is the budget on a CPU.
SHARE_OF_CARD = 0.9  # The same of a GPU's.
ANY_PATCH = "data.patch=[1024,1024,1024]"  # Any network takes it until a patch is planned.
OWN = ("time", "like")  # words that are no options of a run
BUDGETS = ("4GiB", "8GiB", "11GiB", "24GiB", "80GiB")
PATCH = re.compile(r"[1-9]\d{0,3}(x[1-9]\d{0,3}){2}")
NNUNET = "nnunet"
NNUNET_NETWORK = "nnunet_hippocampus"  # The config whose blocks are those of nnU-Net's network.
# What nnU-Net trains with, and the device that its users have; the command line may say otherwise.
AS_NNUNET = ("optim=sgd", "loss.batch_dice=false", "batch=2")
ON_CUDA = "device=cuda"
PLAIN_IN_HALF = (True, "none")  # The schedule of nnU-Net's own step.
MODULE_MULTIPLE = 16  # Voxels, of the patches of a network whose strides are not known.
FORMS = {"cuda": ("tensors", "allocated", "reserved", "expandable"), "cpu": ("tensors",)}  # Of peaks, as printed.
COMPARED = {"cuda": "reserved", "cpu": "tensors"}  # With the budget.
UNITS = {"GiB": 2**30, "MiB": MIB, "KiB": 2**10}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the question to a parser that takes overrides."""
    parser.add_argument("--network", help="nnunet, or a model= of the package: which patches fit it, without data")
    parser.add_argument("--module", help="instead of --network: any network, package.module:name")
    parser.add_argument("--args", metavar="JSON", help="keywords that make the network (needs --module)")
    parser.add_argument("--channels", type=int, default=1, metavar="N", help="image channels (1)")
    parser.add_argument("--classes", type=int, default=2, metavar="N", help="with background (2; needs --network)")
    parser.add_argument("--proportions", metavar="AxBxC", help="also patches of these proportions, such as 160x192x160")
    peak_of = "in place of budget=: what a step with amp=true needs for this patch"
    parser.add_argument("--peak-of", metavar="AxBxC", help=peak_of)
    multiple = "patch lengths are multiples of N voxels (16; needs --module)"
    parser.add_argument("--multiple", type=int, metavar="N", help=multiple)


def run(arguments: argparse.Namespace) -> int:
    """Print the fingerprint of a data set and each decision of its plan; write the plan. Return the exit code.

    With --network or --module, print which patches fit that network instead. Raises UserError.
    """
    if arguments.network is not None or arguments.module is not None:
        if arguments.out is not None:
            raise UserError("-o is for the plan of a data set; remove it, or --network and --module")
        return _largest_patches(arguments)
    overrides = [word for word in arguments.overrides if word.partition("=")[0] not in OWN]
    own = dict(word.partition("=")[::2] for word in arguments.overrides if word not in overrides)
    like = own.get("like")
    if like not in (None, "nnunet"):
        raise UserError(f"like={like}: use like=nnunet, or leave it out")
    composed = compose.compose_tree(overrides)
    given = _given(composed)
    config = _config(composed, given)
    given -= {f"model.{name}" for name in ("kernels", "strides") if getattr(config.model, name) == "auto"}
    unkept = sorted(given - options_with("kept").keys())
    if unkept:
        raise UserError(f"{unkept[0]}: a plan does not keep this; give it to train.py")
    if config.plan is not None:
        raise UserError(f"plan={config.plan}: is made by this command; give it to train.py")
    if config.model.path is not None:
        raise UserError("model.path: only networks of the package are planned for data; see plan --network")
    out: Path = arguments.out or Path("plan.yaml")
    if out.is_dir():
        raise UserError(f"{out}: is a folder; -o names a file")
    from unet3d.base.terminal import NARROW, paper, terminal_table
    from unet3d.planning import fingerprint, for_budget, plan

    seconds = plan.seconds_of(own["time"]) if "time" in own else None
    budget = _budget(config.budget, config.device)
    read = fingerprint.read_fingerprint(config.data)
    for title, table in fingerprint.tables(read):
        paper(NARROW).print(terminal_table(title, table))
    if like is not None:
        config, given = plan.like_nnunet(config, given, read)
    draft = for_budget.make_plan(config, given, read, budget, seconds)
    print(f"Plan for {mib(budget)} MiB on {draft.device}")
    for decision in draft.decisions:
        print(f"  {escaped(decision)}")
    write_text(out, draft.as_yaml(shlex.join(["python", "-m", "unet3d", "plan", *arguments.overrides])))
    for line in draft.warnings:
        warn(line)
    words = zip(overrides, compose.parsed(overrides), strict=True)
    of_data = [text for text, word in words if word.key_or_group in options_with("read")]  # no plan keeps them
    train = shlex.join(["python", "train.py", path_option("plan", out), *of_data])
    print(f"written: {escaped(out)}; train it: {escaped(train)}")
    return 0


def _config(composed: compose.Composed, given: Collection[str]) -> Config:
    """Return the config before the plan, whose network has no planned levels yet: a patch is not checked with it.

    Raises UserError, also for what is given of levels whose number is not.
    """
    model = composed.options.model
    values: Any = OmegaConf.to_container(model)
    for name in options_with("by_level"):
        entries = values[name.removeprefix("model.")]
        if name not in given or "model.features" in given or not isinstance(entries, list):
            continue
        is_for_all = "kind" in FACTS[name] and all(isinstance(entry, int) for entry in entries)  # three numbers
        if not is_for_all:
            raise UserError(f"{name}={entries}: has an entry for each level; give model.features, too")
    if model.padding == "valid" and "data.patch" not in given:
        raise UserError("model.padding=valid: a plan chooses patches for model.padding=same; give data.patch=[x,y,z]")
    if model.padding == "valid":
        return compose.load(composed.options)
    config = compose.load(compose.compose_tree([*composed.overrides, ANY_PATCH]).options)
    if "data.patch" in given:
        config.data.patch = list(composed.options.data.patch)
        rules.check_options(config)
    return config


def _given(composed: compose.Composed) -> set[str]:
    """Return the names of the options that the plan keeps, which the command line sets.

    Of the file that `data=` chooses, the layout alone counts: its patch is for phantoms. Raises UserError.
    """
    words = {word.key_or_group for word in compose.parsed(composed.overrides)}
    given = {name for name in composed.names_set("plan") if not name.startswith("data.") or name in words}
    if "data" in words:
        given.add("data.format")
    return given - options_with("read").keys() - options_with("ignored").keys() - {"budget"}


def _budget(text: str | None, device: str) -> int:
    """Return the bytes to plan for; without a budget a share of this machine's memory. Raises UserError."""
    if text is not None:
        return budget_bytes(text)
    import torch

    if device != "cpu" and torch.cuda.is_available():
        return int(SHARE_OF_CARD * torch.cuda.get_device_properties(0).total_memory)
    if device == "cuda":
        raise UserError("budget is not set, and this machine has no GPU to take it from; add budget=11GiB")
    return int(SHARE_OF_HOST * host_bytes())


@process.collector_resting()
def _largest_patches(arguments: argparse.Namespace) -> int:
    """Print a row for each budget, series of patches and schedule. Return the exit code. Raises UserError."""
    config = _network_config(arguments)
    peak_of = _triple("--peak-of", arguments.peak_of)
    if peak_of is not None and config.budget is not None:
        raise UserError("--peak-of is a budget; remove budget=")
    budgets = [budget_bytes(text) for text in (BUDGETS if config.budget is None else (config.budget,))]
    proportions = _triple("--proportions", arguments.proportions)
    with process.loading("torch"):
        from unet3d import build
        from unet3d.base.terminal import WIDE, paper, terminal_table
        from unet3d.planning.steps import CUBE, SCHEDULES, USUAL_BYTES, by_schedule, largest, patches_of_network

    device = build.device_type(config)
    forms = FORMS[device]
    measure, padded, about = _of_module(arguments, config) if arguments.module else _of_config(arguments, config)

    @cache
    def step(schedule: "Schedule", limit: int | None, patch: Triple) -> "Peak":
        amp, recompute = schedule
        return measure(by_schedule(replace(config, amp=amp), recompute, limit), patch)

    rows = []
    if peak_of is not None:
        if padded(peak_of) != peak_of:
            raise UserError(f"--peak-of {sizes_text(peak_of)}: the network takes {sizes_text(padded(peak_of))}, say")
        peak = step(PLAIN_IN_HALF, None, peak_of)
        budgets = [peak.limited]
        rows.append(["", _words(config, PLAIN_IN_HALF), sizes_text(peak_of), "1.00x", *_sizes(peak, forms), "", ""])
    series = [] if proportions == CUBE else [patches_of_network(padded)]
    if proportions is not None:
        series.append(patches_of_network(padded, proportions))
    asked = config.recompute
    schedules = [way for way in SCHEDULES if asked in ("none", way[1]) and (asked == "auto" or way[1] != "auto")]
    for patches, budget, schedule in track(list(product(series, budgets, schedules)), "largest patches"):
        needs = partial(step, schedule, budget if schedule[1] == "auto" else None)
        patch, larger = largest(needs, patches, budget, USUAL_BYTES * SCHEDULES[schedule] * config.batch)
        cells = ["none", "", *("" for _ in forms)]
        if patch is not None:
            voxels = f"{prod(patch) / prod(peak_of):.2f}x" if peak_of else f"{prod(patch):,}"
            cells = [sizes_text(patch), voxels, *_sizes(needs(patch), forms)]
        after = ["too long", ""]
        if larger is not None:
            after = [sizes_text(larger), mib(needs(larger).limited)]
        rows.append([rounded(budget), _words(config, schedule), *cells, *after])
    print(escaped(f"{about}; batch {config.batch}, on {device}"))
    compared = COMPARED[device]
    table = Table(["budget", "schedule", "largest", "voxels", *forms, "next", compared], rows)
    paper(WIDE).print(terminal_table("Largest patch, predicted peak of a step (MiB)", table))
    simulated = step.cache_info().currsize
    print(f"By bytes {compared}, each patch fits and the next larger one does not: {simulated} steps simulated.")
    return 0


def rounded(size: int) -> str:
    """Return bytes as `11 GiB`, `5.21 GiB`, `64 MiB` or `1 KiB`."""
    unit = next((unit for unit, bytes_of_one in UNITS.items() if size >= bytes_of_one), "KiB")
    number = f"{size / UNITS[unit]:.2f}"
    return f"{number.rstrip('0').rstrip('.')} {unit}"


def _words(config: Config, schedule: tuple[bool, str]) -> str:
    """Return the type and the plan of a schedule, as `bf16 lean`."""
    amp, recompute = schedule
    name = "float32"
    if amp:
        name = "bf16" if config.amp_dtype == "auto" else config.amp_dtype
    return name if recompute == "none" else f"{name} {recompute}"


def _sizes(peak: "Peak", forms: Sequence[str]) -> list[str]:
    return [mib(getattr(peak, form)) for form in forms]


def _network_config(arguments: argparse.Namespace) -> Config:
    """Return the config of the steps that are asked for. Raises UserError."""
    if (arguments.network is None) == (arguments.module is None):
        raise UserError("plan: name one of --network nnunet, --network MODEL and --module package.module:name")
    words = ["batch=2", ON_CUDA]
    if arguments.module is not None:
        refuse_for_module(arguments.overrides, "plan")
        if arguments.multiple is not None and arguments.multiple < 1:
            raise UserError(f"--multiple {arguments.multiple}: give voxels, from 1 on")
    else:
        if arguments.args is not None or arguments.multiple is not None:
            raise UserError("--args and --multiple are of --module; remove them: the strides of --network are known")
        if arguments.channels < 1 or arguments.classes < 2:
            raise UserError("--channels is 1 or more, --classes, with the background, 2 or more")
        network = NNUNET_NETWORK if arguments.network == NNUNET else arguments.network
        words += [f"model={network}", f"model.in_channels={arguments.channels}", f"model.classes={arguments.classes}"]
        model = compose.compose_tree([*words, *arguments.overrides]).options.model
        if model.padding == "valid" or model.path is not None:
            raise UserError("--network: takes networks of the package with model.padding=same; others by --module")
        words += AS_NNUNET
    config = config_with_warnings([*words, *arguments.overrides])
    if config.ckpt:
        raise UserError("plan compares schedules of recompute; remove ckpt")
    if config.recompute == "auto" and config.budget is None:
        raise UserError("recompute=auto takes what a budget allows; add budget=11GiB, say")
    if config.recompute == "auto" and arguments.module is not None:
        raise UserError("recompute=auto is of --network; with --module take lean or tiles")
    return config


def _of_config(arguments: argparse.Namespace, config: Config) -> "tuple[MeasureStep, Padding, str]":
    """Return the measure of steps of a config's network, which patches it takes, and a line about it.

    Depth and widths of nnU-Net's network follow the patch by its rules, for cubic voxels; else they are the config's.
    """
    from unet3d import build
    from unet3d.model.architecture import levels_of
    from unet3d.planning.steps import VOXEL, measure_config, padded_by_rules, padded_to

    def by_rules(patch: Triple) -> Model:
        levels = levels_of(VOXEL, patch)
        kernels, strides = (list(map(list, sizes)) for sizes in levels)
        return replace(config.model, features=levels.features, kernels=kernels, strides=strides)

    if arguments.network == NNUNET:
        about = "nnU-Net's network: depth by its rules for the patch, 32 to 320 channels, deep supervision"
        return measure_config(by_rules), padded_by_rules, about
    model = build.model_config_from_headers(config)
    strides = geometry.strides(model)
    units = [prod(stride[axis] for stride in strides) for axis in range(3)]
    return measure_config(lambda _: model), padded_to(units), f"{len(model.features)} levels"


def _of_module(arguments: argparse.Namespace, config: Config) -> "tuple[MeasureStep, Padding, str]":
    """Return the measure of steps of any network, which patches are tried, and a line about it. Raises UserError."""
    from unet3d.memory.any_network import OwnNetwork
    from unet3d.memory.meter import peak_of
    from unet3d.planning.steps import padded_to

    own = OwnNetwork(arguments.module, network_keywords(arguments.args))

    def measure(config: Config, patch: Triple) -> "Peak":
        shape = (config.batch, arguments.channels, *patch)
        return peak_of(own.explain(shape, config).meter.ledger)

    unit = arguments.multiple or MODULE_MULTIPLE
    return measure, padded_to((unit, unit, unit)), f"{own.path}: patches of multiples of {unit} voxels"


def _triple(flag: str, text: str | None) -> Triple | None:
    """Return three lengths given as 160x192x160. Raises UserError."""
    if text is None:
        return None
    if PATCH.fullmatch(text) is None:
        raise UserError(f"{flag} {text}: give three lengths, such as 160x192x160")
    x, y, z = (int(length) for length in text.split("x"))
    return x, y, z
