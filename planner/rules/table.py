"""The table: which rule each operation follows, by its name without the overload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from planner.ops.fourier import FOURIER
from planner.rules import contractions, lookups, network, reductions, views
from planner.rules.equation import Equation, Site
from planner.rules.pointwise import POINTWISE, pointwise

Rule: TypeAlias = Callable[[Site], Equation]

_FAMILIES: tuple[tuple[Rule, frozenset[str]], ...] = (
    (pointwise, POINTWISE),
    (contractions.linear_layer, frozenset({"linear"})),
    (contractions.matmul, frozenset({"matmul", "mm", "bmm", "mv", "dot"})),
    (contractions.addmm, frozenset({"addmm", "baddbmm"})),
    (contractions.grouped, frozenset({"_grouped_mm"})),
    (contractions.outer, frozenset({"outer", "ger"})),
    (contractions.einsum, frozenset({"einsum"})),
    (views.identity, frozenset({"getitem"})),
    (views.reshape, frozenset({
        "reshape", "view", "_unsafe_view", "view_as", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "ravel",
    })),
    (views.permutation, frozenset({"transpose", "permute"})),
    (views.expand, frozenset({"expand", "expand_as", "broadcast_to"})),
    (views.numbers, frozenset({"view_as_complex", "view_as_real"})),
    (views.repeat, frozenset({"repeat"})),
    (views.repeat_interleave, frozenset({"repeat_interleave"})),
    (views.split, frozenset({"split", "split_with_sizes", "chunk"})),
    (views.unbind, frozenset({"unbind", "select"})),
    (views.slices, frozenset({"slice", "narrow"})),
    (views.cat, frozenset({"cat", "concat", "concatenate"})),
    (views.stack, frozenset({"stack"})),
    (views.patched, frozenset({"select_scatter", "slice_scatter"})),
    (views.moved, frozenset({"flip", "roll"})),
    (views.triangle, frozenset({"tril", "triu"})),
    (views.pad, frozenset({"constant_pad_nd", "pad"})),
    (reductions.reduction, reductions.REDUCTIONS),
    (reductions.scan, frozenset({"cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "topk", "sort", "argsort"})),
    (reductions.transform, FOURIER),
    (reductions.constant, frozenset({
        "full", "zeros", "ones", "empty", "new_full", "new_zeros", "new_ones", "new_empty",
    })),
    (reductions.whole, frozenset({"arange", "scalar_tensor", "eye", "linspace"})),
    (lookups.embedding, frozenset({"embedding"})),
    (lookups.cross_entropy, frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd"})),
    (lookups.gather, frozenset({"gather"})),
    (lookups.index_select, frozenset({"index_select"})),
    (lookups.index, frozenset({"index"})),
    (lookups.scatter, frozenset({"scatter", "scatter_add"})),
    (lookups.one_hot, frozenset({"one_hot"})),
    (network.attention, frozenset({"scaled_dot_product_attention"})),
    (network.normalisation, frozenset({"layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"})),
    (network.group_normalisation, frozenset({"group_norm"})),
    (network.softmax, frozenset({"softmax", "log_softmax", "_softmax", "_log_softmax"})),
    (network.convolution, frozenset({"conv1d", "conv2d", "conv3d", "convolution"})),
)

RULES: Mapping[str, Rule] = {name: rule for rule, names in _FAMILIES for name in names}
