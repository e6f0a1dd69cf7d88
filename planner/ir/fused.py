"""Operations that an accelerator runs as one kernel, where torch's CPU composes several or keeps more for the backward pass:

- ``rms_norm`` (aten/src/ATen/native/layer_norm.cpp, ``rms_norm_symint``: ``_fused_rms_norm`` where the weight has the operand's
  dtype, real numbers) keeps its operands and the reciprocal root of each row;
- ``layer_norm`` keeps mean and reciprocal deviation of each row in float32 of half precisions, too (layer_norm_kernel.cu);
- ``dropout`` (Dropout.cpp, ``is_fused_kernel_acceptable``: ``native_dropout``) keeps a mask of a byte an element;
- attention has other kernels (transformers/cuda/sdp_utils.cpp), which take other operands and keep a seed of what dropout
  drops, not the weights. Which one runs depends on how the operands lie (:mod:`planner.ops.attention`).

Such a node's overload is ``fused``. Nothing else of the graph is another: names, operands, types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.ir.body import Node
    from planner.ir.types import TensorType

FUSED = "fused"


def with_fused(nodes: Sequence[Node], types: Mapping[str, TensorType]) -> tuple[Node, ...]:
    """The nodes as an accelerator runs them. ``types``: of the values that they read."""
    return tuple(
        replace(node, op=f"{node.base}.{FUSED}")
        if node.base in _CONDITIONS and _CONDITIONS[node.base](node, [types[name] for name in node.operands]) else node
        for node in nodes
    )


def _real(_: Node, operands: Sequence[TensorType]) -> bool:
    return len({type_.dtype for type_ in operands}) == 1 and not operands[0].dtype.startswith("complex")


def _drops(node: Node, _: Sequence[TensorType]) -> bool:
    share = node.argument("p")
    return isinstance(share, float) and 0 < share < 1


def _always(_: Node, __: Sequence[TensorType]) -> bool:
    return True


_CONDITIONS = {"dropout": _drops, "layer_norm": _real, "rms_norm": _real, "scaled_dot_product_attention": _always}
