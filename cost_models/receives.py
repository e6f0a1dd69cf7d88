"""Receive buffers that the stages of an emitted program take in turns, where torch keeps one for every micro-batch.

A buffer is in use from the moment that its receive is posted, which torch does when the sender is due to have computed
(``torch/distributed/pipelining/schedules.py``, ``_add_send_recv``), until the micro-batch's last pass on the stage. So a stage
needs about as many as it has micro-batches alive; the emitted program's rule is to have one more.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from cost_models.live import most_alive
from cost_models.schedules import rank_of_stage, turn_length

Slots = tuple[int, int]


@lru_cache(maxsize=4096)
def receive_slots(name: str, pipeline: int, virtual: int, microbatches: int) -> tuple[Slots, ...]:
    """By virtual stage, buffers for inputs of micro-batches and for gradients of outputs (whether
    the stage receives at all is the caller's to know). An illegal interleaved or zero-bubble schedule raises
    ValueError.

    An input for each micro-batch alive and one more; two gradients, and where backward passes are split one for each rank
    before (their weight parts wait for so many input gradients), under zbv one more. Interleaved rounds come early where they
    go from the last rank to the first, or back: two rounds of inputs on the first, one of gradients on the last, at least.
    What a stage of the same rank hands over (zbv's turn) needs none.
    """
    stages = range(pipeline * virtual)
    if name in ("gpipe", "1f1b"):
        in_flight = [microbatches if name == "gpipe" else min(pipeline - stage, microbatches) for stage in stages]
        return tuple((min(count + 1, microbatches), min(2, microbatches)) for count in in_flight)
    ranks = np.array([rank_of_stage(name, pipeline, stage) for stage in stages])
    alive = np.array(most_alive(name, pipeline, virtual, microbatches))
    inputs = alive[ranks, np.arange(len(ranks)) // pipeline] + 1
    gradients = 2 + (0 if name == "interleaved-1f1b" else ranks) + np.full(len(ranks), name == "zbv")
    if name == "zbv":
        inputs[pipeline] = gradients[pipeline - 1] = 0
    else:
        turn = turn_length(pipeline, microbatches)
        inputs[ranks == 0] = np.maximum(inputs[ranks == 0], 2 * turn)
        gradients[ranks == pipeline - 1] = np.maximum(gradients[ranks == pipeline - 1], turn)
    found = np.minimum(np.stack([inputs, gradients], axis=1), microbatches)
    return tuple((into, back) for into, back in found.tolist())
