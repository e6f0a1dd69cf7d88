"""What autograd keeps of an operation for its backward pass, by the derivative formulas of torch 2.13 on CPU.

Sources: tools/autograd/derivatives.yaml for single operations, the composite kernels in aten/src/ATen/native for
``linear`` and ``matmul`` (fold, then ``mm``), ``rms_norm`` (float32 inside for half precisions), ``cross_entropy_loss``
(``log_softmax``, ``nll_loss``), ``dropout`` (a mask in the operand's dtype) and attention without a fused kernel. The
tests hold every formula to ``torch.autograd.graph.saved_tensors_hooks`` on fake CPU tensors. Of a node that an
accelerator's kernel runs (:mod:`planner.ir.fused`) it is what that kernel keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.ir.body import Node
from planner.ir.halves import sums_half_logits
from planner.ir.placement import OpStrategy
from planner.ir.types import DTYPE_BYTES, HALF
from planner.ops.attention import fused_attention
from planner.ops.call import Call
from planner.ops.einsums import batched_product
from planner.ops.families import (
    CONVOLUTIONS,
    CREATIONS,
    GROUPED_PRODUCT,
    POINTWISE,
    RECURRENT,
    TRANSPOSED_CONVOLUTIONS,
    VIEW_FAMILY,
)
from planner.ops.fourier import FOURIER, kept_copy
from planner.ops.layout import Layout, broadcast_sizes, computed, reshaped


@dataclass(frozen=True, slots=True)
class Saved:
    """Indices into the node's operands and outputs that autograd keeps, and the bytes of tensors that are neither."""

    operands: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    extra_bytes: int = 0


_Rule = Callable[[Call], Saved]

_NOTHING = Saved()
_KEEP_OUTPUT = frozenset({
    "exp", "exp2", "expm1", "log_softmax", "_log_softmax", "polar", "reciprocal", "relu", "rsqrt", "sigmoid", "softmax",
    "_softmax", "sqrt", "tan", "tanh",
})
_KEEP_INPUT = frozenset({
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "avg_pool2d", "celu", "cos",
    "cosh", "digamma", "elu", "erf", "erfc", "erfinv", "gelu", "glu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh",
    "i0", "leaky_relu", "lgamma", "log", "log10", "log1p", "log2", "logit", "mish", "nan_to_num", "nansum", "relu6", "selu",
    "silu", "sin", "sinc", "sinh", "softplus", "softshrink", "square", "threshold", "var",
})
_KEEP_BOTH = frozenset({"amax", "amin", "cumprod", "linalg_vector_norm", "logsumexp", "norm", "prod", "std"})
_KEEP_NOTHING = VIEW_FAMILY | CREATIONS | frozenset({
    "add", "cat", "clone", "constant_pad_nd", "contiguous", "cumsum", "flip", "mean", "neg", "repeat",
    "roll", "rsub", "select_scatter", "slice_scatter", "stack", "sub", "sum", "to", "_to_copy", "tril",
    "triu", "trunc", "type_as", "ceil", "floor", "frac", "round", "sign", "zeros_like", "ones_like",
    "full_like", "empty_like", "exponential", "rand_like", "randint_like", "randn_like",
    "channel_shuffle", "col2im", "diag_embed", "diagonal_scatter", "im2col",
    "pixel_shuffle", "pixel_unshuffle", "rot90", "trace", "upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_trilinear3d", "_upsample_bicubic2d_aa",
    "_upsample_bilinear2d_aa", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
})
_KEEP_INDICES = frozenset({"kthvalue", "max", "median", "min", "mode", "sort", "topk"})
_PLAIN = _KEEP_NOTHING | _KEEP_OUTPUT | _KEEP_INPUT | _KEEP_BOTH | _KEEP_INDICES | POINTWISE


