"""What selective recomputation repeats."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from planner.costing.local import localise
from planner.costing.repeated import repeated_nodes
from planner.ir.body import Body
from planner.ir.regions import recompute_regions
from planner.placement.place import whole_placement
from planner.trace import load_model, trace_model

LAYER = """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(48, 16)
        self.mixed, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
    def forward(self, input_ids):
        x = self.embedding(input_ids)
        q, k, v = (part.unflatten(2, (2, 8)).transpose(1, 2) for part in ({mixed}).chunk(3, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return ({out} + {down}) @ self.embedding.weight.T
def make():
    return M()
"""
FORMS = {
    "layers": {"mixed": "self.mixed(x)", "out": "self.out(y)", "down": "self.down(F.gelu(self.up(x)))"},
    "transposed by hand": {
        "mixed": "x @ self.mixed.weight.T", "out": "y @ self.out.weight.T",
        "down": "F.gelu(x @ self.up.weight.T) @ self.down.weight.permute(1, 0)",
    },
}


@pytest.fixture(params=FORMS)
def body(request: pytest.FixtureRequest, model_file: Callable[[str], str]) -> Body:
    """The block with the attention."""
    source = load_model(model_file(LAYER.format(**FORMS[request.param])), {}, None)
    graph = trace_model(source, sequence=16, dtype="float32")
    return next(body for body in graph.bodies if any("attention" in node.base for node in body.nodes))


def test_a_region_is_attention_between_its_projections(body: Body) -> None:
    (region,) = recompute_regions(body)
    bases = [body.by_name[name].base for name in region]
    assert "scaled_dot_product_attention" in bases
    assert not {"matmul", "mm", "linear", "gelu"} & set(bases)
    assert not {parameter.name for parameter in body.parameters} & {
        operand for name in region for operand in body.by_name[name].operands
    }


def test_what_follows_the_last_that_is_kept_is_not_repeated(body: Body) -> None:
    (region,) = recompute_regions(body)
    last = next(at for at, name in enumerate(region) if "attention" in body.by_name[name].base)
    assert len(region) > last + 1
    assert repeated_nodes(localise(body, whole_placement(body), 1), "selective") == set(region[: last + 1])
