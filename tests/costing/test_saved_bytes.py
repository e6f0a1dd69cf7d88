"""What a block of the examples keeps equals what torch keeps, byte for byte."""

from functools import cache

import pytest

from planner.costing.activations import saved_bytes, shared_bytes
from planner.costing.local import localise
from planner.ir.graph import ModelGraph
from planner.trace import load_model, trace_model
from tests.ops.interpret import saved_by_torch
from tests.torch_versions import flash_attention_keeps

BATCH = 2


@cache
def traced(model: str, dtype: str) -> ModelGraph:
    return trace_model(load_model(f"examples/{model}.py:{model}", {}, 64), sequence=64, dtype=dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_examples(model: str, dtype: str) -> None:
    flash_attention_keeps(dtype)
    for body in traced(model, dtype).bodies:
        local = localise(body, None, BATCH)
        expected, shared = saved_by_torch(body, BATCH)
        assert saved_bytes(local) == expected, body.name
        assert sum(shared_bytes(local).values()) == shared, body.name


def test_recomputation_keeps_less() -> None:
    for body in traced("gpt", "bfloat16").bodies:
        local = localise(body, None, BATCH)
        assert saved_bytes(local, "selective") <= saved_bytes(local)
        assert saved_bytes(local, "full") <= saved_bytes(local)


def test_gpt_layer_against_korthikanti() -> None:
    """34 s b h of Korthikanti et al. 2022, equation 1, without dropout's three masks (1 + 1 byte) and scores, plus
    what the flash kernel keeps: the result (already in 34 as the input of the projection) and the logarithm of the
    sums."""
    graph = traced("gpt", "bfloat16")
    body = max(graph.bodies, key=lambda body: len(body.nodes))
    tokens, hidden, heads = BATCH * 64, 128, 4
    logarithms, statistics = 4 * tokens * heads, 2 * 2 * 2 * tokens
    assert saved_bytes(localise(body, None, BATCH)) == (34 - 2) * tokens * hidden + logarithms + statistics
