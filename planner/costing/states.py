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

Parameters that are not trained are gathered with those that are, and nothing is reduced of them; a block of which no output
gets a gradient is gathered for its forward passes alone (planner/ledger/units.py; the one gather a step that the block after it
may begin for it is left out).

What moves is padded: FSDP2 gives every rank of the group whole rows of a parameter, so one of fewer rows than ranks moves a
row for each of them.

Gradients are reduced in the master's dtype (float32 under bf16 and fp16). A shard group smaller than the data degree
(hybrid sharding) adds one all-reduce of the sharded gradients over its copies a step. Gradients that are partial sums
over the tensor axis are summed there once a step, all in one call (runtime/tied.py): a block pays for its bytes.

Memory-bound passes around the collectives (torch/distributed/fsdp/_fully_shard): the master is cast and copied to the
working parameters at every gather; gradients that are not reduced yet are added to whole ones in the master's dtype;
each reduction copies them into one flat buffer. They are counted with the traffic that they belong to.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.collectives import collective_s
from cost_models.compute import memory_bound_s
from cost_models.memory import MASTER_BYTES, WORKING_BYTES, state_bytes, transient_bytes
from cost_models.spans import span_of
from hardware_profiles import DEFAULT_ENGINE, Cluster, Engine
from planner.ir.costed import StateCost
from planner.ir.plan import Mesh, Precision

STEP_COUNTER_BYTES = 4
"""torch.optim.AdamW's step counter of every parameter, float32 (torch/optim/adam.py, ``_init_group``)."""


