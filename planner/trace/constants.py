"""Pass 7: values known while planning: masks that every attention kernel has built in, and tables that are too short."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from planner.ir.body import Node
from planner.ir.errors import ModelError
from planner.ir.types import Ref
from planner.trace.canonical import prune, with_arguments
from planner.trace.flat import FlatGraph, place
from planner.trace.interpret import execute

MASK_ELEMENTS = 1 << 28


class Constants:
    """Evaluates, for one sample, the values of a graph that depend on neither parameters nor batch inputs."""

    def __init__(self, graph: FlatGraph) -> None:
        self.graph = graph
        self.known: dict[str, Tensor | tuple[Tensor, ...] | None] = {}
        for name in graph.inputs:
            kind, _, fqn = name.partition(":")
            self.known[name] = graph.values.get(fqn) if kind == "buffer" else None

    def value(self, name: str) -> Tensor | None:
        """The value, or None where it is not constant or too large."""
        pending = [name]
        while pending:
            current = pending[-1]
            node = self.graph.by_name.get(current)
            missing = [operand for operand in node.operands if operand not in self.known] if node else []
            if current not in self.known and node and missing:
                pending.extend(missing)
                continue
            if current not in self.known and node:
                self.known[current] = self._evaluate(node)
            pending.pop()
        found = self.known[name]
        return found if isinstance(found, Tensor) else None

    def _evaluate(self, node: Node) -> Tensor | tuple[Tensor, ...] | None:
        operands = {name: self.known[name] for name in node.operands}
        if any(value is None for value in operands.values()):
            return None
        if any(type_.elements() > MASK_ELEMENTS for type_ in node.types):
            return None
        result = execute(node, operands, batch=1)
        return tuple(result) if isinstance(result, (list, tuple)) else result


def fold_masks(graph: FlatGraph) -> FlatGraph:
    """Replace constant attention masks by what they mean: causal, or nothing at all."""
    constants = Constants(graph)
    meaning: dict[str, str | None] = {}
    fixed: set[str] = set(graph.fixed)
    nodes = []
    for node in graph.nodes:
        arguments = dict(node.arguments)
        mask = arguments.get("attn_mask")
        if node.base == "scaled_dot_product_attention" and isinstance(mask, Ref):
            if mask.name not in meaning:
                meaning[mask.name] = _meaning(constants.value(mask.name))
            if meaning[mask.name] is not None:
                node = with_arguments(node, attn_mask=None, is_causal=meaning[mask.name] == "causal")
                fixed |= _buffers_behind(graph, mask.name)
        nodes.append(node)
    return prune(replace(graph, nodes=tuple(nodes), fixed=frozenset(fixed)))


def _buffers_behind(graph: FlatGraph, name: str) -> set[str]:
    """The buffers that a value is computed from."""
    seen, pending = set(), [name]
    while pending:
        current = pending.pop()
        if current not in seen:
            seen.add(current)
            pending.extend(graph.by_name[current].operands if current in graph.by_name else ())
    return {value for value in seen if value.startswith("buffer:")}


def _meaning(mask: Tensor | None) -> str | None:
    """``causal``, ``all`` (nothing is masked), or None (neither)."""
    if mask is None or mask.dim() < 2:
        return None
    queries, keys = mask.shape[-2:]
    visible = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not bool((visible | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
        return None
    if bool(visible.all()):
        return "all"
    lower = torch.ones(queries, keys, dtype=torch.bool).tril()
    return "causal" if queries == keys and bool((visible == lower).all()) else None


def check_tables(graph: FlatGraph) -> None:
    """Refuse a learned table that is shorter than the constant indices (positions) looked up in it.

    Raises ModelError naming the table's parameter; export on fake tensors does not notice.
    """
    constants = Constants(graph)
    for node in graph.nodes:
        if node.base != "embedding":
            continue
        arguments = dict(node.arguments)
        table, indices = arguments["weight"], arguments["indices"]
        assert isinstance(table, Ref) and isinstance(indices, Ref)
        found = constants.value(indices.name)
        rows = graph.type_of(table.name).shape[0]
        if found is None or not found.numel() or not isinstance(rows, int):
            continue
        last = int(found.max())
        if last >= rows:
            raise ModelError(
                place(node, graph.where),
                f"position {last} is looked up in {table.name.partition(':')[2]}, which has {rows} rows",
                f"give --seq {rows} or less, or a longer table",
            )
