"""cost_state: keeping, synchronising and updating a block's parameters under one ZeRO stage.

Traffic a step over a shard group, with P the bytes of the parameters in the working dtype and M micro-batches, as FSDP2
of torch 2.13 performs it (Rajbhandari et al. 2020, section 7, for the stages), under a pipeline too:

=====  =================================================  =========================================
stage  once                                               each micro-batch
=====  =================================================  =========================================
0      all-reduce of the gradients                        nothing
1      all-gather of P, reduce-scatter of the gradients   nothing
2      all-gather of P                                    reduce-scatter of the gradients (backward)
3      nothing                                            all-gather (forward); all-gather, reduce-scatter (backward)
=====  =================================================  =========================================

Gradients are reduced in the master's dtype (float32 under bf16 and fp16). A shard group smaller than the data degree
(hybrid sharding) adds one all-reduce of the sharded gradients over its copies a step. Gradients that are partial sums
over the tensor axis are summed there once a step, all in one call (runtime/tied.py): a block pays for its bytes.

Memory-bound passes around the collectives (torch/distributed/fsdp/_fully_shard): the master is cast and copied to the
working parameters at every gather; gradients that are not reduced yet are added to whole ones in the master's dtype;
each reduction copies them into one flat buffer. They are counted with the traffic that they belong to.
"""

from __future__ import annotations

from cost_models.collectives import collective_s
from cost_models.compute import memory_bound_s
from cost_models.memory import MASTER_BYTES, WORKING_BYTES, state_bytes, transient_bytes
from cost_models.spans import span_of
from hardware_profiles import DEFAULT_ENGINE, Cluster, Engine
from planner.ir.costed import StateCost
from planner.ir.plan import Mesh, Precision

STEP_COUNTER_BYTES = 4
"""torch.optim.AdamW's step counter of every parameter, float32 (torch/optim/adam.py, ``_init_group``)."""


