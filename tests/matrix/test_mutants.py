"""The oracle can fail: every wrong program is caught, by its numbers or by an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from codegen import emit
from tests.matrix.build import Row, make_plan
from tests.matrix.mutants import Mutant, mutants
from tests.matrix.reference import ARGUMENTS, worst_gradient
from tests.matrix.test_matrix import graph_of, reference_of, run
from tests.matrix.workers import Workers
from tests.wide import wide

pytestmark = pytest.mark.slow
ROWS = {
    # Untied: within one stage the head's declaration of a tied weight is replaced by the embedding's.
    "untied_gpt": Row(tensor=2, accumulation=2),
    "llama": Row(tensor=2, sequence_parallel=True, accumulation=2),
}


def caught(workers: Workers, model: str, world: int, batch: int, directory: Path) -> bool:
    """Whether a program fails, or its first step's loss or gradients are not the plain model's."""
    metrics, gradients = directory / "metrics.jsonl", directory / "gradients.pt"
    arguments = [*ARGUMENTS, "--steps", "1", "--metrics", str(metrics), "--dump-gradients", str(gradients)]
    outcomes = workers.run(directory, world, arguments, timeout_s=20)
    if any(outcome.code for outcome in outcomes):
        return True
    reference = reference_of(model, batch)
    loss = json.loads(metrics.read_text().splitlines()[0])["loss"]
    _, error = worst_gradient(torch.load(gradients), reference.gradients)
    return error > 1 or abs(loss - reference.losses[0]) > 1e-10 * reference.losses[0]


@pytest.mark.parametrize("model", [wide("untied_gpt"), "llama"])
def test_every_mutant_is_caught(workers: Workers, model: str, tmp_path: Path) -> None:
    plan = make_plan(graph_of(model), ROWS[model])
    directory = tmp_path / "program"
    emit(plan, graph_of(model), directory, prediction=None, plan_yaml="format: 1\n")
    assert not caught(workers, model, plan.mesh.devices, plan.batch.total, directory), "the program itself is right"
    original = (directory / "model.py").read_text()
    survivors: list[Mutant] = []
    count = 0
    for mutant in mutants(original):
        count += 1
        for left in ("metrics.jsonl", "gradients.pt"):
            (directory / left).unlink(missing_ok=True)
        (directory / "model.py").write_text(mutant.text)
        if not caught(workers, model, plan.mesh.devices, plan.batch.total, directory):
            survivors.append(mutant)
    assert count >= 15, f"only {count} mutants: the design is too thin"
    assert not survivors, f"{len(survivors)} of {count} wrong programs pass: {[m.name for m in survivors]}"


def test_skipping_the_tied_sum_is_caught(workers: Workers, tmp_path: Path) -> None:
    """Embedding and head on different stages: without the sum over the copies the gradients are wrong."""
    row = Row(pipeline=2, accumulation=2)
    plan = make_plan(graph_of("gpt"), row)
    directory = tmp_path / "program"
    emit(plan, graph_of("gpt"), directory, prediction=None, plan_yaml="format: 1\n")
    train = directory / "train.py"
    text = train.read_text()
    mutated = text.replace("if len(stages) > 1]", "if len(stages) > 9]")
    assert mutated != text
    train.write_text(mutated)
    try:
        _, _, gradients = run(workers, directory, row.devices)
    except (AssertionError, FileNotFoundError):
        return
    name, error = worst_gradient(gradients, reference_of("gpt", plan.batch.total).gradients)
    assert error > 1 and name
