"""A plan or a file beside it that is spoilt: one line that names the file and the field."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.contract import edit
from tests.commands import run


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


@pytest.mark.slow
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
        (_put("model", "name", value="mine"), "plan.yaml: model.name: is 'mine'; 'gpt': the name of what it was made for"),
        (_put("cluster", "name", value="mine"), "plan.yaml: cluster.name: is 'mine'; 'local-cpu': the name"),
        (_put("precision", value="bf16"), "plan.yaml: precision: is bf16; the model was traced in fp32"),
        (_put("precision", value="int8"), "plan.yaml: precision: is 'int8'"),
        (_put("sequence", value=64), "plan.yaml: sequence: is 64; the traced model has 32"),
        (_put("mesh", "context", value=True), "plan.yaml: mesh.context: is True; input should be a valid integer"),
        (_put("mesh", "expert", value=1.0), "plan.yaml: mesh.expert: is 1.0; input should be a valid integer"),
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
