"""Where nothing fits: the message is true, and the change that it names makes a plan fit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hardware_profiles import Cluster, resolve_cluster
from planner.constraints_text import parse_pins
from planner.fitting import fitted
from planner.ir.graph import ModelGraph
from planner.remedies import explain
from planner.search import Request
from planner.search.refusal import MemoryTooSmall
from planner.trace import load_model, trace_model
from planner.trials import Trial, fewest_nodes
from tests.commands import SMALL, run, small

PINS = ("pipeline=2", "data=2", "zero=0", "microbatch=4")


def small_cluster(path: Path, memory_bytes: int, per_node: int = 4) -> Path:
    path.write_text(
        f"base: local-cpu\nnodes: 1\ndevices_per_node: {per_node}\nchip: {{memory: {{value: {memory_bytes}, unit: B}}}}\n"
    )
    return path


def plan(cluster: object, output: Path, *arguments: object, pins: tuple[str, ...] = PINS) -> tuple[object, ...]:
    pinned = [part for pin in pins for part in ("--pin", pin)]
    return ("plan", *small(hidden=256), "--cluster", cluster, "--batch", 16, "--gap", 0.05, "--time-limit", 4,
            *pinned, *arguments, "-o", output)


@pytest.mark.slow
def test_the_named_change_makes_a_plan_fit(tmp_path: Path) -> None:
    output = tmp_path / "plan.yaml"
    least = run(*plan(small_cluster(tmp_path / "roomy.yaml", 2**34), output, "--objective", "memory", "--json"))
    assert least.code == 0, least.err
    peak = least.json["objective"]["least_memory_bytes"]
    assert least.json["objective"]["lower_bound_bytes"] == peak

    exact = run(*plan(small_cluster(tmp_path / "exact.yaml", peak), output, "--json"))
    assert exact.code == 0 and exact.json["predicted"]["peak_memory_bytes"] <= peak

    tight, refused, short = tmp_path / "tight.yaml", exact, 0
    while refused.code == 0:  # what fits by its replay alone
        short = peak - refused.json["predicted"]["peak_memory_bytes"] + 1
        refused = run(*plan(small_cluster(tight, peak - short), output, "--json"))
    assert refused.code == 3
    proof = "proven: by their sums none needs less(?: than [^;]*)?; of the thriftiest none fits as replayed"
    said = re.search(rf", (\d+) bytes? too few \({proof}\)", refused.error)
    assert said is not None and 0 < (missing := int(said[1])) <= short, refused.error
    conflict = re.findall(r"--pin '([^']+)'", refused.error.split("these conflict with it")[1].split(" change that fits")[0])
    named = re.search(r"(?:cheapest|a) change that fits: without --pin '([^']+)'", refused.error)
    assert named is not None, refused.error
    assert named[1] in conflict
    # The remedy works, and so it must be one of what conflicts; the conflict alone leaves nothing.
    assert run(*plan(tight, output, pins=tuple(pin for pin in PINS if pin != named[1]))).code == 0
    assert run(*plan(tight, output, pins=tuple(conflict))).code == 3
    larger = re.search(r"devices of \S+ GiB \((\d+) bytes more\)", refused.error)
    assert larger is not None and int(larger[1]) == missing
    assert run(*plan(small_cluster(tight, peak - short + missing), output)).code == 0


@pytest.mark.slow
def test_what_fits_by_its_replay_alone_is_planned(tmp_path: Path) -> None:
    """One micro-batch a step: gradients come as activations go, which the sums do not see."""
    output, pins = tmp_path / "plan.yaml", ("data=4", "zero=0", "microbatch=4")
    roomy = small_cluster(tmp_path / "roomy.yaml", 2**34)
    least = run(*plan(roomy, output, "--objective", "memory", "--json", pins=pins)).json["objective"]["least_memory_bytes"]
    short = small_cluster(tmp_path / "short.yaml", least - 1)
    planned = run(*plan(short, output, "--json", pins=pins))
    assert planned.code == 0, planned.err
    assert planned.json["predicted"]["peak_memory_bytes"] <= least - 1
    assert planned.json["search"]["optimality_gap"] <= 0.05
    shown = " ".join(run("show", output).out.split())
    assert "warning: fits by its memory as replayed" in shown and "a certificate is of plans whose sums fit" in shown


@pytest.mark.slow
def test_more_nodes_are_counted(tmp_path: Path) -> None:
    """The named number of nodes is enough, and the one before it is not; it holds the state, so only the sums say so."""
    cluster, output = tmp_path / "h100.yaml", tmp_path / "plan.yaml"
    arguments = ("plan", *small(layers=12, hidden=512), "--batch", 16, "--gap", 0.1, "--time-limit", 30,
                 "--pin", "pipeline=1", "--pin", "tensor=1", "-o", output, "--cluster")
    peak = run(*arguments, "dgx-h100:2", "--objective", "memory", "--json").json["objective"]["least_memory_bytes"]
    cluster.write_text(f"base: dgx-h100\nnodes: 1\nchip: {{memory: {{value: {peak + 2**24}, unit: B}}}}\n")
    refused = run(*arguments, cluster)
    assert refused.code == 3, refused.err
    named = re.search(r"with (\d+) nodes \([^;]*; (\d+) (?:is|are) too few by the sums of memory\)", refused.error)
    assert named is not None and named.groups() == ("2", "1"), refused.error
    assert run(*arguments, f"{cluster}:2").code == 0


@pytest.mark.slow
def test_tensor_ranks_on_several_nodes_are_a_remedy(tmp_path: Path) -> None:
    """One sample and one large layer: neither data nor pipeline ranks make it fit, tensor ranks over nodes of one device do."""
    cluster, output = small_cluster(tmp_path / "one.yaml", 2**30, per_node=1), tmp_path / "plan.yaml"
    arguments = ("plan", *small(hidden=1024, vocab=8192), "--batch", 1, "--time-limit", 4, "-o", output)
    wide = ("--cluster", "local-cpu:4x1", "--pin", "tensor=4", "--objective", "memory", "--json")
    peak = run(*arguments, *wide).json["objective"]["least_memory_bytes"]
    small_cluster(cluster, peak, per_node=1)
    refused = run(*arguments, "--cluster", cluster)
    assert refused.code == 3, refused.err
    named = re.search(r"with (\d+) nodes", refused.error)
    assert named is not None, refused.error
    assert run(*arguments, "--cluster", f"{cluster}:{named[1]}x1").code == 0


@pytest.mark.slow
@pytest.mark.parametrize(("late", "words", "claim"), [
    ("zero", "without --pin 'zero=0'", "; a change that fits: "), ("batch", "with --batch 16", "; cheapest change that fits: "),
    ("", "", "; cheapest change that fits: "),
])
def test_what_there_was_no_time_to_try_is_named(
    late: str, words: str, claim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside a remedy of its kind; that is the cheapest only where none as cheap was left untried."""
    graph = trace_model(load_model(SMALL[0], {"layers": 2, "hidden": 64, "vocab": 64}, 32), sequence=32, dtype="float32")
    whole = resolve_cluster("local-cpu:1x2")
    cluster = replace(whole, chip=replace(whole.chip, memory_bytes=whole.chip.reserve_bytes + 3 * 2**18))
    request = Request(8, 32, "fp32", parse_pins(["zero=0", "recompute=none"]), time_limit_s=60.0)
    with pytest.raises(MemoryTooSmall) as refused:
        fitted(graph, cluster, request)
    least = refused.value.least

    def tried(graph: ModelGraph, cluster: Cluster, request: Request, *rest: object) -> Trial:
        left = {condition.name for condition in request.constraints.conditions}
        if left == {"zero"}:
            return Trial((least.plan, least.prediction))
        untold = left == {"recompute"} if late == "zero" else late == "batch" and request.batch == 16
        return Trial(excluded="recompute" in left and not untold)

    monkeypatch.setattr("planner.remedies.try_change", tried)
    monkeypatch.setattr("planner.remedies.searched", lambda trial, *rest: trial)
    advice = explain(refused.value, graph, cluster, request, lambda text: None).advice
    assert f"{claim}without --pin 'recompute=none' (" in advice
    assert advice.partition("; not found in the time given: ")[2] == words


