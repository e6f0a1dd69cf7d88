"""The fluid bound: blocks as a liquid that flows over the virtual stages, under each rank's memory.

Variables    x[s, k, a], y[s, k, z] >= 0: blocks of run k on virtual stage s with recomputation a, and with ZeRO stage z;
             T, the length of the pipeline; R, what the slowest rank does once a step.
Constraints  both count the same blocks: sum over a of x = sum over z of y; every run is used up; every stage has a block;
             block i lies on a stage that leaves one block for each stage before it and after it; for each rank and live
             profile, persistent bytes + live micro-batches x saved bytes + the least transient fit; R is at least each
             rank's once-a-step sum; T is at least the length of each known path of the schedule.
Objective    T + R, least.

Every plan is a point of it, so its optimum is a bound. It forgets that blocks are whole and contiguous, but it knows that
stages which keep many micro-batches alive must recompute or shard, and it has a few hundred variables.
Paths are valid for all times of a schedule, so candidates that share one share its paths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np

from cost_models.pipeline import CriticalPath, StageTimes, simulate
from planner.evaluate import receive_buffer_bytes
from planner.search.chain import Chain, Run
from planner.search.columns import Indices, Shape
from planner.search.master import Row, build_model, work_paths
from planner.search.tables import PERSISTENT, SAVED, TAIL, Floats, Table, union

MOST_PATHS = 12
Pool = dict[Shape, list[CriticalPath]]
"""Paths found so far, by schedule; the capacity is left out of the key's meaning because all chips are equal."""


@dataclass(frozen=True)
class Stream:
    """What flows. ``single``: per run, the choices of one block: of recomputation and of ZeRO stages."""

    runs: tuple[Run, ...]
    single: tuple[tuple[Table, Table], ...]
    context_s: float

    @property
    def blocks(self) -> int:
        return sum(run.count for run in self.runs)

    @property
    def crossing_bytes(self) -> int:
        """Over every cut, at least."""
        return min((run.crossing_bytes for run in self.runs if run.first), default=0)


def stream_of(chain: Chain) -> Stream:
    """A chain as it is."""
    return Stream(chain.runs, chain.single, chain.costed.context_s)


def merged(chains: Sequence[Chain]) -> Stream | None:
    """Every block may have the choices of any of the chains: a bound of this is a bound of all of them. None where their
    runs differ."""
    runs = list(chains[0].runs)
    for chain in chains[1:]:
        if [(run.body, run.first, run.count) for run in chain.runs] != [(run.body, run.first, run.count) for run in runs]:
            return None
        runs = [min(pair, key=lambda run: run.crossing_bytes) for pair in zip(runs, chain.runs, strict=True)]
    single = tuple(
        (union([chain.single[at][0] for chain in chains]), union([chain.single[at][1] for chain in chains]))
        for at in range(len(runs))
    )
    return Stream(tuple(runs), single, chains[0].costed.context_s)


@dataclass
class Fluid:
    """The relaxation of one candidate. ``parts``: blocks of each virtual stage in the last solution."""

    stream: Stream
    shape: Shape
    send_s: float
    pool: Pool
    bound: float = 0.0
    parts: tuple[float, ...] = ()
    _rows: _Rows = field(init=False)

    def __post_init__(self) -> None:
        self._rows = _Rows(self.stream, self.shape)
        if self.shape not in self.pool:
            self.pool[self.shape] = work_paths(self.shape)

    def solve(self, worthless_s: float, rounds: int) -> float:
        """Raise the bound, until it passes ``worthless_s`` or the simulation agrees; infinite where nothing fits."""
        rows, paths = self._rows, self.pool[self.shape]
        if rows.hopeless:
            return math.inf
        model = build_model([*rows.rows, *(rows.cut(p, self.send_s) for p in paths)], np.arange(rows.count), rows.count, 2)
        for _ in range(rounds):
            model.run()
            status = model.getModelStatus()
            if status == highspy.HighsModelStatus.kInfeasible:
                self.bound = math.inf
                return math.inf
            if status != highspy.HighsModelStatus.kOptimal:
                return self.bound
            self.bound = max(self.bound, model.getInfo().objective_function_value)
            values = np.array(model.getSolution().col_value)
            self.parts = tuple(rows.blocks(values[: rows.count]).tolist())
            if self.bound >= worthless_s or len(paths) >= MOST_PATHS + self.shape.pipeline:
                return self.bound
            length, path = self._simulate(values[: rows.count])
            if length <= values[rows.count] * (1 + 1e-4):
                return self.bound
            paths.append(path)
            row = rows.cut(path, self.send_s)
            members = np.append(np.flatnonzero(row.values), rows.count).astype(np.int32)
            model.addRow(0.0, highspy.kHighsInf, len(members), members, np.append(row.values[members[:-1]], 1.0))
        return self.bound

    def _simulate(self, values: Floats) -> tuple[float, CriticalPath]:
        rows, shape = self._rows, self.shape
        times = [np.bincount(rows.stage, values * rows.vectors[:, i], shape.stages) for i in range(3)]
        stages = [
            StageTimes(float(times[0][i]) + self.stream.context_s, float(times[1][i]), float(times[2][i]))
            for i in range(shape.stages)
        ]
        sends = [0.0] + [self.send_s] * (shape.stages - 1)
        line = simulate(shape.schedule, shape.pipeline, shape.virtual, shape.microbatches, stages, sends)
        return line.total_s, line.critical_path


