"""Parameters that are none of the model's are refused where a gradient would come to them, and constants where none does."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.ir.errors import ModelError
from planner.ir.graph import ModelGraph
from planner.trace import load_model, trace_model

FILE = """
import torch
from torch import nn

class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("each", torch.arange(1.0, 5.0))
    def forward(self, outputs, batch):
        return (self.each * (outputs * self.scale - batch["y"]) ** 2).mean()

class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
        self.head = nn.Linear(8, 4)
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

criterion = Criterion()
teacher = nn.Linear(8, 4)

def plain():
    return nn.Linear(8, 4)

def example_inputs(batch, seq):
    return {"x": torch.randn(batch, 8), "y": torch.randn(batch, 4)}
"""


def graph(tmp_path: Path, loss: str, build: str = "plain") -> ModelGraph:
    path = tmp_path / "criterion.py"
    path.write_text(f"{FILE}\n{loss}\n")
    return trace_model(load_model(f"{path}:{build}", {}, None), sequence=None, dtype="float32")


@pytest.mark.parametrize("loss", [
    "def loss(outputs, batch): return criterion(outputs, batch)", "loss = Criterion()",
    "def loss(outputs, batch): return ((outputs - teacher(batch['x'])) ** 2).mean()",
])
def test_a_loss_that_would_be_trained_is_refused(tmp_path: Path, loss: str) -> None:
    with pytest.raises(ModelError, match=r"criterion.py:\d+.* none of the model's; .*let forward return it"):
        graph(tmp_path, loss)


def test_modules_in_a_list_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"of shape \(8, 8\) is used that is none of the model's; .*nn.ModuleList, not a list"):
        graph(tmp_path, "def loss(outputs, batch): return (outputs ** 2).mean()", "Listed")


@pytest.mark.slow
@pytest.mark.parametrize("loss", [
    "loss = Criterion().requires_grad_(False)",
    "frozen = Criterion().requires_grad_(False)\ndef loss(outputs, batch): return frozen(outputs, batch)",
    "def loss(outputs, batch): return criterion.each.sum() * (outputs * criterion.scale.detach() - batch['y']).square().mean()",
    """
def loss(outputs, batch):
    with torch.no_grad():
        wanted = teacher(batch["x"])
    return (outputs - wanted).square().mean()
""",
])
def test_what_no_gradient_comes_to_is_a_constant(tmp_path: Path, loss: str) -> None:
    traced = graph(tmp_path, loss)
    assert {parameter.fqn for parameter in traced.parameters} == {"weight", "bias"}
