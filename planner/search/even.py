"""A first plan without solving: cuts that make the slowest rank quickest, by dynamic programming over the chain."""

from __future__ import annotations

import math

import numpy as np

from planner.search.master import Master
from planner.search.tables import PERSISTENT, SAVED, TAIL, Floats


def even_choice(master: Master) -> Floats | None:
    """Weights that choose one column a stage, so that the largest stage is as small as it can be; None where even shares of
    a rank's memory do not suffice for its stages."""
    quickest = _quickest(master)
    counts = [run.count for run in master.chain.runs]
    run_at = [run for run, count in enumerate(counts) for _ in range(count)]
    blocks, stages = len(run_at), master.shape.stages
    best: list[dict[int, tuple[float, int, int]]] = [{0: (0.0, -1, -1)}]
    for stage in range(stages):
        reached: dict[int, tuple[float, int, int]] = {}
        for start, (worst, _, _) in best[stage].items():
            key = [0] * len(counts)
            for end in range(start + 1, blocks - (stages - stage - 1) + 1):
                key[run_at[end - 1]] += 1
                found = quickest.get((stage, tuple(key)))
                if found is None or (stage == stages - 1 and end != blocks):
                    continue
                value = max(worst, found[0])
                if value < reached.get(end, (math.inf, 0, 0))[0]:
                    reached[end] = (value, start, found[1])
        best.append(reached)
    if blocks not in best[stages]:
        return None
    weights, at = np.zeros(len(master.columns)), blocks
    for stage in range(stages, 0, -1):
        _, at, column = best[stage][at]
        weights[column] = 1.0
    return weights


def _quickest(master: Master) -> dict[tuple[int, tuple[int, ...]], tuple[float, int]]:
    """Per stage and key, the column of least work among those within an even share of the rank's memory."""
    columns, shape = master.columns, master.shape
    vectors = columns.vectors
    live = np.zeros(shape.stages)
    for rank in range(shape.pipeline):
        owned = [stage for stage in range(shape.stages) if shape.rank_of(stage) == rank]
        for slot, stage in enumerate(owned):
            live[stage] = max(vector[slot] for vector in shape.live(rank))
    size = vectors[:, PERSISTENT] + live[columns.stage] * vectors[:, SAVED] + columns.transient
    work = shape.microbatches * vectors[:, :3].sum(axis=1) + vectors[:, TAIL]
    work[size > shape.capacity_bytes / shape.virtual] = math.inf
    result: dict[tuple[int, tuple[int, ...]], tuple[float, int]] = {}
    for column in np.argsort(work, kind="stable"):
        if math.isinf(work[column]):
            break
        name = (int(columns.stage[column]), columns.keys[int(columns.source[column])])
        result.setdefault(name, (float(work[column]), int(column)))
    return result
