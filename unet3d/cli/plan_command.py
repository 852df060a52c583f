"""`unet3d plan`: from a folder of volumes and a budget to a plan that train.py keeps. Checked before torch loads."""

import argparse
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from unet3d.base.errors import UserError, escaped
from unet3d.base.files import write_text
from unet3d.base.types import budget_bytes, host_bytes, mib
from unet3d.cli import lifecycle, plan_network
from unet3d.config import compose, rules
from unet3d.config.schema import FACTS, Config, options_with

SHARE_OF_HOST = 0.5  # of this machine's memory, without a budget on a CPU
SHARE_OF_CARD = 0.9  # of a GPU's
ANY_PATCH = "data.patch=[1024,1024,1024]"  # until one is planned: any network takes it
OWN = ("time", "like")  # words that are no options of a run


def run(arguments: argparse.Namespace) -> int:
    """Print the fingerprint of a data set and each decision of its plan; write the plan. Return the exit code.

    With --network or --module, print which patches fit that network instead. Raises UserError.
    """
    if arguments.network is not None or arguments.module is not None:
        if arguments.out is not None:
            raise UserError("-o is for the plan of a data set; remove it, or --network and --module")
        return plan_network.run(arguments)
    overrides = [word for word in arguments.overrides if word.partition("=")[0] not in OWN]
    own = dict(word.partition("=")[::2] for word in arguments.overrides if word not in overrides)
    like = own.get("like")
    if like not in (None, "nnunet"):
        raise UserError(f"like={like}: use like=nnunet, or leave it out")
    composed = compose.compose_tree(overrides)
    given = _given(composed)
    config = _config(composed, given)
    for name in ("model.kernels", "model.strides"):
        if getattr(config.model, name.removeprefix("model.")) == "auto":
            given.discard(name)
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
    from unet3d.planning import fingerprint, plan, timing

    seconds = timing.seconds_of(own["time"]) if "time" in own else None
    budget = _budget(config.budget, config.device)
    read = fingerprint.read_fingerprint(config.data)
    for title, table in fingerprint.tables(read):
        paper(NARROW).print(terminal_table(title, table))
    if like is not None:
        config, given = plan.like_nnunet(config, given, read)
    draft = plan.make_plan(config, given, read, budget, seconds)
    print(f"Plan for {mib(budget)} MiB on {draft.device}")
    for decision in draft.decisions:
        print(f"  {escaped(str(decision))}")
    write_text(out, draft.as_yaml(shlex.join(["python", "-m", "unet3d", "plan", *arguments.overrides])))
    for line in draft.warnings:
        lifecycle.print_error(f"warning: {line}")
    words = zip(overrides, compose.parsed(overrides), strict=True)
    of_data = [text for text, word in words if word.key_or_group in options_with("read")]  # no plan keeps them
    train = shlex.join(["python", "train.py", lifecycle.path_option("plan", out), *of_data])
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
