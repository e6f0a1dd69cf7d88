"""What torch's derivative formulas hold beside the gradients that they return: an expression's parts live until it is over.

Source: tools/autograd/derivatives.yaml and torch/csrc/autograd/FunctionsManual.cpp of torch 2.13. Formulas that are one kernel
(``gelu``, ``softmax``, matrix products) hold nothing. The tests hold every number to the storages of torch's own backward pass
on fake CPU tensors; fused kernels of a compiler would need less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from planner.ir.body import Node
from planner.ops.call import Call
from planner.ops.families import RECURRENT
from planner.ops.fourier import FOURIER, backward_bytes
from planner.ops.layout import Layout
from planner.ops.saved import has_formula

_TENSORS: Mapping[str, int] = {
    "abs": 1, "acos": 5, "acosh": 3, "addcdiv": 4, "addcmul": 1, "angle": 5, "asin": 4, "asinh": 3, "atan": 2, "atan2": 5,
    "atanh": 3, "cdist": 5, "cos": 2, "cosh": 1, "cummax": 1, "cummin": 1, "cumprod": 9, "cumsum": 2, "diff": 2, "digamma": 1,
    "einsum": 2, "erf": 4, "erfc": 4, "erfinv": 4, "exp2": 1, "expm1": 1, "hypot": 1, "i0": 1, "lgamma": 1,
    "linalg_matrix_exp": 8, "log10": 1, "log1p": 1, "log2": 1, "logaddexp": 3, "logaddexp2": 3, "logcumsumexp": 8,
    "logsumexp": 2, "polar": 3, "prod": 5, "quantile": 3, "reciprocal": 2, "renorm": 8, "rsqrt": 2, "sgn": 5, "sin": 1,
    "sinc": 7, "sinh": 1, "sort": 1, "special_erfcx": 3, "special_i0e": 4, "special_i1": 5, "special_i1e": 7,
    "special_log_ndtr": 6, "special_ndtri": 4, "sqrt": 1, "square": 2, "tan": 2, "topk": 1, "trace": 2,
}
"""By operation, tensors as large as the first operand or the result; at most so many where it is no whole number of them."""
_CONJUGATED = frozenset({
    "cosh", "div", "exp", "log", "log1p", "pow", "reciprocal", "rsqrt", "sin", "sinh", "square", "tan",
})
"""Of complex numbers they multiply by a conjugate, which is a tensor of its own then."""
_UNKNOWN = 2
"""Tensors of an operation that has no formula: most have fewer."""


def temporaries(node: Node, operands: Sequence[Layout], outputs: Sequence[Layout], needs: Sequence[bool]) -> int:
    """Bytes that a backward pass of ``node`` holds at its most, beside what came in, what was kept, and what it returns.
    ``operands`` aligns with ``Node.operands``, as ``needs``: whether it has a gradient; ``outputs`` with ``Node.types``."""
    conjugate = outputs[0].size_bytes if node.base in _CONJUGATED and outputs[0].is_complex else 0
    rule = _RULES.get(node.base)
    if rule is not None:
        return rule(Call.of(node, operands, outputs, needs)) + conjugate
    known = node.base in _TENSORS or has_formula(node.base)
    tensors = _TENSORS.get(node.base, 0) if known else _UNKNOWN
    return tensors * max(operands[0].size_bytes, outputs[0].size_bytes) + conjugate


def _quotient(call: Call) -> int:
    """``-grad * ((self / other) / other)`` for the divisor; ``fmod``: ``-grad * self.div(other, "trunc")``, and
    ``remainder`` alike. Nothing where the quotient is rounded: its gradient is zero."""
    return 2 * call.size if call.need(1) and call.arguments.get("rounding_mode") is None else 0


def _difference(call: Call) -> int:
    """``-grad * alpha`` for what is taken away: by ``rsub`` the first."""
    taken = 0 if call.node.base == "rsub" else 1
    return call.size if call.need(taken) and call.arguments.get("alpha") not in (None, 1) else 0


def _power(call: Call) -> int:
    """``grad * (exponent * self.pow(exponent - 1))``; of an exponent ``grad * (result * self.log())``, masked where 0 ** 0."""
    if len(call.operands) > 1:
        return 4 * call.size + call.elements + call.scalar
    return (2 if isinstance(call.arguments.get("exponent"), (int, float)) else 1) * call.size


def _clamped(call: Call) -> int:
    """A mask for each bound, and a zero; one more of both where both are tensors."""
    bounds = [name for name in ("min", "max") if call.arguments.get(name) is not None]
    return (len(bounds) + (len(call.operands) > 2)) * call.elements + call.scalar


def _chosen(call: Call) -> int:
    """``where``: a zero."""
    return call.scalar


def _larger(call: Call) -> int:
    """``maximum``: half of the gradient where both are alike, and masks."""
    return call.size + 2 * call.elements


def _extreme(call: Call) -> int:
    """``amax``: where it is, how often (a 64-bit number), and the gradient's share."""
    return call.operands[0].elements + 8 * call.elements + call.size


def _selected(call: Call) -> int:
    """``max`` along a dim: zeros, into a copy of which the gradient is scattered; of all, as above."""
    return call.operands[0].size_bytes if len(call.outputs) > 1 else _extreme(call)


def _patch(call: Call) -> int:
    """Zeros in place of the patch."""
    return call.operands[1].size_bytes if call.need(0) else 0


def _deviation(call: Call) -> int:
    """``std``: the centred operand, and three rows of numbers."""
    return call.operands[0].size_bytes + 3 * call.size


def _variance(call: Call) -> int:
    """The centred operand, and two rows."""
    return call.operands[0].size_bytes + 2 * call.size


