"""Bodies, strategy tables and prices made by hand or at random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from planner.ir.body import Body, BodyValue, Node
from planner.ir.placement import Conversion, OpStrategy, Placement
from planner.ir.types import Ref, TensorType

MATRIX = TensorType((8, 8), "float32")


def node(name: str, *operands: str, differentiable: bool = True, op: str = "op") -> Node:
    """A node that reads ``operands`` and writes one matrix."""
    arguments = tuple((f"operand{at}", Ref(operand)) for at, operand in enumerate(operands))
    return Node(name, op, arguments, (MATRIX,), differentiable=differentiable)


def body(nodes: Sequence[Node], inputs: Sequence[str], parameters: Sequence[str], outputs: Sequence[str]) -> Body:
    """A body of matrices in which everything carries a gradient."""
    return Body(
        "Small",
        tuple(BodyValue(name, MATRIX, True) for name in inputs),
        tuple(BodyValue(name, MATRIX, True) for name in parameters),
        (),
        tuple(nodes),
        tuple(outputs),
    )


@dataclass(frozen=True)
class TablePricing:
    """Prices looked up in tables; what is not in them costs the default."""

    nodes: Mapping[tuple[str, str], float] = field(default_factory=dict)
    conversions: Mapping[tuple[str, str], float] = field(default_factory=dict)
    shared_parameter_s: float = 1e-6
    default_s: float = 1e-3

    def node_seconds(self, body: Body, node: Node, strategy: OpStrategy) -> tuple[float, float, float]:
        """A third each of the node's price."""
        third = self.nodes.get((node.name, strategy.name), self.default_s) / 3
        return third, third, third

    def strategy_comm_seconds(self, strategy: OpStrategy, *, grows: bool) -> tuple[float, float]:
        """A second for each 10^9 bytes."""
        return sum(t.size_bytes for t in strategy.forward) / 1e9, sum(t.size_bytes for t in strategy.backward) / 1e9

    def conversion_seconds(self, conversion: Conversion, whole: TensorType) -> tuple[float, float]:
        """By the steps' names."""
        return tuple(  # type: ignore[return-value]
            self.conversions.get((conversion.source.state + conversion.target.state, step), 0.0)
            for step in (conversion.forward, conversion.backward)
        )

    def parameter_seconds(self, whole: TensorType, placement: Placement) -> float:
        """Only a shared parameter costs."""
        return self.shared_parameter_s if placement.state == "shared" else 0.0
