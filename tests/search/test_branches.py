"""What is left of a branch beside one of its points."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from planner.search.branches import Box, Branches
from planner.search.counted import Ranks
from planner.search.counts import Counts
from planner.search.linear import Floats
from planner.search.shape import Shape
from planner.search.works import works
from tests.search import streams

SHAPE = Shape("interleaved-1f1b", 2, 2, 4, streams.CAPACITY)


def holds(counts: Counts, box: Box, values: Floats) -> bool:
    """Whether a point lies in a box."""
    amounts = (values[counts.shares[at].columns].sum() if shared else values[at] for (shared, at), _ in box)
    return all(low <= amount <= high for amount, (_, (low, high)) in zip(amounts, box, strict=True))


@pytest.mark.parametrize("part", ["all", "a rank's sum", "a stage's number"])
@pytest.mark.parametrize("seed", range(4))
def test_every_other_point_is_in_one_part(seed: int, part: str) -> None:
    """No plan is left out, and none is looked for twice."""
    stream = streams.draw(seed, blocks=SHAPE.stages + 4)
    counts = Counts(Ranks(stream, SHAPE, works(stream, SHAPE.microbatches)), {})
    assert counts.restrict(math.inf)
    at, layout = counts.layout.n_at, counts.layout
    totals = [run.count for run in stream.runs]
    points = list[Floats]()
    for numbers in itertools.product(*(range(int(most) + 1) for most in layout.most)):
        values = np.zeros(layout.size)
        values[at] = numbers
        if np.bincount(layout.pair_run, values[at], len(totals)).tolist() == totals:
            points.append(values)
    here = points[len(points) // 3]
    boxes: dict[str, Box] = {
        "all": (), "a rank's sum": (((True, 0), (float(here[counts.shares[0].columns].sum()), math.inf)),),
        "a stage's number": (((False, int(at[1])), (0.0, float(here[at[1]]))),),
    }
    inside = [point for point in points if holds(counts, boxes[part], point)]
    parts = list(Branches(counts)._beside(boxes[part], here))
    assert len(inside) > 1
    for point in inside:
        assert sum(holds(counts, box, point) for box in parts) == (not np.array_equal(point, here))
