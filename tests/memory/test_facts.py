"""Published figures are reproduced by this package's instruments."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from facts import PUBLISHED, computed, table

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    return computed()


def test_every_published_figure_is_reproduced(found: dict[str, float]) -> None:
    assert len(PUBLISHED) >= 29
    assert not [p for p in PUBLISHED if abs(found[p.figure] - p.value) > p.within]


def test_the_table_shows_what_was_published_and_what_was_found(found: dict[str, float]) -> None:
    (row,) = [row for row in table(found).rows if row[0].startswith("forum_mid: output of the first convolution")]
    assert row[1:] == ["bytes", "319,488,000", "319,488,000", "0", "0"]
