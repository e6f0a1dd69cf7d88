"""Models whose layers are told something of a whole sample, which passes more blocks than the hidden states do."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from hardware_profiles import resolve_cluster
from planner.costing import Pricing
from planner.decisions import decisions_of
from planner.ir.body import Body, BodyValue, Node
from planner.ir.graph import Block, ModelGraph
from planner.ir.placement import REPLICATE, shard
from planner.ir.types import BatchMultiple, Ref, TensorType
from planner.placement import Option, place_graph
from planner.placement.complete import complete
from planner.trace import load_model, trace_model
from tests.matrix.build import Row, make_plan
from tests.placement import dense

MODELS = Path(__file__).parents[1] / "matrix" / "models.py"
SEQUENCE, WIDTH, TOLD, DEGREE = 24, 64, 2048, 4
PRICING = Pricing(resolve_cluster("dgx-a100-80gb:1"), DEGREE, 512)


@cache
def traced() -> ModelGraph:
    """Three blocks of [batch, 2048], then three layers of [batch, 24, 64] that all read what these made."""
    source = load_model(f"{MODELS}:conditioned", {"width": WIDTH, "told": TOLD}, None)
    return trace_model(source, sequence=SEQUENCE, dtype="float32")


@cache
def options() -> tuple[Option, ...]:
    return place_graph(traced(), DEGREE, PRICING)


def test_the_hidden_states_are_the_chains_and_not_what_crosses_most() -> None:
    assert traced().chain_type == TensorType((BatchMultiple(1), SEQUENCE, WIDTH), "float32")


def test_the_sequence_is_split_and_what_has_none_stays_whole() -> None:
    found = {option.boundary: option.placements for option in options()}
    assert set(found) == {REPLICATE, shard(1)}
    assert found[shard(1)]["Modulated"].inputs == (REPLICATE, shard(1))
    assert found[shard(1)]["Telling"].inputs == (REPLICATE,)


@pytest.mark.parametrize(("first", "second", "chosen"), [
    (dense.ACTIVATION, dense.WIDE, dense.WIDE), (dense.WIDE, dense.ACTIVATION, dense.WIDE),
    (dense.ACTIVATION, dense.SCALAR, dense.ACTIVATION), (dense.SCALAR, dense.ACTIVATION, dense.ACTIVATION),
    (TensorType((BatchMultiple(1), 10**6), "float32"), dense.ACTIVATION, dense.ACTIVATION),
    (dense.SCALAR, TensorType((BatchMultiple(1), 8), "float32"), dense.SCALAR),
])
def test_of_what_crosses_as_often_a_sequence_comes_first_then_what_is_larger(
    first: TensorType, second: TensorType, chosen: TensorType
) -> None:
    def body(name: str, given: tuple[BodyValue, ...], types: tuple[TensorType, ...]) -> Body:
        nodes = tuple(
            Node(f"n{at}", "unary", (("a0", Ref(given[at].name)),), (type_,), differentiable=True)
            for at, type_ in enumerate(types)
        )
        return Body(name, given, (), (), nodes, tuple(node.name for node in nodes))

    given = BodyValue("a", first, True), BodyValue("b", second, True)
    bodies = body("Begin", given, (first, second)), body("End", given, (first,))
    blocks = Block("begin", "Begin", ("x", "y"), ("p", "q"), (), ()), Block("end", "End", ("p", "q"), ("loss",), (), ())
    context = Body("Context", (), (), (), (), ())
    graph = ModelGraph("both", (), (), (), context, bodies, blocks, "loss", "weight", "float32", dense.SEQUENCE)
    assert graph.chain_type == chosen


def test_blocks_that_no_split_activation_comes_to_are_divided_as_plain_ones() -> None:
    """With sequence parallelism too: weights of [4 x 2048, 2048] were whole on every rank, since no block of a split chain may
    sum a product's parts into a whole activation. And a plan file, which says what comes to each block, has to bring the
    placement back."""
    telling = traced().body_of["Telling"]
    names = [parameter.name for parameter in telling.parameters]
    divided = set()
    for option in options():
        placement = option.placements["Telling"]
        placed = dict(zip(names, placement.parameters, strict=True))
        assert complete(telling, DEGREE, {}, placed, PRICING) == placement
        if (placed["up.weight"], placed["down.weight"]) == (shard(0), shard(1)):
            divided.add(option.boundary)
    assert divided == {REPLICATE, shard(1)}


def test_a_plan_is_sequence_parallel_whatever_its_blocks_read_first() -> None:
    for option in options():
        plan = make_plan(traced(), Row(tensor=DEGREE), precision="fp32", placements=option.placements)
        assert decisions_of(plan)["sequence_parallel"] == str(option.boundary == shard(1)).lower()
