"""What `--json` promises, and how a person edits a plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

MESH = ("pipeline", "data", "context", "expert", "tensor")
MEMORY = ("parameters", "gradients", "optimizer", "activations", "buffers", "reserve")
BREAKDOWN = (
    "compute", "recompute", "tensor_comm", "expert_comm", "context_comm", "pipeline_comm", "pipeline_bubble", "data_comm",
    "optimizer",
)
LAYERS = ["embedding", "blocks.0", "blocks.1", "head"]


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
    seconds = search["seconds"]
    assert {"load", "trace", "cost", "solve", "total"} <= set(seconds) and min(seconds.values()) >= 0.0
    assert sum(value for name, value in seconds.items() if name != "total") == pytest.approx(seconds["total"], rel=1e-6)


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Change a plan file as a person would."""
    data = yaml.safe_load(path.read_text())
    change(data)
    path.write_text(yaml.safe_dump(data))
