"""The commands as a user meets them: the JSON contract, exit codes, and one line for whatever is wrong."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.commands import EXAMPLES, SMALL, Outcome, run

MESH = ("pipeline", "data", "context", "expert", "tensor")
MEMORY = ("parameters", "gradients", "optimizer", "activations", "buffers", "reserve")
BREAKDOWN = (
    "compute", "recompute", "tensor_comm", "expert_comm", "context_comm", "pipeline_comm", "pipeline_bubble", "data_comm",
    "optimizer",
)
LAYERS = ["embedding", "blocks.0", "blocks.1", "head"]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A plan over a pipeline, the data axis and recomputation."""
    path = tmp_path_factory.mktemp("planned") / "plan.yaml"
    outcome = run("plan", *SMALL, "--cluster", "local-cpu:1x4", "--batch", 16, "--pin", "pipeline=2", "--pin",
                  "schedule=1f1b", "-o", path, "--json")
    assert outcome.code == 0, outcome.err
    return path, outcome


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A plan whose tensors are split, sequence-parallel, in bf16."""
    path = tmp_path_factory.mktemp("split") / "plan.yaml"
    outcome = run("plan", *SMALL, "--set", "hidden=1024", "--seq", 256, "--cluster", "dgx-h100:1", "--batch", 8, "--pin",
                  "tensor=4", "--pin", "sequence_parallel=true", "-o", path, "--json")
    assert outcome.code == 0, outcome.err
    return path, outcome


@pytest.fixture
def copied(planned: tuple[Path, Outcome], tmp_path: Path) -> Path:
    """The three files of a plan, for a test to spoil."""
    for file in planned[0].parent.glob("plan.*"):
        shutil.copy(file, tmp_path)
    return tmp_path / "plan.yaml"


def check_contract(report: dict[str, Any], devices: int) -> None:
    """Every field of the JSON contract with its type, and the sums that it promises."""
    assert set(report) == {"model", "cluster", "mesh", "batch", "schedule", "stages", "predicted", "search"}
    assert isinstance(report["model"]["name"], str) and isinstance(report["model"]["fingerprint"], str)
    assert type(report["model"]["parameters"]) is int
    assert report["cluster"]["devices"] == devices and isinstance(report["cluster"]["name"], str)
    mesh = report["mesh"]
    assert tuple(mesh) == MESH and all(type(degree) is int for degree in mesh.values())
    assert mesh["pipeline"] * mesh["data"] * mesh["context"] * mesh["tensor"] == devices
    batch = report["batch"]
    assert batch["global"] == batch["micro"] * batch["accumulation"] * mesh["data"]
    assert set(report["schedule"]) == {"name", "virtual"}
    assert [stage["index"] for stage in report["stages"]] == list(range(mesh["pipeline"] * report["schedule"]["virtual"]))
    for stage in report["stages"]:
        memory = stage["memory_bytes"]
        assert set(memory) == {*MEMORY, "total"} and all(type(size) is int for size in memory.values())
        assert sum(memory[name] for name in MEMORY) == memory["total"]
        assert sum(stage["zero"].values()) == sum(stage["recompute"].values()) == len(stage["layers"])
        assert set(stage["zero"]) <= {"0", "1", "2", "3"} and set(stage["recompute"]) <= {"none", "selective", "full"}
        assert type(stage["forward_s"]) is float and type(stage["backward_s"]) is float
    predicted = report["predicted"]
    assert predicted["peak_memory_bytes"] == max(stage["memory_bytes"]["total"] for stage in report["stages"])
    for name in ("step_s", "tokens_per_s", "model_flops_per_device_s", "mfu"):
        assert type(predicted[name]) is float and predicted[name] > 0
    assert tuple(predicted["breakdown_s"]) == BREAKDOWN
    assert all(type(value) is float and value >= 0 for value in predicted["breakdown_s"].values())
    assert math.isclose(sum(predicted["breakdown_s"].values()), predicted["step_s"], rel_tol=1e-9)
    search = report["search"]
    assert set(search) == {"optimality_gap", "lower_bound_s", "candidates", "solved", "seconds"}
    assert 0 <= search["optimality_gap"] < 1 and search["lower_bound_s"] <= predicted["step_s"] * (1 + 1e-9)
    assert set(search["seconds"]) == {"trace", "cost", "solve", "total"}


def test_plan_prints_the_contract(planned: tuple[Path, Outcome]) -> None:
    report = planned[1].json
    check_contract(report, 4)
    assert [name for stage in report["stages"] for name in stage["layers"]] == LAYERS
    assert report["mesh"]["pipeline"] == 2 and report["schedule"]["name"] == "1f1b"
    assert "tracing" in planned[1].err and "wrote" in planned[1].err


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


EVERYTHING = {
    "pipeline": 2, "data": 2, "tensor": 2, "context": 1, "expert": 1, "microbatch": 1, "virtual": 2,
    "schedule": "interleaved-1f1b", "recompute": "full", "zero": 1, "zero_group": 2, "sequence_parallel": "true",
}


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


@pytest.mark.parametrize(
    ("cluster", "precision"), [("local-cpu:1x2", "fp32"), ("dgx-v100:1x2", "fp16"), ("dgx-h100:1x2", "bf16")]
)
def test_the_precision_is_the_chips_own(cluster: str, precision: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    assert run("plan", *SMALL, "--cluster", cluster, "--batch", 4, "-o", path).code == 0
    assert yaml.safe_load(path.read_text())["precision"] == precision


def test_a_job_file_is_the_same_job(planned: tuple[Path, Outcome], tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        f"model: {EXAMPLES / 'gpt.py'}:gpt\nset: {{layers: 2, hidden: 64, vocab: 64}}\nseq: 32\ncluster: local-cpu:1x4\n"
        "batch: 16\nconstraints: {pipeline: 2, schedule: 1f1b}\noptimizer: {learning_rate: 6e-4}\n"
    )
    outcome = run("plan", job, "-o", tmp_path / "plan.yaml", "--json")
    assert outcome.json["predicted"] == planned[1].json["predicted"]
    assert yaml.safe_load((tmp_path / "plan.yaml").read_text())["optimizer"]["learning_rate"] == 6e-4


def test_emit_writes_a_program(planned: tuple[Path, Outcome], tmp_path: Path) -> None:
    outcome = run("emit", planned[0], "-o", tmp_path / "program")
    assert outcome.code == 0 and "torchrun --nproc-per-node 4" in outcome.err
    assert (tmp_path / "program" / "plan.yaml").read_text() == planned[0].read_text()
    assert run("emit", planned[0], "-o", tmp_path / "program").code == 0


def test_hardware(tmp_path: Path) -> None:
    names = run("hardware").out.split()
    assert "local-cpu" in names and run("hardware", "--json").json == {"profiles": names}
    assert "chip.memory_bandwidth" in run("hardware", "dgx-h100").out
    fields = run("hardware", "dgx-h100", "--json").json["fields"]
    assert all(set(field) == {"field", "value", "unit", "kind", "source"} for field in fields)


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Change a plan file as a person would."""
    data = yaml.safe_load(path.read_text())
    change(data)
    path.write_text(yaml.safe_dump(data))


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


