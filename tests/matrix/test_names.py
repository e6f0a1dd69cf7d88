"""Whatever a model's inputs, modules and tensors are called: the program's loss and gradients are the plain model's."""

from __future__ import annotations

import py_compile
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from planner.trace import load_model, trace_model
from tests.matrix.build import Row
from tests.matrix.programs import emitted, losses
from tests.matrix.reference import batches_of, worst_gradient
from tests.matrix.workers import Workers

pytestmark = pytest.mark.slow
PLAIN = Row(accumulation=2, microbatch=2)
CUT = Row(pipeline=2, accumulation=2, microbatch=2, recompute="full", schedule="gpipe")
MODEL = """
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.Inner = nn.Linear(8, 8)
            self.drop = nn.Dropout(1e-30)  # a draw that drops nothing

        def forward(self, value, shift, again):
            return value + self.drop(torch.tanh(self.Inner(value))) + shift + again.unsqueeze(-1)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.Layers = nn.ModuleList([Layer() for _ in range(4)])
            self.Gain = nn.Parameter(torch.ones(8))
            self.gain = nn.Parameter(torch.full((8,), 2.0))
            self.register_buffer("Scale", torch.arange(8.0))

        def forward(self, {first}, {second}):
            value = {first} * self.Gain * self.gain
            shift = {second}.cos().unsqueeze(-1) * self.Scale
            for layer in self.Layers:
                value = layer(value, shift, {second})
            return value

    def example_inputs(batch, seq):
        return {{"{first}": torch.randn(batch, 8), "{second}": torch.randn(batch), "{third}": torch.randn(batch, 8)}}

    def loss(outputs, batch):
        return (outputs - batch["{third}"]).square().mean()
"""


def compare(workers: Workers, source: str, inputs: Sequence[str], row: Row, folder: Path) -> None:
    """Train a step of the program of a model file, and of the plain model, which takes the batch's ``inputs``."""
    file = folder / "user_model.py"
    file.write_text(dedent(source), encoding="utf-8")
    given = load_model(f"{file}:Model", {}, None)
    graph = trace_model(given, dtype="float64")
    program = emitted(graph, row, folder / "program")
    py_compile.compile(str(program.directory / "model.py"), doraise=True)
    files = folder / "start.pt", folder / "gradients.pt"
    reports = program.train(workers, 1, "--export-start", str(files[0]), "--dump-gradients", str(files[1]))
    plain = given.build().double()
    plain.load_state_dict(torch.load(files[0]))
    batch: Any = batches_of(graph, row.accumulation * row.microbatch).at(0)
    assert given.loss is not None
    expected = given.loss(plain(*(batch[name] for name in inputs)), batch)
    expected.backward()
    assert losses(reports) == pytest.approx([expected.item()], rel=1e-12)
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    name, error = worst_gradient(torch.load(files[1]), gradients)
    assert error <= 1, f"{name}: {error}"


@pytest.mark.parametrize("row", [PLAIN, CUT], ids=lambda row: row.label)
@pytest.mark.parametrize("names", [("X", "x", "Mask"), ("x", "Mask", "mtp"), ("x", "mtp", "X")], ids="-".join)
def test_inputs_that_torch_spells_otherwise(workers: Workers, names: tuple[str, str, str], row: Row, tmp_path: Path) -> None:
    first, second, third = names
    compare(workers, MODEL.format(first=first, second=second, third=third), names[:2], row, tmp_path)


@pytest.mark.parametrize("row", [PLAIN, CUT], ids=lambda row: row.label)
@pytest.mark.parametrize("names", [
    ("block", "alive", "self"), ("rng", "checkpoint", "constant"), ("received", "dict", "\ufb01"),
], ids="-".join)
def test_inputs_that_a_stage_calls_otherwise(workers: Workers, names: tuple[str, str, str], row: Row, tmp_path: Path) -> None:
    """A stage has something of its own of that name, or Python reads another (NFKC)."""
    first, second, third = names
    compare(workers, MODEL.format(first=first, second=second, third=third), names[:2], row, tmp_path)


KEYS = (
    'a"b', "c'd", 'e"""', "a\\n", "b\\", "a\nb", "c\r", "{x}", "y}", "{{z", "(", "a, b", "\u00b2", "01", "2", "3", "\u0663",
    "\ufb01", "fi", "\u65e5\u672c", "a - b", "#", " ", "lambda", "tp",
)
KEYED = """
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.inner = nn.ModuleDict({name: nn.Linear(4, 4)})

        def forward(self, x):
            return x + torch.tanh(next(iter(self.inner.values()))(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.named = nn.ModuleDict({key: Layer("weight") for key in KEYS})
            self.numbered = nn.ModuleDict({'{"': nn.ModuleList([Layer("ﬁ\\n") for _ in range(3)])})

        def forward(self, x):
            for layer in (*self.named.values(), *self.numbered['{"']):
                x = layer(x)
            return x

    def example_inputs(batch, seq):
        return {"x": torch.randn(batch, 4)}

    def loss(outputs, batch):
        return outputs.square().mean()
"""


@pytest.mark.parametrize("row", [PLAIN, CUT], ids=lambda row: row.label)
def test_keys_of_modules(workers: Workers, row: Row, tmp_path: Path) -> None:
    compare(workers, f"KEYS = {KEYS!r}\n{dedent(KEYED)}", ["x"], row, tmp_path)
