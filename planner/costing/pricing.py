"""Pricing: seconds of operations, conversions and collectives for one candidate, from the cost models.

Every operation that is not a view is a kernel of its own, pointwise ones included; an engine says what fusing leaves of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from cost_models.collectives import collective_s
from cost_models.compute import attention_s, function_s, gemm_s, memory_bound_s, unfused_attention_s
from cost_models.spans import Span, span_of
from hardware_profiles import DEFAULT_ENGINE, Cluster, Engine
from planner.costing.exchanges import Exchange, scattered_gradients
from planner.costing.operations import Operation, measure_operation
from planner.ir.body import Body, Node
from planner.ir.placement import Conversion, OpStrategy, Placement, Transfer, transfers
from planner.ir.types import TensorType
from planner.ops.families import GROUPED_PRODUCT
from planner.ops.work import AttentionShape, Work

_Seconds = tuple[float, float, float]
UNFUSED_KERNELS = 4
"""Two products, softmax and dropout."""
BATCHED = ("bmm", "baddbmm", GROUPED_PRODUCT)
LOSS, LOSS_KERNELS = "cross_entropy_loss", 5
"""A cast, a softmax, a lookup, a scaling, a cast (runtime/vocabulary.py)."""
CAST_BYTES = 3
"""Read in two bytes, written in one."""


@dataclass(frozen=True)
class Pricing:
    """``degree``: ranks of the tensor axis; ``strides``: how far apart they are (of several axes, the quickest counts);
    ``microbatch``: samples of one call; ``accumulation``: micro-batches of a step, over which what happens once a step is
    spread; ``engine``: what runs it; ``context``, ``expert``: degrees of those axes, next to the tensor axis. Dtypes are those
    of the traced graph."""

    cluster: Cluster
    degree: int
    microbatch: int
    strides: tuple[int, ...] = (1,)
    accumulation: int = 1
    engine: Engine = DEFAULT_ENGINE
    context: int = 1
    expert: int = 1
    _known: dict[tuple[Operation, bool], _Seconds] = field(default_factory=dict, init=False, repr=False, compare=False)

    def node_seconds(self, body: Body, node: Node, strategy: OpStrategy) -> _Seconds:
        """Forward, input gradient and weight gradient of one node's local share, without communication."""
        return self.operation_seconds(measure_operation(body, node, strategy, self.degree, self.microbatch))

    def operation_seconds(self, operation: Operation, *, quantised: bool = False) -> _Seconds:
        """The same of a node that was counted before. ``quantised``: its products may run in the engine's own dtype."""
        key = (operation, quantised)
        if key not in self._known:
            self._known[key] = self._operation_seconds(operation, quantised)
        return self._known[key]

    def host_seconds(
        self, operations: Iterable[Operation], collectives: tuple[int, int] = (0, 0)
    ) -> tuple[float, float, float]:
        """What the host needs for forward, input gradients and weight gradients, which a block cannot undercut.

        ``collectives``: of forward and of backward, which come with input gradients. The machine's own number comes before the
        engine's, which was fitted to others. Where the host is the device, kernels are timed with what they need of it."""
        chip = self.cluster.chip
        if not self.engine.host_s or chip.is_host:
            return 0.0, 0.0, 0.0
        each = self.engine.host_s if chip.host_s is None else chip.host_s
        forward, to_input, to_weight = *map(float, collectives), 0.0
        for operation in operations:
            forward += self._launches(operation.forward)
            to_input += self._launches(operation.to_input)
            to_weight += self._launches(operation.to_weight)
        return forward * each, to_input * each, to_weight * each

    @property
    def hook_s(self) -> float:
        """What the host does besides in each pass of a block that ZeRO manages, where it runs ahead of the device."""
        chip = self.cluster.chip
        return chip.hook_s or 0.0 if self.engine.host_s and not chip.is_host else 0.0

    def _launches(self, done: Work) -> float:
        if done.kind == "free":
            return 0.0
        if done.attention is not None:
            return UNFUSED_KERNELS if self.engine.attention == "unfused" else 1
        return 1 if done.gemm is not None else done.launches * self.engine.kernels

    def strategy_comm_seconds(self, strategy: OpStrategy, *, grows: bool) -> tuple[float, float]:
        """Forward and backward of the collectives inside an operation. Strategies count one sample; ``grows``: the operation
        does so with the batch."""
        samples = self.microbatch if grows else 1
        scaled = [
            sum(self.transfer_seconds(Transfer(t.kind, t.size_bytes * samples)) for t in passed)
            for passed in (strategy.forward, strategy.backward)
        ]
        return float(scaled[0]), float(scaled[1])

    def transfer_seconds(self, transfer: Transfer) -> float:
        """One collective over the tensor axis."""
        if self.degree == 1:
            return 0.0
        kind = transfer.kind
        if kind not in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            raise ValueError(f"{kind} is no collective of the tensor axis")
        return self.engine.tensor_exposed * min(collective_s(kind, span, transfer.size_bytes) for span in self.spans)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """How tensor ranks lie."""
        return tuple({span_of(self.cluster, self.degree, stride) for stride in self.strides})

    def exchange_seconds(self, exchange: Exchange) -> tuple[float, float]:
        """Forward and backward of what the context or the expert axis exchanges for one micro-batch."""
        degree = self.context if exchange.axis == "context" else self.expert
        if degree == 1:
            return 0.0, 0.0
        span = span_of(self.cluster, degree, self.degree * self.strides[0])
        moved = (exchange, scattered_gradients(exchange, degree))
        alone = [(item, collective_s(item.kind, span, item.size_bytes)) for item in moved if item is not None]
        return sum(item.forward * s for item, s in alone), sum(item.backward * s for item, s in alone)

    def conversion_seconds(self, conversion: Conversion, whole: TensorType) -> tuple[float, float]:
        """Forward and backward of converting a value of type ``whole`` (all ranks together) once: the collectives, and
        the copies that bring the dim to the front or back where it is not the first."""
        sharded = conversion.source if conversion.source.state == "shard" else conversion.target
        seconds = []
        for step in (conversion.forward, conversion.backward):
            passed = transfers(step, whole, sharded, self.degree, self.microbatch)
            total = sum(self.transfer_seconds(transfer) for transfer in passed)
            if self.degree > 1:
                total += self._copy_seconds(step, sharded, whole)
            seconds.append(total)
        return seconds[0], seconds[1]

    def parameter_seconds(self, whole: TensorType, placement: Placement) -> float:
        """The gradient sum over the tensor axis that a ``shared`` parameter needs once a step, spread over its
        micro-batches."""
        if placement.state != "shared":
            return 0.0
        return self.transfer_seconds(Transfer("all_reduce", whole.size_bytes())) / self.accumulation

    def _copy_seconds(self, step: str, sharded: Placement, whole: TensorType) -> float:
        size = whole.size_bytes(self.microbatch)
        local = size // self.degree
        moved = {"slice": 2 * local, "pad": size + local, "all_to_all": 4 * local}.get(step, 0)
        if step in ("all_gather", "reduce_scatter") and prod(whole.sizes(self.microbatch)[: sharded.dim]) > 1:
            moved = 2 * size
        return memory_bound_s(self.cluster.chip, moved) if moved else 0.0

    def _operation_seconds(self, operation: Operation, quantised: bool) -> _Seconds:
        dtype = operation.dtype
        narrow = self.engine.matmul_dtype if quantised and operation.weighted else None
        # Products batched over parameters are the experts'.
        speed = self.engine.grouped_speed if operation.weighted and operation.base in BATCHED else 1.0
        forward, to_input, to_weight = (
            self._seconds(work, dtype, narrow, speed, backward=backward)
            for work, backward in ((operation.forward, False), (operation.to_input, True), (operation.to_weight, True))
        )
        chip, engine = self.cluster.chip, self.engine
        if operation.base == LOSS and engine.loss_forward and operation.forward.function not in chip.functions:
            forward, to_input = (
                memory_bound_s(chip, operation.forward.elements * moved, engine.kernels * LOSS_KERNELS)
                for moved in (engine.loss_forward, engine.loss_backward)
            )
        if engine.sums:
            to_input += engine.sums * self._seconds(operation.sums, dtype, narrow, speed, backward=True)
        return forward, to_input, to_weight


    def _seconds(self, done: Work, dtype: str, narrow: str | None, speed: float, *, backward: bool) -> float:
        chip, engine = self.cluster.chip, self.engine
        if done.kind == "free":
            return 0.0
        rated = dtype in chip.peak_flops and dtype in chip.gemm
        if done.gemm is not None and rated:
            m, n, k, count = done.gemm
            if narrow is None or narrow not in chip.peak_flops:
                return gemm_s(chip, m, n, k, count, dtype, speed)
            seconds = gemm_s(chip, m, n, k, count, narrow, speed * engine.matmul_speed)
            return seconds + memory_bound_s(chip, engine.cast_passes * CAST_BYTES * count * m * k)
        shape = done.attention
        if shape is not None and rated:
            return self._attention_seconds(shape, dtype, backward=backward)
        if done.function in chip.functions:
            return function_s(chip, done.function, done.elements)
        # Compiled kernels read views as they read whole tensors.
        share = chip.memory_irregular if done.irregular and engine.kernels == 1 else 1.0
        return memory_bound_s(chip, engine.pointwise_traffic * done.bytes_moved / share, engine.kernels * done.launches)

    def _attention_seconds(self, shape: AttentionShape, dtype: str, *, backward: bool) -> float:
        chip, engine = self.cluster.chip, self.engine
        extents = (shape.batch, shape.heads, shape.queries, shape.keys, shape.head_dim)
        if engine.attention == "unfused":
            return unfused_attention_s(chip, *extents, dtype=dtype, backward=backward)
        speed = engine.attention_speed * (chip.attention_portable if engine.attention == "portable" else 1.0)
        return attention_s(chip, *extents, causal=shape.causal, dtype=dtype, backward=backward, speed=speed)
