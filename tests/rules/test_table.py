"""What the table says of known operations, and how layouts travel through a body."""

from __future__ import annotations

from planner.ir.body import Body, BodyValue, Node
from planner.ir.localize import localize
from planner.ir.placement import PARTIAL, REPLICATE, SHARED, OpStrategy, Placement, Transfer, shard
from planner.ir.types import Argument, BatchMultiple, Extent, RankSize, Ref, TensorType
from planner.rules import has_rule, output_key, shard_variants, strategies
from tests.rules.nodes import call, fixed, real, whole_numbers

B = BatchMultiple(1)


def pairs(found: tuple[OpStrategy, ...]) -> set[tuple[tuple[Placement, ...], tuple[Placement, ...]]]:
    return {(item.operands, item.outputs) for item in found}


def test_linear_knows_column_row_and_sequence() -> None:
    found = pairs(call("linear", real(3, 5, 8), real(12, 8)).strategies(2))
    assert ((SHARED, shard(0)), (shard(2),)) in found, "columns"
    assert ((shard(2), shard(1)), (PARTIAL,)) in found, "rows"
    assert ((shard(1), SHARED), (shard(1),)) in found, "the sequence"


def test_unknown_operations_run_whole() -> None:
    what = call("linalg_inv", fixed(8, 8))
    assert not has_rule(what.node)
    assert pairs(what.strategies(2)) == {((REPLICATE,), (REPLICATE,))}
    known = call("linear", real(5, 8), real(12, 8))
    assert has_rule(known.node)
    unknown = Node("out", "library::op", known.node.arguments, known.node.types, differentiable=True)
    found = strategies(unknown, known.types, 2, known.differentiable)
    assert pairs(found) == {((REPLICATE, REPLICATE), (REPLICATE,)), ((SHARED, SHARED), (SHARED,))}


def test_without_gradients_nothing_is_shared_or_partial() -> None:
    states = {
        placement.state
        for item in call("linear", fixed(5, 8), fixed(12, 8)).strategies(2)
        for placement in (*item.operands, *item.outputs)
    }
    assert states == {"replicate", "shard"}


def test_class_split_loss_has_three_sums_inside() -> None:
    what = call("cross_entropy_loss", real(6, 11), whole_numbers(11, 6), None, 2)
    split = next(item for item in what.strategies(2) if item.operands[0] == shard(1))
    assert split.outputs == (REPLICATE,) and split.operands[1] == REPLICATE
    assert split.forward == (Transfer("all_reduce", 6 * 8),) * 3 and split.backward == ()


def test_softmax_over_a_split_dim_has_sums_inside() -> None:
    split = next(i for i in call("softmax.int", real(4, 6), -1).strategies(2) if i.operands[0] == shard(1))
    assert split.forward == (Transfer("all_reduce", 4 * 8),) * 2 and split.backward == (Transfer("all_reduce", 4 * 8),)


def test_no_rank_is_empty() -> None:
    assert not [i for i in call("relu", real(3, 2)).strategies(4) if i.outputs[0].state == "shard"]


def _node(name: str, op: str, extents: tuple[Extent, ...], **arguments: Argument) -> Node:
    return Node(name, op, tuple(arguments.items()), (TensorType(extents, "float32"),), differentiable=True)


def _fused(heads: int, width: int) -> Body:
    """x -> fused projection -> three parts -> heads -> attention -> merged -> output projection."""
    hidden = heads * width
    third = TensorType((B, 5, hidden), "float32")
    nodes = [
        _node("fused", "linear", (B, 5, 3 * hidden), input=Ref("x"), weight=Ref("qkv"), bias=None),
        Node("parts", "split.Tensor", (("self", Ref("fused")), ("split_size", hidden), ("dim", 2)), (third,) * 3,
             differentiable=True),
    ]
    for at, name in enumerate("qkv"):
        nodes += [
            _node(f"part_{name}", "getitem", third.shape, input=Ref("parts"), index=at),
            _node(f"view_{name}", "reshape", (B, 5, heads, width), self=Ref(f"part_{name}"), shape=(B, 5, heads, width)),
            _node(f"heads_{name}", "transpose.int", (B, heads, 5, width), self=Ref(f"view_{name}"), dim0=1, dim1=2),
        ]
    nodes += [
        _node("mixed", "scaled_dot_product_attention", (B, heads, 5, width), query=Ref("heads_q"), key=Ref("heads_k"),
              value=Ref("heads_v"), attn_mask=None, dropout_p=0.0, is_causal=True, scale=None, enable_gqa=False),
        _node("back", "transpose.int", (B, 5, heads, width), self=Ref("mixed"), dim0=1, dim1=2),
        _node("merged", "reshape", (B, 5, hidden), self=Ref("back"), shape=(B, 5, hidden)),
        _node("y", "linear", (B, 5, hidden), input=Ref("merged"), weight=Ref("out"), bias=None),
    ]
    weights = (
        BodyValue("qkv", TensorType((3 * hidden, hidden), "float32"), True),
        BodyValue("out", TensorType((hidden, hidden), "float32"), True),
    )
    return Body("Fused", (BodyValue("x", third, True),), weights, (), tuple(nodes), ("y",))


