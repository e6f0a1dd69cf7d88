"""Whole blocks on virtual stages: many steps simulated at once, and none that may be quicker than a target left out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cost_models.pipeline import StageTimes, lengths, simulate
from planner.ir.plan import ScheduleName
from planner.search.counted import Ranks
from planner.search.patterns import Patterns
from planner.search.shape import Shape
from planner.search.stream import Stream
from planner.search.works import works
from tests.search import streams

SHAPES: list[tuple[ScheduleName, int, int, int]] = [
    ("1f1b", 3, 1, 5), ("gpipe", 2, 1, 3), ("interleaved-1f1b", 2, 2, 4), ("interleaved-1f1b", 3, 2, 6),
    ("interleaved-zero-bubble", 2, 2, 4), ("zbv", 2, 2, 5),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_many_simulations_are_each_one(shape: tuple[ScheduleName, int, int, int]) -> None:
    name, pipeline, virtual, microbatches = shape
    generator = np.random.default_rng(7)
    times = generator.uniform(0.5, 2.0, (20, pipeline * virtual, 3))
    found = lengths(name, pipeline, virtual, microbatches, times, 0.25)
    sends = [0.25] * (pipeline * virtual)
    for case, seconds in zip(times, found, strict=True):
        stages = [StageTimes(*map(float, row)) for row in case]
        assert seconds == simulate(name, pipeline, virtual, microbatches, stages, sends).total_s


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_nothing_quicker_than_the_target_is_left_out(shape: tuple[ScheduleName, int, int, int], seed: int) -> None:
    """Against every way to lay the blocks that gives no rank more than it can have by then, each simulated for itself."""
    name, pipeline, virtual, microbatches = shape
    stages, stream = pipeline * virtual, streams.draw(seed, blocks=pipeline * virtual + 4)
    form = Shape(name, pipeline, virtual, microbatches, streams.CAPACITY)
    patterns, ranks = Patterns(stream, form), Ranks(stream, form, works(stream, microbatches))
    assert patterns.possible
    every = _every(stream, stages)
    seconds = patterns.seconds(every)
    for target in (float(seconds.min()) * 1.02, float(np.median(seconds)), float(seconds.max()) * 2):
        costs = ranks.sharper(target)
        found, most = patterns.find(ranks, costs, target), costs.most(1, target)
        assert found is not None
        ways = [every[:, form.owned(rank)] for rank in range(pipeline)]
        allowed = np.all([
            (mine.sum(axis=1) <= most[rank]) & (ranks.laid_s(1, rank, mine) < target) for rank, mine in enumerate(ways)
        ], axis=0)
        wanted = {tuple(row) for row in every[(seconds < target) & allowed]}
        assert {tuple(row) for row in found.counts} == wanted
        assert (found.seconds < target).all()


def test_too_many_ways_are_not_told_apart() -> None:
    stream = streams.draw(0, blocks=80)
    form = Shape("interleaved-1f1b", 2, 4, 4, streams.CAPACITY)
    ranks = Ranks(stream, form, works(stream, 4))
    assert Patterns(stream, form).find(ranks, ranks.sharper(1e9), 1e9) is None


def test_even_ranks() -> None:
    """Fourteen blocks and two ends on two ranks of three stages: seven each, one beside two on each stage."""
    stream = streams.draw(1, blocks=16)
    patterns = Patterns(stream, Shape("interleaved-1f1b", 2, 3, 4, streams.CAPACITY))
    for counts in patterns.even():
        assert counts.sum() == 14 and counts[0::2].sum() == counts[1::2].sum() == 7
        assert patterns.cuts(counts)[-1] == 16 and patterns.cuts(counts)[0] == 0
    assert len(patterns.even()) == 3


def _every(stream: Stream, stages: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """All ways: between the two ends one block a stage, none where an end is."""
    total = max(run.count for run in stream.runs)
    fewest = [0, *[1] * (stages - 2), 0]
    ways = [way for way in itertools.product(range(total + 1), repeat=stages) if sum(way) == total]
    return np.array([way for way in ways if all(a >= b for a, b in zip(way, fewest, strict=True))])
