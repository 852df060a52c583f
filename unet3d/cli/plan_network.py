"""`unet3d plan` without data: the largest patches that a network trains on. Arguments are checked before torch loads.

A schedule is how a step saves memory: `amp` and `recompute`.
"""

import argparse
import re
from collections.abc import Sequence
from typing import NamedTuple

from unet3d.base.errors import UserError
from unet3d.base.types import budget_bytes
from unet3d.cli.commands import config_with_warnings
from unet3d.cli.memory import network_keywords, refuse_for_module
from unet3d.config import compose
from unet3d.config.schema import Config
from unet3d.model.geometry import Triple

BUDGETS = ("4GiB", "8GiB", "11GiB", "24GiB", "80GiB")
PATCH = re.compile(r"[1-9]\d{0,3}(x[1-9]\d{0,3}){2}")
NNUNET = "nnunet"
NNUNET_NETWORK = "nnunet_hippocampus"  # the config whose blocks are those of nnU-Net's network
# What nnU-Net trains with, and the device that its users have; the command line may say otherwise.
AS_NNUNET = ("optim=sgd", "loss.batch_dice=false", "batch=2")
ON_CUDA = "device=cuda"


class Question(NamedTuple):
    """What is asked for."""

    config: Config
    budgets: tuple[int, ...]  # bytes
    proportions: Triple | None  # of the axes; None: cubes alone
    peak_of: Triple | None  # the patch whose step in nnU-Net's way is the budget
    multiple: int | None  # voxels, of a module's patch
    recompute: str | None  # the only schedule asked for, with mixed precision; None: the usual ones


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
    """Print the largest patches of a network. Return the exit code. Raises UserError."""
    question = _question(arguments)
    from unet3d.cli import network_table

    if arguments.module is None:
        steps, padded, about = network_table.of_config(question.config, arguments.network == NNUNET)
    else:
        steps, padded, about = network_table.of_module(
            arguments.module,
            network_keywords(arguments.args),
            arguments.channels,
            question.multiple,
            question.config,
        )
    network_table.print_largest(
        steps,
        padded,
        about,
        budgets=question.budgets,
        proportions=question.proportions,
        peak_of=question.peak_of,
        recompute=question.recompute,
    )
    return 0


def _question(arguments: argparse.Namespace) -> Question:
    """Return what is asked for. Raises UserError."""
    if (arguments.network is None) == (arguments.module is None):
        raise UserError("plan: name one of --network nnunet, --network MODEL and --module package.module:name")
    overrides = list(arguments.overrides)
    is_module = arguments.module is not None
    config = _module_config(overrides) if is_module else _network_config(arguments, overrides)
    if config.ckpt:
        raise UserError("plan compares schedules of recompute; remove ckpt")
    if config.recompute == "auto" and config.budget is None:
        raise UserError("recompute=auto takes what a budget allows; add budget=11GiB, say")
    if config.recompute == "auto" and is_module:
        raise UserError("recompute=auto is of --network; with --module take lean or tiles")
    multiple = arguments.multiple
    if multiple is not None and (arguments.module is None or multiple < 1):
        raise UserError(f"--multiple {multiple}: voxels, from 1 on, of --module; other networks' strides are known")
    peak_of = _triple("--peak-of", arguments.peak_of)
    if peak_of is not None and config.budget is not None:
        raise UserError("--peak-of is a budget; remove budget=")
    texts = BUDGETS if config.budget is None else (config.budget,)
    return Question(
        config,
        budgets=tuple(budget_bytes(text) for text in texts),
        proportions=_triple("--proportions", arguments.proportions),
        peak_of=peak_of,
        multiple=multiple,
        recompute=None if config.recompute == "none" else config.recompute,
    )


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


def _module_config(overrides: Sequence[str]) -> Config:
    """Return the config of a step of any network. Raises UserError."""
    refuse_for_module(overrides, "plan")
    return config_with_warnings(["batch=2", ON_CUDA, *overrides])


def _triple(flag: str, text: str | None) -> Triple | None:
    """Return three lengths given as 160x192x160. Raises UserError."""
    if text is None:
        return None
    if PATCH.fullmatch(text) is None:
        raise UserError(f"{flag} {text}: give three lengths, such as 160x192x160")
    x, y, z = (int(length) for length in text.split("x"))
    return x, y, z
