"""A run that stops and resumes, under the same plan or another, is the run that never stopped. Float64 on gloo."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from planner.trace import load_model
from runtime import checkpoint
from runtime.data import TokenFile
from tests.matrix.build import Row
from tests.matrix.programs import Emitted, emitted, losses, small_graph, write_tokens
from tests.matrix.reference import SEED
from tests.matrix.test_matrix import MODELS
from tests.matrix.workers import Workers
from tests.wide import wide

pytestmark = pytest.mark.slow
BATCH, STEPS = 12, 6
ROWS = {
    "first": Row(tensor=2, pipeline=2, data=2, zero=1, accumulation=2, microbatch=3),
    "zero 3": Row(data=3, zero=3, accumulation=2, microbatch=2),
    "one rank": Row(accumulation=2, microbatch=6, recompute="full"),
    "tensor 4": Row(tensor=4, sequence_parallel=True, accumulation=2, microbatch=6),
    "zbv": Row(tensor=2, pipeline=2, schedule="zbv", zero=2, accumulation=4, microbatch=3),
}
VOCABULARY, SEQUENCE = 51, 20


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 samples: six steps of twelve go into the second epoch, which is shuffled anew."""
    numbers = random.Random(SEED).choices(range(VOCABULARY), k=50 * SEQUENCE + 1)
    return write_tokens(tmp_path_factory.mktemp("data") / "text.tokens", numbers)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Emitted]:
    """Tied embedding and head, fused QKV, six heads that do not divide by four."""
    root = tmp_path_factory.mktemp("programs")
    graph = small_graph("gpt", layers=3)
    return {name: emitted(graph, row, root / name.replace(" ", "-")) for name, row in ROWS.items()}


@pytest.fixture(scope="module")
def whole(workers: Workers, programs: dict[str, Emitted], tokens: Path) -> list[float]:
    """The losses of the run that never stopped."""
    return losses(programs["first"].train(workers, STEPS, "--data", str(tokens)))


