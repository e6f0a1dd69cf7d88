"""Operations that read elements which do not lie side by side: torch's kernels for them do not read whole vectors
(aten/src/ATen/native/cuda/CUDALoops.cuh, ``gpu_kernel_impl_nocast``: a vectorized kernel where all operands are contiguous, one
that works out every element's place elsewhere)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.ir.body import Node
    from planner.ir.types import TensorType

MOVING = frozenset({
    "chunk", "diagonal", "expand", "expand_as", "movedim", "narrow", "permute", "select", "slice", "split", "split_with_sizes",
    "t", "transpose", "unbind", "unfold",
})
"""Views of a tensor with its dims in another order, stretched, or cut."""
PASSING = frozenset({"alias", "detach", "getitem", "squeeze", "unsqueeze"})
"""Views that lie as their operand does."""
ELEMENTWISE = frozenset({
    "add", "cat", "div", "masked_fill", "mul", "neg", "pow", "rsub", "sigmoid", "silu", "sub", "tanh", "to", "_to_copy",
    "where",
})


def irregular_nodes(nodes: Sequence[Node], types: Mapping[str, TensorType], own: frozenset[str]) -> frozenset[str]:
    """The element-wise ones, by name, of which an operand is such a view, or what one of them made of it, or is stretched
    (``own``, parameters, are not counted as that: a product adds its bias itself)."""
    moved: set[str] = set()
    found: set[str] = set()
    for node in nodes:
        if node.base in MOVING or (node.base in PASSING and not moved.isdisjoint(node.operands)):
            moved.add(node.name)
        elif node.base in ELEMENTWISE and any(
            _apart(name, node, types, moved) for name in node.operands if name not in own
        ):
            found.add(node.name)
            if node.base != "cat":
                moved.add(node.name)
    return frozenset(found)


def _apart(name: str, node: Node, types: Mapping[str, TensorType], moved: set[str]) -> bool:
    shape = types[name].shape
    return name in moved or (len(shape) > 0 and shape != node.type.shape and node.base != "cat")
