"""What a candidate fixes for its stages: schedule, ranks, virtual stages, micro-batches, memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cost_models.live import instants
from cost_models.pipeline import actions_of
from planner.ir.plan import SPLIT_BACKWARD, ScheduleName

Timetable = tuple[ScheduleName, int, int, int]
"""Schedule, pipeline ranks, virtual stages of a rank, micro-batches."""
Order = tuple[ScheduleName, int, int]
"""Less the micro-batches: it says which stages a rank has."""


@dataclass(frozen=True)
class Shape:
    """The fixed part of one candidate. ``capacity_bytes``: what one rank has, its reserve taken off."""

    schedule: ScheduleName
    pipeline: int
    virtual: int
    microbatches: int
    capacity_bytes: float

    @property
    def timetable(self) -> Timetable:
        return self.schedule, self.pipeline, self.virtual, self.microbatches

    @property
    def order(self) -> Order:
        return self.schedule, self.pipeline, self.virtual

    @property
    def stages(self) -> int:
        return self.pipeline * self.virtual

    def rank_of(self, stage: int) -> int:
        if self.schedule == "zbv" and stage >= self.pipeline:
            return 2 * self.pipeline - 1 - stage
        return stage % self.pipeline

    @cached_property
    def ranks(self) -> NDArray[np.int64]:
        """[stages]: the rank of each."""
        return np.array([self.rank_of(stage) for stage in range(self.stages)])

    @cached_property
    def crosses(self) -> NDArray[np.bool_]:
        """[stages + 1]: whether the cut before a stage lies between two ranks; none at the ends."""
        return np.append(np.append(False, self.ranks[1:] != self.ranks[:-1]), False)

    def owned(self, rank: int) -> list[int]:
        """Virtual stages of a rank, first to last in the model."""
        return [int(stage) for stage in np.flatnonzero(self.ranks == rank)]

    @property
    def splits_backward(self) -> bool:
        return self.schedule in SPLIT_BACKWARD

    @property
    def actions(self) -> int:
        """Of one step."""
        return actions_of(*self.timetable)

    def instants(self, rank: int) -> NDArray[np.int64]:
        """[instants, 3, virtual stages], in order of the stages: micro-batches alive, 1 where there are gradients, and
        micro-batches that wait for their weight part, when a rank may hold most (:func:`cost_models.live.instants`)."""
        return instants(self.schedule, self.pipeline, self.virtual, self.microbatches)[rank]


def shape_at(timetable: Timetable) -> Shape:
    """One of no memory, for what does not depend on it."""
    return Shape(*timetable, capacity_bytes=0.0)
