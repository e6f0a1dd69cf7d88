"""Seconds of one kernel on one chip: the roofline (Williams, Waterman, Patterson 2009) with saturating efficiencies.

``time = max(compute, traffic) + launch``: a kernel takes the longer of its arithmetic at the rate that the chip reaches
for its size, and of its bytes at the memory bandwidth that it reaches, after it was launched.
"""

from __future__ import annotations

from hardware_profiles import Chip

DTYPE_BYTES = {"float4": 0.5, "float8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int64": 8, "bool": 1}

ATTENTION_FORWARD_PRODUCTS = 2
"""Query x key and probability x value."""
ATTENTION_BACKWARD_PRODUCTS = 5
"""The scores again, and the gradients of value, probability, query and key (Dao 2022, algorithm 4)."""
ATTENTION_BACKWARD_KERNELS = 2
"""Row sums of output x gradient, then the gradients (Dao 2023, section 3.1)."""
HALF_HEAD = 22.0
"""Head size whose softmax costs fused attention as much as its products: the rates of heads of 64 and of 128 in Dao 2023
(FlashAttention-2), figures 5 and 6, differ by 1.15."""
REFERENCE_HEAD = 128
SCORE_FORWARD_PASSES = 4.5
"""Scores moved by unfused attention, in tensors of the working dtype: masked softmax reads and writes them, dropout reads and
writes them and writes a mask of a byte (Korthikanti et al. 2022, section 4.1: 5 a s^2 b bytes kept)."""
SCORE_BACKWARD_PASSES = 5.5
"""Dropout reads a gradient and a mask and writes a gradient; softmax reads two and writes one."""
SCORE_KERNELS = 2
"""Softmax and dropout."""


def gemm_flops(m: int, n: int, k: int, batch: int = 1) -> int:
    """FLOPs of ``batch`` products [m, k] x [k, n]: a multiply and an add each (Narayanan 2021, appendix)."""
    return 2 * batch * m * n * k


def gemm_s(chip: Chip, m: int, n: int, k: int, batch: int = 1, dtype: str = "bfloat16", speed: float = 1.0) -> float:
    """Seconds of ``batch`` products [m, k] x [k, n]. Rows and columns are computed in whole tiles, so a product that
    fills a tile badly pays for the tile; a dimension of 0 costs the launch only. ``speed``: rate over the chip's."""
    if min(m, n, k, batch) == 0:
        return chip.launch_s
    peak, curve = chip.peak(dtype), chip.gemm[dtype]
    rows, columns = _whole_tiles(m, curve.tile), _whole_tiles(n, curve.tile)
    flops = float(gemm_flops(rows, columns, k, batch))
    compute = flops / (speed * peak * curve(flops, min(rows, columns, k)))
    return max(compute, _traffic_s(chip, DTYPE_BYTES[dtype] * batch * (m * k + k * n + m * n))) + chip.launch_s


def _whole_tiles(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def attention_flops(
    batch: int, heads: int, queries: int, keys: int, head_dim: int, *, causal: bool, backward: bool, tile: int = 1
) -> float:
    """FLOPs of fused attention as executed: two products forward, five backward (the scores are computed again);
    a causal mask leaves the pairs at and below the diagonal that ends at the last key (Dao 2023, section 3.1), and those that
    share a ``tile`` of keys with one of them."""
    pairs = queries * keys - _masked_pairs(queries, keys, tile) if causal else queries * keys
    products = ATTENTION_BACKWARD_PRODUCTS if backward else ATTENTION_FORWARD_PRODUCTS
    return 2.0 * products * batch * heads * head_dim * pairs


def _masked_pairs(queries: int, keys: int, tile: int = 1) -> int:
    """Pairs above the diagonal: query i (from the top) sees ``keys - queries + i + 1`` keys, none if negative, rounded up to
    whole tiles."""
    if tile > 1:
        offset = keys - queries
        # A query sees more than ``first`` keys from query ``first - offset`` on; each tile is skipped by the queries before.
        return sum(
            (min(first + tile, keys) - first) * min(max(first - offset, 0), queries) for first in range(0, keys, tile)
        )
    longest = min(queries, keys)
    return longest * (longest - 1) // 2 + max(0, queries - keys) * keys


def attention_s(
    chip: Chip,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    *,
    causal: bool,
    dtype: str,
    backward: bool,
    speed: float = 1.0,
) -> float:
    """Seconds of fused attention (Dao 2022, 2023), forward or backward, [batch, heads, queries or keys, head_dim].

    The probabilities never reach memory: the traffic is query, key, value and output, and backward their gradients too.
    ``speed``: rate of the kernel over that of the chip's best.
    """
    if min(batch, heads, queries, keys, head_dim) == 0:
        return chip.launch_s
    flops = attention_flops(
        batch, heads, queries, keys, head_dim, causal=causal, backward=backward, tile=chip.attention_tile
    )
    half_head = HALF_HEAD if chip.attention_half_head is None else chip.attention_half_head
    share = speed * (chip.attention_backward if backward else chip.attention_forward)
    share *= (1 + half_head / REFERENCE_HEAD) / (1 + half_head / head_dim)
    launches = ATTENTION_BACKWARD_KERNELS if backward else 1
    compute = flops / (chip.peak(dtype) * share) + _fill_s(chip, dtype)
    tensors = 2 * batch * heads * head_dim * (queries + keys) * (2 if backward else 1)
    return max(compute, _traffic_s(chip, DTYPE_BYTES[dtype] * tensors)) + launches * chip.launch_s


def unfused_attention_s(
    chip: Chip, batch: int, heads: int, queries: int, keys: int, head_dim: int, *, dtype: str, backward: bool
) -> float:
    """Seconds of attention as two batched products with a masked softmax and a dropout between (Megatron-LM before fused
    attention), arguments as :func:`attention_s`. A causal mask saves nothing. Backward: two products for each of forward's."""
    products = gemm_s(chip, queries, keys, head_dim, batch * heads, dtype)
    products += gemm_s(chip, queries, head_dim, keys, batch * heads, dtype)
    passes = SCORE_BACKWARD_PASSES if backward else SCORE_FORWARD_PASSES
    scores = DTYPE_BYTES[dtype] * batch * heads * queries * keys
    return (2 if backward else 1) * products + memory_bound_s(chip, passes * scores, SCORE_KERNELS)


def _fill_s(chip: Chip, dtype: str) -> float:
    curve = chip.gemm[dtype]
    return curve.half_work_flops / (chip.peak(dtype) * curve.maximum)


def _traffic_s(chip: Chip, bytes_moved: float) -> float:
    """Seconds to stream ``bytes_moved``: ``memory_half_bytes`` more at the rate that large kernels reach."""
    return (bytes_moved + chip.memory_half_bytes) / (chip.memory_bandwidth * chip.memory_efficiency)


def function_s(chip: Chip, name: str, elements: float) -> float:
    """Seconds of an operation that the chip's profile has measured as a whole: where vector units are narrow, arithmetic and
    not traffic bounds it."""
    return chip.functions[name] * elements + chip.launch_s


def memory_bound_s(chip: Chip, bytes_moved: float, launches: float = 1) -> float:
    """Seconds of ``launches`` kernels that read and write ``bytes_moved`` together and compute next to nothing."""
    streaming = bytes_moved / (chip.memory_bandwidth * chip.memory_efficiency)
    return streaming + launches * (_traffic_s(chip, 0) + chip.launch_s)
