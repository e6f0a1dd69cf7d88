"""What one virtual stage is made of: the sums over its blocks."""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.pipeline import StageTimes
from planner.ir.costed import BlockCost, CostedGraph, StateCost
from planner.ir.plan import (
    StagePlan,
)


@dataclass(frozen=True, slots=True)
class StageLoad:
    """One virtual stage on one rank. Seconds of one micro-batch; ``once_s`` and ``optimizer_s`` once a step; bytes.

    ``times`` hold everything that the schedule sees, the parts say what they are made of. ``transient_bytes``: the largest
    peak of a block; ``gather_bytes``: the two largest shares of ZeRO's transient copies. ``saved_bytes``: all that one
    micro-batch keeps.
    """

    times: StageTimes
    compute_s: float
    recompute_s: float
    tensor_comm_s: float
    data_comm_s: float
    once_s: float
    optimizer_s: float
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    constant_bytes: int
    saved_bytes: int
    transient_bytes: int
    gather_bytes: int


def forward_seconds(cost: BlockCost, state: StateCost) -> float:
    """All that a block's forward pass of one micro-batch takes."""
    return cost.forward_s + cost.forward_comm_s + state.forward_comm_s


def input_gradient_seconds(cost: BlockCost, state: StateCost) -> float:
    """All of a block's backward pass but the weight gradients."""
    repeated = cost.recompute_s + cost.recompute_comm_s
    return cost.input_gradient_s + cost.backward_comm_s + repeated + state.backward_comm_s


def stage_load(stage: StagePlan, costed: CostedGraph, option: int) -> StageLoad:
    """Sum the blocks of a virtual stage."""
    pairs = []
    for block, decision in zip(costed.graph.blocks[stage.first : stage.last], stage.decisions, strict=True):
        cost = costed.blocks[option][block.body][decision.recompute]
        pairs.append((cost, costed.states[option][block.body][decision.zero]))
    weight_s = sum(cost.weight_gradient_s for cost, _ in pairs)
    # What a stage sends stays alive with its micro-batch (PipelineStage.fwd_cache).
    sent = costed.crossing_bytes[option].get(stage.last, 0)
    return StageLoad(
        times=StageTimes(
            sum(forward_seconds(*pair) for pair in pairs) + costed.context_s,
            sum(input_gradient_seconds(*pair) for pair in pairs),
            weight_s,
        ),
        compute_s=sum(cost.forward_s + cost.backward_s for cost, _ in pairs) + costed.context_s,
        recompute_s=sum(cost.recompute_s for cost, _ in pairs),
        tensor_comm_s=sum(c.forward_comm_s + c.backward_comm_s + c.recompute_comm_s for c, _ in pairs),
        data_comm_s=sum(state.forward_comm_s + state.backward_comm_s for _, state in pairs),
        once_s=sum(state.once_comm_s for _, state in pairs),
        optimizer_s=sum(state.optimizer_s for _, state in pairs),
        parameters_bytes=sum(state.parameters_bytes for _, state in pairs),
        gradients_bytes=sum(state.gradients_bytes for _, state in pairs),
        optimizer_bytes=sum(state.optimizer_bytes for _, state in pairs),
        constant_bytes=sum(cost.buffer_bytes for cost, _ in pairs),
        saved_bytes=sum(cost.saved_bytes for cost, _ in pairs) + costed.context_bytes + sent,
        transient_bytes=max((max(cost.forward_peak_bytes, cost.backward_peak_bytes) for cost, _ in pairs), default=0),
        gather_bytes=sum(sorted(state.gather_bytes for _, state in pairs)[-2:]),
    )
