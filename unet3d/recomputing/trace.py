"""Traces a network by torch.export."""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import torch
from torch import Tensor, nn

from unet3d.base.errors import UserError
from unet3d.recomputing.blocks import marked
from unet3d.recomputing.exported import Reader
from unet3d.recomputing.graph import Graph
from unet3d.recomputing.refusals import (
    cannot_trace,
    refuse_exchange,
    refuse_hooks,
    refuse_replaced_parameters,
)
from unet3d.recomputing.watching import watched


def trace(model: nn.Module, image: Tensor) -> Graph:
    """Return the graph of `model(image)` in its present mode, with the sizes of this image.

    Raises UserError where the network cannot be described so, and names the place.
    """
    refuse_hooks(model, with_root=False)
    refuse_exchange(model)
    refuse_replaced_parameters(model)
    example = image.detach().requires_grad_(image.requires_grad)
    with attributes_stay(model), watched(model) as (twin, watch):
        try:
            with silence(), marked():
                program = torch.export.export(twin, (example,), strict=False)
            return Reader(program, model).graph()
        except UserError:
            raise
        except Exception as error:  # torch.export has no common type of error
            raise UserError(watch.cause or cannot_trace(model, error)) from error


@contextmanager
def silence() -> Iterator[None]:
    """Keep torch.export's remarks on what it cannot trace to itself: the error says it."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what forward keeps in the module
            yield
    finally:
        logging.disable(disabled)


@contextmanager
def attributes_stay(model: nn.Module) -> Iterator[None]:
    """Undo what tracing does to attributes that are no parameters: a list that two modules share becomes two."""
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    lists = [(value, list(value)) for _, known in before for value in known.values() if isinstance(value, list)]
    dicts = [(value, dict(value)) for _, known in before for value in known.values() if isinstance(value, dict)]
    try:
        yield
    finally:
        for attributes, known in [*before, *dicts]:
            attributes.clear()
            attributes.update(known)
        for value, items in lists:
            value[:] = items
