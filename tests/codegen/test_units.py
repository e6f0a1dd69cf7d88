"""Blocks that are sharded together: as the planner counts them and as an emitted stage finds them."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import networkx as nx
import pytest

from codegen.classes import _stage_units
from planner.ir.graph import ModelGraph
from tests.search.made import make_graph


def drawn(seed: int) -> ModelGraph:
    """Blocks of which some have a second parameter or a third, another block's."""
    draws, graph = random.Random(seed), make_graph("a" * 7)
    blocks = list(graph.blocks)
    for _ in range(draws.randint(0, 6)):
        at, other = draws.sample(range(len(blocks)), 2)
        extra = (f"from_{other}", f"blocks.{other}.weight")
        blocks[at] = replace(blocks[at], parameters=(*blocks[at].parameters, extra))
    return replace(graph, blocks=tuple(blocks))


def emitted(graph: ModelGraph, first: int, last: int) -> Any:
    names: dict[str, Any] = {"SHARED": {
        parameter.fqn: graph.tied_blocks(parameter.fqn) for parameter in graph.parameters
        if len(graph.tied_blocks(parameter.fqn)) > 1
    }}
    exec("\n".join(_stage_units()), names)
    return names["units"](SimpleNamespace(first=first, last=last))


@pytest.mark.parametrize("seed", range(40))
def test_they_are_what_is_connected_by_parameters(seed: int) -> None:
    graph = drawn(seed)
    for first, last in ((0, 7), (0, 4), (2, 7), (3, 4)):
        found = graph.sharded_together(first, last)
        assert [list(group) for group in found] == emitted(graph, first, last)
        ties = nx.Graph()
        ties.add_nodes_from(range(first, last))
        for a in range(first, last):
            own = {fqn for _, fqn in graph.blocks[a].parameters}
            ties.add_edges_from((a, b) for b in range(first, a) if own & {fqn for _, fqn in graph.blocks[b].parameters})
        assert {frozenset(group) for group in found} == set(map(frozenset, nx.connected_components(ties)))
        assert list(found) == sorted(found)


def test_one_block_may_join_two_that_share_nothing() -> None:
    """The first and the last, and the last and the second: three blocks, no parameter of which all have."""
    graph = make_graph("abcd")
    shared = tuple((f"from_{at}", f"blocks.{at}.weight") for at in (0, 1))
    last = replace(graph.blocks[3], parameters=(*graph.blocks[3].parameters, *shared))
    graph = replace(graph, blocks=(*graph.blocks[:3], last))
    assert graph.sharded_together(0, 4) == ((0, 1, 3), (2,)) and emitted(graph, 0, 4) == [[0, 1, 3], [2]]
    assert graph.sharded_together(1, 4) == ((1, 3), (2,)) and graph.sharded_together(0, 3) == ((0,), (1,), (2,))
