"""Every formula of what autograd keeps, against torch's own saved tensors on fake CPU tensors."""

from __future__ import annotations

import pytest

from planner.costing.activations import saved_bytes
from planner.costing.local import localise
from planner.ir.body import Body, BodyValue, Node
from planner.ir.types import Argument, Ref, TensorType
from tests.ops.interpret import saved_by_torch
from tests.torch_versions import flash_attention_keeps

S, HEADS = (2, 16, 32), (2, 16, 4, 8)
Arguments = tuple[tuple[str, Argument], ...]
Case = tuple[str, Arguments, tuple[tuple[int, ...], ...], tuple[int, ...]]  # op, arguments, operands, output


def unary(base: str, **extra: Argument) -> Case:
    return base, (("self", Ref("a")), *extra.items()), (S,), S


def binary(base: str, second: tuple[int, ...] = S) -> Case:
    return f"{base}.Tensor", (("self", Ref("a")), ("other", Ref("b"))), (S, second), S


CASES = [
    *(unary(base) for base in (
        "relu", "silu", "tanh", "sigmoid", "exp", "log", "sqrt", "rsqrt", "neg", "abs", "sin", "cos", "erf",
        "reciprocal", "log1p", "expm1", "mish", "hardswish", "square", "clone", "log_sigmoid",
    )),
    unary("gelu", approximate="tanh"), unary("softmax.int", dim=-1, dtype=None),
    unary("log_softmax.int", dim=-1, dtype=None), unary("pow.Tensor_Scalar", exponent=2),
    *(binary(base, second) for base in ("mul", "div", "add", "sub") for second in (S, (32,))),
    ("layer_norm", (("input", Ref("a")), ("normalized_shape", (32,)), ("weight", Ref("b")), ("bias", Ref("c")),
                    ("eps", 1e-5)), (S, (32,), (32,)), S),
    ("rms_norm", (("input", Ref("a")), ("normalized_shape", (32,)), ("weight", Ref("b")), ("eps", 1e-5)), (S, (32,)),
    S), ("linear", (("input", Ref("a")), ("weight", Ref("b")), ("bias", None)), (S, (64, 32)), (2, 16, 64)),
    ("bmm", (("self", Ref("a")), ("mat2", Ref("b"))), (S, (2, 32, 8)), (2, 16, 8)),
    ("matmul", (("self", Ref("a")), ("other", Ref("b"))), ((2, 4, 16, 8), (1, 1, 8, 16)), (2, 4, 16, 16)),
    ("dropout", (("input", Ref("a")), ("p", 0.1), ("train", True)), (S,), S),
]
ALONE: list[Case] = [
    ("clamp.Tensor", (("self", Ref("a")), ("min", Ref("b")), ("max", Ref("c"))), (S, S, S), S),
    ("clamp_min.Tensor", (("self", Ref("a")), ("min", Ref("b"))), (S, S), S),
    ("addcdiv", (("self", Ref("a")), ("tensor1", Ref("b")), ("tensor2", Ref("c")), ("value", 1)), (S, S, S), S),
    ("logaddexp2", (("self", Ref("a")), ("other", Ref("b"))), (S, S), S),
    *(("pad", (("self", Ref("a")), ("pad", (1, 1)), ("mode", mode), ("value", None)), (S,), (2, 16, 34))
      for mode in ("constant", "reflect", "replicate")),
    *(("adaptive_avg_pool1d", (("self", Ref("a")), ("output_size", (size,))), (S,), (2, 16, size)) for size in (1, 4)),
    ("std.correction", (("self", Ref("a")), ("dim", (1,)), ("correction", 0), ("keepdim", True)), (S,), (2, 1, 32)),
]
"""In float32 alone: not every one has a kernel for halves."""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[2][-1]}")
def test_operation(case: Case, dtype: str) -> None:
    op, arguments, shapes, output = case
    inputs = tuple(BodyValue(name, TensorType(shape, dtype), True) for name, shape in zip("abc", shapes, strict=False))
    node = Node("out", op, arguments, (TensorType(output, dtype),), differentiable=True)
    body = Body("Case", inputs, (), (), (node,), ("out",))
    assert saved_bytes(localise(body, None, 1)) == saved_by_torch(body, 1)[0]


