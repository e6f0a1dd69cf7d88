"""The best mixture of a schedule's paths at once: the schedule's actions as rows of a linear program, solved by an interior
point method, whose dual is a flow through the actions.

Paths that are added one by one raise a bound slowly where many are nearly as long as the longest. A program with a column for
the end of every action states all of them; its optimal dual sends one unit from the first actions to the last ones, and a unit
of flow is a mixture of paths, as valid as they are for all times. It is one row for the small program.

Ranks work through the micro-batches of a turn in step, and paths that change from rank to rank at the first and the last ones
of a turn say nearly as much as all do. Actions in between wait for the one before them alone: they need no column, which makes
the program several times smaller. Fewer paths are fewer constraints, as valid. (So small that the small program can have these
columns and rows itself, where it is solved again and again.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cost_models.pipeline import CriticalPath, Dependencies, dependencies
from cost_models.schedules import KINDS, turn_length
from planner.search.linear import Floats, Indices, Row
from planner.search.rows import LENGTH, Layout
from planner.search.shape import Shape
from planner.solver import highs_module, new_highs

MOST_ACTIONS, MOST_TOLD = 50_000, 10_000
"""Schedules with more actions are not mixed, nor with more of them told apart: it would take too long."""
SECONDS, OF_ACTIONS, GROWTH = 0.08, 512, 1.5
"""What so many actions take on a core of today, about, and how it grows: whether to begin is all that it decides."""
GRAINS = (2, 4)
"""So many micro-batches of a turn are told apart, before all are."""
NEARLY_BEST = 1e-5
"""To this part a mixture is the best one: the steps after it take a fifth of the method's time."""
GRAIN = 1e-4
"""Times are counted in a mixture by multiples of this."""
END, BEGINNING = -1, -1
"""What has no column of its own: T behind the last actions, and the beginning of the step."""

SENT = len(KINDS)
"""A transfer, beside the kinds of actions."""


@dataclass(frozen=True)
class Mixture:
    """``path``: a mixture of paths; ``values``: the small program's columns where T + R is least under all paths, about."""

    path: CriticalPath
    values: Floats


@dataclass(frozen=True)
class _Network:
    """The actions of a schedule as rows: an action that waits for several ends its own time after each of them has (``count``
    such), one that waits for a single one ends so long after that. A row for every wait of the former, then of each rank's last
    action, behind which T is: ``goal`` ends (:data:`END`: T), ``source`` has ended before (:data:`BEGINNING`);
    ``edge``: which of the schedule's it is (behind them, the ranks). Between both lie, by ``row``, ``number`` actions of a
    ``stage`` and a ``kind``, the goal's own among them, and transfers over the cut before a stage (:data:`SENT`). ``kept``
    [edges]: waits that count."""

    known: Dependencies
    kept: NDArray[np.bool_]
    count: int
    goal: Indices
    source: Indices
    edge: Indices
    row: Indices
    stage: Indices
    kind: Indices
    number: Floats


def _turn(shape: Shape) -> int:
    """Micro-batches after which a rank turns to another of its stages, or ranks are in step again."""
    return turn_length(shape.pipeline, shape.microbatches)


def grains(shape: Shape) -> list[int]:
    """How many micro-batches of a turn are told apart, ever more; all of them last."""
    return [*(grain for grain in GRAINS if grain < _turn(shape)), _turn(shape)]


def mixing_seconds(shape: Shape, grain: int) -> float:
    """About what the method takes; infinite for schedules that are too long, and where the solver is missing."""
    actions = shape.actions
    told = actions * grain / _turn(shape)
    if actions > MOST_ACTIONS or told > MOST_TOLD or highs_module() is None:
        return math.inf
    return SECONDS * math.pow(told / OF_ACTIONS, GROWTH)


def best_mixture(
    layout: Layout, rows: Sequence[Row], cost: Floats, low: Floats, high: Floats, time_limit_s: float, grain: int,
) -> Mixture | None:
    """The mixture that raises the optimum of these rows most, of paths that change from rank to rank at ``grain`` micro-batches
    of every turn; None where the method does not arrive in time."""
    shape = layout.shape
    network = _network_of(shape, grain)
    answer = _solved(_Extended(layout, network, len(cost)), rows, cost, low, high, time_limit_s)
    if answer is None:
        return None
    duals = np.zeros(len(network.kept) + shape.pipeline)
    duals[network.edge] = np.maximum(answer[1], 0.0)
    return Mixture(_path(layout, network, duals), answer[0])


