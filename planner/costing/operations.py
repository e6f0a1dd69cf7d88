"""Operation: what one node of a placed body does on one rank, before any price."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from planner.ir.body import Body, Node
from planner.ir.placement import OpStrategy, local_type
from planner.ir.types import TensorType
from planner.ops.work import FREE, Work, backward_work, work


@dataclass(frozen=True, slots=True)
class Operation:
    """One node's local share for one micro-batch. ``dtype``: of its results; ``weighted``: some operand is a parameter;
    the three passes are the forward, the input gradient and the weight gradient. ``sums``: what autograd adds up in kernels of
    its own: the gradients of an operand that has other readers."""

    node: str
    base: str
    dtype: str
    weighted: bool
    forward: Work
    to_input: Work
    to_weight: Work
    sums: Work = FREE


@dataclass(frozen=True, slots=True)
class LocalCall:
    """One node on rank 0 (which holds the most), whatever the micro-batch: ``operands`` and ``outputs`` by their local types;
    ``needs``: operands that a gradient flows to; ``owned``: which of them are parameters; ``joined``: those whose gradient is
    added to another reader's; ``irregular``: whether the operands do not lie side by side."""

    node: Node
    operands: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    needs: tuple[bool, ...]
    owned: tuple[bool, ...]
    joined: tuple[bool, ...]
    irregular: bool
    _known: dict[int, Operation] = field(default_factory=dict, init=False, repr=False, compare=False)

    def measure(self, microbatch: int) -> Operation:
        """Count it."""
        if microbatch not in self._known:
            self._known[microbatch] = self._measure(microbatch)
        return self._known[microbatch]

    def _measure(self, microbatch: int) -> Operation:
        node = self.node
        if node.base == "getitem":
            return Operation(node.name, node.base, node.type.dtype, False, FREE, FREE, FREE)
        forward = work(node, self.operands, self.outputs, microbatch)
        to_input, to_weight = backward_work(
            node, self.operands, self.outputs, microbatch, self.needs, self.owned, forward=forward
        )
        if self.irregular:
            forward, to_input = replace(forward, irregular=True), replace(to_input, irregular=to_input.kind != "free")
        return Operation(
            node.name, node.base, _dtype(self.outputs), any(self.owned), forward, to_input, to_weight,
            self._sums(microbatch),
        )

    def _sums(self, microbatch: int) -> Work:
        """Two gradients are read and their sum is written."""
        sizes = [t.size_bytes(microbatch) for t, joins in zip(self.operands, self.joined, strict=True) if joins]
        return Work(0.0, 3 * sum(sizes), "memory", launches=len(sizes), irregular=self.irregular) if sizes else FREE


def local_call(body: Body, node: Node, strategy: OpStrategy, degree: int) -> LocalCall:
    """One node under ``strategy`` over ``degree`` ranks."""
    parameters = {value.name for value in body.parameters}
    owned = tuple(name in parameters for name in node.operands)
    if node.base == "getitem":
        return LocalCall(node, (), (), (), owned, (), False)
    operands = tuple(
        local_type(body.types[name], placed, degree) for name, placed in zip(node.operands, strategy.operands, strict=True)
    )
    outputs = tuple(local_type(type_, placed, degree) for type_, placed in zip(node.types, strategy.outputs, strict=True))
    return LocalCall(
        node, operands, outputs, body.made(node), owned, body.joined[node.name], node.name in body.irregular
    )


def measure_operation(body: Body, node: Node, strategy: OpStrategy, degree: int, microbatch: int) -> Operation:
    """Count one node under ``strategy``."""
    return local_call(body, node, strategy, degree).measure(microbatch)


def _dtype(outputs: tuple[TensorType, ...]) -> str:
    return next((t.dtype for t in outputs if t.floating), "float32")
