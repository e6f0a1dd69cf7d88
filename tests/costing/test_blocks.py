"""FLOPs, times and state of priced blocks."""

import pytest

from cost_models.collectives import collective_s, span_of
from hardware_profiles import resolve_cluster
from planner.costing import Pricing, cost_block, cost_graph, cost_state
from planner.ir.plan import Mesh
from planner.placement.place import whole_placement
from tests.costing.test_saved_bytes import traced

CLUSTER = resolve_cluster("dgx-a100-80gb:2")
ELEMENTS = 1 << 24


def test_layer_flops() -> None:
    """24 B T H^2 + 4 B T^2 H forward (Narayanan et al. 2021, appendix), three times that with backward."""
    body = max(traced("gpt", "bfloat16").bodies, key=lambda body: len(body.nodes))
    cost = cost_block(body, whole_placement(body), Pricing(CLUSTER, 1, 2), "none")
    batch, seq, hidden = 2, 64, 128
    assert cost.flops == 3 * (24 * batch * seq * hidden**2 + 4 * batch * seq**2 * hidden)
    assert cost.parameter_elements == 12 * hidden**2 + 13 * hidden
    assert cost.recompute_s == cost.forward_comm_s == cost.backward_comm_s == 0
    assert cost.backward_s > cost.forward_s > 0


def test_full_recomputation_repeats_the_forward() -> None:
    body = max(traced("gpt", "bfloat16").bodies, key=lambda body: len(body.nodes))
    pricing = Pricing(CLUSTER, 1, 2)
    costs = {level: cost_block(body, whole_placement(body), pricing, level) for level in ("none", "selective", "full")}
    assert costs["full"].recompute_s == pytest.approx(costs["full"].forward_s)
    assert 0 < costs["selective"].recompute_s < costs["full"].recompute_s
    assert costs["full"].saved_bytes < costs["selective"].saved_bytes < costs["none"].saved_bytes
    assert costs["full"].saved_bytes == 2 * 64 * 128 * 2


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_traffic_of_zero(zero: int) -> None:
    """All-gathers move the bf16 shard, reductions the float32 gradients."""
    span = span_of(CLUSTER, 8, 2)
    gather = collective_s("all_gather", span, ELEMENTS * 2 // 8)
    scatter = collective_s("reduce_scatter", span, ELEMENTS * 4)
    reduce = collective_s("all_reduce", span, ELEMENTS * 4)
    expected = {
        0: (reduce, 0, 0), 1: (gather + scatter, 0, 0), 2: (gather, 0, scatter), 3: (0, gather, gather + scatter),
    }
    cost = cost_state(ELEMENTS, zero, CLUSTER, Mesh(data=8, tensor=2), "bf16", 8)
    assert (cost.once_comm_s, cost.forward_comm_s, cost.backward_comm_s) == pytest.approx(expected[zero])


def test_hybrid_sharding_reduces_shards_across() -> None:
    inside = cost_state(ELEMENTS, 3, CLUSTER, Mesh(data=4), "bf16", 4)
    hybrid = cost_state(ELEMENTS, 3, CLUSTER, Mesh(data=16), "bf16", 4)
    across = collective_s("all_reduce", span_of(CLUSTER, 4, 4), ELEMENTS * 4 // 4)
    assert hybrid.once_comm_s == pytest.approx(across)
    assert hybrid.forward_comm_s == inside.forward_comm_s


def test_whole_graph() -> None:
    graph = traced("llama", "bfloat16")
    option = {body.name: whole_placement(body) for body in graph.bodies}
    costed = cost_graph(
        graph, CLUSTER, mesh=Mesh(data=4), microbatch=2, precision="bf16", zero_group=4, options=(option,)
    )
    assert set(costed.blocks[0]) == set(costed.states[0]) == {body.name for body in graph.bodies}
    assert set(costed.crossing_bytes[0]) == set(range(1, len(graph.blocks)))
    assert min(costed.crossing_bytes[0].values()) > 0
