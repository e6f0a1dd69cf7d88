"""Where a branch is parted: on the stage whose fraction costs most, whichever side it is made whole to."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from cost_models.pipeline import StageTimes, simulate
from planner.search.counted import Ranks
from planner.search.counts import Counts
from planner.search.effort import Effort
from planner.search.linear import Floats
from planner.search.shape import Shape
from planner.search.splits import best_split
from planner.search.works import works
from tests.search import streams

KEY = ("interleaved-1f1b", 3, 2, 6)
SHAPE = Shape("interleaved-1f1b", 3, 2, 6, streams.CAPACITY)


@pytest.fixture(params=range(4))
def mixed(request: pytest.FixtureRequest) -> Counts:
    """A program with an inner solution."""
    stream = streams.draw(request.param, blocks=SHAPE.stages + 5)
    counts = Counts(Ranks(stream, SHAPE, works(stream, SHAPE.microbatches)), {})
    counts.restrict(math.inf)
    assert counts.mix(Effort(math.inf, time.perf_counter() + 60))
    return counts


def seconds(counts: Counts, blocks: Floats) -> float:
    """Of a step whose stages have these blocks instead, each as quick as it was."""
    assert counts.inner is not None
    layout = counts.layout
    times = layout.times(counts.inner) * (blocks / np.array(layout.blocks(counts.inner)))[:, None]
    stages = [StageTimes(*map(float, row)) for row in times]
    return simulate(*KEY, stages, [counts.stream.send.behind_s] * SHAPE.stages).total_s


def moved(counts: Counts, stage: int, whole: float, of_run: float) -> float:
    """Seconds where a stage has a whole number of the run's blocks, and its rank's other stage has the rest."""
    assert counts.inner is not None
    blocks = np.array(counts.layout.blocks(counts.inner))
    other = next(mate for mate in SHAPE.owned(SHAPE.rank_of(stage)) if mate != stage)
    more = whole - of_run
    # A stage gives what it has beside one block.
    blocks[other] = max(0.0, blocks[other] - (more if more < 0 or blocks[other] > 1 else 0.0))
    blocks[stage] += more
    return seconds(counts, blocks)


def test_no_other_stage_costs_more_on_its_better_side(mixed: Counts) -> None:
    split = mixed.split()
    assert split is not None and mixed.inner is not None
    layout, worst = mixed.layout, {}
    for pair in np.flatnonzero(layout.most > 1):
        column, stage = int(layout.n_at[pair]), int(layout.pair_stage[pair])
        amount = float(mixed.inner[column])
        below = math.floor(amount + 1e-5)
        if below < mixed.sides(column)[1]:
            worst[column, below] = min(moved(mixed, stage, below + side, amount) for side in (0, 1))
    assert worst[split[0], int(split[1])] == pytest.approx(max(worst.values()), rel=1e-9)


def test_only_what_may_lie_on_either_side_is_parted(mixed: Counts) -> None:
    """However often: both parts are smaller than the whole, until nothing is left to part."""
    assert mixed.inner is not None
    layout, inner = mixed.layout, mixed.inner
    low, high = np.zeros(layout.size), np.full(layout.size, math.inf)
    low[layout.n_at], high[layout.n_at] = layout.fewest, layout.most
    parted = 0
    while (split := best_split(layout, inner, low, high)) is not None:
        column, below = split
        assert low[column] <= below < high[column] and column in layout.n_at
        high[column] = below
        parted += 1
    assert 0 < parted <= layout.most.sum()


def test_without_an_inner_solution_nothing_is_known(mixed: Counts) -> None:
    mixed.forget()
    assert mixed.split() is None
