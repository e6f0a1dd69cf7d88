"""Pass 7: values known while planning: masks that every attention kernel has built in, and tables that are too short."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from planner.ir.body import Node
from planner.ir.errors import ModelError
from planner.ir.inlining import draws
from planner.ir.types import Ref
from planner.trace.bounds import bounded
from planner.trace.canonical import prune, with_arguments
from planner.trace.flat import FlatGraph, place
from planner.trace.interpret import execute

MASK_ELEMENTS, TEXT_ELEMENTS = 1 << 28, 1 << 22
"""What is larger is not worked out: constants, and what follows from the text."""


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
        if draws(node) or any(value is None for value in operands.values()):
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
    """Refuse a learned table that is shorter than the indices (positions) looked up in it: constants, or what follows from the
    text and is the same whatever most texts say (RoBERTa counts the tokens that are no padding).

    Raises ModelError naming the table's parameter; export on fake tensors does not notice.
    """
    constants, texts = Constants(graph), [_Text(graph, below) for below in (1, 2, 3)]
    for node in graph.nodes:
        if node.base != "embedding":
            continue
        arguments = dict(node.arguments)
        table, indices = arguments["weight"], arguments["indices"]
        assert isinstance(table, Ref) and isinstance(indices, Ref)
        found = constants.value(indices.name)
        values = [found] if found is not None else [text.value(indices.name) for text in texts]
        highest = sorted(int(value.max()) for value in values if value is not None and value.numel())
        rows = graph.type_of(table.name).shape[0]
        if len(highest) < len(values) or not isinstance(rows, int):
            continue
        last = highest[len(highest) // 2]  # One of the texts may be all padding, or all separators.
        if last >= rows:
            fits = graph.sequence + rows - last - 1
            raise ModelError(
                place(node, graph.where),
                f"position {last} is looked up in {table.name.partition(':')[2]}, which has {rows} rows",
                f"give --seq {fits} or less, or a longer table" if fits > 0 else "give it more rows",
            )


class _Text(Constants):
    """Evaluates what follows from the text as well, where that is one token all along: the one so many below the bound."""

    def __init__(self, graph: FlatGraph, below: int) -> None:
        super().__init__(graph)
        for given in bounded(graph):
            if given.role == "tokens" and given.high and given.type.elements() <= TEXT_ELEMENTS:
                token = torch.tensor(max(given.high - below, 0), dtype=getattr(torch, given.type.dtype))
                self.known[f"batch:{given.name}"] = token.expand(given.type.sizes(1))

    def _evaluate(self, node: Node) -> Tensor | tuple[Tensor, ...] | None:
        if any(type_.elements() > TEXT_ELEMENTS for type_ in node.types):
            return None
        try:
            return super()._evaluate(node)
        except (IndexError, RuntimeError):  # of an index that is too large: a table that it is looked up in has a name
            return None
