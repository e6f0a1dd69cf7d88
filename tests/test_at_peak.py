"""What a step's FLOPs take of all devices together is below every plan's time."""

from __future__ import annotations

import pytest

from hardware_profiles import resolve_cluster
from planner.at_peak import at_peak_s
from planner.fitting import fitted
from planner.search import Request
from planner.trace import load_model, trace_model
from tests.commands import EXAMPLES

SIZE = {"layers": 2, "hidden": 128, "heads": 2, "vocab": 64}


@pytest.mark.slow
def test_products_and_the_half_of_causal_attention_that_is_computed() -> None:
    chip, batch, seq = resolve_cluster("dgx-h100:1x1").chip, 4, 256
    graph = trace_model(load_model(f"{EXAMPLES / 'gpt.py'}:gpt", dict(SIZE), seq), sequence=seq, dtype="bfloat16")
    tokens, pairs = batch * seq, batch * 2 * seq * (seq + 1) // 2
    linear = 6 * tokens * 2 * 12 * 128**2
    head = 6 * tokens * 128 * 64
    attention = 2 * 2 * (2 + 5) * pairs * 64
    expected = (linear + head + attention) / chip.peak("bfloat16")
    assert at_peak_s(graph, chip, batch) == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("seq", [128, 100_000])
def test_no_plan_is_below_it(seq: int) -> None:
    graph = trace_model(load_model(f"{EXAMPLES / 'gpt.py'}:gpt", dict(SIZE), seq), sequence=seq, dtype="bfloat16")
    for devices in (1, 4):
        cluster = resolve_cluster(f"dgx-h100:1x{devices}")
        step_s = fitted(graph, cluster, Request(4, seq, "bf16", time_limit_s=20.0, gap=0.05)).prediction.step_s
        assert at_peak_s(graph, cluster.chip, 4) <= devices * step_s
