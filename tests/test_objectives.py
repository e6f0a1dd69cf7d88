"""What `best` can mean: least memory, fewest devices, the N best plans, the front between time and memory."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.evaluate import replayed
from planner.fitting import fitted
from planner.ir.plan import Prediction
from planner.search.least import Least
from planner.search.refusal import MemoryTooSmall
from tests.cli.contract import check_contract
from tests.commands import SMALL, run, small
from tests.wide import wide

PLAN = ("plan", *SMALL, "--batch", 16, "--gap", 0.05, "--time-limit", 4, "--json")
ON = ("--cluster", "local-cpu:1x4")


@pytest.mark.slow
def test_the_best_plans_differ_and_are_in_order(tmp_path: Path) -> None:
    outcome = run(*PLAN, *ON, "--top", 3, "-o", tmp_path / "plan.yaml")
    assert outcome.code == 0, outcome.err
    report = outcome.json
    others = report.pop("alternatives")
    assert report.pop("objective").keys() == {"complete", "others_lower_bound_s"}
    check_contract(report, 4)
    plans = [report, *others]
    seen = {
        (tuple(p["mesh"].values()), p["batch"]["micro"], tuple(p["schedule"].values()), p.get("zero_group", 0)) for p in plans
    }
    assert len(plans) == len(seen) == 3
    assert [p["predicted"]["step_s"] for p in plans] == sorted(p["predicted"]["step_s"] for p in plans)
    assert all(other["search"]["lower_bound_s"] >= report["search"]["lower_bound_s"] for other in others)
    for rank, other in enumerate(others, 2):
        assert Path(other["path"]) == tmp_path / f"plan.{rank}.yaml"
        check = run("check", other["path"], "--json")
        assert check.code == 0 and check.json["predicted"]["step_s"] == other["predicted"]["step_s"]


@pytest.mark.slow
def test_the_bound_of_another_plan_holds_under_the_constraints_in_its_certificate(tmp_path: Path) -> None:
    """Written as `plan` takes them: what they forbid does not come back in another order of axes, or in another group."""
    job = ("plan", *SMALL, "--batch", 6, "--cluster", "local-cpu:1x3", "--time-limit", 10, "--json", "-o")
    others = run(*job, tmp_path / "plan.yaml", "--top", 4).json["alternatives"]
    assert len(others) == 3
    for other in others:
        limits = yaml.safe_load(Path(other["path"]).read_text())["certificate"]["constraints"]
        assert limits and all(limit.startswith("--forbid ") for limit in limits)
        flags = [part for limit in limits for part in limit.split(" ", 1)]
        found = run(*job, tmp_path / "again.yaml", *flags).json["predicted"]["step_s"]
        assert found >= other["search"]["lower_bound_s"] * (1 - 1e-9)


@pytest.mark.slow
def test_what_only_looks_different_is_one_plan(tmp_path: Path) -> None:
    """Without ZeRO a ZeRO group is nothing, and gpipe is 1f1b with one micro-batch."""
    pins = ("zero=0", "zero_group in [1,2]", "pipeline=2", "data=2", "tensor=1", "microbatch=8", "recompute=none",
            "schedule in [gpipe,1f1b]")
    same = [part for pin in pins for part in ("--pin", pin)]
    report = run(*PLAN, *ON, *same, "--top", 3, "-o", tmp_path / "plan.yaml").json
    assert report["objective"]["complete"] and "alternatives" not in report


@pytest.mark.slow
@pytest.mark.parametrize("proven", [True, False])
def test_plans_are_complete_only_where_that_is_proven(proven: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for the second plan finds none: there is none by its sums, or its time was over."""
    def none_found(*arguments: Any, **named: Any) -> None:
        result = fitted(*arguments, **named)
        limit = result.prediction.memory_limit_bytes
        raise MemoryTooSmall("no plan", "more time", Least(result.plan, result.prediction, limit + proven))

    monkeypatch.setattr("planner.objectives.fitted", none_found)
    report = run(*PLAN, *ON, "--top", 2, "-o", tmp_path / "plan.yaml").json
    assert report["objective"]["complete"] == proven and "alternatives" not in report
    assert ("others_lower_bound_s" in report["objective"]) != proven


