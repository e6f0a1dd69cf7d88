"""cost_state: keeping, synchronising and updating a block's parameters under one ZeRO stage.

Traffic a step over a shard group, with P the bytes of the parameters in the working dtype and M micro-batches, as FSDP2
of torch 2.13 performs it (Rajbhandari et al. 2020, section 7, for the stages):

=====  =================================================  =========================================
stage  once                                               each micro-batch
=====  =================================================  =========================================
0      all-reduce of the gradients                        nothing
1      all-gather of P, reduce-scatter of the gradients   nothing
2      all-gather of P                                    reduce-scatter of the gradients (backward)
3      nothing                                            all-gather (forward); all-gather, reduce-scatter (backward)
=====  =================================================  =========================================

Gradients are reduced in the master's dtype (float32 under bf16 and fp16). A shard group smaller than the data degree
(hybrid sharding) adds one all-reduce of the sharded gradients over its copies a step.
"""

from __future__ import annotations

from cost_models.collectives import collective_s, span_of
from cost_models.compute import memory_bound_s
from cost_models.memory import state_bytes
from hardware_profiles import Cluster
from planner.ir.costed import StateCost
from planner.ir.plan import Mesh, Precision

_WORKING_BYTES: dict[Precision, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
_MASTER_BYTES: dict[Precision, int] = {"bf16": 4, "fp16": 4, "fp32": 4, "fp64": 8}
# AdamW reads parameter, gradient and two moments, and writes parameter and two moments, each in the master's dtype.
_UPDATE_PASSES = 7


def cost_state(
    parameter_elements: int, zero: int, cluster: Cluster, mesh: Mesh, precision: Precision, zero_group: int
) -> StateCost:
    """Bytes and seconds of ``parameter_elements`` trained elements (of one rank, before ZeRO)."""
    group = min(zero_group, mesh.data) if zero else 1
    held = state_bytes(parameter_elements, precision, zero, group)
    once, forward, backward = _traffic_seconds(parameter_elements, zero, cluster, mesh, precision, group)
    kept = -(-parameter_elements // group)
    update = memory_bound_s(cluster.chip, _UPDATE_PASSES * _MASTER_BYTES[precision] * kept) if kept else 0.0
    resident = 0 if zero == 3 else held.gathered
    return StateCost(
        parameters_bytes=held.parameters + resident, gradients_bytes=held.gradients, optimizer_bytes=held.optimizer,
        gather_bytes=held.gathered if zero == 3 else 0, once_comm_s=once, forward_comm_s=forward,
        backward_comm_s=backward, optimizer_s=update,
    )


def _traffic_seconds(
    elements: int, zero: int, cluster: Cluster, mesh: Mesh, precision: Precision, group: int
) -> tuple[float, float, float]:
    """(once a step, forward of a micro-batch, backward of a micro-batch)."""
    if mesh.data == 1 or not elements:
        return 0.0, 0.0, 0.0
    reduced = _MASTER_BYTES[precision] * elements
    if zero == 0:
        return collective_s("all_reduce", span_of(cluster, mesh.data, mesh.tensor), reduced), 0.0, 0.0
    inside = span_of(cluster, group, mesh.tensor)
    gather = collective_s("all_gather", inside, _WORKING_BYTES[precision] * -(-elements // group))
    scatter = collective_s("reduce_scatter", inside, reduced)
    across = 0.0
    if group < mesh.data:
        copies = span_of(cluster, mesh.data // group, mesh.tensor * group)
        across = collective_s("all_reduce", copies, -(-reduced // group))
    if zero == 1:
        return gather + scatter + across, 0.0, 0.0
    if zero == 2:
        return gather + across, 0.0, scatter
    return across, gather, gather + scatter