def saved(
    node: Node, operands: Sequence[Layout], outputs: Sequence[Layout], needs: Sequence[bool],
    strategy: OpStrategy | None = None,
) -> Saved:
    """What one call of ``node`` keeps. ``operands`` aligns with ``Node.operands``, as ``needs``: whether autograd
    computes a gradient for it; ``outputs`` with ``Node.types``. A ``strategy`` that computes over a split dim keeps
    what the runtime's own function does. Operations without a formula are taken to keep operands and outputs.
    """
    if not any(needs):
        return _NOTHING
    call = Call.of(node, operands, outputs, needs)
    if strategy is not None:
        split = _over_split_dim(call, strategy)
        if split is not None:
            return split
    rule = _RULES.get(node.base)
    if rule is not None:
        return rule(call)
    if node.base in _KEEP_NOTHING:
        return _NOTHING
    floating = tuple(i for i, need in enumerate(needs) if need)
    if node.base in _KEEP_OUTPUT:
        return Saved((), (0,))
    if node.base in _KEEP_INPUT:
        return Saved((0,))
    if node.base in _KEEP_BOTH:
        return Saved((0,), (0,))
    if node.base in _KEEP_INDICES:
        return Saved((), (1,)) if len(outputs) > 1 else Saved((0,), (0,))
    if node.base in POINTWISE:
        return Saved(floating)
    return Saved(tuple(range(len(operands))), tuple(range(len(outputs))))


def has_formula(base: str) -> bool:
    """Whether it is known what an operation keeps."""
    return base in _RULES or base in _PLAIN


def _over_split_dim(call: Call, strategy: OpStrategy) -> Saved | None:
    """The runtime's vocabulary-parallel functions (None: the strategy runs the plain operation).

    Cross-entropy keeps the logits; per row the normaliser (float32 for half precisions), the index, and two masks.
    Embedding keeps the local ids and a mask. Softmax keeps its result.
    """
    base = call.node.base
    if base == "cross_entropy_loss" and strategy.forward:
        logits = call.operands[0]
        rows = logits.elements // logits.sizes[1 if len(logits.sizes) > 1 else 0]
        return Saved((0,), (), rows * (DTYPE_BYTES[_accumulate(logits.dtype)] + 8 + 1 + 1))
    if base == "embedding" and strategy.outputs[0].state == "partial":
        ids = call.operands[call.node.operands.index(str(call.arguments["indices"]).removeprefix("%"))]
        return Saved((), (), ids.elements * (8 + 1))
    return None


def _accumulate(dtype: str) -> str:
    return "float32" if dtype in HALF else dtype


def _product(call: Call) -> Saved:
    """mul: each operand is kept for the other's gradient."""
    if len(call.operands) < 2:
        return _NOTHING
    return Saved(tuple(i for i in (0, 1) if call.need(1 - i)))


def _quotient(call: Call) -> Saved:
    if len(call.operands) < 2:
        return _NOTHING
    return Saved((0, 1)) if call.need(1) else Saved((1,))


def _power(call: Call) -> Saved:
    if len(call.operands) > 1:
        return Saved((0, 1), (0,))  # The result, which the exponent's gradient reads, whether that is wanted or not.
    if "self" in call.arguments and not isinstance(call.arguments["self"], (int, float)):
        return Saved((0,)) if call.arguments.get("exponent") != 0 else _NOTHING
    return Saved((0,), (0,))


def _extremum(call: Call) -> Saved:
    return Saved((0, 1))


def _condition(call: Call) -> Saved:
    return Saved((0,))


def _mask_fill(call: Call) -> Saved:
    return Saved((1,))


def _layer_norm(call: Call) -> Saved:
    """The input, and mean and reciprocal deviation of each row in the dtype of the input (fused: in float32 of half ones)."""
    dtype = call.operands[0].dtype
    item = DTYPE_BYTES[_accumulate(dtype) if call.node.fused else dtype]
    return Saved((0, *range(1, len(call.operands))), (), 2 * _rows(call) * item)


def _rows(call: Call) -> int:
    """That a norm is taken of."""
    sizes, normalized = call.operands[0].sizes, call.arguments["normalized_shape"]
    return math.prod(sizes[: len(sizes) - (len(normalized) if isinstance(normalized, tuple) else 1)])


def _weight_norm(call: Call) -> Saved:
    """Direction, length, and the norms of the direction (in float32 of half precisions)."""
    item = max(4, DTYPE_BYTES[call.operands[1].dtype])
    return Saved((0, 1), (), call.operands[1].elements * item)


