"""Kernels: exact where the form is exact, never quicker for more work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.compute import attention_flops, attention_s, gemm_s, memory_bound_s, unfused_attention_s
from hardware_profiles import Chip, EfficiencyCurve, ProfileFormatError, profile_names, resolve_cluster

PLAIN = Chip(
    name="plain",
    memory_bytes=10**9,
    memory_bandwidth=1e9,
    peak_flops={"float32": 1e12},
    gemm={"float32": EfficiencyCurve(maximum=0.5, half_work_flops=0.0, half_dim=0.0, tile=4)},
    attention_forward=0.5,
    attention_backward=0.25,
    memory_efficiency=0.8,
    memory_half_bytes=0.0,
    launch_s=1e-6,
    reserve_bytes=0,
)
A100 = resolve_cluster("dgx-a100-80gb:1").chip
SIZES = st.integers(min_value=1, max_value=5000)


def test_a_large_product_runs_at_the_ceiling() -> None:
    assert gemm_s(PLAIN, 4096, 4096, 4096, dtype="float32") == pytest.approx(2 * 4096**3 / 0.5e12 + 1e-6)


def test_a_thin_product_runs_at_the_memory_bandwidth() -> None:
    moved = 4 * (1 * 4096 + 4096 * 4096 + 1 * 4096)
    assert gemm_s(PLAIN, 1, 4096, 4096, dtype="float32") == pytest.approx(moved / 0.8e9 + 1e-6)


def test_rows_are_computed_in_whole_tiles() -> None:
    five, eight = (2 * rows * 4096 * 4096 / 0.5e12 for rows in (8, 8))
    quick = Chip(**{name: getattr(PLAIN, name) for name in PLAIN.__slots__} | {"memory_bandwidth": 1e15})
    assert gemm_s(quick, 5, 4096, 4096, dtype="float32") == pytest.approx(five + 1e-6)
    assert gemm_s(quick, 8, 4096, 4096, dtype="float32") == pytest.approx(eight + 1e-6)


def test_an_empty_product_costs_its_launch() -> None:
    assert gemm_s(PLAIN, 0, 4, 4, dtype="float32") == PLAIN.launch_s


def test_a_dtype_without_a_rate_is_refused() -> None:
    with pytest.raises(ProfileFormatError, match="no rate for bfloat16; it computes in float32"):
        gemm_s(PLAIN, 4, 4, 4)


def test_a100_reaches_what_is_known_of_it() -> None:
    """Below the best product alone (271.2 of 312 TFLOP/s, stas00/ml-engineering), since chips slow down under a step's load."""
    rate = 2 * 8192**3 / gemm_s(A100, 8192, 8192, 8192) / 312e12
    assert 0.65 < rate <= 0.869
    small = 2 * 512**3 / gemm_s(A100, 512, 512, 512) / 312e12
    assert small < 0.2


@given(SIZES, SIZES, SIZES, st.integers(1, 8), st.sampled_from("mnkb"))
def test_more_work_is_never_quicker(m: int, n: int, k: int, batch: int, grown: str) -> None:
    more = gemm_s(A100, m + (grown == "m"), n + (grown == "n"), k + (grown == "k"), batch + (grown == "b"))
    assert more >= gemm_s(A100, m, n, k, batch)


@given(SIZES, SIZES, SIZES)
def test_rows_and_columns_are_alike(m: int, n: int, k: int) -> None:
    assert gemm_s(A100, m, n, k) == pytest.approx(gemm_s(A100, n, m, k))


def test_attention_counts_the_pairs_that_the_mask_leaves() -> None:
    def pairs(queries: int, keys: int) -> float:
        return attention_flops(1, 1, queries, keys, 1, causal=True, backward=False) / 4

    assert pairs(4, 4) == 10
    assert pairs(2, 5) == 4 + 5
    assert pairs(5, 2) == 1 + 2
    assert pairs(1, 7) == 7


@given(st.integers(1, 40), st.integers(1, 40))
def test_the_causal_count_is_the_mask_summed(queries: int, keys: int) -> None:
    seen = sum(max(0, min(keys, keys - queries + row + 1)) for row in range(queries))
    assert attention_flops(1, 1, queries, keys, 1, causal=True, backward=False) == 4 * seen


