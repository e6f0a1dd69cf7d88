"""What a plan predicts to be called is what its program calls: exactly, over every schedule, ZeRO stage and placement."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.ledger import Place, representatives
from tests.matrix.build import Row, label
from tests.rehearse.programs import parted_calls, written
from tests.rehearse.server import Server
from tests.wide import wide

pytestmark = pytest.mark.slow

FAST = [
    ("gpt", "fp64", Row(tensor=2, data=2, zero=1, accumulation=2)),
    ("gpt", "fp64", Row(pipeline=2, data=2, zero=2, accumulation=2)),
]
ROWS = [
    # Every schedule; embedding and head are tied across stages under pipelines of gpt.
    wide("gpt", "fp64", Row(pipeline=4, data=2, zero=2, accumulation=4, schedule="gpipe")),
    wide("gpt", "fp64", Row(pipeline=4, data=2, zero=0, accumulation=5)),
    ("llama", "fp64", Row(pipeline=2, tensor=2, data=2, zero=3, accumulation=4, recompute="full")),
    ("gpt", "fp64", Row(pipeline=2, tensor=2, data=2, zero=1, accumulation=4, schedule="interleaved-1f1b")),
    wide("gpt", "bf16", Row(pipeline=2, data=2, zero=2, accumulation=4, schedule="interleaved-zero-bubble")),
    ("gpt", "fp64", Row(pipeline=2, tensor=2, data=2, zero=1, accumulation=4, schedule="zbv", sequence_parallel=True)),
    # ZeRO in groups smaller than the data axis; by block; nothing to gather in a group of one.
    wide("gpt", "fp64", Row(pipeline=2, data=2, zero="mixed", accumulation=4, schedule="interleaved-1f1b", stages_of_rank=4)),
    wide("gpt", "fp64", Row(data=4, zero_group=2, zero=3, accumulation=2)),
    wide("gpt", "bf16", Row(pipeline=2, tensor=2, data=2, zero=2, accumulation=4, order="data-pipeline-tensor")),
    ("gpt", "fp64", Row(
        pipeline=2, data=4, zero_group=2, zero=1, accumulation=4, schedule="zbv", order="data-pipeline-tensor",
    )),
    ("gpt", "fp64", Row(pipeline=2, tensor=2, data=2, zero=1, accumulation=4, order="tensor-pipeline-data")),
    wide("gpt", "bf16", Row(tensor=2, data=4, zero_group=2, zero=3, accumulation=2, order="tensor-data-pipeline")),
    wide("llama", "bf16", Row(tensor=2, data=4, zero_group=2, zero=1, accumulation=2, microbatch=3)),
    wide("gpt", "fp64", Row(data=4, zero_group=1, zero=2, accumulation=2)),
    wide("gpt", "fp64", Row(pipeline=2, data=4, zero_group=2, zero=2, accumulation=4, schedule="zbv")),
    ("gpt", "fp64", Row(tensor=2, data=4, zero="mixed", recompute="mixed", accumulation=2, sequence_parallel=True)),
    wide("gpt", "fp64", Row(pipeline=2, data=2, zero=3, accumulation=4, schedule="interleaved-1f1b", recompute="selective")),
    # Six heads and 51 words over four ranks, ten heads on five over two; whole and half precision; every recomputation.
    wide("gpt", "bf16", Row(tensor=4, data=2, zero=2, accumulation=2, sequence_parallel=True, recompute="selective")),
    wide("gpt", "fp32", Row(tensor=4, data=2, zero=3, accumulation=1, recompute="full")),
    wide("llama", "bf16", Row(tensor=4, zero=0, accumulation=2, sequence_parallel=True, recompute="full")),
    wide("llama", "fp16", Row(tensor=2, pipeline=2, accumulation=3, zero=1)),
    # No collective is called again for parameters that are read in several places.
    wide("scaled", "fp64", Row(tensor=2, pipeline=2, accumulation=4, schedule="zbv")),
    ("scaled", "bf16", Row(tensor=2, pipeline=2, accumulation=2, schedule="interleaved-zero-bubble", sequence_parallel=True)),
    # Of tied parameters that a stage only reads detached it has nothing to reduce, and zeros for the others.
    wide("settled", "fp64", Row(pipeline=2, data=2, zero=1, accumulation=2)),
    ("settled", "fp64", Row(tensor=2, pipeline=2, data=2, accumulation=2)),
    wide("settled", "fp64", Row(pipeline=2, data=2, zero=3, accumulation=2)),
    wide("distilled", "fp64", Row(pipeline=2, data=2, zero=2, accumulation=4, schedule="interleaved-1f1b")),
    ("distilled", "bf16", Row(tensor=2, pipeline=2, data=2, accumulation=2, schedule="zbv")),
    # Frozen parameters are gathered with trained ones of their block, and ahead where only the block after is trained.
    wide("adapted", "bf16", Row(data=4, zero=3, zero_group=2, accumulation=3)),
    wide("adapted", "bf16", Row(pipeline=2, data=2, zero=3, accumulation=4, schedule="interleaved-1f1b")),
]


def check(server: Server, model: str, precision: str, row: Row, directory: Path) -> None:
    """The first rank of every stage, and the last of all, which holds the least."""
    plan, graph = written(model, row, directory, precision=precision, layers=2 * row.virtual)
    for rehearsed in server.rehearse(directory, [*representatives(plan), plan.mesh.devices - 1]):
        assert rehearsed.stage == Place.of(rehearsed.rank, plan.mesh).pipeline
        assert not parted_calls(plan, graph, rehearsed)


@pytest.mark.parametrize(("model", "precision", "row"), FAST, ids=label)
def test_calls_agree(server: Server, model: str, precision: str, row: Row, tmp_path: Path) -> None:
    check(server, model, precision, row, tmp_path / "program")


@pytest.mark.parametrize(("model", "precision", "row"), ROWS, ids=label)
def test_calls_agree_over_the_matrix(server: Server, model: str, precision: str, row: Row, tmp_path: Path) -> None:
    check(server, model, precision, row, tmp_path / "program")
