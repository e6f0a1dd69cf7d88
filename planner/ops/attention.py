"""Which attention one kernel runs, that keeps no scores; torch composes any other of products and a softmax.

The conditions are torch's (2.13, aten/src/ATen/native/transformers): sdp_utils_cpp.cpp and sdp_utils_cpp.h on a CPU,
cuda/sdp_utils.cpp on an accelerator. cuDNN's kernel, which Hopper prefers, takes little that neither of the others takes;
that counts as composed, which holds more.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.ir.body import Node
from planner.ir.types import DTYPE_BYTES, HALF
from planner.ops.layout import Layout

FLASH_HEAD, ALIGNED_BYTES = 256, 16


def fused_attention(node: Node, operands: Sequence[Layout], mask_differentiable: bool = False) -> bool:
    """Whether a fused kernel runs a call: four dims, one head size whose numbers lie side by side, one batch, no gradient to a
    mask; the rest is the kernel's."""
    query, key, value = operands[:3]
    same = len(query.sizes) == len(key.sizes) == len(value.sizes) == 4
    if not same or mask_differentiable or not query.sizes[-1] == key.sizes[-1] == value.sizes[-1]:
        return False
    if not query.sizes[0] == key.sizes[0] == value.sizes[0] or any(operand.strides[-1] != 1 for operand in operands[:3]):
        return False
    if node.fused:
        return _flash(node, operands) or _memory_efficient(operands)
    return not dict(node.arguments).get("dropout_p") and _heads(node, operands) and _masks(operands)


def _flash(node: Node, operands: Sequence[Layout]) -> bool:
    """CUDA's (``can_use_flash_attention``): half precision, no mask but a causal one, of as many keys as queries."""
    query, key = operands[:2]
    square = not dict(node.arguments).get("is_causal") or query.sizes[-2] == key.sizes[-2]
    return query.dtype in HALF and len(operands) == 3 and query.sizes[-1] <= FLASH_HEAD and square and _heads(node, operands)


def _memory_efficient(operands: Sequence[Layout]) -> bool:
    """CUDA's (``can_use_mem_efficient_attention``): heads of a multiple of 16 bytes, as many of keys as of queries; a mask is
    stretched to whatever extents, by rows."""
    query, key, value = operands[:3]
    aligned = query.sizes[-1] * DTYPE_BYTES[query.dtype] % ALIGNED_BYTES == 0
    rows = all(mask.strides[-1] == 1 for mask in operands[3:])
    return query.dtype in (*HALF, "float32") and aligned and rows and query.sizes[1] == key.sizes[1] == value.sizes[1]


def _heads(node: Node, operands: Sequence[Layout]) -> bool:
    """``check_batch_size_and_num_heads_dense``."""
    query, key, value = (operand.sizes[1] for operand in operands[:3])
    return key == value and (query % key == 0 if dict(node.arguments).get("enable_gqa") else query == key)


def _masks(operands: Sequence[Layout]) -> bool:
    """``check_attn_mask_shape``: two dims, or four; each as those of the scores, or one."""
    query, key = operands[:2]
    scores = (*query.sizes[:-1], key.sizes[-2])
    return all(
        len(mask.sizes) in (2, 4)
        and all(size in (1, whole) for size, whole in zip(reversed(mask.sizes), reversed(scores), strict=False))
        for mask in operands[3:]
    )
