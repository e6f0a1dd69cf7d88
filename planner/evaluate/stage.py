"""What one virtual stage is made of: the sums over its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_models.overlap import Overlap
from cost_models.pipeline import StageTimes
from hardware_profiles import Engine
from planner.ir.costed import BlockCost, BlockSeconds, CostedGraph, StateCost
from planner.ir.plan import (
    StagePlan,
)

NO_STATE = StateCost(0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)
"""For what a block costs without ZeRO's traffic."""


@dataclass(frozen=True, slots=True)
class StageLoad:
    """One virtual stage on one rank. Seconds of one micro-batch; ``once_s`` and ``optimizer_s`` once a step; bytes.

    ``times`` hold everything that the schedule sees, the parts say what they are made of; ``backward_s``: of the backward pass,
    what computes or waits for the tensor axis; ``data_comm_s``: what is waited for. ``transient_bytes``: the largest
    peak of a block; ``gather_bytes``: the largest of ZeRO's transient copies,
    of which ``lasting_bytes`` stay while other stages run. ``saved_bytes``: all that one micro-batch keeps, and
    ``waiting_bytes`` beyond that while it waits for the weight part of its backward pass. ``lone_bytes``: the most of what is
    kept, gradients and transients in the backward pass of a step's only micro-batch.
    """

    times: StageTimes
    backward_s: float
    compute_s: float
    recompute_s: float
    tensor_comm_s: float
    context_comm_s: float
    expert_comm_s: float
    data_comm_s: float
    once_s: float
    optimizer_s: float
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    constant_bytes: int
    saved_bytes: int
    waiting_bytes: int
    transient_bytes: int
    gather_bytes: int
    lasting_bytes: int
    lone_bytes: int


def forward_seconds(cost: BlockSeconds, state: StateCost) -> float:
    """All that a block's forward pass of one micro-batch takes."""
    return cost.forward_s + cost.forward_comm_s + cost.forward_context_s + cost.forward_expert_s + state.forward_comm_s


def backward_seconds(cost: BlockSeconds, state: StateCost, *, split: bool) -> tuple[float, float]:
    """All that a block's backward pass of one micro-batch takes: the input and the weight part where the schedule splits it,
    else all in the first."""
    input_s, weight_s = cost.backward_parts_s(split)
    repeated = cost.recompute_s + cost.recompute_comm_s
    exchanged = cost.backward_context_s + cost.backward_expert_s
    return input_s + cost.backward_comm_s + repeated + exchanged + state.backward_comm_s, weight_s


def stage_load(stage: StagePlan, costed: CostedGraph, option: int, engine: Engine, *, split: bool = False) -> StageLoad:
    """Sum the blocks of a virtual stage; ``split``: the schedule parts backward passes. ZeRO's traffic of a micro-batch hides
    behind the stage's own compute as far as the engine lets it."""
    pairs = []
    for block, decision in zip(costed.graph.blocks[stage.first : stage.last], stage.decisions, strict=True):
        cost = costed.blocks[option][block.body][decision.recompute]
        pairs.append((cost, costed.states[option][block.body][decision.zero]))
    gathers = Overlap(engine.gathers_hidden, engine.gathers_floor)
    forward_s = sum(forward_seconds(cost, NO_STATE) for cost, _ in pairs) + costed.context_s
    parts_s = [backward_seconds(cost, NO_STATE, split=split) for cost, _ in pairs]
    input_s, weight_s = sum(part[0] for part in parts_s), sum(part[1] for part in parts_s)
    forward_wait_s = gathers.exposed_s(forward_s, sum(state.forward_comm_s for _, state in pairs))
    backward_wait_s = gathers.exposed_s(input_s + weight_s, sum(state.backward_comm_s for _, state in pairs))
    # What a stage sends stays alive with its micro-batch (PipelineStage.fwd_cache) unless the engine frees it; what it has
    # received, in receive buffers.
    crossing, twice = costed.crossing_bytes[option], costed.kept_twice(option, stage.first, split=split)
    kept = sum(cost.saved_bytes for cost, _ in pairs) + round(engine.outputs_kept * crossing.get(stage.last, 0))
    return StageLoad(
        times=StageTimes(forward_s + forward_wait_s, input_s + backward_wait_s, weight_s),
        backward_s=input_s + weight_s,
        compute_s=sum(cost.forward_s + sum(cost.backward_parts_s(split)) for cost, _ in pairs) + costed.context_s,
        recompute_s=sum(cost.recompute_s for cost, _ in pairs),
        tensor_comm_s=sum(c.forward_comm_s + c.backward_comm_s + c.recompute_comm_s for c, _ in pairs),
        context_comm_s=sum(c.forward_context_s + c.backward_context_s for c, _ in pairs),
        expert_comm_s=sum(c.forward_expert_s + c.backward_expert_s for c, _ in pairs),
        data_comm_s=forward_wait_s + backward_wait_s,
        once_s=sum(state.once_comm_s for _, state in pairs),
        optimizer_s=sum(state.optimizer_s for _, state in pairs),
        parameters_bytes=sum(state.parameters_bytes for _, state in pairs),
        gradients_bytes=sum(state.gradients_bytes for _, state in pairs),
        optimizer_bytes=sum(state.optimizer_bytes for _, state in pairs),
        constant_bytes=sum(cost.buffer_bytes for cost, _ in pairs),
        saved_bytes=own_bytes(kept, crossing.get(stage.first, 0), twice) + costed.context_bytes,
        waiting_bytes=sum(cost.waiting_bytes for cost, _ in pairs),
        transient_bytes=max((cost.peak_bytes(split) for cost, _ in pairs), default=0),
        gather_bytes=max((state.gather_bytes for _, state in pairs), default=0),
        lasting_bytes=max((state.lasting_bytes for _, state in pairs), default=0),
        lone_bytes=_lone_bytes(pairs),
    )


def own_bytes(kept: int, received: int, twice: int) -> int:
    """Of what a stage keeps of a micro-batch, what does not lie in a receive buffer; but a micro-batch that goes leaves a
    gradient of what was ``received`` on its way back."""
    return max(kept - twice, min(kept, received))


def _lone_bytes(pairs: Sequence[tuple[BlockCost, StateCost]]) -> int:
    """With one micro-batch a block's gradients come as what it kept goes: while a block runs, there is what the blocks before
    it keep and the gradients of those after it, its own peak, and what ZeRO has gathered of it and of the next in turn."""
    kept, gradients = sum(cost.saved_bytes for cost, _ in pairs), 0
    most = before = 0
    for cost, state in reversed(pairs):
        gradients += state.gradients_bytes
        transient = cost.peak_bytes(False) + (state.gather_bytes + before) // 2
        most = max(most, kept + gradients + transient)
        kept -= cost.saved_bytes
        before = state.gather_bytes
    return most
