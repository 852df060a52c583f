"""Refusals of networks that a schedule cannot repeat. Their lines name the place in the source."""

import os
import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch import fx, nn

from unet3d.base.errors import UserError

TORCH = str(Path(torch.__file__).parent) + os.sep
OURS = str(Path(__file__).parent) + os.sep


def refuse_layers(model: nn.Module) -> None:
    """Raise UserError for layers that a trace or a schedule cannot follow.

    Those are tensors in the place of parameters, since torch.export takes none there; running statistics whose weights
    are counted, since a trace would keep the count of its pass; and, over several ranks, normalisations that exchange
    statistics, since a schedule makes them again.
    """
    has_others = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    for path, module in model.named_modules():
        where = path or type(model).__name__
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, nn.Parameter):
                fault = "is a plain tensor in the place of a parameter, as functional_call puts it there"
                name = f"{path}.{name}".removeprefix(".")
                raise UserError(f"{name} {fault}; call the network without recompute so")
        if has_others and isinstance(module, nn.SyncBatchNorm) and module.training:
            fault = "SyncBatchNorm would exchange statistics between ranks again in recompute"
            raise UserError(f"{where}: {fault}; train with BatchNorm, InstanceNorm or GroupNorm")
        is_counted = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None
        if is_counted and module.training and module.track_running_stats:
            fault = "averages by the number of passes, which a schedule would not know"
            raise UserError(f"{where}: {type(module).__name__} with momentum=None {fault}; set its momentum, as 0.1")


# What torch.export says, in parts of its lines, and what that is in words.
CAUSES = (
    (
        "data-dependent",
        "forward branches on a value: what it does depends on the numbers of a tensor, as in `if`, `int()`, an index; "
        "compute with tensors",
    ),
    (".data =", "forward sets .data of a tensor, which recompute would not repeat; change it outside of forward"),
    ("inference_mode", "forward enters torch.inference_mode(); use torch.no_grad() there"),
    (".numpy()", "forward gives a tensor to NumPy; compute with torch"),
    ("in output, which is not a known type", "forward returns {0}; return a tensor, or a list, tuple or dict of them"),
    (
        "fake tensor in the exported program constant's list",
        "forward reads a tensor that is neither a parameter nor a buffer; let register_buffer keep it",
    ),
    ("One of the differentiated Tensors does not require grad", "forward takes gradients by itself"),
)


def cannot_trace(model: nn.Module, error: Exception) -> str:
    """Return in a line what torch.export does not trace, where, and what to do."""
    text = str(error)
    problem = f"{first_line(error)}; use torch.utils.checkpoint on its children instead"
    for part, cause in CAUSES:
        if part in text:
            names = re.findall(r"<class '([^']*)'>", text)
            problem = cause.format(*names or ["an object of its own"])
            break
    return f"{type(model).__name__} cannot be traced{place_in_forward(error)}: {problem}"


def has_known_cause(error: Exception) -> bool:
    """Return whether an error of torch.export is one of those that have words here."""
    return any(part in str(error) for part, _ in CAUSES)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type where it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def place_in_forward(error: BaseException) -> str:
    """Return the line at which an error left the network's own code, in words."""
    place = ""
    is_within = False
    frame = error.__traceback__
    while frame is not None:
        code = frame.tb_frame.f_code
        is_within = is_within or (code.co_name == "forward" and not code.co_filename.startswith((TORCH, OURS)))
        if is_within and not code.co_filename.startswith((TORCH, OURS)):
            place = f" at {code.co_filename}:{frame.tb_lineno}"
        frame = frame.tb_next
    return place


def refusal(node: fx.Node, fault: str, advice: str = "") -> UserError:
    """Return the error about an operation that recompute cannot carry out: the layer, the place, and what to do."""
    return UserError(f"{layer_of(node) or 'the network'}: {fault}{place_of(node)}{advice}")


def layer_of(node: fx.Node) -> str:
    """Return the path of the module that calls a node."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return str(paths[-1]) if paths else ""


def place_of(node: fx.Node) -> str:
    """Return where in the source a node is called, in words."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    calls = [line.strip() for line in lines if line.strip().startswith("File ") and OURS not in line]
    return f" ({calls[-1]})" if calls else ""
