"""The oracle catches rules that are wrong, each in its own way."""

from __future__ import annotations

import pytest

from planner.ir.placement import PARTIAL, REPLICATE, SHARED, OpStrategy, Placement, shard
from tests.oracles.sharded_op import Disproved, check
from tests.rules.nodes import Call, call, real

WRONG: dict[str, tuple[Call, tuple[Placement, ...], Placement]] = {
    "a column split whose input gets only its own gradient":
        (call("linear", real(5, 8), real(12, 8)), (REPLICATE, shard(0)), shard(1)),
    "a contraction that forgets its sum":
        (call("linear", real(5, 8), real(12, 8)), (shard(1), shard(1)), REPLICATE),
    "a sum added where it is partial": (call("add.Tensor", real(5, 8), real(8)), (PARTIAL, SHARED), PARTIAL),
    "a product of two partial sums": (call("mul.Tensor", real(5, 8), real(5, 8)), (PARTIAL, PARTIAL), PARTIAL),
    "a nonlinear operation on partial sums": (call("gelu", real(5, 8)), (PARTIAL,), PARTIAL),
    "a causal mask on a part of the queries": (
        call("scaled_dot_product_attention", *(real(2, 3, 6, 8) for _ in "qkv"), is_causal=True),
        (shard(2), SHARED, SHARED), shard(2),
    ),
    "a mean over local positions": (call("mean.dim", real(6, 4), [0]), (shard(0),), PARTIAL),
    "a split across its pieces": (call("reshape", real(5, 24), [5, 3, 8]), (shard(1),), shard(2)),
    "a shared input with whole gradients": (call("sum", real(6, 4)), (SHARED,), REPLICATE),
    "a normalisation of half the features": (call("layer_norm", real(5, 8), [8]), (shard(1),), shard(1)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_disproved(name: str) -> None:
    what, operands, output = WRONG[name]
    with pytest.raises((Disproved, RuntimeError)):
        check(what.node, OpStrategy("wrong", operands, (output,)), 2, what.operands)


def test_right_rules_are_not() -> None:
    what = call("linear", real(5, 8), real(12, 8))
    check(what.node, OpStrategy("column", (SHARED, shard(0)), (shard(1),)), 2, what.operands)
    check(what.node, OpStrategy("row", (shard(1), shard(1)), (PARTIAL,)), 2, what.operands)
