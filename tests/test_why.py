"""`shardwright why`: what another decision costs, term by term; what conflicts; what more hardware buys."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hardware_profiles import Cluster, resolve_cluster
from planner.bundle import read
from planner.commands.why import _answer_text
from planner.decisions import decisions_of
from planner.evaluate import evaluate_plan
from planner.ir.errors import NoPlanFits
from planner.ir.graph import ModelGraph
from planner.search import Request, SearchResult, parse_pins
from planner.search.least import Least
from planner.search.refusal import MemoryTooSmall
from planner.search.request import Certificate
from planner.why import Gain, _larger, ask, request_of, sensitivity
from tests.commands import SMALL, Outcome, run

QUICK = ("--gap", "0.02", "--time-limit", "5")
PATIENT = ("--gap", "0.02", "--time-limit", "30")
"""For what a busy machine must have the time to tell too."""


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    path = tmp_path_factory.mktemp("why") / "plan.yaml"
    outcome = run("plan", *SMALL, "--cluster", "local-cpu:1x4", "--batch", 16, "--pin", "zero<=1", "--forbid",
                  "schedule=zbv, pipeline=2", *QUICK, "-o", path, "--json")
    assert outcome.code == 0, outcome.err
    return path, outcome


@pytest.mark.slow
def test_a_plan_keeps_the_constraints_of_its_certificate(planned: tuple[Path, Outcome]) -> None:
    text = planned[0].read_text()
    assert "--pin zero<=1" in text and "--forbid schedule=zbv, pipeline=2" in text
    assert run("check", planned[0]).code == 0


@pytest.mark.slow
def test_every_term_is_the_difference_of_two_evaluations(planned: tuple[Path, Outcome], tmp_path: Path) -> None:
    path, plan = planned
    answer = run("why", path, "pipeline=4", *QUICK, "--json").json
    assert answer["asked"] == ["--pin pipeline=4"] and answer["fits"]
    assert answer["plan"]["step_s"] == plan.json["predicted"]["step_s"]
    assert answer["plan"]["breakdown_s"] == plan.json["predicted"]["breakdown_s"]
    assert answer["then"]["decisions"]["pipeline"] == "4" and answer["changes"]["pipeline"]["then"] == "4"
    for name, more in answer["cost_s"].items():
        if name != "step":
            assert more == answer["then"]["breakdown_s"][name] - answer["plan"]["breakdown_s"][name]
    terms = sum(more for name, more in answer["cost_s"].items() if name != "step")
    assert math.isclose(terms, answer["cost_s"]["step"], rel_tol=1e-6, abs_tol=1e-9)
    assert sum(more for name, more in answer["cost_bytes"].items() if name != "peak") == answer["cost_bytes"]["peak"]
    stages = answer["then"]["decisions"]
    assert "3 x" not in stages["zero"] and "2 x" not in stages["zero"], "the job's own constraints hold"
    again = run("plan", *SMALL, "--cluster", "local-cpu:1x4", "--batch", 16, "--pin", "zero<=1", "--forbid",
                "schedule=zbv, pipeline=2", "--pin", "pipeline=4", *QUICK, "-o", tmp_path / "plan.yaml", "--json")
    assert math.isclose(again.json["predicted"]["step_s"], answer["then"]["step_s"], rel_tol=0.05)


@pytest.mark.parametrize("refused", [False, True])
def test_the_plan_itself_counts_where_it_keeps_what_is_asked(
    planned: tuple[Path, Outcome], monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """A search that ends at its time limit may know a slower plan, or none."""
    bundle = read(planned[0])
    own_s, tensor = bundle.prediction.step_s, bundle.plan.mesh.tensor
    slower = replace(bundle.prediction, step_s=2 * own_s)

    def fitted(*_: object, **options: object) -> SearchResult:
        if refused:
            raise MemoryTooSmall("no plan", "more time", Least(bundle.plan, slower, 0))
        return SearchResult(bundle.plan, slower, Certificate(0.5 * own_s, 1, 1))

    monkeypatch.setattr("planner.why.fitted", fitted)
    request = request_of(bundle, gap=0.1, time_limit_s=1.0)
    answer = ask(bundle, parse_pins([f"tensor={tensor}"]), request, lambda text: None)
    assert answer.result is not None and answer.result.prediction == bundle.prediction
    assert answer.result.lower_bound_s == (0.0 if refused else 0.5 * own_s)
    assert not answer.decisions and not any(part.more for part in (*answer.seconds, *answer.memory))


def test_plans_that_differ_in_single_layers_are_not_called_the_same(
    planned: tuple[Path, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many layers have each choice; which ones is another matter."""
    found = read(planned[0])
    stages = tuple(
        replace(stage, decisions=tuple(
            replace(decision, recompute="full" if stage.first + at == 1 else "none")
            for at, decision in enumerate(stage.decisions)
        )) for stage in found.plan.stages
    )
    turned = tuple(replace(stage, decisions=stage.decisions[::-1]) for stage in stages)
    plans = [replace(found.plan, stages=each) for each in (stages, turned)]
    assert plans[0] != plans[1] and decisions_of(plans[0]) == decisions_of(plans[1])
    bundle = replace(found, plan=plans[0], prediction=evaluate_plan(plans[0], found.graph, found.cluster))
    for plan, said in zip(plans, ("nothing: the plan is the best one found under this too", "nothing of these: "), strict=True):
        result = SearchResult(plan, bundle.prediction, Certificate(0.0, 1, 1))
        monkeypatch.setattr("planner.why.fitted", lambda *_, result=result, **options: result)
        answer = ask(bundle, parse_pins(["recompute!=selective"]), request_of(bundle, gap=0.1, time_limit_s=1.0), print)
        assert said in _answer_text(answer)