def _rms_norm(call: Call) -> Saved:
    """Composite: [cast to float32], the reciprocal root of each row, the normalised values for the weight's
    gradient. Fused: the operands and the roots."""
    operand, rows = call.operands[0], _rows(call)
    item = DTYPE_BYTES[_accumulate(operand.dtype)]
    if call.node.fused:
        return Saved(tuple(range(len(call.operands))), (), rows * item)
    cast = operand.dtype in HALF
    extra, kept = 0, []
    if call.need(0):
        extra += rows * item + (operand.elements * item if cast else 0)
        kept = [] if cast else [0]
    if len(call.operands) > 1:
        extra += operand.elements * item if call.need(1) else 0
        kept += [1] if call.need(0) else []
    return Saved(tuple(kept), (), extra)


def _group_norm(call: Call) -> Saved:
    """The operands, and mean and reciprocal deviation: of each sample and group, or (batch_norm) of each channel."""
    operand = call.operands[0]
    groups = call.arguments.get("num_groups")
    statistics = 2 * (operand.sizes[0] * groups if isinstance(groups, int) else operand.sizes[1])
    return Saved(tuple(range(len(call.operands))), (), statistics * DTYPE_BYTES[operand.dtype])


def _linear(call: Call) -> Saved:
    """The input for the weight's gradient (folded to two dims: a copy where strides forbid), the weight for the
    input's."""
    kept, extra = [], 0
    if call.need(1):
        folded = reshaped(call.operands[0], (-1 if not call.operands[0].elements else
                                             call.operands[0].elements // call.operands[0].sizes[-1],
                                             call.operands[0].sizes[-1]))
        if folded is None:
            extra = call.operands[0].size_bytes
        else:
            kept.append(0)
    if call.need(0):
        kept.append(1)
    return Saved(tuple(kept), (), extra)


def _matmul(call: Call) -> Saved:
    """Both factors, each folded to what ``mm`` or ``bmm`` takes: a copy where strides forbid a view, or where
    broadcast."""
    first, second = call.operands[:2]
    if len(first.sizes) >= 3 and len(second.sizes) <= 2:
        return _linear(call)
    kept, extra = [], 0
    if len(first.sizes) <= 2 < len(second.sizes) and call.need(0):
        lies = folded_second(second) is not None
        return Saved(((0,) if call.need(1) else ()) + ((1,) if lies else ()), (), 0 if lies else second.size_bytes)
    lead = broadcast_sizes(first.sizes[:-2], second.sizes[:-2])
    for index, factor in ((0, first), (1, second)):
        if not call.need(1 - index):
            continue
        expanded = _expanded(factor, lead)
        folded = reshaped(expanded, (math.prod(lead), *factor.sizes[-2:])) if len(lead) > 1 else expanded
        if folded is None:
            extra += expanded.size_bytes
        else:
            kept.append(index)
    return Saved(tuple(kept), (), extra)


def folded_second(second: Layout) -> Layout | None:
    """Of a product with a learned matrix from the left: the second factor turned and made a matrix, where that is a view."""
    sizes, strides = second.sizes, second.strides
    turned = Layout((*sizes[:-2], sizes[-1], sizes[-2]), (*strides[:-2], strides[-1], strides[-2]), second.dtype)
    return reshaped(turned, (second.elements // second.sizes[-2], second.sizes[-2]))


def _batched(call: Call) -> Saved:
    """mm, bmm: the plain factors."""
    return Saved(tuple(i for i in (0, 1) if call.need(1 - i)))


def _grouped(call: Call) -> Saved:
    """The plain factors, and where the groups end."""
    return Saved((*_batched(call).operands, *range(2, len(call.operands))))


def _added_product(call: Call) -> Saved:
    """addmm, baddbmm: factors are operands 1 and 2."""
    return Saved(tuple(i for i in (1, 2) if call.need(3 - i)))


def _expanded(factor: Layout, lead: Sequence[int]) -> Layout:
    missing = len(lead) - (len(factor.sizes) - 2)
    sizes = (1,) * missing + factor.sizes
    strides = (0,) * missing + factor.strides
    strides = tuple(
        0 if dim < len(lead) and size != lead[dim] else stride
        for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True))
    )
    return Layout((*lead, *factor.sizes[-2:]), strides, factor.dtype)


