"""What an operation holds at its most in either pass, against torch's own storages on fake CPU tensors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from planner.costing.activations import saved_bytes
from planner.costing.forward import Emitted
from planner.costing.local import localise
from planner.costing.passes import BlockPasses
from planner.costing.storages import Arrival
from planner.ir.body import Body, BodyValue, Node, Source
from planner.ir.types import Argument, Dtype, Ref, TensorType
from tests.ops.interpret import Passes, forward_peak, peaks_by_torch, saved_by_torch
from tests.ops.test_saved import CASES, Arguments, Case, S, binary, unary
from tests.torch_versions import flash_attention_keeps

ROWS = (2, 16)


def along(base: str, output: tuple[int, ...], **extra: Argument) -> Case:
    return base, (("self", Ref("a")), *extra.items()), (S,), output


EXACT = [
    *(case for case in CASES if not case[0].startswith(("add", "sub"))),
    *((base, (("self", Ref("a")), ("other", Ref("b")), ("alpha", scale)), (S, second), S)
      for base in ("add.Tensor", "sub.Tensor") for second in (S, (32,), (2, 1, 32)) for scale in (1, 2)),
    *(unary(base) for base in (
        "acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "digamma", "erfc", "exp2", "frac", "hardsigmoid", "lgamma",
        "log10", "log2", "sinc", "sinh", "softshrink", "softplus", "tan", "trunc",
    )),
    unary("pow.Tensor_Scalar", exponent=3), unary("pow.Tensor_Scalar", exponent=0.5), unary("clamp", min=0, max=1),
    unary("clamp", min=0, max=None), unary("clamp_min", min=0.5), unary("remainder.Scalar", other=0.7),
    unary("rsub.Scalar", other=1), unary("rsub.Scalar", other=1, alpha=2),
    *(("rsub.Tensor", (("self", Ref("a")), ("other", Ref("b")), ("alpha", scale)), (first, S), S)
      for first in (S, (32,), (2, 1, 32)) for scale in (1, 2)),
    ("pow.Scalar", (("self", 2.0), ("exponent", Ref("a"))), (S,), S),
    *(binary(base, second) for base in ("mul", "div") for second in ((2, 1, 32), (2, 16, 1))),
    ("atan2", (("self", Ref("a")), ("other", Ref("b"))), (S, S), S),
    *((base, (("self", Ref("a")), ("other", Ref("b"))), (S, S), S)
      for base in ("maximum", "minimum", "fmax", "fmin", "logaddexp", "logaddexp2", "hypot", "fmod.Tensor")),
    ("pow.Tensor_Tensor", (("self", Ref("a")), ("exponent", Ref("b"))), (S, S), S),
    *(along(base, ROWS, dim=(-1,), keepdim=False) for base in ("amax", "amin", "sum.dim_IntList", "mean.dim", "logsumexp")),
    *(along(f"{base}.dim", ROWS, dim=(-1,), unbiased=True, keepdim=False) for base in ("var", "std")),
    *(along("linalg_vector_norm", ROWS, ord=order, dim=(-1,), keepdim=False)
      for order in (0.5, 1, 1.5, 2, 3, math.inf)),
    ("clamp.Tensor", (("self", Ref("a")), ("min", Ref("b")), ("max", Ref("c"))), (S, S, S), S),
    unary("special_erfcx"), unary("special_i0e"), unary("special_ndtri"),
    along("prod.dim_int", ROWS, dim=-1, keepdim=False), unary("cumsum", dim=1), unary("flip", dims=(1,)), unary("neg"),
    along("sum", ()), along("mean", ()),
    *(binary(base) for base in ("xlogy",)), unary("nan_to_num"), unary("i0"), unary("erfinv"),
    *((f"lerp.{kind}", (("self", Ref("a")), ("end", Ref("b")), ("weight", weight)), (S,) * shapes, S)
      for kind, weight, shapes in (("Scalar", 0.3, 2), ("Tensor", Ref("c"), 3))),
    along("rot90", S, k=2, dims=(1, 2)), along("unfold", (2, 8, 32, 2), dimension=1, size=2, step=2),
    binary("remainder"),
    *(("div.Tensor_mode", (("self", Ref("a")), ("other", Ref("b")), ("rounding_mode", mode)), (S, second), S)
      for mode in ("floor", "trunc") for second in (S, (32,))),
    *((f"clamp_{end}.Tensor", (("self", Ref("a")), (end, Ref("b"))), (S, (32,)), S) for end in ("min", "max")),
    *(("addcmul", (("self", Ref("a")), ("tensor1", Ref("b")), ("tensor2", Ref("c")), ("value", scale)), (S, S, S), S)
      for scale in (1, 2)),
    *(along("norm.ScalarOpt_dim", ROWS, p=order, dim=(-1,), keepdim=False) for order in (1, 2, 3)),
    along("diag_embed", (*S, S[-1])), along("nansum", ROWS, dim=(-1,), keepdim=False),
]

ABOVE: list[tuple[str, dict[str, Argument], str]] = [
    ("angle", {}, "complex64"), ("angle", {}, "float32"), ("sgn", {}, "complex64"), ("special_log_ndtr", {}, "float32"),
    ("linalg_matrix_exp", {}, "float32"), ("renorm", {"p": 2, "dim": 0, "maxnorm": 1.0}, "float32"),
]


@pytest.mark.parametrize(("base", "extra", "dtype"), ABOVE, ids=str)
def test_no_operation_is_below(base: str, extra: dict[str, Argument], dtype: str) -> None:
    """Of those that hold no whole number of tensors."""
    square = (16, 16)
    made = TensorType(square, "float32" if base == "angle" else dtype)  # type: ignore[arg-type]
    node = Node("out", base, (("self", Ref("a")), *extra.items()), (made,), differentiable=True)
    inputs = (BodyValue("a", TensorType(square, dtype), True),)  # type: ignore[arg-type]
    body = Body("Case", inputs, (), (), (node,), ("out",))
    assert predicted(body).backward >= peaks_by_torch(body, 1).backward


FLAT, LABELS, MOVED = (24, 16), (24,), 0.1
LOSSES = [
    *(("binary_cross_entropy_with_logits", (("self", Ref("a")), ("target", Ref("t")), ("weight", None),
                                            ("pos_weight", Ref("p") if weighted else None), ("reduction", how)))
      for weighted in (False, True) for how in (0, 2)),
    *((base, (("self", Ref("a")), ("target", Ref("t")), *extra, ("reduction", how)))
      for base, extra in (("binary_cross_entropy", (("weight", None),)), ("soft_margin_loss", ()), ("mse_loss", ()),
                          ("huber_loss", (("delta", 1.0),)), ("smooth_l1_loss", (("beta", 1.0),)))
      for how in (0, 2)),
    *(("cross_entropy_loss", (("self", Ref("a")), ("target", Ref(target)), ("weight", weight), ("reduction", how),
                              ("ignore_index", -100), ("label_smoothing", smoothing)))
      for target in ("t", "l") for how in (0, 2) for smoothing in (0.0, MOVED) for weight in (None, Ref("p"))),
    *(("cosine_similarity", (("x1", Ref("a")), ("x2", Ref(other)), ("dim", dim), ("eps", 1e-8)))
      for other in ("t", "b", "p") for dim in (0, 1)),
]


def predicted(body: Body) -> Passes:
    passes = BlockPasses(Emitted(localise(body, None, 1)), "none")
    arrived = tuple(Arrival(at, size, held=True) if size else None for at, size in enumerate(passes.gradient_bytes))
    return Passes(sum(passes.forward.peak), sum(passes.backward(arrivals=arrived).peak))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("case", EXACT, ids=lambda case: f"{case[0]}-{case[2][-1]}-{case[1][-1][1]}")
def test_operation(case: Case, dtype: str) -> None:
    op, arguments, shapes, output = case
    inputs = tuple(BodyValue(name, TensorType(shape, dtype), True) for name, shape in zip("abc", shapes, strict=False))
    node = Node("out", op, arguments, (TensorType(output, dtype),), differentiable=True)
    body = Body("Case", inputs, (), (), (node,), ("out",))
    assert predicted(body) == peaks_by_torch(body, 1)


@pytest.mark.parametrize("base", ["index_add", "scatter_add"])
def test_what_rows_are_added_to_is_handed_its_gradient(base: str) -> None:
    index = (5,) if base == "index_add" else (2, 5, 6)
    inputs = (
        BodyValue("a", TensorType((2, 8, 6), "float32"), True), BodyValue("i", TensorType(index, "int64"), False),
        BodyValue("b", TensorType((2, 5, 6), "float32"), True),
    )
    added = "source" if base == "index_add" else "src"
    arguments: Arguments = (("self", Ref("a")), ("dim", 1), ("index", Ref("i")), (added, Ref("b")))
    body = Body("Case", inputs, (), (), (Node("out", base, arguments, (inputs[0].type,), differentiable=True),), ("out",))
    assert predicted(body) == peaks_by_torch(body, 1)


@pytest.mark.parametrize("learned", ["ab", "a", "b"])
@pytest.mark.parametrize("mask", [S, (32,)])
def test_a_learned_value_where_a_mask_says(mask: tuple[int, ...], learned: str) -> None:
    """Its gradient is whole before it is summed to one number."""
    types = {"a": TensorType(S, "float32"), "m": TensorType(mask, "bool"), "b": TensorType((), "float32")}
    inputs = tuple(BodyValue(name, type_, name in learned) for name, type_ in types.items())
    arguments: Arguments = (("self", Ref("a")), ("mask", Ref("m")), ("value", Ref("b")))
    node = Node("out", "masked_fill.Tensor", arguments, (types["a"],), differentiable=True)
    body = Body("Case", inputs, (), (), (node,), ("out",))
    assert predicted(body) == peaks_by_torch(body, 1)


@pytest.mark.parametrize("counted", ["int64", "int32"])
@pytest.mark.parametrize(("dim", "repeats", "shape"), [(0, 2, (6, 16, 32)), (1, 16, (2, 40, 32)), (-1, 32, (2, 16, 50)),
                                                       (1, 1, (2, 64, 32)), (None, 1024, (1500,))])
def test_rows_as_often_as_a_tensor_says(dim: int | None, repeats: int, shape: tuple[int, ...], counted: str) -> None:
    """Their places are kept, in the dtype of that tensor, and rows are added up in a copy of zeros."""
    inputs = (
        BodyValue("a", TensorType(S, "float32"), True),
        BodyValue("r", TensorType((repeats,), counted), False),  # type: ignore[arg-type]
    )
    rows = shape[0 if dim is None else dim]
    arguments: Arguments = (("self", Ref("a")), ("repeats", Ref("r")), ("dim", dim), ("output_size", rows))
    node = Node("out", "repeat_interleave.self_Tensor", arguments, (TensorType(shape, "float32"),), differentiable=True)
    body = Body("Case", inputs, (), (), (node,), ("out",))
    assert predicted(body) == peaks_by_torch(body, 1)
    assert saved_bytes(localise(body, None, 1)) == saved_by_torch(body, 1)[0]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_sums_of_rows_of_a_table(mode: int, weighted: bool) -> None:
    """``EmbeddingBag`` by sum, mean and maximum; its gradient is one tensor of the table's size."""
    inputs = [BodyValue("a", TensorType((50, 32), "float32"), True)]
    inputs += [BodyValue(name, TensorType((count,), "int64"), False) for name, count in (("i", 8), ("o", 2))]
    inputs += [BodyValue("w", TensorType((8,), "float32"), True)] if weighted and mode == 0 else []
    arguments: Arguments = (
        ("weight", Ref("a")), ("indices", Ref("i")), ("offsets", Ref("o")), ("scale_grad_by_freq", False), ("mode", mode),
        ("sparse", False), ("per_sample_weights", Ref("w") if len(inputs) > 3 else None), ("include_last_offset", False),
        ("padding_idx", None),
    )
    result, whole = TensorType((2, 32), "float32"), TensorType((2,), "int64")
    parts = (result, TensorType((8 if mode else 0,), "int64"), whole, TensorType((2, 32), "int64") if mode == 2 else whole)
    nodes = (
        Node("bags", "embedding_bag.padding_idx", arguments, parts, differentiable=True),
        Node("out", "getitem", (("input", Ref("bags")), ("index", 0)), (result,), differentiable=True),
    )
    body = Body("Case", tuple(inputs), (), (), nodes, ("out",))
    assert saved_bytes(localise(body, None, 1)) == saved_by_torch(body, 1)[0]
    assert predicted(body) == peaks_by_torch(body, 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_a_sum_in_float32(dtype: str) -> None:
    """Its gradient is spread over the operand without memory where both have one precision."""
    arguments: Arguments = (("self", Ref("a")), ("dtype", Dtype("float32")))
    node = Node("out", "sum", arguments, (TensorType((), "float32"),), differentiable=True)
    body = Body("Case", (BodyValue("a", TensorType(S, dtype), True),), (), (), (node,), ("out",))  # type: ignore[arg-type]
    assert predicted(body) == peaks_by_torch(body, 1)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rms_norm_of_turned_heads(dtype: str, weighted: bool) -> None:
    """Its result lies in rows all the same, so that turning it back needs a copy."""
    heads, rows = (2, 4, 16, 8), (2, 16, 4, 8)
    def turned(name: str, value: str, shape: tuple[int, ...]) -> Node:
        dims = (("self", Ref(value)), ("dim0", 1), ("dim1", 2))
        return Node(name, "transpose.int", dims, (TensorType(shape, dtype),), differentiable=True)  # type: ignore[arg-type]

    norm: Arguments = (
        ("input", Ref("t")), ("normalized_shape", (8,)), ("weight", Ref("w") if weighted else None), ("eps", 1e-5)
    )
    flat: Arguments = (("self", Ref("u")), ("shape", (2, 16, 32)))
    nodes = (
        turned("t", "a", heads), Node("n", "rms_norm", norm, (TensorType(heads, dtype),), differentiable=True),
        turned("u", "n", rows), Node("o", "reshape", flat, (TensorType((2, 16, 32), dtype),), differentiable=True),
    )
    inputs = (BodyValue("a", TensorType(rows, dtype), True), BodyValue("w", TensorType((8,), dtype), True))
    body = Body("Case", inputs[: 1 + weighted], (), (), nodes, ("o",))
    assert predicted(body) == peaks_by_torch(body, 1)
    assert saved_bytes(localise(body, None, 1)) == saved_by_torch(body, 1)[0]


def test_what_a_composite_is_called_with_lives_until_it_returns() -> None:
    """A product without a name, as programs write it."""
    def normed(x: Tensor, matrix: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(F.linear(x, matrix), (32,), weight)

    x = TensorType(S, "bfloat16")
    product: Arguments = (("input", Ref("a")), ("weight", Ref("m")), ("bias", None))
    norm: Arguments = (("input", Ref("projected")), ("normalized_shape", (32,)), ("weight", Ref("w")), ("eps", None))
    shapes = {"a": S, "m": (32, 32), "w": (32,)}
    first, *parameters = (BodyValue(name, TensorType(shape, "bfloat16"), True) for name, shape in shapes.items())
    line = Source("model.py", 1, "")
    nodes = (
        Node("projected", "linear", product, (x,), source=line, differentiable=True),
        Node("normed", "rms_norm", norm, (x,), source=line, differentiable=True),
    )
    body = Body("Case", (first,), tuple(parameters), (), nodes, ("normed",))
    assert predicted(body).forward == forward_peak(normed, *shapes.values(), dtype=torch.bfloat16)


def test_results_that_nothing_reads_share_a_variable() -> None:
    """``_``, which the next such result takes over."""
    def routed(x: Tensor) -> Tensor:
        _, first = x.topk(8)
        some = x.gather(-1, first)
        _, second = some.topk(8)
        return some.gather(-1, second)

    few, places = TensorType((2, 16, 8), "float32"), TensorType((2, 16, 8), "int64")

    def step(at: int, given: str) -> tuple[Node, ...]:
        largest: Arguments = (("self", Ref(given)), ("k", 8), ("dim", -1), ("largest", True), ("sorted", True))
        return (
            Node(f"both{at}", "topk", largest, (few, places), differentiable=True),
            Node(f"at{at}", "getitem", (("input", Ref(f"both{at}")), ("index", 1)), (places,)),
            Node(f"some{at}", "gather", (("self", Ref(given)), ("dim", -1), ("index", Ref(f"at{at}"))), (few,),
                 differentiable=True),
        )

    inputs = (BodyValue("a", TensorType(S, "float32"), True),)
    body = Body("Case", inputs, (), (), (*step(0, "a"), *step(1, "some0")), ("some1",))
    assert predicted(body).forward == forward_peak(routed, S, dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 16, 32, 32), (4, 32, 32, 32), (1, 8, 64, 64), (2, 16, 16, 64)], ids=str)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("base", "gates"), [("gru", 3), ("lstm", 4), ("rnn_tanh", 1)])