@dataclass(frozen=True, slots=True)
class Elements:
    """Of some parameters of one rank: before ZeRO, and of its shard, padding included."""

    whole: int
    shard: int

    @classmethod
    def over(cls, group: int, whole: int, shard: int | None) -> Elements:
        """``shard``: by default the even share of a group of ranks; of one rank it is all."""
        return cls(whole, whole if group == 1 else -(-whole // group) if shard is None else shard)

    def padded(self, group: int) -> int:
        """Of all ranks' shards."""
        return group * self.shard

    def __add__(self, other: Elements) -> Elements:
        return Elements(self.whole + other.whole, self.shard + other.shard)


def cost_state(
    parameter_elements: int, zero: int, cluster: Cluster, mesh: Mesh, precision: Precision, zero_group: int, *,
    shard: int | None = None, frozen_elements: int = 0, frozen_shard: int | None = None, partial_elements: int = 0,
    tensors: int = 0, accumulation: int = 2, resident: bool = False, reached: bool = True, engine: Engine = DEFAULT_ENGINE,
) -> StateCost:
    """Bytes and seconds of ``parameter_elements`` trained elements (of one rank, before ZeRO) and ``frozen_elements`` others.

    ``shard``, ``frozen_shard``: elements of the rank's ZeRO shard, padding included (default: the even share);
    ``partial_elements``: those of the shard whose gradient is summed over the tensor axis; ``tensors``: how many parameters are
    trained; ``accumulation``: micro-batches of a step; ``resident``: gathered from the first forward to the last backward even
    under ZeRO 3 (blocks that share a parameter); ``reached``: whether a gradient comes to one of the block's outputs;
    ``engine``: in which dtype it reduces gradients, how quickly, and what its update moves.

    With one micro-batch no gradient exists when activations are at their most, and each block's working copy is freed
    as its gradients arrive: the larger of the two is counted, the part beyond the gradients as parameters.
    """
    group = min(zero_group, mesh.data) if zero else 1
    trained = Elements.over(group, parameter_elements, shard)
    frozen = Elements.over(group, frozen_elements, frozen_shard)
    held = trained + frozen
    accumulates = zero < 2 and accumulation > 1
    state = state_bytes(trained.whole, precision, zero, group, shard=trained.shard, accumulates=accumulates)
    working = WORKING_BYTES[precision] * held.padded(group) if zero < 3 or resident else 0
    copies = working if accumulation > 1 else max(0, working - state.gradients)
    once, forward, backward = _traffic_seconds(held, trained, zero, cluster, mesh, precision, group, engine, reached=reached)
    once += _partial_seconds(partial_elements * MASTER_BYTES[precision], cluster, mesh.tensor)
    # A group of one copies what it reduces; one of several ranks' divides it first.
    copied = engine.reduce_copies * (2 if mesh.data > 1 else 1) if group == 1 else 0.0
    passes = _copy_seconds(
        held, trained, zero, group, cluster, precision, engine, copied, accumulates=accumulates, reached=reached,
    )
    update = engine.optimizer_passes * MASTER_BYTES[precision] * trained.shard
    chip = cluster.chip
    hook_s = chip.hook_s or 0.0 if held.whole and chip.is_host else 0.0
    return StateCost(
        parameters_bytes=MASTER_BYTES[precision] * held.shard + copies, gradients_bytes=state.gradients,
        optimizer_bytes=state.optimizer + STEP_COUNTER_BYTES * tensors,
        gather_bytes=_transient_bytes(
            trained, frozen, zero, group, precision, accumulation, resident=resident,
            waits=resident and engine.keeps == "operations",
        ),
        lasting_bytes=(
            transient_bytes(trained.whole, precision, zero, group, shard=trained.shard).reduce
            if zero >= 2 and accumulation > 1 else 0
        ),
        once_comm_s=once + passes[0], forward_comm_s=forward + passes[1] + hook_s,
        backward_comm_s=backward + passes[2] + (hook_s if reached else 0.0),
        optimizer_s=memory_bound_s(cluster.chip, update) if trained.shard else 0.0,
    )


def _transient_bytes(
    trained: Elements, frozen: Elements, zero: int, group: int, precision: Precision, accumulation: int, *, resident: bool,
    waits: bool,
) -> int:
    """What ZeRO holds transiently of a block and of its neighbour, as if that were as large: of a stage, the largest counts.

    The flat buffer of a reduction lives until the next one (``reduce_scatter_states``). ZeRO 0 reduces in the last micro-batch
    only, where the block's working copy and activations are already gone. ZeRO 1 frees more gradients than it buffers. With
    one micro-batch ZeRO 1 and 2 free a block's working copy, and buffer and keep its gradients, while the next block runs; of
    blocks that share a parameter one buffer is enough, where gradients have waited (:mod:`planner.costing.waiting`).
    ZeRO 3 keeps two working copies (the current block's and the one fetched next). Under ZeRO 2 and 3 the buffer of the
    stage's first block lives on through the next micro-batch's forward, beside all activations. A block that is alone in its
    stage has both copies too: the collective's output and what is copied out of it.

    A forward pass has the output of the gather before beside these, and a cast shard: less than the gradients that come later,
    but of frozen parameters none do.
    """
    passing = transient_bytes(trained.whole, precision, zero, group, shard=trained.shard)
    gathered = WORKING_BYTES[precision] * (trained.padded(group) + frozen.padded(group))
    idle = transient_bytes(frozen.whole, precision, zero, group, shard=frozen.shard).gather
    flat = WORKING_BYTES[precision] * frozen.padded(group) if group > 1 else 0
    if zero == 0 or (zero == 1 and group == 1):  # Over one rank 1 is 0: its result is as large as the gradients.
        return max(0, passing.reduce - gathered) if accumulation > 1 else passing.reduce
    if accumulation == 1 and zero < 3:
        beyond = max(0, passing.reduce + MASTER_BYTES[precision] * trained.shard - gathered)
        return max(beyond if waits else 2 * beyond, flat + idle)
    if zero == 1:
        return flat + idle
    reduced = passing.reduce if accumulation > 1 else 0
    if zero == 2:
        return max(reduced if waits else 2 * reduced, flat + idle)
    return (0 if resident else 2 * gathered) + max(reduced, idle)


def _traffic_seconds(
    held: Elements, trained: Elements, zero: int, cluster: Cluster, mesh: Mesh, precision: Precision, group: int,
    engine: Engine, *, reached: bool,
) -> tuple[float, float, float]:
    """Collectives over the data axis: (once a step, forward of a micro-batch, backward of a micro-batch)."""
    alone = _alone_seconds(held, trained, zero, cluster, mesh, precision, group, engine, reached=reached)
    return alone[0] / engine.collective_speed, alone[1] / engine.collective_speed, alone[2] / engine.collective_speed


def _alone_seconds(
    held: Elements, trained: Elements, zero: int, cluster: Cluster, mesh: Mesh, precision: Precision, group: int,
    engine: Engine, *, reached: bool,
) -> tuple[float, float, float]:
    if mesh.data == 1:
        return 0.0, 0.0, 0.0
    reduced = engine.gradient or MASTER_BYTES[precision]
    if zero == 0:
        whole = span_of(cluster, mesh.data, mesh.data_stride)
        return collective_s("all_reduce", whole, reduced * trained.whole), 0.0, 0.0
    inside = span_of(cluster, group, mesh.data_stride)
    gather = collective_s("all_gather", inside, WORKING_BYTES[precision] * held.shard)
    scatter = collective_s("reduce_scatter", inside, reduced * trained.padded(group))
    across = 0.0
    if group < mesh.data:
        copies = span_of(cluster, mesh.data // group, mesh.data_stride * group)
        across = collective_s("all_reduce", copies, reduced * trained.shard)
    if zero == 1:
        return gather + scatter + across, 0.0, 0.0
    if zero == 2:
        return gather + across, 0.0, scatter
    return across, gather, (gather if reached else 0.0) + scatter


def _copy_seconds(
    held: Elements, trained: Elements, zero: int, group: int, cluster: Cluster, precision: Precision, engine: Engine,
    copied: float, *, accumulates: bool, reached: bool,
) -> tuple[float, float, float]:
    """Memory-bound passes, as :func:`_traffic_seconds`: flat buffers with their padding, gradients without. ``copied``: times
    that reduced gradients are read or written too."""
    if not held.whole:
        return 0.0, 0.0, 0.0
    working, master = WORKING_BYTES[precision], MASTER_BYTES[precision]
    cast = memory_bound_s(cluster.chip, master * held.shard + (1 + engine.gather_copies) * working * held.padded(group))
    added = reduced = summed = 0.0
    if trained.whole:
        whole, shard = trained.whole, trained.shard
        added = engine.accumulation * memory_bound_s(cluster.chip, (working + 2 * master) * whole) if accumulates else 0.0
        read = master if accumulates else working
        reduced = memory_bound_s(
            cluster.chip, read * whole + master * trained.padded(group) + copied * master * shard
        )
        summed = memory_bound_s(cluster.chip, 3 * master * shard)
    if zero < 2:
        return cast + reduced, 0.0, added
    if zero == 2:
        return cast, 0.0, reduced + summed
    return 0.0, cast, (cast if reached else 0.0) + reduced + summed


def _partial_seconds(size_bytes: int, cluster: Cluster, degree: int) -> float:
    """What ``size_bytes`` add to the one all-reduce over the tensor axis."""
    if degree == 1 or not size_bytes:
        return 0.0
    span = span_of(cluster, degree, 1)
    return collective_s("all_reduce", span, size_bytes) - collective_s("all_reduce", span, 0)
