"""The rules from sizes to spacing, kernels, strides and depth: nnU-Net's, on the fingerprints it was run on."""

import pytest

from unet3d.model.geometry import Triple
from unet3d.planning.architecture import architecture, levels_of, target_spacing, widths


def test_strides_and_kernels_from_spacing() -> None:
    """1 x 1 x 5 mm: the coarse axis waits until the others are as coarse."""
    kernels, strides = levels_of((1, 1, 5), (128, 128, 24), 4)
    assert kernels == [(3, 3, 1), (3, 3, 1), (3, 3, 3), (3, 3, 3)]
    assert strides == [(2, 2, 1), (2, 2, 1), (2, 2, 2)]
    assert levels_of((1, 1, 1), (40, 56, 6), 3).strides == [(2, 2, 1), (2, 2, 1)]


def test_an_axis_alone_is_halved_only_while_it_is_long() -> None:
    assert levels_of((1, 1, 1), (6, 6, 12)).strides == [(1, 1, 2)]
    assert levels_of((1, 1, 1), (6, 6, 11)).strides == []
    assert levels_of((1, 1, 1), (6, 8, 8)).strides == [(1, 2, 2)]


def test_more_levels_than_sizes_allow_are_not_halved() -> None:
    kernels, strides = levels_of((1, 1, 9), (8, 8, 8), 4)
    assert strides == [(2, 2, 1), (1, 1, 1), (1, 1, 1)]
    assert kernels == [(3, 3, 1), (3, 3, 3), (3, 3, 3), (3, 3, 3)]


def test_widths_double_up_to_the_most() -> None:
    assert widths(7) == [32, 64, 128, 256, 320, 320, 320]


def test_the_spacing_is_the_median_and_finer_along_a_coarse_axis() -> None:
    shapes = [(20, 320, 320)] * 11
    thick = [(mm, 0.6, 0.6) for mm in (3.0, 3.3, *[5.0] * 9)]
    assert target_spacing(shapes, thick) == pytest.approx((3.3, 0.6, 0.6))
    assert target_spacing([(200, 320, 320)] * 11, thick) == (5.0, 0.6, 0.6)  # enough voxels: the median
    thin = [(mm, 0.6, 0.6) for mm in (0.1, 0.2, *[5.0] * 9)]
    assert target_spacing(shapes, thin) == (0.6, 0.6, 0.6)  # no finer than the others


def test_a_data_set_gets_its_median_shape_and_the_patch_that_strides_divide() -> None:
    shapes = [(35, 50, 34), (36, 51, 35), (37, 49, 36), (36, 50, 35)]
    planned = architecture(shapes, [(1, 1, 1)] * 4)
    assert planned.shape == (36, 50, 35)
    assert planned.patch == (40, 56, 40)
    assert planned.depth == 4
    assert planned.levels.units == (8, 8, 8)
    resampled = architecture([(10, 10, 10), (20, 20, 20)], [(2, 2, 2), (1, 1, 1)], spacing=(1, 1, 1))
    assert resampled.shape == (20, 20, 20)
    assert resampled.patch == (20, 20, 20)


# shape (voxels), spacing (mm), patch (voxels); kernels (1, 3, 3) at first, and the strides that are (1, 2, 2), or those
# given; all others are 3 and 2.
PLANS: list[tuple[Triple, tuple[float, float, float], Triple, int, int, dict[int, Triple]]] = [
    ((36, 50, 35), (1, 1, 1), (40, 56, 40), 4, 0, {}),
    ((138, 169, 138), (1, 1, 1), (128, 128, 128), 6, 0, {}),
    ((138, 169, 138), (1, 1, 1), (160, 192, 160), 6, 0, {}),
    ((115, 320, 232), (1.37, 1.25, 1.25), (80, 192, 160), 6, 0, {5: (1, 2, 2)}),
    ((20, 320, 319), (3.6, 0.62, 0.62), (20, 320, 256), 7, 2, dict.fromkeys((1, 2, 5, 6), (1, 2, 2))),
    ((96, 512, 512), (2.5, 0.8, 0.8), (40, 224, 224), 6, 1, dict.fromkeys((1, 5), (1, 2, 2))),
    ((96, 512, 512), (2.5, 0.8, 0.8), (56, 320, 320), 7, 1, dict.fromkeys((1, 5, 6), (1, 2, 2))),
    ((187, 512, 512), (1.6, 0.79, 0.79), (64, 192, 160), 6, 1, {1: (1, 2, 2)}),
    ((187, 512, 512), (1.6, 0.79, 0.79), (80, 256, 256), 7, 1, dict.fromkeys((1, 6), (1, 2, 2))),
    ((482, 512, 512), (1, 0.77, 0.77), (192, 192, 192), 6, 0, {}),
    ((26, 320, 150), (3, 1, 1), (28, 320, 160), 6, 1, dict.fromkeys((1, 4, 5), (1, 2, 2))),
]


@pytest.mark.parametrize(("shape", "spacing", "patch", "depth", "flat", "strides"), PLANS)
def test_rules_give_nnunets_kernels_and_strides(
    shape: Triple,
    spacing: tuple[float, float, float],
    patch: Triple,
    depth: int,
    flat: int,
    strides: dict[int, Triple],
) -> None:
    planned = architecture([shape], [spacing], patch)
    assert planned.spacing == spacing
    assert planned.patch == patch
    assert planned.depth == depth
    assert planned.levels.kernels == [(1, 3, 3)] * flat + [(3, 3, 3)] * (depth - flat)
    assert planned.levels.strides == [strides.get(number, (2, 2, 2)) for number in range(1, depth)]


def test_axes_may_come_in_any_order() -> None:
    first = architecture([(20, 320, 319)], [(3.6, 0.62, 0.62)], (20, 320, 256)).levels
    last = architecture([(319, 320, 20)], [(0.62, 0.62, 3.6)], (256, 320, 20)).levels
    assert last.kernels == [kernel[::-1] for kernel in first.kernels]
    assert last.strides == [stride[::-1] for stride in first.strides]