@pytest.fixture(scope="module")
def half(workers: Workers, programs: dict[str, Emitted], tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of steps 1 to 3."""
    directory = tmp_path_factory.mktemp("checkpoints")
    programs["first"].train(
        workers, 3, "--data", str(tokens), "--checkpoint", str(directory), "--checkpoint-every", "1"
    )
    return directory


@pytest.mark.parametrize("name", ["first", "one rank", *map(wide, ("zero 3", "tensor 4", "zbv"))])
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(
    workers: Workers, programs: dict[str, Emitted], tokens: Path, whole: list[float], half: Path, name: str,
    tmp_path: Path,
) -> None:
    shutil.copytree(half, tmp_path, dirs_exist_ok=True)
    reports = programs[name].train(workers, STEPS, "--data", str(tokens), "--checkpoint", str(tmp_path))
    assert [report["step"] for report in reports] == [4, 5, 6]
    assert losses(reports) == pytest.approx(whole[3:], rel=1e-12 if name == "first" else 1e-9)


def test_a_checkpoint_goes_from_plan_to_plan(
    workers: Workers, programs: dict[str, Emitted], tokens: Path, whole: list[float], tmp_path: Path
) -> None:
    found: list[float] = []
    for step, name in enumerate(("zbv", "zero 3", "tensor 4", "one rank", "first", "zero 3"), start=1):
        reports = programs[name].train(workers, step, "--data", str(tokens), "--checkpoint", str(tmp_path))
        found += losses(reports)
    assert found == pytest.approx(whole, rel=1e-9)


def test_grouped_queries_go_from_plan_to_plan(workers: Workers, tmp_path: Path) -> None:
    """Five key-value heads over four ranks."""
    graph = small_graph("llama")
    programs = [emitted(graph, ROWS[name], tmp_path / name) for name in ("tensor 4", "first")]
    whole = losses(programs[0].train(workers, 3))
    found: list[float] = []
    for step, program in ((1, programs[0]), (2, programs[1]), (3, programs[0])):
        found += losses(program.train(workers, step, "--checkpoint", str(tmp_path / "kept")))
    assert found == pytest.approx(whole, rel=1e-9)


def test_the_newest_complete_checkpoint_is_used(
    workers: Workers, programs: dict[str, Emitted], tokens: Path, whole: list[float], half: Path, tmp_path: Path
) -> None:
    shutil.copytree(half, tmp_path, dirs_exist_ok=True)
    cut = tmp_path / "step-00000005.partial"
    shutil.copytree(half / "step-00000003", cut)
    (cut / "training.json").unlink()
    (tmp_path / "step-00000009").write_text("no directory")
    (tmp_path / "step-00000008").mkdir()
    shutil.copy(half / "step-00000003" / "training.json", tmp_path / "step-00000008")
    shutil.rmtree(tmp_path / "step-00000003")
    reports = programs["one rank"].train(workers, 5, "--data", str(tokens), "--checkpoint", str(tmp_path))
    assert [report["step"] for report in reports] == [3, 4, 5]
    assert losses(reports) == pytest.approx(whole[2:5], rel=1e-9)
    assert not cut.exists() and (tmp_path / "step-00000005").is_dir(), "the half-written one is written over"


def test_a_finished_run_does_nothing_more(
    workers: Workers, programs: dict[str, Emitted], tokens: Path, half: Path
) -> None:
    before = (half / "step-00000003" / ".metadata").stat().st_mtime_ns
    (outcome,) = programs["one rank"].launch(workers, "--steps", "3", "--data", str(tokens), "--checkpoint", str(half))
    assert outcome.output.splitlines()[-1] == f"resumed from {half} after step 3: nothing is left to do up to step 3"
    assert (half / "step-00000003" / ".metadata").stat().st_mtime_ns == before


def test_the_plain_model_takes_the_weights(tokens: Path, whole: list[float], half: Path) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        plain = load_model(f"{MODELS}:gpt", {"layers": 3}, None).build()
    finally:
        torch.set_default_dtype(torch.float32)
    weights = checkpoint.load_plain(half / "step-00000003")
    assert set(weights) == set(plain.state_dict())
    plain.load_state_dict(weights)
    file = TokenFile(tokens, SEED, SEQUENCE)
    samples = torch.stack([file.sequence(3 * BATCH + index, file.length + 1) for index in range(BATCH)])
    loss = F.cross_entropy(plain(samples[:, :-1]).flatten(0, 1), samples[:, 1:].flatten())
    assert loss.item() == pytest.approx(whole[3], rel=1e-10)


def test_another_run_starts_from_the_weights(
    workers: Workers, programs: dict[str, Emitted], tokens: Path, half: Path, tmp_path: Path
) -> None:
    """From a directory of checkpoints (the newest) or one of them: step 0, a new optimizer, the same under every plan."""
    weights = checkpoint.load_plain(half / "step-00000003")
    found = []
    for name, start in (("first", half / "step-00000003"), ("zero 3", half), ("tensor 4", half)):
        file = tmp_path / f"{name}.pt"
        reports = programs[name].train(
            workers, 2, "--data", str(tokens), "--init-from", str(start), "--export-start", str(file)
        )
        exported = torch.load(file)
        assert exported.keys() == weights.keys()
        assert all(torch.equal(exported[fqn], value) for fqn, value in weights.items())
        assert [report["step"] for report in reports] == [1, 2]
        found.append(losses(reports))
    assert found[1] == pytest.approx(found[0], rel=1e-10) and found[2] == pytest.approx(found[0], rel=1e-10)


def test_the_start_is_the_same_under_every_plan(workers: Workers, programs: dict[str, Emitted], tmp_path: Path) -> None:
    starts = []
    for name, program in programs.items():
        file = tmp_path / f"{name}.pt"
        program.train(workers, 1, "--export-start", str(file))
        starts.append(torch.load(file))
    for start in starts[1:]:
        assert start.keys() == starts[0].keys()
        assert all(torch.equal(start[fqn], value) for fqn, value in starts[0].items())


def test_progress_is_readable(half: Path) -> None:
    progress = json.loads((half / "step-00000003" / "training.json").read_text())
    assert progress["step"] == progress["updates"] == 3 and progress["seed"] == SEED
    assert progress["samples"] == 36 and progress["loss_scale"] is None


def test_another_batch_goes_on_with_the_next_sample(workers: Workers, half: Path, tokens: Path, tmp_path: Path) -> None:
    """After three steps of twelve."""
    program = emitted(small_graph("gpt", layers=3), Row(accumulation=3, microbatch=6), tmp_path / "program")
    shutil.copytree(half / "step-00000003", tmp_path / "kept" / "step-00000003")
    # As two steps of eighteen would have left it: the next one begins with the same sample.
    shutil.copytree(half / "step-00000003", tmp_path / "same" / "step-00000002")
    file = tmp_path / "same" / "step-00000002" / "training.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"step": 2}))
    found = {}
    for name, step in (("kept", 4), ("same", 3)):
        (found[name],) = losses(program.train(workers, step, "--data", str(tokens), "--checkpoint", str(tmp_path / name)))
    assert found["kept"] == pytest.approx(found["same"], rel=1e-12)
    progress = json.loads((tmp_path / "kept" / "step-00000004" / "training.json").read_text())
    assert progress["samples"] == 36 + 18
