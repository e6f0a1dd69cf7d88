"""Parameters that the model casts itself: the trace has them as the program computes with them, or they are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from planner.ir.errors import ModelError
from planner.ir.graph import ModelGraph
from planner.trace import load_model, trace_model
from planner.trace.recipes import replay

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.a, self.h = nn.Embedding(40, 16), nn.Linear(16, 16), nn.Linear(16, 40)
        self.g = nn.GRU(16, 16, batch_first=True)
        self.table = nn.Parameter(torch.arange(16) / 3)
        self.register_buffer("scale", torch.ones(16, dtype=torch.bfloat16))
        {cast}
    def forward(self, input_ids):
        x = self.e(input_ids).to(self.a.weight.dtype) * self.table
        x = self.g(self.a(x).to(self.g.weight_hh_l0.dtype))[0] * self.scale
        return self.h(x.to(self.h.weight.dtype))

def make():
    return Net()
"""


def traced(model_file: Callable[[str], str], cast: str, dtype: str) -> ModelGraph:
    return trace_model(load_model(model_file(NET.format(cast=cast)), {}, None), sequence=8, dtype=dtype)


@pytest.mark.parametrize(("cast", "dtype", "said"), [
    ("self.to(torch.bfloat16)", "float32", "parameter table is bfloat16, and the job computes in fp32; --precision bf16, or"),
    ("self.half()", "bfloat16", "parameter table is float16, and the job computes in bf16; --precision fp16, or"),
    ("self.h.half()", "float32", "parameter h.weight is float16, and the job computes in fp32; --precision fp16, or"),
    ("self.double()", "float32", "parameter table is float64, and the job computes in fp32; --precision fp64, or"),
    ("self.table = nn.Parameter(torch.ones(16) * 1j)", "float32", "parameter table is torch.complex64; keep pairs of real"),
])
def test_the_job_says_what_trained_parameters_are(
    model_file: Callable[[str], str], cast: str, dtype: str, said: str
) -> None:
    with pytest.raises(ModelError, match=rf"user_model\.py:make: {said}"):
        traced(model_file, cast, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("cast", "dtype", "said"), [
    ("pass", "float32", ()), ("self.float()", "float32", ()), ("self.to(torch.bfloat16)", "bfloat16", ()),
    ("self.h.float()", "bfloat16", ("parameter h.weight and 1 more are float32 in the model",)),
    ("self.g.float()", "bfloat16", ("parameter g.weight_ih_l0 and 3 more are float32 in the model",)),
    ("self.float()", "bfloat16", ("parameter table and 9 more are float32 in the model",)),
    ("self.e.to(torch.bfloat16).requires_grad_(False)", "float32", ("parameter e.weight is bfloat16 in the model",)),
    ("self.a.double()", "float32", ("parameter a.weight and 1 more are float64 in the model",)),
])
def test_all_parameters_are_in_one_dtype(
    model_file: Callable[[str], str], cast: str, dtype: str, said: tuple[str, ...]
) -> None:
    """Buffers keep theirs."""
    graph = traced(model_file, cast, dtype)
    assert {parameter.type.dtype for parameter in graph.parameters} == {dtype}
    assert {value.type.dtype for body in graph.bodies for value in body.parameters} == {dtype}
    assert {node.type.dtype for body in graph.bodies for node in body.nodes if node.base in ("linear", "gru")} == {dtype}
    assert [buffer.type.dtype for buffer in graph.buffers] == ["float32" if cast == "self.float()" else "bfloat16"]
    assert graph.warnings == tuple(f"{part}: a program computes with all of them in {dtype}" for part in said)


def test_values_are_kept_as_the_model_has_them(model_file: Callable[[str], str]) -> None:
    graph = traced(model_file, "self.table = nn.Parameter(torch.arange(16, dtype=torch.float32) / 3)", "bfloat16")
    made = replay(graph.parameter_of["table"].init, torch.empty(16))
    assert torch.equal(made, torch.arange(16, dtype=torch.float32) / 3)
