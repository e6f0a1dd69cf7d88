"""`show` and `check`: an untouched plan, an edited one, one that contradicts itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.bundle import read
from planner.constraints_kept import broken_limit
from planner.constraints_text import parse_constraints
from planner.show import print_page, render
from tests.cli.contract import LAYERS, check_contract, edit
from tests.commands import SMALL, Outcome, run


@pytest.mark.slow
@pytest.mark.parametrize("command", ["show", "check"])
@pytest.mark.parametrize("which", ["planned", "split"])
def test_an_untouched_plan_keeps_its_prediction(command: str, which: str, request: pytest.FixtureRequest) -> None:
    path, outcome = request.getfixturevalue(which)
    again = run(command, path, "--json")
    assert again.code == 0 and again.err == ""
    check_contract(again.json, outcome.json["cluster"]["devices"])
    for part in ("model", "cluster", "mesh", "batch", "schedule", "stages", "predicted"):
        assert again.json[part] == outcome.json[part]
    assert again.json["search"]["lower_bound_s"] == outcome.json["search"]["lower_bound_s"]


def test_a_split_plan_says_so(split: tuple[Path, Outcome]) -> None:
    path, outcome = split
    check_contract(outcome.json, 8)
    assert outcome.json["mesh"]["tensor"] == 4
    text = run("show", path).out
    assert "over the 4 ranks of the tensor axis" in text and "shard(1)" in text
    placed = yaml.safe_load(path.read_text())["placements"]["Block"]
    assert placed["boundary"]["x"] == "shard(1)"


def test_check_costs_an_edited_plan_anew(copied: Path, planned: tuple[Path, Outcome]) -> None:
    def change(data: Any) -> None:
        data["stages"] = [
            {"blocks": "embedding - blocks.1", "zero": 1, "recompute": ["none x 2", "full x 1"]},
            {"blocks": "head", "zero": 1, "recompute": "none"},
        ]

    edit(copied, change)
    edited = run("check", copied, "--json")
    assert edited.code == 0
    check_contract(edited.json, 4)
    assert [stage["layers"] for stage in edited.json["stages"]] == [LAYERS[:3], LAYERS[3:]]
    assert edited.json["stages"][0]["recompute"] == {"none": 2, "full": 1}
    assert edited.json["predicted"]["step_s"] > planned[1].json["predicted"]["step_s"]
    assert edited.json["predicted"]["breakdown_s"]["recompute"] > 0
    assert edited.json["search"]["optimality_gap"] > planned[1].json["search"]["optimality_gap"]


@pytest.mark.slow
def test_one_device_has_one_data_rank_and_one_micro_batch(tmp_path: Path) -> None:
    planned = run("plan", *SMALL, "--cluster", "local-cpu:1x1", "--batch", 1, "-o", tmp_path / "plan.yaml")
    assert "\ncluster    local-cpu, 1 device\n" in planned.out
    assert "\nbatch      1 sample of 32 tokens = 1 data rank x 1 micro-batch of 1\n" in planned.out
    assert " on 1 device of local-cpu, fp32\n" in (tmp_path / "plan.yaml").read_text()


@pytest.mark.parametrize(("columns", "bar"), [("60", 25), ("140", 30)])
def test_a_narrow_page_has_narrow_bars_and_headings_of_one_line(
    columns: str, bar: int, planned: tuple[Path, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = run("show", planned[0]).out.splitlines()
    assert max(map(len, lines)) <= int(columns)
    headings = lines.index("") + 1
    assert lines[headings].startswith("stage") and set(lines[headings + 1]) == {"─"}
    parts = lines[lines.index("where a step goes") + 1 :]
    drawn = [line for line in parts[: parts.index("")] if "·" in line or "█" in line]
    assert len(drawn) == parts.index("") and all(sum(map(line.count, "█·")) == bar for line in drawn)
    assert all(line.rstrip().endswith("%") for line in drawn)


@pytest.mark.parametrize(("gap", "said"), [
    (0.001, "bounds excluded the rest"), (0.00101, "a longer --time-limit or a smaller --gap may narrow it"),
])
def test_bounds_exclude_the_rest_only_where_the_search_ended(
    gap: float, said: str, planned: tuple[Path, Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    """A gap above the default was left by a search that the time limit, or a larger --gap, ended."""
    bundle = read(planned[0])
    left = replace(bundle.certificate, lower_bound_s=(1 - gap) * bundle.prediction.step_s, candidates=12, solved=3)
    capsys.readouterr()
    print_page(render(replace(bundle, certificate=left)))
    told = " ".join(capsys.readouterr().out.split())
    assert f"at most {gap:.3%} from the best plan" in told
    assert told.count("bounds excluded the rest") + told.count("may narrow it") == 1
    assert f"(12 candidates, 3 solved{',' if gap == 0.001 else ';'} {said})" in told


def test_a_plan_of_another_batch_claims_no_proof(copied: Path) -> None:
    def change(data: Any) -> None:
        data["batch"] = {"global": 8, "micro": 1, "accumulation": 4}

    edit(copied, change)
    assert run("check", copied, "--json").json["search"]["lower_bound_s"] == 0.0
    assert "none: an edit has left what was searched" in run("show", copied).out


def test_a_plan_that_breaks_its_pins_claims_no_proof(copied: Path) -> None:
    """It is slower than the bound, which is of others all the same."""
    assert "from the best plan under --pin pipeline=2; --pin schedule=1f1b: none" in " ".join(run("show", copied).out.split())
    edit(copied, lambda data: data["schedule"].update(name="gpipe"))
    assert run("check", copied, "--json").json["search"]["lower_bound_s"] == 0.0
    assert "none: an edit has left what was searched" in run("show", copied).out


@pytest.mark.slow
@pytest.mark.parametrize("change", [
    lambda proof: proof.pop("constraints"), lambda proof: proof["constraints"].pop(), lambda proof: proof.pop("seal"),
    lambda proof: proof.update(lower_bound_s=proof["lower_bound_s"] * 0.999), lambda proof: proof.update(candidates=1),
], ids=("no constraints", "one constraint less", "no seal", "another bound", "other counts"))
def test_an_edited_certificate_proves_nothing(change: Callable[[Any], object], copied: Path) -> None:
    edit(copied, lambda data: change(data["certificate"]))
    assert run("check", copied, "--json").json["search"]["lower_bound_s"] == 0.0
    assert "none: the certificate was edited" in run("show", copied).out


@pytest.mark.slow
@pytest.mark.parametrize(("limits", "kept"), [
    ({"pins": ["pipeline=2", "data=2", "context=1", "schedule != gpipe", "virtual<=1"]}, True),
    ({"pins": ["tensor>=2"]}, False),
    ({"pins": ["sequence_parallel=true"]}, False), ({"pins": ["axis_order=data-pipeline-tensor"]}, False),
    ({"pins": ["blocks.*: recompute=none"]}, True), ({"pins": ["head: zero=3"]}, False),
    ({"pins": ["zero_group in [1]"]}, False),
    ({"forbidden": ["pipeline=2, tensor=2"]}, True), ({"forbidden": ["pipeline=2, head: recompute=none"]}, False),
    ({"headroom": "10%"}, True), ({"headroom": "5.9GiB"}, False),
], ids=str)
def test_what_a_plan_keeps(limits: dict[str, Any], kept: bool, planned: tuple[Path, Outcome]) -> None:
    bundle = read(planned[0])
    broken = broken_limit(parse_constraints(**limits), bundle.plan, bundle.graph, bundle.cluster, bundle.prediction)
    assert (broken is None) == kept


def test_check_leaves_with_1_where_a_plan_no_longer_fits(copied: Path) -> None:
    chip = copied.with_suffix(".cluster.yaml")
    cluster = yaml.safe_load(chip.read_text())
    cluster["chip"]["memory"]["value"] = cluster["chip"]["reserve"]["value"] + 1e6
    chip.write_text(yaml.safe_dump(cluster, sort_keys=False))
    refused = run("check", copied)
    assert refused.code == 2 and "cluster.fingerprint" in refused.error
    edit(copied, lambda data: data["cluster"].update(fingerprint=refused.error.split("; ")[1].split(",")[0]))
    outcome = run("check", copied, "--json")
    assert outcome.code == 1 and "does not fit" in outcome.err and "GiB above the limit" in outcome.err
    assert outcome.json["predicted"]["peak_memory_bytes"] > 1e6
    assert "DOES NOT FIT" in run("show", copied).out


def test_a_zero_stage_that_shards_nothing_is_said(copied: Path) -> None:
    """In groups of one rank, by `--pin zero=3` too; not where nothing was to be sharded."""
    assert "nothing is sharded" not in run("show", copied).out
    edit(copied, lambda data: data.update(zero_group=1))
    mixed = (["1 x 1", "3 x 1"], ["3 x 1", "1 x 1"])
    for stages, said in (((0, 0), None), ((3, 3), "ZeRO 3"), (mixed, "ZeRO 1, 3")):
        edit(copied, lambda data, stages=stages: [
            stage.update(zero=zero) for stage, zero in zip(data["stages"], stages, strict=True)
        ])
        shown = run("show", copied)
        assert shown.code == 0, shown.err
        warning = f"warning: {said} in groups of 1 rank: nothing is sharded"
        assert warning in shown.out if said else "nothing is sharded" not in shown.out


def test_stages_that_contradict_their_schedule_are_refused(copied: Path) -> None:
    def change(data: Any) -> None:
        data["schedule"]["name"] = "interleaved-zero-bubble"
        data["stages"][1]["recompute"] = "full"

    edit(copied, change)
    assert "stages.1: interleaved-zero-bubble runs neither ZeRO 3 nor recomputation" in run("check", copied).error


def test_tied_parameters_share_their_zero_stage(copied: Path) -> None:
    edit(copied, lambda data: data["stages"][0].update(zero=1) or data["stages"][1].update(zero=2))
    assert "stages: embedding, head share tokens.weight" in run("check", copied).error


@pytest.mark.parametrize(
    ("body", "part", "name", "named"),
    [
        ("Block", "boundary", ("x", "x_3"), "placements.Block.boundary.x: is replicate, but placements.Embedding."),
        ("Head", "parameters", ("tokens.weight",), "placements: embedding, head share tokens.weight, which is replicate and"),
    ],
)
def test_placements_that_contradict_one_another_are_refused(
    body: str, part: str, name: tuple[str, ...], named: str, split: tuple[Path, Outcome], tmp_path: Path
) -> None:
    for file in split[0].parent.glob("plan.*"):
        shutil.copy(file, tmp_path)
    edit(tmp_path / "plan.yaml", lambda data: data["placements"][body][part].update(dict.fromkeys(name, "replicate")))
    assert named in run("check", tmp_path / "plan.yaml").error
