"""Tables of what one block can cost: rows of choices, without those that another beats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, ONCE, OPTIMIZER, PERSISTENT, AT_TIMES, AT_WAIT = range(8)
PEAK, LASTING = 8, 9
"""Columns that follow the sums (:attr:`Table.columns`)."""
PASSES = 3
"""The first columns are seconds of a micro-batch's passes."""
WORTH_BEATING = 0.1
"""Rows that are beaten for each that is not, where looking for them is worth its time."""


@dataclass(frozen=True, eq=False)
class Table:
    """Choices of one block, one a row. ``sums`` [rows, 8]: three times of a micro-batch (s), what is sent and computed once a
    step (s), bytes all the time, at times (of recomputation for each live micro-batch, of ZeRO gradients once there are any)
    and, beyond these, of each micro-batch that waits for the weight part of its backward pass; ``peaks`` [rows]: transient
    bytes, of which ``lasting`` [rows] stay while other stages run; ``names[row]``: the choice. A table is equal to itself only:
    what is made of tables is remembered by them."""

    sums: Floats
    peaks: Floats
    lasting: Floats
    names: tuple[Any, ...]

    @property
    def columns(self) -> Floats:
        """[rows, 10]: all that a choice can be worse in."""
        return np.column_stack([self.sums, self.peaks, self.lasting])

    @cached_property
    def passes_s(self) -> Floats:
        """[rows]: of all passes of a micro-batch."""
        return np.asarray(self.sums[:, :PASSES].sum(axis=1))

    @cached_property
    def said(self) -> tuple[tuple[Any, ...], bytes]:
        """The same of tables that say the same."""
        return self.names, self.columns.tobytes()

    def rows(self, index: NDArray[np.int64]) -> Table:
        return Table(self.sums[index], self.peaks[index], self.lasting[index], tuple(self.names[i] for i in index))

    def without_beaten(self) -> Table:
        """Less the choices that another beats or equals in everything."""
        return self.rows(pareto(self.columns))

    def one_of_each(self) -> Table:
        """One row for each name, as good as any of that name in everything."""
        rows = [np.flatnonzero([name == each for each in self.names]) for name in dict.fromkeys(self.names)]
        least = np.array([self.columns[row].min(axis=0) for row in rows])
        return Table(least[:, :PEAK], least[:, PEAK], least[:, LASTING], tuple(self.names[row[0]] for row in rows))


def pareto(points: Floats, patience: float = math.inf) -> NDArray[np.int64]:
    """Rows that no other row beats or equals in every column (smaller is better), earlier rows first among equals. After so
    many rows, of which less than :data:`WORTH_BEATING` as many were beaten, the others are left as they are."""
    spread = np.ptp(points, axis=0)
    used = points[:, spread > 0] / spread[spread > 0]
    left = np.argsort(used.sum(axis=1), kind="stable")
    kept: list[int] = []
    while left.size:
        first = left[0]
        kept.append(int(first))
        beaten = (used[first] <= used[left]).all(axis=1)
        beaten[0] = True
        left = left[~beaten]
        if len(kept) == patience and len(points) - left.size < (1 + WORTH_BEATING) * len(kept):
            kept += left.tolist()
            break
    return np.array(sorted(kept), dtype=np.int64)


def table(
    names: Sequence[Any], vectors: Sequence[Sequence[float]], peaks: Sequence[float], lasting: Sequence[float] = ()
) -> Table:
    """The choices of one block; nothing stays where ``lasting`` is not given."""
    stays = np.array(lasting, dtype=float) if lasting else np.zeros(len(names))
    return Table(np.array(vectors, dtype=float), np.array(peaks, dtype=float), stays, tuple(names))


def union(tables: Sequence[Table]) -> Table:
    """All choices of several tables."""
    return Table(
        np.concatenate([t.sums for t in tables]), np.concatenate([t.peaks for t in tables]),
        np.concatenate([t.lasting for t in tables]),
        tuple(name for t in tables for name in t.names),
    )
