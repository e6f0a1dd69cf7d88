"""The master ILP of one candidate: which column each virtual stage takes.

Variables    y[c] in {0, 1} for every column c; T, the length of the pipeline; R, what the slowest rank does once a step;
             Z[r], the largest transient of rank r (where a rank has several virtual stages).
Constraints  every virtual stage takes one column; a stage begins at the node where the one before ends; every run is used
             up; R is at least each rank's once-a-step sum; for each rank and live profile of the schedule, persistent
             bytes + live micro-batches x saved bytes + Z[r] fit, with Z[r] at least each stage's transient;
             T is at least the length of each path found so far: counts of the path x the columns' times and transfers.
Objective    T + R, least.

The schedule is a fixed DAG, so every path's length is linear in the columns and valid for all plans of the candidate. The
LP is solved, its mean stage times are simulated, and their critical path is added, until the simulation agrees; then
come the integers, with columns left out whose reduced cost exceeds what can still be gained.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np
from numpy.typing import NDArray

from cost_models.pipeline import CriticalPath, StageTimes, simulate
from planner.search.chain import Chain
from planner.search.columns import Columns, Shape
from planner.search.tables import PERSISTENT, SAVED, TAIL, Floats

Mask = NDArray[np.bool_]
Indices = NDArray[np.int64]


@dataclass
class Master:
    """One candidate's problem. ``send_s``: seconds over a cut at each node of the chain."""

    chain: Chain
    shape: Shape
    columns: Columns
    send_s: Sequence[float]
    cuts: list[Floats] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._sends = np.array([*self.send_s, 0.0])[self.columns.start] * (self.columns.stage > 0)
        self._relaxation: highspy.Highs | None = None
        self._base = _base_rows(self.chain, self.shape, self.columns)
        for path in work_paths(self.shape):
            self.add_cut(path)

    def add_cut(self, path: CriticalPath) -> None:
        """T is at least the length of this path."""
        stage, vectors = self.columns.stage, self.columns.vectors
        length = np.array(path.forward)[stage] * vectors[:, 0] + np.array(path.input_gradient)[stage] * vectors[:, 1]
        length += np.array(path.weight_gradient)[stage] * vectors[:, 2] + np.array(path.transfers)[stage] * self._sends
        self.cuts.append(length)
        if self._relaxation is not None:
            members = np.append(np.flatnonzero(length), len(length)).astype(np.int32)
            values = np.append(-length[members[:-1]], 1.0)
            self._relaxation.addRow(0.0, highspy.kHighsInf, len(members), members, values)

    def simulate_mean(self, weights: Floats) -> tuple[float, CriticalPath]:
        """Length and critical path of the pipeline under the columns' mean times."""
        stages, stage = self.shape.stages, self.columns.stage
        means = [
            np.bincount(stage, weights * values, stages)
            for values in (*self.columns.vectors[:, :3].T, self._sends)
        ]
        times = [StageTimes(*(float(mean[i]) for mean in means[:3])) for i in range(stages)]
        shape = self.shape
        line = simulate(shape.schedule, shape.pipeline, shape.virtual, shape.microbatches, times, means[3].tolist())
        return line.total_s, line.critical_path

    def relaxation(self) -> highspy.Highs:
        """The LP over all columns; kept, so that it goes on from its last basis after a cut."""
        if self._relaxation is None:
            self._relaxation = build_model(*self._problem(None))
        return self._relaxation

    def solve(self, *, integer: bool, time_limit_s: float, gap: float, use: Mask | None = None) -> Answer:
        """Solve with the cuts so far, over the columns of ``use`` (all, if not given)."""
        chosen = np.arange(len(self.columns)) if use is None else np.flatnonzero(use)
        highs = build_model(*self._problem(use)) if integer else self.relaxation()
        return _solve(highs, chosen, len(self.columns), integer, max(time_limit_s, 0.05), gap)

    def _problem(self, use: Mask | None) -> tuple[list[Row], Indices, int, int]:
        """Rows, the place of every column among the used ones (-1: left out), how many are used, extra variables."""
        chosen = np.arange(len(self.columns)) if use is None else np.flatnonzero(use)
        place = np.full(len(self.columns), -1)
        place[chosen] = np.arange(len(chosen))
        everything = np.arange(len(self.columns))
        cuts = [Row(0.0, math.inf, everything, -length, ((0, 1.0),)) for length in self.cuts]
        extras = 2 + (self.shape.pipeline if self.shape.virtual > 1 else 0)
        return [*self._base, *cuts], place, len(chosen), extras


