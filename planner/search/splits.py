"""Which number of blocks a branch is parted at.

Where ranks run in lockstep, any stage's number can be the one with a fraction: which one a solver's corner has says nothing,
and parting there moves the fraction elsewhere. What counts is how long a schedule gets where a stage has a block less or more.
That is asked by simulating: the stage alone is made whole, its rank's other stages take or give what it has less or more in
proportion. It is an estimate, for other ranks could give way: how much of it bounds have risen by is remembered for each stage
and side, like pseudo-costs (Benichou et al. 1971, "Experiments in mixed-integer linear programming"). All this is only an order
of what to try.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cost_models.pipeline import lengths
from planner.search.linear import Floats, Indices
from planner.search.rows import Layout

LEAST_S, MOST_TIMES = 1e-4, 3.0
"""Estimates are no less than this, and no bound rises by more times as much."""
NEARLY = 1e-5
"""So little less than a whole number is it."""


@dataclass(frozen=True, slots=True)
class Split:
    """A ``column`` is at most ``below`` on one side and more on the other; ``gains_s`` of both: what simulations say that the
    schedule gets longer."""

    column: int
    below: float
    gains_s: tuple[float, float]


@dataclass
class Splits:
    """What is known of a chain's splits. ``told`` [column, side]: how many branches have told how much their bounds rose, in
    parts of what was estimated, all together."""

    told: dict[tuple[int, int], tuple[int, float]] = field(default_factory=dict)
    _all: tuple[int, float] = (1, 1.0)

    def learn(self, split: Split, side: int, gained_s: float) -> None:
        """A bound rose by so much on one side of a split."""
        part = min(gained_s / split.gains_s[side], MOST_TIMES)
        number, parts = self.told.get((split.column, side), (0, 0.0))
        self.told[split.column, side] = number + 1, parts + part
        self._all = self._all[0] + 1, self._all[1] + part

    def best(self, layout: Layout, values: Floats, low: Floats, high: Floats, left_s: float) -> Split | None:
        """The stage's number where both sides' bounds rise most, but no more than the ``left_s`` to the target."""
        at = layout.n_at[layout.most > 1]
        below = np.floor(values[at] + NEARLY)
        open_ = (low[at] <= below) & (below < high[at]) & (values[at] - below > 2 * NEARLY)
        at, below = at[open_], below[open_]
        if not at.size:
            return None
        sides = [_changed(layout, values, at, whole) for whole in (below, below + 1.0)]
        cases = np.concatenate([layout.times(values)[None], *sides])
        seconds = lengths(*layout.shape.timetable, cases, layout.crossings.sends_s)
        gains = np.maximum(seconds[1:] - seconds[0], LEAST_S).reshape(2, len(at))
        rises = np.minimum(gains * [[self._part(column, side) for column in at.tolist()] for side in (0, 1)], left_s)
        best = int(np.maximum(rises, LEAST_S).prod(axis=0).argmax())
        return Split(int(at[best]), float(below[best]), (float(gains[0, best]), float(gains[1, best])))

    def _part(self, column: int, side: int) -> float:
        """Which part of an estimate a bound rises, about."""
        mean = self._all[1] / self._all[0]
        number, parts = self.told.get((column, side), (0, 0.0))
        return (parts + mean) / (number + 1)


def _changed(layout: Layout, values: Floats, at: Indices, whole: Floats) -> Floats:
    """[cases, stages, 3]: seconds of the passes where the column ``at`` [cases] is ``whole`` [cases] instead."""
    blocks, times = np.array(layout.blocks(values)), layout.times(values)
    stage = layout.pair_stage[at - layout.n_at[0]]
    cases = np.arange(len(at))
    more = whole - values[at]
    mates = layout.rank_of[None, :] == layout.rank_of[stage][:, None]
    mates[cases, stage] = False
    # What stages have beside one block can be given away.
    weights = np.where(mates, np.where(more[:, None] > 0, np.maximum(blocks - 1.0, 0.0), blocks), 0.0)
    total = weights.sum(axis=1, keepdims=True)
    changed = blocks - more[:, None] * np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    changed[cases, stage] += more
    return np.asarray(times * (np.maximum(changed, 0.0) / np.maximum(blocks, NEARLY))[:, :, None])
