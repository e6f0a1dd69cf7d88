"""A row's prediction is what `plan` with the same pins prints, and what the evaluator says of the whole model's trace."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hardware_profiles import cluster_to_yaml, engine
from planner.cli import main
from planner.evaluate import evaluate_plan
from planner.ir.plan import DTYPES
from planner.validate.predict import predict_row, predict_rows
from planner.validate.prepare import prepare_row, prepare_rows, trace_shape
from planner.validate.rows import read_rows
from tests.validate import tables

# `plan` finds the best placement of a tied head for the micro-batches of a step; of one so large that is Megatron-LM's, which
# `validate` takes.
LARGE = {"hidden": "512", "ffn_hidden": "2048", "vocab": "32768"}
RUNS: Mapping[str, dict[str, str]] = {
    "one device": {},
    "recomputed": {"recompute": "full", "global_batch_seqs": "2"},
    "sharded": {"n_gpus": "4", "dp": "4", "zero": "3", "global_batch_seqs": "16", "zero_or_fsdp": "zero3 (FSDP2)"},
    "a pipeline": {"n_gpus": "4", "pp": "2", "dp": "2", "global_batch_seqs": "16"},
    "sequence parallel": {"n_gpus": "2", "tp": "2", "seq_parallel": "True", **LARGE},
    "selective": {"n_gpus": "2", "tp": "2", "seq_parallel": "True", "recompute": "selective", **LARGE},
    "gated": {"mlp_type": "gated", "kv_heads": "2", "ffn_hidden": "176"},
}

@pytest.mark.slow
@pytest.mark.parametrize("name", list(RUNS))
def test_plan_with_the_same_pins_prints_the_same_numbers(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change = RUNS[name]
    runs = tables.write(tmp_path / "runs.csv", change)
    said = _printed(capsys, ["validate", "--runs", str(runs), "--picture", str(tmp_path / "picture.svg"), "--json"])
    item = prepare_row(read_rows(runs)[0])
    job = item.job
    (tmp_path / "cluster.yaml").write_text(cluster_to_yaml(job.cluster))
    settings = {**dict(job.shape.settings), "layers": job.layers}
    pins = {
        "pipeline": job.mesh.pipeline, "data": job.mesh.data, "tensor": job.mesh.tensor, "microbatch": job.batch.micro,
        "schedule": job.schedule.name, "virtual": job.schedule.virtual, "zero": job.zero, "zero_group": job.zero_group,
        "sequence_parallel": str(job.sequence_parallel).lower(),
    }
    # Block by block: engines recompute layers, not the embedding before them nor the head after.
    decisions = [decision for stage in item.plan.stages for decision in stage.decisions]
    levels = [f"{b.name}: recompute={d.recompute}" for b, d in zip(item.counted.graph.blocks, decisions, strict=True)]
    planned = _printed(capsys, [
        "plan", job.shape.spec, "--cluster", str(tmp_path / "cluster.yaml"), "--batch", str(job.batch.total),
        "--seq", str(job.sequence), "--precision", job.precision, "--json", "-o", str(tmp_path / "plan.yaml"),
        *(word for key, value in settings.items() for word in ("--set", f"{key}={str(value).lower()}")),
        *(word for key, value in pins.items() for word in ("--pin", f"{key}={value}")),
        *(word for level in levels for word in ("--pin", level)),
    ])
    (row,) = said["rows"]
    assert row["predicted_step_s"] == planned["predicted"]["step_s"]
    assert row["predicted_memory_bytes"] == planned["predicted"]["peak_memory_bytes"]


def _printed(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> dict[str, Any]:
    capsys.readouterr()
    main(arguments)
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


EVERY_AXIS = {
    "engine": "megatron-core", "n_gpus": "8", "tp": "2", "cp": "2", "dp": "2", "ep": "4", "moe_experts": "4", "moe_topk": "2",
    "kv_heads": "2", "seq_parallel": "True", "zero": "1", "chip": "H100-SXM-80GB",
}


@pytest.mark.slow
@pytest.mark.parametrize("change", [
    {"engine": "megatron", "n_gpus": "8", "tp": "2", "pp": "2", "dp": "2", "global_batch_seqs": "16", "recompute": "full"},
    EVERY_AXIS | {"compile_or_fp8": "fp8"},
])
def test_a_row_is_priced_as_the_whole_trace_would_be(change: dict[str, str]) -> None:
    """Not the two traced layers drawn out, but all layers traced, and no count kept from before."""
    item = prepare_row(tables.row(**change))
    whole = trace_shape(item.job.shape, item.job.layers, DTYPES[item.job.precision])
    assert len(whole.blocks) == item.job.layers + 2
    assert evaluate_plan(item.plan, whole, item.job.cluster) == predict_row(item).prediction


@pytest.mark.slow
def test_every_axis_is_in_the_breakdown() -> None:
    breakdown = predict_row(prepare_row(tables.row(**EVERY_AXIS))).prediction.breakdown
    assert min(breakdown.tensor_comm, breakdown.context_comm, breakdown.expert_comm, breakdown.data_comm) > 0


@pytest.mark.slow
def test_a_fit_changes_chips_and_engines_without_preparing_again() -> None:
    prepared = prepare_rows([tables.row(n_gpus="2", dp="2")]).rows
    (before,) = predict_rows(prepared)
    (slower,) = predict_rows(prepared, change_cluster=lambda cluster: replace(
        cluster, chip=replace(cluster.chip, memory_bandwidth=cluster.chip.memory_bandwidth / 2)
    ))
    (delayed,) = predict_rows(prepared, engines={"torch-eager": replace(engine("torch-eager"), step_s=1.0)})
    assert slower.step_s > before.step_s
    assert delayed.step_s == pytest.approx(before.step_s + 1.0)


def test_rows_that_cannot_be_predicted_are_skipped_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = {"row_id": "odd", "chip": "abacus", "seq": "16"}
    runs = tables.write(tmp_path / "runs.csv", {}, {"row_id": "half", "micro_batch": ""}, odd)
    said = _printed(capsys, ["validate", "--runs", str(runs), "--picture", str(tmp_path / "p.svg"), "--json"])
    assert [item["row_id"] for item in said["skipped"]] == ["half", "odd"]
    assert "abacus" in said["skipped"][1]["why"]
    assert (said["scored"], [row["row_id"] for row in said["rows"]]) == (1, ["toy"])
    assert said["families"]["toys"]["mean_abs_error_pct"] == said["mean_abs_error_pct"] == abs(said["rows"][0]["error_pct"])
    assert (tmp_path / "p.svg").read_text().count("<circle") == 2


@pytest.mark.slow
def test_how_many_rows_are_repeats_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run on another chip is none, predicted or not."""
    odd = {"row_id": "odd", "chip": "abacus"}
    runs = tables.write(tmp_path / "runs.csv", {}, {"row_id": "again"}, odd, {"row_id": "other", "chip": "H100-SXM-80GB"})
    said = _printed(capsys, ["validate", "--runs", str(runs), "--json"])
    assert [item["row_id"] for item in said["skipped"]] == ["odd"]
    assert (said["scored"], said["repeats"], set(said["chips"])) == (2, ["toy"], {"A100-SXM-80GB", "H100-SXM-80GB"})
    main(["validate", "--runs", str(runs), "--picture", str(tmp_path / "p.svg")])
    printed = capsys.readouterr().out
    assert "not scored: 1 row, as a later one has the same configuration" in printed
    assert "\n2 rows scored: mean absolute error" in printed and " over 1 family, median" in printed


