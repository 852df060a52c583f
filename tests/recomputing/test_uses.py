"""Over two hundred uses of a wrapped network, each compared with the same use of the plain one.

A use is equal, refused by name, or runs the plain network and says so; it is never different without a word.
"""

from collections.abc import Iterator

import pytest
from equality import drawn_schedules
from uses import check
from uses_classes import CLASSES, HOOKS
from uses_forward import FORWARD
from uses_loops import LOOPS, OUTPUTS
from uses_settings import SETTINGS


@pytest.fixture(autouse=True)
def any_schedule() -> Iterator[None]:
    """Without a search: these tests hold for each schedule."""
    with drawn_schedules(seed=2, tiles=3):
        yield


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str) -> None:
    check(SETTINGS[name])


@pytest.mark.parametrize("name", HOOKS)
def test_hooks(name: str) -> None:
    check(HOOKS[name])


@pytest.mark.parametrize("name", CLASSES)
def test_classes(name: str) -> None:
    check(CLASSES[name])


@pytest.mark.parametrize("name", FORWARD)
def test_forward(name: str) -> None:
    """What forward leaves behind, draws and calls."""
    check(FORWARD[name])


@pytest.mark.parametrize("name", LOOPS)
def test_loops(name: str) -> None:
    """Losses, images and whatever else stands around a pass."""
    check(LOOPS[name])


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs(name: str) -> None:
    check(OUTPUTS[name])


def test_there_are_many_uses() -> None:
    assert sum(map(len, (SETTINGS, HOOKS, CLASSES, FORWARD, LOOPS, OUTPUTS))) >= 200
