"""Parameters that share memory are refused, unless they are one, or have no number in common."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from planner.ir.errors import ModelError
from planner.ir.graph import InitStep
from planner.trace import load_model, trace_model
from planner.trace.build import build
from planner.trace.memory import _apart
from planner.trace.recipes import replay

NET = """
class M(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.a, self.b = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)
        {line}
def make():
    return M({size})
"""
BOTH, ASSIGN = "parameters a.weight and b.weight lie in the same memory", "assign the same Parameter"
BUFFER = "buffer w lies in the memory of parameter a.weight"


@pytest.mark.parametrize("size", ["", "2048"])  # of numbers, and fake
@pytest.mark.parametrize(("line", "said"), [
    ("self.b.weight = nn.Parameter(self.a.weight)", BOTH), ("self.b.weight.data = self.a.weight.data", BOTH),
    ("self.b.weight = nn.Parameter(self.a.weight.t())", BOTH), ("self.b.weight = nn.Parameter(self.a.weight[1:])", BOTH),
    ("self.register_buffer('w', self.a.weight.detach())", BUFFER),
    ("self.register_buffer('w', self.a.weight.data[0])", BUFFER),
])
def test_one_memory(model_file: Callable[[str], str], line: str, said: str, size: str) -> None:
    source = load_model(model_file(NET.format(line=line, size=size)), {}, None)
    with pytest.raises(ModelError, match=said) as error:
        build(source, "float32")
    assert (ASSIGN in str(error.value)) == (said is BOTH)


@pytest.mark.parametrize("line", [
    "self.b.weight = self.a.weight", "self.b.weight = nn.Parameter(self.a.weight.detach().clone())",
    "self.c, self.d = map(nn.Parameter, torch.randn(8, 4).chunk(2))",
    "self.c, self.d = map(nn.Parameter, torch.randn(8, 4).chunk(2, 1))",
    "self.c, self.d = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0, 4))",
    "nn.utils.parametrizations.weight_norm(self.a); nn.utils.weight_norm(self.b)",
    "nn.utils.parametrize.register_parametrization(self.a, 'weight', nn.Identity())",
    "nn.utils.spectral_norm(self.a); nn.utils.parametrizations.spectral_norm(self.b)",
    "from torch.nn.utils import prune; prune.l1_unstructured(self.a, 'weight', 0.5)",
    "self.c, self.d = nn.LSTM(4, 4, 2), nn.MultiheadAttention(16, 2)",
    "self.register_buffer('w', torch.ones(4)); self.register_buffer('v', self.w[:2])",
])
def test_memory_of_their_own(model_file: Callable[[str], str], line: str) -> None:
    build(load_model(model_file(NET.format(line=line, size="")), {}, None), "float32")


FROZEN = "self.a.weight.requires_grad_(False); "


@pytest.mark.parametrize("line", [
    FROZEN + "self.b.weight = nn.Parameter(self.a.weight, requires_grad=False)",
    FROZEN + "self.b.weight.requires_grad_(False).data = self.a.weight.data",
    FROZEN + "self.register_buffer('w', self.a.weight.detach())",
    "t = torch.randn(8, 4); self.c, self.d = nn.Embedding.from_pretrained(t), nn.Embedding.from_pretrained(t)",
    "t = torch.arange(32.).view(8, 4); self.c, self.d = nn.Embedding.from_pretrained(t), nn.Embedding.from_pretrained(t[1:])",
])
def test_what_nothing_trains_may_share(model_file: Callable[[str], str], line: str) -> None:
    """It starts with the very numbers of the model, one draw where it is one."""
    source = load_model(model_file(NET.format(line=line, size="")), {}, None)
    built = {p.fqn: p for p in build(source, "float32").parameters}
    one, other = (("c.weight", "d.weight") if "c.weight" in built else ("a.weight", "b.weight"))
    if "t[1:]" in line:
        plain = source.build()
        for fqn in (one, other):
            assert torch.equal(replay(built[fqn].init, torch.empty(built[fqn].type.sizes(1))), plain.get_parameter(fqn))
    elif "register_buffer" not in line:
        assert built[other].init == (InitStep("draws_of", (one,)), *built[one].init)


@pytest.mark.parametrize(("line", "said"), [
    (FROZEN + "self.b.weight = nn.Parameter(self.a.weight)", BOTH),
    ("self.b.weight = nn.Parameter(self.a.weight, requires_grad=False)", BOTH),
    (FROZEN + "self.b.weight = nn.Parameter(self.a.weight.t(), requires_grad=False)", "are different parts of one random draw"),
])
def test_one_of_two_is_trained_or_drawn_otherwise(model_file: Callable[[str], str], line: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        build(load_model(model_file(NET.format(line=line, size="")), {}, None), "float32")


def test_one_frozen_table_twice_is_traced(model_file: Callable[[str], str]) -> None:
    source = """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        table = torch.arange(768.0).sin().view(48, 16)
        self.c, self.d = nn.Embedding.from_pretrained(table), nn.Embedding.from_pretrained(table)
        self.a = nn.Linear(16, 48)

    def forward(self, input_ids):
        return self.a(self.c(input_ids) * self.d(input_ids).cos())

def make():
    return M()
"""
    graph = trace_model(load_model(model_file(source), {}, None), sequence=8, dtype="float32")
    assert {fqn for block in graph.blocks for _, fqn in block.parameters} == {"c.weight", "d.weight", "a.weight", "a.bias"}


def test_parts_that_have_no_number_in_common() -> None:
    """Against the places that are read, of every two parts of a matrix."""
    whole = torch.arange(24).view(4, 6)
    parts = [whole[rows, columns] for rows in (slice(0, 2), slice(1, 3), slice(2, 4), slice(None))
             for columns in (slice(0, 3), slice(2, 5), slice(3, 6), slice(None))]
    for one in parts:
        for other in parts:
            common = set(one.flatten().tolist()) & set(other.flatten().tolist())
            assert not (_apart(one, other) and common)
            assert common or _apart(one, other)
    assert not _apart(whole, whole.t())
