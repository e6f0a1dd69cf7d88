"""The table of blocks: every state key is the model's, in lines that can be read."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from codegen import lower
from codegen.classes import render_chain
from planner.ir.graph import ModelGraph
from tests.codegen.plans import plan_of, traced
from tests.matrix.programs import small_graph


def chain(graph: ModelGraph) -> str:
    return render_chain(lower(plan_of(graph), graph)).partition("CROSSING")[0]


def keys(graph: ModelGraph) -> list[dict[str, str]]:
    """What a stage makes of the table."""
    names: dict[str, Any] = {cls.name: None for cls in lower(plan_of(graph), graph).classes}
    exec(chain(graph), names)
    found = []
    for block, (name, _, entry) in zip(graph.blocks, names["CHAIN"], strict=True):
        assert name == block.name
        prefix, others = (entry, {}) if isinstance(entry, str) else entry
        found.append({path: f"{prefix}{path}" for path, _ in (*block.parameters, *block.buffers)} | others)
    return found


def told(graph: ModelGraph) -> list[dict[str, str]]:
    return [dict((*block.parameters, *block.buffers)) for block in graph.blocks]


@pytest.mark.slow
def test_layers_that_share_a_buffer_are_one_line() -> None:
    graph = small_graph("buffered", layers=6)
    assert keys(graph) == told(graph)
    text = chain(graph)
    assert len(text.splitlines()) <= 10 and max(map(len, text.splitlines())) <= 120, text
    assert "for i in range(1, 6)" in text


@pytest.mark.slow
def test_a_layer_that_is_another_again_is_its_prefix() -> None:
    graph = traced("gpt")
    blocks = tuple(replace(block, parameters=graph.blocks[1].parameters) if "blocks." in block.name else block
                   for block in graph.blocks)
    graph = replace(graph, blocks=blocks)
    assert keys(graph) == told(graph)
    assert '*((f"blocks.{i}", Block, "blocks.0.") for i in range(1, 3)),' in chain(graph)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_any_keys_are_the_models(seed: int) -> None:
    """Some of a block's parameters are whichever the model has."""
    draws, graph = random.Random(seed), traced("gpt", layers=5)
    share, every = draws.choice((0.02, 0.1, 0.5)), sorted({fqn for block in told(graph) for fqn in block.values()})
    graph = replace(graph, blocks=tuple(
        replace(block, parameters=tuple(
            (path, draws.choice(every) if draws.random() < share else fqn) for path, fqn in block.parameters
        ))
        for block in graph.blocks
    ))
    assert keys(graph) == told(graph)
    assert max(map(len, chain(graph).splitlines())) <= 120
