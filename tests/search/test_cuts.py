"""Plans between cuts and near them: moving blocks only ever shortens a step, which is the evaluator's own."""

from __future__ import annotations

import math

import numpy as np
import pytest

from planner.evaluate import evaluate
from planner.ir.plan import ScheduleName
from planner.search import cuts as cutting
from planner.search.candidates import shape_of
from planner.search.counted import Ranks
from planner.search.cuts import Cutter
from planner.search.engine import planning_engine
from planner.search.patterns import Patterns
from planner.search.solve import Task, certain_tied_seconds
from planner.search.stream import stream_of
from planner.search.works import works
from tests.search.test_polish import SHAPES, made

MOVES = 4_000_000


def cutter(task: Task) -> Cutter:
    shape = shape_of(task.candidate, task.cluster)
    stream = stream_of([task.chain], task.candidate.mesh, task.cluster, planning_engine())
    assert stream is not None
    return Cutter(task.chain, shape, Patterns(Ranks(stream, shape, works(stream, shape.microbatches))))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_moves_shorten_the_step(shape: tuple[ScheduleName, int, int, int], seed: int) -> None:
    for memory in (800, 1000, 10_000):
        task, costed, cluster = made(shape, seed, memory)
        maker = cutter(task)
        begun = [maker.patterns.cuts(counts) for counts in maker.patterns.even()]
        even, near = (maker.quickest(begun, math.inf, moving=moving) for moving in (0, MOVES))
        if even is None or near is None:
            assert even is near
            continue
        polish, bounds = near
        assert polish.step_s <= even[0].step_s and len(bounds) == len(set(bounds)) == maker.shape.stages + 1
        prediction = evaluate(task.plan(polish.shares.stages(polish.counts, bounds)), costed, cluster, planning_engine())
        assert prediction.fits
        assert prediction.step_s == pytest.approx(polish.step_s + certain_tied_seconds(task), rel=1e-12)


@pytest.mark.slow
def test_what_is_even_is_not_always_best() -> None:
    makers = [cutter(made(("interleaved-1f1b", 2, 3, 4), seed, 1000)[0]) for seed in range(6)]
    begun = [[maker.patterns.cuts(counts) for counts in maker.patterns.even()] for maker in makers]
    pairs = list(zip(makers, begun, strict=True))
    even, near = ([maker.quickest(cuts, math.inf, moving=moving) for maker, cuts in pairs] for moving in (0, MOVES))
    assert any(a is not None and b is not None and b[0].step_s < 0.99 * a[0].step_s for a, b in zip(even, near, strict=True))


def test_only_plans_near_the_target_are_moved_and_small_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    task, _, _ = made(("interleaved-1f1b", 2, 3, 4), 0, 1000)
    maker, moved = cutter(task), list[float]()
    monkeypatch.setattr(Cutter, "_moved", lambda self, begun, most: (moved.append(begun[0].step_s), begun)[1])
    begun = [maker.patterns.cuts(counts) for counts in maker.patterns.even()]
    best = maker.quickest(begun, math.inf, moving=MOVES)
    assert best is not None and len(moved) == 1
    maker.quickest(begun, moved[0] / cutting.WORTH_MOVING * 0.99, moving=MOVES)
    maker.quickest(begun, math.inf, moving=0)
    assert len(moved) == 1
    counts = maker.patterns.counts_of(best[1])
    near = maker._near(counts, MOVES)
    assert len(np.unique(near, axis=0)) == len(near) and (near.sum(axis=1) == counts.sum()).all()
    assert (np.abs(near - counts).sum(axis=1) == 2).all() and (near >= maker.patterns.fewest).all()
    assert not len(maker._near(counts, 1))
