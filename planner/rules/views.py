"""The view family: dims are renamed, merged, parted, cut, joined. All of it is linear."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from planner.ir.types import BatchMultiple, Extent
from planner.rules.equation import Equation, Index, Letters, Site, aligned, dropped, linear, make_index, spell, without
from planner.rules.layout import Part

Bound = tuple[int, int]
"""Elements in the trailing dims: (coefficient, power of the batch)."""

FIRST = linear((0,))


def identity(site: Site) -> Equation:
    """``getitem``: what it picks is what the producer wrote."""
    letters = aligned(site.types[0], site.types[0].rank)
    return Equation(spell(site, [letters], [letters]), FIRST)


def reshape(site: Site) -> Equation:
    """``reshape`` and every view that keeps the row-major order: flatten, unflatten, squeeze, unsqueeze. (``view_as`` lends
    the shape of a second operand, which must then lie as the output does.)

    The bounds between dims, counted in trailing elements, cut both shapes into common factors; each is an index that
    lies in one dim before and one after, with the factors to its left as ``outer`` and to its right as ``inner``.
    """
    if site.node.op == "view.dtype":
        return _bits(site)
    if site.node.op == "squeeze":
        return Equation((), FIRST)  # without dims it would also drop a dim of which a rank holds one position
    before, after = _bounds(site.types[0].shape), _bounds(site.outputs[0].shape)
    cuts = sorted({*before, *after}, key=lambda bound: (bound[1], bound[0]))
    indices: list[Index] = []
    for low, high in pairwise(cuts):
        extent = _ratio(high, low)
        source, target = _part(before, low, high), _part(after, low, high)
        if extent is not None and source is not None and target is not None:
            name = f"factor {source.dim}:{target.dim}"
            operands: dict[int | None, Part] = {0: source, site.position("other"): target}
            indices += make_index(site, name, extent, operands, {0: target})
    return Equation(tuple(indices), FIRST)


def _bits(site: Site) -> Equation:
    """``Tensor.view(dtype)``: bits of numbers, which do not add up. Where the size of one changes, the last dim does too."""
    type_ = site.types[0]
    letters = aligned(type_, type_.rank)
    if type_.shape != site.outputs[0].shape:
        letters = without(letters, [type_.rank - 1])
    return Equation(spell(site, [letters], [letters]))


def _bounds(shape: Sequence[Extent]) -> list[Bound]:
    """Elements right of each dim, and of the whole: one more entry than dims, from the left."""
    bounds: list[Bound] = [(1, 0)]
    for extent in reversed(shape):
        size, power = (extent.factor, 1) if isinstance(extent, BatchMultiple) else (extent, 0)
        bounds.append((bounds[-1][0] * size, bounds[-1][1] + power))
    return bounds[::-1]


def _ratio(high: Bound, low: Bound) -> int | None:
    """The quotient, where it is a whole number that does not depend on the batch."""
    if high[1] != low[1] or low[0] == 0 or high[0] % low[0]:
        return None
    return high[0] // low[0]


def _part(bounds: Sequence[Bound], low: Bound, high: Bound) -> Part | None:
    """Where the factor between two cuts lies."""
    for dim, (left, right) in enumerate(pairwise(bounds)):
        outer, inner = _ratio(left, high), _ratio(low, right)
        if outer and inner and left != right:
            return Part(dim, outer, inner)
    return None


def permutation(site: Site) -> Equation:
    """``transpose``, ``permute``."""
    rank = site.types[0].rank
    order = list(range(rank))
    if site.node.base == "permute":
        order = list(site.dims("dims", rank))
    elif rank > 1:
        one, two = site.dim("dim0", rank), site.dim("dim1", rank)
        order[one], order[two] = order[two], order[one]
    letters = aligned(site.types[0], rank)
    return Equation(spell(site, [letters], [tuple(letters[dim] for dim in order)]), FIRST)


def expand(site: Site) -> Equation:
    """``expand``, ``broadcast_to``, ``expand_as``: dims of extent 1 lack the index that they are repeated over."""
    rank = site.outputs[0].rank
    letters = [aligned(type_, rank) for type_ in site.types]
    return Equation(spell(site, letters, [aligned(site.outputs[0], rank)]), FIRST)


def numbers(site: Site) -> Equation:
    """``view_as_complex`` and its inverse: the dim of real and imaginary parts is the last of one side."""
    rank = min(site.types[0].rank, site.outputs[0].rank)
    letters: Letters = tuple(f"dim {dim}" for dim in range(rank))
    real: Letters = (*letters, "")
    operand, result = (real, letters) if site.types[0].rank > rank else (letters, real)
    return Equation(spell(site, (operand,), (result,)), FIRST)


def repeat(site: Site) -> Equation:
    """``repeat``: a dim repeated r times is r x the dim; one that is repeated for every sample is not split."""
    rank = site.outputs[0].rank
    lead = rank - site.types[0].rank
    repeats = site.literal("repeats")
    assert isinstance(repeats, tuple)
    indices: list[Index] = []
    for dim, extent in enumerate(site.types[0].shape):
        times = repeats[dim + lead]
        if not isinstance(times, int):
            continue
        indices += make_index(site, f"dim {dim + lead}", extent, {0: Part(dim)}, {0: Part(dim + lead, outer=times)})
    return Equation(tuple(indices), FIRST)


def repeat_interleave(site: Site) -> Equation:
    """``repeat_interleave`` by a number along a dim: each position becomes ``repeats``."""
    type_ = site.types[0]
    times = site.literal("repeats")
    if not isinstance(times, int) or site.literal("dim") is None:
        return Equation()
    along = site.dim("dim", type_.rank)
    indices: list[Index] = []
    for dim, extent in enumerate(type_.shape):
        inner = times if dim == along else 1
        indices += make_index(site, f"dim {dim}", extent, {0: Part(dim)}, {0: Part(dim, inner=inner)})
    return Equation(tuple(indices), FIRST)


def split(site: Site) -> Equation:
    """``split``, ``chunk``: along the dim each output is a piece of the input. (``chunk`` recomputes its sizes from the
    local extent, so its pieces must be equal.)"""
    along = site.dim("dim", site.types[0].rank)
    letters = without(aligned(site.types[0], site.types[0].rank), [along])
    sizes = [type_.shape[along] for type_ in site.outputs]
    pieces = _pieces(sizes)
    indices = spell(site, [letters], [letters] * len(sizes))
    if pieces and not (site.node.base == "chunk" and len(set(sizes)) > 1):
        indices += make_index(
            site, "pieces", site.types[0].shape[along], {0: Part(along)},
            {at: Part(along, piece=piece) for at, piece in enumerate(pieces)},
        )
    return Equation(indices, FIRST)


def _pieces(sizes: Sequence[Extent]) -> tuple[tuple[int, int], ...]:
    """Start and stop of consecutive pieces; nothing where one depends on the batch."""
    pieces: list[tuple[int, int]] = []
    for size in sizes:
        if not isinstance(size, int):
            return ()
        start = pieces[-1][1] if pieces else 0
        pieces.append((start, start + size))
    return tuple(pieces)


def unbind(site: Site) -> Equation:
    """``unbind``, ``select``: the dim goes, every other stays."""
    along = site.dim("dim", site.types[0].rank)
    letters = without(aligned(site.types[0], site.types[0].rank), [along])
    return Equation(spell(site, [letters], [dropped(letters, [along])] * len(site.outputs)), FIRST)


def slice_bounds(site: Site) -> tuple[int, int, int]:
    """Start, stop and step of ``slice`` or ``narrow`` along a dim of known extent."""
    type_ = site.types[0]
    extent = type_.shape[site.dim("dim", type_.rank)]
    assert isinstance(extent, int)
    if site.node.base == "narrow":
        start = site.integer("start") % extent if site.integer("start") < 0 else site.integer("start")
        return start, start + site.integer("length"), 1
    first, last = site.literal("start"), site.literal("end")
    bounds = slice(first if isinstance(first, int) else None, last if isinstance(last, int) else None)
    return (*bounds.indices(extent)[:2], site.integer("step", 1))


def slices(site: Site) -> Equation:
    """``slice``, ``narrow``: along the dim the output is a piece of the input."""
    type_ = site.types[0]
    along = site.dim("dim", type_.rank)
    letters = aligned(type_, type_.rank)
    if type_.shape == site.outputs[0].shape:
        return Equation(spell(site, [letters], [letters]), FIRST)
    rest = without(letters, [along])
    indices = spell(site, [rest], [rest])
    if isinstance(type_.shape[along], int):
        start, stop, step = slice_bounds(site)
        if step == 1 and stop > start:
            part = Part(along, piece=(start, stop))
            indices += make_index(site, "pieces", type_.shape[along], {0: Part(along)}, {0: part})
    return Equation(indices, FIRST)


def cat(site: Site) -> Equation:
    """``cat``: along the dim each operand is a piece of the output."""
    rank = site.outputs[0].rank
    along = site.dim("dim", rank)
    if any(type_.rank != rank for type_ in site.types):
        return Equation()
    letters = without(aligned(site.outputs[0], rank), [along])
    indices = spell(site, [letters] * len(site.types), [letters])
    pieces = _pieces([type_.shape[along] for type_ in site.types])
    if pieces and all(stop > start for start, stop in pieces):
        operands: dict[int | None, Part] = {at: Part(along, piece=piece) for at, piece in enumerate(pieces)}
        indices += make_index(site, "pieces", site.outputs[0].shape[along], operands, {0: Part(along)})
    return Equation(indices, linear(tuple(range(len(site.types)))))


def stack(site: Site) -> Equation:
    """``stack``: a new dim that cannot be sharded."""
    rank = site.outputs[0].rank
    along = site.dim("dim", rank)
    letters: Letters = without(aligned(site.outputs[0], rank), [along])
    operands = [dropped(letters, [along])] * len(site.types)
    return Equation(spell(site, operands, [letters]), linear(tuple(range(len(site.types)))))


def patched(site: Site) -> Equation:
    """``select_scatter``, ``slice_scatter``: a copy of the first with the second in place of a part, along a dim that stays
    whole."""
    rank = site.outputs[0].rank
    along = site.dim("dim", rank)
    whole: Letters = without(aligned(site.outputs[0], rank), [along])
    patch = dropped(whole, [along]) if site.types[1].rank < rank else whole
    return Equation(spell(site, [whole, patch], [whole]), linear((0, 1)))


def moved(site: Site) -> Equation:
    """``flip``, ``roll``: positions move along some dims; the others stay."""
    rank = site.types[0].rank
    dims = site.dims("dims", rank)
    letters = without(aligned(site.types[0], rank), dims if dims or site.node.base == "flip" else range(rank))
    return Equation(spell(site, [letters], [letters]), FIRST)


def triangle(site: Site) -> Equation:
    """``tril``, ``triu``: matrices stay whole."""
    rank = site.types[0].rank
    letters = without(aligned(site.types[0], rank), [rank - 2, rank - 1])
    return Equation(spell(site, [letters], [letters]), FIRST)


def pad(site: Site) -> Equation:
    """``constant_pad_nd``, ``pad``: padded dims stay whole. Linear where the constant is zero."""
    rank = site.types[0].rank
    widths = site.integers("pad")
    touched = [rank - 1 - at // 2 for at, width in enumerate(widths) if width]
    letters = without(aligned(site.types[0], rank), touched)
    zero = site.literal("value", 0) in (None, 0) and site.literal("mode", "constant") == "constant"
    return Equation(spell(site, [letters], [letters]), FIRST if zero else ())
