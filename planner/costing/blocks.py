"""cost_block: one placed body, priced."""

from __future__ import annotations

from collections.abc import Iterable

from planner.costing.activations import repeated_steps, saved_bytes
from planner.costing.liveness import backward_peak_bytes, forward_peak_bytes
from planner.costing.local import localise
from planner.costing.pricing import Pricing
from planner.ir.costed import BlockCost, Recompute
from planner.ir.graph import Body
from planner.ir.placement import REPLICATE, BodyPlacement, OpStrategy, Transfer, local_type
from planner.ir.types import DTYPE_BYTES, TensorType
from planner.ops.work import backward_work, work
from planner.placement.ledger import CollectiveCount, collectives

REDUCTION_COPIES = 2
"""What reducing a block's whole gradients adds to them, in their own size: the flat buffer, its scaled copy and the result,
less the gradients themselves, which are freed after the copy (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py,
``foreach_reduce`` of a group of one). By then the block's activations are gone."""


def cost_block(body: Body, placement: BodyPlacement, pricing: Pricing, recompute: Recompute) -> BlockCost:
    """Seconds and bytes of one block under one placement and recomputation level, on rank 0 (which holds the most).

    Communication is what the ledger counts, priced call by call; copies around collectives are compute.
    """
    local = localise(body, placement, pricing.microbatch)
    strategies = {node.node: node.strategy for node in placement.nodes}
    seconds = {node.name: pricing.node_seconds(body, node, strategies[node.name]) for node in body.nodes}
    repeated = {step.node.name for step in repeated_steps(local, recompute) if step.node is not None}
    forward, backward = collectives(body, placement, placement.degree, pricing.microbatch)
    _, again = collectives(body, placement, placement.degree, pricing.microbatch, repeated=repeated)
    backward_comm_s = _comm_seconds(backward, pricing)
    return BlockCost(
        forward_s=sum(item[0] for item in seconds.values()),
        input_gradient_s=sum(item[1] for item in seconds.values()),
        weight_gradient_s=sum(item[2] for item in seconds.values()),
        recompute_s=sum(seconds[name][0] for name in repeated),
        forward_comm_s=_comm_seconds(forward, pricing),
        backward_comm_s=backward_comm_s,
        recompute_comm_s=max(0.0, _comm_seconds(again, pricing) - backward_comm_s),
        saved_bytes=saved_bytes(local, recompute),
        forward_peak_bytes=forward_peak_bytes(local, recompute),
        backward_peak_bytes=max(
            backward_peak_bytes(local, recompute),
            REDUCTION_COPIES * master_bytes(body, placement) - saved_bytes(local, recompute),
        ),
        parameter_elements=parameter_elements(body, placement),
        buffer_bytes=sum(value.type.size_bytes(pricing.microbatch) for value in body.buffers),
        flops=model_flops(body, pricing.microbatch),
    )


def parameter_elements(body: Body, placement: BodyPlacement) -> int:
    """Trained elements that rank 0 of the tensor axis holds."""
    return sum(type_.elements() for type_ in _trained(body, placement))


def master_bytes(body: Body, placement: BodyPlacement) -> int:
    """Bytes of the masters of rank 0's trained parameters: float32 at least."""
    return sum(type_.elements() * max(4, DTYPE_BYTES[type_.dtype]) for type_ in _trained(body, placement))


def _trained(body: Body, placement: BodyPlacement) -> list[TensorType]:
    return [
        local_type(value.type, placed, placement.degree)
        for value, placed in zip(body.parameters, placement.parameters, strict=True) if value.differentiable
    ]


def model_flops(body: Body, batch: int) -> float:
    """FLOPs of forward and backward of the whole block for ``batch`` samples: products and attention, without the
    causal half and without recomputation (Chowdhery et al. 2022, appendix B)."""
    parameters = {value.name for value in body.parameters}
    total = 0.0
    for node in body.nodes:
        if node.base == "getitem":
            continue
        operands = [body.types[name] for name in node.operands]
        needs = [node.differentiable and name in body.differentiable for name in node.operands]
        own = [name in parameters for name in node.operands]
        total += work(node, operands, node.types, batch).flops
        total += sum(part.flops for part in backward_work(node, operands, node.types, batch, needs, own))
    return total


def context_seconds(body: Body, pricing: Pricing) -> float:
    """Forward of a body that every rank computes whole (the context)."""
    return sum(
        pricing.node_seconds(
            body, node, OpStrategy("replicate", (REPLICATE,) * len(node.operands), (REPLICATE,) * len(node.types))
        )[0]
        for node in body.nodes
    )


def _comm_seconds(counts: Iterable[CollectiveCount], pricing: Pricing) -> float:
    return sum(item.count * pricing.transfer_seconds(Transfer(item.kind, item.size_bytes)) for item in counts)
