"""Models in which nothing repeats are cut where one value crosses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from planner.ir.graph import ModelGraph
from planner.trace import load_model, trace_model
from planner.trace.sections import MOST, PRODUCTS
from tests.commands import EXAMPLES

UNLIKE = EXAMPLES.parent / "benchmarks" / "zoo" / "unlike.py"
CHAIN = """
def sizes(layers):
    return [16 + 3 * (7 * at % 23) for at in range(layers + 1)]
class M(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.stack = nn.Sequential(*(
            layer for a, b in zip(sizes(layers), sizes(layers)[1:]) for layer in (nn.Linear(a, b), nn.Tanh())
        ))
        self.width = sizes(layers)[0]
    def forward(self, x):
        return {result}
def make(layers):
    return M(layers)
def example_inputs(batch, seq):
    return {"x": torch.randn(batch, 16)}
def loss(outputs, batch):
    return (outputs ** 2).mean()
"""


@pytest.fixture
def chain(model_file: Callable[[str], str]) -> Callable[..., ModelGraph]:
    """Linear layers of sizes of their own."""
    def traced(layers: int, result: str = "self.stack(x)") -> ModelGraph:
        file = model_file(CHAIN.replace("{result}", result))
        return trace_model(load_model(file, {"layers": layers}, None), dtype="float32")

    return traced


def _products(graph: ModelGraph) -> list[int]:
    bodies = [graph.body_of[block.body] for block in graph.blocks]
    return [sum(len(parameter.type.shape) > 1 for parameter in body.parameters) for body in bodies]


@pytest.mark.parametrize(("name", "products"), [("coder", [2, 2, 2]), ("narrowing", [2, 2, 2]), ("pyramid", [2, 2, 2, 2])])
def test_a_section_has_two_products(name: str, products: list[int]) -> None:
    graph = trace_model(load_model(f"{UNLIKE}:make", {"name": name}, None), dtype="float32")
    assert _products(graph) == products and len(graph.bodies) == len(graph.blocks)
    assert [len(graph.crossing(at)) for at in range(1, len(graph.blocks))] == [1] * (len(graph.blocks) - 1)


def test_cuts_are_where_the_least_crosses() -> None:
    """Behind the pool, not before it."""
    graph = trace_model(load_model(f"{UNLIKE}:make", {"name": "pyramid"}, None), dtype="float32")
    first = [node.base for node in graph.body_of[graph.blocks[0].body].nodes]
    assert first == ["conv2d", "relu", "conv2d", "relu", "max_pool2d"]


PARTS = """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh())
        self.decoder = nn.Sequential(nn.Flatten(), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 16))
        self.judge = nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 1))
    def forward(self, x):
        return self.judge(self.decoder(self.encoder(x)))
def make():
    return M()
def example_inputs(batch, seq):
    return {"x": torch.randn(batch, 16)}
def loss(outputs, batch):
    return (outputs ** 2).mean()
"""


def test_a_section_that_is_a_module_has_its_name(model_file: Callable[[str], str]) -> None:
    graph = trace_model(load_model(model_file(PARTS), {}, None), dtype="float32")
    assert [block.name for block in graph.blocks] == ["encoder", "decoder", "head"]
    assert _products(graph) == [PRODUCTS] * 3


@pytest.mark.parametrize(("result", "blocks"), [
    ("self.stack(x)", 4),
    # What is added at the end crosses every cut.
    ("(lambda y: self.stack[1:](y) + y.sum(-1, keepdim=True))(self.stack[0](x))", 1),
])
def test_one_value_crosses(chain: Callable[..., ModelGraph], result: str, blocks: int) -> None:
    assert len(chain(8, result).blocks) == blocks


def test_a_section_is_not_cut_in_two_products(chain: Callable[..., ModelGraph]) -> None:
    assert [len(chain(layers).blocks) for layers in (2, 3, 4, 5, 6)] == [1, 1, 2, 2, 3]


def test_small_sections_are_joined_where_there_are_many(chain: Callable[..., ModelGraph]) -> None:
    graph = chain(2 * MOST + 8)
    products = _products(graph)
    assert len(graph.blocks) == MOST and sum(products) == 2 * MOST + 8
    work = [sum(p.type.elements() for p in graph.body_of[block.body].parameters) for block in graph.blocks]
    assert max(work) < 4 * min(work)
