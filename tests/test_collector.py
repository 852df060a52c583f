"""The garbage collector rests while libraries load, and no longer."""

import gc
from collections.abc import Iterator

import pytest

from unet3d.base import process


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_the_collector_passes_over_what_a_library_leaves() -> None:
    frozen = gc.get_freeze_count()
    with process.loading("no_such_library"):
        assert not gc.isenabled()
        objects = [[] for _ in range(100)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(objects)


def test_the_collector_is_back_after_a_library_that_cannot_be_loaded() -> None:
    with pytest.raises(ModuleNotFoundError), process.loading("no_such_library"):
        raise ModuleNotFoundError
    assert gc.isenabled()


def test_garbage_of_a_program_that_has_the_library_is_still_collected() -> None:
    frozen = gc.get_freeze_count()
    with process.loading("pytest"):
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_who_has_switched_the_collector_off_finds_it_off() -> None:
    gc.disable()
    try:
        with process.loading("no_such_library"):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