@dataclass(frozen=True)
class Answer:
    """``bound``: proven lower bound of T + R (infinite: infeasible). ``weights``: y of every column, None without a
    solution; ``reduced_s``: reduced costs of an LP."""

    bound: float
    objective: float
    pipeline_s: float
    weights: Floats | None
    reduced_s: Floats | None


@dataclass(frozen=True)
class Row:
    """``low <= values over columns + extra variables <= high``."""

    low: float
    high: float
    columns: Indices
    values: Floats
    extra: tuple[tuple[int, float], ...] = ()


def _base_rows(chain: Chain, shape: Shape, columns: Columns) -> list[Row]:
    """All constraints but the cuts. Extra variables: 0 is T, 1 is R, 2 + r is Z[r]."""
    rows: list[Row] = []
    everything = np.arange(len(columns))
    of_stage = [everything[columns.stage == stage] for stage in range(shape.stages)]
    for members in of_stage:
        rows.append(Row(1.0, 1.0, members, np.ones(len(members))))
    for stage in range(shape.stages - 1):
        for node in range(len(chain.runs)):
            ends = of_stage[stage][columns.end[of_stage[stage]] == node]
            starts = of_stage[stage + 1][columns.start[of_stage[stage + 1]] == node]
            if len(ends) or len(starts):
                signs = np.concatenate([np.ones(len(ends)), -np.ones(len(starts))])
                rows.append(Row(0.0, 0.0, np.concatenate([ends, starts]), signs))
    used = np.array(columns.keys, dtype=float)[columns.source]
    for run in range(len(chain.runs)):
        members = np.flatnonzero(used[:, run])
        rows.append(Row(chain.runs[run].count, chain.runs[run].count, members, used[members, run]))
    for rank in range(shape.pipeline):
        owned = [stage for stage in range(shape.stages) if shape.rank_of(stage) == rank]
        members = np.concatenate([of_stage[stage] for stage in owned])
        rows.append(Row(0.0, math.inf, members, -columns.vectors[members, TAIL], ((1, 1.0),)))
        if shape.virtual > 1:
            rows += _memory_rows(shape, columns, of_stage, rank, owned)
    return rows


def _memory_rows(
    shape: Shape, columns: Columns, of_stage: Sequence[Indices], rank: int,
    owned: Sequence[int],
) -> list[Row]:
    """Bytes are divided by the capacity, so that the rows are scaled like the others."""
    members = np.concatenate([of_stage[stage] for stage in owned])
    rows = []
    for vector in shape.live(rank):
        live = np.array([vector[owned.index(int(stage))] for stage in columns.stage[members]])
        size = (columns.vectors[members, PERSISTENT] + live * columns.vectors[members, SAVED]) / shape.capacity_bytes
        rows.append(Row(-math.inf, 1.0, members, size, ((2 + rank, 1.0),)))
    for stage in owned:
        values = -columns.transient[of_stage[stage]] / shape.capacity_bytes
        rows.append(Row(0.0, math.inf, of_stage[stage], values, ((2 + rank, 1.0),)))
    return rows


def work_paths(shape: Shape) -> list[CriticalPath]:
    """Paths that every schedule has: all of one rank's work, after the first micro-batch has passed the stages before it;
    where a rank ends with the backward pass of its first stage, also that micro-batch's way back."""
    paths = []
    for rank in range(shape.pipeline):
        forward = [shape.microbatches if shape.rank_of(stage) == rank else 0 for stage in range(shape.stages)]
        backward, transfers = list(forward), [0] * shape.stages
        forward[:rank] = [1] * rank
        transfers[1 : rank + 1] = [1] * rank
        if not shape.splits_backward:
            backward[:rank] = [1] * rank
            transfers[1 : rank + 1] = [2] * rank
        paths.append(CriticalPath(tuple(forward), tuple(backward), tuple(backward), tuple(transfers)))
    return paths


