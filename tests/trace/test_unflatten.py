"""Flattened rows get their dims back, whatever the model calls its parts, and the model means the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from planner.ir.body import Node
from planner.ir.graph import ModelGraph
from planner.ir.types import BatchMultiple
from planner.trace import load_model
from planner.trace.unflatten import flattened_dims
from tests.trace.test_trace import GPT2, both

B = BatchMultiple(1)

FLATTENED = """
class Q(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(16, 24) * 0.1)
        self.s = nn.Parameter(torch.randn(24) * 0.1)
        self.b = nn.Linear(24, 16)
        self.n = nn.LayerNorm(16)
    def forward(self, z):
        size = z.shape
        rows = self.n(z.reshape(-1, size[-1]))
        {line}
        return z + rows.view(size)

class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(48, 16)
        self.l = nn.ModuleList(Q() for _ in range(3))
        self.o = nn.Linear(16, 48)
    def forward(self, input_ids):
        z = self.e(input_ids)
        for q in self.l:
            z = q(z)
        return self.o(z)

def make():
    return M()
"""


def flattened(graph: ModelGraph) -> list[Node]:
    """Nodes of the repeated body whose first dim is several tokens of each sample."""
    body = graph.body_of[graph.blocks[1].body]
    return [node for node in body.nodes for type_ in node.types
            if type_.rank and isinstance(type_.shape[0], BatchMultiple) and type_.shape[0].factor > 1]


@pytest.mark.slow
@pytest.mark.parametrize("line", [
    "rows = self.b(F.gelu(torch.mm(rows, self.a) + self.s))",
    "rows = self.b(torch.addmm(self.s, rows, self.a).softmax(-1))",
    "rows = self.b((rows @ self.a).softmax(1) * self.s)",
    "first, second = torch.split(rows @ self.a, 12, dim=1); rows = self.b(torch.cat((first, second), -1).tanh())",
    "first, second = (rows @ self.a).chunk(2, dim=-1); rows = (first * second) @ self.a[:12, :16]",
    "rows = (self.b(rows @ self.a) * rows) + rows.mean(-1, keepdim=True) * torch.ones(rows.shape[0], 1)",
    "rows = self.b(rows @ self.a).masked_fill(rows > 0, 0.5) * (rows @ self.s[:16]).unsqueeze(-1)",
    "rows = self.b(rows @ self.a).view(-1, 4, 4).transpose(1, 2).reshape(-1, 16)",
    "h = rows.view(size[0] * 16, 4, 4); rows = torch.bmm(h, h.transpose(1, 2)).relu().view(-1, 16)",
], ids=["mm", "addmm", "softmax", "split", "chunk", "mean", "vector", "transpose", "bmm"])
def test_means_the_same(model_file: Callable[[str], str], line: str) -> None:
    graph, error = both(load_model(model_file(FLATTENED.format(line=line)), {}, None))
    assert error < 1e-12
    assert len(graph.bodies) == 3
    if not any(word in line for word in ("cat(", "unsqueeze")):
        assert not flattened(graph)
        assert not any(node.op in ("mm", "bmm") for body in graph.bodies for node in body.nodes)


@pytest.mark.slow
def test_hugging_face_gpt2(config_file: Callable[..., str]) -> None:
    graph, error = both(load_model(config_file(**GPT2), {}, 16))
    assert error < 1e-12
    assert not flattened(graph)
    products = [node for node in graph.body_of["GPT2Block"].nodes if node.op == "matmul"]
    weights = {value.name: value.type.shape for value in graph.body_of["GPT2Block"].parameters}
    assert [weights[node.operands[1]] for node in products] == [(32, 96), (32, 32), (32, 128), (128, 32)]
    assert {node.types[0].rank for node in products} == {3}


def test_what_mixes_rows_reads_them_flat(model_file: Callable[[str], str]) -> None:
    line = "rows = self.b(rows @ self.a); rows = rows[torch.arange(len(rows))] * 2"
    graph, error = both(load_model(model_file(FLATTENED.format(line=line)), {}, None))
    assert error < 1e-12
    assert {node.op for node in flattened(graph)} == {"reshape", "index.Tensor", "mul.Tensor"}


@pytest.mark.parametrize(("shape", "flat", "rows"), [
    ((B, 16, 8), (BatchMultiple(16), 8), (B, 16)),
    ((B, 16, 4, 2), (BatchMultiple(16), 8), (B, 16)),
    ((B, 1, 8), (B, 8), ()),
    ((B, 16, 1, 8), (BatchMultiple(16), 8), (B, 16, 1)),
    ((B, 1, 8), (B, 1, 2, 4), ()),
    ((B, 4, 16, 2), (BatchMultiple(4), 16, 2), (B, 4)),
    ((B, 16, 8), (B, 128), ()),
    ((B, 16, 8), (B, 16, 2, 4), ()),
    ((3, 4, 5), (12, 5), (3, 4)),
    ((1, 1, 5), (1, 5), ()),
    ((B, 5), (BatchMultiple(5),), (B, 5)),
])
def test_flattened_dims(shape: tuple[int, ...], flat: tuple[int, ...], rows: tuple[int, ...]) -> None:
    assert flattened_dims(shape, flat) == rows