class _Rows:
    """Variables are parts of a run (so that none exceeds 1), one for each (stage, run, choice). ``vectors``: [variables,
    6] as in :mod:`tables`, for the whole run."""

    def __init__(self, stream: Stream, shape: Shape) -> None:
        self.stream, self.shape = stream, shape
        stages, runs, kinds, vectors, peaks = [], [], [], [], []
        for stage in range(shape.stages):
            for run, piece in enumerate(stream.runs):
                if piece.first + piece.count - 1 < stage or piece.first > stream.blocks - shape.stages + stage:
                    continue
                for kind, table in enumerate(stream.single[run]):
                    stages += [stage] * len(table.sums)
                    runs += [run] * len(table.sums)
                    kinds += [kind] * len(table.sums)
                    vectors.append(table.sums * piece.count)
                    peaks.append(table.transient)
        self.stage, self.run, self.kind = np.array(stages), np.array(runs), np.array(kinds)
        self.vectors, self.peaks = np.concatenate(vectors), np.concatenate(peaks)
        self.count = len(stages)
        self.hopeless = False
        self.rows = [*self._flow(), *self._ranks()]

    def blocks(self, values: Floats) -> Floats:
        """Blocks on every virtual stage."""
        counts = np.array([run.count for run in self.stream.runs], dtype=float)[self.run]
        return np.asarray(np.bincount(self.stage, values * counts * (self.kind == 0), self.shape.stages))

    def _flow(self) -> list[Row]:
        rows = []
        counts = np.array([run.count for run in self.stream.runs], dtype=float)[self.run]
        first = self.kind == 0
        for stage in range(self.shape.stages):
            mine = self.stage == stage
            members = np.flatnonzero(mine & first)
            rows.append(Row(1.0, math.inf, members, counts[members]))
            for run in np.unique(self.run[mine]):
                members = np.flatnonzero(mine & (self.run == run))
                rows.append(Row(0.0, 0.0, members, np.where(first[members], 1.0, -1.0)))
        for run in range(len(self.stream.runs)):
            members = np.flatnonzero((self.run == run) & first)
            rows.append(Row(1.0, 1.0, members, np.ones(len(members))))
        return rows

    def _ranks(self) -> list[Row]:
        rows, shape = [], self.shape
        rank_of = np.array([shape.rank_of(stage) for stage in range(shape.stages)])
        for rank in range(shape.pipeline):
            owned = np.flatnonzero(rank_of == rank)
            members = np.flatnonzero(rank_of[self.stage] == rank)
            rows.append(Row(0.0, math.inf, members, -self.vectors[members, TAIL], ((1, 1.0),)))
            slot = np.searchsorted(owned, self.stage[members])
            received = self.stream.crossing_bytes * self._received(owned, rank_of)
            free = shape.capacity_bytes - self._least_peak(members) - received
            self.hopeless = self.hopeless or free <= 0
            for profile in shape.live(rank):
                live = np.array(profile, dtype=float)[slot]
                size = self.vectors[members, PERSISTENT] + live * self.vectors[members, SAVED]
                rows.append(Row(-math.inf, 1.0, members, size / max(free, 1.0)))
        return rows

    def _least_peak(self, members: Indices) -> float:
        return float(sum(self.peaks[members[self.kind[members] == kind]].min() for kind in (0, 1)))

    def _received(self, owned: Indices, rank_of: Indices) -> int:
        """How many messages a rank's buffers hold at least."""
        shape = self.shape
        return sum(
            receive_buffer_bytes(shape.schedule, stage, shape.stages, shape.microbatches, *(
                int(0 < cut < shape.stages and rank_of[cut - 1] != rank_of[cut]) for cut in (stage, stage + 1)
            ))
            for stage in map(int, owned)
        )

    def cut(self, path: CriticalPath, send_s: float) -> Row:
        """T is at least the length of the path. The constant part (transfers, context) is spread over the first run."""
        counts = np.column_stack([path.forward, path.input_gradient, path.weight_gradient])[self.stage]
        values = -(counts * self.vectors[:, :3]).sum(axis=1)
        constant = sum(path.forward) * self.stream.context_s + sum(path.transfers) * send_s
        # The parts of the first run sum to one.
        values[(self.run == 0) & (self.kind == 0)] -= constant
        return Row(0.0, math.inf, np.arange(self.count), values, ((0, 1.0),))