def _solve(
    highs: highspy.Highs, chosen: Indices, columns: int, integer: bool, time_limit_s: float, gap: float
) -> Answer:
    """Run HiGHS over the ``chosen`` of all ``columns``."""
    highs.setOptionValue("time_limit", time_limit_s)
    highs.setOptionValue("mip_rel_gap", gap)
    if integer:
        kinds = np.full(len(chosen), highspy.HighsVarType.kInteger)
        highs.changeColsIntegrality(len(chosen), np.arange(len(chosen), dtype=np.int32), kinds)
    highs.run()
    status, info = highs.getModelStatus(), highs.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        return Answer(math.inf, math.inf, math.inf, None, None)
    optimal = status == highspy.HighsModelStatus.kOptimal
    bound = info.mip_dual_bound if integer else (info.objective_function_value if optimal else 0.0)
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible or (not integer and not optimal):
        return Answer(max(bound, 0.0), math.inf, math.inf, None, None)
    solution = highs.getSolution()
    values = np.array(solution.col_value)
    weights = np.zeros(columns)
    weights[chosen] = values[: len(chosen)]
    reduced = None if integer else np.array(solution.col_dual)[: len(chosen)]
    return Answer(bound, info.objective_function_value, float(values[len(chosen)]), weights, reduced)


def build_model(rows: Sequence[Row], place: Indices, count: int, extras: int) -> highspy.Highs:
    """The rows as a HiGHS model over ``count`` columns and the extra variables."""
    starts, indices, values, low, high = [0], [], [], [], []
    for row in rows:
        at = place[row.columns]
        kept = at >= 0
        indices.append(np.concatenate([at[kept], [count + i for i, _ in row.extra]]))
        values.append(np.concatenate([row.values[kept], [value for _, value in row.extra]]))
        starts.append(starts[-1] + len(indices[-1]))
        low.append(row.low)
        high.append(row.high)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = count + extras, len(rows)
    lp.col_cost_ = np.concatenate([np.zeros(count), [1.0, 1.0], np.zeros(extras - 2)])
    lp.col_lower_ = np.zeros(count + extras)
    lp.col_upper_ = np.concatenate([np.ones(count), np.full(extras, highspy.kHighsInf)])
    lp.row_lower_ = np.where(np.isneginf(low), -highspy.kHighsInf, low)
    lp.row_upper_ = np.where(np.isposinf(high), highspy.kHighsInf, high)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.array(starts, dtype=np.int32)
    lp.a_matrix_.index_ = np.concatenate(indices).astype(np.int32)
    lp.a_matrix_.value_ = np.concatenate(values)
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.passModel(lp)
    return highs


FIRST_CUTS = 6


@dataclass(frozen=True)
class Effort:
    """When to stop: relative ``gap``, a ``deadline`` (time.perf_counter), how many cuts at most."""

    gap: float
    deadline: float
    cuts: int = 60


def relax(master: Master, effort: Effort, worthless_s: float) -> Answer:
    """The LP with critical-path cuts until the simulation agrees, or the bound passes ``worthless_s``."""
    answer = Answer(0.0, math.inf, math.inf, None, None)
    for _ in range(effort.cuts):
        latest = master.solve(integer=False, time_limit_s=effort.deadline - time.perf_counter(), gap=0.0)
        if latest.weights is None:
            return latest if math.isinf(latest.bound) else answer
        answer = latest
        if answer.bound >= worthless_s or time.perf_counter() > effort.deadline:
            return answer
        length, path = master.simulate_mean(latest.weights)
        if length <= answer.pipeline_s * (1 + effort.gap / 4):
            return answer
        master.add_cut(path)
    return answer


def integers(
    master: Master, relaxed: Answer, effort: Effort, best_s: float, judge: Callable[[Floats], float]
) -> float:
    """Improve on ``best_s`` by whole columns. ``judge`` evaluates a choice of columns and returns the best step so far.
    Returns the lower bound that was proven, at most the best step."""
    bound = relaxed.bound
    if relaxed.weights is None:
        return bound
    for _ in range(effort.cuts):
        proven = math.isfinite(best_s) and best_s - bound <= effort.gap * best_s
        if proven or time.perf_counter() > effort.deadline:
            break
        promising = None if relaxed.reduced_s is None else relaxed.reduced_s <= best_s - relaxed.bound
        answer = master.solve(
            integer=True, time_limit_s=effort.deadline - time.perf_counter(), gap=effort.gap / 2, use=promising
        )
        # Columns left out can only be in plans that are no better than the best one.
        bound = max(bound, min(answer.bound, best_s))
        if answer.weights is None:
            break
        length, path = master.simulate_mean(answer.weights)
        best_s = judge(answer.weights)
        if length <= answer.pipeline_s * (1 + 1e-9):
            break
        master.add_cut(path)
    return min(bound, best_s)
