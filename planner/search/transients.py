"""What blocks hold transiently: of a rank, the stage with the largest sum of its largest peak and its largest gathered share,
and what the rank's other stages leave under ZeRO 2 and 3, as the evaluator counts it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from planner.search.linear import Floats, Row
from planner.search.places import Places
from planner.search.stream import Stream

if TYPE_CHECKING:
    from planner.search.rows import Layout


def least_transients(stream: Stream, places: Places) -> Floats:
    """[ranks]: bytes that some stage of the rank holds, whatever is chosen: those of the blocks that it must have, or of the
    least one that it can have."""
    least = np.array([sum(float(part.peaks.min()) for part in pair) for pair in stream.single])[:, None]
    certain = np.where(places.forced > 0, least, 0.0).max(axis=0)
    return np.asarray(np.maximum(certain, np.where(places.possible, least, np.inf).min(axis=0)))


class Transients:
    """The columns and rows of an exact program. Columns: Z[r]; P[s], G[s]: a stage's largest peak and gathered share; B[s]:
    what it leaves while others run; marks u in {0, 1}: a pair has a block of a choice. Bytes by the capacity. Z[r] is at least
    P[s] + G[s] and what the rank's other stages leave, for each of its stages s."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        shape, base = layout.shape, layout.size
        self.rank_at = base + np.arange(shape.pipeline)
        self.sizes_at = base + shape.pipeline + np.arange(3 * shape.stages).reshape(3, shape.stages)
        """Of P, G and B."""
        first = int(self.sizes_at[-1, -1]) + 1
        recompute, zero = layout.kind == 0, layout.kind == 1
        self.kinds = ((recompute, layout.peaks), (zero, layout.peaks), (zero, layout.lasting))
        self.least = np.array([
            [sizes[mine & (layout.stage == stage)].min() for stage in range(shape.stages)] for mine, sizes in self.kinds
        ])
        # A choice that has no more than the least of its stage needs no mark.
        more = [mine & (sizes > least[layout.stage]) for (mine, sizes), least in zip(self.kinds, self.least, strict=True)]
        self.choices = np.flatnonzero(np.any(more, axis=0))
        self.marks = first + np.arange(len(self.choices))
        self.size = int(first + len(self.marks) - base)

    def rows(self) -> list[Row]:
        layout, shape = self.layout, self.layout.shape
        rows = [
            Row(-math.inf, 0.0, np.array([layout.choice_at[choice], mark]), np.array([1.0, -layout.most[layout.pair[choice]]]))
            for choice, mark in zip(self.choices, self.marks, strict=True)
        ]
        for stage in range(shape.stages):
            rank = int(layout.rank_of[stage])
            beside = [self.sizes_at[2, other] for other in shape.owned(rank) if other != stage]
            columns = np.array([self.rank_at[rank], self.sizes_at[0, stage], self.sizes_at[1, stage], *beside])
            rows.append(Row(0.0, math.inf, columns, np.append(1.0, np.full(len(columns) - 1, -1.0))))
            rows += self._sizes(stage)
        return rows

    def _sizes(self, stage: int) -> list[Row]:
        layout, capacity, rows = self.layout, self.layout.shape.capacity_bytes, []
        for (kind, sizes), columns, least in zip(self.kinds, self.sizes_at, self.least, strict=True):
            rows.append(Row(least[stage] / capacity, math.inf, columns[stage : stage + 1], np.ones(1)))
            for choice, mark in zip(self.choices, self.marks, strict=True):
                if layout.stage[choice] == stage and kind[choice] and sizes[choice] > least[stage]:
                    members = np.array([columns[stage], mark])
                    rows.append(Row(0.0, math.inf, members, np.array([1.0, -sizes[choice] / capacity])))
        return rows
