"""Cuts that send values of one type which lie differently: an edited plan may split the sequence of some layers only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from codegen import lower, verify
from planner.ir.errors import InternalError
from planner.ir.graph import ModelGraph
from planner.ir.placement import REPLICATE, shard
from planner.ir.plan import Plan
from planner.placement import place_body
from planner.trace import load_model, trace_model
from tests.matrix.build import Row, make_plan
from tests.matrix.pricing import VolumePricing
from tests.matrix.programs import emitted, losses
from tests.matrix.workers import Workers

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

class Layer(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.norm, self.up, self.down, self.act = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16), act

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.layers = nn.ModuleList(Layer(act) for act in (F.gelu, F.gelu, F.silu, torch.tanh, torch.tanh))

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

build = Model
"""
ROW = Row(pipeline=2, tensor=2, schedule="interleaved-1f1b", accumulation=2)
"""Stages begin at blocks 0, 2, 4 and 5: with the second layer, the first of tanh and the second of it."""


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> ModelGraph:
    file = tmp_path_factory.mktemp("model") / "model.py"
    file.write_text(MODEL)
    return trace_model(load_model(f"{file}:build", {}, None), sequence=8, dtype="float64")


@pytest.fixture(scope="module")
def plan(graph: ModelGraph) -> Plan:
    """The sequence of the layers with tanh is split, from the output of the one with silu on."""
    placements, lies = {}, REPLICATE
    for block in graph.blocks:
        body = graph.body_of[block.body]
        if body.name in placements:
            continue
        into = lies
        lies = shard(1) if block.name == "layers.2" else lies
        around = {value.name: into for value in body.inputs if value.name in body.differentiable}
        around |= dict.fromkeys(body.outputs, REPLICATE if graph.loss in block.writes else lies)
        placed = place_body(body, 2, around, {}, VolumePricing(2))
        assert placed is not None, body.name
        placements[body.name] = placed.placement
    return make_plan(graph, ROW, placements=placements)


def test_each_placement_has_a_variable_of_its_own(plan: Plan, graph: ModelGraph) -> None:
    program = verify(lower(plan, graph))
    assert [cut.first for cut in program.cuts] == [0, 2, 4, 5]
    sent = [program.sent[name].placement for cut in program.cuts[:-1] for name in cut.sends]
    assert sent == [REPLICATE, shard(1), shard(1)]


def test_a_variable_that_lies_otherwise_than_said_is_found(plan: Plan, graph: ModelGraph) -> None:
    program = lower(plan, graph)
    alike = {name: replace(variable, placement=REPLICATE) for name, variable in program.sent.items()}
    with pytest.raises(InternalError, match=r"cut before block 4.*sends '\w+' as shard\(1\), said to be replicate"):
        verify(replace(program, sent=alike))


@pytest.mark.slow
def test_such_a_program_trains_as_one_process_does(
    workers: Workers, plan: Plan, graph: ModelGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = emitted(graph, Row(accumulation=2), tmp_path / "one")
    monkeypatch.setattr("tests.matrix.programs.make_plan", lambda *_, **__: plan)
    four = emitted(graph, ROW, tmp_path / "four")
    want, got = (losses(program.train(workers, 3)) for program in (one, four))
    assert got == pytest.approx(want, rel=1e-12)
