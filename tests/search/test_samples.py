"""What the cheapest bound stands on: no kernel and no collective takes longer for a sample of a huge micro-batch than for
one of a smaller micro-batch, on any packaged profile."""

from __future__ import annotations

import random

import pytest

from cost_models.collectives import CollectiveKind, collective_s
from cost_models.compute import attention_s, gemm_s, memory_bound_s
from cost_models.spans import span_of
from hardware_profiles import Cluster, profile_names, resolve_cluster
from planner.search.prices import HUGE_MICROBATCH

KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
TOLERANCE = 1 + 1e-9


def _seconds(draw: random.Random, cluster: Cluster, batch: int) -> list[float]:
    """What kernels and collectives of random shapes take for ``batch`` samples."""
    chip, devices = cluster.chip, cluster.devices
    rows, n, k, count = draw.randint(1, 9000), draw.randint(1, 60_000), draw.randint(1, 60_000), draw.randint(1, 64)
    heads, queries, width = draw.randint(1, 128), draw.randint(1, 9000), draw.choice([16, 64, 80, 128])
    size, launches = draw.randint(1, 10**8), draw.randint(1, 4)
    tensor = draw.choice([degree for degree in range(1, devices + 1) if devices % degree == 0])
    kind, span = draw.choice(KINDS), span_of(cluster, tensor, 1)
    dtype = draw.choice([name for name in chip.peak_flops if name in chip.gemm])
    return [
        # Tokens of all samples are rows of one product (forward) or are summed over (a weight's gradient), or each sample and
        # head has a product of its own.
        gemm_s(chip, batch * rows, n, k, 1, dtype),
        gemm_s(chip, n, k, batch * rows, 1, dtype),
        gemm_s(chip, min(rows, 2048), min(n, 2048), min(k, 256), batch * count, dtype),
        attention_s(chip, batch, heads, queries, queries, width, causal=True, dtype=dtype, backward=False),
        attention_s(chip, batch, heads, queries, queries, width, causal=False, dtype=dtype, backward=True),
        memory_bound_s(chip, batch * size, launches),
        collective_s(kind, span, batch * size),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", profile_names())
def test_a_sample_is_cheapest_in_a_huge_microbatch(name: str) -> None:
    cluster = resolve_cluster(f"{name}:1")
    for seed in range(300):
        micro = random.Random(seed).choice([1, 2, 3, 4, 5, 6, 7, 8, 12, 24, 48, 100])
        small, huge = (_seconds(random.Random(f"{name} {seed}"), cluster, batch) for batch in (micro, HUGE_MICROBATCH))
        for one, other in zip(small, huge, strict=True):
            assert other / HUGE_MICROBATCH <= one / micro * TOLERANCE
