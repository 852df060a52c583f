"""Random networks, and random options of our own: equal to plain, by random schedules and by those of plans."""

import copy
import math
import random
from typing import Any

import pytest
import torch
from equality import assert_equal, assert_same, difference, no_scratch, run, traced_once
from graphs import RandomNetwork
from torch.utils._pytree import tree_leaves

from unet3d.base.errors import UserError, reason
from unet3d.config.rules import check_model, check_outputs, check_patch
from unet3d.config.schema import Config, Model
from unet3d.model import geometry
from unet3d.model.unet import UNet3D
from unet3d.recomputing import module, prepare, search
from unet3d.recomputing.module import Recomputed, schedules_of
from unet3d.recomputing.program import PLANS

GRAPHS = 20
CONFIGS = 40  # of our network
CLOSE = 100  # times the usual tolerance
DRAWN = 30  # one of so many goes by schedules that are drawn at random, too, and as on a GPU
MOST_VOXELS = 1500


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(GRAPHS))
def test_random_networks_are_plain(seed: int) -> None:
    draw = random.Random(seed)
    shape = [draw.randrange(4, 8) for _ in range(3)]
    shape[draw.randrange(3)] = draw.randrange(8, 15)
    torch.manual_seed(seed)
    image = torch.randn(draw.choice([1, 2]), draw.choice([1, 2]), *shape)
    network = RandomNetwork(seed, draw.choice([3, 5, 8]), image)
    assert_equal(network, image, seeds=[seed], tiles=[draw.choice([3, 6, 20])])


OPTIONS: dict[str, tuple[object, ...]] = {
    "padding": ("same", "same", "same", "valid"),
    "conv_bias": (True, False),
    "widen": ("first", "second"),
    "norm": ("instance", "batch", "batch_current", "group", "none"),
    "norm_affine": (True, False),
    "groups": (1, 2),
    "activation": ("relu", "leaky_relu", "prelu", "silu", "swish", "swish_lean"),
    "inplace": (True, False),
    "downsampling": ("max_pool", "strided_conv"),
    "upsampling": ("transposed", "trilinear", "nearest"),
    "up_reduce": (True, False),
    "up_bias": (True, False),
    "residual": (True, False),
    "dropout": (0.0, 0.0, 0.3),
    "deep_supervision": (True, False),
    "regions": (None, None, [[1, 2], [2]]),
}


def drawn_config(draw: random.Random) -> Config:
    """Return options of our network that go together, with a patch and a batch."""
    while True:
        levels = draw.choice([1, 2, 2, 2, 3])
        options: dict[str, Any] = {name: draw.choice(choices) for name, choices in OPTIONS.items()}
        options["features"] = [draw.choice([2, 4]) for _ in range(levels)]
        options["decoder"] = draw.choice([None, None, [draw.choice([2, 4]) for _ in range(levels - 1)]])
        options["blocks"] = draw.choice([None, [draw.choice([1, 1, 2]) for _ in range(levels)]])
        options["kernels"] = [draw.choice([1, 3, 3, [1, 3, 3], [3, 1, 3], [3, 3, 1], 5]) for _ in range(levels)]
        options["strides"] = [draw.choice([2, 2, 3, [1, 2, 2], [2, 1, 3], [2, 2, 1], 1]) for _ in range(levels - 1)]
        if options["regions"] is not None:
            options["regions_class_order"] = [1, 2]
        options["classes"] = 2 if options["regions"] is not None else 3
        config = Config(model=Model(in_channels=draw.choice([1, 2]), **options), batch=draw.choice([1, 2]))
        config.data.patch = [draw.randrange(3, 10) for _ in range(3)]
        config.data.patch[draw.randrange(3)] = draw.randrange(8, 16)
        try:
            check_outputs(config.model)
            check_model(config.model)
            if config.model.padding == "valid":
                config.data.patch = [_next_valid(config, axis) for axis in range(3)]
            check_patch(config.model, config.data, config.inference.mirror, config.batch)
        except UserError:
            continue
        if math.prod(config.data.patch) <= MOST_VOXELS:
            return config


def _next_valid(config: Config, axis: int) -> int:
    longer = range(config.data.patch[axis], 100)
    return next(length for length in longer if geometry.lengths(length, config.model, axis))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, CONFIGS, 20))
def test_random_options_of_ours_are_plain(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each plan, whether it saves memory or not: outputs, gradients, buffers, and evaluation after the step."""
    monkeypatch.setattr(search, "TRIES", 2)
    monkeypatch.setattr(module, "plain_bytes", lambda *_: None)
    monkeypatch.setattr(prepare, "scratch_bytes", no_scratch)
    for seed in range(first, first + 20):
        try:
            _compare(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {reason(error)}") from error


def _compare(seed: int) -> None:
    draw = random.Random(seed)
    config = drawn_config(draw)
    torch.manual_seed(seed)
    model = UNet3D(config.model).double().train()
    for parameter in model.parameters():  # Also of norms that begin as 0.
        torch.nn.init.normal_(parameter, std=0.5)
    image = torch.randn(config.batch, config.model.in_channels or 1, *config.data.patch).double()
    plain = copy.deepcopy(model)
    left = run(plain, image)
    with torch.no_grad():
        expected = tree_leaves(plain.eval()(image))
    with traced_once():
        finder = schedules_of(Recomputed(model))
        program = finder.program(image.clone().requires_grad_())
        budget = program.fixed_bytes + draw.choice(program.schedules).peak_bytes
        for plan in PLANS:
            network = Recomputed(copy.deepcopy(model), plan, budget if plan == "auto" else None)
            schedules_of(network).prepared = finder.prepared
            assert_same(run(network, image), left, CLOSE)
            with torch.no_grad():
                assert not difference(expected, tree_leaves(network.eval()(image)), CLOSE)
        assert len(finder.prepared) == 1
        if seed % DRAWN == 0:
            assert_equal(model, image, seeds=[seed], tiles=[4])
