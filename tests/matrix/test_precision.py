"""Half precisions in emitted programs: they follow float32, keep their state in float32, and fp16 scales its loss."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from planner.trace import load_model, trace_model
from runtime import checkpoint
from runtime.collectives import TensorAxis
from tests.matrix.build import Row
from tests.matrix.programs import DTYPES, emitted, losses, small_graph
from tests.matrix.workers import Workers
from tests.wide import wide

pytestmark = pytest.mark.slow
STEPS = 3
"""Two of warm-up, and one at the full rate."""
ROWS = {
    "one rank": Row(accumulation=4),
    "tensor 2": Row(tensor=2, accumulation=4, recompute="selective"),
    "sequence-parallel": Row(tensor=2, sequence_parallel=True, accumulation=4),
    "pipeline 2": Row(pipeline=2, accumulation=4),
    "zero bubble": Row(pipeline=2, schedule="zbv", zero=2, accumulation=4),
    "zero 1": Row(data=2, zero=1, accumulation=2),
    "zero 3": Row(data=2, zero=3, accumulation=2, recompute="full"),
}
SIMPLER = ("tensor 2", "pipeline 2", "zero 1")
"""Others do as much and more."""
DECLARES = '''    program = build()
    train(program, options)
    ends = [stage for stage in program.runner.stages if stage.is_last]
    if ends:
        kinds = [str(ends[0].output_type), str(ends[0].loss_sums[0].dtype)]
        (Path(__file__).with_name("kinds.json")).write_text(json.dumps(kinds))
'''


@pytest.fixture(scope="module")
def single(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """What one rank reports in float32."""
    program = emitted(small_graph("gpt", "fp32"), ROWS["one rank"], tmp_path_factory.mktemp("fp32") / "program", "fp32")
    return program.train(workers, STEPS)


@pytest.mark.parametrize(("precision", "name"), [
    *(wide("fp16", name) if name in SIMPLER else ("fp16", name) for name in ROWS),
    ("bf16", "one rank"), ("bf16", "sequence-parallel"), ("bf16", "zero 3"),
    *(wide("bf16", name) for name in ("tensor 2", "pipeline 2", "zero bubble", "zero 1")),
])
def test_half_precisions_follow_float32(
    workers: Workers, single: list[dict[str, float]], precision: str, name: str, tmp_path: Path
) -> None:
    program = emitted(small_graph("gpt", precision), ROWS[name], tmp_path / "program", precision)
    reports = program.train(workers, STEPS, "--checkpoint", str(tmp_path / "kept"))
    assert losses(reports) == pytest.approx(losses(single), rel=0.02)
    norms = [report["grad_norm"] for report in reports]
    assert norms == pytest.approx([report["grad_norm"] for report in single], rel=0.1)
    kept = tmp_path / "kept" / f"step-{STEPS:08d}"
    assert {value.dtype for value in checkpoint.load_plain(kept).values()} == {torch.float32}
    assert "F.cross_entropy" not in (tmp_path / "program" / "model.py").read_text()


@pytest.mark.parametrize("precision", DTYPES)
def test_the_last_stage_declares_the_loss_that_it_makes(workers: Workers, precision: str, tmp_path: Path) -> None:
    program = emitted(small_graph("gpt", precision), ROWS["pipeline 2"], tmp_path / "program", precision)
    program.edit("train.py", "    train(build(), options)\n", DECLARES)
    program.edit("train.py", "import torch\n", "import json\nfrom pathlib import Path\n\nimport torch\n")
    program.train(workers, 1)
    expected = "torch.float64" if precision == "fp64" else "torch.float32"
    assert json.loads((tmp_path / "program" / "kinds.json").read_text()) == [expected, expected]


@pytest.mark.parametrize(("precision", "name"), [
    ("bf16", "one rank"), ("fp16", "tensor 2"), wide("fp16", "pipeline 2"), ("fp16", "zero 3"), wide("fp16", "one rank"),
    *(wide("bf16", name) for name in ("tensor 2", "pipeline 2", "zero 3")),
])
def test_a_users_loss_is_summed_in_float32(workers: Workers, precision: str, name: str, tmp_path: Path) -> None:
    """64 samples: 13,824 terms of about 100 a micro-batch, 1.4 million: beyond float16, and of 3 digits in bfloat16."""
    row = replace(ROWS[name], microbatch=64 // (ROWS[name].data * ROWS[name].accumulation))
    found = {}
    for kind in ("fp32", precision):
        source = load_model(f"{Path(__file__).with_name('regression.py')}:regression", {}, None)
        program = emitted(trace_model(source, dtype=DTYPES[kind]), row, tmp_path / kind, kind)
        found[kind] = losses(program.train(workers, 3))
    assert found[precision] == pytest.approx(found["fp32"], rel=2e-3)


@pytest.mark.parametrize("name", ["tensor 2", "zero 3", *map(wide, ("pipeline 2", "zero 1"))])
def test_an_overflow_skips_the_step_on_all_ranks(workers: Workers, name: str, tmp_path: Path) -> None:
    program = emitted(small_graph("gpt", "fp16"), ROWS[name], tmp_path / "program", "fp16")
    kept = tmp_path / "kept"
    program.train(workers, 1, "--checkpoint", str(kept))
    progress = kept / "step-00000001" / "training.json"
    huge = json.loads(progress.read_text()) | {"loss_scale": 2.0**100, "clean_steps": 7}
    progress.write_text(json.dumps(huge))
    (report,) = program.train(workers, 2, "--checkpoint", str(kept))
    assert report["grad_norm"] is None, "JSON has no infinity"
    after = json.loads((kept / "step-00000002" / "training.json").read_text())
    assert after["loss_scale"] == 2.0**99 and after["clean_steps"] == 0
    assert after["step"] == 2 and after["updates"] == 1
    before, skipped = (checkpoint.load_plain(kept / f"step-0000000{step}") for step in (1, 2))
    assert all(torch.equal(skipped[fqn], value) for fqn, value in before.items())
    progress = kept / "step-00000002" / "training.json"
    progress.write_text(json.dumps(after | {"loss_scale": 2.0**10, "clean_steps": 999}))
    program.train(workers, 3, "--checkpoint", str(kept))
    grown = json.loads((kept / "step-00000003" / "training.json").read_text())
    assert grown["loss_scale"] == 2.0**11 and grown["clean_steps"] == 0 and grown["updates"] == 2


def test_a_loss_scale_is_what_fp16_alone_leaves(workers: Workers, tmp_path: Path) -> None:
    """A checkpoint of another precision says nothing about it."""
    wide, half = (emitted(small_graph("gpt", each), ROWS["one rank"], tmp_path / each, each) for each in ("fp32", "fp16"))
    kept, scales = tmp_path / "kept", []
    for step, program in enumerate((wide, half, wide, half), 1):
        program.train(workers, step, "--checkpoint", str(kept))
        scales.append(json.loads((kept / f"step-{step:08d}" / "training.json").read_text())["loss_scale"])
    assert scales == [None, 2.0**16, None, 2.0**16]


def test_dumped_gradients_are_without_the_loss_scale(workers: Workers, tmp_path: Path) -> None:
    program, file = emitted(small_graph("gpt", "fp16"), ROWS["zero 1"], tmp_path / "program", "fp16"), tmp_path / "gradients.pt"
    (report,) = program.train(workers, 1, "--dump-gradients", str(file))
    squared = sum(float(value.double().square().sum()) for value in {id(v): v for v in torch.load(file).values()}.values())
    assert math.sqrt(squared) == pytest.approx(report["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(70, 9), (70, 9, 3), (9,)])
def test_cross_entropy_of_half_logits_is_made_in_float32(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    logits = (20 * torch.randn(shape)).to(dtype).requires_grad_()
    target = torch.randint(9, (shape[0], *shape[2:]) if len(shape) > 1 else ())
    if target.dim():
        target[::5] = -100
    expected = F.cross_entropy(logits.float(), target, reduction="sum")
    (slope,) = torch.autograd.grad(expected, logits)
    loss = TensorAxis(None, 0, 1).cross_entropy(logits, target)
    loss.backward()
    assert loss.dtype == torch.float32 and logits.grad is not None and logits.grad.dtype == dtype
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logits.grad, slope)
