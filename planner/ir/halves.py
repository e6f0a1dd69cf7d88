"""What a program computes in float32 in a model of half precision: cross-entropy, whose sum would lose its digits."""

from __future__ import annotations

from planner.ir.body import Node
from planner.ir.types import HALF

SUM = 2
"""torch's number of the reduction."""


def sums_half_logits(node: Node) -> bool:
    """Whether the node is a plain sum of cross-entropy, which the runtime computes some rows at a time
    (runtime/vocabulary.py). Any other casts its logits first."""
    if node.base != "cross_entropy_loss" or node.type.dtype not in HALF:
        return False
    return node.argument("reduction") == SUM and node.argument("weight") is None and not node.argument("label_smoothing")
