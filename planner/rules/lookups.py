"""Operations that read or write at positions given by another tensor, and the losses that do."""

from __future__ import annotations

from planner.ir.placement import REPLICATE, Transfer
from planner.ir.types import Ref, TensorType, summed_in
from planner.rules.equation import Equation, Letters, Site, aligned, linear, make_index, spell, without
from planner.rules.layout import Part

SUM_REDUCTION = 2


def embedding(site: Site) -> Equation:
    """``embedding`` of [V, E]: columns; rows (each rank looks up what it holds: partial sums); positions."""
    weight, positions = site.types[:2]
    places = aligned(positions, positions.rank)
    return Equation(spell(site, [("rows", "columns"), places], [(*places, "columns")], ["rows"] if weight.rank == 2 else ()))


def cross_entropy(site: Site) -> Equation:
    """``cross_entropy_loss``, ``nll_loss``, ``nll_loss_nd`` of [N, C] or [N, C, ...] against class numbers.

    Terms: a sum over them is partial, a mean needs the global weight first. Classes (``cross_entropy_loss`` of [N, C],
    summed, nothing smoothed or weighted): the loss is completed inside by three all-reduces of one number per term, in
    the logits' dtype (half precisions: float32): the maximum, the sum of the exponentials and the target's logit; none
    backward.
    """
    logits, target = site.types[:2]
    reduction, weighted = site.integer("reduction", 1), site.position("weight") is not None
    if target.floating or logits.rank < 2:
        return Equation()
    letters = without(aligned(logits, logits.rank), [1])
    terms = (letters[0], *letters[2:])
    weights: list[Letters] = [("",)] if weighted else []
    outputs = [terms if type_.rank else () for type_ in site.outputs]
    indices = spell(site, [letters, terms, *weights], outputs, [name for name in terms if reduction == SUM_REDUCTION])
    smooth = bool(site.literal("label_smoothing", 0.0))
    summed = site.node.base == "cross_entropy_loss" and reduction == SUM_REDUCTION and logits.rank == 2
    if summed and not weighted and not smooth:
        one = Transfer("all_reduce", TensorType(target.shape, summed_in(logits.dtype)).size_bytes())
        for index in make_index(site, "classes", logits.shape[1], {0: Part(1)}, {}, otherwise=REPLICATE):
            indices += (type(index)(index.name, index.extent, index.operands, index.outputs, (one, one, one)),)
    return Equation(indices)


def gather(site: Site) -> Equation:
    """``gather``: positions along the dim, every other dim that is read in full."""
    source, index = site.types[:2]
    along = site.dim("dim", source.rank)
    whole = [dim for dim in range(source.rank) if dim != along and source.shape[dim] == index.shape[dim]]
    free = tuple(f"dim {dim}" if dim in whole else "" for dim in range(source.rank))
    place: Letters = tuple("places" if dim == along else name for dim, name in enumerate(free))
    return Equation(spell(site, [free, place], [place]), linear((0,)))


def index_select(site: Site) -> Equation:
    """``index_select``: positions along the dim, every other dim."""
    rank = site.types[0].rank
    along = site.dim("dim", rank)
    free = without(aligned(site.types[0], rank), [along])
    out = tuple("places" if dim == along else name for dim, name in enumerate(free))
    return Equation(spell(site, [free, ("places",)], [out]), linear((0,)))


def index(site: Site) -> Equation:
    """``index.Tensor`` with integer tensors: dims that no tensor indexes, and the dims of the tensors themselves."""
    source = site.types[0]
    given = site.literal("indices")
    chosen = site.types[1:]
    if not isinstance(given, tuple) or not chosen or any(type_.dtype in ("bool", "uint8") for type_ in chosen):
        return Equation()
    taken = [dim for dim, item in enumerate(given) if isinstance(item, Ref)]
    free = without(aligned(source, source.rank), taken)
    rank = max(type_.rank for type_ in chosen)
    places = tuple(f"place {dim}" for dim in range(rank))
    adjacent = taken == list(range(taken[0], taken[-1] + 1))
    first = taken[0] if adjacent else 0
    rest = [name for dim, name in enumerate(free) if dim not in taken]
    operands = [free, *(places[rank - type_.rank:] for type_ in chosen)]
    return Equation(spell(site, operands, [(*rest[:first], *places, *rest[first:])]), linear((0,)))


def scatter(site: Site) -> Equation:
    """``scatter``, ``scatter_add``: every dim but the scattered one that index and source fill."""
    whole = site.outputs[0]
    along = site.dim("dim", whole.rank)
    filled = [
        dim for dim in range(whole.rank) if dim != along and all(type_.shape[dim] == whole.shape[dim] for type_ in site.types)
    ]
    letters = tuple(f"dim {dim}" if dim in filled else "" for dim in range(whole.rank))
    source = site.position("src")
    zero = source is None and site.literal("value") == 0
    sets = linear((0,)) if zero else linear((0, source)) if site.literal("reduce") is None else ()
    return Equation(spell(site, [letters] * len(site.types), [letters]), sets)


def one_hot(site: Site) -> Equation:
    letters = aligned(site.types[0], site.types[0].rank)
    return Equation(spell(site, [letters], [(*letters, "")]))
