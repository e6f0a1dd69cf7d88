"""Where a branch is parted: on the stage where both sides' bounds rise most, as far as is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cost_models.pipeline import StageTimes, simulate
from planner.search.counted import Ranks
from planner.search.counts import Counts
from planner.search.linear import Floats
from planner.search.mixtures import best_mixture, grains
from planner.search.shape import Shape
from planner.search.splits import LEAST_S, MOST_TIMES, Split, Splits
from planner.search.works import works
from tests.search import streams

KEY = ("interleaved-1f1b", 3, 2, 6)
SHAPE = Shape("interleaved-1f1b", 3, 2, 6, streams.CAPACITY)
Inside = tuple[Counts, Floats]


@pytest.fixture(params=range(4))
def inside(request: pytest.FixtureRequest) -> Inside:
    """A program, and a solution of it with fractions on all stages."""
    stream = streams.draw(request.param, blocks=SHAPE.stages + 5)
    counts = Counts(Ranks(stream, SHAPE, works(stream, SHAPE.microbatches)), {})
    counts.restrict(math.inf)
    model = counts._model()
    found = best_mixture(counts.layout, model.rows, model.cost, model.low, model.high, 60.0, grains(SHAPE)[-1])
    assert found is not None
    return counts, found.values


def seconds(counts: Counts, values: Floats, blocks: Floats) -> float:
    """Of a step whose stages have these blocks instead, each as quick as it was."""
    layout = counts.layout
    times = layout.times(values) * (blocks / np.array(layout.blocks(values)))[:, None]
    stages = [StageTimes(*map(float, row)) for row in times]
    return simulate(*KEY, stages, [counts.stream.send.behind_s] * SHAPE.stages).total_s


def moved(counts: Counts, values: Floats, stage: int, whole: float, of_run: float) -> float:
    """Seconds where a stage has a whole number of the run's blocks, and its rank's other stage has the rest."""
    blocks = np.array(counts.layout.blocks(values))
    other = next(mate for mate in SHAPE.owned(SHAPE.rank_of(stage)) if mate != stage)
    more = whole - of_run
    # A stage gives what it has beside one block.
    blocks[other] = max(0.0, blocks[other] - (more if more < 0 or blocks[other] > 1 else 0.0))
    blocks[stage] += more
    return seconds(counts, values, blocks)


def ends(counts: Counts) -> tuple[Floats, Floats]:
    """What columns lie between."""
    layout = counts.layout
    low, high = np.zeros(layout.size), np.full(layout.size, math.inf)
    low[layout.n_at], high[layout.n_at] = layout.fewest, layout.most
    return low, high


def gains(counts: Counts, values: Floats) -> dict[tuple[int, float], list[float]]:
    """Of every stage that may lie on either side of a whole number: what simulations say of both sides."""
    layout, found = counts.layout, dict[tuple[int, float], list[float]]()
    begin_s = seconds(counts, values, np.array(layout.blocks(values)))
    for pair in np.flatnonzero(layout.most > 1):
        column, stage = int(layout.n_at[pair]), int(layout.pair_stage[pair])
        amount = float(values[column])
        below = math.floor(amount + 1e-5)
        if below < counts.sides(column)[1] and amount - below > 2e-5:
            sides = (moved(counts, values, stage, below + side, amount) - begin_s for side in (0, 1))
            found[column, float(below)] = [max(side, LEAST_S) for side in sides]
    return found


def test_no_other_stage_makes_both_sides_longer(inside: Inside) -> None:
    counts, values = inside
    split, every = Splits().best(counts.layout, values, *ends(counts), math.inf), gains(*inside)
    assert split is not None and len(every) > 1
    assert split.gains_s == pytest.approx(every[split.column, split.below], rel=1e-6)
    assert math.prod(split.gains_s) == pytest.approx(max(map(math.prod, every.values())), rel=1e-6)


def test_more_than_what_is_left_to_the_target_says_nothing_more(inside: Inside) -> None:
    """Where all pass it on one side, the other decides."""
    counts, values = inside
    every = gains(*inside)
    left_s = min(max(sides) for sides in every.values())
    split = Splits().best(counts.layout, values, *ends(counts), left_s)
    assert split is not None
    said = {key: math.prod(min(side, left_s) for side in sides) for key, sides in every.items()}
    assert said[split.column, split.below] == pytest.approx(max(said.values()), rel=1e-6)
    assert max(said.values()) < max(map(math.prod, every.values()))


def test_what_branches_have_told_is_what_is_expected_next(inside: Inside) -> None:
    """A stage that promises most, and where bounds did not rise, is not chosen again; nor is one below the mean preferred."""
    counts, values = inside
    splits, sides = Splits(), ends(counts)
    first = splits.best(counts.layout, values, *sides, math.inf)
    assert first is not None
    for side in (0, 1):
        for _ in range(20):
            splits.learn(first, side, 0.0)
    second = splits.best(counts.layout, values, *sides, math.inf)
    assert second is not None and second.column != first.column
    for side in (0, 1):
        for _ in range(20):
            splits.learn(second, side, 0.0)
            splits.learn(first, side, first.gains_s[side])
    third = splits.best(counts.layout, values, *sides, math.inf)
    assert third is not None and third.column != second.column


def test_one_bound_that_leaps_counts_so_often_at_most() -> None:
    splits = Splits()
    splits.learn(Split(7, 1.0, (0.5, 0.5)), 1, 1e6)
    assert splits.told == {(7, 1): (1, MOST_TIMES)}


def test_only_what_may_lie_on_either_side_is_parted(inside: Inside) -> None:
    """However often: both parts are smaller than the whole, until nothing is left to part."""
    counts, values = inside
    layout, (low, high) = counts.layout, ends(counts)
    parted = 0
    while (split := Splits().best(layout, values, low, high, math.inf)) is not None:
        assert low[split.column] <= split.below < high[split.column] and split.column in layout.n_at
        high[split.column] = split.below
        parted += 1
    assert 0 < parted <= layout.most.sum()
