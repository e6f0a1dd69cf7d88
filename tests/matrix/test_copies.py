"""Parameters that the model copies from others start equal in the program, whatever rank has which part of which."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
import torch

from codegen import emit
from planner.ir.placement import REPLICATE
from planner.trace import load_model, trace_model
from tests.matrix.build import Row, make_plan
from tests.matrix.programs import Emitted
from tests.matrix.workers import Workers

pytestmark = pytest.mark.slow
SOURCE = """
    import copy
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
            self.teacher = copy.deepcopy(self.up).requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                held = self.teacher(x).relu()
            return x + self.down(self.up(x).relu() * held)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Embedding(64, 16)
            layer = Layer()
            self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(4))
            self.idle = copy.deepcopy(layer.down)  # takes no part in the loss

        def forward(self, input_ids):
            x = self.first(input_ids)
            for layer in self.layers:
                x = layer(x)
            return x @ self.first.weight.T
"""


ROWS = (Row(), Row(tensor=2, pipeline=2, accumulation=2), Row(data=2, zero=3))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.label)
def test_copies_start_equal_in_parts(workers: Workers, row: Row, tmp_path: Path) -> None:
    file = tmp_path / "user_model.py"
    file.write_text(dedent(SOURCE), encoding="utf-8")
    source = load_model(f"{file}:Model", {}, None)
    graph = trace_model(source, sequence=8, dtype="float32")
    plan = make_plan(graph, row, precision="fp32")
    split = {lies for body in plan.placements.values() for lies in body.parameters if lies != REPLICATE}
    assert bool(split) == (row.tensor > 1)
    emit(plan, graph, tmp_path / "program", prediction=None, plan_yaml="format: 1\n")
    Emitted(tmp_path / "program", row.devices).train(workers, 1, "--export-start", str(tmp_path / "start.pt"))
    start = torch.load(tmp_path / "start.pt")
    source.build().load_state_dict(start)
    for layer in range(4):
        for name in ("weight", "bias"):
            one = start[f"layers.0.up.{name}"]
            assert torch.equal(start[f"layers.{layer}.up.{name}"], one)
            assert torch.equal(start[f"layers.{layer}.teacher.{name}"], one)
            assert torch.equal(start[f"layers.{layer}.down.{name}"], start[f"idle.{name}"])
    assert start["layers.0.up.weight"].std() > 0.05