@pytest.mark.slow
def test_least_memory_is_below_every_other_plan(tmp_path: Path) -> None:
    job = (*PLAN, *ON, "--pin", "tensor=1", "-o", tmp_path / "plan.yaml")
    quick = run(*job).json
    least = run(*job, "--objective", "memory").json
    within = run(*job, "--objective", "memory", "--within", "20%").json
    peaks = [report["predicted"]["peak_memory_bytes"] for report in (least, within, quick)]
    assert peaks[0] <= peaks[2] and peaks[1] <= peaks[2]
    assert least["objective"]["lower_bound_bytes"] == least["objective"]["least_memory_bytes"]
    assert within["predicted"]["step_s"] <= 1.2 * within["objective"]["best_step_s"]
    assert within["objective"]["lower_bound_bytes"] >= least["objective"]["lower_bound_bytes"]


@pytest.mark.slow
def test_a_front_is_a_front(tmp_path: Path) -> None:
    report = run(*PLAN, *ON, "--pin", "tensor=1", "--pareto", "-o", tmp_path / "plan.yaml").json
    points = [report["predicted"], *(other["predicted"] for other in report.get("alternatives", ()))]
    assert [p["step_s"] for p in points] == sorted(p["step_s"] for p in points)
    peaks = [p["peak_memory_bytes"] for p in points]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(peaks)
    assert report["objective"]["least_memory_bytes"] >= report["objective"]["lower_bound_bytes"]


@pytest.fixture
def above_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay takes more than the sums that searches compare plans by."""
    def heavier(prediction: Prediction, *rest: Any) -> Prediction:
        seen, extra = replayed(prediction, *rest), 2**18
        return replace(seen, peak_memory_bytes=max(seen.peak_memory_bytes, prediction.peak_memory_bytes) + extra)

    for module in ("planner.objectives", "planner.fitting", "planner.evaluate.step"):
        monkeypatch.setattr(f"{module}.replayed", heavier)
    monkeypatch.setattr(importlib.import_module("planner.search.search"), "usable_cores", lambda: 1)  # Another process replays.


@pytest.mark.slow
@pytest.mark.usefixtures("above_sums")
@pytest.mark.parametrize("asked", [
    ("--objective", "memory"), wide(("--objective", "memory", "--within", "50%")), wide(("--pareto",)),
], ids=lambda asked: asked[-1])
def test_plans_keep_the_limit_of_memory_in_their_certificate(asked: tuple[str, ...], tmp_path: Path) -> None:
    """What is found under a limit is read again under it: the proof that `plan` printed is the one that `check` finds."""
    report = run(*PLAN, *ON, *asked, "-o", tmp_path / "plan.yaml").json
    plans = {tmp_path / "plan.yaml": report, **{Path(each["path"]): each for each in report.get("alternatives", ())}}
    assert any("--headroom" in path.read_text() for path in plans)
    for path, told in plans.items():
        read = run("check", path, "--json").json
        assert read["predicted"]["peak_memory_bytes"] == told["predicted"]["peak_memory_bytes"]
        assert told["search"]["lower_bound_s"] > 0
        assert read["search"]["lower_bound_s"] == pytest.approx(told["search"]["lower_bound_s"], rel=1e-9)
        assert "none: an edit" not in run("show", path).out


@pytest.mark.slow
def test_a_plan_without_a_proof_says_that_time_was_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has edited it."""
    def over(*arguments: Any, **named: Any) -> None:
        raise MemoryTooSmall("no plan", "more time", least=None)  # type: ignore[arg-type]

    monkeypatch.setattr("planner.objectives.fitted", over)
    report = run(*PLAN, *ON, "--objective", "memory", "-o", tmp_path / "plan.yaml").json
    assert report["search"]["lower_bound_s"] == 0.0 and report["search"]["optimality_gap"] == 1.0
    told = " ".join(run("show", tmp_path / "plan.yaml").out.split())
    assert "none: the time was over before the search found a plan of its own" in told and "an edit" not in told


