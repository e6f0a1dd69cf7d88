"""repeat_blocks: a shallow trace drawn out is the deep trace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.ir.errors import ModelError
from planner.ir.graph import ModelGraph
from planner.ir.repeat import repeat_blocks
from planner.trace import load_model, trace_model

MODELS = (
    ("examples/gpt.py:gpt", {"hidden": 64, "heads": 4, "vocab": 96, "dropout": 0.1, "tied": True}),
    ("examples/llama.py:llama", {"hidden": 64, "heads": 4, "kv_heads": 2, "ffn_hidden": 96, "vocab": 96, "tied": False}),
    ("planner/validate/reference.py:decoder", {"hidden": 64, "heads": 4, "ffn_hidden": 96, "vocab": 96, "experts": 4}),
)


def _traced(spec: str, settings: dict[str, object], layers: int) -> ModelGraph:
    graph = trace_model(load_model(spec, {**settings, "layers": layers}, 16), sequence=16, dtype="bfloat16")
    # What a weight starts from may depend on the depth; nothing that is priced does.
    return replace(graph, parameters=tuple(replace(parameter, init=()) for parameter in graph.parameters))


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "settings"), MODELS)
def test_a_drawn_out_trace_is_the_deep_trace(spec: str, settings: dict[str, object]) -> None:
    deep, shallow = _traced(spec, settings, 5), _traced(spec, settings, 2)
    assert repeat_blocks(shallow, 5) == deep
    assert repeat_blocks(deep, 2) == shallow


def test_a_model_without_repetition_is_refused() -> None:
    graph = _traced(*MODELS[1], 2)
    single = repeat_blocks(graph, 1)
    with pytest.raises(ModelError, match="no two equal blocks"):
        repeat_blocks(single, 4)
