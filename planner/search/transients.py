"""What blocks hold transiently: of a rank, the stage with the largest sum of its largest peak and its largest gathered share,
as the evaluator counts it. (Not counted is what the rank's other stages leave under ZeRO 2 and 3, ``lasting_bytes``.)"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from planner.search.linear import Floats, Indices, Row
from planner.search.shape import Shape
from planner.search.stream import Stream

if TYPE_CHECKING:
    from planner.search.rows import Layout


def possible_ranks(stream: Stream, shape: Shape) -> NDArray[np.bool_]:
    """[runs, ranks]: whether a rank can have blocks of a run."""
    possible = np.zeros((len(stream.runs), shape.pipeline), dtype=bool)
    for run in range(len(stream.runs)):
        stages = slice(stream.first_stage(run, shape.stages), stream.last_stage(run, shape.stages) + 1)
        possible[run, shape.ranks[stages]] = True
    return possible


def forced_blocks(stream: Stream, possible: NDArray[np.bool_]) -> Indices:
    """[runs, ranks]: blocks of a run that must lie on a rank: all, where the run can be nowhere else."""
    counts = np.array([run.count for run in stream.runs])
    return np.asarray(np.where(possible & (possible.sum(axis=1) == 1)[:, None], counts[:, None], 0))


def least_transients(stream: Stream, possible: NDArray[np.bool_]) -> Floats:
    """[ranks]: bytes that some stage of the rank holds, whatever is chosen: those of the blocks that it must have, or of the
    least one that it can have."""
    least = np.array([sum(float(part.peaks.min()) for part in pair) for pair in stream.single])[:, None]
    certain = np.where(forced_blocks(stream, possible) > 0, least, 0.0).max(axis=0)
    return np.asarray(np.maximum(certain, np.where(possible, least, np.inf).min(axis=0)))


class Transients:
    """The columns and rows of an exact program. Columns: Z[r]; P[s], G[s]; marks u in {0, 1}: a pair has a block of a choice.
    Bytes by the capacity."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        shape, base = layout.shape, layout.size
        self.rank_at = base + np.arange(shape.pipeline)
        self.peak_at = base + shape.pipeline + np.arange(shape.stages)
        self.gather_at = self.peak_at + shape.stages
        first = int(self.gather_at[-1]) + 1
        self.least = [[self._least(stage, kind) for stage in range(shape.stages)] for kind in (0, 1)]
        # A choice that has no more than the least of its stage needs no mark.
        self.choices = [
            int(c) for c in range(len(layout.pair)) if layout.peaks[c] > self.least[layout.kind[c]][layout.stage[c]]
        ]
        self.mark = {c: first + i for i, c in enumerate(self.choices)}
        self.marks = np.arange(first, first + len(self.choices))
        self.size = int(first + len(self.marks) - base)

    def _least(self, stage: int, kind: int) -> float:
        layout = self.layout
        return float(layout.peaks[(layout.stage == stage) & (layout.kind == kind)].min())

    def _most(self, choice: int) -> int:
        run = self.layout.pair_run[self.layout.pair[choice]]
        stream = self.layout.stream
        return int(min(stream.runs[run].count, stream.blocks - self.layout.shape.stages + 1))

    def rows(self) -> list[Row]:
        layout, capacity = self.layout, self.layout.shape.capacity_bytes
        rows = [
            Row(-math.inf, 0.0, np.array([layout.choice_at[choice], mark]), np.array([1.0, -float(self._most(choice))]))
            for choice, mark in self.mark.items()
        ]
        for stage in range(layout.shape.stages):
            columns = np.array([self.rank_at[layout.rank_of[stage]], self.peak_at[stage], self.gather_at[stage]])
            rows.append(Row(0.0, math.inf, columns, np.array([1.0, -1.0, -1.0])))
            for kind in (0, 1):
                rows.append(Row(self.least[kind][stage] / capacity, math.inf, columns[1 + kind : 2 + kind], np.ones(1)))
            for choice in (c for c in self.choices if layout.stage[c] == stage):
                members = np.array([columns[1 + layout.kind[choice]], self.mark[choice]])
                rows.append(Row(0.0, math.inf, members, np.array([1.0, -float(layout.peaks[choice]) / capacity])))
        return rows