def _length(call: Call) -> int:
    """A norm (FunctionsManual.cpp, ``norm_backward``): the operand scaled, and a mask of rows that are zero; of small powers
    their sign, and where they are zero, too; of the largest where it is, how often (a 64-bit number), and a share of the
    gradient."""
    order, operand = call.arguments.get("ord", call.arguments.get("p")), call.operands[0]
    if not isinstance(order, (int, float)) or order in (1, 2):
        return operand.size_bytes + (0 if order == 1 else call.elements)
    if math.isinf(order):
        return 3 * operand.size_bytes + operand.elements + 8 * call.elements + call.size
    return operand.size_bytes + call.size if order > 2 else 2 * operand.size_bytes + (operand.elements if order < 1 else 0)


def _scattered(call: Call) -> int:
    """``scatter_reduce``, at most: what has come together where, and how often (``scatter_reduce_backward``)."""
    tensors = {"sum": 0, "mean": 3, "prod": 12}.get(str(call.arguments.get("reduce")), 7)
    return tensors * max(call.operands[0].size_bytes, call.size)


def _outlived(call: Call) -> int:
    """``fmax``: masks of where it is, and is not, the second."""
    return 2 * call.elements


def _finite(call: Call) -> int:
    """``nan_to_num``: three masks."""
    return 3 * call.elements


def _numbers(call: Call) -> int:
    """``nansum``: where there are numbers, and where not."""
    return 2 * call.operands[0].elements


def _logarithm(call: Call) -> int:
    """``xlogy``: a logarithm, and masks."""
    return call.size + 3 * call.elements


def _between(call: Call) -> int:
    """``lerp``: what is left of a weight that is a tensor."""
    return call.size if len(call.operands) > 2 else 0


def _crossed(call: Call) -> int:
    """``binary_cross_entropy_with_logits``: the sigmoid; weighted positive terms hold more."""
    return (1 if call.arguments.get("pos_weight") is None else 5) * call.operands[0].size_bytes


def _taken(call: Call) -> int:
    """``index``, ``gather``: zeros, into a copy of which the gradient is laid."""
    return call.operands[0].size_bytes


def _repeated(call: Call) -> int:
    """``repeat_interleave`` as often as a tensor says is an ``index_select``."""
    return _taken(call) if len(call.operands) > 1 else 0


def _scaled(call: Call) -> int:
    """``addmm``: a factor's gradient before it is multiplied by ``alpha``."""
    if call.arguments.get("alpha", 1) == 1:
        return 0
    sizes = [call.operands[at].size_bytes for at in (1, 2) if call.need(at)]
    return max(sizes[-1], sizes[0] - sizes[-1]) if sizes else 0


def _conjugated(call: Call) -> int:
    """``mul`` of complex numbers: the conjugate of the other factor."""
    if len(call.operands) < 2 or not call.operands[0].is_complex:
        return 0
    return max((call.operands[1 - at].size_bytes for at in (0, 1) if call.need(at)), default=0)


def _stepped(call: Call) -> int:
    """Layers that go through a sequence, at most: a step adds its part of the gradient of the hidden weights to that of the
    steps before it, in a third tensor, when all but the first layer's other gradients are there."""
    states, ways = 2 if call.node.base == "lstm" else 1, 2 if call.arguments["bidirectional"] else 1
    biases = bool(call.arguments["has_biases"])
    each: int = ways * (4 if biases else 2)
    first = range(1 + states, 1 + states + each)
    made: int = sum(call.operands[at].size_bytes for at in (0, *first) if call.need(at))
    added: int = sum(call.operands[first[at]].size_bytes for at in ((1, 3) if biases else (1,)))
    return max(0, 3 * added - made)


def _gates(call: Call) -> int:
    """Bytes of all gates of all steps of one layer, both ways."""
    return {"gru": 3, "lstm": 4}.get(call.node.base, 1) * call.size


def all_gates(call: Call) -> int:
    """Bytes of them of all layers."""
    layers = call.arguments["num_layers"]
    assert isinstance(layers, int)
    return layers * _gates(call)


def stepping_bytes(call: Call) -> int:
    """What such layers hold while they run forward, at most: the products of a layer's inputs of all steps, and its inputs with
    the steps outermost."""
    ways = 2 if call.arguments["bidirectional"] else 1
    inputs, results = call.operands[0].size_bytes, call.size
    return _gates(call) // ways + (max(inputs, results) if call.arguments["num_layers"] != 1 else inputs)


_RULES: Mapping[str, Callable[[Call], int]] = {
    "addmm": _scaled, "amax": _extreme, "amin": _extreme, "baddbmm": _scaled, "binary_cross_entropy_with_logits": _crossed,
    "clamp": _clamped, "clamp_max": _clamped, "clamp_min": _clamped, "div": _quotient, "fmax": _outlived, "fmin": _outlived,
    "fmod": _quotient, "gather": _taken, "index": _taken, "index_select": _taken, "kthvalue": _selected,
    "lerp": _between, "linalg_vector_norm": _length, "max": _selected, "maximum": _larger, "median": _selected,
    "min": _selected, "minimum": _larger, "mode": _selected, "mul": _conjugated, "nan_to_num": _finite, "nansum": _numbers,
    "norm": _length, "pow": _power, "remainder": _quotient, "repeat_interleave": _repeated, "rsub": _difference,
    "scatter_reduce": _scattered, "select_scatter": _patch, "slice_scatter": _patch, "std": _deviation, "sub": _difference,
    "var": _variance, "where": _chosen, "xlogy": _logarithm, **dict.fromkeys(FOURIER, backward_bytes),
    **dict.fromkeys(RECURRENT, _stepped),
}
