"""cost_block: one placed body, counted and priced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields

from hardware_profiles import Engine
from planner.costing.exchanges import Axis
from planner.costing.measured import BlockWork, LevelWork, measure_block
from planner.costing.operations import Operation
from planner.costing.pricing import Pricing
from planner.ir.body import Body
from planner.ir.costed import BlockCost, BlockSeconds, Recompute
from planner.ir.placement import BodyPlacement, Transfer
from planner.placement.ledger import CollectiveCount

AXES: tuple[Axis, ...] = ("context", "expert")
SECONDS = tuple(field.name for field in fields(BlockSeconds))


def reduction_copies(group: int, engine: Engine) -> int:
    """What reducing a block's whole gradients over ``group`` ranks adds to them, in their own size: the flat buffer and the
    result, less the gradients themselves, which are freed after the copy; a result is as large as they are in a group of one
    (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, ``foreach_reduce``). By then the block's activations are gone."""
    return (2 if group == 1 else 1) if engine.keeps == "operations" else 0


def cost_block(body: Body, placement: BodyPlacement, pricing: Pricing, recompute: Recompute) -> BlockCost:
    """Seconds and bytes of one block under one placement and recomputation level, on rank 0 (which holds the most)."""
    measured = measure_block(body, placement, pricing.microbatch, (recompute,), engine=pricing.engine)
    return price_block(measured, pricing)[recompute]


def price_block(block: BlockWork, pricing: Pricing, group: int = 1) -> dict[Recompute, BlockCost]:
    """Seconds and bytes of what was counted, by recomputation level; ``group``: ranks that share a copy of the state."""
    copies = reduction_copies(group, pricing.engine)
    found: dict[Recompute, BlockCost] = {}
    for level, taken in time_block(block, pricing).items():
        memory = block.levels[level].memory
        found[level] = BlockCost(
            **{name: getattr(taken, name) for name in SECONDS},
            saved_bytes=memory.saved_bytes,
            forward_peak_bytes=memory.forward_peak_bytes,
            backward_peak_bytes=max(memory.backward_peak_bytes, copies * block.master_bytes - memory.saved_bytes),
            parameter_elements=block.parameter_elements,
            buffer_bytes=block.buffer_bytes,
            flops=block.flops,
            waiting_bytes=memory.waiting_bytes,
            split_peak_bytes=memory.split_peak_bytes,
        )
    return found


def time_block(block: BlockWork, pricing: Pricing) -> dict[Recompute, BlockSeconds]:
    """Seconds of what was counted, by recomputation level. Communication is what the ledger counts, priced call by
    call; copies around it are left out (docs/physics.md says what that is)."""
    # The products before the loss stay in the job's precision (Megatron Core's output layer; torchtitan's float8 filter).
    quantised = all(item.base != "cross_entropy_loss" for item in block.operations)
    seconds = {item.node: pricing.operation_seconds(item, quantised=quantised) for item in block.operations}
    return {name: _time_level(block, level, seconds, pricing) for name, level in block.levels.items()}


def _time_level(
    block: BlockWork, level: LevelWork, seconds: Mapping[str, tuple[float, float, float]], pricing: Pricing
) -> BlockSeconds:
    """``seconds``: of the operations, by node: forward, input gradient and weight gradient."""
    forward_s, input_s, weight_s = (sum(item[at] for item in seconds.values()) for at in range(3))
    forward_comm_s, backward_comm_s = _comm_seconds(block.forward, pricing), _comm_seconds(block.backward, pricing)
    again_comm_s = max(0.0, _comm_seconds(level.backward, pricing) - backward_comm_s)
    # The host can be what a block waits for: it launches collectives too, which then run while it prepares what follows.
    calls = sum(item.count for item in block.forward), sum(item.count for item in block.backward)
    host_forward_s, host_input_s, host_weight_s = pricing.host_seconds(block.operations, calls)
    forward_hook_s, backward_hook_s = (pricing.hook_s if hooked else 0.0 for hooked in block.hooked)
    again = sum(item.count for item in level.backward) - calls[1]
    host_again_s, *_ = pricing.host_seconds((item for item in block.operations if item.node in level.repeated), (again, 0))
    # Collectives and hooks run with the input gradients.
    host_input_s += backward_hook_s - backward_comm_s
    context, expert = (_exchange_seconds(block, pricing, level.repeated, axis) for axis in AXES)
    return BlockSeconds(
        forward_s=max(forward_s, host_forward_s + forward_hook_s - forward_comm_s),
        backward_s=max(input_s + weight_s, host_input_s + host_weight_s),
        input_gradient_s=max(input_s, host_input_s),
        weight_gradient_s=max(weight_s, host_weight_s),
        recompute_s=max(
            sum(item[0] for name, item in seconds.items() if name in level.repeated), host_again_s - again_comm_s
        ),
        forward_comm_s=forward_comm_s,
        backward_comm_s=backward_comm_s,
        recompute_comm_s=again_comm_s,
        forward_context_s=context[0], backward_context_s=context[1],
        forward_expert_s=expert[0], backward_expert_s=expert[1],
    )


def _exchange_seconds(block: BlockWork, pricing: Pricing, repeated: frozenset[str], axis: Axis) -> tuple[float, float]:
    """Forward and backward of one axis; what recomputation runs again is exchanged again."""
    forward_s = backward_s = 0.0
    for item in block.exchanges:
        if item.axis == axis:
            there_s, back_s = pricing.exchange_seconds(item)
            forward_s += there_s
            backward_s += back_s + (there_s if item.node in repeated else 0.0)
    return forward_s, backward_s


def whole_seconds(operations: Iterable[Operation], pricing: Pricing) -> float:
    """Forward of a body that every rank computes whole (the context)."""
    return sum(pricing.operation_seconds(item)[0] for item in operations)


def _comm_seconds(counts: Iterable[CollectiveCount], pricing: Pricing) -> float:
    return sum(item.count * pricing.transfer_seconds(Transfer(item.kind, item.size_bytes)) for item in counts)
