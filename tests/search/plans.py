"""Plans at random, as values of a program's columns."""

from __future__ import annotations

import itertools

import numpy as np

from planner.search.linear import Floats
from planner.search.rows import Layout


def drawn(layout: Layout, generator: np.random.Generator) -> Floats:
    """Whole values of a plan: cuts and choices at random."""
    shape, blocks = layout.shape, layout.stream.blocks
    cuts = np.sort(generator.choice(np.arange(1, blocks), shape.stages - 1, replace=False))
    run_of = np.repeat(np.arange(len(layout.stream.runs)), [run.count for run in layout.stream.runs])
    values = np.zeros(layout.size)
    for stage, (first, last) in enumerate(itertools.pairwise([0, *cuts.tolist(), blocks])):
        for run in run_of[first:last]:
            pair = int(np.flatnonzero((layout.pair_stage == stage) & (layout.pair_run == run))[0])
            values[layout.n_at[pair]] += 1
            for kind in (0, 1):
                values[layout.choice_at[generator.choice(np.flatnonzero((layout.pair == pair) & (layout.kind == kind)))]] += 1
    return values


def needed_bytes(layout: Layout, values: Floats) -> float:
    """Bytes that the fullest rank needs."""
    capacity, needs = layout.shape.capacity_bytes, []
    for rank in range(layout.shape.pipeline):
        members, sizes, free = layout.memory_of(rank)
        needs.append((sizes @ values[layout.choice_at[members]] + layout.least_transients[rank] - free).max() + capacity)
    return float(max(needs))
