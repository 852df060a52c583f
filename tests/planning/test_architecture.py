"""The rules from sizes to spacing, kernels, strides and depth, and `like=nnunet`: what nnU-Net's own planner gives."""

from typing import NamedTuple

import pytest

from unet3d.model.architecture import Levels, architecture, levels_of, target_spacing
from unet3d.model.geometry import Triple
from unet3d.planning.steps import nnunet_plan


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
    assert Levels([(3, 3, 3)] * 7, []).features == [32, 64, 128, 256, 320, 320, 320]


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
    assert len(planned.levels.kernels) == 4
    assert planned.levels.units == (8, 8, 8)
    resampled = architecture([(10, 10, 10), (20, 20, 20)], [(2, 2, 2), (1, 1, 1)], spacing=(1, 1, 1))
    assert resampled.shape == (20, 20, 20)
    assert resampled.patch == (20, 20, 20)


CASES = 100


class Golden(NamedTuple):
    """What nnU-Net's planner (nnunetv2 2.8.1) gave for a data set. Axes z, y, x."""

    shape: Triple  # median (voxels)
    spacing: tuple[float, float, float]  # mm
    classes: int
    gigabytes: int  # its target
    patch: Triple
    batch: int
    levels: int
    flat_kernels: int  # levels from the first on whose kernels are (1, 3, 3); others are (3, 3, 3)
    flat_strides: tuple[int, ...]  # numbers, from 1 on, of strides that are (1, 2, 2); others are (2, 2, 2)


PLANS = (
    Golden((36, 50, 35), (1, 1, 1), 3, 8, (40, 56, 40), 4, 4, 0, ()),
    Golden((36, 50, 35), (1, 1, 1), 3, 24, (40, 56, 40), 4, 4, 0, ()),
    Golden((138, 169, 138), (1, 1, 1), 4, 8, (128, 128, 128), 2, 6, 0, ()),
    Golden((138, 169, 138), (1, 1, 1), 4, 24, (160, 192, 160), 3, 6, 0, ()),
    Golden((115, 320, 232), (1.37, 1.25, 1.25), 2, 8, (80, 192, 160), 2, 6, 0, (5,)),
    Golden((115, 320, 232), (1.37, 1.25, 1.25), 2, 24, (112, 288, 224), 2, 6, 0, (5,)),
    Golden((20, 320, 319), (3.6, 0.62, 0.62), 3, 8, (20, 320, 256), 2, 7, 2, (1, 2, 5, 6)),
    Golden((20, 320, 319), (3.6, 0.62, 0.62), 3, 24, (20, 320, 320), 5, 7, 2, (1, 2, 5, 6)),
    Golden((96, 512, 512), (2.5, 0.8, 0.8), 3, 8, (40, 224, 224), 2, 6, 1, (1, 5)),
    Golden((96, 512, 512), (2.5, 0.8, 0.8), 3, 24, (56, 320, 320), 2, 7, 1, (1, 5, 6)),
    Golden((187, 512, 512), (1.6, 0.79, 0.79), 2, 8, (64, 192, 160), 2, 6, 1, (1,)),
    Golden((187, 512, 512), (1.6, 0.79, 0.79), 2, 24, (80, 256, 256), 2, 7, 1, (1, 6)),
    Golden((482, 512, 512), (1, 0.77, 0.77), 3, 8, (128, 128, 128), 2, 6, 0, ()),
    Golden((482, 512, 512), (1, 0.77, 0.77), 3, 24, (192, 192, 192), 2, 6, 0, ()),
    Golden((26, 320, 150), (3, 1, 1), 5, 8, (28, 320, 160), 3, 6, 1, (1, 4, 5)),
    Golden((26, 320, 150), (3, 1, 1), 5, 24, (28, 320, 160), 4, 6, 1, (1, 4, 5)),
)


@pytest.mark.parametrize("golden", PLANS)
def test_like_nnunet_plans_what_nnunet_plans(golden: Golden) -> None:
    kernels: list[Triple] = [(3, 3, 3)] * golden.levels
    kernels[: golden.flat_kernels] = [(3, 3, 1)] * golden.flat_kernels
    strides: list[Triple] = []
    for number in range(1, golden.levels):
        strides.append((2, 2, 1) if number in golden.flat_strides else (2, 2, 2))
    shape = golden.shape[::-1]
    spacing = golden.spacing[::-1]
    plan = nnunet_plan([shape], [spacing], golden.classes, golden.gigabytes, CASES)
    assert plan.spacing == spacing
    assert plan.patch == golden.patch[::-1]
    assert plan.batch == golden.batch
    assert plan.levels.kernels == kernels
    assert plan.levels.strides == strides
    by_rules = architecture([shape], [spacing], plan.patch)  # what unet3d makes of the same patch
    assert by_rules.levels == plan.levels
    assert by_rules.patch == plan.patch
    assert len(plan.levels.features) == golden.levels


def test_axes_may_come_in_any_order() -> None:
    first = architecture([(20, 320, 319)], [(3.6, 0.62, 0.62)], (20, 320, 256)).levels
    last = architecture([(319, 320, 20)], [(0.62, 0.62, 3.6)], (256, 320, 20)).levels
    assert last.kernels == [kernel[::-1] for kernel in first.kernels]
    assert last.strides == [stride[::-1] for stride in first.strides]
