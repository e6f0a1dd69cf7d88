"""plan.yaml: what is written is read back equal; what is wrong is said in one line that names the field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.evaluate import evaluate
from planner.ir.errors import PlanFileError
from planner.ir.placement import REPLICATE, SHARED, BodyPlacement, Placement, shard
from planner.ir.plan import Batch, BlockDecision, Mesh, Plan, Schedule, StagePlan
from planner.ir.serialize import fingerprint
from planner.plan_file import dump, load, parse_placement
from planner.search import Certificate
from tests.search.made import make_cluster, make_costed, make_graph

GRAPH, CLUSTER = make_graph("eaaaab"), make_cluster(4, 100_000)
COSTED = make_costed(GRAPH, 2, zeros=(0, 1, 2, 3), levels=("none", "selective", "full"))
PROOF = Certificate(0.5, 10, 3)


def _plan(decisions: list[BlockDecision], cut: int) -> Plan:
    stages = (StagePlan(0, 0, cut, tuple(decisions[:cut])), StagePlan(1, cut, 6, tuple(decisions[cut:])))
    return Plan(
        "made", fingerprint(GRAPH), "made", CLUSTER.fingerprint, "fp32", 4, Mesh(pipeline=2, data=2), Batch(8, 1, 4),
        Schedule("1f1b"), 2, stages, COSTED.placements[0],
    )


PLAN = _plan([BlockDecision(1, "none")] * 3 + [BlockDecision(3, "full")] * 3, 2)
TEXT = dump(PLAN, evaluate(PLAN, COSTED, CLUSTER), GRAPH, PROOF)


@pytest.fixture(autouse=True)
def _placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies made by hand have no operations to place."""
    def complete(body: object, degree: int, boundary: object, parameters: object, pricing: object) -> BodyPlacement:
        return COSTED.placements[0][body.name]  # type: ignore[attr-defined]

    monkeypatch.setattr("planner.plan_file.complete", complete)


@settings(max_examples=30, deadline=None)
@given(
    decisions=st.lists(st.builds(BlockDecision, st.integers(0, 3), st.sampled_from(["none", "selective", "full"])),
                       min_size=6, max_size=6),
    cut=st.integers(1, 5),
)
def test_round_trip(decisions: list[BlockDecision], cut: int) -> None:
    plan = _plan(decisions, cut)
    text = dump(plan, evaluate(plan, COSTED, CLUSTER), GRAPH, PROOF)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("planner.plan_file.complete", lambda body, *_: COSTED.placements[0][body.name])
        assert load(text, "plan.yaml", GRAPH, CLUSTER) == (plan, PROOF)


@pytest.mark.parametrize("cut", range(1, 6))
def test_names_of_blocks_that_look_like_ranges(cut: int) -> None:
    """Both readings of "a - b - c" are blocks, and "a - b" is one where it is a range as well."""
    names = ("a", "b", "a - b", "c", "b - c", "a - b - c")
    graph = replace(GRAPH, blocks=tuple(replace(block, name=name) for block, name in zip(GRAPH.blocks, names, strict=True)))
    plan = replace(_plan([BlockDecision(0, "none")] * 6, cut), model_fingerprint=fingerprint(graph))
    text = dump(plan, evaluate(plan, COSTED, CLUSTER), graph, PROOF)
    assert load(text, "plan.yaml", graph, CLUSTER) == (plan, PROOF)


def test_the_order_of_the_axes() -> None:
    """It is read back, and a file from before it was written has the usual one."""
    plan = replace(PLAN, mesh=replace(PLAN.mesh, order="data-pipeline-tensor"))
    text = dump(plan, evaluate(plan, COSTED, CLUSTER), GRAPH, PROOF)
    assert load(text, "plan.yaml", GRAPH, CLUSTER)[0] == plan
    assert "axis_order: data-pipeline-tensor\n" in text
    assert load(text.replace("axis_order: data-pipeline-tensor\n", ""), "plan.yaml", GRAPH, CLUSTER)[0] == PLAN
    with pytest.raises(PlanFileError, match="axis_order"):
        load(text.replace("data-pipeline-tensor", "tensor-first"), "plan.yaml", GRAPH, CLUSTER)