def _attention(call: Call) -> Saved:
    """Flash keeps query, key, value, result and the logarithm of the sums (float32 or wider) of each row; a boolean
    mask is cast. Without it: scaled query and key, value, softmax, and under dropout the mask and what it leaves."""
    query, key, value = call.operands[:3]
    masked = len(call.operands) > 3
    if fused_attention(call.node, call.operands, masked and call.need(3)):
        rows = math.prod(query.sizes[:-1]) * DTYPE_BYTES[_accumulate(query.dtype)]
        if masked and call.operands[3].dtype == "bool":
            return Saved((0, 1, 2), (0,), rows + call.operands[3].elements * DTYPE_BYTES[query.dtype])
        return Saved(tuple(range(len(call.operands))), (0,), rows)
    item, lead = DTYPE_BYTES[_accumulate(query.dtype)], query.sizes[:-2]
    scores = math.prod(lead) * query.sizes[-2] * key.sizes[-2] * item
    repeats = bool(call.arguments.get("enable_gqa")) and key.sizes[:-2] != lead
    extra = query.size_bytes // DTYPE_BYTES[query.dtype] * item + scores * (3 if call.arguments.get("dropout_p", 0.0) else 1)
    extra += product_elements(computed(key), lead, repeats) * item
    value = computed(value) if query.dtype in HALF else value
    kept = query.dtype not in HALF and not repeats and folds(value, lead)
    return Saved((2,) if kept else (), (), extra + (0 if kept else product_elements(value, lead, repeats) * item))


def folds(factor: Layout, lead: Sequence[int]) -> bool:
    """Whether a batched product takes a factor as it lies, broadcast over the dims ``lead`` and these made one."""
    return reshaped(_expanded(factor, lead), (math.prod(lead), *factor.sizes[-2:])) is not None


def product_elements(factor: Layout, lead: Sequence[int], repeated: bool) -> int:
    """What a batched product keeps of a factor: all of it, where it is copied for that (or was ``repeated`` before)."""
    return factor.elements if not repeated and folds(factor, lead) else math.prod((*lead, *factor.sizes[-2:]))


def _einsum(call: Call) -> Saved:
    """Both factors of the batched product, each as it lies or as the copy that it is folded to."""
    found = batched_product(call.node, call.operands)
    if found is None:
        return Saved((0, 1)[: len(call.operands)], (0,))
    wanted = [(at, fold) for at, fold in enumerate((found.left, found.right)) if call.need(1 - at)]
    extra = sum(call.operands[at].size_bytes for at, fold in wanted if not fold.view)
    return Saved(tuple(at for at, fold in wanted if fold.view), (), extra)


def _dropout(call: Call) -> Saved:
    """A mask of the operand's extents and dtype (aten/src/ATen/native/Dropout.cpp); fused: of bytes."""
    operand = call.operands[0]
    return Saved((), (), operand.elements if call.node.fused else operand.size_bytes)


def _embedding(call: Call) -> Saved:
    return Saved((1,))


def _bags(call: Call) -> Saved:
    """Everything but the result and, where the samples' weights are not learned, the table."""
    learned = len(call.operands) > 3 and call.need(3)
    return Saved((*((0,) if learned else ()), *range(1, len(call.operands))), tuple(range(1, len(call.outputs))))


def _cross_entropy(call: Call) -> Saved:
    """``log_softmax`` of the logits, the target and the total weight; label smoothing adds a mask of ignored rows. Half
    precisions are cast, weights of classes too, where the runtime has no function for them."""
    logits, target = call.operands[:2]
    item = DTYPE_BYTES[logits.dtype if sums_half_logits(call.node) else _accumulate(logits.dtype)]
    size = logits.elements * item
    weights = range(2, len(call.operands))
    cast = sum(call.operands[at].elements * item for at in weights) if logits.dtype in HALF else 0
    held = () if cast else tuple(weights)
    if target.dtype not in ("int64", "int32", "uint8"):
        smoothed = bool(call.arguments.get("label_smoothing"))
        return Saved(held if smoothed else (1, *held), (), size + cast + (target.size_bytes if smoothed else 0))
    smoothing = target.elements if call.arguments.get("label_smoothing") else 0
    return Saved((1, *held), (), size + item + smoothing + cast)


