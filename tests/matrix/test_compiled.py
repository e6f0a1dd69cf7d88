"""`--compile`: blocks that torch.compile has compiled train as the others do, over every axis. Float64 on gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.matrix.build import Row
from tests.matrix.programs import emitted, losses, read_reports, small_graph
from tests.matrix.workers import Workers
from tests.wide import wide

pytestmark = pytest.mark.slow
ROWS = {
    "tensor 2": Row(tensor=2, sequence_parallel=True, accumulation=2, recompute="selective"),
    "pipeline 2 x data 2": Row(pipeline=2, data=2, schedule="interleaved-1f1b", zero=3, accumulation=4),
}
COUNTS = '''    train(build(), options)
    from torch._dynamo.utils import counters
    print("compiled graphs:", counters["stats"]["unique_graphs"])
'''


@pytest.mark.parametrize("name", [wide("tensor 2"), "pipeline 2 x data 2"])
def test_compiled_blocks_train_alike(workers: Workers, name: str, tmp_path: Path) -> None:
    """With dropout: masks are drawn as ever, outside of what is compiled."""
    graph = small_graph("gpt", layers=2 * ROWS[name].pipeline - 1, dropout=0.1)
    program = emitted(graph, ROWS[name], tmp_path / "program")
    eager = losses(program.train(workers, 2))
    program.edit("train.py", "    train(build(), options)\n", COUNTS)
    metrics = tmp_path / "compiled.jsonl"
    arguments = ("--steps", "2", "--metrics", str(metrics), "--compile")
    outcomes = program.launch(workers, *arguments, timeout_s=400)
    assert not any(outcome.code for outcome in outcomes), outcomes[0].error
    assert all(int(outcome.output.rsplit("compiled graphs:", 1)[1]) > 0 for outcome in outcomes)
    assert losses(read_reports(metrics)) == pytest.approx(eager, rel=1e-10)
