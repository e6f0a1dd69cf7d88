"""The JSON form is exact; mangled text is refused in one line; the fingerprint ignores where files lie."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from planner.ir.body import Body, Source
from planner.ir.errors import PlanFileError
from planner.ir.graph import ModelGraph
from planner.ir.serialize import fingerprint, from_json, to_json
from planner.trace import load_model, trace_model

EXAMPLES = Path(__file__).parents[2] / "examples"


def traced(name: str, **settings: object) -> ModelGraph:
    source = load_model(f"{EXAMPLES / name}.py:{name}", {"hidden": 32, "layers": 2} | settings, 16)
    return trace_model(source, sequence=16, dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_round_trip(name: str) -> None:
    graph = traced(name)
    assert from_json(to_json(graph)) == graph
    json.loads(to_json(graph), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


@pytest.mark.slow
@pytest.mark.parametrize("mangle", [
    lambda text: text[: len(text) // 2],
    lambda text: text.replace('"is":"Node"', '"is":"Knot"', 1),
    lambda text: text.replace('"format":1', '"format":99'),
    lambda text: text.replace('"op":"linear",', "", 1),
    lambda text: "[]",
    lambda text: text.replace("float32[", "floaty[", 1),
])
def test_mangled(mangle: object) -> None:
    with pytest.raises(PlanFileError):
        from_json(mangle(to_json(traced("gpt"))))  # type: ignore[operator]


@pytest.mark.slow
def test_fingerprint() -> None:
    graph = traced("gpt")
    assert len(fingerprint(graph)) == 16 and fingerprint(graph) == fingerprint(traced("gpt"))
    assert fingerprint(graph) != fingerprint(traced("gpt", hidden=64))
    assert fingerprint(graph) == fingerprint(moved(graph))


def moved(graph: ModelGraph) -> ModelGraph:
    """The same graph from a file that lies elsewhere."""

    def move(body: Body) -> Body:
        nodes = tuple(dataclasses.replace(node, source=Source("/elsewhere.py", 1, "x")) for node in body.nodes)
        return dataclasses.replace(body, nodes=nodes)

    return dataclasses.replace(graph, context=move(graph.context), bodies=tuple(map(move, graph.bodies)))
