"""Random networks by random schedules: equal to plain, whatever stays and is made again."""

import random

import pytest
import torch
from equality import assert_equal
from graphs import RandomNetwork

GRAPHS = 20


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, GRAPHS, 5))
def test_random_networks_are_plain(first: int) -> None:
    for seed in range(first, first + 5):
        draw = random.Random(seed)
        network = RandomNetwork(seed, operations=draw.choice([3, 5, 8]))
        shape = [draw.randrange(4, 8) for _ in range(3)]
        shape[draw.randrange(3)] = draw.randrange(8, 15)
        image = torch.randn(draw.choice([1, 2]), network.image_channels, *shape)
        assert_equal(network, image, seeds=[seed], tiles=draw.choice([3, 6, 20]))
