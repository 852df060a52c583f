"""Traces a network by torch.export."""

import io
import logging
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from unet3d.base.errors import UserError, reason
from unet3d.recomputing.blocks import marked
from unet3d.recomputing.exported import Reader
from unet3d.recomputing.graph import Graph
from unet3d.recomputing.refusals import (
    cannot_trace,
    has_known_cause,
    place_in_forward,
    refuse_averages_over_all,
    refuse_exchange,
    refuse_hooks,
    refuse_replaced_parameters,
)
from unet3d.recomputing.watching import watched

WITHOUT_DATA = re.compile(
    r"fake ?tensor|meta|\.numpy\(\)|data pointer|storage", re.IGNORECASE
)  # what real ones do not raise
FACTORS = (2, 4, 8, 16, 32, 64)  # of lengths that a network may ask for


def trace(model: nn.Module, image: Tensor) -> Graph:
    """Return the graph of `model(image)` in its present mode, with the sizes of this image.

    Raises UserError where the network cannot be described so, and names the place.
    """
    refuse_hooks(model, with_root=False)
    refuse_exchange(model)
    refuse_replaced_parameters(model)
    refuse_averages_over_all(model)
    example = image.detach().requires_grad_(image.requires_grad)
    with attributes_stay(model), watched(model) as (twin, watch):
        try:
            with silence(), marked():
                program = torch.export.export(twin, (example,), strict=False)
            return Reader(program, model).graph()
        except UserError:
            raise
        except Exception as error:  # torch.export has no common type of error
            line = watch.cause
            if line is None and not has_known_cause(error):
                line = cannot_take(model, image.shape, image.dtype, image.device)
            raise UserError(line or cannot_trace(model, error)) from error


def cannot_take(
    model: nn.Module, size: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> str | None:
    """Return in a line what the network's own forward raises for images N C D H W of a size and type.

    The line ends with lengths that it takes, where a power of 2 is what these have to be multiples of. None where it
    raises nothing, or where that depends on numbers. Nothing of this has data, and the network stays.
    """
    with silence(), attributes_stay(model), torch.random.fork_rng([]):
        error = _raised(model, size, dtype, device)
        if error is None:
            return None
        image = f"{'x'.join(map(str, size))}, {str(dtype).removeprefix('torch.')}"
        problem = f"{type(model).__name__} cannot take an image of {image}{place_in_forward(error)}: {reason(error)}"
        for factor in FACTORS:
            larger = [*size[:2], *(math.ceil(length / factor) * factor for length in size[2:])]
            if larger != list(size) and _raised(model, larger, dtype, device) is None:
                return f"{problem}; it takes {'x'.join(map(str, larger))}, lengths of multiples of {factor}"
    return problem


def _raised(model: nn.Module, size: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> Exception | None:
    """Return what forward raises for an image, on tensors without data."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
            fake: dict[str, Tensor] = {name: fakes.from_tensor(tensor) for name, tensor in tensors}
            image = torch.empty(tuple(size), dtype=dtype, device=device)
            torch.func.functional_call(model, fake, (image,))
    except ImportError:
        return None
    except Exception as error:  # A network of others may raise anything.
        is_of_data = type(error).__module__ == FakeTensorMode.__module__ or WITHOUT_DATA.search(str(error))
        return None if is_of_data else error
    return None


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