def _negative_likelihood(call: Call) -> Saved:
    return Saved(tuple(range(len(call.operands))), (), DTYPE_BYTES[call.operands[0].dtype])


def _log_sigmoid(call: Call) -> Saved:
    return Saved((0,), (), call.operands[0].size_bytes)


def _modulo(call: Call) -> Saved:
    return Saved((0, 1)) if len(call.operands) > 1 and call.need(1) else _NOTHING


def _interpolation(call: Call) -> Saved:
    """lerp: both ends where their weight is a tensor with a gradient; the weight."""
    if len(call.operands) < 3:
        return _NOTHING
    return Saved((0, 1, 2) if call.need(2) else (2,))


def _instance_norm(call: Call) -> Saved:
    """A batch norm of every sample's channels: the input (a copy where it does not lie straight), mean and reciprocal deviation
    of each, and the weight as often (aten/src/ATen/native/Normalization.cpp, ``instance_norm``)."""
    operand = call.operands[0]
    rows = math.prod(operand.sizes[:2]) * DTYPE_BYTES[operand.dtype]
    copied = 0 if operand.contiguous else operand.size_bytes
    return Saved((0,) if not copied else (), (), copied + rows * (2 if call.arguments.get("weight") is None else 3))


def _scattered(call: Call) -> Saved:
    """Where to."""
    return Saved((1,))


def _rows_added(call: Call) -> Saved:
    """Where to; the rows themselves too, though their gradient asks for their shape only."""
    return Saved((1, 2) if call.need(2) else (1,))


def _index(call: Call) -> Saved:
    return Saved(tuple(range(1, len(call.operands))))


def _repeated(call: Call) -> Saved:
    """``repeat_interleave`` as often as a tensor says: the place of each row, in that tensor's dtype."""
    if len(call.operands) < 2:
        return _NOTHING
    dim = call.arguments.get("dim")
    rows = call.outputs[0].sizes[dim if isinstance(dim, int) else 0]
    return Saved((), (), rows * DTYPE_BYTES[call.operands[1].dtype])


def _gather(call: Call) -> Saved:
    return Saved((0, 1))


def _running(call: Call) -> Saved:
    """``cummax``: the operand and where each largest value so far is."""
    return Saved((0,), (1,))


def _padded(call: Call) -> Saved:
    """The operand, whose numbers are mirrored or repeated; nothing beside zeros or what comes round."""
    return Saved((0,) if call.arguments.get("mode") in ("reflect", "replicate") else ())


def _adaptive_pool(call: Call) -> Saved:
    """The operand; nothing where all of it is averaged."""
    dims = int(call.node.base[-2])
    return Saved(() if set(call.outputs[0].sizes[-dims:]) == {1} else (0,))


def _scaled_quotient(call: Call) -> Saved:
    """addcdiv: the divisor, and the dividend for its gradient."""
    return Saved((1, 2) if call.need(2) else (2,) if call.need(1) else ())


def _quantile(call: Call) -> Saved:
    """At most the operand and the result, where each number was before it was sorted, and which two are between."""
    return Saved((0,), (0,), 8 * call.operands[0].elements + 16 * call.outputs[0].elements)


