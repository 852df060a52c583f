"""Whether a network that recomputes is the network: outputs, gradients and buffers of a pass, compared to plain's."""

import copy
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from soundness import is_sound
from torch import Tensor, nn
from torch.utils import _pytree

from unet3d.recomputing import module, prepare, search
from unet3d.recomputing.compiler import Sizes, Workspace, mask_of
from unet3d.recomputing.graph import Graph
from unet3d.recomputing.module import Recomputed
from unet3d.recomputing.program import Program
from unet3d.recomputing.rules import normalisation
from unet3d.recomputing.search import Schedule, compile_schedule

CLOSE = 1e-12  # of float64, relative to the largest number of its kind


class Outcome(NamedTuple):
    """What a forward and a backward pass leave."""

    outputs: list[Tensor]
    gradients: Mapping[str, Tensor | None]  # of the parameters by name, and of the image as "image"
    buffers: Mapping[str, Tensor]


def run(network: nn.Module, image: Tensor, image_needs_gradient: bool = True) -> Outcome:
    """Return what a pass leaves; each number of each output has a weight of its own in the loss."""
    leaf = image.clone().requires_grad_(image_needs_gradient)
    torch.manual_seed(5)  # for dropout
    outputs = [output for output in _pytree.tree_leaves(network(leaf)) if isinstance(output, Tensor)]
    generator = torch.Generator().manual_seed(6)
    loss = torch.zeros((), dtype=image.dtype)
    for output in outputs:
        weights = torch.randn(output.shape, generator=generator, dtype=output.dtype)
        loss = loss + (output * weights).sum()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in network.named_parameters()}
    gradients["image"] = leaf.grad
    return Outcome([output.detach() for output in outputs], gradients, dict(network.named_buffers()))


def assert_same(result: Outcome, plain: Outcome, close: float = CLOSE) -> None:
    """Assert that two passes left the same."""
    assert len(result.outputs) == len(plain.outputs)
    for output, expected in zip(result.outputs, plain.outputs, strict=True):
        assert_close(output, expected, close)
    assert list(result.gradients) == list(plain.gradients)
    for name, expected in plain.gradients.items():
        gradient = result.gradients[name]
        assert (gradient is None) == (expected is None), f"{name}: the gradient is {gradient}"
        if gradient is not None and expected is not None:
            assert_close(gradient, expected, close, name, _largest(plain.gradients))
    assert list(result.buffers) == list(plain.buffers)
    for name, expected in plain.buffers.items():
        assert_close(result.buffers[name].double(), expected.double(), close, name)


def assert_close(result: Tensor, expected: Tensor, close: float, name: str = "", scale: float = 1.0) -> None:
    """Assert that shapes, types and numbers agree, these up to a share of the largest."""
    assert result.shape == expected.shape, name
    assert result.dtype == expected.dtype, name
    assert expected.isfinite().all(), name
    scale = max(scale, float(expected.abs().max()))
    difference = float((result - expected).abs().max())
    assert difference <= close * scale, f"{name}: {difference} of {scale}"


def _largest(tensors: Mapping[str, Tensor | None]) -> float:
    return max(float(tensor.abs().max()) for tensor in tensors.values() if tensor is not None)


def assert_equal(model: nn.Module, image: Tensor, seeds: Sequence[int], tiles: Sequence[int] = (8,)) -> None:
    """Assert that a pass in float64 is plain's by schedules that are drawn at random, also where maps are tiles.

    By programs for the CPU and for a GPU: both are carried out here.
    """
    image = image.double()
    model = model.double().train()
    plain = run(copy.deepcopy(model), image)
    with traced_once():
        for seed, number in itertools.product(seeds, tiles):
            with drawn_schedules(seed, number):
                for device_type in ("cpu", "cuda"):
                    recomputed = Recomputed(copy.deepcopy(model), device_type=device_type)
                    assert_same(run(recomputed, image), plain)


@contextmanager
def traced_once() -> Iterator[None]:
    """Let networks that are copies of one another be traced once, unless a graph holds tensors of one of them."""
    traced = prepare.trace  # by a context around this one, perhaps
    known: list[Graph] = []

    def once(network: nn.Module, image: Tensor) -> Graph:
        graph = known[0] if known else traced(network, image)
        if graph.constants:
            return graph
        known[:] = [graph]
        values = copy.deepcopy(replace(graph, out_spec=None))  # a program changes some of them
        return replace(values, out_spec=graph.out_spec)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "trace", once)
        yield


@contextmanager
def drawn_schedules(seed: int, tiles: int, measures: bool = False) -> Iterator[None]:
    """Let networks follow a schedule whose maps stay at random, in so many tiles of the largest map.

    With odd seeds, all maps count as large on a GPU.
    `measures`: what lies beside the maps, too, without which no peak is known.
    """

    def front(sizes: Sizes) -> list[Schedule]:
        schedule = compile_schedule(sizes, drawn_table(sizes.count, seed))
        assert is_sound(sizes, schedule)
        return [schedule]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "front", front)
        patch.setattr(prepare, "TILES", tiles)
        patch.setattr(prepare, "FEWEST_TILES", tiles)
        patch.setattr(prepare, "CUDA_TILES", tiles)
        patch.setattr(prepare, "CUDA_MOST_TILES", tiles)
        patch.setattr(prepare, "CUDA_TILE", 1)
        if seed % 2:
            patch.setattr(normalisation, "LARGE", 1)  # else no map is large enough for kernels that fill a GPU
        patch.setattr(module, "plain_bytes", lambda *_: None)  # or a schedule that needs more would not be taken
        if not measures:
            patch.setattr(prepare, "scratch_bytes", no_scratch)  # it takes longer than the pass
        yield


def no_scratch(program: Program, *_: object) -> list[tuple[Workspace, Workspace]]:
    """Return that nothing lies beside the maps of a program, in the place of `scratch_bytes`."""
    return [(Workspace(0, 0, 0, 0, 0), Workspace(0, 0, 0, 0, 0))] * len(program.maps.maps)


def drawn_table(count: int, seed: int) -> list[int]:
    """Return a random table of the maps that stay in each stage."""
    draw = random.Random(seed)
    share = draw.choice([0.0, 0.1, 0.3, 0.5, 0.8, 1.0])
    return [mask_of(index for index in range(count) if draw.random() < share) for _ in range(count + 1)]
