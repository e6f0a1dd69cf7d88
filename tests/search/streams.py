"""Streams of random prices: one long run between two single blocks."""

from __future__ import annotations

import numpy as np

from planner.search.chain import Run
from planner.search.crossings import Send
from planner.search.stream import Stream
from planner.search.tables import AT_TIMES, AT_WAIT, OPTIMIZER, PASSES, Table

CAPACITY = 1e12
"""Bytes that hold everything."""


def draw(seed: int, blocks: int) -> Stream:
    """A chain of so many blocks in all; two choices of recomputation and two of ZeRO for each."""
    generator = np.random.default_rng(seed)
    runs = (Run("first", 0, 1, 0), Run("middle", 1, blocks - 2, 100), Run("last", blocks - 1, 1, 100))
    single = []
    for scale in (0.1, 1.0, 0.4):
        compute, traffic = np.zeros((2, 2, AT_WAIT + 1))
        compute[:, :AT_WAIT] = generator.uniform(0.5, 1.5, (2, AT_WAIT)) * scale
        compute[:, PASSES : OPTIMIZER + 1] = 0.0
        compute[:, AT_WAIT] = compute[:, AT_TIMES] / 3
        traffic[:, :2] = generator.uniform(0.0, 0.2, (2, 2)) * scale
        traffic[:, PASSES:AT_WAIT] = generator.uniform(0.0, 0.5, (2, 4)) * scale
        single.append((
            Table(compute, np.ones(2), np.zeros(2), ("none", "full")), Table(traffic, np.ones(2), np.zeros(2), (0, 3)),
        ))
    return Stream(runs, tuple(single), context_s=0.05, context_bytes=1, batch_bytes=1, sends=(Send(0.03, 0.0),) * 3)
