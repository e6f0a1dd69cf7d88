"""Prices under which toy models are split as large ones are: products cost far more than collectives, and these more than
pointwise work, as they do where the dims are in the thousands. The matrix wants plans with many collectives; whether
they pay at toy size is not its question."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.ir.body import Body, Node
from planner.ir.placement import Conversion, OpStrategy, Placement, local_type
from planner.ir.types import TensorType

PRODUCT_S, COLLECTIVE_S, LATENCY_S = 1000.0, 50.0, 1000.0


@dataclass(frozen=True)
class VolumePricing:
    """Seconds by volume, of one sample: elements touched, multiplications, elements sent."""

    degree: int

    def node_seconds(self, body: Body, node: Node, strategy: OpStrategy) -> tuple[float, float, float]:
        operands = [
            local_type(body.types[name], placed, self.degree)
            for name, placed in zip(node.operands, strategy.operands, strict=True)
        ]
        outputs = [local_type(type_, p, self.degree) for type_, p in zip(node.types, strategy.outputs, strict=True)]
        volume = float(sum(type_.elements() for type_ in (*operands, *outputs)))
        if node.base in ("linear", "mm", "matmul", "bmm", "scaled_dot_product_attention") and outputs:
            volume += PRODUCT_S * math.prod((outputs[0].elements(), operands[0].sizes(1)[-1]))
        return volume, volume, 0.0

    def strategy_comm_seconds(self, strategy: OpStrategy, *, grows: bool) -> tuple[float, float]:
        return LATENCY_S * len(strategy.forward), LATENCY_S * len(strategy.backward)

    def conversion_seconds(self, conversion: Conversion, whole: TensorType) -> tuple[float, float]:
        size = LATENCY_S + COLLECTIVE_S * whole.elements()
        price = {"identity": 0.0, "slice": 0.0, "pad": 0.0, "all_reduce": 2 * size}
        return price.get(conversion.forward, size), price.get(conversion.backward, size)

    def parameter_seconds(self, whole: TensorType, placement: Placement) -> float:
        return LATENCY_S if placement.state == "shared" else 0.0
