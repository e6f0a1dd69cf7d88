"""Tables of mixtures: what n blocks can cost together when each has its own ZeRO stage and recomputation.

Identical blocks are interchangeable, so a mixture is counted: how many of them take each choice. What recomputation
decides and what ZeRO decides add up, so the two are tabulated apart and multiplied at the end. Only mixtures that no
other beats in every time and every byte are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, TAIL, PERSISTENT, SAVED = range(6)
TIMES = 4
"""The first columns are times."""
Pick = tuple[tuple[Any, int], ...]
"""A mixture of one run: (choice, how many blocks take it)."""


@dataclass(frozen=True)
class Table:
    """Mixtures, one a row. ``sums`` [rows, 6]: three times of a micro-batch (s), the once-a-step tail (s), persistent and
    saved bytes; ``tops`` [rows, 2]: the largest transients (bytes) of single blocks, of which ``keep`` coexist.
    ``picks[row]``: one mixture for each run of the key."""

    sums: Floats
    tops: Floats
    keep: int
    picks: tuple[tuple[Pick, ...], ...]

    @property
    def transient(self) -> Floats:
        """Bytes of the transients that live together."""
        return np.asarray(self.tops[:, : self.keep].sum(axis=1))

    def rows(self, index: NDArray[np.int64]) -> Table:
        return Table(self.sums[index], self.tops[index], self.keep, tuple(self.picks[i] for i in index))


def pareto(points: Floats, tolerance: Floats | float = 0.0) -> NDArray[np.int64]:
    """Rows that no other row beats or equals in every column (smaller is better), earlier rows first among equals.

    With a ``tolerance`` (per column, absolute) a row also goes when a kept one is worse by no more than that.
    """
    spread = np.ptp(points, axis=0)
    used = points[:, spread > 0] / spread[spread > 0]
    allowed = np.broadcast_to(np.asarray(tolerance, dtype=float), points.shape[1:])[spread > 0] / spread[spread > 0]
    left = np.argsort(used.sum(axis=1), kind="stable")
    kept: list[int] = []
    while left.size:
        first = left[0]
        kept.append(int(first))
        beaten = (used[first] <= used[left] + allowed).all(axis=1)
        beaten[0] = True
        left = left[~beaten]
    return np.array(sorted(kept), dtype=np.int64)


def choices(names: Sequence[Any], vectors: Sequence[Sequence[float]], transients: Sequence[float], keep: int) -> Table:
    """The choices of one block, without those that another beats."""
    sums = np.array(vectors, dtype=float)
    tops = np.stack([np.array(transients, dtype=float), np.zeros(len(names))], axis=1)
    table = Table(sums, tops, keep, tuple((((name, 1),),) for name in names))
    return table.rows(pareto(np.column_stack([sums, tops])))


def union(tables: Sequence[Table]) -> Table:
    """All mixtures of tables of equal width, without those that another beats."""
    sums, tops = np.concatenate([t.sums for t in tables]), np.concatenate([t.tops for t in tables])
    table = Table(sums, tops, tables[0].keep, tuple(pick for t in tables for pick in t.picks))
    return table.rows(pareto(np.column_stack([sums, tops])))


def repeat(single: Table, count: int, tolerance: Floats) -> Table:
    """Mixtures of ``count`` blocks with the choices of ``single``."""
    counts = _compositions(count, len(single.picks))
    sums = counts @ single.sums
    large = single.tops[:, 0]
    tops = -np.sort(-np.column_stack([np.where(counts >= least, large, 0.0) for least in (1, 2)]), axis=1)[:, :2]
    names = [pick[0][0][0] for pick in single.picks]
    picks = tuple(
        (tuple((name, int(n)) for name, n in zip(names, row, strict=True) if n),) for row in counts
    )
    return _thinned(Table(sums, tops, single.keep, picks), tolerance)


def _compositions(count: int, kinds: int) -> NDArray[np.int64]:
    """All ways to write ``count`` as an ordered sum of ``kinds`` numbers, [ways, kinds]."""
    if kinds == 1:
        return np.array([[count]], dtype=np.int64)
    parts = []
    for first in range(count, -1, -1):
        rest = _compositions(count - first, kinds - 1)
        parts.append(np.column_stack([np.full(len(rest), first, dtype=np.int64), rest]))
    return np.concatenate(parts)


def join(left: Table, right: Table, tolerance: Floats) -> Table:
    """Mixtures of two runs together."""
    rows = np.repeat(np.arange(len(left.picks)), len(right.picks))
    columns = np.tile(np.arange(len(right.picks)), len(left.picks))
    tops = -np.sort(-np.column_stack([left.tops[rows], right.tops[columns]]), axis=1)[:, :2]
    picks = tuple(left.picks[i] + right.picks[j] for i, j in zip(rows, columns, strict=True))
    return _thinned(Table(left.sums[rows] + right.sums[columns], tops, left.keep, picks), tolerance)


def _thinned(table: Table, tolerance: Floats) -> Table:
    """Drop beaten mixtures; ``tolerance``: per time, the seconds that count as nothing."""
    slack = np.concatenate([tolerance, np.zeros(3)])
    return table.rows(pareto(np.column_stack([table.sums, table.transient]), slack))
