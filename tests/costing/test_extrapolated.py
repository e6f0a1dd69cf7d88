"""A plan says what it takes from beyond what rates come from: small products, odd heads, operations without a rule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hardware_profiles import resolve_cluster
from planner.cli import main
from planner.costing import measure_graph
from planner.costing.extrapolated import FITTED_DIMENSION, extrapolations
from planner.placement.place import whole_placement
from planner.validate.jobs import ModelShape
from planner.validate.prepare import trace_shape
from tests.matrix.test_matrix import graph_of


@pytest.mark.slow
def test_an_operation_without_a_rule_is_named_on_one_device_too() -> None:
    graph = graph_of("nameless")
    layer = next(body for body in graph.bodies if body.name == "_Q")
    odd = replace(layer, nodes=(*layer.nodes[:-1], replace(layer.nodes[-1], op="mystery")))
    strange = replace(graph, bodies=tuple(odd if body is layer else body for body in graph.bodies))
    counted = measure_graph(strange, 1, 1, ({body.name: whole_placement(body) for body in strange.bodies},))
    said = extrapolations(counted, resolve_cluster("local-cpu:1x1"))
    assert "_Q: mystery has no rule: priced by the bytes that it moves" in said


@pytest.mark.slow
@pytest.mark.parametrize(("hidden", "beyond"), [(64, True), (512, False)])
def test_products_beyond_the_curve_are_said_by_the_plan(
    hidden: int, beyond: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.yaml"
    heads = hidden // 64
    main([
        "plan", "examples/gpt.py:gpt", "--set", f"hidden={hidden}", "--set", f"heads={heads}", "--set", "layers=2", "--set",
        "vocab=1024", "--cluster", "dgx-a100-80gb:1x1", "--batch", "8", "--seq", "512", "-o", str(out),
    ])
    main(["show", str(out)])
    said = " ".join(capsys.readouterr().out.split())
    assert (f"extrapolated, rates come from products of {FITTED_DIMENSION} and more" in said) == beyond


@pytest.mark.parametrize(("heads", "beyond"), [(4, True), (5, False)])
def test_heads_that_tensor_cores_do_not_read_whole_are_said(heads: int, beyond: bool) -> None:
    """600 over 4 heads is 150 each; over 5 it is 120, fifteen times 8."""
    settings = (("hidden", 600), ("heads", heads), ("vocab", 1024))
    graph = trace_shape(ModelShape("examples/gpt.py:gpt", settings, 128), 1, "bfloat16")
    counted = measure_graph(graph, 1, 1, ({body.name: whole_placement(body) for body in graph.bodies},))
    said = extrapolations(counted, resolve_cluster("dgx-a100-80gb:1x1"))
    assert any(line.endswith("rates come from heads that are a multiple of 8") for line in said) == beyond