@pytest.mark.slow
def test_names_are_whole_on_a_narrow_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and families that differ in the ends of their names are told apart."""
    names = {"row_id": "-".join(["a-run-of-some-length"] * 4), "family": "-".join(["a-family-of-some-length"] * 4)}
    runs = tables.write(tmp_path / "runs.csv", names)
    monkeypatch.setenv("COLUMNS", "80")
    capsys.readouterr()
    main(["validate", "--runs", str(runs), "--picture", str(tmp_path / "p.svg")])
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert "…" not in printed and max(map(len, lines)) <= 80
    assert all(heading in printed for heading in ("rows", "|error| %", "bias %", "worst %", "predicted s", "measured s"))
    by_family = [line.split("│") for line in lines[: lines.index("error of the step time, by engine")] if line.startswith("│")]
    for column, name in ((1, names["family"]), (-2, names["row_id"])):
        assert "".join(cells[column].strip() for cells in by_family) == name


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "said"), [
    ("a100-sxm-80gb", []),
    ("A100-80GB", ["A100-SXM-80GB stands for the chip A100-80GB"]),
    ("MI355X-OAM", [
        "MI355X-288GB stands for the chip MI355X-OAM",
        "no run on MI355X-288GB was fitted: its datasheet, and what its class of chips was fitted to",
    ]),
])
def test_whether_runs_were_fitted_is_said_of_the_chip_that_stands_in(
    chip: str, said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not of what a table calls it."""
    runs = tables.write(tmp_path / "runs.csv", {"chip": chip})
    (row,) = _printed(capsys, ["validate", "--runs", str(runs), "--json"])["rows"]
    assert [text for text in row["cautions"] if "stands for" in text or "was fitted" in text] == said


@pytest.mark.slow
def test_where_no_row_is_scored_there_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, picture = tables.write(tmp_path / "runs.csv", {"trust": "C"}), str(tmp_path / "p.svg")
    said = _printed(capsys, ["validate", "--runs", str(runs), "--json"])
    assert (said["scored"], said["mean_abs_error_pct"], said["median_abs_error_pct"]) == (0, None, None)
    main(["validate", "--runs", str(runs), "--picture", picture])
    printed = capsys.readouterr().out
    assert "no row is scored" in printed and "mean absolute error" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("changes", [(), ({"trust": "C"},)])
def test_a_fit_without_rows_is_one_line(
    changes: tuple[dict[str, str], ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs.csv"
    runs.write_text(tables.text(*changes))
    with pytest.raises(SystemExit) as exit_:
        main(["validate", "--fit", "--runs", str(runs), "--json"])
    assert exit_.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.splitlines()[-1].startswith("error: --fit: no row can be fitted to; give one")


def test_a_wrong_table_exits_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tables.write(tmp_path / "runs.csv", {"layers": "many"})
    with pytest.raises(SystemExit) as exit_:
        main(["validate", "--runs", str(runs), "--json"])
    assert exit_.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1 and "row toy, column layers" in printed.err
