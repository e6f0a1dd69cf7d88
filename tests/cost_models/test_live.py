"""Live micro-batches in closed form against every schedule's own order of actions."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.live import live_profiles, most_alive
from cost_models.schedules import SCHEDULES, actions, legal, stages_of_rank


def _counted(name: str, pipeline: int, virtual: int, microbatches: int, rank: int) -> set[tuple[int, ...]]:
    """All maximal live vectors of a rank, counted along its order."""
    stages = stages_of_rank(name, pipeline, virtual, rank)
    live, seen = [0] * len(stages), set()
    for action in actions(name, pipeline, virtual, microbatches)[rank]:
        if action.kind == "F":
            live[stages.index(action.stage)] += 1
            seen.add(tuple(live))
        elif action.kind in "BW":
            live[stages.index(action.stage)] -= 1
    return {
        one for one in seen
        if not any(other != one and all(a >= b for a, b in zip(other, one, strict=True)) for other in seen)
    }


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.sampled_from(SCHEDULES), st.integers(1, 6), st.integers(1, 4), st.integers(1, 40))
def test_live_profiles_are_the_orders_own(name: str, pipeline: int, virtual: int, microbatches: int) -> None:
    if legal(name, pipeline, virtual, microbatches):
        return
    profiles = live_profiles(name, pipeline, virtual, microbatches)
    most = most_alive(name, pipeline, virtual, microbatches)
    for rank in range(pipeline):
        assert set(profiles[rank]) == _counted(name, pipeline, virtual, microbatches, rank)
        assert most[rank] == tuple(map(max, zip(*profiles[rank], strict=True)))


def test_an_illegal_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="at least as many"):
        live_profiles("1f1b", 4, 1, 2)
