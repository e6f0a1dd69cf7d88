"""State: keeping, synchronising and updating a block's parameters under one ZeRO stage.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from cost_models.collectives import collective_s
from cost_models.compute import memory_bound_s
from cost_models.memory import MASTER_BYTES, WORKING_BYTES, TransientBytes, state_bytes, transient_bytes
from cost_models.spans import Span, span_of
from hardware_profiles import DEFAULT_ENGINE, Chip, Cluster, Engine
from planner.ir.costed import StateCost
from planner.ir.plan import Mesh, Precision

Seconds = tuple[float, float, float]
"""Once a step, forward of a micro-batch, backward of a micro-batch."""
NO_TRAFFIC: Seconds = (0.0, 0.0, 0.0)
STEP_COUNTER_BYTES = 4
"""torch.optim.AdamW's step counter of every parameter, float32 (torch/optim/adam.py, ``_init_group``)."""


@dataclass(frozen=True, slots=True)
class Elements:
    """Of some parameters of one rank: before ZeRO, and of its shard, padding included."""

    whole: int
    shard: int

    def padded(self, group: int) -> int:
        """Of all ranks' shards."""
        return group * self.shard

    def __add__(self, other: Elements) -> Elements:
        return Elements(self.whole + other.whole, self.shard + other.shard)


