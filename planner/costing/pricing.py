"""Pricing: seconds of operations, conversions and collectives for one candidate, from the cost models.

Eager torch: every operation that is not a view is a kernel of its own, pointwise ones included.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cost_models.collectives import collective_s, span_of
from cost_models.compute import attention_s, gemm_s, memory_bound_s
from hardware_profiles import Cluster
from planner.ir.graph import Body, Node
from planner.ir.placement import Conversion, OpStrategy, Placement, Transfer, local_type, transfers
from planner.ir.types import TensorType
from planner.ops.work import Work, backward_work, work

_Seconds = tuple[float, float, float]
_Key = tuple[Node, tuple[TensorType, ...], tuple[TensorType, ...], tuple[bool, ...], tuple[bool, ...]]


@dataclass(frozen=True)
class Pricing:
    """``degree``: ranks of the tensor axis, ``stride`` apart; ``microbatch``: samples of one call; ``accumulation``:
    micro-batches of a step, over which what happens once a step is spread. Dtypes are those of the traced graph."""

    cluster: Cluster
    degree: int
    microbatch: int
    stride: int = 1
    accumulation: int = 1
    _known: dict[_Key, _Seconds] = field(default_factory=dict, init=False, repr=False, compare=False)

    def node_seconds(self, body: Body, node: Node, strategy: OpStrategy) -> _Seconds:
        """Forward, input gradient and weight gradient of one node's local share, without communication."""
        if node.base == "getitem":
            return 0.0, 0.0, 0.0
        operands = tuple(
            local_type(body.types[name], placed, self.degree)
            for name, placed in zip(node.operands, strategy.operands, strict=True)
        )
        outputs = tuple(
            local_type(type_, placed, self.degree) for type_, placed in zip(node.types, strategy.outputs, strict=True)
        )
        parameters = {value.name for value in body.parameters}
        needs = tuple(node.differentiable and name in body.differentiable for name in node.operands)
        key = (node, operands, outputs, needs, tuple(name in parameters for name in node.operands))
        if key not in self._known:
            self._known[key] = self._node_seconds(key)
        return self._known[key]

    def strategy_comm_seconds(self, strategy: OpStrategy) -> tuple[float, float]:
        """Forward and backward of the collectives inside an operation. Strategies count one sample."""
        scaled = [
            sum(self.transfer_seconds(Transfer(t.kind, t.size_bytes * self.microbatch)) for t in passed)
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
        return collective_s(kind, span_of(self.cluster, self.degree, self.stride), transfer.size_bytes)

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
        if step in ("all_gather", "reduce_scatter") and sharded.dim > 0:
            moved = 2 * size
        return memory_bound_s(self.cluster.chip, moved) if moved else 0.0

    def _node_seconds(self, key: _Key) -> _Seconds:
        node, operands, outputs, needs, parameters = key
        forward = work(node, operands, outputs, self.microbatch)
        to_input, to_weight = backward_work(node, operands, outputs, self.microbatch, needs, parameters)
        dtype = next((t.dtype for t in outputs if t.floating), "float32")
        return (
            self._seconds(forward, dtype, backward=False), self._seconds(to_input, dtype, backward=True),
            self._seconds(to_weight, dtype, backward=True),
        )

    def _seconds(self, done: Work, dtype: str, *, backward: bool) -> float:
        chip = self.cluster.chip
        if done.kind == "free":
            return 0.0
        rated = dtype in chip.peak_flops and dtype in chip.gemm
        if done.gemm is not None and rated:
            m, n, k, count = done.gemm
            return gemm_s(chip, m, n, k, count, dtype)
        shape = done.attention
        if shape is not None and rated:
            return attention_s(
                chip, shape.batch, shape.heads, shape.queries, shape.keys, shape.head_dim, causal=shape.causal,
                dtype=dtype, backward=backward,
            )
        return memory_bound_s(chip, done.bytes_moved, done.launches)
