"""The best mixture of a schedule's paths at once: the schedule's actions as rows of a linear program, solved by an interior
point method, whose dual is a flow through the actions.

Paths that are added one by one raise a bound slowly where many are nearly as long as the longest. A program with a column for
the end of every action states all of them; its optimal dual sends one unit from the first actions to the last ones, and a unit
of flow is a mixture of paths, as valid as they are for all times. It is one row for the small program.

Most actions wait for what has long been done. Where a good solution is known, what it waits for nearly is enough to bound the
solutions near it, with a third of the rows (:func:`best_mixture`, ``near``): fewer paths are fewer constraints, as valid.
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
from planner.search.linear import Floats, Row
from planner.search.rows import LENGTH, Layout
from planner.search.shape import Shape
from planner.solver import highs_module

MOST_ACTIONS = 10_000
"""Schedules with more actions are not mixed: it would take too long."""
SECONDS, OF_ACTIONS, GROWTH = 0.05, 512, 1.5
"""What so many actions take on a core of today, about, and how it grows: whether to begin is all that it decides."""
GRAIN = 1e-4
"""Times are counted in a mixture by multiples of this."""
TIGHT = 0.006
"""Paths count as near a solution that are shorter than its longest one by less than this part."""


@dataclass(frozen=True)
class Mixture:
    """``path``: a mixture of paths; ``values``: the small program's columns where T + R is least under all paths, about."""

    path: CriticalPath
    values: Floats


_dependencies = lru_cache(maxsize=64)(dependencies)


def mixing_seconds(shape: Shape) -> float:
    """About what the method takes; infinite for schedules that are too long, and where the solver is missing."""
    actions = (3 if shape.splits_backward else 2) * shape.stages * shape.microbatches
    return SECONDS * (actions / OF_ACTIONS) ** GROWTH if actions <= MOST_ACTIONS and highs_module() is not None else math.inf


def best_mixture(
    layout: Layout, rows: Sequence[Row], cost: Floats, low: Floats, high: Floats, time_limit_s: float,
    near: Sequence[Floats] = (),
) -> Mixture | None:
    """The mixture that raises the optimum of these rows most; None where the method does not arrive in time. ``near``: times
    [stages, 3]; where there are any, the best mixture of paths that are nearly the longest under one of them."""
    shape = layout.shape
    known = _dependencies(shape.schedule, shape.pipeline, shape.virtual, shape.microbatches)
    edges = len(known.target) + len(known.last)
    tight = [_tight(known, times, layout.stream.send_s) for times in near]
    kept = np.any(tight, axis=0) if tight else np.ones(edges, dtype=bool)
    answer = _solved(_Extended(layout, known, len(cost), kept), rows, cost, low, high, time_limit_s)
    if answer is None:
        return None
    duals = np.zeros(edges)
    duals[kept] = np.maximum(answer[1], 0.0)
    return Mixture(_path(layout, known, duals), answer[0])


def _tight(known: Dependencies, times: Floats, send_s: float) -> NDArray[np.bool_]:
    """[edges, then ranks]: whether a path over an edge, or to a rank's last action, is nearly as long as the longest."""
    by_kind = np.column_stack([times, times[:, 1] + times[:, 2]])
    lasting = by_kind[known.stage, known.kind]
    waits = np.where(known.cut > 0, send_s, 0.0)
    edges = list(zip(known.target.tolist(), known.source.tolist(), waits.tolist(), strict=True))
    # Behind the actions, a place for what negative sources mean: the beginning of the step.
    ends, rest, own = [0.0] * (len(lasting) + 1), [-math.inf] * (len(lasting) + 1), lasting.tolist()
    for target, source, wait in edges:
        ends[target] = max(ends[target], ends[source] + wait + own[target])
    for last in known.last.tolist():
        rest[last] = 0.0
    for target, source, wait in reversed(edges):
        rest[source] = max(rest[source], rest[target] + own[target] + wait)
    ended = np.array(ends)
    through = ended[known.source] + waits + lasting[known.target] + np.array(rest)[known.target]
    return np.asarray(np.append(through, ended[known.last]) > (1 - TIGHT) * ended[known.last].max())