def test_heads_reach_the_weights_through_a_fused_projection() -> None:
    body = _fused(heads=6, width=4)
    even, uneven = shard_variants(body, 3), shard_variants(body, 4)
    assert shard(0, (24, 24, 24)) in even["qkv"]
    assert shard(0, (24, 24, 24), unit=4) in uneven["qkv"], "six heads over four ranks: 2, 2, 1, 1"
    assert shard(1, unit=4) in uneven["out"]
    assert shard(2, unit=4) in uneven[output_key(body.by_name["parts"], 1)]


def test_megatron_split_can_be_written_without_a_conversion() -> None:
    """Column, heads, row: from the fused projection to the partial output every producer meets its reader."""
    body = _fused(heads=6, width=4)
    for degree in (2, 3, 4):
        variants = shard_variants(body, degree)
        lies: dict[str, Placement] = {"x": SHARED, "qkv": shard(0, (24, 24, 24), 4 if degree == 4 else 1)}
        lies["out"] = shard(1, (), 4 if degree == 4 else 1)
        outputs: dict[str, tuple[Placement, ...]] = {}
        for node in body.nodes:
            given = tuple(
                outputs["parts"][node.argument("index")] if node.base == "getitem" else lies[name]  # type: ignore[index]
                for name in node.operands
            )
            found = strategies(node, body.types, degree, body.differentiable, variants)
            chosen = [item for item in found if item.operands == given]
            assert chosen, f"degree {degree}: {node.name} cannot read {[*map(str, given)]}"
            outputs[node.name] = chosen[0].outputs
            lies[node.name] = chosen[0].outputs[0]
        assert lies["y"] == PARTIAL


def test_local_literals() -> None:
    body = _fused(heads=6, width=4)
    variants = shard_variants(body, 4)

    def chosen(name: str, operand: Placement) -> tuple[Node, OpStrategy]:
        node = body.by_name[name]
        found = strategies(node, body.types, 4, body.differentiable, variants)
        return node, next(item for item in found if item.operands[0] == operand)

    node, strategy = chosen("parts", shard(2, (24, 24, 24), unit=4))
    assert dict(localize(node, strategy, 4, rank=0))["split_size"] == 8
    assert dict(localize(node, strategy, 4, rank=3))["split_size"] == 4
    assert dict(localize(node, strategy, 4))["split_size"] == RankSize(24, 4)
    node, strategy = chosen("view_q", shard(2, unit=4))
    assert dict(localize(node, strategy, 4, rank=3))["shape"] == (B, 5, 1, 4)
    node, strategy = chosen("parts", PARTIAL)
    assert localize(node, strategy, 4) == node.arguments


def test_slices_of_one_value_are_cut_together() -> None:
    third = (B, 8)
    nodes = tuple(
        _node(f"part_{at}", "slice.Tensor", third, self=Ref("x"), dim=1, start=8 * at, end=8 * at + 8, step=1)
        for at in range(3)
    )
    body = Body("Cut", (BodyValue("x", TensorType((B, 24), "float32"), True),), (), (), nodes, ("part_0",))
    variants = shard_variants(body, 2)
    for node in nodes:
        found = strategies(node, body.types, 2, body.differentiable, variants)
        assert ((shard(1, (8, 8, 8)),), (shard(1),)) in pairs(found)
