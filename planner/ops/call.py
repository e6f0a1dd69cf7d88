"""One operation with its local layouts: what the formulas of autograd's memory are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.ir.body import Node
from planner.ir.types import DTYPE_BYTES
from planner.ops.layout import Layout


@dataclass(frozen=True, slots=True)
class Call:
    """``operands`` aligns with ``Node.operands``, as ``needs``: whether autograd computes a gradient for it; ``outputs`` with
    ``Node.types``."""

    node: Node
    operands: Sequence[Layout]
    outputs: Sequence[Layout]
    needs: Sequence[bool]
    arguments: Mapping[str, object]

    @staticmethod
    def of(node: Node, operands: Sequence[Layout], outputs: Sequence[Layout], needs: Sequence[bool]) -> Call:
        """With the node's own arguments by name."""
        return Call(node, operands, outputs, needs, dict(node.arguments))

    def need(self, index: int) -> bool:
        """Whether there is such an operand, with a gradient."""
        return index < len(self.needs) and self.needs[index]

    @property
    def size(self) -> int:
        """Bytes of the first result."""
        return self.outputs[0].size_bytes

    @property
    def elements(self) -> int:
        """Of the first result: bytes of a mask."""
        return self.outputs[0].elements

    @property
    def scalar(self) -> int:
        """Bytes of one number."""
        return DTYPE_BYTES[self.outputs[0].dtype]
