"""Python's collector is left as it was found, and finds what is made meanwhile."""

from __future__ import annotations

import gc
import weakref

import pytest

from planner.collection import MANY, no_collection, only_new_collected


class Cycle:
    def __init__(self) -> None:
        self.own = self


def test_collection_is_off_and_on_again() -> None:
    assert gc.isenabled()
    with no_collection():
        assert not gc.isenabled()
        usual = gc.get_threshold()
        with only_new_collected():
            assert gc.isenabled() and gc.get_freeze_count() > 0
            assert gc.get_threshold() == (MANY, *usual[1:])
        assert not gc.isenabled() and gc.get_freeze_count() == 0
        assert gc.get_threshold() == usual
    assert gc.isenabled()


@pytest.mark.slow
def test_only_what_is_new_is_collected() -> None:
    old = weakref.ref(Cycle())
    with only_new_collected():
        new = weakref.ref(Cycle())
        gc.collect()
        assert new() is None and old() is not None
    gc.collect()
    assert old() is None
