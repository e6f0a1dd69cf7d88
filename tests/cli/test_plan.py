"""`plan`: the JSON contract, pins, precision, a job file, what does not fit."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from tests.cli.contract import LAYERS, check_contract
from tests.commands import EXAMPLES, SMALL, Outcome, run, small


def test_plan_prints_the_contract(planned: tuple[Path, Outcome]) -> None:
    report = planned[1].json
    check_contract(report, 4)
    assert [name for stage in report["stages"] for name in stage["layers"]] == LAYERS
    assert report["mesh"]["pipeline"] == 2 and report["schedule"]["name"] == "1f1b"
    assert "tracing" in planned[1].err and "wrote" in planned[1].err


def test_a_tensor_axis_that_divides_nothing_is_said(split: tuple[Path, Outcome], tmp_path: Path) -> None:
    """So small a model is quickest where every rank has all of it."""
    path = tmp_path / "plan.yaml"
    planned = run("plan", *SMALL, "--cluster", "dgx-h100:1", "--batch", 16, "--pin", "tensor=8", "-o", path)
    warning = "the tensor axis divides nothing: its 8 ranks all do the same, and 1 device would do"
    assert planned.code == 0 and warning in " ".join(planned.out.split()), planned.err
    assert "divides nothing" not in run("show", split[0]).out


EVERYTHING = {
    "pipeline": 2, "data": 2, "tensor": 2, "context": 1, "expert": 1, "microbatch": 1, "virtual": 2,
    "schedule": "interleaved-1f1b", "recompute": "full", "zero": 1, "zero_group": 2, "sequence_parallel": "true",
}


@pytest.mark.slow
def test_with_everything_pinned_plan_is_a_predictor(tmp_path: Path) -> None:
    pins = [part for name, value in EVERYTHING.items() for part in ("--pin", f"{name}={value}")]
    path = tmp_path / "plan.yaml"
    report = run("plan", *SMALL, "--cluster", "dgx-a100-80gb:1", "--batch", 16, *pins, "-o", path, "--json").json
    check_contract(report, 8)
    assert report["mesh"] == {"pipeline": 2, "data": 2, "context": 1, "expert": 1, "tensor": 2}
    assert report["batch"] == {"global": 16, "micro": 1, "accumulation": 8}
    assert report["schedule"] == {"name": "interleaved-1f1b", "virtual": 2}
    for stage in report["stages"]:
        assert set(stage["zero"]) == {"1"} and set(stage["recompute"]) == {"full"}
    file = yaml.safe_load(path.read_text())
    assert file["zero_group"] == 2 and file["precision"] == "bf16"
    assert file["placements"]["Block"]["boundary"]["x"] == "shard(1)"
    assert run("check", path, "--json").json["predicted"] == report["predicted"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "precision"), [("local-cpu:1x2", "fp32"), ("dgx-v100:1x2", "fp16"), ("dgx-h100:1x2", "bf16")]
)
def test_the_precision_is_the_chips_own(cluster: str, precision: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    assert run("plan", *SMALL, "--cluster", cluster, "--batch", 4, "-o", path).code == 0
    assert yaml.safe_load(path.read_text())["precision"] == precision


@pytest.mark.slow
def test_a_job_file_is_the_same_job(planned: tuple[Path, Outcome], tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        f"model: {EXAMPLES / 'gpt.py'}:gpt\nset: {{layers: 2, hidden: 64, vocab: 64}}\nseq: 32\ncluster: local-cpu:1x4\n"
        "batch: 16\nconstraints: {pipeline: 2, schedule: 1f1b}\noptimizer: {learning_rate: 6e-4}\n"
    )
    outcome = run("plan", job, "-o", tmp_path / "plan.yaml", "--json")
    assert outcome.json["predicted"] == planned[1].json["predicted"]
    assert yaml.safe_load((tmp_path / "plan.yaml").read_text())["optimizer"]["learning_rate"] == 6e-4


def test_what_a_plan_is_made_from_is_not_written_over(tmp_path: Path) -> None:
    """Neither by the plan nor by what lies beside it or its alternatives, under whatever name."""
    job, cluster, model = tmp_path / "job.yaml", tmp_path / "mine.cluster.yaml", tmp_path / "gpt.py"
    model.write_text((EXAMPLES / "gpt.py").read_text())
    cluster.write_text("base: local-cpu\nnodes: 1\ndevices_per_node: 2\n")
    job.write_text("model: gpt.py:gpt\ncluster: mine.cluster.yaml\n")
    (tmp_path / "linked.3.yaml").symlink_to(cluster)
    before = {file: file.read_text() for file in tmp_path.iterdir()}
    for output, more, named in (
        ("job.yaml", (), "job.yaml"), ("mine.yaml", (), "mine.cluster.yaml"), ("gpt.py", (), "gpt.py"),
        ("linked.yaml", ("--top", 10**9), "linked.3.yaml"), ("linked.yaml", ("--pareto",), "linked.3.yaml"),
    ):
        outcome = run("plan", job, *more, "-o", tmp_path / output)
        assert outcome.code == 2
        assert f"{named}: is what the plan is made from; give -o another name" in outcome.error
        assert "tracing" not in outcome.err
    assert {file: file.read_text() for file in tmp_path.iterdir()} == before


def test_all_that_is_written_is_checked_before_the_search(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "u.graph.json").mkdir()
    (tmp_path / "t.2.cluster.yaml").mkdir()
    for output, named in (
        (tmp_path / "pipe.yaml", "is no regular file"), (Path("/dev/null"), "is no regular file"),
        (tmp_path / "u.yaml", "u.graph.json: is a directory"), (tmp_path / "t.yaml", "t.2.cluster.yaml: is a directory"),
        (tmp_path / f"{'x' * 248}.yaml", "cannot be written (File name too long)"),
    ):
        outcome = run("plan", *SMALL, "--cluster", "local-cpu:1x2", "--batch", 4, "--top", 2, "-o", output)
        assert outcome.code == 2
        assert named in outcome.error
        assert "tracing" not in outcome.err


@pytest.mark.slow
def test_an_earlier_plan_is_written_over(tmp_path: Path) -> None:
    for _ in range(2):
        job = ("plan", *SMALL, "--cluster", "local-cpu:1x2", "--batch", 4, "--top", 2)
        assert run(*job, "-o", tmp_path / "plan.yaml").code == 0
        assert (tmp_path / "plan.2.yaml").exists()


@pytest.mark.slow
def test_what_cannot_fit_leaves_with_3(tmp_path: Path) -> None:
    cluster = tmp_path / "small.yaml"
    cluster.write_text("base: local-cpu\nnodes: 1\ndevices_per_node: 2\nchip: {memory: {value: 257, unit: MiB}}\n")
    outcome = run("plan", *small(hidden=512), "--cluster", cluster, "--batch", 4, "-o", tmp_path / "plan.yaml")
    assert outcome.code == 3
    assert "the limit is 0.25 GiB" in outcome.error and "bytes too few" in outcome.error
    assert not (tmp_path / "plan.yaml").exists()


@pytest.mark.slow
def test_placements_of_other_micro_batches_are_found_again(tmp_path: Path) -> None:
    """The search places for small calls and prices for all: reading the plan has to place as it did."""
    path = tmp_path / "plan.yaml"
    planned = run(
        "plan", f"{EXAMPLES / 'gpt.py'}:gpt", "--set", "hidden=2048", "--set", "heads=16", "--set", "layers=6", "--set",
        "vocab=50304", "--seq", 1024, "--cluster", "dgx-h100:1", "--batch", 32, "--pin", "tensor=8", "-o", path, "--json",
    ).json
    assert run("check", path, "--json").json["predicted"] == planned["predicted"]


@pytest.mark.slow
def test_where_highspy_is_missing_cbc_plans(
    planned: tuple[Path, Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    arguments = ("--cluster", "local-cpu:1x4", "--batch", 16, "--pin", "pipeline=2", "--pin", "schedule=1f1b")
    found = run("plan", *SMALL, *arguments, "-o", tmp_path / "plan.yaml", "--json").json
    assert found["predicted"]["step_s"] == pytest.approx(planned[1].json["predicted"]["step_s"], rel=2e-3)


@pytest.mark.slow
def test_samples_that_are_no_sequences_are_counted_as_such(tmp_path: Path) -> None:
    model, plan = tmp_path / "rows.py", tmp_path / "plan.yaml"
    model.write_text(
        "import torch\nbuild = lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))\n"
        "def example_inputs(batch, seq):\n"
        "    return {'input': torch.randn(batch, 8), 'labels': torch.randint(0, 4, (batch,))}\n"
        "def loss(outputs, batch):\n    return torch.nn.functional.cross_entropy(outputs, batch['labels'])\n"
    )
    job = ("plan", f"{model}:build", "--cluster", "local-cpu:1x2", "--batch", 4)
    assert run(*job, "-o", plan).code == 0
    for text in (plan.read_text(), run("show", plan).out):
        assert " samples/s" in text and "tokens" not in text
    goal = run(*job, "--objective", "devices", "--min-tokens-per-s", 10)
    assert goal.code == 2 and "--min-tokens-per-s: the model's samples are no sequences of tokens" in goal.error


FEW = ("--pin", "tensor=1", "--pin", "recompute=none")
"""There are fewer plans to look at."""


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "told"), [
    (("--top", 2), [r"complete: (yes|no)", r"others lower bound: [\d.]+ m?s"]),
    (("--objective", "memory"), [r"least memory: [\d.]+ MiB", r"lower bound: [\d.]+ MiB"]),
    (
        (*FEW, "--objective", "memory", "--within", "20%"),
        [r"lower bound: [\d.]+ MiB", r"within: 20%", r"best step: [\d.]+ m?s"],
    ),
    (("--objective", "devices", "--max-step-s", 60), [r"max step: 60.00 s", r"devices: 1", r"devices lower bound: 1"]),
])
def test_what_is_known_of_the_objective_is_told_in_words(asked: tuple[object, ...], told: list[str], tmp_path: Path) -> None:
    """JSON has the numbers."""
    outcome = run("plan", *SMALL, "--cluster", "local-cpu:1x2", "--batch", 4, *asked, "-o", tmp_path / "plan.yaml")
    lines = outcome.out.rstrip().splitlines()[-len(told):]
    assert all(re.fullmatch(form, line) for form, line in zip(told, lines, strict=True)), lines