@pytest.mark.parametrize("case", ALONE, ids=lambda case: f"{case[0]}-{case[1][-1][1]}-{case[3][-1]}")
def test_nothing_but_the_operation_keeps(case: Case) -> None:
    """What it keeps is made by others that keep nothing, and its result is read by one that keeps nothing."""
    op, arguments, shapes, output = case
    inputs = tuple(BodyValue(name * 2, TensorType(shape, "float32"), True) for name, shape in zip("abc", shapes, strict=False))
    made = tuple(Node(v.name[0], "neg", (("self", Ref(v.name)),), (v.type,), differentiable=True) for v in inputs)
    node = Node("out", op, arguments, (TensorType(output, "float32"),), differentiable=True)
    last = Node("last", "neg", (("self", Ref("out")),), node.types, differentiable=True)
    body = Body("Case", inputs, (), (), (*made, node, last), ("last",))
    assert saved_bytes(localise(body, None, 1)) == saved_by_torch(body, 1)[0]


@pytest.mark.parametrize("base", ["cummax", "cummin"])
def test_a_running_extreme_keeps_the_operand_and_its_places(base: str) -> None:
    value = TensorType(S, "float32")
    made = Node("made", "neg", (("self", Ref("a")),), (value,), differentiable=True)
    pair = Node("pair", base, (("self", Ref("made")), ("dim", 1)), (value, TensorType(S, "int64")), differentiable=True)
    out = Node("out", "getitem", (("input", Ref("pair")), ("index", 0)), (value,), differentiable=True)
    body = Body("Case", (BodyValue("a", value, True),), (), (), (made, pair, out), ("out",))
    assert saved_bytes(localise(body, None, 1)) == saved_by_torch(body, 1)[0] == 3 * value.size_bytes(1)


@pytest.mark.parametrize("base", ["index_add", "index_copy"])
@pytest.mark.parametrize("learned", [False, True])
def test_rows_that_are_added_are_kept(base: str, learned: bool) -> None:
    """Made by another operation, and of another shape than the operand, so that nothing else keeps them."""
    inputs = (
        BodyValue("a", TensorType((2, 8, 6), "float32"), True), BodyValue("i", TensorType((5,), "int64"), False),
        BodyValue("b", TensorType((2, 5, 6), "float32"), learned),
    )
    made = Node("made", "neg", (("self", Ref("b")),), (inputs[2].type,), differentiable=learned)
    arguments = (("self", Ref("a")), ("dim", 1), ("index", Ref("i")), ("source", Ref("made")))
    node = Node("out", base, arguments, (inputs[0].type,), differentiable=True)
    body = Body("Case", inputs, (), (), (made, node), ("out",))
    kept = saved_bytes(localise(body, None, 1))
    assert kept == saved_by_torch(body, 1)[0] and (kept >= inputs[2].type.size_bytes(1)) == learned


def test_a_power_keeps_its_result_whatever_has_a_gradient() -> None:
    inputs = (BodyValue("a", TensorType(S, "float32"), True), BodyValue("b", TensorType(S, "float32"), False))
    arguments: Arguments = (("self", Ref("a")), ("exponent", Ref("b")))
    node = Node("out", "pow.Tensor_Tensor", arguments, (inputs[0].type,), differentiable=True)
    body = Body("Case", inputs, (), (), (node,), ("out",))
    assert saved_bytes(localise(body, None, 1)) == saved_by_torch(body, 1)[0] == 2 * inputs[0].type.size_bytes(1)


def heads(dtype: str, key: tuple[int, ...], tail: tuple[Node, ...]) -> Body:
    """Query, key, value [B, T, N, D] transposed to [B, N, T, D]: dense, but not row-major."""
    shapes = {"q": HEADS, "k": key, "v": key}
    inputs = tuple(BodyValue(name, TensorType(shape, dtype), True) for name, shape in shapes.items())
    nodes = tuple(
        Node(f"{name}t", "transpose.int", (("self", Ref(name)), ("dim0", 1), ("dim1", 2)),
             (TensorType((shape[0], shape[2], shape[1], shape[3]), dtype),), differentiable=True)
        for name, shape in shapes.items()
    )
    return Body("Case", inputs, (), (), (*nodes, *tail), (tail[-1].name,))


