"""What eager torch does beside one read and one write of each operation: sums of gradients, views, cross-entropy's passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_models.compute import memory_bound_s
from hardware_profiles import DEFAULT_ENGINE, Cluster, Engine, engine, resolve_cluster
from hardware_profiles.measure.document import BLOCK_OPERATIONS
from planner.costing import Pricing, cost_block
from planner.costing.operations import measure_operation
from planner.ir.body import Body, Node
from planner.ir.placement import OpStrategy
from planner.placement.place import whole_placement
from tests.costing.test_saved_bytes import traced

CLUSTER = resolve_cluster("dgx-a100-80gb:1")
SLOW = replace(CLUSTER, chip=replace(CLUSTER.chip, memory_irregular=0.5))
MICROBATCH = 2


def body_of(model: str) -> Body:
    return max(traced(model, "bfloat16").bodies, key=lambda body: len(body.nodes))


def strategies(body: Body) -> dict[str, OpStrategy]:
    return {placed.node: placed.strategy for placed in whole_placement(body).nodes}


def seconds(body: Body, node: Node, chosen: Engine = DEFAULT_ENGINE, cluster: Cluster = CLUSTER) -> tuple[float, ...]:
    return Pricing(cluster, 1, MICROBATCH, engine=chosen).node_seconds(body, node, strategies(body)[node.name])


def test_rotary_embedding_reads_views_and_the_rest_of_a_layer_does_not() -> None:
    body = body_of("llama")
    kinds = sorted(node.base for node in body.nodes if node.name in body.irregular)
    assert kinds == ["add"] * 2 + ["cat"] * 2 + ["mul"] * 4 + ["neg"] * 2
    # The residual stream and the gated product lie as they were made, and a product adds its bias itself.
    assert sum(node.base in ("add", "mul") for node in body.nodes) == 6 + 3
    assert not body_of("gpt").irregular


def test_a_kernel_that_reads_views_is_slower_unless_it_is_compiled() -> None:
    body, bare = body_of("llama"), replace(DEFAULT_ENGINE, sums=0)
    launch = memory_bound_s(CLUSTER.chip, 0)
    for node in body.nodes:
        usual, slow = (seconds(body, node, bare, cluster) for cluster in (CLUSTER, SLOW))
        if node.name in body.irregular:
            assert slow[0] - launch == pytest.approx(2 * (usual[0] - launch))
            assert slow[1] >= usual[1]
        else:
            assert slow == usual
        assert seconds(body, node, engine("torch-compiled"), SLOW) == seconds(body, node, engine("torch-compiled"))


def test_the_gradients_of_a_value_with_two_readers_are_added() -> None:
    body, bare = body_of("llama"), replace(DEFAULT_ENGINE, sums=0)
    joined = {node.name: sum(body.joined[node.name]) for node in body.nodes}
    # Both norms' operands, what three and what two products read, and rotary embedding's two of each.
    assert sum(joined.values()) == 2 + (2 + 1) + 2
    for node in body.nodes:
        forward, to_input, to_weight = seconds(body, node)
        plain = seconds(body, node, bare)
        assert (forward, to_weight) == (plain[0], plain[2])
        moved = 3 * sum(
            body.types[name].size_bytes(MICROBATCH)
            for name, joins in zip(node.operands, body.joined[node.name], strict=True) if joins
        )
        expected = memory_bound_s(CLUSTER.chip, moved, joined[node.name]) if moved else 0.0
        assert to_input - plain[1] == pytest.approx(expected, abs=1e-12)


def test_cross_entropy_moves_what_the_engine_says() -> None:
    graph = traced("llama", "bfloat16")
    body, node = next((body, node) for body in graph.bodies for node in body.nodes if node.base == "cross_entropy_loss")
    elements = body.types[node.operands[0]].elements(MICROBATCH)
    more, none = (replace(DEFAULT_ENGINE, sums=0, loss_forward=size, loss_backward=size) for size in (1e6, 0))
    forward, to_input, _ = seconds(body, node, more)
    assert forward == pytest.approx(to_input) == pytest.approx(memory_bound_s(CLUSTER.chip, 1e6 * elements, 5))
    assert seconds(body, node, none)[0] < forward
    measured = replace(CLUSTER, chip=replace(CLUSTER.chip, functions={"cross_entropy_loss": 1e-9}))
    assert seconds(body, node, more, measured)[0] == seconds(body, node, none, measured)[0]


def test_a_block_waits_for_the_host_unless_the_host_is_the_device() -> None:
    body = body_of("llama")
    slow = replace(DEFAULT_ENGINE, host_s=1.0)
    cost = cost_block(body, whole_placement(body), Pricing(CLUSTER, 1, MICROBATCH, engine=slow), "full")
    operations = sum(node.base not in ("chunk", "getitem", "reshape", "transpose", "view") for node in body.nodes)
    assert cost.forward_s == pytest.approx(operations, rel=0.2)
    assert cost.forward_s - 3 < cost.recompute_s < cost.forward_s  # Not the last product, and what follows it.
    assert cost.backward_s > cost.forward_s
    for hook_s in (0.0, 100.0):
        machine = replace(CLUSTER, chip=replace(CLUSTER.chip, host_s=2.0, hook_s=hook_s))
        own = cost_block(body, whole_placement(body), Pricing(machine, 1, MICROBATCH, engine=slow), "full")
        assert own.forward_s == pytest.approx(2 * cost.forward_s + hook_s)  # The machine's own number, not the engine's.
        assert own.backward_s == pytest.approx(2 * cost.backward_s + hook_s)
        assert own.recompute_s == pytest.approx(2 * cost.recompute_s)
    alone = replace(CLUSTER, chip=replace(CLUSTER.chip, hook_s=1e-6))
    quick = cost_block(body, whole_placement(body), Pricing(alone, 1, MICROBATCH, engine=slow), "full")
    assert quick.forward_s < 0.1


def test_the_block_that_the_host_is_timed_with_has_as_many_operations_as_a_graph_would_count() -> None:
    """hardware_profiles/measure/block.py is wired as a block of examples/gpt.py."""
    body, machine = body_of("gpt"), replace(CLUSTER, chip=replace(CLUSTER.chip, host_s=1.0))
    placed = strategies(body)
    operations = [measure_operation(body, node, placed[node.name], 1, MICROBATCH) for node in body.nodes]
    pricing = Pricing(machine, 1, MICROBATCH, engine=engine("torch-eager"))
    assert sum(pricing.host_seconds(operations)) == BLOCK_OPERATIONS
