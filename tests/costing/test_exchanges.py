"""What context and expert parallelism compute and exchange, against the whole model's numbers."""

from __future__ import annotations

import pytest

from hardware_profiles import resolve_cluster
from planner.costing import cost_graph
from planner.costing.exchanges import exchanges, expert_parameters
from planner.costing.measured import measure_block
from planner.ir.body import Body
from planner.ir.graph import ModelGraph
from planner.ir.plan import Mesh
from planner.placement.place import whole_placement
from planner.trace import load_model, trace_model

HIDDEN, HEADS, KV_HEADS, TOKENS, BATCH = 64, 4, 2, 32, 2


def _traced(tokens: int, **settings: int) -> ModelGraph:
    base = {"layers": 2, "hidden": HIDDEN, "heads": HEADS, "kv_heads": KV_HEADS, "ffn_hidden": 96, "vocab": 96}
    source = load_model("planner/validate/reference.py:decoder", {**base, **settings}, tokens)
    return trace_model(source, sequence=tokens, dtype="bfloat16")


def _layer(graph: ModelGraph) -> Body:
    return graph.body_of[graph.blocks[1].body]


@pytest.mark.slow
def test_context_ranks_together_do_the_whole_model_s_work() -> None:
    whole, share = _layer(_traced(TOKENS)), _layer(_traced(TOKENS // 4))
    counted = measure_block(whole, whole_placement(whole), BATCH)
    divided = measure_block(share, whole_placement(share), BATCH, context=4)
    assert divided.flops == pytest.approx(counted.flops)
    ours, theirs = (
        next(item.forward for item in block.operations if item.forward.attention is not None) for block in (divided, counted)
    )
    assert ours.flops == pytest.approx(theirs.flops / 4)
    assert ours.attention is not None and not ours.attention.causal
    # Every rank sees half of all pairs and its part of the diagonal.
    assert ours.attention.queries * ours.attention.keys == TOKENS // 4 * (TOKENS // 2)


@pytest.mark.slow
def test_keys_and_values_are_gathered_and_their_gradients_scattered() -> None:
    share = _layer(_traced(TOKENS // 4))
    (moved,) = [item for item in exchanges(share, whole_placement(share), BATCH) if item.axis == "context"]
    assert moved.size_bytes == 2 * BATCH * KV_HEADS * TOKENS // 4 * (HIDDEN // HEADS) * 2
    assert (moved.kind, moved.forward, moved.backward) == ("all_gather", 1, 1)


@pytest.mark.slow
def test_tokens_travel_to_their_experts_and_back() -> None:
    body = _layer(_traced(TOKENS, experts=8, held=2, active=2))
    assert len(expert_parameters(body)) == 3
    there, back = [item for item in exchanges(body, whole_placement(body), BATCH) if item.axis == "expert"]
    assert there.size_bytes == back.size_bytes == BATCH * TOKENS * 2 * HIDDEN * 2
    assert {there.kind, back.kind} == {"all_to_all"}


@pytest.mark.slow
def test_a_rank_s_experts_compute_what_its_tokens_need() -> None:
    """Eight experts whole, and two of eight: the same tokens, the same work."""
    whole, share = (_layer(_traced(TOKENS, experts=8, held=held, active=2)) for held in (8, 2))
    flops = [measure_block(body, whole_placement(body), BATCH).flops for body in (whole, share)]
    assert flops[0] == flops[1]


@pytest.mark.slow
def test_a_dense_block_exchanges_nothing_over_experts() -> None:
    body = _layer(_traced(TOKENS))
    assert not expert_parameters(body)
    assert all(item.axis == "context" for item in exchanges(body, whole_placement(body), BATCH))


@pytest.mark.slow
def test_experts_are_reduced_over_fewer_ranks_and_the_rest_over_context_too() -> None:
    graph = _traced(TOKENS, experts=8, held=4, active=2)
    cluster = resolve_cluster("dgx-h100:2")
    placements = {body.name: whole_placement(body) for body in graph.bodies}

    def state(mesh: Mesh) -> float:
        costed = cost_graph(
            graph, cluster, mesh=mesh, microbatch=1, precision="bf16", zero_group=mesh.data, options=(placements,)
        )
        return costed.states[0][graph.blocks[1].body][1].optimizer_bytes

    dense, experts = 2 * HIDDEN + 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2 + 8 * HIDDEN, 3 * 4 * HIDDEN * 96
    counters = 4 * len(graph.blocks[1].parameters)
    both = state(Mesh(data=4, context=2, expert=2))
    assert both == 8 * (dense // 8 + experts // 4) + counters
    assert state(Mesh(data=4)) == 8 * (dense + experts) // 4 + counters
