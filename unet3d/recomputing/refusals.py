"""Refusals of networks that a schedule cannot repeat. Their lines name the place in the source."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import fx, nn

from unet3d.base.errors import UserError

TORCH = str(Path(torch.__file__).parent) + os.sep
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def refuse_hooks(model: nn.Module) -> None:
    """Raise UserError if a module has hooks: a schedule does not call modules."""
    for path, module in model.named_modules():
        for name in HOOKS:
            if getattr(module, name):
                raise UserError(f"{path or type(model).__name__}: {name[1:]} would not run in recompute; remove them")


def refuse_exchange(model: nn.Module) -> None:
    """Raise UserError if normalisations exchange statistics with other ranks: a schedule makes them again."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for path, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and module.training:
            problem = f"{path or type(model).__name__}: SyncBatchNorm would exchange statistics between ranks again"
            raise UserError(f"{problem} in recompute; train with BatchNorm, InstanceNorm or GroupNorm")


def cannot_trace(model: nn.Module, error: Exception) -> str:
    """Return what torch.export says in a line, where, and what to do."""
    first_line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    place = ""
    frame = error.__traceback__
    while frame is not None:
        path = frame.tb_frame.f_code.co_filename
        if frame.tb_frame.f_code.co_name == "forward" and not path.startswith(TORCH):
            place = f" at {path}:{frame.tb_lineno}"
        frame = frame.tb_next
    problem = f"{type(model).__name__} cannot be traced{place}: {first_line.strip()}"
    return f"{problem}; use torch.utils.checkpoint on its children instead"


def has_contexts(model: nn.Module, node: fx.Node) -> str:
    """Return why operations within a context of their own, which torch.export makes a graph of, are refused."""
    layers = [layer_of(user) for user in node.users]
    layer = next((layer for layer in layers if layer), type(model).__name__)
    return (
        f"{layer}: operations within torch.no_grad() or torch.autocast() in forward cannot be made again; leave it out"
    )


def draws(node: fx.Node, op: str) -> str:
    """Return why an operation that draws random numbers is refused: a second run draws others."""
    layer = layer_of(node) or "the network"
    return f"{layer}: {op} would draw other numbers when it is made again{place_of(node)}; use dropout, or leave it out"


def layer_of(node: fx.Node) -> str:
    """Return the path of the module that calls a node."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return str(paths[-1]) if paths else ""


def place_of(node: fx.Node) -> str:
    """Return where in the source a node is called, in words."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    calls = [line.strip() for line in lines if line.strip().startswith("File ")]
    return f" ({calls[-1]})" if calls else ""
