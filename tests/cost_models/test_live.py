"""Live micro-batches in closed form against every schedule's own order of actions."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.live import LIVE, both_at_once, instants, most_alive
from cost_models.schedules import SCHEDULES, actions, legal, stages_of_rank

SPLIT = ("interleaved-zero-bubble", "zbv")


def _counted(name: str, pipeline: int, virtual: int, microbatches: int, rank: int) -> set[tuple[int, ...]]:
    """All instants of a rank, counted along its order: live micro-batches of its stages, then whether they have
    gradients, then micro-batches that wait for their weight part (none do on the model's first stage)."""
    stages = stages_of_rank(name, pipeline, virtual, rank)
    live, begun, waiting, seen = [0] * len(stages), [0] * len(stages), [0] * len(stages), set()
    last = "W" if name in SPLIT else "B"
    for action in actions(name, pipeline, virtual, microbatches)[rank]:
        at = stages.index(action.stage)
        if action.kind == "F":
            live[at] += 1
        elif action.kind == "I":
            waiting[at] += action.stage > 0
        elif action.kind == last:
            begun[at] = 1
        seen.add((*live, *begun, *waiting))
        if action.kind == last:
            live[at] -= 1
            waiting[at] -= last == "W" and action.stage > 0
    return seen


def _maximal(seen: Collection[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Those that no other has more than in everything."""
    return [
        one for one in seen
        if not any(other != one and all(a >= b for a, b in zip(other, one, strict=True)) for other in seen)
    ]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.sampled_from(SCHEDULES), st.integers(1, 6), st.integers(1, 4), st.integers(1, 40))
def test_instants_are_the_orders_own(name: str, pipeline: int, virtual: int, microbatches: int) -> None:
    """All of them are such, and whatever a rank's stages hold, it holds most at one of them."""
    if legal(name, pipeline, virtual, microbatches):
        return
    found = instants(name, pipeline, virtual, microbatches)
    most = most_alive(name, pipeline, virtual, microbatches)
    for rank, mine in enumerate(found):
        counted = _counted(name, pipeline, virtual, microbatches, rank)
        rows, all_rows = mine.reshape(len(mine), -1), np.array(sorted(counted))
        assert set(map(tuple, rows.tolist())) <= counted
        assert rows.tolist() == sorted(map(list, _maximal(set(map(tuple, rows.tolist())))))
        draw = np.random.default_rng(rank)
        sizes = draw.integers(0, 1000, (rows.shape[1], 200)) * draw.integers(0, 2, (rows.shape[1], 200))
        assert ((rows @ sizes).max(axis=0) == (all_rows @ sizes).max(axis=0)).all()
        assert most[rank] == tuple(mine[:, LIVE].max(axis=0))
        both = (all_rows[:, : 2 * virtual] > 0).all(axis=1).any()
        assert both or not both_at_once(pipeline, virtual, microbatches)
        # Each of both by itself is there on all stages in any case.
        for each in (all_rows[:, :virtual], all_rows[:, virtual : 2 * virtual]):
            assert (each > 0).all(axis=1).any()


def test_few_instants_say_all_of_long_rounds() -> None:
    assert max(map(len, instants("interleaved-1f1b", 64, 4, 256))) <= 8
    assert max(map(len, instants("interleaved-zero-bubble", 64, 4, 256))) <= 12


def test_one_round_has_no_gradients_beside_all_activations() -> None:
    """Interleaved, with as many micro-batches as ranks: the first rank has done all forward passes when it begins with the
    last stage's backward passes; the stage before has gradients when those of the last stage are over."""
    first = instants("interleaved-1f1b", 4, 2, 4)[0]
    assert first.tolist() == [[[4, 0], [1, 1], [0, 0]], [[4, 4], [0, 1], [0, 0]]]


def test_an_illegal_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="at least as many"):
        instants("1f1b", 4, 1, 2)
