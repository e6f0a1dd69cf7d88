"""Which way gradients go through a block and a stage, and in which order the program runs what it does."""

from __future__ import annotations

import pytest
from torch import nn

from planner.costing.expressions import in_emitted_order
from planner.costing.forward import Emitted
from planner.costing.local import localise
from planner.costing.passes import BlockPasses
from planner.costing.paths import in_module_order
from planner.costing.storages import STRAIGHT, Arrival, Leaving, Order
from planner.evaluate.bodies import Bodies
from planner.evaluate.flows import Flows
from planner.evaluate.heap import Heap
from planner.trace import load_model, trace_model
from tests.costing.test_ledger_memory import ROOT, graph_of
from tests.matrix.build import Row, make_plan

SIZE = 5760
TURNED = Order(straight=False, even=False, turned=True)
"""Of a value of `odd` for one sample in float64."""


def bodies_of(model: str, row: Row) -> Bodies:
    graph = graph_of(model, "fp64")
    return Bodies(make_plan(graph, row), graph)


def test_parameters_come_as_the_module_gives_them() -> None:
    module = nn.Module()
    module.norm, module.up = nn.LayerNorm(2), nn.Linear(2, 3)
    module.gate = nn.Parameter(module.norm.weight.detach())
    declared = ["norm.weight", "norm.bias", "up.weight", "up.bias", "gate"]
    assert in_module_order(declared) == [name for name, _ in module.named_parameters()]


def test_groups_are_taken_by_parameter() -> None:
    paths = BlockPasses(Emitted(localise(graph_of("corners", "fp64").body_of["_Corner"], None, 1)), "none").paths
    gate, norm, *rest = paths.groups
    assert len(gate) == len(norm) == 1 and gate > norm and [gate, *sorted(rest)] == [gate, *rest]
    assert paths.joins == {at for group in paths.groups for at in group}


def test_what_is_written_into_an_expression_runs_with_it() -> None:
    """The second table is looked up where it is added: after the collective of the first."""
    bodies = bodies_of("corners", Row(tensor=2, sequence_parallel=True))
    local = localise(bodies.graph.body_of["Embedding"], bodies.plan.placements["Embedding"], bodies.plan.batch.micro)
    made = [step.outputs[0] for step in in_emitted_order(local).steps]
    assert made == ["embedded", "ids -> shard(0)", "embedded -> shard(1)", "embedded_2", "x"]
    assert {step.outputs for step in local.steps} == {step.outputs for step in in_emitted_order(local).steps}
    assert bodies.emitted("Embedding").local.steps == in_emitted_order(local).steps


def test_a_stage_holds_what_no_variable_takes_over() -> None:
    """The value that begins without a gradient is another kind than what follows it."""
    bodies = bodies_of("odd", Row())
    first, second = bodies.graph.blocks[0].writes
    assert first in bodies.taken_over and second not in bodies.taken_over


def test_parts_of_what_was_joined_leave_in_one_storage() -> None:
    passes = BlockPasses(Emitted(localise(graph_of("odd", "fp64").body_of["Head"], None, 1)), "none")
    one, other = passes.backward("input").leaving
    assert one.made == other.made and one.size == other.size == 2 * SIZE and not one.order.straight


@pytest.mark.slow
def test_a_gradient_that_is_copied_to_lose_dims_lies_row_by_row() -> None:
    """Windows of an image: its channels lie innermost in the copy, and outermost in the image that came from another stage."""
    source = load_model(f"{ROOT / 'benchmarks' / 'zoo' / 'pictures.py'}:make", {"name": "cut"}, None)
    body = trace_model(source, dtype="float32").body_of["Block"]
    (leaving,) = BlockPasses(Emitted(localise(body, None, 1)), "none").backward("input").leaving
    assert leaving.order == Order(straight=False, even=False, turned=True)


def test_a_shared_storage_stays_until_nothing_needs_it() -> None:
    """Both gradients lie in what the block made: one is sent back, in rows of its own, the other is added to."""
    heap = Heap()
    flows = Flows(heap, {"a": SIZE, "b": SIZE}, {"a", "b"}, {"a": 0, "b": 2})
    heap.add("activations", 2 * SIZE)
    leaving = [(name, Leaving(name, 2 * SIZE, -1, 7, TURNED, False)) for name in "ab"]
    for flow in flows.settle(2, [], leaving, ()):
        flows.leave(flow, copies=False)
    assert heap.total == 2 * SIZE
    taken = flows.take("a")
    assert taken is not None and taken.storage.held  # By the gradient of b.
    assert taken.order == TURNED
    heap.add("activations", SIZE)
    (flow,) = flows.settle(0, [taken], [("a", Leaving("a", SIZE, -1, 3, STRAIGHT, False))], {0})
    flows.leave(flow, copies=False)
    assert flows.end() == 2 * SIZE and heap.total == 4 * SIZE
    assert taken.storage.held and not taken.storage.outlives(0)  # The first block's weight part reads it.


def test_a_gradient_that_the_weight_part_reads_stays() -> None:
    """Whoever takes it has not had the last of it."""
    heap = Heap()
    flows = Flows(heap, {"a": SIZE}, (), {})
    heap.add("activations", SIZE)
    for flow in flows.settle(2, [], [("a", Leaving("a", SIZE, -1, 1, STRAIGHT, waits=True))], ()):
        flows.leave(flow, copies=False)
    heap.add("activations", SIZE)
    for flow in flows.settle(1, [], [("a", Leaving("a", SIZE, -1, 2, STRAIGHT, waits=False))], ()):
        flows.leave(flow, copies=False)
    assert heap.total == 2 * SIZE  # What is added up, and what waits; the other part is gone.


def test_a_leaf_takes_over_only_what_lies_as_it_does() -> None:
    heap = Heap()
    flows = Flows(heap, {"a": SIZE}, {"a"}, {"a": 0})
    heap.add("activations", 2 * SIZE)
    (flow,) = flows.settle(0, [], [("a", Leaving("a", 2 * SIZE, -1, 1, TURNED, False))], ())
    flows.leave(flow, copies=True)
    assert heap.total == SIZE and heap.most == 3 * SIZE and flows.end() == SIZE


def test_a_gradient_that_is_held_elsewhere_is_not_counted_twice() -> None:
    passes = BlockPasses(Emitted(localise(graph_of("gpt", "fp64").bodies[1], None, 1)), "none")
    (size,) = passes.gradient_bytes
    own, held = (passes.backward("input", arrivals=[Arrival(0, size, other)]).after[0] for other in (False, True))
    assert held - own == (0 if passes.backward("input").waiting else size)


def test_phases_have_peaks_of_their_own() -> None:
    heap = Heap()
    heap.add("activations", 5)
    heap.turn()
    heap.add("activations", -3)
    heap.passing(buffers=1)
    heap.turn()
    assert [phase.most for phase in heap.phases] == [5, 5] and heap.most == 2