@pytest.mark.parametrize("placement", [REPLICATE, SHARED, shard(0), shard(1, (4, 4, 4), 2), shard(2, unit=64)])
def test_placements_round_trip(placement: Placement) -> None:
    assert parse_placement(str(placement), "here") == placement


def _set(*path: str | int, value: object) -> Callable[[str], str]:
    def edit(text: str) -> str:
        data = yaml.safe_load(text)
        at = data
        for part in path[:-1]:
            at = at[part]
        at[path[-1]] = value
        return str(yaml.safe_dump(data))

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text[: len(text) // 2] + "{[", "is not YAML|plan.yaml"),
        (lambda text: "- 1", "holds no mapping"),
        (lambda text: "", "holds no mapping"),
        (lambda text: "a: !!python/object:os.system {}", "is not YAML"),
        (_set("colour", value="red"), "colour"),
        (_set("format", value=2), "format"),
        (_set("format", value=True), "format: is True; this version reads format 1"),
        (_set("format", value=1.0), "format: is 1.0; this version reads format 1"),
        (_set("placed_for", value=10**400), "placed_for: is 1000.*less than or equal to 1000000000"),
        (_set("optimizer", "warmup_steps", value=10**400), "optimizer.warmup_steps: is 1000.*less than or equal to 1000000000"),
        (_set("batch", "global", value=10**400), "batch.global: is 1000.*less than or equal to 1000000000"),
        (_set("stages", 1, "blocks", value="blocks.2 - blocks.4 - blocks.5"), "names 3 blocks; give .first - last., or"),
        (_set("mesh", "data", value="two"), "mesh.data"),
        (_set("mesh", "data", value=4), "spans 2 x 4 x 1 = 8 devices.*has 4"),
        (_set("batch", "accumulation", value=5), "not global 8"),
        (_set("zero_group", value=3), "zero_group"),
        (_set("schedule", "name", value="fast"), "schedule.name"),
        (_set("schedule", "name", value="zbv"), "exactly two stages"),
        (_set("model", "fingerprint", value="00"), "another model"),
        (_set("cluster", "fingerprint", value="00"), "another cluster"),
        (_set("stages", 0, "blocks", value="blocks.0 - blocks.2"), "stages.1.blocks"),
        (_set("stages", 1, value={"blocks": "blocks.2 - blocks.4", "zero": 1, "recompute": "none"}), "blocks.5 and what"),
        (_set("stages", 1, "blocks", value="blocks.2 - nowhere"), "'nowhere' is no block"),
        (_set("stages", 1, "zero", value=4), "stages.1.zero"),
        (_set("stages", 1, "zero", value=[1, 1]), 'zero: is .1, 1.; give 0, 1, 2 or 3, or a list of "value x count"'),
        (_set("stages", 1, "zero", value=["1 x 3"]), "counts 3 blocks.*has 4"),
        (_set("stages", 1, "recompute", value="some"), "stages.1.recompute"),
        (_set("placements", "a", "parameters", "weight", value="shard(x)"), "placements.a.parameters.weight"),
        (_set("placements", value={}), "missing or unknown"),
        (_set("certificate", value=None), "certificate"),
    ],
)
def test_what_is_wrong_is_named(edit: Callable[[str], str], message: str) -> None:
    with pytest.raises(PlanFileError, match=message):
        load(edit(TEXT), "plan.yaml", GRAPH, CLUSTER)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, len(TEXT) - 1), junk=st.text(max_size=3))
def test_mangled_text_never_raises_anything_else(at: int, junk: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("planner.plan_file.complete", lambda body, *_: COSTED.placements[0][body.name])
        try:
            load(TEXT[:at] + junk + TEXT[at + 1 :], "plan.yaml", GRAPH, CLUSTER)
        except PlanFileError as error:
            assert "\n" not in str(error)
