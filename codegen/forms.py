"""How torch's operations are written by hand: a table from operation to readable call.

An operation without a form, or with an argument that its form does not show, is written as ``torch.ops.aten.<op>(...)``,
which is always right.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.program import LocalArgument

INFINITE_END = 2**63 - 1
ANY = "any value"
"""In ``Form.hidden``: the argument has no effect on the result."""


@dataclass(frozen=True, slots=True)
class Form:
    """``text(positional..., keyword=...)``. A method is called on its first positional argument.

    ``keywords``: (schema name, Python keyword, default); one that equals its default is left out. ``star``: the last
    positional argument, a list, is spread. ``hidden``: arguments that are not shown while they hold this value.
    ``device``: the operation makes a tensor from nothing and needs to be told where.
    """

    text: str
    positional: tuple[str, ...]
    keywords: tuple[tuple[str, str, LocalArgument], ...] = ()
    hidden: tuple[tuple[str, LocalArgument], ...] = ()
    method: bool = False
    star: bool = False
    device: bool = False


def _method(text: str, *positional: str, star: bool = False, **keywords: LocalArgument) -> Form:
    return Form(text, ("self", *positional), tuple((k, k, v) for k, v in keywords.items()), method=True, star=star)


def _function(text: str, *positional: str, **keywords: LocalArgument) -> Form:
    return Form(text, positional, tuple((k, k, v) for k, v in keywords.items()))


def _made(text: str, *positional: str, **keywords: LocalArgument) -> Form:
    return Form(text, positional, tuple((k, k, v) for k, v in keywords.items()), device=True)


_UNARY = ("abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "exp", "exp2", "log", "log2", "log10", "log1p", "expm1",
          "sqrt", "rsqrt", "sin", "sinh", "cos", "cosh", "tan", "tanh", "sigmoid", "erf", "erfc", "square", "reciprocal",
          "floor", "ceil", "round", "trunc", "frac", "sign", "isnan", "isinf", "contiguous", "logical_not")
_ACTIVATIONS = ("silu", "relu", "relu6", "mish", "hardswish", "hardsigmoid", "selu")
_REDUCTIONS = ("sum.dim_IntList", "mean.dim")

FORMS: dict[str, Form] = {
    **{name: _method(name) for name in _UNARY},
    **{name: _function(f"F.{name}", "self") for name in _ACTIVATIONS},
    "clone": _method("clone"),
    "detach": _method("detach"),
    "reshape": _method("reshape", "shape", star=True),
    "view": _method("reshape", "size", star=True),
    "expand": Form("expand", ("self", "size"), hidden=(("implicit", False),), method=True, star=True),
    "expand_as": _method("expand_as", "other"),
    "permute": _method("permute", "dims", star=True),
    "transpose.int": _method("transpose", "dim0", "dim1"),
    "unsqueeze": _method("unsqueeze", "dim"),
    "squeeze.dim": _method("squeeze", "dim"),
    "flatten.using_ints": _method("flatten", "start_dim", "end_dim"),
    "unflatten.int": _method("unflatten", "dim", "sizes"),
    "repeat": _method("repeat", "repeats", star=True),
    "repeat_interleave.self_int": _method("repeat_interleave", "repeats", dim=None, output_size=None),
    "roll": _method("roll", "shifts", "dims"),
    "flip": _method("flip", "dims"),
    "tril": _method("tril", diagonal=0),
    "triu": _method("triu", diagonal=0),
    "chunk": _method("chunk", "chunks", dim=0),
    "split.Tensor": _method("split", "split_size", dim=0),
    "split_with_sizes": _method("split", "split_sizes", dim=0),
    "split.sizes": _method("split", "split_size", dim=0),
    "unbind.int": _method("unbind", dim=0),
    "type_as": _method("type_as", "other"),
    "to.dtype": Form("to", ("self", "dtype"), hidden=(("non_blocking", False), ("copy", False)), method=True),
    "masked_fill.Scalar": _method("masked_fill", "mask", "value"),
    "masked_fill.Tensor": _method("masked_fill", "mask", "value"),
    "gather": _method("gather", "dim", "index", sparse_grad=False),
    "index_select": _method("index_select", "dim", "index"),
    "cumsum": _method("cumsum", dim=None, dtype=None),
    "clamp": _method("clamp", min=None, max=None),
    "clamp_min": _method("clamp_min", "min"),
    "clamp_max": _method("clamp_max", "max"),
    "sum": _method("sum", dtype=None),
    "mean": _method("mean", dtype=None),
    **{name: _method(name.split(".")[0], "dim", keepdim=False, dtype=None) for name in _REDUCTIONS},
    "var.dim": _method("var", "dim", unbiased=True, keepdim=False),
    "std.dim": _method("std", "dim", unbiased=True, keepdim=False),
    "linalg_vector_norm": _function("torch.linalg.vector_norm", "self", ord=2, dim=None, keepdim=False, dtype=None),
    "logsumexp": _method("logsumexp", "dim", keepdim=False),
    "prod.dim_int": _method("prod", "dim", keepdim=False, dtype=None),
    "amax": _method("amax", "dim", keepdim=False),
    "amin": _method("amin", "dim", keepdim=False),
    "any": _method("any"),
    "all": _method("all"),
    "pow.Tensor_Scalar": _method("pow", "exponent"),
    "pow.Tensor_Tensor": _method("pow", "exponent"),
    "max.dim": _method("max", "dim", keepdim=False),
    "min.dim": _method("min", "dim", keepdim=False),
    "sort": _method("sort", dim=-1, descending=False),
    "histc": _method("histc", bins=100, min=0, max=0),
    "index_put": _method("index_put", "indices", "values", accumulate=False),
    "scatter.src": _method("scatter", "dim", "index", "src"),
    "topk": _method("topk", "k", dim=-1, largest=True, sorted=True),
    "baddbmm": _function("torch.baddbmm", "self", "batch1", "batch2", beta=1, alpha=1),
    "bmm": _function("torch.bmm", "self", "mat2"),
    "_grouped_mm": _function("F.grouped_mm", "self", "mat2", offs=None, bias=None, out_dtype=None),
    "einsum": Form("torch.einsum", ("equation", "tensors"), hidden=(("path", None),), star=True),
    "select_scatter": _method("select_scatter", "src", "dim", "index"),
    "view_as_complex": _function("torch.view_as_complex", "self"),
    "view_as_real": _function("torch.view_as_real", "self"),
    "cat": _function("torch.cat", "tensors", dim=0),
    "concat": _function("torch.cat", "tensors", dim=0),
    "stack": _function("torch.stack", "tensors", dim=0),
    "where.self": _function("torch.where", "condition", "self", "other"),
    "where.ScalarOther": _function("torch.where", "condition", "self", "other"),
    "where.ScalarSelf": _function("torch.where", "condition", "self", "other"),
    "where.Scalar": _function("torch.where", "condition", "self", "other"),
    "outer": _function("torch.outer", "self", "vec2"),
    "addcmul": _function("torch.addcmul", "self", "tensor1", "tensor2", value=1),
    "lerp.Scalar": _method("lerp", "end", "weight"),
    "lerp.Tensor": _method("lerp", "end", "weight"),
    "maximum": _function("torch.maximum", "self", "other"),
    "minimum": _function("torch.minimum", "self", "other"),
    "full_like": _function("torch.full_like", "self", "fill_value", dtype=None),
    "empty_like": _function("torch.empty_like", "self", dtype=None),
    "zeros_like": _function("torch.zeros_like", "self", dtype=None),
    "ones_like": _function("torch.ones_like", "self", dtype=None),
    "arange": _made("torch.arange", "end", dtype=None),
    "arange.start": _made("torch.arange", "start", "end", dtype=None),
    "arange.start_step": Form("torch.arange", ("start", "end", "step"), (("dtype", "dtype", None),), device=True),
    "full": _made("torch.full", "size", "fill_value", dtype=None),
    "empty.memory_format": _made("torch.empty", "size", dtype=None),
    "zeros": _made("torch.zeros", "size", dtype=None),
    "ones": _made("torch.ones", "size", dtype=None),
    "scalar_tensor": _made("torch.scalar_tensor", "s", dtype=None),
    "linear": _function("F.linear", "input", "weight", bias=None),
    "layer_norm": Form(
        "F.layer_norm", ("input", "normalized_shape"),
        (("weight", "weight", None), ("bias", "bias", None), ("eps", "eps", 1e-5)), hidden=(("cudnn_enable", ANY),),
    ),
    "rms_norm": _function("F.rms_norm", "input", "normalized_shape", weight=None, eps=None),
    "group_norm": Form(
        "F.group_norm", ("input", "num_groups"),
        (("weight", "weight", None), ("bias", "bias", None), ("eps", "eps", 1e-5)), hidden=(("cudnn_enabled", ANY),),
    ),
    "gelu": _function("F.gelu", "self", approximate="none"),
    "elu": Form("F.elu", ("self",), (("alpha", "alpha", 1),), hidden=(("scale", 1), ("input_scale", 1))),
    "glu": _function("F.glu", "self", dim=-1),
    "log_sigmoid": _function("F.logsigmoid", "self"),
    "leaky_relu": _function("F.leaky_relu", "self", negative_slope=0.01),
    "softplus": _function("F.softplus", "self", beta=1, threshold=20),
    "softmax.int": _function("F.softmax", "self", dim=None, dtype=None),
    "log_softmax.int": _function("F.log_softmax", "self", dim=None, dtype=None),
    "embedding": Form(
        "F.embedding", ("indices", "weight"), (("padding_idx", "padding_idx", -1),),
        hidden=(("scale_grad_by_freq", False), ("sparse", False)),
    ),
    "scaled_dot_product_attention": Form(
        "F.scaled_dot_product_attention", ("query", "key", "value"),
        (("attn_mask", "attn_mask", None), ("dropout_p", "dropout_p", 0.0), ("is_causal", "is_causal", False),
         ("scale", "scale", None), ("enable_gqa", "enable_gqa", False)),
    ),
    "conv1d": Form(
        "F.conv1d", ("input", "weight"),
        (("bias", "bias", None), ("stride", "stride", (1,)), ("padding", "padding", (0,)),
         ("dilation", "dilation", (1,)), ("groups", "groups", 1)),
    ),
    "conv_transpose2d.input": Form(
        "F.conv_transpose2d", ("input", "weight"),
        (("bias", "bias", None), ("stride", "stride", (1, 1)), ("padding", "padding", (0, 0)),
         ("output_padding", "output_padding", (0, 0)), ("groups", "groups", 1), ("dilation", "dilation", (1, 1))),
    ),
    "conv2d": Form(
        "F.conv2d", ("input", "weight"),
        (("bias", "bias", None), ("stride", "stride", (1, 1)), ("padding", "padding", (0, 0)),
         ("dilation", "dilation", (1, 1)), ("groups", "groups", 1)),
    ),
}

BINARY: dict[str, tuple[str, int]] = {
    "add.Tensor": ("+", 5), "add.Scalar": ("+", 5), "sub.Tensor": ("-", 5), "sub.Scalar": ("-", 5),
    "mul.Tensor": ("*", 6), "mul.Scalar": ("*", 6), "div.Tensor": ("/", 6), "div.Scalar": ("/", 6),
    "floor_divide": ("//", 6), "floor_divide.Scalar": ("//", 6), "remainder.Scalar": ("%", 6),
    "remainder.Tensor": ("%", 6), "matmul": ("@", 6), "mm": ("@", 6),
    "eq.Tensor": ("==", 0), "eq.Scalar": ("==", 0), "ne.Tensor": ("!=", 0), "ne.Scalar": ("!=", 0),
    "lt.Tensor": ("<", 0), "lt.Scalar": ("<", 0), "le.Tensor": ("<=", 0), "le.Scalar": ("<=", 0),
    "gt.Tensor": (">", 0), "gt.Scalar": (">", 0), "ge.Tensor": (">=", 0), "ge.Scalar": (">=", 0),
    "__and__.Tensor": ("&", 3), "bitwise_and.Tensor": ("&", 3), "__or__.Tensor": ("|", 1), "bitwise_or.Tensor": ("|", 1),
}
"""Operators with their precedence. ``alpha`` other than 1 has no operator."""

COMPARISON, UNARY, ATOM = 0, 7, 10
