"""`unet3d plan` without data: a table of the largest patches that a network trains on, each verified by simulation.

Arguments are checked before torch loads.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from unet3d.base import process
from unet3d.base.errors import UserError, escaped
from unet3d.base.progress import counting
from unet3d.base.types import MIB, Table, budget_bytes, mib
from unet3d.cli.commands import config_with_warnings
from unet3d.cli.memory import network_keywords, refuse_for_module
from unet3d.config import compose
from unet3d.config.schema import Config, Model
from unet3d.model import geometry
from unet3d.model.geometry import Triple

if TYPE_CHECKING:
    from unet3d.memory.peak import Peak
    from unet3d.planning.patches import Padding
    from unet3d.planning.steps import MeasureStep, Schedule, Search

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
    parser.add_argument("--args", default="{}", metavar="JSON", help="keywords that make the network (needs --module)")
    parser.add_argument("--channels", type=int, default=1, metavar="N", help="image channels (1)")
    parser.add_argument("--classes", type=int, default=2, metavar="N", help="with background (2; needs --network)")
    parser.add_argument("--proportions", metavar="AxBxC", help="also patches of these proportions, such as 160x192x160")
    peak_of = "in place of budget=: what a step with amp=true needs for this patch"
    parser.add_argument("--peak-of", metavar="AxBxC", help=peak_of)
    multiple = "patch lengths are multiples of N voxels (16; needs --module)"
    parser.add_argument("--multiple", type=int, metavar="N", help=multiple)


def run(arguments: argparse.Namespace) -> int:
    """Print a row for each budget, series of patches and schedule. Return the exit code. Raises UserError."""
    config = _config(arguments)
    multiple = arguments.multiple
    if multiple is not None and (arguments.module is None or multiple < 1):
        raise UserError(f"--multiple {multiple}: voxels, from 1 on, of --module; other networks' strides are known")
    peak_of = _triple("--peak-of", arguments.peak_of)
    if peak_of is not None and config.budget is not None:
        raise UserError("--peak-of is a budget; remove budget=")
    budgets = [budget_bytes(text) for text in (BUDGETS if config.budget is None else (config.budget,))]
    proportions = _triple("--proportions", arguments.proportions)
    with process.loading("torch"):
        from unet3d import build
        from unet3d.base.terminal import WIDE, paper, terminal_table
        from unet3d.planning.patches import CUBE, patches_of_network
        from unet3d.planning.steps import SCHEDULES, Search

    device = build.device_type(config)
    forms = FORMS[device]
    measure, padded, about = _of_module(arguments, config) if arguments.module else _of_config(arguments, config)
    search = Search(config, measure)
    rows = []
    if peak_of is not None:
        if padded(peak_of) != peak_of:
            raise UserError(f"--peak-of {shown(peak_of)}: the network takes {shown(padded(peak_of))}, say")
        peak = search.needs(PLAIN_IN_HALF, peak_of, 0)
        budgets = [peak.limited]
        rows.append(["", _words(config, PLAIN_IN_HALF), shown(peak_of), "1.00x", *_sizes(peak, forms), "", ""])
    series = [] if proportions == CUBE else [patches_of_network(padded)]
    if proportions is not None:
        series.append(patches_of_network(padded, proportions))
    asked = config.recompute
    schedules = [way for way in SCHEDULES if asked in ("none", way[1]) and (asked == "auto" or way[1] != "auto")]
    with counting("largest patches", len(budgets) * len(series) * len(schedules)) as counter:
        for patches in series:
            for budget in budgets:
                for schedule in schedules:
                    rows.append(_row(search, patches, schedule, budget, peak_of, forms))
                    counter.advance()
    print(escaped(f"{about}; batch {config.batch}, on {device}"))
    compared = COMPARED[device]
    table = Table(["budget", "schedule", "largest", "voxels", *forms, "next", compared], rows)
    paper(WIDE).print(terminal_table("Largest patch, predicted peak of a step (MiB)", table))
    simulated = f"{len(search.peaks)} steps simulated"
    print(f"By bytes {compared}, each patch fits and the next larger one does not: {simulated}.")
    return 0


def _row(
    search: "Search",
    patches: Sequence[Triple],
    schedule: "Schedule",
    budget: int,
    peak_of: Triple | None,
    forms: Sequence[str],
) -> list[str]:
    """Return the row of a budget and a schedule, with peaks in these forms; voxels are for one of `peak_of`."""
    patch, larger = search.largest(schedule, patches, budget)
    row = [rounded(budget), _words(search.config, schedule)]
    if patch is None:
        row += ["none", "", *("" for _ in forms)]
    else:
        voxels = f"{prod(patch) / prod(peak_of):.2f}x" if peak_of else f"{prod(patch):,}"
        row += [shown(patch), voxels, *_sizes(search.needs(schedule, patch, budget), forms)]
    if larger is None:
        return [*row, "too long", ""]
    return [*row, shown(larger), mib(search.needs(schedule, larger, budget).limited)]


def _words(config: Config, schedule: "Schedule") -> str:
    """Return the type and the plan of a schedule, as `bf16 lean`."""
    amp, recompute = schedule
    name = "float32"
    if amp:
        name = "bf16" if config.amp_dtype == "auto" else config.amp_dtype
    return name if recompute == "none" else f"{name} {recompute}"


def _sizes(peak: "Peak", forms: Sequence[str]) -> list[str]:
    return [mib(getattr(peak, form)) for form in forms]


def rounded(size: int) -> str:
    """Return bytes as `11 GiB`, `5.21 GiB`, `64 MiB` or `1 KiB`."""
    unit = "GiB" if size >= 2**30 else "MiB" if size >= MIB else "KiB"
    number = f"{size / UNITS[unit]:.2f}"
    return f"{number.rstrip('0').rstrip('.')} {unit}"


def shown(patch: Sequence[int]) -> str:
    """Return 160x192x160."""
    return "x".join(map(str, patch))


def _config(arguments: argparse.Namespace) -> Config:
    """Return the config of the steps that are asked for. Raises UserError."""
    if (arguments.network is None) == (arguments.module is None):
        raise UserError("plan: name one of --network nnunet, --network MODEL and --module package.module:name")
    overrides = list(arguments.overrides)
    if arguments.module is None:
        config = _network_config(arguments, overrides)
    else:
        refuse_for_module(overrides, "plan")
        config = config_with_warnings(["batch=2", ON_CUDA, *overrides])
    if config.ckpt:
        raise UserError("plan compares schedules of recompute; remove ckpt")
    if config.recompute == "auto" and config.budget is None:
        raise UserError("recompute=auto takes what a budget allows; add budget=11GiB, say")
    if config.recompute == "auto" and arguments.module is not None:
        raise UserError("recompute=auto is of --network; with --module take lean or tiles")
    return config


def _network_config(arguments: argparse.Namespace, overrides: Sequence[str]) -> Config:
    """Return the config of a network of the package. Raises UserError."""
    if arguments.args != "{}":
        raise UserError("--args is of --module; remove it")
    if arguments.channels < 1 or arguments.classes < 2:
        raise UserError("--channels is 1 or more, --classes, with the background, 2 or more")
    is_nnunet = arguments.network == NNUNET
    words = [f"model={NNUNET_NETWORK if is_nnunet else arguments.network}"]
    words += [f"model.in_channels={arguments.channels}", f"model.classes={arguments.classes}"]
    if compose.compose_tree([*words, *overrides]).options.model.padding == "valid":
        raise UserError(f"--network {arguments.network}: takes networks with model.padding=same; others by --module")
    return config_with_warnings([*words, *AS_NNUNET, ON_CUDA, *overrides])


def _of_config(arguments: argparse.Namespace, config: Config) -> "tuple[MeasureStep, Padding, str]":
    """Return the measure of steps of a config's network, which patches it takes, and a line about it.

    Depth and widths of nnU-Net's network follow the patch by its rules, for cubic voxels; else they are the config's.
    """
    from unet3d import build
    from unet3d.model.architecture import levels_of
    from unet3d.planning.patches import VOXEL, padded_by_rules, padded_to
    from unet3d.planning.steps import measure_config

    def by_rules(patch: Triple) -> Model:
        levels = levels_of(VOXEL, patch)
        kernels = [list(kernel) for kernel in levels.kernels]
        strides = [list(stride) for stride in levels.strides]
        return replace(config.model, features=levels.features, kernels=kernels, strides=strides)

    if arguments.network == NNUNET:
        about = "nnU-Net's network: depth by its rules for the patch, 32 to 320 channels, deep supervision"
        return measure_config(by_rules), padded_by_rules, about
    model = build.model_config_from_headers(config)
    if not model.features or model.padding != "same":
        raise UserError("--network: takes networks of the package with model.padding=same; others by --module")
    strides = geometry.strides(model)
    units = [prod(stride[axis] for stride in strides) for axis in range(3)]
    return measure_config(lambda _: model), padded_to(units), f"{len(model.features)} levels"


def _of_module(arguments: argparse.Namespace, config: Config) -> "tuple[MeasureStep, Padding, str]":
    """Return the measure of steps of any network, which patches are tried, and a line about it. Raises UserError."""
    from unet3d.cli import memory_of_module
    from unet3d.memory.peak import peak_of
    from unet3d.planning.patches import padded_to
    from unet3d.recomputing.module import Recomputed, schedules_of

    path = arguments.module
    network = memory_of_module.made(path, network_keywords(arguments.args)).train()
    prepared: dict[Any, Any] = {}  # Programs, which the schedules of a patch share.

    def measure(config: Config, patch: Triple) -> "Peak":
        trained = network
        if config.recompute != "none":
            plan: Any = config.recompute
            trained = Recomputed(network, plan)
            schedules_of(trained).prepared = prepared
        shape = (config.batch, arguments.channels, *patch)
        step_config = replace(config, recompute="none")
        return peak_of(memory_of_module.prediction(path, trained, shape, step_config).meter.ledger)

    unit = arguments.multiple or MODULE_MULTIPLE
    return measure, padded_to((unit, unit, unit)), f"{path}: patches of multiples of {unit} voxels"


def _triple(flag: str, text: str | None) -> Triple | None:
    """Return three lengths given as 160x192x160. Raises UserError."""
    if text is None:
        return None
    if PATCH.fullmatch(text) is None:
        raise UserError(f"{flag} {text}: give three lengths, such as 160x192x160")
    x, y, z = (int(length) for length in text.split("x"))
    return x, y, z
