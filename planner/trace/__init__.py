"""The tracer: from an ``nn.Module`` to a ModelGraph, a chain of named passes."""

from __future__ import annotations

from dataclasses import replace

from planner.ir.graph import ModelGraph
from planner.trace.assemble import assemble
from planner.trace.blocks import find_blocks
from planner.trace.build import build
from planner.trace.canonical import canonicalise
from planner.trace.constants import check_tables, fold_masks
from planner.trace.context import split_context
from planner.trace.export import export
from planner.trace.flat import flatten
from planner.trace.load import load_model
from planner.trace.losses import separate_loss
from planner.trace.reach import freeze, warning, without_gradient
from planner.trace.recurrent import layers_apart
from planner.trace.samples import check_samples
from planner.trace.shares import feed_shares
from planner.trace.source import ModelSource
from planner.trace.unflatten import unflatten
from planner.trace.verify import verify
from planner.trace.widen import widen_loss

__all__ = ["ModelSource", "load_model", "trace_model"]


def trace_model(source: ModelSource, *, sequence: int | None = None, dtype: str, repeats: bool = True) -> ModelGraph:
    """The training step of a model: forward, loss and weight, symbolic in the batch.

    ``sequence``: tokens of one sample (None: the source's own; where it has none either, the model's inputs fix it or
    have none). ``dtype``: what the model is built, traced and run in. ``repeats``: repeated modules that are provably alike
    are traced once; the graph is the same without. Raises ModelError, naming the source line, where the model cannot be
    traced faithfully.
    """
    with source.importable():
        built = build(source, dtype)
        asked = source.sequence if sequence is None else sequence
        exported = export(source, built, source.positions(built.module) if asked is None else asked, repeats=repeats)
    graph = flatten(exported, built)
    if unreached := without_gradient(graph):
        built = freeze(built, unreached)
        graph = flatten(exported, built)  # Which nodes have a gradient follows from what is trained.
        graph = replace(graph, warnings=(*graph.warnings, warning(unreached)))
    graph = canonicalise(layers_apart(graph))
    graph = unflatten(graph)
    graph = widen_loss(separate_loss(graph))
    graph = feed_shares(check_samples(graph))
    graph = fold_masks(graph)
    check_tables(graph)
    graph = split_context(graph)
    chain = find_blocks(graph)
    return verify(assemble(source.name, graph, chain, built))
