"""Published figures come out of this package's instruments."""

import pytest
from bench.facts import Fact, facts, table


@pytest.fixture(scope="module")
def found() -> list[Fact]:
    return list(facts())


def test_every_published_figure_is_reproduced(found: list[Fact]) -> None:
    assert len(found) >= 29
    wrong = [fact for fact in found if abs(fact.found - fact.said) > fact.within]
    assert not wrong


def test_the_smaller_network_needs_more(found: list[Fact]) -> None:
    by_name = {fact.what: fact.found for fact in found}
    assert by_name["forum_mid: parameters"] < by_name["forum_large: parameters"]
    peak = ": peak of a float16 step, batch 2"
    assert by_name["forum_mid" + peak] > by_name["forum_large" + peak] > by_name["forum_32" + peak]


def test_the_table_says_what_was_published_and_what_was_found(found: list[Fact]) -> None:
    made = table(found)
    (row,) = [row for row in made.rows if row[0].startswith("forum_mid: output of the first convolution")]
    assert row == [row[0], "bytes", "319,488,000", "319,488,000", "0", "0"]