def test_a_plan_of_another_batch_claims_no_proof(copied: Path) -> None:
    def change(data: Any) -> None:
        data["batch"] = {"global": 8, "micro": 1, "accumulation": 4}

    edit(copied, change)
    assert run("check", copied, "--json").json["search"]["lower_bound_s"] == 0.0
    assert "none: an edit has left what was searched" in run("show", copied).out


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


def test_what_cannot_fit_leaves_with_3(tmp_path: Path) -> None:
    cluster = tmp_path / "small.yaml"
    cluster.write_text("base: local-cpu\nnodes: 1\ndevices_per_node: 2\nchip: {memory: {value: 257, unit: MiB}}\n")
    outcome = run("plan", *SMALL, "--set", "hidden=512", "--cluster", cluster, "--batch", 4, "-o", tmp_path / "plan.yaml")
    assert outcome.code == 3
    assert "the limit is 0.25 GiB" in outcome.error and "bytes too few" in outcome.error
    assert not (tmp_path / "plan.yaml").exists()


PLAN = ("plan", *SMALL)
ON = ("--cluster", "local-cpu:1x8", "--batch", "16")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            (*PLAN, "--cluster", "dgx-h1000:1"),
            "unknown profile 'dgx-h1000'; use one of aws-p3-16xlarge, b200-capped, dgx-2, dgx-a100-40gb",
        ),
        ((*PLAN, "--cluster", "dgx-h100"), "does not say how many nodes"),
        ((*PLAN, "--cluster", "dgx-h100:0"), "no positive number of nodes"),
        ((*PLAN, "--cluster", "dgx-h100:two"), "no positive number of nodes"),
        ((*PLAN, "--cluster", "dgx-h100:1x9"), "a node of dgx-h100 has 8"),
        ((*PLAN, "--cluster", "missing.yaml"), "missing.yaml: cannot be read"),
        (PLAN, "--cluster: is missing"),
        (("plan", "missing.py:gpt", *ON), "missing.py: no such file"),
        (("plan", "missing.py", *ON), "missing.py"),
        (("plan", "hf:missing", *ON), "missing: no such file"),
        (("plan", f"{EXAMPLES / 'gpt.py'}:nothing", *ON), "nothing is not defined"),
        (("plan", f"{EXAMPLES / 'gpt.py'}:math", *ON), "math is not callable"),
        (("plan", f"{EXAMPLES / 'gpt.py'}:gpt", "--set", "layers", *ON), "--set: 'layers' is no assignment"),
        (("plan", f"{EXAMPLES / 'gpt.py'}:gpt", "--set", "leyers=3", *ON), "takes no keyword 'leyers'"),
        (("plan", f"{EXAMPLES / 'gpt.py'}:gpt", "--set", "layers=many", *ON), "--set layers"),
        ((*PLAN, "--cluster", "local-cpu:1x8", "--batch", "0"), "--batch: is 0"),
        ((*PLAN, "--cluster", "local-cpu:1x8", "--batch", "-4"), "--batch: is -4"),
        ((*PLAN, "--cluster", "local-cpu:1x8", "--batch", "many"), "--batch"),
        ((*PLAN, *ON, "--seq", "0"), "--seq: is 0"),
        ((*PLAN, *ON, "--precision", "int8"), "--precision: is 'int8'; one of bf16"),
        ((*PLAN, "--cluster", "dgx-v100:1", "--precision", "bf16"), "does not compute in bf16; it has fp16, fp32, fp64"),
        ((*PLAN, *ON, "--gap", "-1"), "--gap: is -1"),
        ((*PLAN, *ON, "--gap", "nan"), "--gap: is nan"),
        ((*PLAN, *ON, "--time-limit", "0"), "--time-limit: is 0"),
        ((*PLAN, *ON, "--pin", "colour=3"), "K one of pipeline"),
        ((*PLAN, *ON, "--pin", "tensor"), "'tensor' pins nothing"),
        ((*PLAN, *ON, "--pin", "tensor=3"), "--pin tensor: 3 does not divide the 8 devices; one of 1, 2, 4, 8"),
        ((*PLAN, *ON, "--pin", "data=4", "--pin", "tensor=4"), "data=4 x tensor=4 = 16 does not fit the 8 devices"),
        ((*PLAN, *ON, "--pin", "pipeline=1", "--pin", "data=2", "--pin", "tensor=2"), "= 4 does not fit the 8 devices"),
        ((*PLAN, *ON, "--pin", "schedule=zbv", "--pin", "recompute=full"), "--pin recompute"),
        ((*PLAN, *ON, "--pin", "context=2"), "not supported yet"),
        ((*PLAN, *ON, "--pin", "microbatch=3"), "--pin microbatch: microbatch=3 does not divide the batch of 16"),
        ((*PLAN, "--cluster", "local-cpu:1x8", "--batch", "12", "--pin", "data=8"), "--pin data: data=8 does not divide"),
        ((*PLAN, *ON, "--colour", "red"), "shardwright plan: No such option: --colour"),
        (("plan",), "Missing argument"),
        (("fly",), "No such command 'fly'"),
        ((*PLAN, *ON, "-o", EXAMPLES), "is a directory"),
        ((*PLAN, *ON, "-o", EXAMPLES / "gpt.py" / "plan.yaml"), "cannot be written"),
        (("hardware", "abacus"), "unknown profile 'abacus'"),
        (("show", "missing.yaml"), "missing.yaml: cannot be read (No such file or directory)"),
        (("check", EXAMPLES), "cannot be read (Is a directory)"),
        (("emit", "missing.yaml"), "missing.yaml: cannot be read"),
    ],
)
def test_wrong_input_is_one_line(arguments: tuple[object, ...], named: str) -> None:
    outcome = run(*arguments)
    assert outcome.code == 2
    assert named in outcome.error
    assert outcome.out == ""


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("raise RuntimeError('no such luck')", "RuntimeError: no such luck"),
        ("def model(:", "SyntaxError"),
        ("model = 3", "model is not callable"),
        ("def model():\n    return 3", "returned int"),
        ("def model():\n    raise SystemExit(4)", "SystemExit"),
        ("def model(width):\n    return width", "needs the keyword 'width'"),
        (
            "import torch\nclass M(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.e = torch.nn.Embedding(8, 8)\n    def forward(self, input_ids):\n        x = self.e(input_ids)\n"
            "        if x.sum() > 0:\n            x = x * 2\n        return x\nmodel = M",
            "model.py",
        ),
    ],
)
def test_a_wrong_model_is_one_line(text: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(text)
    outcome = run("plan", f"{file}:model", "--cluster", "local-cpu:1x2", "--batch", 4, "--seq", 8, "-o", tmp_path / "plan.yaml")
    assert outcome.code == 2
    assert named in outcome.error


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("model: [", "job.yaml: is not YAML at line"),
        ("batsh: 3\nmodel: m.py:b", "job.yaml: batsh: is no field"),
        ("model: m.py:b\nbatch: many", "job.yaml: batch: is 'many'"),
        ("model: m.py:b\noptimizer: {speed: 3}", "job.yaml: optimizer.speed: is no field"),
        ("model: m.py:b\nconstraints: {colour: red}\ncluster: dgx-h100:1", "job.yaml: constraints.colour: is no field"),
        ("model: m.py:b\nconstraints: {tensor: <= x}\ncluster: dgx-h100:1", "constraints.tensor: 'x' is no degree"),
        ("model: m.py:b\nconstraints: {layers: {a: {tensor: 2}}}\ncluster: dgx-h100:1", "layers.a.tensor: tensor is"),
        ("model: m.py:b\nconstraints: {schedule: zbv, virtual: 3}\ncluster: dgx-h100:1", "virtual=3 contradicts schedule=zbv"),
    ],
)
def test_a_wrong_job_is_one_line(text: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    outcome = run("plan", file)
    assert outcome.code == 2
    assert named in outcome.error


def _spoil(name: str, text: str | None) -> Callable[[Path], None]:
    """Replace a file beside the plan, or remove it."""
    def spoil(path: Path) -> None:
        file = path.with_name(name)
        file.unlink() if text is None else file.write_text(text)

    return spoil


def _put(*path: str | int, value: object) -> Callable[[Path], None]:
    """Set a field of the plan."""
    def change(data: Any) -> None:
        for part in path[:-1]:
            data = data[part]
        data[path[-1]] = value

    return lambda file: edit(file, change)


def _halve(path: Path) -> None:
    path.write_text(path.read_text()[: len(path.read_text()) // 2])


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (_spoil("plan.yaml", ""), "plan.yaml: holds no mapping"),
        (_spoil("plan.yaml", "a: [b"), "plan.yaml: is not YAML at line 1"),
        (_spoil("plan.yaml", "\0"), "plan.yaml: is not YAML"),
        (_halve, "plan.yaml: "),
        (_spoil("plan.graph.json", None), "plan.graph.json: cannot be read (No such file or directory); `shardwright"),
        (_spoil("plan.graph.json", "{"), "plan.graph.json: graph: is mangled"),
        (_spoil("plan.graph.json", "[]"), "plan.graph.json: graph: is not of format 1"),
        (_spoil("plan.cluster.yaml", None), "plan.cluster.yaml: cannot be read"),
        (_spoil("plan.cluster.yaml", "a: 1"), "plan.cluster.yaml: "),
        (_put("format", value=2), "plan.yaml: format: is 2; this version reads format 1"),
        (_put("colour", value="red"), "plan.yaml: colour: is no field"),
        (_put("stages", 0, "colour", value="red"), "plan.yaml: stages.0.colour: is no field"),
        (_put("model", "fingerprint", value="0123456789abcdef"), "plan.yaml: model.fingerprint: 0123456789abcdef was made for"),
        (_put("cluster", "fingerprint", value="0123456789abcdef"), "plan.yaml: cluster.fingerprint: 0123456789abcdef was made"),
        (_put("precision", value="bf16"), "plan.yaml: precision: is bf16; the model was traced in fp32"),
        (_put("precision", value="int8"), "plan.yaml: precision: is 'int8'"),
        (_put("sequence", value=64), "plan.yaml: sequence: is 64; the traced model has 32"),
        (_put("mesh", "data", value="two"), "plan.yaml: mesh.data: is 'two'"),
        (_put("mesh", "context", value=2), "plan.yaml: mesh.context: is 2"),
        (_put("mesh", "data", value=4), "plan.yaml: mesh: spans 2 x 4 x 1 = 8 devices; the cluster has 4"),
        (_put("batch", "accumulation", value=5), "plan.yaml: batch: "),
        (_put("zero_group", value=3), "plan.yaml: zero_group: 3 does not divide data 2"),
        (_put("schedule", "name", value="zbv"), "plan.yaml: schedule: "),
        (_put("stages", 0, "zero", value=4), "plan.yaml: stages.0.zero: "),
        (_put("stages", 0, "zero", value=True), "plan.yaml: stages.0.zero: is True"),
        (_put("stages", 0, "recompute", value=["full x 9"]), "plan.yaml: stages.0.recompute: counts 9 blocks"),
        (_put("stages", 0, "blocks", value="blocks.0"), "plan.yaml: stages.0.blocks: "),
        (_put("stages", value=[]), "plan.yaml: stages: "),
        (_put("placements", "Block", "parameters", "attention.qkv.weight", value="shard(0)"), "plan.yaml: placements.Block: "),
        (_put("placements", "Block", "boundary", "y", value="replicate"), "plan.yaml: placements.Block: "),
        (_put("optimizer", "learning_rate", value=-1), "plan.yaml: optimizer.learning_rate: is -1"),
        (_put("certificate", value=None), "plan.yaml: certificate: is None"),
    ],
)
def test_a_mangled_plan_is_one_line(spoil: Callable[[Path], None], named: str, copied: Path) -> None:
    spoil(copied)
    outcome = run("check", copied)
    assert outcome.code == 2
    assert named in outcome.error


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


def test_a_foreign_directory_is_left_alone(planned: tuple[Path, Outcome], tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert "holds files that are no emitted program" in run("emit", planned[0], "-o", tmp_path).error
    assert "cannot be written" in run("emit", planned[0], "-o", tmp_path / "thesis.txt" / "program").error
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_what_nobody_foresaw_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise KeyError("a\nb")

    monkeypatch.setattr("hardware_profiles.profile_names", broken)
    outcome = run("hardware")
    assert outcome.code == 70
    assert outcome.err.splitlines() == [
        "internal error: KeyError: 'a\\nb'; please report it, with what `shardwright --debug ...` prints"
    ]
    with pytest.raises(KeyError):
        run("--debug", "hardware")


def test_help_names_every_command() -> None:
    outcome = run()
    assert outcome.code == 0
    assert all(name in outcome.out for name in ("plan", "show", "check", "emit", "hardware"))


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
def test_as_a_process(tmp_path: Path) -> None:
    """One object on standard output, nothing else; a pipe that closes early leaves no traceback."""
    def shardwright(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "planner", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLES.parent, env=environment, check=False)

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    planned = shardwright(*PLAN, "--cluster", "local-cpu:1x2", "--batch", 4, "-o", tmp_path / "plan.yaml", "--json")
    assert planned.returncode == 0, planned.stderr
    check_contract(json.loads(planned.stdout), 2)
    assert len(planned.stdout.splitlines()) == 1
    wrong = shardwright(*PLAN, "--cluster", "local-cpu:1x2", "--batch", 0)
    assert (wrong.returncode, wrong.stdout) == (2, "") and wrong.stderr.startswith("error: --batch")
