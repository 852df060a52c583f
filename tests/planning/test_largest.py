"""Series of patches, and the search for the largest that fits, with few steps."""

from itertools import pairwise
from math import prod

import pytest

from unet3d.model.geometry import Triple
from unet3d.planning.largest import largest
from unet3d.planning.patches import LONGEST, Series, padded_by_rules, padded_to


def test_cubes_by_nnunets_rules_grow_by_what_their_strides_divide() -> None:
    series = Series(padded_by_rules)
    lengths = [series[number][0] for number in range(15)]
    assert lengths == [16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192]
    assert all(len({*series[number]}) == 1 for number in range(15))


def test_patches_of_proportions_grow_one_axis_at_a_time() -> None:
    series = Series(padded_to((8, 8, 8)), proportions=(4, 5, 1), is_cube=False)
    patches = [series[number] for number in range(12)]
    for before, after in pairwise(patches):
        assert sum(b != a for b, a in zip(before, after, strict=True)) == 1
        assert prod(after) > prod(before)
    assert (64, 80, 16) in [series[number] for number in range(20)]


@pytest.mark.parametrize("budget", [10_000, 10**6, 123_456_789, 10**9])
@pytest.mark.parametrize("fixed", [0, 5000])
@pytest.mark.parametrize("guess", [{1: 1.0}, {1: 40.0}, {4096: 300_000.0, 8000: 500_000.0}])
def test_the_answer_fits_and_the_next_was_tried_and_does_not(budget: int, fixed: int, guess: dict[int, float]) -> None:
    tried: dict[Triple, int] = {}

    def occupied(patch: Triple) -> int:
        assert patch not in tried, "a step is simulated once"
        tried[patch] = fixed + 11 * prod(patch) + 37 * max(patch)
        return tried[patch]

    answer = largest(Series(padded_to((8, 8, 8))), occupied, budget, guess)
    assert answer.next is not None and tried[answer.next] > budget
    if answer.patch is None:
        assert answer.next == (16, 16, 16)
    else:
        assert tried[answer.patch] <= budget
        assert answer.next[0] == answer.patch[0] + 8
    assert len(tried) <= 4


def test_no_patch_is_longer_than_an_option_may_be() -> None:
    answer = largest(Series(padded_to((512, 512, 512))), lambda patch: 1, 2, {1: 1.0})
    assert answer.patch == (LONGEST, LONGEST, LONGEST)
    assert answer.next is None
