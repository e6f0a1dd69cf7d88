"""Matrix products, as equations in letters. A contracted letter gives partial sums; every product is multilinear."""

from __future__ import annotations

from planner.rules.equation import Equation, Letters, Site, aligned, linear, spell


def _multilinear(site: Site) -> tuple[frozenset[int], ...]:
    return linear(*((at,) for at in range(len(site.types))))


def linear_layer(site: Site) -> Equation:
    """``linear``: [..., k] x [n, k] -> [..., n]. With a bias the sum over k may not be partial: it would be added on
    every rank."""
    rank = site.types[0].rank
    rows = tuple(f"row {dim}" for dim in range(rank - 1))
    bias = site.position("bias") is not None
    operands: list[Letters] = [(*rows, "contracted"), ("columns", "contracted")]
    if bias:
        operands.append(("columns",))
    indices = spell(site, operands, [(*rows, "columns")], () if bias else ("contracted",))
    return Equation(indices, () if bias else _multilinear(site))


def matmul(site: Site) -> Equation:
    """``matmul``, ``mm``, ``bmm``, ``mv``, ``dot``: batch dims broadcast; one-dimensional operands lack their free dim."""
    left, right = (type_.rank for type_ in site.types)
    out = site.outputs[0].rank
    rows, columns = left > 1, right > 1
    batch = out - rows - columns
    batches = tuple(f"batch {dim}" for dim in range(batch))
    row: Letters = ("rows",) if rows else ()
    column: Letters = ("columns",) if columns else ()
    first: Letters = (*batches[batch - max(left - 2, 0):], *row, "contracted")
    second: Letters = (*batches[batch - max(right - 2, 0):], "contracted", *column)
    result: Letters = (*batches, *row, *column)
    return Equation(spell(site, (first, second), (result,), ("contracted",)), _multilinear(site))


def addmm(site: Site) -> Equation:
    """``addmm``/``baddbmm``: a product plus a broadcast tensor; no partial sums, which would add that on every rank."""
    rank = site.outputs[0].rank
    batch = tuple(f"dim {dim}" for dim in range(rank - 2))
    rows, columns = f"dim {rank - 2}", f"dim {rank - 1}"
    operands = (aligned(site.types[0], rank), (*batch, rows, "contracted"), (*batch, "contracted", columns))
    return Equation(spell(site, operands, [(*batch, rows, columns)]))


def grouped(site: Site) -> Equation:
    """``_grouped_mm``: [rows, k] x [groups, k, n] -> [rows, n], rows of a group side by side, to where ``offs`` says."""
    if len(site.types) > 3:
        return Equation()  # with a bias
    operands: list[Letters] = [("", "contracted"), ("", "contracted", "columns"), ("",)]
    return Equation(spell(site, operands[:len(site.types)], [("", "columns")], ("contracted",)), linear((0,), (1,)))


def outer(site: Site) -> Equation:
    return Equation(spell(site, (("rows",), ("columns",)), [("rows", "columns")]), _multilinear(site))


def einsum(site: Site) -> Equation:
    """``einsum``: its own letters. An implicit output is read as torch reads it; an ellipsis has no rule, a diagonal no
    index."""
    equation = site.literal("equation")
    if not isinstance(equation, str) or "..." in equation:
        return Equation()
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow:
        right = "".join(sorted(letter for letter in set(left) - {","} if left.count(letter) == 1))
    operands = [tuple(term) for term in left.split(",")]
    contracted = sorted(set(left) - set(right) - {","})
    return Equation(spell(site, operands, [tuple(right)], contracted), _multilinear(site))
