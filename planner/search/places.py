"""Where blocks of runs can lie, which the runs' lengths and the order of stages decide; whatever anything costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.search.linear import Indices
from planner.search.shape import Order, Shape, shape_at

Spans = tuple[tuple[int, int], ...]
"""The first block of each run and the number of its blocks."""


@dataclass(frozen=True)
class Places:
    """Of the ranks of one shape, or of several, one shape after the other. [runs, ranks] all: ``possible``: whether a rank can
    have blocks of a run; ``forced``: blocks of a run that must lie on a rank: all, where the run can be nowhere else.
    ``begun``, ``alone``: the same of each rank's first stage in the model's order."""

    possible: NDArray[np.bool_]
    forced: Indices
    begun: NDArray[np.bool_]
    alone: Indices

    @staticmethod
    def joined(parts: Sequence[Places]) -> Places:
        """Of all their shapes."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*((part.possible, part.forced, part.begun, part.alone) for part in parts), strict=True)
        return Places(*(np.concatenate(column, axis=1) for column in columns))


def can_lie(spans: Spans, stages: int) -> NDArray[np.bool_]:
    """[runs, stages]: whether a stage can have blocks of a run; each before it has a block, and each one after it."""
    first, counts = np.array(spans).T[:, :, None]
    at, blocks = np.arange(stages), int(counts.sum())
    return np.asarray((first - (blocks - stages) <= at) & (at < first + counts))


def places_of(spans: Spans, shapes: Sequence[Shape]) -> Places:
    """Of several shapes of as many ranks each."""
    return _places_of(spans, tuple(shape.order for shape in shapes))


@lru_cache(maxsize=256)
def _places_of(spans: Spans, orders: tuple[Order, ...]) -> Places:
    return Places.joined([_places(spans, order) for order in orders])


@lru_cache(maxsize=4096)
def _places(spans: Spans, order: Order) -> Places:
    shape = shape_at((*order, 1))
    counts = np.array([count for _, count in spans])[:, None]
    can = can_lie(spans, shape.stages)
    possible = can @ (shape.ranks[:, None] == np.arange(shape.pipeline))
    forced = np.where(possible & (possible.sum(axis=1) == 1)[:, None], counts, 0)
    begun = can[:, : shape.pipeline]
    single = can.sum(axis=1, keepdims=True) == 1
    return Places(possible, forced, begun, np.where(begun & single, counts, 0))
