"""Views and broadcasting over random shapes, proved like every other rule."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.ir.body import Body, BodyValue, Node
from planner.ir.placement import PARTIAL, shard
from planner.ir.types import BatchMultiple, Ref, TensorType
from planner.rules import shard_variants, strategies
from tests.oracles.sharded_op import check
from tests.rules.nodes import call, real

FACTORS = st.lists(st.sampled_from([1, 2, 2, 3, 4, 5, 6]), min_size=1, max_size=5).filter(lambda f: math.prod(f) < 1500)
DEGREES = st.sampled_from([2, 3, 4])


@st.composite
def groupings(draw: st.DrawFn, factors: list[int]) -> list[int]:
    """A shape whose dims are runs of the factors."""
    cuts = sorted(draw(st.sets(st.integers(1, len(factors)), max_size=len(factors))) | {0, len(factors)})
    return [math.prod(factors[low:high]) for low, high in pairwise(cuts)]


@pytest.mark.slow
@given(st.data(), FACTORS, DEGREES)
@settings(max_examples=120, deadline=None)
def test_reshapes(data: st.DataObject, factors: list[int], degree: int) -> None:
    before, after = data.draw(groupings(factors)), data.draw(groupings(factors))
    call("reshape", real(*before), after).check(degree)


@pytest.mark.slow
@given(st.data(), FACTORS, DEGREES)
@settings(max_examples=60, deadline=None)
def test_reshapes_between_unrelated_factors(data: st.DataObject, factors: list[int], degree: int) -> None:
    after = data.draw(st.permutations(factors))
    call("reshape", real(*factors), list(after)).check(degree)


@pytest.mark.slow
@given(st.data(), st.lists(st.sampled_from([1, 4, 5, 6]), min_size=1, max_size=4), DEGREES)
@settings(max_examples=80, deadline=None)
def test_broadcasting(data: st.DataObject, shape: list[int], degree: int) -> None:
    operands = []
    for _ in range(2):
        own = [size if data.draw(st.booleans()) else 1 for size in shape][data.draw(st.integers(0, len(shape))):]
        operands.append(real(*own, gradient=data.draw(st.booleans())))
    op = data.draw(st.sampled_from(["add.Tensor", "mul.Tensor", "div.Tensor", "maximum"]))
    call(op, *operands).check(degree)


@given(st.permutations([0, 1, 2, 3]), DEGREES)
@settings(max_examples=24, deadline=None)
def test_permutations(order: list[int], degree: int) -> None:
    call("permute", real(4, 5, 6, 8), list(order)).check(degree)


@given(st.data(), DEGREES, st.sampled_from([(3, 6, 2), (2, 4, 3), (1, 7, 2)]))
@settings(max_examples=30, deadline=None)
def test_fused_heads_in_every_layout(data: st.DataObject, degree: int, parts: tuple[int, int, int]) -> None:
    """What a whole fused projection says of its dims, each node proved in every variant."""
    count, heads, width = parts
    fused = count * heads * width
    x = Node("x", "reshape", (("self", Ref("fused")), ("shape", (5, count, heads, width))),
             (TensorType((5, count, heads, width), "float64"),), differentiable=True)
    body = Body("Fused", (BodyValue("fused", TensorType((5, fused), "float64"), True),), (), (), (x,), ("x",))
    variants = shard_variants(body, degree)
    found = strategies(x, body.types, degree, body.differentiable, variants)
    assert any(item.operands[0].segments for item in found) or count == 1 or heads < degree
    torch.manual_seed(data.draw(st.integers(0, 9)))
    for strategy in found:
        check(x, strategy, degree, [real(5, fused)])


def test_batch_is_never_sharded_and_flattens_freely() -> None:
    logits = TensorType((BatchMultiple(1), 6, 8), "float64")
    node = Node("flat", "reshape", (("self", Ref("logits")), ("shape", (BatchMultiple(6), 8))),
                (TensorType((BatchMultiple(6), 8), "float64"),), differentiable=True)
    found = strategies(node, {"logits": logits}, 2, frozenset({"logits", "flat"}))
    assert [(item.operands, item.outputs) for item in found if item.operands[0].state == "shard"] == [
        ((shard(2),), (shard(1),))
    ], "the classes pass through; the batch, and what is merged with it, stay whole"
    assert ((PARTIAL,), (PARTIAL,)) in [(item.operands, item.outputs) for item in found]


def test_what_is_repeated_for_every_sample_is_split_along_its_other_dims() -> None:
    """A learned token in place of every masked one: its number is the batch's."""
    token = TensorType((1, 1, 8), "float64")
    node = Node("all", "repeat", (("self", Ref("token")), ("repeats", (BatchMultiple(1), 6, 1))),
                (TensorType((BatchMultiple(1), 6, 8), "float64"),), differentiable=True)
    found = strategies(node, {"token": token}, 2, frozenset({"token", "all"}))
    split = [(item.operands, item.outputs) for item in found if item.operands[0].state == "shard"]
    assert split == [((shard(2),), (shard(2),))]
