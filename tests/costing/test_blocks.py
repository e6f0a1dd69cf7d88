"""FLOPs, times and state of priced blocks."""

from dataclasses import replace

import pytest

from cost_models.collectives import collective_s
from cost_models.compute import memory_bound_s
from cost_models.spans import span_of
from hardware_profiles import DEFAULT_ENGINE, resolve_cluster
from planner.costing import Pricing, cost_block, cost_graph, state_costs
from planner.ir.plan import Mesh
from planner.placement.place import whole_placement
from tests.costing.states import cost_state
from tests.costing.test_saved_bytes import traced

CLUSTER = resolve_cluster("dgx-a100-80gb:2")
ELEMENTS = 1 << 24


@pytest.mark.slow
def test_layer_flops() -> None:
    """24 B T H^2 + 4 B T^2 H forward (Narayanan et al. 2021, appendix), three times that with backward."""
    body = max(traced("gpt", "bfloat16").bodies, key=lambda body: len(body.nodes))
    cost = cost_block(body, whole_placement(body), Pricing(CLUSTER, 1, 2), "none")
    batch, seq, hidden = 2, 64, 128
    assert cost.flops == 3 * (24 * batch * seq * hidden**2 + 4 * batch * seq**2 * hidden)
    assert cost.parameter_elements == 12 * hidden**2 + 13 * hidden
    assert cost.recompute_s == cost.forward_comm_s == cost.backward_comm_s == 0
    assert cost.backward_s > cost.forward_s > 0


