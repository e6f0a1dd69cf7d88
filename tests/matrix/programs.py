"""Emitted programs of small models, and what they leave behind when they run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from codegen import emit
from planner.ir.graph import ModelGraph
from planner.trace import load_model, trace_model
from tests.matrix.build import Row, make_plan
from tests.matrix.reference import ARGUMENTS
from tests.matrix.test_matrix import MODELS
from tests.matrix.workers import Outcome, Workers

DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SEQUENCE = {"gpt": 20, "llama": 24, "buffered": 20, "corners": 24, "scaled": 20, "settled": 24, "distilled": 24, "adapted": 24,
            "diffused": 24}
UNLAYERED = ("corners", "settled", "distilled")


@cache
def small_graph(model: str, precision: str = "fp64", layers: int = 2, dropout: float = 0.0) -> ModelGraph:
    """A model of ``tests/matrix/models.py`` with few layers."""
    settings = ({} if model in UNLAYERED else {"layers": layers}) | ({"dropout": dropout} if dropout else {})
    return trace_model(load_model(f"{MODELS}:{model}", settings, None), sequence=SEQUENCE[model], dtype=DTYPES[precision])


@dataclass(frozen=True)
class Emitted:
    """A program on disk and the number of processes that it wants."""

    directory: Path
    ranks: int

    def launch(
        self, workers: Workers, *arguments: str, ranks: int | None = None, timeout_s: float = 180
    ) -> list[Outcome]:
        """Run it; what every rank left."""
        return workers.run(self.directory, ranks or self.ranks, [*ARGUMENTS, *arguments], timeout_s=timeout_s)

    def train(self, workers: Workers, steps: int, *arguments: str) -> list[dict[str, float]]:
        """Run it to step ``steps``; what it reported of each step that it made."""
        metrics = self.directory / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        outcomes = self.launch(workers, "--steps", str(steps), "--metrics", str(metrics), *arguments)
        failed = [outcome for outcome in outcomes if outcome.code]
        assert not failed, failed[0].error
        return read_reports(metrics)

    def edit(self, file: str, old: str, new: str) -> None:
        """Change the program's text as a user would by hand."""
        path = self.directory / file
        text = path.read_text()
        assert old in text, f"{file} holds no {old!r}"
        path.write_text(text.replace(old, new))


def emitted(graph: ModelGraph, row: Row, directory: Path, precision: str = "fp64") -> Emitted:
    """The program of a row of decisions."""
    emit(make_plan(graph, row, precision=precision), graph, directory, prediction=None, plan_yaml="format: 1\n")
    return Emitted(directory, row.devices)


def read_reports(metrics: Path) -> list[dict[str, float]]:
    """What a program wrote of every step."""
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


def losses(reports: Sequence[dict[str, float]]) -> list[float]:
    """The loss of every step."""
    return [report["loss"] for report in reports]


def write_tokens(path: Path, tokens: Sequence[int]) -> Path:
    """A token file."""
    header = {"format": "shardwright-tokens", "version": 1, "dtype": "uint16", "tokens": len(tokens)}
    body = b"".join(token.to_bytes(2, "little") for token in tokens)
    path.write_bytes(json.dumps(header).encode() + b"\n" + body)
    return path
