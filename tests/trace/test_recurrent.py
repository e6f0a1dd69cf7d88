"""Recurrent networks with dropout between layers are traced layer by layer: what torch computes, under the same masks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.trace import load_model, trace_model
from planner.trace.interpret import run
from tests.torch_versions import knows_states

FILE = """
import torch
from torch import nn

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.r = {network}
        self.first = nn.Parameter(torch.randn({layers}, 1, 4))
        self.o = nn.Linear({width}, 3)
    def forward(self, x):
        start = self.first.expand(-1, x.shape[0], -1).contiguous()
        y, end = self.r(x, {start})
        end = end[1] if isinstance(end, tuple) else end
        return self.o(y) + end.transpose(0, 1).flatten(1).sum(1)[:, None, None]

def example_inputs(batch, seq):
    return {{"x": torch.randn(batch, 5, 4), "y": torch.randn(batch, 5, 3)}}

def loss(outputs, batch):
    return (outputs - batch["y"]).square().mean()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("network", "layers", "width", "bases"), [
    ("nn.LSTM(4, 4, 3, dropout=0.4, batch_first=True)", 3, 4, {"lstm"}),
    ("nn.GRU(4, 4, 2, dropout=0.4, batch_first=True, bidirectional=True)", 4, 8, {"gru"}),
    ("nn.RNN(4, 4, 2, dropout=0.4, batch_first=True, bias=False)", 2, 4, {"rnn_tanh"}),
    ("nn.GRU(4, 4, 2, batch_first=True)", 2, 4, set()),
])
def test_every_layer_is_what_torch_computes(
    tmp_path: Path, network: str, layers: int, width: int, bases: set[str]
) -> None:
    knows_states(network)
    path = tmp_path / "recurrent.py"
    start = "(start, start.tanh())" if "LSTM" in network else "start"
    path.write_text(FILE.format(network=network, layers=layers, width=width, start=start))
    source = load_model(f"{path}:Recurrent", {}, None)
    graph = trace_model(source, dtype="float64")
    torch.set_default_dtype(torch.float64)
    try:
        plain = source.build()
        batch = {"x": torch.randn(3, 5, 4), "y": torch.randn(3, 5, 3)}
    finally:
        torch.set_default_dtype(torch.float32)
    torch.manual_seed(1)
    expected = source.loss(plain(batch["x"]), batch)  # type: ignore[misc]
    torch.manual_seed(1)
    total, weight = run(graph, dict(plain.named_parameters()), batch)
    assert (total / weight).item() == pytest.approx(expected.item(), rel=1e-12)
    ours, theirs = (torch.autograd.grad(each, list(plain.parameters())) for each in (total / weight, expected))
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-13) for a, b in zip(ours, theirs, strict=True))
    nodes = [node for body in graph.bodies for node in body.nodes]
    single = [node for node in nodes if node.base in ("lstm", "gru", "rnn_tanh") and node.argument("num_layers") == 1]
    assert {node.base for node in single} == bases
    assert any(node.base == "dropout" for node in nodes) == bool(bases)
