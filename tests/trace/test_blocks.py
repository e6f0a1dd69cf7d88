"""Where a chain of blocks is cut, and what crosses the cuts."""

from __future__ import annotations

from collections.abc import Callable

from planner.trace import load_model, trace_model

FOLDED = """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
    def forward(self, x):  # rows of attention are samples times channels
        q, k, v = self.qkv(x).transpose(0, 1).contiguous().transpose(0, 1).chunk(3, -1)
        return self.norm(x + self.out(F.scaled_dot_product_attention(q, k, v)))
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.layers, self.h = nn.Linear(8, 16), nn.ModuleList(Layer() for _ in range(4)), nn.Linear(16, 10)
    def forward(self, x):
        batch, channels = x.shape[:2]
        x = self.e(x).flatten(0, 1)
        for layer in self.layers:
            x = layer(x)
        return self.h(x.view(batch, channels, 6, 16).mean((1, 2)))
def make():
    return M()
def example_inputs(batch, seq):
    return {"x": torch.randn(batch, 3, 6, 8), "labels": torch.randint(0, 10, (batch,))}
def loss(outputs, batch):
    return F.cross_entropy(outputs, batch["labels"])
"""


def test_a_value_and_its_reshape_cross_as_one(model_file: Callable[[str], str]) -> None:
    """Folded dims are unfolded where rows are treated alike; what treats them otherwise reads a reshape of the same value."""
    graph = trace_model(load_model(model_file(FOLDED), {}, None), sequence=None, dtype="float32")
    layers = [block.body for block in graph.blocks if len(graph.body_of[block.body].nodes) > 6]
    assert len(layers) == 4 and len(set(layers)) == 1
    assert [len(graph.crossing(at)) for at in range(1, len(graph.blocks))] == [1] * (len(graph.blocks) - 1)