def cost_state(
    parameter_elements: int, zero: int, cluster: Cluster, mesh: Mesh, precision: Precision, zero_group: int, *,
    shard: int | None = None, partial_elements: int = 0, tensors: int = 0, accumulation: int = 2, resident: bool = False,
    engine: Engine = DEFAULT_ENGINE,
) -> StateCost:
    """Bytes and seconds of ``parameter_elements`` trained elements (of one rank, before ZeRO).

    ``shard``: elements of the rank's ZeRO shard, padding included (default: the even share); ``partial_elements``: those
    of the shard whose gradient is summed over the tensor axis; ``tensors``: how many parameters they are;
    ``accumulation``: micro-batches of a step; ``resident``: gathered from the first forward to the last backward even
    under ZeRO 3 (blocks that share a parameter); ``engine``: in which dtype it reduces gradients, how quickly, and what
    its update moves.

    With one micro-batch no gradient exists when activations are at their most, and each block's working copy is freed
    as its gradients arrive: the larger of the two is counted, the part beyond the gradients as parameters.
    """
    group = min(zero_group, mesh.data) if zero else 1
    kept = parameter_elements if group == 1 else shard if shard is not None else -(-parameter_elements // group)
    accumulates = zero < 2 and accumulation > 1
    held = state_bytes(parameter_elements, precision, zero, group, shard=kept, accumulates=accumulates)
    working = WORKING_BYTES[precision] * max(parameter_elements, group * kept) if zero < 3 or resident else 0
    copies = working if accumulation > 1 else max(0, working - held.gradients)
    once, forward, backward = _traffic_seconds(parameter_elements, zero, cluster, mesh, precision, group, engine)
    once += _partial_seconds(partial_elements * MASTER_BYTES[precision], cluster, mesh.tensor)
    # A group of one copies what it reduces; one of several ranks' divides it first.
    copied = engine.reduce_copies * (2 if mesh.data > 1 else 1) if group == 1 else 0.0
    passes = _copy_seconds(parameter_elements, kept, zero, cluster, precision, engine, copied, accumulates=accumulates)
    update = engine.optimizer_passes * MASTER_BYTES[precision] * kept
    chip = cluster.chip
    hook_s = chip.hook_s or 0.0 if parameter_elements and chip.is_host else 0.0
    return StateCost(
        parameters_bytes=held.parameters + copies, gradients_bytes=held.gradients,
        optimizer_bytes=held.optimizer + STEP_COUNTER_BYTES * tensors,
        gather_bytes=_transient_bytes(
            parameter_elements, kept, zero, group, precision, accumulation, resident=resident,
            waits=resident and engine.keeps == "operations",
        ),
        lasting_bytes=(
            transient_bytes(parameter_elements, precision, zero, group, shard=kept).reduce
            if zero >= 2 and accumulation > 1 else 0
        ),
        once_comm_s=once + passes[0], forward_comm_s=forward + passes[1] + hook_s,
        backward_comm_s=backward + passes[2] + hook_s,
        optimizer_s=memory_bound_s(cluster.chip, update) if kept else 0.0,
    )


def _transient_bytes(
    elements: int, kept: int, zero: int, group: int, precision: Precision, accumulation: int, *, resident: bool, waits: bool
) -> int:
    """What ZeRO holds transiently of a block and of its neighbour, as if that were as large: of a stage, the largest counts.

    The flat buffer of a reduction lives until the next one (``reduce_scatter_states``). ZeRO 0 reduces in the last micro-batch
    only, where the block's working copy and activations are already gone. ZeRO 1 frees more gradients than it buffers. With
    one micro-batch ZeRO 1 and 2 free a block's working copy, and buffer and keep its gradients, while the next block runs; of
    blocks that share a parameter one buffer is enough, where gradients have waited (:mod:`planner.costing.waiting`).
    ZeRO 3 keeps two working copies (the current block's and the one fetched next). Under ZeRO 2 and 3 the buffer of the
    stage's first block lives on through the next micro-batch's forward, beside all activations. A block that is alone in its
    stage has both copies too: the collective's output and what is copied out of it.
    """
    passing = transient_bytes(elements, precision, zero, group, shard=kept)
    if zero == 0 or (zero == 1 and group == 1):  # Over one rank 1 is 0: its result is as large as the gradients.
        freed = WORKING_BYTES[precision] * elements if accumulation > 1 else 0
        return passing.reduce - freed
    if accumulation == 1 and zero < 3:
        beyond = max(0, passing.reduce + MASTER_BYTES[precision] * kept - WORKING_BYTES[precision] * elements)
        return beyond if waits else 2 * beyond
    if zero == 1:
        return 0
    reduced = passing.reduce if accumulation > 1 else 0
    if zero == 2:
        return reduced if waits else 2 * reduced
    return (0 if resident else 2 * WORKING_BYTES[precision] * elements) + reduced


def _traffic_seconds(
    elements: int, zero: int, cluster: Cluster, mesh: Mesh, precision: Precision, group: int, engine: Engine
) -> tuple[float, float, float]:
    """Collectives over the data axis: (once a step, forward of a micro-batch, backward of a micro-batch)."""
    alone = _alone_seconds(elements, zero, cluster, mesh, precision, group, engine)
    return alone[0] / engine.collective_speed, alone[1] / engine.collective_speed, alone[2] / engine.collective_speed


def _alone_seconds(
    elements: int, zero: int, cluster: Cluster, mesh: Mesh, precision: Precision, group: int, engine: Engine
) -> tuple[float, float, float]:
    if mesh.data == 1 or not elements:
        return 0.0, 0.0, 0.0
    reduced = (engine.gradient or MASTER_BYTES[precision]) * elements
    if zero == 0:
        return collective_s("all_reduce", span_of(cluster, mesh.data, mesh.data_stride), reduced), 0.0, 0.0
    inside = span_of(cluster, group, mesh.data_stride)
    gather = collective_s("all_gather", inside, WORKING_BYTES[precision] * -(-elements // group))
    scatter = collective_s("reduce_scatter", inside, reduced)
    across = 0.0
    if group < mesh.data:
        copies = span_of(cluster, mesh.data // group, mesh.data_stride * group)
        across = collective_s("all_reduce", copies, -(-reduced // group))
    if zero == 1:
        return gather + scatter + across, 0.0, 0.0
    if zero == 2:
        return gather + across, 0.0, scatter
    return across, gather, gather + scatter


def _copy_seconds(
    elements: int, kept: int, zero: int, cluster: Cluster, precision: Precision, engine: Engine, copied: float, *,
    accumulates: bool,
) -> tuple[float, float, float]:
    """Memory-bound passes, as :func:`_traffic_seconds`. ``copied``: times that reduced gradients are read or written too."""
    if not elements:
        return 0.0, 0.0, 0.0
    working, master = WORKING_BYTES[precision], MASTER_BYTES[precision]
    cast = memory_bound_s(cluster.chip, master * kept + (1 + engine.gather_copies) * working * elements)
    added = memory_bound_s(cluster.chip, (working + 2 * master) * elements) if accumulates else 0.0
    added *= engine.accumulation
    reduced = memory_bound_s(
        cluster.chip, ((master if accumulates else working) + master) * elements + copied * master * kept
    )
    if zero < 2:
        return cast + reduced, 0.0, added
    summed = memory_bound_s(cluster.chip, 3 * master * kept)
    if zero == 2:
        return cast, 0.0, reduced + summed
    return 0.0, cast, cast + reduced + summed


def _partial_seconds(size_bytes: int, cluster: Cluster, degree: int) -> float:
    """What ``size_bytes`` add to the one all-reduce over the tensor axis."""
    if degree == 1 or not size_bytes:
        return 0.0
    span = span_of(cluster, degree, 1)
    return collective_s("all_reduce", span, size_bytes) - collective_s("all_reduce", span, 0)
