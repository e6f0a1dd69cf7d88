"""Layers: attention, normalisation, softmax, convolution."""

from __future__ import annotations

from collections.abc import Mapping

from planner.ir.placement import Transfer
from planner.ir.types import TensorType, summed_in
from planner.rules.equation import Equation, Index, Letters, Site, aligned, linear, make_index, spell, without
from planner.rules.layout import Part


def attention(site: Site) -> Equation:
    """``scaled_dot_product_attention``: heads and other leading dims; query rows, unless the causal mask counts them;
    features of the values, unless dropout must draw one mask for all ranks.

    With grouped queries (``enable_gqa``) a head of keys and values serves ``group`` consecutive query heads: sharding
    the former gives query heads in whole groups, sharding the group a part of every group.
    """
    query, key, value = site.types[:3]
    rank = query.rank
    rows = "" if site.literal("is_causal") else "rows"
    features = "" if site.literal("dropout_p") else "features"
    lead = tuple(f"dim {dim}" for dim in range(rank - 2))
    grouped = rank > 3 and query.shape[-3] != key.shape[-3] and bool(site.literal("enable_gqa"))
    if grouped:
        lead = (*lead[:-1], "")
    operands: list[Letters] = [(*lead, rows, ""), (*lead, "", ""), (*lead, "", features)]
    if site.position("attn_mask") is not None:
        full: Letters = (*lead, rows, "")
        operands.append(full[rank - site.types[3].rank:])
    if any(operand != query.shape[:-2] for operand in (key.shape[:-2], value.shape[:-2])) and not grouped:
        return Equation()
    indices = spell(site, operands, [(*lead, rows, features)])
    return Equation(indices + (_grouped_heads(site, rank - 3) if grouped else ()), linear((2,)))


def _grouped_heads(site: Site, dim: int) -> tuple[Index, ...]:
    """The two indices of the query heads: key heads x group."""
    heads, whole = site.types[1].shape[dim], site.types[0].shape[dim]
    if not isinstance(heads, int) or not isinstance(whole, int):
        return ()
    group = whole // heads
    by_head: dict[int | None, Part] = {0: Part(dim, inner=group), 1: Part(dim), 2: Part(dim)}
    by_group: dict[int | None, Part] = {0: Part(dim, outer=heads)}
    mask = site.types[3] if len(site.types) > 3 else None
    at = dim - (site.types[0].rank - mask.rank) if mask is not None else -1
    if mask is not None and at >= 0 and mask.shape[at] != 1:
        by_head[3], by_group[3] = Part(at, inner=group), Part(at, outer=heads)
    return (
        *make_index(site, "heads", heads, by_head, {0: Part(dim, inner=group)}),
        *make_index(site, "group", group, by_group, {0: Part(dim, outer=heads)}),
    )


def normalisation(site: Site) -> Equation:
    """``layer_norm``, ``rms_norm`` and their native forms: every dim left of the normalised ones. Statistics, where they
    are outputs, keep those dims."""
    rank = site.types[0].rank
    normalised = max(len(site.integers("normalized_shape")), 1)
    lead = without(aligned(site.types[0], rank), range(rank - normalised, rank))
    operands = [lead, *(("",) * type_.rank for type_ in site.types[1:])]
    outputs = [lead[: type_.rank] for type_ in site.outputs]
    return Equation(spell(site, operands, outputs))


def group_normalisation(site: Site) -> Equation:
    """``group_norm`` of [N, C, ...]: samples, and whole groups of channels."""
    groups, channels = site.integer("num_groups"), site.types[0].shape[1]
    if not isinstance(channels, int) or not groups:
        return Equation()
    part = Part(1, inner=channels // groups)
    operands: dict[int | None, Part] = {0: part}
    for name in ("weight", "bias"):
        operands |= {site.position(name): Part(0, inner=channels // groups)}
    return Equation(make_index(site, "groups", groups, operands, {0: part}) + _samples(site))


def _samples(site: Site) -> tuple[Index, ...]:
    return make_index(site, "samples", site.types[0].shape[0], {0: Part(0)}, {0: Part(0)})


def softmax(site: Site) -> Equation:
    """``softmax``, ``log_softmax``: other dims freely; over its own dim with collectives inside.

    Forward: the maximum and the sum of the exponentials, backward: one sum (of gradient times output for softmax, of
    the gradient for log_softmax), each one number per row in the dtype of the result (half precisions: float32).
    """
    type_ = site.types[0]
    along = site.dim("dim", type_.rank)
    letters = without(aligned(type_, type_.rank), [along])
    indices = spell(site, [letters], [letters])
    if site.node.base not in ("softmax", "log_softmax"):
        return Equation(indices)
    row = Transfer("all_reduce", _rows(site.outputs[0], along).size_bytes())
    return Equation(indices + tuple(
        Index(index.name, index.extent, index.operands, index.outputs, (row, row), (row,))
        for index in make_index(site, "normalised", type_.shape[along], {0: Part(along)}, {0: Part(along)})
    ))


def _rows(type_: TensorType, along: int) -> TensorType:
    return TensorType(tuple(size for dim, size in enumerate(type_.shape) if dim != along), summed_in(type_.dtype))


def convolution(site: Site) -> Equation:
    """``conv1d``, ``conv2d``, ``conv3d`` of [N, C, ...]: samples; output channels, input channels (partial sums, without
    a bias), or, with groups, whole groups. Spatial dims stay whole."""
    input_, weight = site.types[:2]
    channels, filters = input_.shape[1], weight.shape[0]
    unbatched = input_.rank != weight.rank
    if unbatched or not isinstance(channels, int) or not isinstance(filters, int) or site.literal("transposed"):
        return Equation()
    groups, bias = site.integer("groups", 1), site.position("bias")
    additive = () if bias is not None else linear((0,), (1,))
    if groups > 1:
        inner = filters // groups
        by_group: Mapping[int | None, Part] = {
            0: Part(1, inner=channels // groups), 1: Part(0, inner=inner), bias: Part(0, inner=inner),
        }
        indices = make_index(site, "groups", groups, by_group, {0: Part(1, inner=inner)})
        return Equation(indices + _samples(site), additive)
    indices = make_index(site, "filters", filters, {1: Part(0), bias: Part(0)}, {0: Part(1)})
    if bias is None:
        indices += make_index(site, "channels", channels, {0: Part(1), 1: Part(1)}, {})
    return Equation(indices + _samples(site), additive)