def test_full_recomputation_repeats_the_forward_up_to_the_last_product() -> None:
    """torch's checkpoint stops when what the last operation keeps is there, before it computes; other engines' go on."""
    body = max(traced("gpt", "bfloat16").bodies, key=lambda body: len(body.nodes))
    pricing = Pricing(CLUSTER, 1, 2, engine=replace(DEFAULT_ENGINE, host_s=0.0))
    costs = {level: cost_block(body, whole_placement(body), pricing, level) for level in ("none", "selective", "full")}
    strategies = {placed.node: placed.strategy for placed in whole_placement(body).nodes}
    last = [*body.nodes][-3:]
    assert [node.base for node in last] == ["linear", "add", "add"]
    left_out = sum(pricing.node_seconds(body, node, strategies[node.name])[0] for node in last)
    assert costs["full"].recompute_s == pytest.approx(costs["full"].forward_s - left_out)
    whole = replace(pricing, engine=replace(pricing.engine, repeats="all"))
    assert cost_block(body, whole_placement(body), whole, "full").recompute_s == pytest.approx(costs["full"].forward_s)
    assert 0 < costs["selective"].recompute_s < costs["full"].recompute_s
    assert costs["full"].saved_bytes < costs["selective"].saved_bytes < costs["none"].saved_bytes
    assert costs["full"].saved_bytes == 2 * 64 * 128 * 2


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_traffic_of_zero(zero: int) -> None:
    """All-gathers move the bf16 shard, reductions the float32 gradients. Around them: the float32 master is cast at each
    gather, and what was gathered copied out; ZeRO 0 and 1 add bf16 gradients to float32 ones; a reduction is copied to one
    buffer (of a group of one, as ZeRO 0 has it: divided and copied once more), and under ZeRO 2 and 3 added to earlier ones."""
    span = span_of(CLUSTER, 8, 2)
    gather = collective_s("all_gather", span, ELEMENTS * 2 // 8)
    scatter = collective_s("reduce_scatter", span, ELEMENTS * 4)
    reduce = collective_s("all_reduce", span, ELEMENTS * 4)
    kept = ELEMENTS if zero == 0 else ELEMENTS // 8
    cast, added, summed = (memory_bound_s(CLUSTER.chip, size) for size in (
        4 * kept + (1 + 2) * 2 * ELEMENTS, (2 + 4 + 4) * ELEMENTS, 3 * 4 * kept
    ))
    buffered = memory_bound_s(CLUSTER.chip, ((4 if zero < 2 else 2) + 4) * ELEMENTS + (4 * 4 * ELEMENTS if zero == 0 else 0))
    expected = {
        0: (reduce + cast + buffered, 0, added), 1: (gather + scatter + cast + buffered, 0, added),
        2: (gather + cast, 0, scatter + buffered + summed),
        3: (0, gather + cast, gather + scatter + cast + buffered + summed),
    }
    cost = cost_state(ELEMENTS, zero, CLUSTER, Mesh(data=8, tensor=2), "bf16", 8)
    assert (cost.once_comm_s, cost.forward_comm_s, cost.backward_comm_s) == pytest.approx(expected[zero])


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("reached", [True, False])
def test_frozen_parameters_are_gathered_and_cast(zero: int, reached: bool) -> None:
    """As often as trained ones; where no gradient comes to the block, in forward passes alone. Nothing is reduced."""
    gather = collective_s("all_gather", span_of(CLUSTER, 8, 1), ELEMENTS * 2 // 8)
    taken = gather + memory_bound_s(CLUSTER.chip, 4 * ELEMENTS // 8 + (1 + 2) * 2 * ELEMENTS)
    cost = cost_state(0, zero, CLUSTER, Mesh(data=8), "bf16", 8, frozen=ELEMENTS, reached=reached)
    expected = (taken, 0, 0) if zero < 3 else (0, taken, taken if reached else 0)
    assert (cost.once_comm_s, cost.forward_comm_s, cost.backward_comm_s) == pytest.approx(expected)
    assert (cost.gradients_bytes, cost.optimizer_bytes, cost.optimizer_s, cost.lasting_bytes) == (0, 0, 0, 0)
    assert cost.parameters_bytes == 4 * ELEMENTS // 8 + (2 * ELEMENTS if zero < 3 else 0)


def test_hybrid_sharding_reduces_shards_across() -> None:
    inside = cost_state(ELEMENTS, 3, CLUSTER, Mesh(data=4), "bf16", 4)
    hybrid = cost_state(ELEMENTS, 3, CLUSTER, Mesh(data=16), "bf16", 4)
    across = collective_s("all_reduce", span_of(CLUSTER, 4, 4), ELEMENTS * 4 // 4)
    assert hybrid.once_comm_s == pytest.approx(across)
    assert hybrid.forward_comm_s == inside.forward_comm_s


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_partial_gradients_are_summed_over_the_tensor_axis(zero: int) -> None:
    """One all-reduce for all blocks together: a block pays for its bytes, not for the start."""
    mesh, partial = Mesh(data=4, tensor=4), ELEMENTS // 16
    plain, summed = (
        cost_state(ELEMENTS, zero, CLUSTER, mesh, "bf16", 4, partial_elements=count) for count in (0, partial)
    )
    span = span_of(CLUSTER, 4, 1)
    added = collective_s("all_reduce", span, 4 * partial) - collective_s("all_reduce", span, 0)
    assert summed.once_comm_s - plain.once_comm_s == pytest.approx(added)
    assert replace(summed, once_comm_s=0.0) == replace(plain, once_comm_s=0.0)


def test_state_of_each_zero_stage() -> None:
    """Bytes an element with several micro-batches, over 8 ranks: master 4, working 2, gradients 4, moments 8; of what comes and
    goes, a neighbour's as well."""
    whole, part = ELEMENTS, ELEMENTS // 8
    expected = {0: (6 * whole, 4 * whole, 8 * whole, 2 * whole), 1: (4 * part + 2 * whole, 4 * whole, 8 * part, 0),
                2: (4 * part + 2 * whole, 4 * part, 8 * part, 8 * whole), 3: (4 * part, 4 * part, 8 * part, 8 * whole)}
    for zero, sizes in expected.items():
        cost = cost_state(ELEMENTS, zero, CLUSTER, Mesh(data=8), "bf16", 8)
        assert (cost.parameters_bytes, cost.gradients_bytes, cost.optimizer_bytes, cost.gather_bytes) == sizes, zero


@pytest.mark.parametrize(("zero", "both"), [(0, 4), (1, 2), (2, 2), (3, 0.5)])
def test_with_one_micro_batch_gradients_take_the_place_of_working_copies(zero: int, both: float) -> None:
    cost = cost_state(ELEMENTS, zero, CLUSTER, Mesh(data=8), "bf16", 8, accumulation=1)
    master = 4 * ELEMENTS // (8 if zero else 1)
    assert cost.parameters_bytes + cost.gradients_bytes - master == both * ELEMENTS


def test_a_tied_parameter_is_held_once_without_a_pipeline() -> None:
    graph = traced("gpt", "bfloat16")
    option = {body.name: whole_placement(body) for body in graph.bodies}
    tied = next(p for p in graph.parameters if len(graph.tied_blocks(p.fqn)) > 1)
    sums = []
    for mesh in (Mesh(), Mesh(pipeline=2)):
        (states,) = state_costs(graph, (option,), CLUSTER, mesh, "bf16", 1)
        sums.append(sum(states[block.body][0].optimizer_bytes for block in graph.blocks))
    assert sums[0] == 8 * graph.parameter_count + 4 * len(graph.parameters)
    assert sums[1] - sums[0] == 8 * tied.type.elements() + 4


def test_whole_graph() -> None:
    graph = traced("llama", "bfloat16")
    option = {body.name: whole_placement(body) for body in graph.bodies}
    costed = cost_graph(
        graph, CLUSTER, mesh=Mesh(data=4), microbatch=2, precision="bf16", zero_group=4, options=(option,)
    )
    assert set(costed.blocks[0]) == set(costed.states[0]) == {body.name for body in graph.bodies}
    assert set(costed.crossing_bytes[0]) == set(range(1, len(graph.blocks)))
    assert min(costed.crossing_bytes[0].values()) > 0
