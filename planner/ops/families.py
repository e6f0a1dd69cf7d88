"""Operations by what they do to memory. Names are torch's schema names without overloads."""

from __future__ import annotations

# The output always shares the first operand's storage.
VIEWS = frozenset({
    "alias", "chunk", "detach", "diagonal", "expand", "expand_as", "getitem", "narrow", "permute", "select",
    "slice", "split", "split_with_sizes", "squeeze", "transpose", "unbind", "unfold", "unsqueeze", "view", "view_as",
    "view_as_complex", "view_as_real",
})
# The output shares the operand's storage where strides allow it, and is a copy elsewhere.
RESHAPES = frozenset({"flatten", "reshape", "reshape_as", "unflatten", "_unsafe_view"})
VIEW_FAMILY = VIEWS | RESHAPES

# Matrix products.
CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d", "convolution"})
TRANSPOSED_CONVOLUTIONS = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})
# One product for each group of rows; of how many rows each group has is known when it runs.
GROUPED_PRODUCT = "_grouped_mm"
GEMMS = CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS | {
    "addmm", "baddbmm", "bmm", "einsum", "linear", "matmul", "mm", "mv", "dot", GROUPED_PRODUCT,
}
# Layers that step through a sequence, with the products of every step inside.
RECURRENT = frozenset({"gru", "lstm", "rnn_relu", "rnn_tanh"})
ATTENTION = "scaled_dot_product_attention"

# Element by element: the output lies in memory as the operands do.
POINTWISE = frozenset({
    "abs", "add", "addcdiv", "addcmul", "bitwise_and", "bitwise_not", "bitwise_or", "ceil", "clamp", "clamp_max",
    "clamp_min", "clone", "cos", "div", "dropout", "elu", "eq", "erf", "exp", "expm1", "floor", "floor_divide", "ge",
    "gelu", "gt", "hardsigmoid", "hardswish", "hardtanh", "isnan", "le", "leaky_relu", "lerp", "log", "log1p",
    "log_sigmoid", "logical_and", "logical_not", "logical_or", "lt", "masked_fill", "maximum", "minimum", "mish", "mul",
    "native_dropout", "ne", "neg", "pow", "reciprocal", "relu", "relu6", "remainder", "rms_norm", "round", "rsqrt",
    "rsub", "selu", "sigmoid", "sign", "silu", "sin", "softplus", "sqrt", "square", "sub", "tanh", "to", "_to_copy",
    "type_as", "where", "zeros_like", "ones_like", "full_like", "empty_like",
    "exponential", "rand_like", "randint_like", "randn_like",
})
# Reads nothing to speak of: constants made in place.
CREATIONS = frozenset({"arange", "empty", "full", "ones", "scalar_tensor", "zeros", "sym_size"})

# Losses by what their terms are of: rows with a label, or elements.
LABELLED_LOSSES = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"})
ELEMENTWISE_LOSSES = frozenset({
    "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss",
})
