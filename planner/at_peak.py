"""What a step's FLOPs take of all devices together, whatever the plan."""

from __future__ import annotations

from collections import Counter

from cost_models.compute import attention_flops
from hardware_profiles import Chip
from planner.costing import as_run
from planner.costing.measured import WholeBody
from planner.ir.graph import ModelGraph
from planner.ops.work import Work


def at_peak_s(graph: ModelGraph, chip: Chip, batch: int) -> float:
    """Device seconds (devices x seconds) that no step of ``batch`` samples goes below: its products and its attention at the
    chip's peak, as they are executed (half of causal attention is skipped), and nothing recomputed. All samples are one
    micro-batch here: what does not grow with it is done once. What the chip has no rate for is priced by its bytes alone, and
    counts nothing."""
    run, total = as_run(graph, chip), 0.0
    for name, count in Counter(block.body for block in run.blocks).items():
        for operation in WholeBody(run.body_of[name]).measure(batch):
            if operation.dtype in chip.peak_flops and operation.dtype in chip.gemm:
                done = (operation.forward, operation.to_input, operation.to_weight)
                flops = sum(_executed(work, backward=at > 0) for at, work in enumerate(done))
                total += count * flops / chip.peak(operation.dtype)
    return total


def _executed(work: Work, *, backward: bool) -> float:
    shape = work.attention
    if shape is None:
        return work.flops if work.gemm is not None else 0.0
    extents = shape.batch, shape.heads, shape.queries, shape.keys, shape.head_dim
    return attention_flops(*extents, causal=shape.causal, backward=backward)