def test_the_plan_itself_does_not_count_where_it_breaks_what_is_asked(
    planned: tuple[Path, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = read(planned[0])
    found = SearchResult(bundle.plan, replace(bundle.prediction, step_s=2 * bundle.prediction.step_s), Certificate(0.0, 1, 1))
    monkeypatch.setattr("planner.why.fitted", lambda *_, **options: found)
    asked = parse_pins([f"tensor!={bundle.plan.mesh.tensor}"])
    assert ask(bundle, asked, request_of(bundle, gap=0.1, time_limit_s=1.0), lambda text: None).result == found


@pytest.mark.slow
def test_the_model_file_is_not_needed(planned: tuple[Path, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in planned[0].parent.glob("plan.*"):
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    outcome = run("why", "plan.yaml", "recompute=full", *QUICK)
    assert outcome.code == 0, outcome.err
    assert "--pin recompute=full: " in outcome.out and "recompute" in outcome.out and "largest rank's memory" in outcome.out


@pytest.mark.slow
def test_what_cannot_fit_is_explained_in_bytes(planned: tuple[Path, Outcome]) -> None:
    chip = yaml.safe_load(planned[0].with_suffix(".cluster.yaml").read_text())["chip"]
    memory, reserve = (round(chip[name]["value"]) for name in ("memory", "reserve"))
    usable = 100_000
    outcome = run("why", planned[0], "pipeline=2", "--headroom", f"{memory - reserve - usable}B", *PATIENT, "--json")
    assert outcome.code == 3, outcome.err
    answer = outcome.json
    limits = answer["limits"]
    assert not answer["fits"] and limits["limit_bytes"] == reserve + usable
    assert limits["excess_bytes"] == limits["needed_bytes"] - limits["limit_bytes"] > 0
    assert limits["limit_bytes"] < limits["proven_bytes"]
    assert limits["conflict"] == [f"--headroom '{memory - reserve - usable} B'"]
    assert limits["remedies"][0]["change"] == "constraint"
    text = run("why", planned[0], "--headroom", f"{memory - reserve - usable}B", *PATIENT)
    assert text.code == 3 and "bytes too few" in text.out and "cheapest change that fits: without --headroom" in text.out
    assert run("why", planned[0], "--headroom", f"{memory}B").code == 2


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "named"), [
    (("colour=3",), "K one of pipeline"), (("tensor=3",), "tensor=3 leaves no candidate on 4 devices"),
    (("schedule=zbv", "zero=3"), "torch loses gradients"), (("nothing.*: zero=1",), "names no layer"),
    (("tensor=2", "--gap", "-1"), "--gap: is -1"), (("tensor=2", "--time-limit", "0"), "--time-limit"),
    (("--headroom", "much"), "no amount of memory"),
])
def test_a_wrong_question_is_one_line(planned: tuple[Path, Outcome], arguments: tuple[str, ...], named: str) -> None:
    outcome = run("why", planned[0], *arguments)
    assert outcome.code == 2 and named in outcome.error and outcome.out == ""


def test_constraints_that_cannot_hold_are_one_line(planned: tuple[Path, Outcome], tmp_path: Path) -> None:
    """No cluster is to blame, and there is no gain to tell of."""
    for file in planned[0].parent.glob("plan.*"):
        shutil.copy(file, tmp_path)
    path = tmp_path / "plan.yaml"
    path.write_text(path.read_text().replace("--pin zero<=1", "--pin microbatch=64"))
    outcome = run("why", path)
    assert outcome.code == 2 and "microbatch" in outcome.error and outcome.out == ""


def test_where_nothing_fits_there_is_no_table_of_nothing(
    planned: tuple[Path, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    gains = [Gain("as it is", None, "too large"), Gain("1 more node", None, "too large still")]
    monkeypatch.setattr("planner.why.sensitivity", lambda *arguments: iter(gains))
    outcome = run("why", planned[0])
    assert (outcome.code, outcome.out) == (3, "as it is: too large\n1 more node: too large still\n")
    assert run("why", planned[0], "--json").code == 3


def test_a_missing_plan_is_one_line() -> None:
    assert "missing.yaml: cannot be read" in run("why", "missing.yaml", "tensor=2").error


@pytest.mark.slow
def test_twice_the_bandwidth_starts_no_call_sooner(planned: tuple[Path, Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = replace(read(planned[0]), cluster=resolve_cluster("dgx-h100:2"))
    seen = list[Cluster]()

    def fitted(graph: ModelGraph, cluster: Cluster, request: Request, **options: object) -> SearchResult:
        seen.append(cluster)
        raise NoPlanFits("cluster", "seen")

    monkeypatch.setattr("planner.why.fitted", fitted)
    gains = list(sensitivity(bundle, request_of(bundle, gap=0.1, time_limit_s=1.0), lambda text: None))
    for at, name in enumerate(("node", "fabric")):
        asked = next(index for index, gain in enumerate(gains) if gain.change.startswith(f"twice the bandwidth of {name}"))
        before, after = (cluster.levels[at].link for cluster in (bundle.cluster, seen[asked]))
        assert after == replace(before, bandwidth_bytes_s=2 * before.bandwidth_bytes_s, peer_bytes_s=2 * before.peer_bytes_s)
        assert after.start_s == before.start_s


@pytest.mark.slow
def test_more_hardware_never_costs(planned: tuple[Path, Outcome]) -> None:
    rows = run("why", planned[0], *QUICK, "--json").json["sensitivity"]
    changes = [row["change"] for row in rows]
    assert changes[:2] == ["as it is", "1 GB more memory a device"]
    assert any(change.startswith("twice the bandwidth of ") for change in changes) and changes[-1] == "1 more node"
    for row in rows:
        if row["fits"] and row["change"] != "1 more node":
            assert row["step_s"] <= planned[1].json["predicted"]["step_s"] * (1 + 1e-9)
            assert row["saved_at_most_s"] >= row["saved_s"] - 1e-12


def test_what_was_found_for_the_job_as_it_is_counts_on_more_hardware(
    planned: tuple[Path, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later search that ends at its gap or its time limit may know less than the first, and so may the file's plan."""
    found = read(planned[0])
    slow = replace(found.plan, stages=tuple(
        replace(stage, decisions=tuple(replace(decision, recompute="full") for decision in stage.decisions))
        for stage in found.plan.stages
    ))
    bundle = replace(found, plan=slow, prediction=evaluate_plan(slow, found.graph, found.cluster))
    own_s = found.prediction.step_s
    assert own_s < bundle.prediction.step_s

    def fitted(graph: ModelGraph, cluster: Cluster, request: Request, **options: object) -> SearchResult:
        if cluster is bundle.cluster:
            return SearchResult(found.plan, found.prediction, Certificate(0.5 * own_s, 1, 1))
        return SearchResult(slow, replace(bundle.prediction, step_s=2 * own_s), Certificate(0.5 * own_s, 1, 1))

    monkeypatch.setattr("planner.why.fitted", fitted)
    as_it_is, *same, node = sensitivity(bundle, request_of(bundle, gap=0.1, time_limit_s=1.0), lambda text: None)
    assert as_it_is.result is not None and as_it_is.result.prediction == found.prediction
    assert same[0].change == "1 GB more memory a device" and len(same) == 1 + len(bundle.cluster.levels)
    larger = (cluster for _, cluster in _larger(bundle.cluster) if isinstance(cluster, Cluster))
    for gain, cluster in zip(same, list(larger)[1:-1], strict=True):
        assert gain.result is not None and gain.result.plan == found.plan, gain.change
        assert gain.result.prediction == evaluate_plan(found.plan, found.graph, cluster)
        assert gain.result.prediction.step_s <= own_s
    assert node.result is not None and node.result.plan == slow, "it is a plan of fewer devices"


@pytest.mark.slow
def test_a_plan_that_breaks_its_constraints_does_not_count(
    planned: tuple[Path, Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """However quick it is: an edit may have undone a pin, and the searches keep it."""
    for file in planned[0].parent.glob("plan.*"):
        shutil.copy(file, tmp_path)
    path = tmp_path / "plan.yaml"
    own_s = planned[1].json["predicted"]["step_s"]

    def fitted(graph: ModelGraph, cluster: Cluster, request: Request, **options: object) -> SearchResult:
        bundle = read(path)
        slower = replace(bundle.prediction, step_s=2 * own_s)
        return SearchResult(bundle.plan, slower, Certificate(1.5 * own_s, 1, 1))

    monkeypatch.setattr("planner.why.fitted", fitted)
    assert run("why", path, "--json").json["sensitivity"][0]["step_s"] == own_s
    undone = f"--pin schedule!={read(path).plan.schedule.name}"
    path.write_text(path.read_text().replace("--pin zero<=1", undone))
    for row in run("why", path, "--json").json["sensitivity"]:
        assert row["step_s"] == 2 * own_s and row["saved_s"] <= row["saved_at_most_s"]
        assert row.get("plan_breaks") == (None if row["change"] == "1 more node" else undone)
    assert f"the plan itself does not count where it breaks {undone}" in run("why", path).out
