"""What eager torch does beside one read and one write of each operation: sums of gradients, views, cross-entropy's passes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from cost_models.compute import memory_bound_s
from hardware_profiles import DEFAULT_ENGINE, Cluster, Engine, engine, resolve_cluster
from hardware_profiles.measure.document import BLOCK_OPERATIONS
from planner.costing import Pricing, cost_block
from planner.costing.operations import measure_operation
from planner.evaluate import evaluate_plan
from planner.ir.body import Body, Node
from planner.ir.placement import OpStrategy
from planner.ir.plan import SCHEDULES, Batch, BlockDecision, Mesh, Plan, Schedule, ScheduleName, StagePlan
from planner.ir.serialize import fingerprint
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


def test_each_part_of_a_split_backward_pass_waits_for_its_own_launches() -> None:
    """Collectives' and hooks' seconds of the host come with the input gradients."""
    body, machine = body_of("gpt"), replace(CLUSTER, chip=replace(CLUSTER.chip, host_s=1.0, hook_s=100.0))
    placed = strategies(body)
    operations = [measure_operation(body, node, placed[node.name], 1, MICROBATCH) for node in body.nodes]
    products = sum(node.base == "linear" for node in body.nodes)
    pricing = Pricing(machine, 1, MICROBATCH, engine=DEFAULT_ENGINE)
    cost = cost_block(body, whole_placement(body), pricing, "none")
    _, to_input, to_weight = pricing.host_seconds(operations)
    assert to_weight >= products > 1
    assert (cost.input_gradient_s, cost.weight_gradient_s) == (to_input + 100.0, to_weight)
    assert cost.backward_s == to_input + to_weight + 100.0


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_quicker_chip_makes_no_plan_slower(schedule: ScheduleName) -> None:
    """Blocks so small that they wait for the host, on a chip of more FLOP/s, more bandwidth or shorter launches."""
    graph = traced("gpt", "bfloat16")
    blocks, virtual = len(graph.blocks), 2 if schedule in ("interleaved-1f1b", "zbv") else 1
    cuts = [blocks * at // (2 * virtual) for at in range(2 * virtual + 1)]
    stages = tuple(
        StagePlan(at, first, last, (BlockDecision(0, "none"),) * (last - first))
        for at, (first, last) in enumerate(pairwise(cuts))
    )
    plan = Plan(
        graph.name, fingerprint(graph), CLUSTER.name, CLUSTER.fingerprint, "bf16", graph.sequence, Mesh(pipeline=2),
        Batch(8, 1, 8), Schedule(schedule, virtual), 1, stages, {body.name: whole_placement(body) for body in graph.bodies},
    )
    chip = CLUSTER.chip
    before_s = evaluate_plan(plan, graph, replace(CLUSTER, chip=chip)).step_s
    for times in (2, 10, 1000):
        for quicker in (
            replace(chip, peak_flops={dtype: times * rate for dtype, rate in chip.peak_flops.items()}),
            replace(chip, memory_bandwidth=times * chip.memory_bandwidth), replace(chip, launch_s=chip.launch_s / times),
        ):
            assert evaluate_plan(plan, graph, replace(CLUSTER, chip=quicker)).step_s <= before_s * (1 + 1e-12)


def test_the_block_that_the_host_is_timed_with_has_as_many_operations_as_a_graph_would_count() -> None:
    """hardware_profiles/measure/block.py is wired as a block of examples/gpt.py."""
    body, machine = body_of("gpt"), replace(CLUSTER, chip=replace(CLUSTER.chip, host_s=1.0))
    placed = strategies(body)
    operations = [measure_operation(body, node, placed[node.name], 1, MICROBATCH) for node in body.nodes]
    pricing = Pricing(machine, 1, MICROBATCH, engine=engine("torch-eager"))
    assert sum(pricing.host_seconds(operations)) == BLOCK_OPERATIONS
