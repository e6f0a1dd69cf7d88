"""A candidate's cheap, valid bounds, in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.search.shape import Shape


@dataclass(frozen=True, slots=True)
class Least:
    """``count`` blocks, each with the least it can take: seconds of a micro-batch (all passes, and those of them that the next
    stage waits for under a split backward pass: the forward pass and the part that gives the gradient of the input), seconds
    once a step, and bytes that it occupies all the time or while one micro-batch is alive."""

    count: int
    work_s: float
    way_s: float
    tail_s: float
    size_bytes: float


def _mean_fill(blocks: Sequence[Least], pipeline: int) -> float:
    """Mean over ranks r of the work of the r least blocks."""
    fill = total = 0.0
    left = pipeline - 1
    for block in sorted(blocks, key=lambda block: block.work_s):
        taken = min(left, block.count)
        # After each of the blocks taken, the sum so far counts for one rank more.
        total += taken * fill + block.work_s * taken * (taken + 1) / 2
        fill += block.work_s * taken
        left -= taken
    return total / pipeline


def closed_form(blocks: Sequence[Least], context_s: float, shape: Shape) -> float:
    """A lower bound of the step of these blocks; infinite where their least bytes do not fit.

    Work: the ranks share all micro-batches' least work. Way: one micro-batch goes through all stages and back; where the
    backward pass is split its weight parts are not on that way, for ranks compute them while others go on. Fill: under gpipe
    and 1f1b stage v works ``m`` times and waits for one pass through the stages before it and back, so
    ``T >= sum of t[u < v] + m t[v]`` for all v, which the stages meet at best with ``t[v] = t[0] (1 - 1/m)^v``:
    ``T >= total / (1 - (1 - 1/m)^p)``. Interleaved, the first stage of rank r waits so for r stages of one block or more each;
    the mean over ranks bounds the slowest. Once a step: at least the mean too.
    """
    total = sum(block.count * block.work_s for block in blocks) + shape.stages * context_s
    if sum(block.count * block.size_bytes for block in blocks) > shape.pipeline * shape.capacity_bytes:
        return float("inf")
    count = shape.microbatches
    way = sum(block.count * block.way_s for block in blocks) if shape.splits_backward else total
    pipeline_s = max(way, count * max(block.work_s for block in blocks), count * total / shape.pipeline)
    if not shape.splits_backward:
        pipeline_s = max(pipeline_s, count * total / shape.pipeline + _mean_fill(blocks, shape.pipeline))
    if shape.virtual == 1 and not shape.splits_backward:
        pipeline_s = max(pipeline_s, total / (1.0 - (1.0 - 1.0 / count) ** shape.pipeline))
    return pipeline_s + sum(block.count * block.tail_s for block in blocks) / shape.pipeline
