"""Paths of a schedule, each a valid lower bound of its length whatever the stages' times."""

from __future__ import annotations

from cost_models.pipeline import CriticalPath
from planner.search.shape import Shape

Pool = dict[Shape, list[CriticalPath]]
"""Paths found so far, by schedule."""


def start_paths(shape: Shape) -> list[CriticalPath]:
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
