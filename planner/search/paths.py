"""Paths of a schedule, each a valid lower bound of its length whatever the stages' times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from cost_models.pipeline import CriticalPath
from planner.search.linear import Floats, Indices
from planner.search.shape import Shape

FIRST = 32
"""Rows that there is room for at first; then twice as many, each time that they do not suffice."""


@dataclass
class Paths:
    """Paths of one schedule that were found so far, in order. ``known``: the place of each. ``_rows`` [at least as many, 4 x
    stages]: how often they have each pass of a stage, and the transfer before it."""

    shape: Shape
    known: dict[CriticalPath, int] = field(default_factory=dict)
    all: list[CriticalPath] = field(default_factory=list)
    _rows: Floats = field(init=False)

    def __post_init__(self) -> None:
        self._rows = np.zeros((FIRST, 4 * self.shape.stages))
        self.add(start_paths(self.shape))

    def add(self, paths: Iterable[CriticalPath]) -> list[int]:
        """Keep paths, and say where each lies."""
        places = list[int]()
        for path in paths:
            place = self.known.setdefault(path, len(self.all))
            if place == len(self.all):
                if place == len(self._rows):
                    self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
                self._rows[place] = (*path.forward, *path.input_gradient, *path.weight_gradient, *path.transfers)
                self.all.append(path)
            places.append(place)
        return places

    def of_stages(self, places: Indices) -> Floats:
        """[paths, 4, stages]: how often some of the paths have each pass of a stage, and the transfer before it."""
        return self._rows[places].reshape(len(places), 4, self.shape.stages)

    def seconds(self, times: Floats, sends_s: Floats) -> Floats:
        """[paths]: their lengths under ``times`` [stages, passes], where cuts take ``sends_s`` [stages]."""
        return np.asarray(self._rows[: len(self.all)] @ np.concatenate([times.T.ravel(), sends_s]))

    def longest(self, seconds: Floats, than_s: float, most: int) -> Indices:
        """Places of the longest of paths, as far as they are longer than that."""
        order = np.argsort(-seconds, kind="stable")[:most]
        return np.asarray(order[seconds[order] > than_s])


Pool = dict[Shape, Paths]
"""Paths found so far, by schedule."""


def paths_of(pool: Pool, shape: Shape) -> Paths:
    """What is known of a schedule's paths."""
    if shape not in pool:
        pool[shape] = Paths(shape)
    return pool[shape]


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
