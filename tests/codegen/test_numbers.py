"""The emitted program computes what the graph says: loss and every gradient, in float64."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch

from codegen import emit
from planner.trace.interpret import run
from runtime.collectives import TensorAxis
from tests.codegen.plans import plan_of, traced


@contextmanager
def imported(directory: Path) -> Iterator[ModuleType]:
    """The program's ``model.py``."""
    specification = importlib.util.spec_from_file_location("emitted_model", directory / "model.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["emitted_model"] = module
    specification.loader.exec_module(module)
    yield module
    del sys.modules["emitted_model"]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("example,settings", [
    ("gpt", {}), ("gpt", {"tied": False, "bias": False, "gelu": "none"}), ("llama", {}),
])
def test_loss_and_gradients_equal_the_graphs(
    example: str, settings: dict[str, object], recompute: str, tmp_path: Path
) -> None:
    graph = traced(example, dtype="float64", **settings)
    plan = plan_of(graph, precision="fp64", recompute=(recompute,))  # type: ignore[arg-type]
    emit(plan, graph, tmp_path / "program", prediction=None, plan_yaml="")
    torch.manual_seed(0)
    parameters = {
        p.fqn: (0.2 * torch.randn(p.type.sizes(1), dtype=torch.float64)).requires_grad_() for p in graph.parameters
    }
    batch = {item.name: torch.randint(item.high, item.type.sizes(3)) for item in graph.batch_inputs}
    expected, weight = run(graph, parameters, batch)
    gradients = torch.autograd.grad(expected, list(parameters.values()))
    with imported(tmp_path / "program") as model:
        torch.set_default_dtype(torch.float64)
        try:
            stage = model.Stage(0, len(model.CHAIN), TensorAxis(None, 0, 1))
        finally:
            torch.set_default_dtype(torch.float32)
        blocks = [block for block in stage.modules() if isinstance(block, model.ParallelBlock)]
        held = {d.fqn: parameter for block in blocks for d, parameter in block.entries()}
        for block in blocks:
            block.fill_constants()
        with torch.no_grad():
            for fqn, parameter in held.items():
                parameter.copy_(parameters[fqn])
        loss = stage(**batch)
        loss.backward()
        assert model.weigh(**batch) == (weight,)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for fqn, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(held[fqn].grad, gradient, rtol=1e-10, atol=1e-12, msg=fqn)
