"""What the placement solver has to be told about time."""

from __future__ import annotations

from typing import Protocol

from planner.ir.body import Body, Node
from planner.ir.placement import Conversion, OpStrategy, Placement
from planner.ir.types import TensorType


class Pricing(Protocol):
    """Seconds of one rank for one micro-batch, for one candidate (degree, micro-batch, precision, engine)."""

    def node_seconds(self, body: Body, node: Node, strategy: OpStrategy) -> tuple[float, float, float]:
        """Forward, input gradient and weight gradient of one node's local share, without communication. What the
        micro-batch makes autograd keep may be priced in as well."""
        ...

    def strategy_comm_seconds(self, strategy: OpStrategy, *, grows: bool) -> tuple[float, float]:
        """Forward and backward of the collectives inside the operation; ``grows``: with the batch."""
        ...

    def conversion_seconds(self, conversion: Conversion, whole: TensorType) -> tuple[float, float]:
        """Forward and backward of converting a value of type ``whole`` (all ranks together) once."""
        ...

    def parameter_seconds(self, whole: TensorType, placement: Placement) -> float:
        """What a parameter's placement costs a micro-batch: the gradient sum that a ``shared`` one needs once a step,
        divided by the micro-batches of a step; zero where nothing is summed."""
        ...
