"""What an error says that a loss may do instead of what it does."""

from __future__ import annotations

ADVICE = "return (sum of the terms, their weight) from loss()"
PRODUCT = "write (a * b).sum() for it"
WRITTEN_OUT = {
    "addcmul": "write a + b * c for it", "bmm": PRODUCT, "dot": PRODUCT, "einsum": PRODUCT,
    "lerp": "write (1 - w) * a + w * b for it",
    "matmul": PRODUCT, "mv": PRODUCT, "squeeze": "reduce to a scalar at once, without keepdim",
}
"""By operation, what has the same value and is taken apart."""
FUNCTIONS = frozenset({
    "amax", "amin", "exp", "linalg_vector_norm", "log", "logsumexp", "max", "maximum", "min", "minimum", "norm", "pow", "prod",
    "sqrt", "square",
})
"""Of an average they are no average."""


def instead(base: str) -> str:
    """``base``: of the operation that a loss, or what it divides, ends in."""
    if base in FUNCTIONS:
        one = base.removeprefix("linalg_vector_")
        return f"a step adds up terms, and knows no average before its end: take {one} of every sample's, and average that"
    return WRITTEN_OUT.get(base, ADVICE)