def test_recurrent_layers_are_bounded(base: str, gates: int, layers: int, sizes: tuple[int, int, int, int]) -> None:
    """In float64, where no fused kernel takes the LSTM. ``sizes``: samples, steps, width, hidden width."""
    samples, steps, width, hidden = sizes
    state = ("h", "c") if base == "lstm" else ("h",)
    shapes = {"x": (samples, steps, width)} | dict.fromkeys(state, (layers, samples, hidden))
    for layer in range(layers):
        parts = ((gates * hidden, hidden if layer else width), (gates * hidden, hidden), (gates * hidden,), (gates * hidden,))
        shapes |= {f"w{layer}{at}": shape for at, shape in enumerate(parts)}
    inputs = tuple(BodyValue(name, TensorType(shape, "float64"), name[0] in "xw") for name, shape in shapes.items())
    arguments: Arguments = (
        ("input", Ref("x")), ("hx", tuple(map(Ref, state)) if base == "lstm" else Ref("h")),
        ("params", tuple(Ref(name) for name in shapes if name[0] == "w")), ("has_biases", True), ("num_layers", layers),
        ("dropout", 0.0), ("train", True), ("bidirectional", False), ("batch_first", True),
    )
    result, last = TensorType((samples, steps, hidden), "float64"), TensorType((layers, samples, hidden), "float64")
    nodes = (
        Node("all", f"{base}.input", arguments, (result, *(last for _ in state)), differentiable=True),
        Node("o", "getitem", (("self", Ref("all")), ("index", 0)), (result,), differentiable=True),
    )
    said, held = predicted(body := Body("Case", inputs, (), (), nodes, ("o",))), peaks_by_torch(body, 1)
    assert held.forward <= said.forward <= 1.5 * held.forward
    assert held.backward <= said.backward <= 2 * held.backward