class _Extended:
    """The rows of the actions: an action ends its own time after what it waits for has, T is no less than any end.

    Columns: those of the small program, then the end of every action. Rows: [edges] by action: of the action before it on its
    rank, of the one that makes its input (with the transfer), of the beginning where it has neither; then one of each rank's
    last. ``kept``: those of the rows that there are."""

    def __init__(self, layout: Layout, known: Dependencies, size: int, kept: NDArray[np.bool_]) -> None:
        self.layout = layout
        times = [self._times(kind) for kind in range(4)]
        self.low = np.where(known.cut > 0, layout.stream.send_s, 0.0)
        rows, columns, values = [], [], []
        edges = np.arange(len(known.target))
        for at, sign in ((size + known.target, 1.0), (size + known.source, -1.0)):
            there = at >= size
            rows.append(edges[there])
            columns.append(at[there])
            values.append(np.full(int(there.sum()), sign))
        for kind, passes in enumerate(times):
            mine = edges[known.kind[known.target] == kind]
            stage = known.stage[known.target[mine]]
            for k in passes:
                rows.append(mine)
                columns.append(layout.time_at(0, 0) + stage * layout.passes + k)
                values.append(np.full(len(mine), -1.0))
        last = len(edges) + np.arange(len(known.last))
        rows += [last, last]
        columns += [np.full(len(last), LENGTH), size + known.last]
        values += [np.ones(len(last)), np.full(len(last), -1.0)]
        self.low = np.append(self.low, np.zeros(len(last)))[kept]
        self.count, self.size = len(known.stage), size
        all_rows = np.concatenate(rows)
        there = kept[all_rows]
        self.rows = (np.cumsum(kept) - 1)[all_rows[there]]
        self.columns, self.values = np.concatenate(columns)[there], np.concatenate(values)[there]

    def _times(self, kind: int) -> tuple[int, ...]:
        """Passes that an action of a kind (F, I, W, B) takes the time of."""
        if self.layout.passes == 3:
            return ((0,), (1,), (2,), (1, 2))[kind]
        return ((0,), (1,), (), (1,))[kind]


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
    highs = highspy.Highs()
    for name, value in (
        ("output_flag", False), ("threads", 1), ("solver", "ipm"), ("run_crossover", "off"),
        ("time_limit", max(time_limit_s, 0.05)),
    ):
        highs.setOptionValue(name, value)
    highs.passModel(model)
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    solution = highs.getSolution()
    return np.array(solution.col_value)[: extended.size], np.array(solution.row_dual)[first:]


def _path(layout: Layout, known: Dependencies, duals: Floats) -> CriticalPath:
    """The mixture of paths nearest to the duals: flows that are kept at every action, from the last ones back, each shared
    among what it waits for as the duals say. (The duals themselves are not exactly a flow.)"""
    edges = len(known.target)
    flow = np.zeros(len(known.stage))
    ends = duals[edges:]
    flow[known.last] += ends / ends.sum() if ends.sum() > 0 else 1.0 / len(ends)
    into = np.zeros(edges)
    counts = np.zeros((layout.shape.stages, 3))
    transfers = np.zeros(layout.shape.stages)
    starts = np.searchsorted(known.target, np.arange(len(flow) + 1))
    for action in range(len(flow) - 1, -1, -1):
        if not flow[action]:
            continue
        mine = slice(starts[action], starts[action + 1])
        shares = duals[mine]
        total = float(shares.sum())
        into[mine] = flow[action] * (shares / total if total > 0 else 1.0 / (mine.stop - mine.start))
        for edge in range(mine.start, mine.stop):
            if known.source[edge] >= 0:
                flow[known.source[edge]] += into[edge]
            transfers[known.cut[edge]] += into[edge]
    for kind, passes in enumerate(((0,), (1,), (2,), (1, 2))):
        mine = known.kind == kind
        for k in passes:
            counts[:, k] += np.bincount(known.stage[mine], flow[mine], layout.shape.stages)
    transfers[0] = 0.0  # What is not sent.
    # Less is as valid; parts that hardly count would make the row hard to solve with.
    forward, inputs, weights, sent = (
        tuple((np.floor(part / GRAIN) * GRAIN).tolist()) for part in (*counts.T, transfers)
    )
    return CriticalPath(forward, inputs, weights, sent)