def attention(dtype: str, dropout: float, grouped: bool) -> Node:
    arguments: Arguments = (
        ("query", Ref("qt")), ("key", Ref("kt")), ("value", Ref("vt")), ("attn_mask", None), ("dropout_p", dropout),
        ("is_causal", True), ("scale", None), ("enable_gqa", grouped),
    )
    type_ = TensorType((2, 4, 16, 8), dtype)
    return Node("o", "scaled_dot_product_attention", arguments, (type_,), differentiable=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("grouped", [False, True])
def test_attention(dtype: str, dropout: float, grouped: bool) -> None:
    flash_attention_keeps(dtype if not dropout else "")
    body = heads(dtype, (2, 16, 2, 8) if grouped else HEADS, (attention(dtype, dropout, grouped),))
    assert saved_bytes(localise(body, None, 1)) == saved_by_torch(body, 1)[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_norm_keeps_what_does_not_lie_in_order_as_it_is(dtype: str) -> None:
    norm = Node(
        "o", "layer_norm", (("input", Ref("qt")), ("normalized_shape", (8,)), ("weight", None), ("bias", None), ("eps", 1e-5)),
        (TensorType((2, 4, 16, 8), dtype),), differentiable=True,
    )
    body = heads(dtype, HEADS, (norm,))
    assert saved_bytes(localise(body, None, 1)) == saved_by_torch(body, 1)[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_eager_attention_copies_what_strides_forbid(dtype: str) -> None:
    across = Node("kk", "transpose.int", (("self", Ref("kt")), ("dim0", 2), ("dim1", 3)),
                  (TensorType((2, 4, 8, 16), dtype),), differentiable=True)
    scores = Node("s", "matmul", (("self", Ref("qt")), ("other", Ref("kk"))), (TensorType((2, 4, 16, 16), dtype),),
                  differentiable=True)
    body = heads(dtype, HEADS, (across, scores))
    assert saved_bytes(localise(body, None, 1)) == saved_by_torch(body, 1)[0]


@pytest.mark.slow
@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("base", "gates"), [("gru", 3), ("lstm", 4)])
def test_recurrent_layers(base: str, gates: int, layers: int, ways: int) -> None:
    """In float64, where no fused kernel takes the LSTM."""
    state = [f"h{at}" for at in range(2 if base == "lstm" else 1)]
    inputs = [BodyValue("x", TensorType((2, 7, 5), "float64"), True)]
    inputs += [BodyValue(name, TensorType((layers * ways, 2, 6), "float64"), False) for name in state]
    parameters = [
        BodyValue(f"w{layer}{way}{part}", TensorType(shape, "float64"), True)
        for layer in range(layers) for way in range(ways)
        for part, shape in enumerate(((gates * 6, 6 * ways if layer else 5), (gates * 6, 6), (gates * 6,), (gates * 6,)))
    ]
    held = tuple(map(Ref, state)) if base == "lstm" else Ref("h0")
    arguments: Arguments = (
        ("input", Ref("x")), ("hx", held), ("params", tuple(Ref(value.name) for value in parameters)), ("has_biases", True),
        ("num_layers", layers), ("dropout", 0.0), ("train", True), ("bidirectional", ways == 2), ("batch_first", True),
    )
    result = TensorType((2, 7, 6 * ways), "float64")
    last = TensorType((layers * ways, 2, 6), "float64")
    nodes = (
        Node("all", f"{base}.input", arguments, (result, *(last for _ in state)), differentiable=True),
        Node("o", "getitem", (("input", Ref("all")), ("index", 0)), (result,), differentiable=True),
    )
    body = Body("Case", tuple(inputs), tuple(parameters), (), nodes, ("o",))
    assert saved_bytes(localise(body, None, 1)) == saved_by_torch(body, 1)[0]