def loss_of(op: str, arguments: Arguments) -> Body:
    """Of a tensor that has a gradient (another in ``b``), against targets ``t`` or labels ``l`` that have none."""
    dims = {"a": FLAT, "b": FLAT, "t": FLAT, "l": LABELS, "p": FLAT[1:]}
    names = [value.name for _, value in arguments if isinstance(value, Ref)]
    inputs = tuple(
        BodyValue(name, TensorType(dims[name], "int64" if name == "l" else "float32"), name in "ab") for name in names
    )
    by_name = dict(arguments)
    output = () if by_name.get("reduction") == 2 else LABELS if op == "cross_entropy_loss" else FLAT
    if op == "cosine_similarity":
        output = FLAT[1:] if by_name["dim"] == 0 else FLAT[:1]
    node = Node("out", op, arguments, (TensorType(output, "float32"),), differentiable=True)
    return Body("Case", inputs, (), (), (node,), ("out",))


@pytest.mark.parametrize(("op", "arguments"), LOSSES, ids=str)
def test_loss(op: str, arguments: Arguments) -> None:
    body = loss_of(op, arguments)
    assert predicted(body) == peaks_by_torch(body, 1)


@pytest.mark.parametrize(("op", "arguments"), [case for case in LOSSES if case[0] != "cosine_similarity"], ids=str)
def test_what_a_loss_keeps(op: str, arguments: Arguments) -> None:
    body = loss_of(op, arguments)
    assert saved_bytes(localise(body, None, 1)) == saved_by_torch(body, 1)[0]


