"""Every rule of the table, proved forward and backward: each strategy against the whole operation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from planner.ir.inlining import DRAWN
from planner.ir.placement import REPLICATE, shard
from planner.rules.pointwise import POINTWISE
from planner.rules.table import RULES
from tests.rules.nodes import Call, call, fixed, real, truths, whole_numbers
from tests.torch_versions import has_derivative

Case = Callable[[], Call]
F64 = torch.float64


def single(*shape: int) -> torch.Tensor:
    """In float32: torch has no grouped product in float64."""
    return real(*shape).detach().float().requires_grad_()


def complex_numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.complex128, requires_grad=True)


UNARY = [
    "abs", "asinh", "atan", "ceil", "celu", "cos", "cosh", "deg2rad", "elu", "erf", "erfc", "exp", "exp2", "expm1",
    "fix", "floor", "frac", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "i0", "isfinite", "isinf",
    "isnan", "isneginf", "isposinf", "leaky_relu", "log_sigmoid", "logical_not", "mish", "nan_to_num", "relu", "relu6",
    "round", "selu", "sgn", "sigmoid", "sign", "signbit", "silu", "sin", "sinc", "sinh", "softplus", "softshrink",
    "special_erf", "special_expit", "square", "tan", "tanh", "trunc", "neg", "negative", "positive", "clone",
    "contiguous", "detach", "full_like", "ones_like", "zeros_like", "angle", "digamma", "lift_fresh_copy", "alias",
]
POSITIVE = ["acosh", "lgamma", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "sqrt"]
UNIT = ["acos", "asin", "atanh", "erfinv", "logit"]
BINARY = [
    "add.Tensor", "sub.Tensor", "subtract.Tensor", "mul.Tensor", "multiply.Tensor", "div.Tensor", "divide.Tensor",
    "true_divide.Tensor", "atan2", "copysign.Tensor", "eq.Tensor", "ne.Tensor", "lt.Tensor", "le.Tensor", "gt.Tensor",
    "ge.Tensor", "fmax", "fmin", "fmod.Tensor", "remainder.Tensor", "hypot", "isclose", "logaddexp", "logaddexp2",
    "maximum", "minimum", "logical_and", "logical_or", "logical_xor", "rsub.Tensor", "ldexp.Tensor",
    "nextafter", "clamp_min.Tensor", "clamp_max.Tensor",
]
WHOLE = ["bitwise_and.Tensor", "bitwise_or.Tensor", "bitwise_xor.Tensor", "__and__.Tensor", "__or__.Tensor", "__xor__.Tensor",
         "bitwise_left_shift.Tensor", "bitwise_right_shift.Tensor"]
SCALAR = [
    "add.Scalar", "sub.Scalar", "mul.Scalar", "div.Scalar", "pow.Tensor_Scalar", "eq.Scalar", "ne.Scalar", "lt.Scalar",
    "le.Scalar", "gt.Scalar", "ge.Scalar", "fmod.Scalar", "remainder.Scalar", "rsub.Scalar",
    "clamp_min", "clamp_max", "subtract.Scalar", "multiply.Scalar", "divide.Scalar", "true_divide.Scalar",
]

POINTWISE_CASES: dict[str, Case] = {
    **{name: (lambda name=name: call(name, real(3, 5, 7), *((2.5,) if name == "full_like" else ()))) for name in UNARY},
    **{name: (lambda name=name: call(name, real(3, 5, 7, low=1.1))) for name in POSITIVE},
    **{name: (lambda name=name: call(name, real(3, 5, 7, low=0.01).detach().mul(0.9).requires_grad_())) for name in UNIT},
    **{name: (lambda name=name: call(name, real(3, 5, 7), real(5, 1, low=0.5))) for name in BINARY
       if name not in ("ldexp.Tensor", "nextafter")},
    **{f"{name} of a constant": (lambda name=name: call(name, real(3, 5, 7), fixed(3, 1, 7))) for name in BINARY
       if name != "ldexp.Tensor"},
    **{name: (lambda name=name: call(name, whole_numbers(6, 3, 5, 7), whole_numbers(6, 5, 1))) for name in WHOLE},
    **{name: (lambda name=name: call(name, real(3, 5, 7, low=0.5), 2)) for name in SCALAR},
    "ldexp.Tensor": lambda: call("ldexp.Tensor", real(3, 5, 7), whole_numbers(4, 5, 1)),
    "floor_divide": lambda: call("floor_divide", fixed(4, 6), fixed(6)),
    "floor_divide.Scalar": lambda: call("floor_divide.Scalar", fixed(4, 6), 2),
    "heaviside": lambda: call("heaviside", fixed(4, 6), fixed(6)),
    "bitwise_not": lambda: call("bitwise_not", whole_numbers(6, 3, 5, 7)),
    "add literal": lambda: call("add.Tensor", real(4, 6), 1.0),
    "add zero": lambda: call("add.Tensor", real(4, 6), 0),
    "add alpha": lambda: call("add.Tensor", real(4, 6), real(6), alpha=3),
    "mul literal": lambda: call("mul.Tensor", real(4, 6), 3.0),
    "mul itself": lambda: call("mul.Tensor", real(4, 6), real(4, 6)),
    "div floor": lambda: call("div.Tensor_mode", real(4, 6), real(4, 6, low=1.0), rounding_mode="floor"),
    "pow.Tensor_Tensor": lambda: call("pow.Tensor_Tensor", real(4, 6, low=0.5), real(6)),
    "pow.Scalar": lambda: call("pow.Scalar", 2.0, real(4, 6)),
    "clamp": lambda: call("clamp", real(4, 6), -0.5, 0.5),
    "clip": lambda: call("clip", real(4, 6), -0.5, 0.5),
    "clamp.Tensor": lambda: call("clamp.Tensor", real(4, 6), fixed(6), real(4, 1)),
    "threshold": lambda: call("threshold", real(4, 6), 0.1, 0.2),
    "addcmul": lambda: call("addcmul", real(4, 6), real(6), real(4, 1)),
    "addcdiv": lambda: call("addcdiv", real(4, 6), real(6), real(4, 1, low=1.0)),
    "lerp.Tensor": lambda: call("lerp.Tensor", real(4, 6), real(6), real(4, 1)),
    "lerp.Scalar": lambda: call("lerp.Scalar", real(4, 6), real(6), 0.3),
    "xlogy.Tensor": lambda: call("xlogy.Tensor", real(4, 6), real(6, low=0.5)),
    "where.self": lambda: call("where.self", truths(4, 6), real(4, 6), real(6)),
    "where.self of a constant": lambda: call("where.self", truths(4, 1), real(4, 6), fixed(6)),
    "where.ScalarOther": lambda: call("where.ScalarOther", truths(4, 6), real(4, 6), 0.0),
    "where.ScalarSelf": lambda: call("where.ScalarSelf", truths(4, 6), 1.0, real(4, 6)),
    "masked_fill.Scalar": lambda: call("masked_fill.Scalar", real(3, 4, 6), truths(4, 1), 0),
    "masked_fill minus one": lambda: call("masked_fill.Scalar", real(3, 4, 6), truths(4, 1), -1.0),
    "masked_fill.Tensor": lambda: call("masked_fill.Tensor", real(3, 4, 6), truths(4, 1), real()),
    "to.dtype": lambda: call("to.dtype", real(4, 6), F64),
    "_to_copy": lambda: call("_to_copy", real(4, 6), dtype=F64),
    "to integers": lambda: call("to.dtype", real(4, 6), torch.int64),
    "type_as": lambda: call("type_as", real(4, 6), real(4, 6)),
    "type_as of another shape": lambda: call("type_as", real(4, 6), real(9)),
    "dropout": lambda: call("dropout", real(4, 6), 0.0, True),
}

NETWORK_CASES: dict[str, Case] = {
    "_grouped_mm": lambda: call("_grouped_mm", single(40, 48), single(3, 48, 48), offs=torch.tensor([7, 7, 40]).int()),
    "linear": lambda: call("linear", real(3, 5, 8), real(12, 8)),
    "linear bias": lambda: call("linear", real(3, 5, 8), real(12, 8), real(12)),
    "linear frozen": lambda: call("linear", real(5, 8), fixed(12, 8)),
    "linear rows": lambda: call("linear", real(8), real(12, 8)),
    "mm": lambda: call("mm", real(6, 8), real(8, 10)),
    "bmm": lambda: call("bmm", real(4, 6, 8), real(4, 8, 10)),
    "matmul": lambda: call("matmul", real(4, 1, 6, 8), real(5, 8, 10)),
    "matmul vector": lambda: call("matmul", real(4, 6, 8), real(8)),
    "matmul from the left": lambda: call("matmul", real(8), real(4, 8, 10)),
    "mv": lambda: call("mv", real(6, 8), real(8)),
    "dot": lambda: call("dot", real(8), real(8)),
    "addmm": lambda: call("addmm", real(10), real(6, 8), real(8, 10)),
    "baddbmm": lambda: call("baddbmm", real(4, 1, 10), real(4, 6, 8), real(4, 8, 10)),
    "outer": lambda: call("outer", real(6), real(8)),
    "ger": lambda: call("ger", real(6), real(8)),
    "einsum": lambda: call("einsum", "bqd,bkd->bqk", [real(4, 6, 8), real(4, 10, 8)]),
    "einsum of three": lambda: call("einsum", "ab,bc,d->ca", [real(4, 6), real(6, 8), real(5)]),
    "einsum implicit": lambda: call("einsum", "ba,bc", [real(4, 6), real(4, 8)]),
    "einsum diagonal": lambda: call("einsum", "aab->b", [real(4, 4, 6)]),
    "einsum one": lambda: call("einsum", "ab->", [real(4, 6)]),
    "attention": lambda: call("scaled_dot_product_attention", real(2, 4, 6, 8), real(2, 4, 5, 8), real(2, 4, 5, 10)),
    "attention causal": lambda: call("scaled_dot_product_attention", *(real(2, 4, 6, 8) for _ in "qkv"), is_causal=True),
    "attention mask": lambda: call(
        "scaled_dot_product_attention", *(real(2, 4, 6, 8) for _ in "qkv"),
        attn_mask=truths(6, 6) | torch.eye(6, dtype=torch.bool),
    ),
    "attention bias": lambda: call(
        "scaled_dot_product_attention", *(real(2, 4, 6, 8) for _ in "qkv"), attn_mask=real(1, 4, 6, 6)
    ),
    "attention one bias": lambda: call(
        "scaled_dot_product_attention", *(real(2, 4, 6, 8) for _ in "qkv"), attn_mask=real(2, 1, 6, 6)
    ),
    "attention groups": lambda: call(
        "scaled_dot_product_attention", real(2, 12, 6, 8), real(2, 3, 6, 8), real(2, 3, 6, 8), enable_gqa=True
    ),
    "attention groups, bias": lambda: call(
        "scaled_dot_product_attention", real(2, 12, 6, 8), real(2, 3, 6, 8), real(2, 3, 6, 8), attn_mask=real(12, 6, 6),
        enable_gqa=True,
    ),
    "attention without heads": lambda: call("scaled_dot_product_attention", real(4, 6, 8), real(4, 5, 8), real(4, 5, 8)),
    "layer_norm": lambda: call("layer_norm", real(4, 6, 8), [8], real(8), real(8)),
    "layer_norm of two dims": lambda: call("layer_norm", real(4, 6, 8), [6, 8], real(6, 8), None),
    "native_layer_norm": lambda: call("native_layer_norm", real(4, 6, 8), [8], real(8), real(8), 1e-5),
    "rms_norm": lambda: call("rms_norm", real(4, 6, 8), [8], real(8), 1e-5),
    "rms_norm bare": lambda: call("rms_norm", real(4, 6, 8), [8]),
    "_fused_rms_norm": lambda: call("_fused_rms_norm", real(4, 6, 8), [8], real(8), 1e-5),
    "group_norm": lambda: call("group_norm", real(4, 12, 5), 6, real(12), real(12)),
    "softmax.int": lambda: call("softmax.int", real(4, 6, 8), -1),
    "log_softmax.int": lambda: call("log_softmax.int", real(4, 6, 8), 1),
    "_softmax": lambda: call("_softmax", real(4, 6, 8), -1, False),
    "_log_softmax": lambda: call("_log_softmax", real(4, 6, 8), -1, False),
    "conv1d": lambda: call("conv1d", real(4, 6, 9), real(8, 6, 3), real(8)),
    "conv1d bare": lambda: call("conv1d", real(4, 6, 9), real(8, 6, 3)),
    "conv1d groups": lambda: call("conv1d", real(4, 12, 9), real(18, 2, 3), real(18), groups=6),
    "conv1d depthwise": lambda: call("conv1d", real(4, 7, 9), real(7, 1, 3), real(7), padding=[2], groups=7),
    "conv2d": lambda: call("conv2d", real(4, 6, 9, 7), real(8, 6, 3, 3), real(8), stride=[2, 2]),
    "conv3d": lambda: call("conv3d", real(4, 6, 3, 4, 5), real(8, 6, 2, 2, 2)),
    "convolution": lambda: call("convolution", real(4, 6, 9), real(8, 3, 3), None, [1], [1], [1], False, [0], 2),
    "embedding": lambda: call("embedding", real(10, 6), whole_numbers(10, 4, 5)),
    "embedding padded": lambda: call("embedding", real(10, 6), whole_numbers(10, 4, 5), 3),
    "cross_entropy_loss": lambda: call("cross_entropy_loss", real(6, 11), whole_numbers(11, 6), None, 2),
    "cross_entropy_loss ignored": lambda: call("cross_entropy_loss", real(4, 11), torch.tensor([3, -100, 10, 0]), None, 2),
    "cross_entropy_loss mean": lambda: call("cross_entropy_loss", real(6, 11), whole_numbers(11, 6)),
    "cross_entropy_loss each": lambda: call("cross_entropy_loss", real(6, 11), whole_numbers(11, 6), None, 0),
    "cross_entropy_loss weighted": lambda: call("cross_entropy_loss", real(6, 11), whole_numbers(11, 6), fixed(11), 2),
    "cross_entropy_loss places": lambda: call("cross_entropy_loss", real(4, 11, 6), whole_numbers(11, 4, 6), None, 2),
    "cross_entropy_loss smooth": lambda: call(
        "cross_entropy_loss", real(6, 11), whole_numbers(11, 6), None, 2, label_smoothing=0.1
    ),
    "nll_loss": lambda: call("nll_loss", real(6, 11), whole_numbers(11, 6), None, 2),
    "nll_loss_nd": lambda: call("nll_loss_nd", real(4, 11, 6), whole_numbers(11, 4, 6), None, 2),
}

VIEW_CASES: dict[str, Case] = {
    "view_as_complex": lambda: call("view_as_complex", real(4, 6, 2)),
    "view_as_real": lambda: call("view_as_real", torch.view_as_complex(real(4, 6, 2)).detach().requires_grad_()),
    "select_scatter": lambda: call("select_scatter", real(4, 6, 5), real(4, 5), 1, 2),
    "select_scatter of a constant": lambda: call("select_scatter", fixed(4, 6), real(6), 0, -1),
    "slice_scatter": lambda: call("slice_scatter", real(4, 6, 5), real(4, 3, 5), 1, 2, 5),
    "reshape": lambda: call("reshape", real(4, 6, 15), [4, 6, 3, 5]),
    "reshape inferred": lambda: call("reshape", real(4, 6, 30), [4, 6, -1, 5]),
    "reshape merged": lambda: call("reshape", real(4, 6, 5), [24, 5]),
    "reshape fused": lambda: call("reshape", real(2, 36), [2, 3, 4, 3]),
    "reshape fused back": lambda: call("reshape", real(2, 3, 4, 3), [2, 36]),
    "reshape crossed": lambda: call("reshape", real(4, 6), [8, 3]),
    "reshape partly crossed": lambda: call("reshape", real(6, 4, 5), [8, 3, 5]),
    "view": lambda: call("view", real(4, 6), [2, 2, 6]),
    "view.dtype": lambda: call("view.dtype", fixed(4, 6), torch.int64),
    "view.dtype of two": lambda: call("view.dtype", fixed(4, 6), torch.int32),
    "_unsafe_view": lambda: call("_unsafe_view", real(4, 6), [24]),
    "view_as": lambda: call("view_as", real(4, 6), fixed(24)),
    "reshape_as": lambda: call("reshape_as", real(4, 6), fixed(24)),
    "flatten.using_ints": lambda: call("flatten.using_ints", real(4, 6, 5), 0, 1),
    "ravel": lambda: call("ravel", real(4, 6)),
    "unflatten.int": lambda: call("unflatten.int", real(4, 6, 12), -1, [4, 3]),
    "unflatten.int first": lambda: call("unflatten.int", real(12, 7), 0, [4, -1]),
    "unflatten.int six": lambda: call("unflatten.int", real(4, 30), 1, [6, 5]),
    "squeeze": lambda: call("squeeze", real(4, 1, 6, 1)),
    "squeeze.dim": lambda: call("squeeze.dim", real(4, 1, 6), 1),
    "squeeze.dims": lambda: call("squeeze.dims", real(4, 1, 6, 1), [1, 3]),
    "unsqueeze": lambda: call("unsqueeze", real(4, 6), -1),
    "transpose.int": lambda: call("transpose.int", real(4, 6, 5), 1, -1),
    "permute": lambda: call("permute", real(4, 6, 5), [2, 0, -2]),
    "expand": lambda: call("expand", real(4, 1, 6), [3, 4, 5, -1]),
    "expand new": lambda: call("expand", real(6), [5, 6]),
    "expand_as": lambda: call("expand_as", real(4, 1), fixed(4, 6)),
    "broadcast_to": lambda: call("broadcast_to", real(4, 1), [4, 6]),
    "repeat": lambda: call("repeat", real(4, 6), [3, 1, 2]),
    "repeat_interleave.self_int": lambda: call("repeat_interleave.self_int", real(4, 6), 3, 1),
    "repeat_interleave sized": lambda: call("repeat_interleave.self_int", real(4, 6), 3, 1, output_size=18),
    "repeat_interleave flat": lambda: call("repeat_interleave.self_int", real(4, 6), 3),
    "split.Tensor": lambda: call("split.Tensor", real(4, 18), 6, 1),
    "split.Tensor uneven": lambda: call("split.Tensor", real(4, 16), 6, -1),
    "split.sizes": lambda: call("split.sizes", real(4, 16), [8, 4, 4], 1),
    "split_with_sizes": lambda: call("split_with_sizes", real(4, 15), [7, 5, 3], 1),
    "chunk": lambda: call("chunk", real(4, 14), 2, 1),
    "chunk uneven": lambda: call("chunk", real(4, 14), 4, 1),
    "unbind.int": lambda: call("unbind.int", real(3, 4, 6), 0),
    "select.int": lambda: call("select.int", real(4, 6), 1, -2),
    "slice.Tensor": lambda: call("slice.Tensor", real(4, 15), 1, 5, 10),
    "slice.Tensor end": lambda: call("slice.Tensor", real(4, 15), 1, -7, 9223372036854775807),
    "slice.Tensor start": lambda: call("slice.Tensor", real(4, 15), 1, None, 7),
    "slice.Tensor whole": lambda: call("slice.Tensor", real(4, 15), 1, 0, 9223372036854775807),
    "slice.Tensor step": lambda: call("slice.Tensor", real(4, 15), 1, 0, 15, 2),
    "narrow": lambda: call("narrow", real(4, 15), 1, 4, 7),
    "narrow whole": lambda: call("narrow", real(4, 15), 1, 0, 15),
    "narrow whole from the end": lambda: call("narrow", real(4, 15), 1, -15, 15),
    "cat": lambda: call("cat", [real(4, 6), real(4, 5), real(4, 8)], 1),
    "concat": lambda: call("concat", [real(4, 6), fixed(4, 5)], -1),
    "concatenate": lambda: call("concatenate", [real(4, 6), real(4, 6)], 0),
    "stack": lambda: call("stack", [real(4, 6), real(4, 6)], 1),
    "flip": lambda: call("flip", real(4, 6, 5), [1]),
    "roll": lambda: call("roll", real(4, 6, 5), [2], [1]),
    "roll flat": lambda: call("roll", real(4, 6), [2]),
    "tril": lambda: call("tril", real(4, 6, 5)),
    "triu": lambda: call("triu", real(4, 6, 5), 1),
    "constant_pad_nd": lambda: call("constant_pad_nd", real(4, 6, 5), [1, 2]),
    "constant_pad_nd one": lambda: call("constant_pad_nd", real(4, 6, 5), [0, 0, 1, 2], 1.0),
    "pad": lambda: call("pad", real(4, 6, 5), [1, 2]),
    "pad reflect": lambda: call("pad", real(4, 6, 5), [1, 2], "reflect"),
}

REDUCTION_CASES: dict[str, Case] = {
    **{f"{name}.dim": (lambda name=name, dims=dims: call(name, real(4, 6, 8), dims)) for name, dims in (
        ("sum.dim_IntList", [1]), ("mean.dim", [1, 2]), ("amax", [1]), ("amin", [-1]), ("var.dim", [1]), ("std.dim", [1]),
        ("var_mean.dim", [1]), ("std_mean.dim", [1]), ("logsumexp", [2]), ("prod.dim_int", 1), ("max.dim", 1),
        ("min.dim", 1), ("median.dim", 1), ("argmax", 1), ("argmin", 1), ("all.dim", 1), ("any.dim", 1),
        ("count_nonzero.dim_IntList", [1]),
    )} , **{f"{name} of all": (lambda name=name: call(name, real(4, 6, 8))) for name in (
        "sum", "mean", "amax", "max", "min", "prod", "var", "std", "argmax", "all", "any", "linalg_vector_norm", "norm.Scalar",
    )},
    "sum kept": lambda: call("sum.dim_IntList", real(4, 6, 8), [0, 2], True),
    "sum of whole numbers": lambda: call("sum.dim_IntList", whole_numbers(9, 4, 6), [1]),
    "mean kept": lambda: call("mean.dim", real(4, 6, 8), [-1], True),
    "linalg_vector_norm": lambda: call("linalg_vector_norm", real(4, 6, 8), 2, [1]),
    "norm.ScalarOpt_dim": lambda: call("norm.ScalarOpt_dim", real(4, 6, 8), 2, [1]),
    "aminmax": lambda: call("aminmax", real(4, 6, 8), dim=1),
    "cumsum": lambda: call("cumsum", real(4, 6, 8), 1),
    "cumprod": lambda: call("cumprod", real(4, 6, 8), 1),
    "logcumsumexp": lambda: call("logcumsumexp", real(4, 6, 8), 1),
    "cummax": lambda: call("cummax", real(4, 6, 8), 1),
    "cummin": lambda: call("cummin", real(4, 6, 8), 1),
    **{name: (lambda name=name: call(name, real(4, 6, 8), None, 1)) for name in (
        "fft_fft", "fft_ifft", "fft_rfft", "fft_ihfft", "fft_hfft", "fft_irfft",
    )},
    **{name: (lambda name=name: call(name, real(4, 6, 8), None, [0, 2])) for name in (
        "fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2", "fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn",
    )},
    "fft_rfft of more": lambda: call("fft_rfft", real(4, 6, 8), 9, -1),
    "fft_irfft of complex numbers": lambda: call("fft_irfft", complex_numbers(4, 6, 8), 8, 0),
    "topk": lambda: call("topk", real(4, 6, 8), 3),
    "sort": lambda: call("sort", real(4, 6, 8), 1),
    "argsort": lambda: call("argsort", real(4, 6, 8), 1),
    "gather": lambda: call("gather", real(4, 6, 8), 1, whole_numbers(6, 4, 9, 8)),
    "gather part": lambda: call("gather", real(4, 6, 8), 1, whole_numbers(6, 3, 9, 8)),
    "index_select": lambda: call("index_select", real(4, 6, 8), 1, whole_numbers(6, 9)),
    "index.Tensor": lambda: call("index.Tensor", real(4, 6, 8), [None, whole_numbers(6, 9)]),
    "index.Tensor pair": lambda: call("index.Tensor", real(4, 6, 8), [whole_numbers(4, 9, 1), whole_numbers(6, 5)]),
    "index.Tensor apart": lambda: call("index.Tensor", real(4, 6, 8), [whole_numbers(4, 9), None, whole_numbers(8, 9)]),
    "scatter.src": lambda: call("scatter.src", real(4, 6, 8), 1, torch.arange(6).expand(4, 6)[..., None].repeat(1, 1, 8),
                                real(4, 6, 8)),
    "scatter.value": lambda: call("scatter.value", real(4, 6, 8), 1, whole_numbers(6, 4, 3, 8), 0),
    "scatter_add": lambda: call("scatter_add", real(4, 6, 8), 1, whole_numbers(6, 4, 9, 8), real(4, 9, 8)),
    "scatter_add part": lambda: call("scatter_add", real(4, 6, 8), 1, whole_numbers(6, 3, 9, 8), real(3, 9, 8)),
    "one_hot": lambda: call("one_hot", whole_numbers(5, 4, 6), 5),
    "full": lambda: call("full", [4, 6], 2.0),
    "zeros": lambda: call("zeros", [4, 6]),
    "ones": lambda: call("ones", [4, 7]),
    "arange": lambda: call("arange", 6),
    "arange.start": lambda: call("arange.start", 2, 9),
    "scalar_tensor": lambda: call("scalar_tensor", 2.0),
    "eye": lambda: call("eye", 6),
    "linspace": lambda: call("linspace", 0.0, 1.0, 6),
    "new_full": lambda: call("new_full", fixed(3), [4, 6], 2.0),
    "new_zeros": lambda: call("new_zeros", fixed(3), [4, 6]),
    "new_ones": lambda: call("new_ones", fixed(3), [4, 6]),
}

CASES = {**POINTWISE_CASES, **NETWORK_CASES, **VIEW_CASES, **REDUCTION_CASES}


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_every_strategy_is_the_whole_operation(name: str, degree: int) -> None:
    has_derivative(name)
    torch.manual_seed(0)
    CASES[name]().check(degree)


@pytest.mark.parametrize("base", sorted(DRAWN))
def test_draws_are_split_as_what_they_are_like(base: str) -> None:
    """Whole on every rank, or along a dim of it; never as a part of a sum."""
    made = call("randint_like.low_dtype", real(4, 6), 0, 3) if base == "randint_like" else call(base, real(4, 6))
    found = made.strategies(2)
    assert all(strategy.operands == strategy.outputs and not (strategy.forward or strategy.backward) for strategy in found)
    assert {shard(0), shard(1), REPLICATE} <= {strategy.outputs[0] for strategy in found}
    assert {strategy.outputs[0].state for strategy in found} <= {"replicate", "shard", "shared"}


def test_every_rule_has_a_case() -> None:
    without_values = {"empty", "empty_like", "new_empty", "getitem", *DRAWN}
    torch.manual_seed(0)
    proved = {make().node.base for make in CASES.values()}
    assert set(RULES) - proved == without_values
    assert set(RULES) >= POINTWISE