def end_rows(layout: Layout, first: int, grain: int) -> list[Row]:
    """All paths that change from rank to rank at ``grain`` micro-batches of every turn, as rows with a column for the end of
    every action that waits for several, from ``first`` on (:func:`ends`)."""
    network = _network_of(layout.shape, grain)
    extended = _Extended(layout, network, first)
    order = np.argsort(extended.rows, kind="stable")
    cuts = np.cumsum(np.bincount(extended.rows, minlength=len(extended.low)))[:-1]
    parts = zip(
        extended.low.tolist(), np.split(extended.columns[order], cuts), np.split(extended.values[order], cuts), strict=True
    )
    return [Row(low, math.inf, columns, values) for low, columns, values in parts]


def ends(shape: Shape, grain: int) -> int:
    """How many actions wait for several."""
    return _network_of(shape, grain).count


def _network_of(shape: Shape, grain: int) -> _Network:
    return _network(shape.schedule, shape.pipeline, shape.virtual, shape.microbatches, grain)


@lru_cache(maxsize=64)
def _network(name: str, pipeline: int, virtual: int, microbatches: int, grain: int) -> _Network:
    known = dependencies(name, pipeline, virtual, microbatches)
    kept = _kept(known, grain, turn_length(pipeline, microbatches))
    count, tables = 0, _Tables([], [], [], [])
    begin = (BEGINNING, dict[tuple[int, int], int]())
    # Of every action: the last one before it that has a column; actions since then, itself among them, and transfers.
    since: list[tuple[int, dict[tuple[int, int], int]]] = []
    edges, at = list(zip(known.source.tolist(), known.cut.tolist(), kept.tolist(), strict=True)), 0
    ends = np.searchsorted(known.target, np.arange(1, len(known.stage) + 1)).tolist()
    for own, end in zip(zip(known.stage.tolist(), known.kind.tolist(), strict=True), ends, strict=True):
        waits = []
        for edge in range(at, end):
            source, cut, there = edges[edge]
            if there:
                column, between = since[source] if source >= 0 else begin
                more = (own, (cut, SENT)) if cut else (own,)
                waits.append((edge, column, {**between, **{each: between.get(each, 0) + 1 for each in more}}))
        if len(waits) == 1:
            since.append(waits[0][1:])
        else:
            since.append((count, {}))
            for wait in waits:
                tables.add(count, *wait)
            count += 1
        at = end
    for rank, last in enumerate(known.last.tolist()):
        tables.add(END, len(edges) + rank, *since[last])
    return _Network(known, kept, count, *tables.arrays())


def _kept(known: Dependencies, grain: int, turn: int) -> NDArray[np.bool_]:
    """[edges]: every action waits for the one before it on its rank, and those of some micro-batches also for their input."""
    told = np.unique(np.linspace(0, turn - 1, grain).astype(np.int64))
    first = np.append(True, known.target[1:] != known.target[:-1])
    return np.asarray(first | np.isin(known.microbatch % turn, told)[known.target])


@dataclass
class _Tables:
    """A network's rows in the making."""

    goal: list[int]
    source: list[int]
    edge: list[int]
    between: list[dict[tuple[int, int], int]]

    def add(self, goal: int, edge: int, source: int, between: dict[tuple[int, int], int]) -> None:
        for part, value in ((self.goal, goal), (self.edge, edge), (self.source, source)):
            part.append(value)
        self.between.append(between)

    def arrays(self) -> tuple[Indices, Indices, Indices, Indices, Indices, Indices, Floats]:
        """As the network has them."""
        row = np.repeat(np.arange(len(self.goal)), list(map(len, self.between)))
        pairs = np.array([pair for each in self.between for pair in each])
        number = np.array([count for each in self.between for count in each.values()], dtype=float)
        goal, source, edge = (np.array(part, dtype=np.int64) for part in (self.goal, self.source, self.edge))
        return goal, source, edge, row, pairs[:, 0], pairs[:, 1], number