def attention(
    dtype: str, dropout: float, causal: bool, heads: int, *, transposed: bool, masked: bool = False, batch: int = 2
) -> Body:
    """Four heads of the query on as many or fewer of the keys: grouped where it is two, broadcast where it is one."""
    shape = {"q": (batch, 4, 16, 8), "k": (batch, heads, 16, 8), "v": (batch, heads, 16, 8)}
    lying = {name: (b, s, h, d) if transposed else (b, h, s, d) for name, (b, h, s, d) in shape.items()}
    inputs = [BodyValue(name, TensorType(sizes, dtype), True) for name, sizes in lying.items()]
    if masked:
        inputs.append(BodyValue("m", TensorType((16, 16), "bool"), False))
    turned = tuple(
        Node(f"{name}t", "transpose.int", (("self", Ref(name)), ("dim0", 1), ("dim1", 2)), (TensorType(sizes, dtype),),
             differentiable=True)
        for name, sizes in shape.items() if transposed
    )
    names = [f"{name}t" if transposed else name for name in shape]
    arguments: Arguments = (
        *zip(("query", "key", "value"), map(Ref, names), strict=True), ("attn_mask", Ref("m") if masked else None),
        ("dropout_p", dropout), ("is_causal", causal), ("scale", None), ("enable_gqa", heads == 2),
    )
    node = Node("o", "scaled_dot_product_attention", arguments, (TensorType(shape["q"], dtype),), differentiable=True)
    return Body("Case", tuple(inputs), (), (), (*turned, node), ("o",))


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_attention(dtype: str, dropout: float, causal: bool, heads: int, transposed: bool) -> None:
    flash_attention_keeps(dtype if not dropout else "")
    body = attention(dtype, dropout, causal, heads, transposed=transposed, batch=1 if causal else 2)
    assert predicted(body) == peaks_by_torch(body, 1)
    assert saved_bytes(localise(body, None, 1)) == saved_by_torch(body, 1)[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_attention_under_a_mask_and_dropout(dtype: str) -> None:
    body = attention(dtype, 0.1, False, 4, transposed=True, masked=True)
    assert predicted(body) == peaks_by_torch(body, 1)


EINSUMS = {
    "btd,dk->btk": ((2, 16, 32), (32, 8), (2, 16, 8)), "btd,dhk->bhtk": ((2, 16, 32), (32, 4, 8), (2, 4, 16, 8)),
    "bthk,bshk->bhts": ((2, 16, 4, 8), (2, 16, 4, 8), (2, 4, 16, 16)),
    "bhts,bshk->bthk": ((2, 4, 16, 16), (2, 16, 4, 8), (2, 16, 4, 8)),
    "bhtk,bhsk->bhts": ((2, 4, 16, 8), (2, 4, 16, 8), (2, 4, 16, 16)),
    "bhtk,hkd->btd": ((2, 4, 16, 8), (4, 8, 32), (2, 16, 32)), "ij,kj->ki": ((16, 32), (8, 32), (8, 16)),
    "bte,btd->bed": ((2, 16, 4), (2, 16, 32), (2, 4, 32)),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("equation", EINSUMS)
def test_einsum(equation: str, dtype: str) -> None:
    first, second, output = EINSUMS[equation]
    inputs = tuple(BodyValue(name, TensorType(shape, dtype), True) for name, shape in zip("ab", (first, second), strict=True))
    arguments: Arguments = (("equation", equation), ("tensors", (Ref("a"), Ref("b"))), ("path", None))
    node = Node("out", "einsum", arguments, (TensorType(output, dtype),), differentiable=True)
    body = Body("Case", inputs, (), (), (node,), ("out",))
    assert saved_bytes(localise(body, None, 1)) == saved_by_torch(body, 1)[0]
    assert predicted(body) == peaks_by_torch(body, 1)


COMPOSED = [
    (0, 0.0, "l", None), (0, 0.0, "l", "p"), (2, 0.0, "l", "p"), (0, MOVED, "l", None), (2, MOVED, "l", None),
    (0, 0.0, "t", None), (0, MOVED, "t", None), (2, MOVED, "t", None), (0, 0.0, "t", "p"), (2, MOVED, "t", "p"),
    (0, MOVED, "l", "p"), (2, MOVED, "l", "p"),
]


@pytest.mark.parametrize(("how", "smoothing", "target", "weight"), COMPOSED, ids=str)
def test_cross_entropy_of_half_precision_casts_its_logits(how: int, smoothing: float, target: str, weight: str | None) -> None:
    """As the program does (codegen/expressions.py) wherever it is no plain sum: the loss is of float32 as well."""
    dims: dict[str, tuple[tuple[int, ...], str]] = {
        "a": (FLAT, "bfloat16"), "t": (FLAT, "bfloat16"), "l": (LABELS, "int64"), "p": (FLAT[1:], "bfloat16"),
    }
    read = ["a", target, *([weight] if weight else [])]
    inputs = tuple(BodyValue(name, TensorType(*dims[name]), name == "a") for name in read)
    casts = tuple(
        Node(f"wide_{name}", "to.dtype", (("self", Ref(name)), ("dtype", Dtype("float32"))),
             (TensorType(dims[name][0], "float32"),), differentiable=name == "a")
        for name in read if name not in "tl"
    )

    def loss(prefix: str, dtype: str) -> Node:
        arguments: Arguments = (
            ("self", Ref(f"{prefix}a")), ("target", Ref(target)), ("weight", Ref(f"{prefix}{weight}") if weight else None),
            ("reduction", how), ("ignore_index", -100), ("label_smoothing", smoothing),
        )
        return Node("out", "cross_entropy_loss", arguments, (TensorType(() if how else LABELS, dtype),), differentiable=True)

    said = Body("Case", inputs, (), (), (loss("", "bfloat16"),), ("out",))
    done = Body("Case", inputs, (), (), (*casts, loss("wide_", "float32")), ("out",))
    held = peaks_by_torch(done, 1)
    cast = 4 * FLAT[1] if weight else 0  # The oracle's variable of the weights lives on; the program has none.
    assert predicted(said) == Passes(held.forward, held.backward - cast)
    assert saved_bytes(localise(said, None, 1)) == saved_by_torch(done, 1)[0]


def test_what_is_made_of_a_loss_of_half_precision_is_float32() -> None:
    rows, values = TensorType(LABELS, "bfloat16"), {"a": TensorType(FLAT, "bfloat16"), "l": TensorType(LABELS, "int64")}
    inputs = tuple(BodyValue(name, type_, name == "a") for name, type_ in {**values, "m": rows}.items())
    loss: Arguments = (
        ("self", Ref("a")), ("target", Ref("l")), ("weight", None), ("reduction", 0), ("ignore_index", -100),
        ("label_smoothing", 0.0),
    )
    nodes = (
        Node("loss", "cross_entropy_loss", loss, (rows,), differentiable=True),
        Node("masked", "mul.Tensor", (("self", Ref("loss")), ("other", Ref("m"))), (rows,), differentiable=True),
        Node("total", "sum", (("self", Ref("masked")), ("dtype", None)), (TensorType((), "bfloat16"),), differentiable=True),
        Node("scaled", "mul.Tensor", (("self", Ref("m")), ("other", Ref("total"))), (rows,), differentiable=True),
    )
    types = localise(Body("Case", inputs, (), (), nodes, ("scaled",)), None, 1).types
    assert {name: types[name].dtype for name in ("loss", "masked", "total", "scaled")} == {
        "loss": "float32", "masked": "float32", "total": "float32", "scaled": "bfloat16",
    }


SEVERAL: list[tuple[str, Arguments, tuple[int, ...], tuple[str, str]]] = [
    ("max.dim", (("self", Ref("a")), ("dim", -1), ("keepdim", False)), ROWS, ("float32", "int64")),
    ("sort", (("self", Ref("a")), ("dim", -1), ("descending", False)), S, ("float32", "int64")),
    ("topk", (("self", Ref("a")), ("k", 4), ("dim", -1)), (2, 16, 4), ("float32", "int64")),
    ("cummax", (("self", Ref("a")), ("dim", 1)), S, ("float32", "int64")),
]


@pytest.mark.parametrize("case", SEVERAL, ids=lambda case: case[0])
def test_the_first_of_two_results(case: tuple[str, Arguments, tuple[int, ...], tuple[str, str]]) -> None:
    op, arguments, shape, dtypes = case
    types = tuple(TensorType(shape, dtype) for dtype in dtypes)
    nodes = (
        Node("both", op, arguments, types, differentiable=True),
        Node("out", "getitem", (("self", Ref("both")), ("index", 0)), types[:1], differentiable=True),
    )
    body = Body("Case", (BodyValue("a", TensorType(S, "float32"), True),), (), (), nodes, ("out",))
    assert predicted(body).backward == peaks_by_torch(body, 1).backward


def test_zeros_stand_for_a_part_that_nothing_reads() -> None:
    half = TensorType((2, 16, 16), "float32")
    nodes = (
        Node("parts", "chunk", (("self", Ref("a")), ("chunks", 2), ("dim", -1)), (half, half), differentiable=True),
        Node("out", "getitem", (("self", Ref("parts")), ("index", 0)), (half,), differentiable=True),
    )
    body = Body("Case", (BodyValue("a", TensorType(S, "float32"), True),), (), (), nodes, ("out",))
    assert predicted(body) == peaks_by_torch(body, 1)