@pytest.mark.slow
def test_the_fewest_devices_reach_the_target(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    two = run(*PLAN, "--cluster", "local-cpu:1x2", "-o", path).json["predicted"]["step_s"]
    report = run(*PLAN, *ON, "--objective", "devices", "--max-step-s", two * 1.02, "-o", path).json
    assert report["objective"]["devices"] == report["cluster"]["devices"] <= 2
    assert report["predicted"]["step_s"] <= two * 1.02
    assert report["objective"]["devices_lower_bound"] <= report["objective"]["devices"]
    assert run("check", path).code == 0
    refused = run(*PLAN, *ON, "--objective", "devices", "--min-tokens-per-s", 1e12, "-o", path)
    assert refused.code == 3 and "on 4 devices or fewer" in refused.error


@pytest.mark.slow
def test_fewer_devices_are_found_where_more_are_slower(tmp_path: Path) -> None:
    """Five divide neither the batch nor the model well; what all of them would take says nothing of fewer."""
    on = (*PLAN, "--pin", "tensor=1", "-o", tmp_path / "plan.yaml", "--cluster")
    two, five = (run(*on, f"local-cpu:{nodes}x1", "--pin", "pipeline=1", "--batch", 20).json for nodes in (2, 5))
    limit_s = two["predicted"]["step_s"] * 1.02
    assert five["predicted"]["step_s"] > limit_s
    target = ("--objective", "devices", "--max-step-s", limit_s, "--batch", 20)
    found = run(*on, "local-cpu:5x1", "--pin", "pipeline=1", *target).json["objective"]
    assert found["devices"] <= 2 and found["devices_lower_bound"] <= found["devices"]
    pinned = run(*on, "local-cpu:5x1", "--pin", "data=2", *target)
    assert pinned.code == 0 and pinned.json["cluster"]["devices"] in (2, 4), "two divides the devices of a part"
    refused = run(*on, "local-cpu:5x1", "--pin", "data=7", *target)
    assert refused.code == 2 and "7 does not divide the 5 devices" in refused.error


@pytest.mark.slow
def test_every_part_of_a_node_is_looked_at(tmp_path: Path) -> None:
    """Two of three devices are no divisor, and quicker than one and than three, which part no batch of sixteen."""
    pins = ("--pin", "pipeline=1", "--pin", "tensor=1", "--pin", "zero=0", "-o", tmp_path / "plan.yaml")
    job = ("plan", *small(hidden=256), "--batch", 16, "--json", *pins, "--cluster")
    limit_s = run(*job, "local-cpu:1x2").json["predicted"]["step_s"] * 1.001
    found = run(*job, "local-cpu:1x3", "--objective", "devices", "--max-step-s", limit_s)
    assert found.code == 0, found.err
    assert found.json["objective"]["devices"] == found.json["objective"]["devices_lower_bound"] == 2


@pytest.mark.slow
def test_a_size_that_is_nearly_quick_enough_is_excluded(tmp_path: Path) -> None:
    """A first search of it knows to five percent alone."""
    sizes = ("layers=8", "hidden=2048", "heads=16", "vocab=8000")
    model = (Path(__file__).parents[1] / "examples" / "gpt.py:gpt", *(part for size in sizes for part in ("--set", size)))
    on = ("plan", *model, "--batch", 8, "--seq", 1024, "--json", "-o", tmp_path / "plan.yaml", "--cluster")
    limit_s = run(*on, "dgx-a100-80gb:4x1").json["predicted"]["step_s"] * 0.96
    found = run(*on, "dgx-a100-80gb:6x1", "--objective", "devices", "--max-step-s", limit_s).json["objective"]
    assert found["devices"] == found["devices_lower_bound"] == 5


@pytest.mark.slow
def test_sums_of_memory_exclude_no_devices(tmp_path: Path) -> None:
    """On fewer devices no plan was found that fits; that there is none is known of the state alone, which fits on one."""
    pins = ("--pin", "pipeline=1", "--pin", "data=1", "--pin", "microbatch=16", "-o", tmp_path / "plan.yaml")
    least = run(*PLAN, *ON, *pins, "--objective", "memory").json["objective"]["least_memory_bytes"]
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(
        f"base: local-cpu\nnodes: 1\ndevices_per_node: 4\nchip: {{memory: {{value: {least}, unit: B}}}}\n"
    )
    found = run(*PLAN, "--cluster", cluster, *pins, "--objective", "devices", "--max-step-s", 100).json["objective"]
    assert found["devices"] == 4 and found["devices_lower_bound"] == 1


@pytest.mark.slow
def test_the_step_that_is_to_be_allowed_is_enough(tmp_path: Path) -> None:
    """It is told with six digits, which are no less than the step."""
    pins = ("--pin", "pipeline=1", "--pin", "tensor=1", "--pin", "zero=0", "--pin", "recompute=none")
    job = ("plan", *SMALL, "--batch", 12, *ON, *pins, "-o", tmp_path / "plan.yaml", "--objective", "devices", "--max-step-s")
    allowed = re.search(r"allow (\S+) s", run(*job, 1e-9).error)
    assert allowed is not None and run(*job, allowed[1]).code == 0


@pytest.mark.slow
def test_flops_that_causal_attention_skips_exclude_no_devices(tmp_path: Path) -> None:
    """Of long sequences a step can take less than its model FLOPs at the peak: one device that does is found."""
    long = (*SMALL[:3], "--set", "hidden=512", "--set", "heads=4", "--seq", 240_000, "--batch", 2, "--time-limit", 10, "--json")
    one = run("plan", *long, "--cluster", "dgx-h100:1x1", "-o", tmp_path / "one.yaml").json["predicted"]
    assert one["mfu"] > 1.01
    target = ("--objective", "devices", "--max-step-s", one["step_s"] * 1.001)
    report = run("plan", *long, "--cluster", "dgx-h100:1x2", *target, "-o", tmp_path / "plan.yaml").json
    assert report["objective"]["devices"] == report["objective"]["devices_lower_bound"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "named"), [
    (("--objective", "speed"), "--objective: is 'speed'; one of time, memory, devices"),
    (("--objective", "devices"), "needs one target"),
    (("--objective", "devices", "--max-step-s", 1, "--min-tokens-per-s", 1), "needs one target"),
    (("--max-step-s", 1), "--max-step-s: means nothing to the objective time"),
    (("--objective", "devices", "--max-step-s", 0), "--max-step-s: is 0"),
    (("--within", "10%"), "--within: means nothing to the objective time"),
    (("--objective", "memory", "--within", "much"), "--within: is 'much'"),
    (("--top", 0), "--top: is 0"), (("--pareto", "--top", 2), "--pareto: goes with neither"),
    (("--objective", "memory", "--top", 2), "--top: goes with"), (("--headroom", "64GiB"), "leaves nothing"),
    (("--headroom", "lots"), "no amount of memory"), (("--forbid", "tensor"), "--forbid: 'tensor' pins nothing"),
    (("--pin", "layers.*: tensor=2"), "one for all layers"), (("--pin", "nothing.*: zero=1"), "names no layer"),
])
def test_wrong_objectives_and_limits_are_one_line(arguments: tuple[object, ...], named: str, tmp_path: Path) -> None:
    outcome = run(*PLAN, *ON, *arguments, "-o", tmp_path / "plan.yaml")
    assert outcome.code == 2 and named in outcome.error and outcome.out == ""


@pytest.mark.slow
def test_a_job_file_declares_limits_and_objective(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    examples = SMALL[0].rpartition(":")[0]
    file.write_text(
        f"model: {examples}:gpt\nset: {{layers: 2, hidden: 64, vocab: 64}}\nseq: 32\ncluster: local-cpu:1x4\nbatch: 16\n"
        "objective: memory\nwithin: 50%\n"
        "constraints:\n  pipeline: <= 2\n  tensor: 1\n  microbatch: 4\n  recompute: [none, full]\n"
        "  layers: {'blocks.*': {zero: 0}}\n"
        "  forbid: [{schedule: gpipe, pipeline: 2}]\n  headroom: 10%\n"
    )
    outcome = run("plan", file, "--time-limit", 3, "-o", tmp_path / "plan.yaml", "--json")
    assert outcome.code == 0, outcome.err
    report = outcome.json
    assert report["mesh"]["pipeline"] <= 2 and "lower_bound_bytes" in report["objective"]
    text = (tmp_path / "plan.yaml").read_text()
    assert "--pin pipeline<=2" in text and "--headroom" in text and "--forbid schedule=gpipe, pipeline=2" in text
