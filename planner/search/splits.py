"""Which number of blocks a branch is parted at.

Where ranks run in lockstep, any stage's number can be the one with a fraction: which one a solver's corner has says nothing,
and parting there moves the fraction elsewhere. What counts is how long a schedule gets where a stage has a block less or more
than a good solution with fractions. That is asked by simulating: the stage alone is made whole, its rank's other stages take or
give what it has less or more in proportion. It is an estimate (other ranks could give way), and only an order of what to try.
"""

from __future__ import annotations

import numpy as np

from cost_models.pipeline import lengths
from planner.search.linear import Floats, Indices
from planner.search.rows import Layout

NEARLY = 1e-5
"""So little less than a whole number is it."""


def best_split(layout: Layout, values: Floats, low: Floats, high: Floats) -> tuple[int, float] | None:
    """(column, whole part): of the blocks that stages have of a run, what it is best to part at, the fraction that makes the
    schedule longest on the side that suits it better. ``values``: a solution inside; ``low``, ``high``: what its columns lie
    between. None where no stage can be on either side."""
    at = layout.n_at[layout.most > 1]
    below = np.floor(values[at] + NEARLY)
    open_ = (low[at] <= below) & (below < high[at])
    at, below = at[open_], below[open_]
    if not at.size:
        return None
    sides = [_changed(layout, values, at, whole) for whole in (below, below + 1.0)]
    seconds = lengths(*layout.shape.timetable, np.concatenate(sides), layout.crossings.sends_s)
    best = int(np.minimum(seconds[: len(at)], seconds[len(at) :]).argmax())
    return int(at[best]), float(below[best])


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
