"""The search for the first of a series that fits."""

import random

import pytest

from unet3d.base.fit import fit


def measured_by(sizes: list[int], limit: int, *, guessed: bool) -> tuple[int | None, list[int]]:
    """Return the answer for candidates of these sizes, and those that were measured; guesses are off by a line."""
    seen: list[int] = []

    def measure(number: int) -> int:
        seen.append(number)
        return sizes[number]

    guess = (lambda number: 0.7 * sizes[number] + 5) if guessed else None
    return fit(range(len(sizes)), measure, limit, guess), seen


def test_candidates_in_no_order_are_measured_one_by_one_up_to_the_first_that_fits() -> None:
    assert measured_by([9, 7, 3, 8, 2], 3, guessed=False) == (2, [0, 1, 2])
    assert measured_by([9, 7], 3, guessed=False) == (None, [0, 1])
    assert measured_by([], 3, guessed=True) == (None, [])


@pytest.mark.parametrize("seed", range(20))
def test_the_first_of_a_falling_series_is_found_by_few_measurements(seed: int) -> None:
    draw = random.Random(seed)
    sizes = sorted((draw.randint(1, 10**6) for _ in range(200)), reverse=True)
    limit = draw.choice([0, 10**7, *sizes])
    found, seen = measured_by(sizes, limit, guessed=True)
    assert found == next((number for number, size in enumerate(sizes) if size <= limit), None)
    assert len(seen) == len({*seen}) <= 5
    if found:
        assert {found, found - 1} <= {*seen}, "the answer and the one before are measured"


@pytest.mark.parametrize("last", [5, 50])
def test_what_a_plateau_hides_from_guesses_is_found_by_halving(last: int) -> None:
    needs = [*[50] * 299, last]
    seen: list[int] = []

    def measure(number: int) -> int:
        seen.append(number)
        return needs[number]

    found = fit(range(300), measure, 10, lambda number: 400 - number)
    assert found == (299 if last == 5 else None)
    assert len(seen) <= 20
