"""The search for what fits a limit: of schedules, patches, batches and memory options alike."""

from collections.abc import Callable, Sequence
from typing import TypeVar

GUESSES_TRUSTED = 5  # measurements; after these, what is left is halved
T = TypeVar("T")


def fit(
    candidates: Sequence[T],
    measure: Callable[[T], float],
    limit: float,
    guess: Callable[[T], float] | None = None,
) -> int | None:
    """Return the number of the first candidate that needs at most `limit`; None where none does.

    Candidates are in order of preference. Without `guess` they are measured one after the other. With it, each is taken
    to need no more than the one before, so few are measured: `guess` says roughly what a candidate needs, which is
    corrected by what was measured, and given up for halving where that does not help. The answer and the candidate
    before it are always measured.
    """
    too_large = -1
    fitting = len(candidates)
    known: list[tuple[float, float]] = []  # guessed and measured needs
    while fitting - too_large > 1:
        number = too_large + 1
        if guess is not None:
            largest = _largest_guess(known, limit)
            between = range(too_large + 1, fitting)
            number = next((number for number in between if guess(candidates[number]) <= largest), fitting - 1)
            if fitting == len(candidates) and len(known) >= 2:
                number = fitting - 1  # whether any fits is known before the third measurement
            elif len(known) > GUESSES_TRUSTED:
                number = (too_large + fitting) // 2
        needed = measure(candidates[number])
        if guess is not None:
            known.append((guess(candidates[number]), needed))
        if needed <= limit:
            fitting = number
        else:
            too_large = number
    return fitting if fitting < len(candidates) else None


def _largest_guess(known: Sequence[tuple[float, float]], limit: float) -> float:
    """Return the guess at which a candidate would need the limit.

    What candidates need is taken to be linear in their guesses: through the two measured ones that are nearest to the
    limit, or through the only one and 0.
    """
    if not known:
        return limit
    nearest = sorted(known, key=lambda point: abs(point[1] - limit))[:2]
    guessed, measured = nearest[0]
    slope = measured / guessed if guessed and measured else 1.0
    if len(nearest) == 2:
        run = nearest[1][0] - guessed
        rise = nearest[1][1] - measured
        if run and rise / run > 0:
            slope = rise / run
    return guessed + (limit - measured) / slope
