"""What a model computes without a gradient, beside operations that change tensors in place, of which a trace has none."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from planner.ir.errors import ModelError
from planner.trace import load_model, trace_model
from tests.trace.test_trace import both


def model(lines: str) -> str:
    body = lines.replace("\n", f"\n{' ' * 8}")
    return f"""
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(48, 16)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
    def forward(self, input_ids):
        x = self.a(self.e(input_ids))
        {body}
        return self.b(x) @ self.e.weight.T

def make():
    return M()
"""


@pytest.mark.slow
@pytest.mark.parametrize("lines", [
    "with torch.no_grad():\n    gate = torch.sigmoid(self.b(x))\nx = torch.tanh(self.b(x)) * gate",
    "with torch.set_grad_enabled(False):\n    gate = self.b(x)\nx = x * gate",
    "with torch.no_grad():\n    y, z = x.to(x.dtype), x.contiguous()\n    gate = y.type_as(z) * 2\nx = self.b(y + z) * gate",
    ("with torch.no_grad():\n    y, z = x.chunk(2, -1)\n    w = x.transpose(0, 1)\n"
     "x = self.b(x) * torch.cat([z, y], -1) + w.transpose(0, 1)"),
    ("with torch.no_grad():\n    y = self.b(x)\n    with torch.enable_grad():\n        z = self.a(x * y)\n    w = self.b(z)\n"
     "x = x + z * w"),
])
@pytest.mark.parametrize("before", ["x = x + 1", "x += 1"])
def test_no_grad_beside_a_change_in_place(before: str, lines: str, model_file: Callable[[str], str]) -> None:
    _, error = both(load_model(model_file(model(f"{before}\n{lines}")), {}, None))
    assert error < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("lines", [
    "with torch.no_grad():\n    gate = self.b(x)\n    gate.sigmoid_()\n    gate[:, 0] = 1\nx = x * gate",
    "y = torch.zeros_like(x)\nwith torch.no_grad():\n    y[:, 0] = self.b(x)[:, 0]\nx = x * y",
    "y = torch.zeros_like(x)\nwith torch.no_grad():\n    y[:, 0] = self.a(x)[:, 0]\ny[:, 1] = self.b(x)[:, 1]\nx = x * y",
    ("def gated(row):\n    with torch.no_grad():\n        gate = torch.sigmoid(self.a(row))\n    return self.b(row) * gate\n"
     "x = torch.vmap(gated)(x)"),
    "with torch.no_grad():\n    gate = torch.vmap(lambda row: torch.sigmoid(self.b(row)))(x)\nx = x * gate",
])
def test_changes_and_maps_within_no_grad(lines: str, model_file: Callable[[str], str]) -> None:
    _, error = both(load_model(model_file(model(lines)), {}, None))
    assert error < 1e-12


GIVEN = ["y = x.detach()\ny[:, 0] = self.b(x)[:, 0]\nx = y", "y = x.detach()\ny += self.b.bias\nx = y"]


@pytest.mark.slow
@pytest.mark.parametrize("lines", GIVEN)
def test_a_detached_value_that_is_given_a_gradient(lines: str, model_file: Callable[[str], str]) -> None:
    """It is refused with the way out, which has the gradients of the plain model."""
    spec = model_file(model(lines))
    written = Path(spec.rpartition(":")[0]).read_text().splitlines()
    line = next(at for at, text in enumerate(written, 1) if re.search(r"y\[:, 0\] =|y \+=", text))
    said = r"gives a gradient to a detached value, .*; write into a copy, h.detach\(\).clone\(\)$"
    with pytest.raises(ModelError, match=said) as raised:
        trace_model(load_model(spec, {}, None), sequence=8, dtype="float64")
    assert raised.value.where.endswith(f"user_model.py:{line}")
    _, error = both(load_model(model_file(model(lines.replace(".detach()", ".detach().clone()"))), {}, None))
    assert error < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("lines", [
    "with torch.no_grad():\n    x.clamp_(-0.5, 0.5)",
    "with torch.no_grad():\n    x[:, 0] = 0",
    "with torch.no_grad():\n    x.view(-1).mul_(2)",
    "with torch.no_grad():\n    torch.mul(x, 2, out=x)",
    "x.detach().mul_(2)",
    "y = x.flatten().detach()\ny.mul_(2)",
    "x = torch.vmap(lambda row: self.b(row.detach().mul_(0.5) + row))(x)",
])
def test_a_change_that_the_gradient_does_not_see(lines: str, model_file: Callable[[str], str]) -> None:
    spec = model_file(model(lines))
    written = Path(spec.rpartition(":")[0]).read_text().splitlines()
    line = next(at for at, text in enumerate(written, 1) if re.search(r"[a-z]_\(|out=|\[:, 0\] =", text))
    said = r"is changed in place under torch.no_grad\(\) or .*; h \+ \(f\(h\) - h\).detach"
    with pytest.raises(ModelError, match=said) as raised:
        trace_model(load_model(spec, {}, None), sequence=8, dtype="float64")
    assert raised.value.where.endswith(f"user_model.py:{line}")


@pytest.mark.slow
@pytest.mark.parametrize("lines", [
    "y = self.b(x).detach()\ny[:, 0] = 0\ny.mul_(2)\nx = x * y",
    "y = self.b(x)\nwith torch.no_grad():\n    y.mul_(2)\n    z = y.sigmoid()\nx = x * z * y.detach()",
    "with torch.no_grad():\n    y = self.b(x)\ny.mul_(2)\nx = x * y",
    "y = torch.ones_like(x)\nwith torch.no_grad():\n    y[:, 1] = 2\ny.detach().mul_(3)\nx = x * y",
    "y = (x > 0).to(x.dtype)\nwith torch.no_grad():\n    y[:, 0] = 1\nx = x * y",
    "x = x + (x.clamp(-0.1, 0.1) - x).detach()\nx += 1",
])
def test_a_change_of_what_is_read_without_a_gradient(lines: str, model_file: Callable[[str], str]) -> None:
    _, error = both(load_model(model_file(model(lines)), {}, None))
    assert error < 1e-12