def _determinant(call: Call) -> Saved:
    """The matrices, the result, their triangular factors, and which rows changed places."""
    matrices = call.operands[0]
    return Saved((0,), (0,), matrices.size_bytes + 4 * matrices.elements // matrices.sizes[-1] + call.outputs[0].size_bytes)


def _max_pool(call: Call) -> Saved:
    """The input and the position of each maximum."""
    return Saved((0,), (), call.outputs[0].elements * 8)


def _convolution(call: Call) -> Saved:
    return Saved((0, 1))


def _pair(call: Call) -> Saved:
    return Saved((0, 1))


def _all(call: Call) -> Saved:
    return Saved(tuple(range(len(call.operands))))


def _recurrent(call: Call) -> Saved:
    """Of every layer and direction its input (turned round it is a copy) and what its steps keep: of a GRU or an LSTM seven
    hidden values, the state before it among them, of a plain cell one (aten/src/ATen/native/RNN.cpp, ``GRUCell``,
    ``LSTMCell``, ``SimpleCell``). Fused kernels keep otherwise."""
    layers, states = call.arguments["num_layers"], {"gru": 1, "lstm": 2}.get(call.node.base, 0)
    ways = 2 if call.arguments["bidirectional"] else 1
    assert isinstance(layers, int)
    width, hidden = call.operands[0].sizes[-1], call.outputs[0].sizes[-1] // ways
    inputs = (ways - 1) * width + (layers - 1) * ways * hidden
    steps = (7 if states else 1) * layers * ways * hidden
    made = call.operands[0].elements // width * (inputs + steps) - states * call.operands[1].elements
    return Saved(tuple(range(len(call.operands))), (), made * call.scalar)


def _scaled_sum(call: Call) -> Saved:
    """addcmul: the factors."""
    return Saved(tuple(i for i in (1, 2) if call.need(3 - i)))


def _transformed(call: Call) -> Saved:
    copied = kept_copy(call)
    return _NOTHING if copied is None else Saved((), (), copied) if copied else Saved((0,))


_RULES: dict[str, _Rule] = {
    "adaptive_avg_pool1d": _adaptive_pool, "adaptive_avg_pool2d": _adaptive_pool, "addcdiv": _scaled_quotient,
    "addcmul": _scaled_sum, "addmm": _added_product, "atan2": _pair, "baddbmm": _added_product, "batch_norm": _group_norm,
    "binary_cross_entropy": _all, "binary_cross_entropy_with_logits": _all, "bmm": _batched, "clamp": _all,
    "clamp_max": _all, "clamp_min": _all, "complex": _pair, "cross_entropy_loss": _cross_entropy, "cummax": _running,
    "cummin": _running, "det": _determinant, "div": _quotient, "dropout": _dropout, "einsum": _einsum,
    "embedding": _embedding, "embedding_bag": _bags, "fmax": _pair, "fmin": _pair, "fmod": _modulo, "gather": _gather,
    "group_norm": _group_norm,
    "huber_loss": _pair, "index": _index, "index_add": _rows_added, "index_copy": _rows_added, "index_fill": _scattered,
    "index_select": _index, "instance_norm": _instance_norm, "layer_norm": _layer_norm, "lerp": _interpolation,
    "linalg_cross": _pair, "linalg_det": _determinant, "linalg_slogdet": _determinant, "linear": _linear,
    "log_sigmoid": _log_sigmoid, "logaddexp": _pair, "logaddexp2": _pair, "logdet": _determinant, "masked_fill": _mask_fill,
    "matmul": _matmul, "max_pool2d": _max_pool, "maximum": _extremum, "minimum": _extremum, "mm": _batched,
    "mse_loss": _pair, "mul": _product, "nanquantile": _quantile, "native_dropout": _dropout,
    "nll_loss": _negative_likelihood, "nll_loss_nd": _negative_likelihood, "pad": _padded, "pow": _power, "prelu": _pair,
    "quantile": _quantile, "remainder": _modulo, "repeat_interleave": _repeated, "rms_norm": _rms_norm,
    "scaled_dot_product_attention": _attention, "scatter": _scattered, "scatter_add": _scattered, "slogdet": _determinant,
    "smooth_l1_loss": _pair, "soft_margin_loss": _pair, "where": _condition, "xlogy": _pair,
    "_weight_norm": _weight_norm, GROUPED_PRODUCT: _grouped,
    **dict.fromkeys(CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS, _convolution), **dict.fromkeys(RECURRENT, _recurrent),
    **dict.fromkeys(FOURIER, _transformed),
}
