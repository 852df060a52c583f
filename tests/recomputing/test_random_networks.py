"""Random networks by random schedules: equal to plain, whatever stays and is made again."""

import random

import pytest
import torch
from equality import assert_equal
from graphs import RandomNetwork

GRAPHS = 20
FACTORS_OF_THREE = range(6051, 6052), range(6111, 6112), range(6151, 6152)  # of rows by nearest neighbours, in tiles


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [*(range(first, first + 5) for first in range(0, GRAPHS, 5)), *FACTORS_OF_THREE])
def test_random_networks_are_plain(seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        network = RandomNetwork(seed, operations=draw.choice([3, 5, 8]))
        shape = [draw.randrange(4, 8) for _ in range(3)]
        shape[draw.randrange(3)] = draw.randrange(8, 15)
        image = torch.randn(draw.choice([1, 2]), network.image_channels, *shape)
        assert_equal(network, image, seeds=[seed], tiles=draw.choice([3, 6, 20]))
