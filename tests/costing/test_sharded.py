"""A column-split then row-split pair of linears (Shoeybi et al. 2019, section 3): half the work, two all-reduces."""

import pytest

from cost_models.collectives import collective_s
from cost_models.spans import span_of
from hardware_profiles import resolve_cluster
from planner.costing import Pricing, cost_block
from planner.costing.activations import saved_bytes
from planner.costing.local import localise
from planner.ir.body import Body, BodyValue, Node
from planner.ir.placement import PARTIAL, REPLICATE, SHARED, BodyPlacement, NodePlacement, OpStrategy, shard
from planner.ir.types import BatchMultiple, Ref, TensorType
from planner.ops.work import work
from planner.placement.place import whole_placement

CLUSTER = resolve_cluster("dgx-a100-80gb:1")
H, F, T, B = 256, 1024, 64, 2


def value(*shape: int) -> TensorType:
    return TensorType((BatchMultiple(1), *shape), "bfloat16")


def linear(name: str, source: str, weight: str, width: int) -> Node:
    arguments = (("input", Ref(source)), ("weight", Ref(weight)), ("bias", None))
    return Node(name, "linear", arguments, (value(T, width),), differentiable=True)


UP, DOWN = linear("up", "x", "wide", F), linear("down", "act", "narrow", H)
ACT = Node("act", "relu", (("self", Ref("up")),), (value(T, F),), differentiable=True)
BODY = Body(
    "Pair", (BodyValue("x", value(T, H), True),),
    (
        BodyValue("wide", TensorType((F, H), "bfloat16"), True),
        BodyValue("narrow", TensorType((H, F), "bfloat16"), True),
    ),
    (), (UP, ACT, DOWN), ("down",),
)
SPLIT = BodyPlacement(
    "Pair", 2, (REPLICATE,), (shard(0), shard(1)),
    (
        NodePlacement("up", OpStrategy("column", (SHARED, shard(0)), (shard(2),))),
        NodePlacement("act", OpStrategy("split", (shard(2),), (shard(2),))),
        NodePlacement("down", OpStrategy("row", (shard(2), shard(1)), (PARTIAL,))),
    ),
    (REPLICATE,),
)


def test_work_halves() -> None:
    whole, split = localise(BODY, None, B), localise(BODY, SPLIT, B)
    for node in (UP, DOWN):
        flops = []
        for local in (whole, split):
            step = next(step for step in local.steps if step.node is node)
            operands = [local.types[key] for key in step.operands]
            flops.append(work(node, operands, [local.types[key] for key in step.outputs], B).flops)
        assert flops[0] == 2 * flops[1] == 2 * B * T * H * F


def test_split_costs() -> None:
    whole = cost_block(BODY, whole_placement(BODY), Pricing(CLUSTER, 1, B), "none")
    split = cost_block(BODY, SPLIT, Pricing(CLUSTER, 2, B), "none")
    reduce_s = collective_s("all_reduce", span_of(CLUSTER, 2, 1), B * T * H * 2)
    assert (split.forward_comm_s, split.backward_comm_s) == pytest.approx((reduce_s, reduce_s))
    assert split.parameter_elements * 2 == whole.parameter_elements
    assert split.flops == whole.flops == 3 * 2 * 2 * B * T * H * F


def test_split_keeps_its_part_and_the_shared_input_once() -> None:
    """The input's copy for the column split is a view of it; the activation is split."""
    assert saved_bytes(localise(BODY, None, B)) == B * T * (H + F) * 2
    assert saved_bytes(localise(BODY, SPLIT, B)) == B * T * (H + F // 2) * 2
