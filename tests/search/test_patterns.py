"""Whole blocks on virtual stages: many steps simulated at once, and none that may be quicker than a target left out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cost_models.pipeline import StageTimes, lengths, rough_lengths, simulate
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


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("cases", [1, 60])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_many_simulations_are_each_one(shape: tuple[ScheduleName, int, int, int], cases: int, each: bool) -> None:
    """Of few cases one action after the other, of many wave by wave; cuts as of all cases, or of each."""
    name, pipeline, virtual, microbatches = shape
    generator = np.random.default_rng(7)
    times = generator.uniform(0.5, 2.0, (cases, pipeline * virtual, 3))
    sends = generator.uniform(0.1, 0.4, (cases, pipeline * virtual) if each else pipeline * virtual)
    found = lengths(name, pipeline, virtual, microbatches, times, sends)
    every = np.broadcast_to(sends, (cases, pipeline * virtual))
    for case, its, seconds in zip(times, every, found, strict=True):
        stages = [StageTimes(*map(float, row)) for row in case]
        assert seconds == simulate(name, pipeline, virtual, microbatches, stages, list(its)).total_s


@pytest.mark.parametrize("cases", [1, 300])
@pytest.mark.parametrize("shape", [*SHAPES, ("interleaved-1f1b", 8, 8, 32), ("zbv", 4, 2, 40)], ids=str)
def test_single_precision_says_no_more(shape: tuple[ScheduleName, int, int, int], cases: int) -> None:
    """Times that are not round in it: half of them become larger."""
    _, pipeline, virtual, _ = shape
    times = np.random.default_rng(3).uniform(0.9, 1.1, (cases, pipeline * virtual, 3)) * 10.0 ** np.arange(-8, -5)
    sends = np.full(times.shape[1], 1e-3)
    exact, rough = lengths(*shape, times, sends), rough_lengths(*shape, times, sends)
    assert rough.dtype == np.float64 and (rough <= exact).all() and (rough > exact * (1 - 3e-4)).all()


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_nothing_quicker_than_the_target_is_left_out(shape: tuple[ScheduleName, int, int, int], seed: int) -> None:
    """Against every way to lay the blocks that gives no rank more than it can have by then, each simulated for itself."""
    name, pipeline, virtual, microbatches = shape
    stages, stream = pipeline * virtual, streams.draw(seed, blocks=pipeline * virtual + 4)
    form = Shape(name, pipeline, virtual, microbatches, streams.CAPACITY)
    ranks = Ranks(stream, form, works(stream, microbatches))
    patterns, every = Patterns(ranks), _every(stream, stages)
    assert patterns.possible
    free = patterns.seconds(every)
    for target in (float(free.min()) * 1.02, float(np.median(free)), float(free.max()) * 2):
        costs, seconds = ranks.sharper(target), patterns.seconds(every, target)
        found, most = patterns.find(costs, target), costs.most(1, target)
        assert found is not None
        ways = [every[:, form.owned(rank)] for rank in range(pipeline)]
        allowed = np.all([
            (mine.sum(axis=1) <= most[rank]) & (ranks.laid_s(1, rank, mine) < target) for rank, mine in enumerate(ways)
        ], axis=0)
        wanted = {tuple(row) for row in every[(seconds < target) & allowed]}
        assert {tuple(row) for row in found.counts} == wanted
        assert (found.seconds < target).all()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_no_choice_is_quicker_than_what_its_numbers_of_blocks_take(seed: int) -> None:
    """Five blocks between two ends on two ranks of two stages: every recomputation and ZeRO stage of every block."""
    stream = streams.draw(seed, blocks=7)
    form = Shape("interleaved-1f1b", 2, 2, 4, streams.CAPACITY)
    patterns = Patterns(Ranks(stream, form, works(stream, 4)))
    for counts in ([1, 1, 2, 1], [0, 2, 2, 1], [1, 2, 1, 1]):
        steps = _steps(stream, form, patterns.by_run(np.array(counts)))
        for target in (float(steps.min()) * 1.001, float(np.median(steps))):
            assert patterns.seconds(np.array([counts]), target)[0] <= steps.min() * (1 + 1e-12)


def _steps(stream: Stream, form: Shape, blocks: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> np.ndarray:
    """Seconds of a step under all choices of blocks [runs, stages], where nothing hides: passes simulated, and the rank that
    has most to do once a step."""
    places = [(run, stage) for run, row in enumerate(blocks) for stage, count in enumerate(row) for _ in range(count)]
    compute = np.array([[stream.single[run][0].sums[choice, :3] for choice in (0, 1)] for run, _ in places])
    traffic = np.array([[stream.single[run][1].sums[choice] for choice in (0, 1)] for run, _ in places])
    ways = np.array(list(itertools.product((0, 1), repeat=2 * len(places)))).reshape(-1, 2, len(places))
    each = np.arange(len(places))
    passes = compute[each, ways[:, 0]] + traffic[each, ways[:, 1]][..., :3]
    once = traffic[each, ways[:, 1]][..., 3:5].sum(axis=-1)
    times = np.zeros((len(ways), form.stages, 3))
    tails = np.zeros((len(ways), form.pipeline))
    for at, (_, stage) in enumerate(places):
        times[:, stage] += passes[:, at]
        tails[:, form.rank_of(stage)] += once[:, at]
    times[:, :, 0] += stream.context_s
    found = lengths(form.schedule, form.pipeline, form.virtual, form.microbatches, times, stream.crossings(form).sends_s)
    return np.asarray(found + tails.max(axis=1))


def test_too_many_ways_are_not_told_apart() -> None:
    stream = streams.draw(0, blocks=80)
    form = Shape("interleaved-1f1b", 2, 4, 4, streams.CAPACITY)
    ranks = Ranks(stream, form, works(stream, 4))
    assert Patterns(ranks).find(ranks.sharper(1e9), 1e9) is None


def test_even_ranks() -> None:
    """Fourteen blocks and two ends on two ranks of three stages: seven each, one beside two on each stage."""
    stream = streams.draw(1, blocks=16)
    patterns = Patterns(Ranks(stream, Shape("interleaved-1f1b", 2, 3, 4, streams.CAPACITY), works(stream, 4)))
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
