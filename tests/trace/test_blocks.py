"""Where a chain of blocks is cut, and what crosses the cuts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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


GROWING = """
class Layer(nn.Module):
    def __init__(self, at):
        super().__init__()
        self.reach, self.rate = {reach}, {rate}
        self.mixed, self.norm, self.out = nn.Conv1d(16, 16, 2, dilation=self.reach), nn.LayerNorm(16), nn.Linear(16, 16)
    def forward(self, x):
        y = self.mixed(F.pad(self.norm(x).transpose(1, 2), (self.reach, 0))).transpose(1, 2)
        return x + self.rate * self.out(self.norm(y.tanh()))
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.layers, self.h = nn.Embedding(8, 16), nn.ModuleList(map(Layer, range(4))), nn.Linear(16, 8)
    def forward(self, input_ids):
        x = self.e(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.h(x)
def make():
    return M()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("reach", "rate"), [("2**at", "0.5"), ("1", "0.1 * at + 0.1")])
def test_layers_of_a_list_that_differ_in_a_number_are_blocks(
    model_file: Callable[[str], str], reach: str, rate: str
) -> None:
    """Dilations that grow, rates that fall: no two layers are equal, all do the same operations."""
    text = GROWING.format(reach=reach, rate=rate)
    graph = trace_model(load_model(model_file(text), {}, None), sequence=32, dtype="float32")
    assert [block.body for block in graph.blocks] == ["Embedding", "Layer", "Layer2", "Layer3", "Layer4", "Head"]


QUERIES = """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x, read):
        return x + self.down(F.gelu(self.up(self.norm(x)))) + F.scaled_dot_product_attention(x, read, read)
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.q, self.h = nn.Embedding(8, 16), nn.Parameter(torch.zeros(4, 16)), nn.Linear(16, 8)
        self.readers, self.writers = (nn.ModuleList(Layer() for _ in range(3)) for _ in range(2))
    def forward(self, input_ids):
        x = self.e(input_ids)
        for layer in self.readers:
            x = layer(x, x)
        y = self.q[None].repeat(len(x), 1, 1)
        for layer in self.writers:
            y = layer(y, x)
        return self.h(y)
def make():
    return M()
def example_inputs(batch, seq):
    return {"input_ids": torch.randint(0, 8, (batch, seq)), "labels": torch.randint(0, 8, (batch, 4))}
def loss(outputs, batch):
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())
"""


@pytest.mark.slow
def test_learned_queries_begin_in_the_block_that_reads_them(model_file: Callable[[str], str]) -> None:
    """Repeated for every sample: a block of their own would not know how many there are."""
    graph = trace_model(load_model(model_file(QUERIES), {}, None), sequence=16, dtype="float32")
    assert [block.body for block in graph.blocks] == ["Embedding", *["Layer"] * 3, "Layer2", *["Layer3"] * 2, "Head"]


NUMBERED = """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.h = nn.Embedding(8, 16), nn.Linear(16, 8)
        for at in range(4):
            self.register_parameter(f"w_{{at}}", nn.Parameter(torch.randn(16, 16)))
            self.register_parameter(f"{key}_{{at}}", nn.Parameter(torch.randn(16)))
    def forward(self, input_ids):
        x = self.e(input_ids)
        for at in range(4):
            x = x + getattr(self, f"{key}_{{at}}") * torch.tanh(x @ getattr(self, f"w_{{at}}"))
        return self.h(x)
def make():
    return M()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("key", "name"), [("scale", "scale"), ("lambda", "_lambda"), ("self", "_self"), ("", "_0")])
def test_layers_without_a_module_may_number_any_name(model_file: Callable[[str], str], key: str, name: str) -> None:
    graph = trace_model(load_model(model_file(NUMBERED.format(key=key)), {}, None), sequence=16, dtype="float32")
    assert [block.body for block in graph.blocks] == ["Embedding", *["Repeat"] * 4, "Head"]
    assert {value.name for value in graph.body_of["Repeat"].parameters} == {"w", name}
