"""What products of tensors of different numbers of dims, learned masks and sums with products hold: exactly torch's bytes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from planner.costing.activations import saved_bytes
from planner.costing.local import localise
from planner.ir.body import Body, BodyValue, Node
from planner.ir.types import Ref, TensorType
from tests.ops.interpret import peaks_by_torch, saved_by_torch
from tests.ops.test_saved import Arguments
from tests.ops.test_temporaries import predicted
from tests.torch_versions import flash_attention_keeps

Shape = tuple[int, ...]

FACTORS: list[tuple[Shape, Shape, Shape]] = [
    ((64, 16), (3, 16, 32), (3, 64, 32)), ((64, 16), (1, 16, 32), (1, 64, 32)), ((64, 16), (3, 5, 16, 32), (3, 5, 64, 32)),
    ((3, 64, 16), (16, 32), (3, 64, 32)), ((3, 5, 64, 16), (16, 32), (3, 5, 64, 32)), ((3, 64, 16), (16,), (3, 64)),
    ((16,), (3, 16, 64), (3, 64)), ((16,), (16, 64), (64,)), ((3, 64, 16), (3, 16, 32), (3, 64, 32)),
]


def body_of(op: str, arguments: Arguments, inputs: dict[str, tuple[Shape, bool]], output: Shape, dtype: str) -> Body:
    values = tuple(BodyValue(name, TensorType(shape, dtype), learned) for name, (shape, learned) in inputs.items())
    node = Node("out", op, arguments, (TensorType(output, dtype),), differentiable=True)
    return Body("Case", values, (), (), (node,), ("out",))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("learned", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("shapes", FACTORS, ids=str)
def test_matmul(shapes: tuple[Shape, Shape, Shape], learned: tuple[bool, bool], dtype: str) -> None:
    first, second, output = shapes
    inputs = {"a": (first, learned[0]), "b": (second, learned[1])}
    body = body_of("matmul", (("self", Ref("a")), ("other", Ref("b"))), inputs, output, dtype)
    assert predicted(body) == peaks_by_torch(body, 1)
    assert saved_bytes(localise(body, None, 1)) == saved_by_torch(body, 1)[0]


@pytest.mark.parametrize("learned", [(True, False), (False, True)])
def test_what_is_copied_for_a_product_and_not_kept_is_counted(learned: tuple[bool, bool]) -> None:
    """Both factors are broadcast; a gradient of one needs the other's copy alone."""
    inputs = {"a": ((3, 1, 64, 16), learned[0]), "b": ((1, 5, 16, 32), learned[1])}
    body = body_of("matmul", (("self", Ref("a")), ("other", Ref("b"))), inputs, (3, 5, 64, 32), "float32")
    assert predicted(body).forward == peaks_by_torch(body, 1).forward


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("mask", [(2, 4, 8, 8), (1, 4, 8, 8), (4, 8, 8), (8, 8), (2, 1, 8, 8)])
def test_attention_under_a_learned_mask(mask: Shape, dtype: str) -> None:
    heads = (2, 4, 8, 16)
    inputs = dict.fromkeys(("query", "key", "value"), (heads, True)) | {"attn_mask": (mask, True)}
    arguments: Arguments = (*((name, Ref(name)) for name in inputs), ("dropout_p", 0.0), ("is_causal", False))
    body = body_of("scaled_dot_product_attention", arguments, inputs, heads, dtype)
    assert predicted(body) == peaks_by_torch(body, 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64", "bool"])
@pytest.mark.parametrize("mask", [(4, 8, 8), (1, 8, 8), (4, 8, 1), (8, 8), (2, 1, 8, 8)])
def test_attention_under_a_mask_of_some_dims(mask: Shape, dtype: str) -> None:
    """The flash kernel takes two dims or four; under a mask of three torch composes it."""
    if len(mask) != 3:
        flash_attention_keeps(dtype)
    heads = TensorType((2, 4, 8, 16), "float32" if dtype == "bool" else dtype)
    values = [BodyValue(name, heads, True) for name in ("query", "key", "value")]
    values.append(BodyValue("attn_mask", TensorType(mask, dtype), False))
    arguments: Arguments = (*((value.name, Ref(value.name)) for value in values), ("dropout_p", 0.0), ("is_causal", False))
    node = Node("out", "scaled_dot_product_attention", arguments, (heads,), differentiable=True)
    body = Body("Case", tuple(values), (), (), (node,), ("out",))
    assert predicted(body) == peaks_by_torch(body, 1)
    assert saved_bytes(localise(body, None, 1)) == saved_by_torch(body, 1)[0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("turned", ["q", "k", "v", "qk", "qkv"])
def test_attention_over_heads_that_do_not_lie_side_by_side(turned: str, causal: bool, dtype: str) -> None:
    """The flash kernel takes none, so torch composes it."""
    values = [BodyValue(name, TensorType((2, 4, 8, 16) if name in turned else (2, 4, 16, 8), dtype), True) for name in "qkv"]
    nodes = [_turned(name, name, (2, 4, 16, 8), dtype) for name in turned]
    names = [f"{name}t" if name in turned else name for name in "qkv"]
    body = Body("Case", tuple(values), (), (), (*nodes, _attended(names, causal, dtype)), ("out",))
    assert predicted(body) == peaks_by_torch(body, 1)
    assert saved_bytes(localise(body, None, 1)) == saved_by_torch(body, 1)[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_attention_over_pixels(dtype: str) -> None:
    """Query, key and value of one convolution, heads before pixels: what is scaled is made anew, and lies closer."""
    whole, head = BodyValue("x", TensorType((2, 3, 4, 8, 16), dtype), True), TensorType((2, 4, 16, 8), dtype)
    parts = Node("u", "unbind.int", (("self", Ref("xt")), ("dim", 1)), (head,) * 3, differentiable=True)
    picked = [Node(name, "getitem", (("input", Ref("u")), ("index", at)), (head,), differentiable=True)
              for at, name in enumerate("qkv")]
    nodes = (_turned("x", "x", (2, 3, 4, 16, 8), dtype), parts, *picked, _attended("qkv", False, dtype))
    body = Body("Case", (whole,), (), (), nodes, ("out",))
    assert predicted(body) == peaks_by_torch(body, 1)
    assert saved_bytes(localise(body, None, 1)) == saved_by_torch(body, 1)[0]


def _turned(name: str, value: str, sizes: Shape, dtype: str) -> Node:
    arguments: Arguments = (("self", Ref(value)), ("dim0", -2), ("dim1", -1))
    return Node(f"{name}t", "transpose.int", arguments, (TensorType(sizes, dtype),), differentiable=True)


def _attended(names: Sequence[str], causal: bool, dtype: str) -> Node:
    operands = zip(("query", "key", "value"), map(Ref, names), strict=True)
    arguments: Arguments = (*operands, ("attn_mask", None), ("dropout_p", 0.0), ("is_causal", causal))
    return Node("out", "scaled_dot_product_attention", arguments, (TensorType((2, 4, 16, 8), dtype),), differentiable=True)


@pytest.mark.parametrize(("alpha", "beta"), [(1, 1), (0.5, 1), (1, 0.5)])
@pytest.mark.parametrize("whole", [True, False])
def test_sum_with_a_product(alpha: float, beta: float, whole: bool) -> None:
    inputs = {"self": ((4, 32, 32), whole), "batch1": ((4, 32, 8), True), "batch2": ((4, 8, 32), True)}
    arguments: Arguments = (*((name, Ref(name)) for name in inputs), ("beta", beta), ("alpha", alpha))
    body = body_of("baddbmm", arguments, inputs, (4, 32, 32), "float32")
    assert predicted(body) == peaks_by_torch(body, 1)


TAKEN: list[tuple[str, Arguments]] = [
    ("index.Tensor", (("self", Ref("a")), ("indices", (Ref("i"),)))),
    ("index_select", (("self", Ref("a")), ("dim", 0), ("index", Ref("i")))),
]


@pytest.mark.parametrize("rows", [8, 64, 200])
@pytest.mark.parametrize(("op", "arguments"), TAKEN, ids=lambda value: value if isinstance(value, str) else "")
def test_rows_that_are_taken(op: str, arguments: Arguments, rows: int) -> None:
    """Their gradient is laid into zeros as large as what they were taken of, however many they are."""
    values = BodyValue("a", TensorType((64, 32), "float32"), True), BodyValue("i", TensorType((rows,), "int64"), False)
    node = Node("out", op, arguments, (TensorType((rows, 32), "float32"),), differentiable=True)
    body = Body("Case", values, (), (), (node,), ("out",))
    assert predicted(body) == peaks_by_torch(body, 1)


@pytest.mark.parametrize("other", [(1, 1, 16, 4), (2, 4, 16, 4)])
def test_complex_numbers_are_conjugated(other: Shape) -> None:
    inputs = {"a": ((2, 4, 16, 4), True), "b": (other, False)}
    body = body_of("mul.Tensor", (("self", Ref("a")), ("other", Ref("b"))), inputs, (2, 4, 16, 4), "complex64")
    assert predicted(body) == peaks_by_torch(body, 1)


def test_a_number_to_choose_from_is_a_tensor() -> None:
    values = BodyValue("c", TensorType((16, 16), "bool"), False), BodyValue("a", TensorType((4, 16, 16), "float32"), True)
    arguments: Arguments = (("condition", Ref("c")), ("self", Ref("a")), ("other", -1e9))
    node = Node("out", "where.ScalarOther", arguments, (TensorType((4, 16, 16), "float32"),), differentiable=True)
    body = Body("Case", values, (), (), (node,), ("out",))
    assert predicted(body) == peaks_by_torch(body, 1)


@pytest.mark.parametrize("learned", [True, False])
def test_attention_under_a_learned_mask_lies_row_by_row(learned: bool) -> None:
    """Without a mask that is learned a fused kernel lays its result as the query lies: turned round it is a view then."""
    inputs = {"query": ((2, 16, 4, 8), True), "attn_mask": ((16, 16), learned)}
    values = tuple(BodyValue(name, TensorType(shape, "float32"), needs) for name, (shape, needs) in inputs.items())
    heads = TensorType((2, 4, 16, 8), "float32")
    turned = Node(
        "turned", "transpose.int", (("self", Ref("query")), ("dim0", 1), ("dim1", 2)), (heads,), differentiable=True
    )
    arguments: Arguments = (
        *((name, Ref("turned")) for name in ("query", "key", "value")), ("attn_mask", Ref("attn_mask")), ("dropout_p", 0.0),
        ("is_causal", False),
    )
    attended = Node("attended", "scaled_dot_product_attention", arguments, (heads,), differentiable=True)
    body = Body("Case", values, (), (), (turned, attended), ("attended",))
    assert localise(body, None, 1).layouts["attended"].contiguous == learned
    assert predicted(body) == peaks_by_torch(body, 1)
