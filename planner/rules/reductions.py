"""Reductions, scans, transforms and selections along dims, and constants."""

from __future__ import annotations

from planner.rules.equation import Equation, Letters, Site, aligned, dropped, linear, make_index, spell, without
from planner.rules.layout import Part

LINEAR = frozenset({"sum", "mean"})
REDUCTIONS = LINEAR | frozenset({
    "all", "amax", "amin", "any", "aminmax", "argmax", "argmin", "count_nonzero", "linalg_vector_norm", "logsumexp",
    "max", "median", "min", "norm", "prod", "std", "std_mean", "var", "var_mean",
})


def reduction(site: Site) -> Equation:
    """Kept dims freely. A reduced dim only where the operation is a sum: local means and extremes are no partial sums."""
    type_ = site.types[0]
    if len(site.types) != 1:
        return Equation()
    given = site.dims("dim", type_.rank)
    reduced = given or tuple(range(type_.rank))
    letters = aligned(type_, type_.rank)
    keep = bool(site.literal("keepdim"))
    contracted = [letters[dim] for dim in reduced] if site.node.base == "sum" else []
    kept: Letters = without(letters, reduced) if keep else dropped(letters, reduced)
    sets = linear((0,)) if site.node.base in LINEAR else ()
    return Equation(spell(site, [letters], [kept] * len(site.outputs), contracted), sets)


def scan(site: Site) -> Equation:
    """``cumsum``, ``cumprod``, ``sort``, ``topk``, ``argsort``, ...: every dim but the one they run along."""
    type_ = site.types[0]
    along = site.dim("dim", type_.rank, default=-1)
    letters = without(aligned(type_, type_.rank), [along])
    sets = linear((0,)) if site.node.base == "cumsum" else ()
    return Equation(spell(site, [letters], [letters] * len(site.outputs)), sets)


def transform(site: Site) -> Equation:
    """Fourier transforms: every dim but those that they run along; a transform of a sum is the sum of transforms."""
    type_, several = site.types[0], site.node.base.endswith(("2", "n"))
    along = site.dims("dim", type_.rank) or (range(type_.rank) if several else (type_.rank - 1,))
    letters = without(aligned(type_, type_.rank), list(along))
    return Equation(spell(site, [letters], [letters]), linear((0,)))


def constant(site: Site) -> Equation:
    """``full``, ``zeros``, ``ones``, ``new_*``: every position holds the same, so any part can be made on its own."""
    out = site.outputs[0]
    return Equation(tuple(
        index for dim, extent in enumerate(out.shape) for index in make_index(site, f"dim {dim}", extent, {}, {0: Part(dim)})
    ))


def whole(site: Site) -> Equation:
    """Known to be the same on every rank, and only as a whole (``arange``: a part would begin elsewhere)."""
    return Equation()
