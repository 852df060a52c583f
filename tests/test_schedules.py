"""Learning rates at known points."""

import pytest

from unet3d.config import Optim
from unet3d.train.optim import learning_rate


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [1, 1, 1]), ("poly", [1, 0.5**0.9, 0.01**0.9]), ("cosine", [1, 0.5, 0.00024671982])],
)
def test_first_middle_and_last_step_of_100(schedule: str, expected: list[float]) -> None:
    options = Optim(lr=2.0, schedule=schedule)
    assert [learning_rate(options, 100, s) / 2 for s in (0, 50, 99)] == pytest.approx(expected)


def test_one_cycle_rises_then_falls_to_almost_nothing() -> None:
    rates = [learning_rate(Optim(lr=1.0, schedule="one_cycle", warmup=0.2), 100, s) for s in range(100)]
    assert rates[0] == pytest.approx(1 / 25)
    assert max(rates) == rates[20] == 1
    assert rates[:21] == sorted(rates[:21]) and rates[20:] == sorted(rates[20:], reverse=True)
    assert 0 < rates[-1] < 1e-3


def test_one_cycle_without_warmup_starts_at_the_top() -> None:
    assert learning_rate(Optim(lr=1.0, schedule="one_cycle", warmup=0.0), 10, 0) == 1