@dataclass(frozen=True, eq=False)
class Links:
    """How the ranks lie that share a state, in ZeRO groups of ``group`` ranks."""

    cluster: Cluster
    mesh: Mesh
    group: int

    @cached_property
    def whole(self) -> Span:
        """All of the data axis."""
        return span_of(self.cluster, self.mesh.data, self.mesh.data_stride)

    @cached_property
    def inside(self) -> Span:
        """A ZeRO group."""
        return span_of(self.cluster, self.group, self.mesh.data_stride)

    @cached_property
    def copies(self) -> Span | None:
        """The copies of one rank's shard, where there are several groups."""
        if self.group == self.mesh.data:
            return None
        return span_of(self.cluster, self.mesh.data // self.group, self.mesh.data_stride * self.group)

    @cached_property
    def tensor(self) -> Span:
        """The tensor axis."""
        return span_of(self.cluster, self.mesh.tensor, self.mesh.tensor_stride)


@dataclass(frozen=True)
class _Still:
    """What a ZeRO stage costs wherever the ranks lie, no collective counted. ``passes``: memory-bound ones;
    ``hooks_s``: what hooks take in forward and in backward passes."""

    bytes: Mapping[str, int]
    passes: Seconds
    hooks_s: tuple[float, float]


@dataclass(frozen=True)
class State:
    """Parameters of one rank under the ZeRO stages of one ``group`` of ranks (1 under ZeRO 0). What its stages have in common
    is found once, and what does not depend on where ranks lie.

    ``trained``, ``frozen``: elements of those that are trained, and of others; ``alone``: whether one rank has them, with no
    other on its data axis; ``partial_elements``: those of the trained shard whose gradient is summed over the tensor axis;
    ``tensors``: how many parameters are trained; ``several``: whether a step has several micro-batches; ``resident``: gathered
    from the first forward to the last backward even under ZeRO 3 (blocks that share a parameter); ``reached``: whether a
    gradient comes to one of the block's outputs; ``engine``: in which dtype it reduces gradients, how quickly, and what its
    update moves.

    With one micro-batch no gradient exists when activations are at their most, and each block's working copy is freed
    as its gradients arrive: the larger of the two is counted, the part beyond the gradients as parameters.
    """

    trained: Elements
    frozen: Elements
    group: int
    chip: Chip
    precision: Precision
    alone: bool
    partial_elements: int = 0
    tensors: int = 0
    several: bool = True
    resident: bool = False
    reached: bool = True
    engine: Engine = DEFAULT_ENGINE
    _known: dict[int, _Still] = field(default_factory=dict, compare=False)

    def costs(self, stages: Sequence[int], links: Links) -> dict[int, StateCost]:
        """Bytes and seconds under some ZeRO stages."""
        partial_s, speed, found = self._partial_s(links), self.engine.collective_speed, {}
        sharded = self._sharded_seconds(links) if any(stages) and not self.alone else NO_TRAFFIC
        for zero in stages:
            still = self._still(zero)
            once, forward, backward = self._traffic_seconds(zero, links, sharded)
            found[zero] = StateCost(
                **still.bytes, once_comm_s=once / speed + partial_s + still.passes[0],
                forward_comm_s=forward / speed + still.passes[1] + still.hooks_s[0],
                backward_comm_s=backward / speed + still.passes[2] + still.hooks_s[1], optimizer_s=self._update_s,
            )
        return found

    def _still(self, zero: int) -> _Still:
        if zero not in self._known:
            self._known[zero] = self._without_traffic(zero)
        return self._known[zero]

    def _without_traffic(self, zero: int) -> _Still:
        trained, precision, accumulates = self.trained, self.precision, zero < 2 and self.several
        state = state_bytes(trained.whole, precision, zero, self.group, shard=trained.shard, accumulates=accumulates)
        working = self._gathered_bytes if zero < 3 or self.resident else 0
        copies = working if self.several else max(0, working - state.gradients)
        hook_s = self.chip.hook_s or 0.0 if self._held.whole and self.chip.is_host else 0.0
        held = {
            "parameters_bytes": MASTER_BYTES[precision] * self._held.shard + copies, "gradients_bytes": state.gradients,
            "optimizer_bytes": state.optimizer + STEP_COUNTER_BYTES * self.tensors,
            "gather_bytes": self._transient_bytes(zero),
            "lasting_bytes": self._passing.reduce if zero >= 2 and self.several else 0,
        }
        return _Still(held, self._copy_seconds(zero, accumulates=accumulates), (hook_s, hook_s if self.reached else 0.0))

    @cached_property
    def _held(self) -> Elements:
        return self.trained + self.frozen

    @cached_property
    def _gathered_bytes(self) -> int:
        return WORKING_BYTES[self.precision] * self._held.padded(self.group)

    @cached_property
    def _passing(self) -> TransientBytes:
        """Of the trained ones, alike under all stages of the group."""
        return transient_bytes(self.trained.whole, self.precision, 1, self.group, shard=self.trained.shard)

    @cached_property
    def _idle_bytes(self) -> int:
        """To gather the others."""
        return transient_bytes(self.frozen.whole, self.precision, 1, self.group, shard=self.frozen.shard).gather

    @cached_property
    def _update_s(self) -> float:
        update = self.engine.optimizer_passes * MASTER_BYTES[self.precision] * self.trained.shard
        return memory_bound_s(self.chip, update) if self.trained.shard else 0.0

    def _partial_s(self, links: Links) -> float:
        """What gradients that are partial add to the one all-reduce over the tensor axis."""
        size_bytes = self.partial_elements * MASTER_BYTES[self.precision]
        if links.mesh.tensor == 1 or not size_bytes:
            return 0.0
        return collective_s("all_reduce", links.tensor, size_bytes) - collective_s("all_reduce", links.tensor, 0)

    def _transient_bytes(self, zero: int) -> int:
        """What ZeRO holds transiently of a block and of its neighbour, as if that were as large: of a stage, the largest
        counts.

        The flat buffer of a reduction lives until the next one (``reduce_scatter_states``). ZeRO 0 reduces in the last
        micro-batch only, where the block's working copy and activations are already gone. ZeRO 1 frees more gradients than it
        buffers. With one micro-batch ZeRO 1 and 2 free a block's working copy, and buffer and keep its gradients, while the
        next block runs; of blocks that share a parameter one buffer is enough, where gradients have waited
        (:mod:`planner.costing.waiting`). ZeRO 3 keeps two working copies (the current block's and the one fetched next). Under
        ZeRO 2 and 3 the buffer of the stage's first block lives on through the next micro-batch's forward, beside all
        activations. A block that is alone in its stage has both copies too: the collective's output and what is copied out of
        it.

        A forward pass has the output of the gather before beside these, and a cast shard: less than the gradients that come
        later, but of frozen parameters none do.
        """
        group, accumulates, reduced = self.group, self.several, self._passing.reduce
        flat = WORKING_BYTES[self.precision] * self.frozen.padded(group) if group > 1 else 0
        waits = self.resident and self.engine.keeps == "operations"
        if zero == 0 or (zero == 1 and group == 1):  # Over one rank 1 is 0: its result is as large as the gradients.
            return max(0, reduced - self._gathered_bytes) if accumulates else reduced
        if not accumulates and zero < 3:
            beyond = max(0, reduced + MASTER_BYTES[self.precision] * self.trained.shard - self._gathered_bytes)
            return max(beyond if waits else 2 * beyond, flat + self._idle_bytes)
        if zero == 1:
            return flat + self._idle_bytes
        reduced = reduced if accumulates else 0
        if zero == 2:
            return max(reduced if waits else 2 * reduced, flat + self._idle_bytes)
        return (0 if self.resident else 2 * self._gathered_bytes) + max(reduced, self._idle_bytes)

    def _traffic_seconds(self, zero: int, links: Links, sharded: Seconds) -> Seconds:
        """Collectives over the data axis."""
        if self.alone:
            return NO_TRAFFIC
        if zero == 0:
            return collective_s("all_reduce", links.whole, self._reduced_item * self.trained.whole), 0.0, 0.0
        gather, scatter, across = sharded
        if zero == 1:
            return gather + scatter + across, 0.0, 0.0
        if zero == 2:
            return gather + across, 0.0, scatter
        return across, gather, (gather if self.reached else 0.0) + scatter

    @property
    def _reduced_item(self) -> int:
        """Bytes of an element that is reduced."""
        return self.engine.gradient or MASTER_BYTES[self.precision]

    def _sharded_seconds(self, links: Links) -> Seconds:
        """Of a gathering, of a reduction over the group, and over its copies."""
        item, copies = self._reduced_item, links.copies
        return (
            collective_s("all_gather", links.inside, WORKING_BYTES[self.precision] * self._held.shard),
            collective_s("reduce_scatter", links.inside, item * self.trained.padded(self.group)),
            collective_s("all_reduce", copies, item * self.trained.shard) if copies is not None else 0.0,
        )

    def _copy_seconds(self, zero: int, *, accumulates: bool) -> Seconds:
        """Memory-bound passes, as :meth:`_traffic_seconds`: flat buffers with their padding, gradients without."""
        if not self._held.whole:
            return 0.0, 0.0, 0.0
        trained, chip, cast = self.trained, self.chip, self._cast_s
        working, master = WORKING_BYTES[self.precision], MASTER_BYTES[self.precision]
        added = reduced = summed = 0.0
        if trained.whole:
            if accumulates:
                added = self.engine.accumulation * memory_bound_s(chip, (working + 2 * master) * trained.whole)
            read = master if accumulates else working
            reduced = memory_bound_s(
                chip, read * trained.whole + master * trained.padded(self.group) + self._copied * master * trained.shard
            )
            summed = memory_bound_s(chip, 3 * master * trained.shard)
        if zero < 2:
            return cast + reduced, 0.0, added
        if zero == 2:
            return cast, 0.0, reduced + summed
        return 0.0, cast, (cast if self.reached else 0.0) + reduced + summed

    @property
    def _copied(self) -> float:
        """Times that reduced gradients are read or written too: a group of one copies what it reduces; one of several ranks'
        divides it first."""
        return self.engine.reduce_copies * (1 if self.alone else 2) if self.group == 1 else 0.0

    @cached_property
    def _cast_s(self) -> float:
        """Of the masters to working parameters, and their copies."""
        moved = MASTER_BYTES[self.precision] * self._held.shard + (1 + self.engine.gather_copies) * self._gathered_bytes
        return memory_bound_s(self.chip, moved)