class _Extended:
    """The rows of a network. Columns: those of the small program, then the ends of actions that wait for several."""

    def __init__(self, layout: Layout, network: _Network, size: int) -> None:
        self.size, self.count = size, network.count
        sent = np.flatnonzero(network.kind == SENT)
        sent_s = network.number[sent] * layout.crossings.sends_s[network.stage[sent]]
        self.low = np.bincount(network.row[sent], sent_s, len(network.goal))
        every = np.arange(len(network.goal))
        later = np.flatnonzero(network.source != BEGINNING)
        rows = [every, later]
        columns = [np.where(network.goal == END, LENGTH, size + network.goal), size + network.source[later]]
        values = [np.ones(len(every)), np.full(len(later), -1.0)]
        for kind, passes in enumerate(_passes(layout)):
            mine = np.flatnonzero(network.kind == kind)
            for k in passes:
                rows.append(network.row[mine])
                columns.append(layout.time_at(0, 0) + network.stage[mine] * layout.passes + k)
                values.append(-network.number[mine])
        self.rows, self.columns, self.values = np.concatenate(rows), np.concatenate(columns), np.concatenate(values)


def _passes(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Passes that an action of each kind (F, I, W, B) takes the time of."""
    return ((0,), (1,), (2,), (1, 2)) if layout.passes == 3 else ((0,), (1,), (), (1,))


def _solved(
    extended: _Extended, rows: Sequence[Row], cost: Floats, low: Floats, high: Floats, time_limit_s: float
) -> tuple[Floats, Floats] | None:
    """(values of the small program's columns, duals of the actions' rows)."""
    highspy = highs_module()
    model: Any = highspy.HighsLp()
    count, first = extended.count, len(rows)
    model.num_col_, model.num_row_ = extended.size + count, first + len(extended.low)
    infinite = highspy.kHighsInf
    model.col_cost_ = np.append(cost, np.zeros(count))
    model.col_lower_ = np.append(low, np.zeros(count))
    model.col_upper_ = np.append(np.where(np.isposinf(high), infinite, high), np.full(count, infinite))
    model.row_lower_ = np.append([row.low for row in rows], extended.low)
    model.row_upper_ = np.append([row.high for row in rows], np.full(len(extended.low), infinite))
    sizes = [len(row.columns) for row in rows]
    at = np.concatenate([np.repeat(np.arange(first), sizes), first + extended.rows])
    columns = np.concatenate([*(row.columns for row in rows), extended.columns])
    values = np.concatenate([*(row.values for row in rows), extended.values])
    order = np.argsort(at, kind="stable")
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.concatenate(([0], np.cumsum(np.bincount(at, minlength=model.num_row_)))).astype(np.int32)
    model.a_matrix_.index_, model.a_matrix_.value_ = columns[order].astype(np.int32), values[order]
    highs = new_highs(
        solver="ipm", run_crossover="off", time_limit=max(time_limit_s, 0.05), ipm_optimality_tolerance=NEARLY_BEST
    )
    highs.passModel(model)
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    solution = highs.getSolution()
    return np.array(solution.col_value)[: extended.size], np.array(solution.row_dual)[first:]


def _path(layout: Layout, network: _Network, duals: Floats) -> CriticalPath:
    """The mixture of paths nearest to the duals: flows that are kept at every action, from the last ones back, each shared
    among what it waits for as the duals say. (The duals themselves are not exactly a flow.)"""
    known, edges = network.known, len(network.kept)
    flow = np.zeros(len(known.stage))
    ends = duals[edges:]
    flow[known.last] += ends / ends.sum() if ends.sum() > 0 else 1.0 / len(ends)
    into = np.zeros(edges)
    counts = np.zeros((layout.shape.stages, 3))
    starts = np.searchsorted(known.target, np.arange(len(flow) + 1))
    for action in range(len(flow) - 1, -1, -1):
        if not flow[action]:
            continue
        mine = slice(starts[action], starts[action + 1])
        shares = duals[mine] if duals[mine].sum() > 0 else network.kept[mine].astype(float)
        into[mine] = flow[action] * (shares / shares.sum())
        for edge in range(mine.start, mine.stop):
            if known.source[edge] >= 0:
                flow[known.source[edge]] += into[edge]
    transfers = np.bincount(known.cut, into, layout.shape.stages)
    transfers[0] = 0.0  # What is not sent.
    for kind, passes in enumerate(((0,), (1,), (2,), (1, 2))):
        mine = known.kind == kind
        for k in passes:
            counts[:, k] += np.bincount(known.stage[mine], flow[mine], layout.shape.stages)
    # Less is as valid; parts that hardly count would make the row hard to solve with.
    forward, inputs, weights, sent = (
        tuple((np.floor(part / GRAIN) * GRAIN).tolist()) for part in (*counts.T, transfers)
    )
    return CriticalPath(forward, inputs, weights, sent)
