"""Rules from sizes to a network and its patches, `like=nnunet`, and the search for the largest patch that fits."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from math import prod

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tables import table

from unet3d.memory.meter import Peak
from unet3d.model.architecture import Levels, architecture, levels_of, target_spacing
from unet3d.model.geometry import Triple
from unet3d.planning import steps
from unet3d.planning.steps import nnunet_plan, padded_by_rules, padded_to, patches_of_network, sized_patches


def listed(triples: Sequence[Sequence[int]]) -> str:
    """Return triples as `221 221`."""
    return " ".join("".join(map(str, triple)) for triple in triples)


@pytest.mark.parametrize(
    ("spacing", "size", "count", "strides", "kernels"),
    [
        ((1, 1, 5), (128, 128, 24), 4, "221 221 222", "331 331 333 333"),  # the coarse axis waits for the others
        ((1, 1, 1), (40, 56, 6), 3, "221 221", "333 333 333"),
        ((1, 1, 1), (6, 6, 12), None, "112", "333 333"),  # an axis alone is halved only while it is long
        ((1, 1, 1), (6, 6, 11), None, "", "333"),
        ((1, 1, 1), (6, 8, 8), None, "122", "333 333"),
        ((1, 1, 9), (8, 8, 8), 4, "221 111 111", "331 333 333 333"),  # more levels than sizes allow
    ],
)
def test_strides_and_kernels_follow_from_spacing_and_size(
    spacing: Triple, size: Triple, count: int | None, strides: str, kernels: str
) -> None:
    found = levels_of(spacing, size, count)
    assert (listed(found.strides), listed(found.kernels)) == (strides, kernels)
    turned = levels_of(spacing[::-1], size[::-1], count)
    assert turned.strides == [stride[::-1] for stride in found.strides], "axes may come in any order"


def test_widths_double_up_to_the_most() -> None:
    assert Levels([(3, 3, 3)] * 7, []).features == [32, 64, 128, 256, 320, 320, 320]


@pytest.mark.parametrize(
    ("slices", "thick", "target"),
    [
        (20, (3.0, 3.3), 3.3),
        (200, (3.0, 3.3), 5.0),  # enough voxels: the median
        (20, (0.1, 0.2), 0.6),  # no finer than the others
    ],
)
def test_the_spacing_is_the_median_and_finer_along_a_coarse_axis(
    slices: int, thick: tuple[float, ...], target: float
) -> None:
    spacings = [(mm, 0.6, 0.6) for mm in (*thick, *[5.0] * 9)]
    assert target_spacing([(slices, 320, 320)] * 11, spacings) == pytest.approx((target, 0.6, 0.6))


def test_a_data_set_gets_its_median_shape_and_the_patch_that_strides_divide() -> None:
    planned = architecture([(35, 50, 34), (36, 51, 35), (37, 49, 36), (36, 50, 35)], [(1, 1, 1)] * 4)
    assert (planned.shape, planned.patch, planned.levels.units) == ((36, 50, 35), (40, 56, 40), (8, 8, 8))
    resampled = architecture([(10, 10, 10), (20, 20, 20)], [(2, 2, 2), (1, 1, 1)], spacing=(1, 1, 1))
    assert resampled.shape == resampled.patch == (20, 20, 20)


# What nnU-Net's planner (nnunetv2 2.8.1) gave for 100 cases of a median shape (voxels), spacing (mm) and number of
# classes with a target (GB): patch, batch, strides and kernels. Axes z, y, x.
PLANS = """
    36 50 35    | 1 1 1         | 3 | 8  | 40 56 40    | 4 | 222 222 222             | 333 333 333 333
    36 50 35    | 1 1 1         | 3 | 24 | 40 56 40    | 4 | 222 222 222             | 333 333 333 333
    138 169 138 | 1 1 1         | 4 | 8  | 128 128 128 | 2 | 222 222 222 222 222     | 333 333 333 333 333 333
    138 169 138 | 1 1 1         | 4 | 24 | 160 192 160 | 3 | 222 222 222 222 222     | 333 333 333 333 333 333
    115 320 232 | 1.37 1.25 1.25 | 2 | 8 | 80 192 160  | 2 | 222 222 222 222 122     | 333 333 333 333 333 333
    115 320 232 | 1.37 1.25 1.25 | 2 | 24 | 112 288 224 | 2 | 222 222 222 222 122    | 333 333 333 333 333 333
    20 320 319  | 3.6 0.62 0.62 | 3 | 8  | 20 320 256  | 2 | 122 122 222 222 122 122 | 133 133 333 333 333 333 333
    20 320 319  | 3.6 0.62 0.62 | 3 | 24 | 20 320 320  | 5 | 122 122 222 222 122 122 | 133 133 333 333 333 333 333
    96 512 512  | 2.5 0.8 0.8   | 3 | 8  | 40 224 224  | 2 | 122 222 222 222 122     | 133 333 333 333 333 333
    96 512 512  | 2.5 0.8 0.8   | 3 | 24 | 56 320 320  | 2 | 122 222 222 222 122 122 | 133 333 333 333 333 333 333
    187 512 512 | 1.6 0.79 0.79 | 2 | 8  | 64 192 160  | 2 | 122 222 222 222 222     | 133 333 333 333 333 333
    187 512 512 | 1.6 0.79 0.79 | 2 | 24 | 80 256 256  | 2 | 122 222 222 222 222 122 | 133 333 333 333 333 333 333
    482 512 512 | 1 0.77 0.77   | 3 | 8  | 128 128 128 | 2 | 222 222 222 222 222     | 333 333 333 333 333 333
    482 512 512 | 1 0.77 0.77   | 3 | 24 | 192 192 192 | 2 | 222 222 222 222 222     | 333 333 333 333 333 333
    26 320 150  | 3 1 1         | 5 | 8  | 28 320 160  | 3 | 122 222 222 122 122     | 133 333 333 333 333 333
    26 320 150  | 3 1 1         | 5 | 24 | 28 320 160  | 4 | 122 222 222 122 122     | 133 333 333 333 333 333
