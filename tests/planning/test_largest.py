"""Series of patches, and the search for the largest that fits, with few steps."""

from functools import cache
from itertools import pairwise
from math import prod

import pytest

from unet3d.memory.meter import Peak
from unet3d.model.geometry import Triple
from unet3d.planning.steps import LONGEST, USUAL_BYTES, largest, padded_by_rules, padded_to, patches_of_network


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


@pytest.mark.parametrize("fixed", [0, 5000])
def test_the_answer_fits_and_the_next_was_tried_and_does_not(fixed: int) -> None:
    tried: dict[Triple, int] = {}

    @cache
    def measure(patch: Triple) -> Peak:
        tried[patch] = fixed + 11 * prod(patch) + 37 * max(patch)
        return Peak(tried[patch])

    patches = patches_of_network(padded_to((8, 8, 8)))
    for budget in (10_000, 10**6, 123_456_789, 10**9):
        known = len(tried)
        patch, larger = largest(measure, patches, budget, USUAL_BYTES)
        assert larger is not None and tried[larger] > budget
        if patch is None:
            assert larger == (16, 16, 16)
        else:
            assert tried[patch] <= budget
            assert larger[0] == patch[0] + 8
        assert len(tried) - known <= 4


def test_no_patch_is_longer_than_an_option_may_be() -> None:
    patch, larger = largest(lambda patch: Peak(1), patches_of_network(padded_to((512, 512, 512))), 2, USUAL_BYTES)
    assert patch == (LONGEST, LONGEST, LONGEST)
    assert larger is None
