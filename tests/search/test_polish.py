"""Ranks filled by trades, and which of their stages are the slow ones."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from hardware_profiles import Cluster
from planner.evaluate import evaluate
from planner.ir.costed import CostedGraph
from planner.ir.plan import Mesh, ScheduleName
from planner.search.candidates import Candidate, shape_of
from planner.search.engine import planning_engine
from planner.search.greedy import Numbers, Shares, even_cuts
from planner.search.polish import Polish
from planner.search.request import Request
from planner.search.solve import Fingerprints, Task, certain_tied_seconds, chains_of
from planner.search.stream import stream_of
from tests.search.made import make_cluster, make_costed, make_graph

SHAPES: list[tuple[ScheduleName, int, int, int]] = [
    ("1f1b", 3, 1, 4), ("interleaved-1f1b", 2, 3, 4), ("interleaved-1f1b", 3, 2, 3), ("interleaved-zero-bubble", 2, 2, 4),
    ("zbv", 2, 2, 4),
]
NAMES = Fingerprints("made", "x", "made", "y")


def made(shape: tuple[ScheduleName, int, int, int], seed: int, memory: int) -> tuple[Task, CostedGraph, Cluster]:
    name, pipeline, virtual, microbatches = shape
    graph = make_graph(f"a{'b' * (2 * pipeline * virtual)}c")
    costed = make_costed(graph, seed, zeros=(0, 1, 2, 3), crossing=5)
    cluster = make_cluster(2 * pipeline, memory)
    candidate = Candidate(Mesh(pipeline=pipeline, data=2), 1, microbatches, name, virtual, ((2,),))
    request = Request(2 * microbatches, 4, "fp32")
    return Task(candidate, chains_of((costed,), candidate, request)[0], cluster, request, NAMES), costed, cluster


def polishes(task: Task) -> list[Polish]:
    shape = shape_of(task.candidate, task.cluster)
    stream = stream_of([task.chain], task.candidate.mesh, task.cluster, planning_engine())
    assert stream is not None
    bounds = even_cuts(task.chain.block_works, shape.stages)
    shares = Shares.of(task.chain, shape, bounds)
    filled = [shares.fill(late=late) for late in (False, True)]
    return [Polish(shares, stream, counts) for counts in filled if counts is not None]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_filled_and_polished_plans(shape: tuple[ScheduleName, int, int, int], seed: int) -> None:
    """They fit, by the evaluator; the step is the evaluator's; polishing only shortens it. Some rooms are tight, some not."""
    seen = 0
    for memory in (600, 800, 1000, 1200, 10_000):
        task, costed, cluster = made(shape, seed, memory)
        for polish in polishes(task):
            bounds = even_cuts(task.chain.block_works, polish.shares.shape.stages)
            before = polish.step_s
            for _ in range(2):
                plan = task.plan(polish.shares.stages(polish.counts, bounds))
                assert [stage.last - stage.first for stage in plan.stages] == np.diff(bounds).tolist()
                assert all(len(stage.decisions) == stage.last - stage.first for stage in plan.stages)
                prediction = evaluate(plan, costed, cluster, planning_engine())
                assert prediction.fits
                assert prediction.step_s == pytest.approx(polish.step_s + certain_tied_seconds(task), rel=1e-12)
                polish.go()
            assert polish.step_s <= before
            seen += 1
    assert seen >= 4


def test_the_quickest_places_are_found() -> None:
    """Against every way to recompute as many blocks on each rank, where it matters which."""
    gained = 0
    for seed in range(6):
        task, _, _ = made(("interleaved-1f1b", 2, 3, 2), seed, 10**6)
        (polish, *_) = polishes(task)
        shares, shape = polish.shares, polish.shares.shape
        # Every rank recomputes one block of its first stage, and memory is what that takes.
        for rank in range(shape.pipeline):
            at = next(i for i, portion in enumerate(shares.portions[rank]) if portion.kind == 0 and portion.run == 1)
            slow = int(np.nanargmax(np.where(np.isfinite(shares.cost_s[rank, at]), shares.cost_s[rank, at], -1.0)))
            polish.counts[rank, at, polish.counts[rank, at].argmax()] -= 1
            polish.counts[rank, at, slow] += 1
        ranks = np.arange(shape.pipeline)
        room = shares.capacity_bytes + shares.excess(polish.counts, ranks)[:, None]
        tight = replace(shares, capacity_bytes=room)
        begun = Polish(tight, polish.stream, polish.counts.copy())
        first = begun.step_s
        begun.go()
        best = min(_every(begun, [_placed(begun, rank) for rank in ranks]))
        assert best <= begun.step_s <= first
        assert begun.step_s <= best * 1.02
        gained += begun.step_s < first
    assert gained


def _placed(polish: Polish, rank: int) -> list[Numbers]:
    """All ways to have as many blocks under every recomputation on a rank, those that fit."""
    now, shares = polish.counts[rank], polish.shares
    members = [i for i, portion in enumerate(shares.portions[rank]) if portion.kind == 0 and portion.run == 1]
    total = now[members].sum(axis=0)
    numbers = list(itertools.product(range(int(now.max()) + 1), repeat=now.shape[1]))
    each = [[row for row in numbers if sum(row) == now[at].sum()] for at in members]
    ways = [np.array(rows) for rows in itertools.product(*each) if (np.sum(rows, axis=0) == total).all()]
    found = []
    for way in ways:
        counts = now.copy()
        counts[members] = way
        if shares.excess(counts[None], np.array([rank]))[0] <= 0:
            found.append(counts)
    return found


def _every(polish: Polish, ways: list[list[Numbers]]) -> list[float]:
    return [Polish(polish.shares, polish.stream, np.array(chosen)).step_s for chosen in itertools.product(*ways)]


def test_nothing_fits() -> None:
    task, _, _ = made(("interleaved-1f1b", 2, 3, 4), 0, 50)
    assert polishes(task) == []


def test_a_peak_that_others_have_already_is_no_reason_to_keep_the_last_block_as_it_is() -> None:
    """Recomputed blocks hold transiently what others keep: so does the first of them, and no other adds to that."""
    candidate, request = Candidate(Mesh(data=2), 1, 1, "1f1b", 1, ((2,),)), Request(2, 4, "fp32")
    costed = make_costed(make_graph("abbbbbbc"), 0, zeros=(0, 1), crossing=5)
    blocks = dict(costed.blocks[0])
    kept = {"none": (100, 10), "full": (10, 100)}
    blocks["b"] = {
        level: replace(
            cost, saved_bytes=kept[level][0], forward_peak_bytes=kept[level][1], backward_peak_bytes=kept[level][1],
            recompute_s=1000.0 * (level == "full"),  # All else is traded before.
        )
        for level, cost in blocks["b"].items()
    }
    chain = chains_of((replace(costed, blocks=(blocks,)),), candidate, request)[0]
    roomy = Shares.of(chain, shape_of(candidate, make_cluster(2, 10_000)), (0, 8))
    least = np.zeros(roomy.cost_s.shape, dtype=np.int64)
    for at, portion in enumerate(roomy.portions[0]):
        names = list(portion.table.names)
        least[0, at, names.index("full") if portion.kind == 0 and portion.blocks > 1 else len(names) - 1] = portion.blocks
    room = int(roomy.capacity_bytes.max() + roomy.excess(least, np.zeros(1, dtype=np.int64)).max())
    tight = Shares.of(chain, shape_of(candidate, make_cluster(2, room)), (0, 8))
    assert tight.excess(least, np.zeros(1, dtype=np.int64)).max() <= 0
    assert tight.fill(late=False) is not None
