"""How many blocks of a run a rank can keep much of: no plan of whole blocks that fits is excluded, by the program's memory or
by the evaluator's, and parts of blocks are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.evaluate import evaluate
from planner.ir.costed import Recompute
from planner.ir.plan import SPLIT_BACKWARD, Batch, BlockDecision, Mesh, Plan, Schedule, ScheduleName
from planner.search.allowed import Allowed
from planner.search.chain import Chain
from planner.search.engine import planning_engine
from planner.search.keeps import kept_rows
from planner.search.linear import Floats, Indices, Row
from planner.search.rows import Layout
from planner.search.shape import Shape
from planner.search.stream import Stream, stream_of
from planner.search.tables import AT_TIMES, AT_WAIT, PERSISTENT, Table
from tests.oracles.exhaustive_plan import every_plan
from tests.search import streams
from tests.search.made import make_cluster, make_costed, make_graph
from tests.search.plans import drawn, needed_bytes

SHAPES: list[tuple[ScheduleName, int, int, int]] = [
    ("1f1b", 2, 1, 4), ("interleaved-1f1b", 2, 2, 4), ("interleaved-1f1b", 3, 2, 6), ("interleaved-zero-bubble", 2, 2, 4),
    ("zbv", 2, 2, 5),
]
MORE = 4
"""Blocks beyond one for each stage."""
MEGABYTE = 1e6


def _stream(seed: int, blocks: int) -> Stream:
    """Of blocks whose activations are most of what they hold, in real bytes."""

    def sized(table: Table, part: float) -> Table:
        sums = table.sums.copy()
        sums[:, [PERSISTENT, AT_TIMES, AT_WAIT]] *= part * MEGABYTE
        return replace(table, sums=sums, peaks=table.peaks * MEGABYTE)

    stream = streams.draw(seed, blocks)
    return replace(stream, single=tuple((sized(compute, 1.0), sized(traffic, 0.2)) for compute, traffic in stream.single))


@pytest.mark.slow
@pytest.mark.parametrize("key", SHAPES, ids=str)
def test_no_plan_that_fits_is_excluded(key: tuple[ScheduleName, int, int, int]) -> None:
    said, attained, sloped, parts = 0, 0, 0, 0
    for seed in range(8):
        generator, stream = np.random.default_rng(seed), _stream(seed, key[1] * key[2] + MORE)
        loose = Layout(stream, Shape(*key, streams.CAPACITY))
        plans = [drawn(loose, generator) for _ in range(400)]
        needs = np.array([needed_bytes(loose, plan) for plan in plans])
        layout = Layout(stream, Shape(*key, float(np.quantile(needs, 0.4))))
        fitting = [plan for plan, needed in zip(plans, needs, strict=True) if needed <= layout.shape.capacity_bytes]
        for spare in (MORE, 1):
            # With few to spare, ranks have about as many blocks as each other.
            caps = [_even(run.count, key[1], spare) for run in stream.runs]
            rows = kept_rows(layout, caps)
            of_caps = [plan for plan in fitting if (_blocks(layout, plan) <= caps[1]).all()]
            assert of_caps
            amounts = np.array([[float(row.values @ plan[row.columns]) - row.high for row in rows] for plan in of_caps])
            assert (amounts <= 1e-9).all()
            said, attained = said + len(rows), attained + int((amounts > -1e-9).any(axis=0).sum())
            sloped += sum(bool((row.values < 0).any()) for row in rows)
            parts += sum(_is_passed_by_parts(layout, caps[1], row) for row in rows[:: max(1, len(rows) // 5)])
    assert said > 40 and attained > said / 5 and sloped and parts


@pytest.mark.slow
@pytest.mark.parametrize("blocks", ["aaaaaa", "eaaaah"])
@pytest.mark.parametrize("key", [key for key in SHAPES if key[0] not in SPLIT_BACKWARD], ids=str)
def test_no_plan_that_fits_by_the_evaluator_is_excluded(key: tuple[ScheduleName, int, int, int], blocks: str) -> None:
    """All plans of small chains, with as much memory as one of them needs. (Under the others nothing is recomputed.)"""
    schedule, pipeline, virtual, microbatches = key
    levels: tuple[Recompute, ...] = ("none", "full")
    zeros, mesh = (1,), Mesh(pipeline=pipeline, data=2)
    choices = tuple(BlockDecision(1, level) for level in levels)
    said, attained = 0, 0
    for seed in range(4):
        costed = make_costed(make_graph(list(blocks)), seed, zeros=zeros, levels=levels, crossing=4)
        template = Plan(
            "made", "", "made", "", "fp32", 4, mesh, Batch(2 * microbatches, 1, microbatches), Schedule(schedule, virtual), 2,
            (), costed.placements[0],
        )
        roomy, chain = make_cluster(2 * pipeline, 10**12), Chain((costed,), 0, Allowed(levels, zeros, ()), (2,))
        plans = list(every_plan(template, costed, choices))
        peaks = np.array([evaluate(plan, costed, roomy, planning_engine()).peak_memory_bytes for plan in plans])
        stream = stream_of((chain,), mesh, roomy, planning_engine())
        assert stream is not None
        for limit in np.quantile(np.unique(peaks), [0.05, 0.15, 0.3, 0.5], method="nearest").tolist():
            layout = Layout(stream, Shape(*key, float(limit)))
            rows = kept_rows(layout, [np.full(pipeline, run.count) for run in stream.runs])
            values = np.array([_values(layout, plan) for plan, peak in zip(plans, peaks, strict=True) if peak <= limit])
            amounts = [values[:, row.columns] @ row.values - row.high for row in rows]
            assert all((amount <= 1e-9).all() for amount in amounts)
            said, attained = said + len(rows), attained + sum(bool((amount > -1e-9).any()) for amount in amounts)
    assert said > 10 and attained > said / 5


def _values(layout: Layout, plan: Plan) -> Floats:
    """A plan's numbers of blocks and choices, as the program's columns."""
    values, runs = np.zeros(layout.size), [run for run, its in enumerate(layout.stream.runs) for _ in range(its.count)]
    for stage in plan.stages:
        for run, decision in zip(runs[stage.first : stage.last], stage.decisions, strict=True):
            pair = int(np.flatnonzero((layout.pair_stage == stage.index) & (layout.pair_run == run))[0])
            values[layout.n_at[pair]] += 1
            for kind, chosen in enumerate((decision.recompute, decision.zero)):
                mine = np.flatnonzero((layout.pair == pair) & (layout.kind == kind)).tolist()
                values[layout.choice_at[[at for at in mine if layout.names[at] == chosen]]] += 1
    return values


def _even(count: int, ranks: int, spare: int) -> Indices:
    """The most blocks of each rank."""
    return np.full(ranks, min(count, -(-count // ranks) + spare), dtype=np.int64)


def _blocks(layout: Layout, plan: Floats) -> Indices:
    """Blocks of the middle run on each rank."""
    ranks = range(layout.shape.pipeline)
    return np.array([round(float(plan[layout.n_at[layout.members(1, rank)]].sum())) for rank in ranks], dtype=np.int64)


def _is_passed_by_parts(layout: Layout, caps: Indices, row: Row) -> bool:
    """Whether parts of blocks that fit, of as many blocks, would be more than the row allows."""
    program = layout.program()
    for rank, most in enumerate(caps.tolist()):
        blocks = layout.n_at[layout.members(1, rank)]
        program.add([Row(0.0, float(most), blocks, np.ones(len(blocks)))])
    program.cost = np.zeros(layout.size)
    program.cost[row.columns] = -row.values
    outcome = program.solve(whole=False, time_limit_s=10.0)
    return outcome.optimal and -outcome.objective > row.high + 1e-6
