"""Pairwise designs: few rows that together hold every legal pair of factor values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

Row = Mapping[str, object]
Pair = tuple[str, object, str, object]


def legal_rows(factors: Mapping[str, Sequence[object]], legal: Callable[[Row], bool]) -> Iterator[Row]:
    names = list(factors)
    for values in itertools.product(*factors.values()):
        row = dict(zip(names, values, strict=True))
        if legal(row):
            yield row


def pairs_of(row: Row) -> frozenset[Pair]:
    return frozenset((a, row[a], b, row[b]) for a, b in itertools.combinations(sorted(row), 2))


def pairwise(
    factors: Mapping[str, Sequence[object]], legal: Callable[[Row], bool], cost: Callable[[Row], float]
) -> list[Row]:
    """Greedy cover of every pair that some legal row holds: at each step the row with the most new pairs per ``cost``
    (ties: the first in the order of the factors, so that the design is the same everywhere)."""
    rows = [(row, pairs_of(row), cost(row)) for row in legal_rows(factors, legal)]
    missing = set().union(*(pairs for _, pairs, _ in rows))
    chosen: list[Row] = []
    while missing:
        row, pairs, _ = max(rows, key=lambda item: len(item[1] & missing) / item[2])
        chosen.append(row)
        missing -= pairs
    return chosen
