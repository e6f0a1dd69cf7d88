"""On traced models of common sizes, at the prices of a real machine, the ILP finds the Megatron-LM split by itself,
whatever things are called."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from hardware_profiles import resolve_cluster
from planner.costing import Pricing
from planner.ir.body import Body
from planner.ir.graph import ModelGraph
from planner.ir.placement import SHARED, BodyPlacement, Placement, shard
from planner.placement import Option, place_graph
from planner.placement.complete import complete
from planner.placement.ledger import collectives
from planner.placement.verify import verify
from planner.trace import load_model, trace_model

ROOT = Path(__file__).parents[2]
CLUSTER = resolve_cluster("dgx-a100-80gb:1")
SIZES: dict[str, object] = {"layers": 4, "hidden": 8192, "heads": 64, "ffn_hidden": 32768, "vocab": 51200}
MEANINGLESS = """
import torch
import torch.nn.functional as F
from torch import nn

class A(nn.Module):
    def __init__(self):
        super().__init__()
        t = (8192,), (16384, 8192), (8192, 8192), (8192, 8192), (8192,), (8192, 32768), (32768, 8192)
        self.b = nn.ParameterList(nn.Parameter(torch.zeros(*s)) for s in t)

    def forward(self, c):
        d = F.rms_norm(c, (8192,), self.b[0])
        e, f = F.linear(d, self.b[1]).unflatten(-1, (2, 64, 128)).unbind(2)
        g = F.linear(d, self.b[2]).unflatten(-1, (64, 128))
        h = F.scaled_dot_product_attention(e.transpose(1, 2), f.transpose(1, 2), g.transpose(1, 2), is_causal=True)
        c = c + F.linear(h.transpose(1, 2).flatten(2), self.b[3])
        return c + torch.relu(F.rms_norm(c, (8192,), self.b[4]) @ self.b[5]) @ self.b[6]

class Z(nn.Module):
    def __init__(self):
        super().__init__()
        self.y = nn.Embedding(51200, 8192)
        self.x = nn.ModuleList(A() for _ in range(4))
        self.w = nn.Linear(8192, 51200, bias=False)

    def forward(self, input_ids):
        v = self.y(input_ids)
        for u in self.x:
            v = u(v)
        return self.w(v)

def make():
    return Z()
"""


@cache
def traced(name: str) -> ModelGraph:
    """A model of the examples."""
    settings = SIZES | ({"kv_heads": 8} if name == "llama" else {})
    return trace_model(load_model(f"{ROOT}/examples/{name}.py:{name}", settings, 2048), sequence=2048, dtype="bfloat16")


def option(graph: ModelGraph, degree: int, *, split: bool) -> Option:
    """The option with divided parameters under a whole or a split boundary."""
    found = place_graph(graph, degree, Pricing(CLUSTER, degree, 1))
    for each in found:
        for body in graph.bodies:
            verify(body, each.placements[body.name])
    return min((each for each in found if each.sequence_parallel == split), key=lambda each: each.state_elements)


def layer(graph: ModelGraph) -> Body:
    """The body that most blocks repeat."""
    return graph.body_of[Counter(block.body for block in graph.blocks).most_common(1)[0][0]]


def kinds(body: Body, placement: BodyPlacement) -> tuple[Counter[str], Counter[str]]:
    """Collectives by kind, forward and backward."""
    forward, backward = collectives(body, placement, placement.degree, 8)
    counted: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    for into, each in zip(counted, (forward, backward), strict=True):
        for collective in each:
            into[collective.kind] += collective.count
    return counted


def matrices(body: Body, placement: BodyPlacement) -> dict[str, Placement]:
    """Placements of the parameters of rank 2."""
    pairs = zip(body.parameters, placement.parameters, strict=True)
    return {parameter.name: placed for parameter, placed in pairs if parameter.type.rank == 2}


def gpt2(folder: Path) -> ModelGraph:
    """The Hugging Face GPT-2, whose fused projection is transposed and cut in three."""
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 4, "n_embd": 8192, "n_head": 64,
              "vocab_size": 51200, "n_positions": 2048, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    (folder / "config.json").write_text(json.dumps(config))
    return trace_model(load_model(f"hf:{folder}", {}, 2048), sequence=2048, dtype="bfloat16")


def meaningless(folder: Path) -> ModelGraph:
    """A transformer without a telling name."""
    (folder / "a.py").write_text(MEANINGLESS)
    return trace_model(load_model(f"{folder}/a.py:make", {}, 2048), sequence=2048, dtype="bfloat16")


@pytest.fixture(params=["gpt", "llama", "gpt2", "meaningless"])
def graph(request: pytest.FixtureRequest, tmp_path: Path) -> ModelGraph:
    """Each model in turn."""
    if request.param in ("gpt", "llama"):
        return traced(request.param)
    return gpt2(tmp_path) if request.param == "gpt2" else meaningless(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 4])
def test_a_whole_boundary_takes_two_all_reduces_each_way(graph: ModelGraph, degree: int) -> None:
    body = layer(graph)
    placement = option(graph, degree, split=False).placements[body.name]
    assert kinds(body, placement) == (Counter(all_reduce=2), Counter(all_reduce=2))
    assert all(placed.state == "shard" for placed in matrices(body, placement).values())


@pytest.mark.slow
def test_a_split_boundary_gathers_and_scatters_twice_and_shares_the_norms(graph: ModelGraph) -> None:
    body = layer(graph)
    found = option(graph, 4, split=True)
    assert found.boundary == shard(1)
    placement = found.placements[body.name]
    assert kinds(body, placement) == (Counter(all_gather=2, reduce_scatter=2),) * 2
    assert all(placed.state == "shard" for placed in matrices(body, placement).values())
    norms = {
        name for node in body.nodes if node.base in ("rms_norm", "layer_norm") for name in node.operands
    } & {parameter.name for parameter in body.parameters}
    placed = dict(zip((parameter.name for parameter in body.parameters), placement.parameters, strict=True))
    assert norms and all(placed[name] == SHARED for name in norms)


@pytest.mark.slow
def test_the_head_and_a_tied_embedding_are_split_over_the_vocabulary(graph: ModelGraph) -> None:
    found = option(graph, 4, split=False)
    head = graph.body_of[graph.blocks[-1].body]
    vocabulary = next(p for p in head.parameters if 51200 in p.type.shape)
    placed = dict(zip((p.name for p in head.parameters), found.placements[head.name].parameters, strict=True))
    assert placed[vocabulary.name] == shard(vocabulary.type.shape.index(51200))
    forward, _ = kinds(head, found.placements[head.name])
    assert forward["all_gather"] == forward["all_to_all"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_what_a_plan_file_stores_brings_the_placement_back(name: str) -> None:
    graph = traced(name)
    pricing = Pricing(CLUSTER, 4, 1)
    for each in place_graph(graph, 4, pricing):
        for body in graph.bodies:
            placement = each.placements[body.name]
            boundary = dict(zip((value.name for value in body.inputs), placement.inputs, strict=True))
            boundary |= zip(body.outputs, placement.outputs, strict=True)
            parameters = dict(zip((p.name for p in body.parameters), placement.parameters, strict=True))
            assert complete(body, 4, boundary, parameters, pricing) == placement
