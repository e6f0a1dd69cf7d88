"""Calls over the tensor axis: inside the blocks for every micro-batch, and the one sum of partial gradients a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cost_models.memory import MASTER_BYTES
from planner.costing.expressions import in_emitted_order
from planner.costing.local import Step, localise
from planner.ir.costed import Recompute
from planner.ir.graph import Body, ModelGraph
from planner.ir.placement import BodyPlacement
from planner.ir.plan import Plan, StagePlan
from planner.ledger.calls import Call, Calls, Place, call, shard_group
from planner.ledger.units import Unit
from planner.placement.ledger import collectives


def block_calls(plan: Plan, graph: ModelGraph, stages: Sequence[StagePlan]) -> Calls:
    """What the blocks of a rank's stages call in all micro-batches of a step, forward, backward and repeated."""
    kinds = Counter(
        (block.body, decision.recompute)
        for stage in stages
        for block, decision in zip(graph.blocks[stage.first : stage.last], stage.decisions, strict=True)
    )
    calls: Calls = Counter()
    for (name, recompute), blocks in kinds.items():
        body, placement = graph.body_of[name], plan.placements[name]
        repeated = repeated_nodes(body, placement, plan.batch.micro, recompute)
        for counts in collectives(body, placement, plan.mesh.tensor, plan.batch.micro, repeated=repeated):
            for item in counts:
                made = Call(item.kind, "tensor", plan.mesh.tensor, item.size_bytes)
                calls[made] += item.count * blocks * plan.batch.accumulation
    return calls


def repeated_nodes(body: Body, placement: BodyPlacement, batch: int, recompute: Recompute) -> frozenset[str]:
    """Names of the nodes that the backward pass runs again, and (under ``full``) of what conversions make.

    Of the body, or of each region, those up to the last, as the program runs them, that keeps something for the backward pass;
    torch's checkpoint stops there (torch/utils/checkpoint.py, ``set_checkpoint_early_stop``).
    """
    if recompute == "none":
        return frozenset()
    parts = body.regions if recompute == "selective" else ()
    steps = in_emitted_order(localise(body, placement, batch), parts).steps
    if recompute == "full":
        again = _until_kept(steps)
        return frozenset(name for step in again for name in ([step.node.name] if step.node is not None else step.outputs))
    regions = [
        [step for step in steps if step.node is not None and step.node.name in names] for names in parts
    ]
    return frozenset(step.node.name for region in regions for step in _until_kept(region) if step.node is not None)


def _until_kept(steps: Sequence[Step]) -> Sequence[Step]:
    """Up to the last of which something is kept."""
    last = max((at for at, step in enumerate(steps) if step.kept or step.extra_bytes), default=-1)
    return steps[: last + 1]


def partial_gradient_call(plan: Plan, place: Place, units: Sequence[Unit]) -> Calls:
    """The sum of all gradients that are partial over the tensor axis: one call, of the elements that the rank holds."""
    group = shard_group(plan)
    partial = [(p, unit.zero) for unit in units for p in unit.parameters if p.partial]
    if not partial:
        return Counter()
    elements = sum(p.held(group, place.data % group) if zero else p.held(1, 0) for p, zero in partial)
    return call("all_reduce", "tensor", plan.mesh.tensor, elements * MASTER_BYTES[plan.precision])
