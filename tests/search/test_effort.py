"""How long one solve may take within a look."""

from __future__ import annotations

import math
import time

from planner.search.effort import OVERTIME_S, Effort


def test_whole_numbers_that_are_begun_get_their_time() -> None:
    """They learn nothing that a later solve could go on from; real variables do."""
    now = time.perf_counter()
    soon = Effort(math.inf, now + 0.1, end=now + 60)
    assert soon.left_s(whole=False) <= 0.1 < soon.left_s(whole=True) <= OVERTIME_S
    assert Effort(math.inf, now + 0.1, end=now + 0.2).left_s(whole=True) <= 0.2, "the search's own limit holds"
    assert Effort(math.inf, now + 0.1).left_s(whole=True) <= 0.1


def test_nothing_begins_after_the_deadline() -> None:
    now = time.perf_counter()
    late = Effort(math.inf, now - 0.1, end=now + 60)
    assert late.left_s(whole=True) < 0 and late.left_s(whole=False) < 0