def test_no_batch_is_tried_where_devices_do_not_hold_the_state_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = trace_model(load_model(SMALL[0], {"layers": 2, "hidden": 64, "vocab": 64}, 32), sequence=32, dtype="float32")
    whole, tried = resolve_cluster("local-cpu:1x2"), list[tuple[int, int]]()
    cluster = replace(whole, chip=replace(whole.chip, memory_bytes=whole.chip.reserve_bytes + 2**16))
    with pytest.raises(MemoryTooSmall) as refused:
        fitted(graph, cluster, Request(8, 32, "fp32", time_limit_s=60.0))

    def recorded(graph: ModelGraph, cluster: Cluster, request: Request, *rest: object) -> Trial:
        tried.append((cluster.nodes, request.batch))
        return Trial(excluded=True)

    monkeypatch.setattr("planner.remedies.try_change", recorded)
    monkeypatch.setattr("planner.remedies.searched", lambda trial, *rest: trial)
    explained = explain(refused.value, graph, cluster, Request(8, 32, "fp32"), lambda text: None)
    fewest = fewest_nodes(graph, cluster, Request(8, 32, "fp32"))
    assert tried and fewest > 1 and all(nodes >= fewest and batch == 8 for nodes, batch in tried)
    assert {remedy.kind for remedy in explained.remedies} == {"memory"} and not explained.undecided


def test_fewer_devices_than_hold_the_state_once_are_too_few() -> None:
    graph = trace_model(load_model(SMALL[0], {"layers": 2, "hidden": 64, "vocab": 64}, 32), sequence=32, dtype="float32")
    cluster = resolve_cluster("dgx-h100:4x1")
    state = 12 * sum(parameter.type.elements() for parameter in graph.parameters)
    for parts in (1, 3):
        for more, expected in ((0, parts), (-1, parts + 1)):
            chip = replace(cluster.chip, memory_bytes=cluster.chip.reserve_bytes + -(-state // parts) + more)
            assert fewest_nodes(graph, replace(cluster, chip=chip), Request(8, 32, "fp32")) == expected