def test_backward_has_five_products_to_forwards_two() -> None:
    forward = attention_flops(2, 3, 64, 64, 16, causal=False, backward=False)
    assert forward == 4 * 2 * 3 * 64 * 64 * 16
    assert attention_flops(2, 3, 64, 64, 16, causal=False, backward=True) == 2.5 * forward


def test_long_attention_runs_at_its_share_of_the_peak() -> None:
    seconds = attention_s(A100, 8, 32, 8192, 8192, 128, causal=False, dtype="bfloat16", backward=False)
    assert 4 * 8 * 32 * 8192**2 * 128 / seconds / 312e12 == pytest.approx(A100.attention_forward, rel=0.02)


@given(st.integers(1, 16), st.integers(1, 64), st.integers(1, 2048), st.integers(1, 2048), st.booleans(), st.booleans())
def test_a_mask_never_slows_attention(batch: int, heads: int, queries: int, keys: int, causal: bool, backward: bool) -> None:
    masked = attention_s(A100, batch, heads, queries, keys, 64, causal=causal, dtype="bfloat16", backward=backward)
    whole = attention_s(A100, batch, heads, queries, keys, 64, causal=False, dtype="bfloat16", backward=backward)
    longer = attention_s(A100, batch, heads, queries, keys + 1, 64, causal=False, dtype="bfloat16", backward=backward)
    assert masked <= whole <= longer


def test_streaming_is_affine_in_bytes_and_launches() -> None:
    assert memory_bound_s(PLAIN, 8e8) == pytest.approx(1.0 + 1e-6)
    assert memory_bound_s(PLAIN, 8e8, launches=3) == pytest.approx(1.0 + 3e-6)
    assert memory_bound_s(PLAIN, 0, launches=0) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", profile_names())
def test_every_profile_prices_every_dtype_it_names(name: str) -> None:
    chip = resolve_cluster(f"{name}:1").chip
    for dtype in chip.peak_flops:
        seconds = gemm_s(chip, 4096, 4096, 4096, dtype=dtype)
        assert 0.3 < 2 * 4096**3 / seconds / (chip.peak(dtype) * chip.gemm[dtype].maximum) <= 1


def test_unfused_attention_is_two_products_and_passes_over_the_scores() -> None:
    fast = Chip(**{name: getattr(PLAIN, name) for name in PLAIN.__slots__} | {"memory_bandwidth": 1e15, "launch_s": 0.0})
    products = gemm_s(fast, 128, 128, 64, 6, "float32") + gemm_s(fast, 128, 64, 128, 6, "float32")
    shape = (2, 3, 128, 128, 64)
    assert unfused_attention_s(fast, *shape, dtype="float32", backward=False) == pytest.approx(products, rel=1e-4)
    assert unfused_attention_s(fast, *shape, dtype="float32", backward=True) == pytest.approx(2 * products, rel=1e-4)
    slow = Chip(**{name: getattr(PLAIN, name) for name in PLAIN.__slots__} | {"peak_flops": {"float32": 1e20}, "launch_s": 0.0})
    scores = 4 * 6 * 128 * 128
    read = 2 * 4 * 6 * (2 * 128 * 64 + 128 * 128)
    seconds = unfused_attention_s(slow, *shape, dtype="float32", backward=False)
    assert seconds == pytest.approx((4.5 * scores + read) / 0.8e9)


@given(st.integers(1, 8), st.integers(1, 32), st.sampled_from([512, 1024, 2048]))
def test_fused_attention_is_never_slower_than_unfused(batch: int, heads: int, seq: int) -> None:
    shape = (batch, heads, seq, seq, 64)
    for backward in (False, True):
        fused = attention_s(A100, *shape, causal=True, dtype="bfloat16", backward=backward)
        assert fused <= unfused_attention_s(A100, *shape, dtype="bfloat16", backward=backward)


def test_a_slower_kernel_takes_its_share_longer() -> None:
    whole = attention_s(A100, 8, 32, 8192, 8192, 128, causal=True, dtype="bfloat16", backward=False)
    half = attention_s(A100, 8, 32, 8192, 8192, 128, causal=True, dtype="bfloat16", backward=False, speed=0.5)
    assert half == pytest.approx(2 * whole, rel=0.01)
    assert gemm_s(A100, 8192, 8192, 8192, speed=0.5) == pytest.approx(2 * gemm_s(A100, 8192, 8192, 8192), rel=0.01)
