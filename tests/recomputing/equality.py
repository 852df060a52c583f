"""Whether a network that recomputes is the network: outputs, gradients and buffers of a pass, compared to plain's."""

import copy
import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from soundness import is_sound
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from unet3d.recomputing import module, prepare, search
from unet3d.recomputing.compiler import Sizes, Workspace, mask_of
from unet3d.recomputing.graph import Graph
from unet3d.recomputing.module import Recomputed
from unet3d.recomputing.program import Program
from unet3d.recomputing.rules import normalisation
from unet3d.recomputing.search import Schedule, compile_schedule

# Of numbers of a type, relative to the largest number around, or to 1.
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 0.01}
Tree = dict[str, Any]


def run(network: nn.Module, image: Tensor) -> Tree:
    """Return what a pass leaves; each number of each output has a weight of its own in the loss."""
    leaf = image.clone().requires_grad_()
    torch.manual_seed(5)  # for dropout
    outputs = [output for output in tree_leaves(network(leaf)) if isinstance(output, Tensor)]
    generator = torch.Generator().manual_seed(6)
    loss = torch.zeros((), dtype=image.dtype)
    for output in outputs:
        loss = loss + (output * torch.randn(output.shape, generator=generator, dtype=output.dtype)).sum()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in network.named_parameters()}
    outputs = [output.detach() for output in outputs]
    return {
        "outputs": outputs,
        "gradients": {**gradients, "image": leaf.grad},
        "buffers": dict(network.named_buffers()),
    }


def assert_same(result: Tree, plain: Tree, close: float = 1) -> None:
    """Assert that two passes left the same; `close`: times the usual tolerance."""
    for kind, expected in plain.items():
        assert all(leaf.isfinite().all() for leaf in tree_leaves(expected) if leaf is not None), kind
        assert not difference(expected, result[kind], close), kind


def difference(plain: Any, found: Any, close: float = 1) -> str:
    """Return in words where two trees of tensors and words are not the same; empty if they are."""
    (expected, form), (leaves, other) = tree_flatten(plain), tree_flatten(found)
    if form != other:
        return f"{found!r:.400}, plain {plain!r:.400}"
    numbers = [leaf.double().nan_to_num(posinf=0, neginf=0) for leaf in expected if isinstance(leaf, Tensor)]
    scale = max([1.0, *(float(leaf.abs().max()) for leaf in numbers if leaf.numel())])
    for one, two in zip(expected, leaves, strict=True):
        if not is_same(one, two, close * scale):
            return f"{two!r:.400}, plain {one!r:.400}"
    return ""


def is_same(one: Any, two: Any, scale: float) -> bool:
    """Return whether two leaves of trees agree: types, shapes, and numbers up to a share of a scale."""
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return type(one) is type(two) and one == two
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    return torch.allclose(one.double(), two.double(), rtol=0, atol=CLOSE.get(one.dtype, 0) * scale, equal_nan=True)


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
        for name in ("TILES", "FEWEST_TILES", "CUDA_TILES", "CUDA_MOST_TILES"):
            patch.setattr(prepare, name, tiles)
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
