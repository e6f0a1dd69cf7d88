"""An operation without a rule is replicated, and the plan says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hardware_profiles import resolve_cluster
from planner.costing import cost_graph
from planner.ir.plan import Mesh
from planner.placement.place import whole_placement
from tests.matrix.test_matrix import graph_of


@pytest.mark.slow
def test_an_operation_without_a_rule_is_named() -> None:
    graph = graph_of("nameless")
    layer = next(body for body in graph.bodies if body.name == "_Q")
    odd = replace(layer, nodes=(*layer.nodes[:-1], replace(layer.nodes[-1], op="mystery")))
    strange = replace(graph, bodies=tuple(odd if body is layer else body for body in graph.bodies))
    option = {body.name: replace(whole_placement(body), degree=2) for body in strange.bodies}
    costed = cost_graph(
        strange, resolve_cluster("local-cpu:1x2"), mesh=Mesh(tensor=2), microbatch=1, precision="fp64", zero_group=1,
        options=(option,),
    )
    assert costed.warnings == ("_Q: mystery has no sharding rule: every tensor rank runs it whole",)
