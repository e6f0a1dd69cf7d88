"""Pointwise operations: each output element depends on the elements at its own (broadcast) position.

An operation that is not listed is not pointwise: nothing is guessed. ``OTHER`` operations read no neighbouring element
but are not linear; the linear ones say in which operands.
"""

from __future__ import annotations

from planner.rules.equation import Equation, Letters, Site, aligned, linear, spell

OTHER = frozenset({
    # unary
    "abs", "acos", "acosh", "angle", "asin", "asinh", "atan", "atanh", "bitwise_not", "ceil", "celu", "cos", "cosh",
    "deg2rad", "digamma", "elu", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "fix", "floor", "frac", "gelu",
    "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "i0", "isfinite", "isinf", "isnan", "isneginf", "isposinf",
    "leaky_relu", "lgamma", "log", "log10", "log1p", "log2", "log_sigmoid", "logical_not", "logit", "mish",
    "nan_to_num", "reciprocal", "relu", "relu6", "round", "rsqrt", "selu", "sgn", "sigmoid", "sign", "signbit", "silu",
    "sin", "sinc", "sinh", "softplus", "softshrink", "special_erf", "special_expit", "sqrt", "square", "tan", "tanh",
    "threshold", "trunc",
    # binary and ternary
    "addcdiv", "addcmul", "atan2", "bitwise_and", "bitwise_left_shift", "bitwise_or", "bitwise_right_shift",
    "bitwise_xor", "clamp", "clamp_max", "clamp_min", "clip", "copysign", "eq", "floor_divide", "fmax", "fmin", "fmod",
    "ge", "gt", "heaviside", "hypot", "isclose", "le", "lerp", "logaddexp", "logaddexp2", "logical_and", "logical_or",
    "logical_xor", "lt", "maximum", "minimum", "ne", "pow", "remainder", "rsub", "xlogy", "__and__", "__or__",
    "__xor__", "nextafter", "ldexp",
    # constants with the shape of an operand
    "full_like", "ones_like", "zeros_like", "empty_like",
    # random numbers with the shape of an operand
    "exponential", "rand_like", "randint_like", "randn_like",
})
COPIES = frozenset({
    "neg", "negative", "positive", "clone", "contiguous", "detach", "to", "_to_copy", "alias", "lift_fresh_copy",
})
"""Linear in their only operand."""
SUMS = frozenset({"add", "sub", "subtract"})
PRODUCTS = frozenset({"mul", "multiply"})
QUOTIENTS = frozenset({"div", "divide", "true_divide"})
POINTWISE = OTHER | COPIES | SUMS | PRODUCTS | QUOTIENTS | {"where", "masked_fill", "type_as", "dropout"}


def pointwise(site: Site) -> Equation:
    """Every dim of the output, with broadcasting from the right."""
    rank = site.outputs[0].rank
    operands: list[Letters] = []
    for type_ in site.types:
        fits = type_.rank <= rank and all(
            own in (1, whole) for own, whole in zip(type_.shape[::-1], site.outputs[0].shape[::-1], strict=False)
        )
        if not fits and site.node.base != "type_as":
            return Equation()
        operands.append(aligned(type_, rank) if fits else ("",) * type_.rank)
    return Equation(spell(site, operands, [aligned(type_, rank) for type_ in site.outputs]), _linear(site))


def _linear(site: Site) -> tuple[frozenset[int], ...]:
    base = site.node.base
    if base in COPIES | {"type_as"}:
        return linear((0,))
    first, second = site.position("self"), site.position("other")
    if base in SUMS:
        literal_zero = second is None and site.literal("other") == 0
        return linear((first,)) if literal_zero else linear((first, second))
    if base in PRODUCTS:
        return linear((first,), (second,)) if second is not None else linear((first,))
    if base in QUOTIENTS and site.literal("rounding_mode") is None:
        return linear((first,))
    if base == "where":
        return _linear_where(site, first, second)
    if base == "masked_fill" and site.literal("value") == 0:
        return linear((first,))
    return ()


def _linear_where(site: Site, first: int | None, second: int | None) -> tuple[frozenset[int], ...]:
    """A choice between two tensors is linear in both together, against a literal zero in one."""
    if first is not None and second is not None:
        return linear((first, second))
    if site.literal("other") == 0 or site.literal("self") == 0:
        return linear((first if first is not None else second,))
    return ()
