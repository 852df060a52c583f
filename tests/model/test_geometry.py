"""Sizes, strides and kernels in plain integers, compared with the network's."""

from collections.abc import Callable

import pytest
import torch

from unet3d.base.errors import UserError
from unet3d.config.schema import Model
from unet3d.model import geometry
from unet3d.model.unet import UNet3D


@pytest.mark.parametrize("override", ["model.downsampling=max_pool", "model.downsampling=strided_conv"])
@pytest.mark.parametrize("kernels", ["3", "[3,5,1]"])
def test_predicted_size_is_the_networks(options: Callable[..., Model], override: str, kernels: str) -> None:
    model = options("model=unet_tiny", override, f"model.kernels={kernels}", "model.upsampling=nearest")
    model.padding = "valid"
    lengths = [[n for n in range(30, 110) if geometry.lengths(n, model, axis)] for axis in range(3)]
    sizes = [*zip(*lengths, strict=False)][:8]
    assert len(sizes) >= 5
    with torch.device("meta"):
        network = UNet3D(model)
        for size in sizes:
            assert network(torch.empty(1, 1, *size)).shape[2:] == geometry.output_size(size, model)


def test_a_length_that_does_not_fit_names_the_nearest_that_does(options: Callable[..., Model]) -> None:
    model = options("model=cicek2016", "data.patch=[132,132,116]")
    assert geometry.output_size((132, 132, 116), model) == (44, 44, 28)
    with pytest.raises(UserError, match=r"data\.patch=\[132, 132, 116\]"):
        geometry.output_size((130, 131, 116), model)
    with pytest.raises(UserError, match=r"data\.patch=\[92, 132, 116\]"):
        geometry.output_size((8, 132, 116), model)


def test_level_sizes(options: Callable[..., Model]) -> None:
    found = geometry.level_sizes((33, 17, 5), options("model=unet_small"))
    assert found == [(33, 17, 5), (17, 9, 3), (9, 5, 2), (5, 3, 1)]


@pytest.mark.parametrize("value", ["three", [3, 3], [[3, 3], 3, 3], 0, [True, 3, 3]])
def test_malformed_kernels_are_refused(value: object) -> None:
    with pytest.raises(UserError, match=r"^k"):
        geometry.triples("k", value, 3)