"""


@pytest.mark.parametrize(
    ("shape", "spacing", "classes", "gigabytes", "patch", "batch", "strides", "kernels"), table(PLANS)
)
def test_like_nnunet_plans_what_nnunet_plans(
    shape: str, spacing: str, classes: str, gigabytes: str, patch: str, batch: str, strides: str, kernels: str
) -> None:
    size = [int(length) for length in shape.split()][::-1]
    mm = [float(length) for length in spacing.split()][::-1]
    plan = nnunet_plan([size], [mm], int(classes), int(gigabytes), cases=100)
    assert plan.spacing == tuple(mm)
    assert (" ".join(map(str, plan.patch[::-1])), str(plan.batch)) == (patch, batch)
    turned = [[triple[::-1] for triple in triples] for triples in plan.levels]
    assert [*map(listed, turned)] == [kernels, strides]
    by_rules = architecture([size], [mm], plan.patch)  # what unet3d makes of the same patch
    assert (by_rules.levels, by_rules.patch) == (plan.levels, plan.patch)


@pytest.mark.parametrize(
    ("spacing", "shape"),
    [((0.7, 0.7, 5.0), (320, 320, 20)), ((0.8, 0.8, 1.0), (512, 512, 400)), ((1.0, 1.0, 1.0), (138, 169, 138))],
)
def test_patches_have_the_volumes_proportions_and_suit_the_strides(spacing: Triple, shape: Triple) -> None:
    sizes = sized_patches(spacing, shape)
    assert all(larger.voxels > smaller.voxels for larger, smaller in pairwise(sizes))
    for size in sizes:
        assert [length % unit for length, unit in zip(size.patch, size.levels.units, strict=True)] == [0, 0, 0]
        shares = [length / whole for length, whole in zip(size.patch, shape, strict=True)]
        if size.voxels > prod(shape) / 8:
            assert max(shares) < 2 * min(shares)


def test_cubes_by_nnunets_rules_grow_by_what_their_strides_divide() -> None:
    cubes = patches_of_network(padded_by_rules)[::-1]
    assert [patch[0] for patch in cubes[:15]] == [16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192]
    assert all(len({*patch}) == 1 for patch in cubes)


def test_patches_of_proportions_grow_one_axis_at_a_time() -> None:
    patches = patches_of_network(padded_to((8, 8, 8)), proportions=(4, 5, 1))[::-1]
    for before, after in pairwise(patches[:12]):
        assert sum(b != a for b, a in zip(before, after, strict=True)) == 1
        assert prod(after) > prod(before)
    assert (64, 80, 16) in patches[:20]


@given(st.integers(10_000, 10**9), st.sampled_from([0, 5000]))
def test_the_answer_fits_and_the_next_was_tried_and_does_not(budget: int, fixed: int) -> None:
    tried: dict[Triple, int] = {}

    @cache
    def measure(patch: Triple) -> Peak:
        tried[patch] = fixed + 11 * prod(patch) + 37 * max(patch)
        return Peak(tried[patch])

    patch, larger = steps.largest(measure, patches_of_network(padded_to((8, 8, 8))), budget, steps.USUAL_BYTES)
    assert larger is not None
    assert tried[larger] > budget
    assert len(tried) <= 8
    if patch is None:
        assert larger == (16, 16, 16)
    else:
        assert tried[patch] <= budget
        assert larger[0] == patch[0] + 8


def test_no_patch_is_longer_than_an_option_may_be() -> None:
    patches = patches_of_network(padded_to((512, 512, 512)))
    found = steps.largest(lambda patch: Peak(1), patches, 2, steps.USUAL_BYTES)
    assert found == ((steps.LONGEST,) * 3, None)
