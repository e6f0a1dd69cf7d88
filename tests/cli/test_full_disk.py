"""What was there before survives a command that cannot write."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.commands import SMALL, Outcome, run, small
from tests.ir.test_replacing import tree


@contextmanager
def room_for(size_bytes: int) -> Iterator[None]:
    """No file gets any longer within, as on a disk that is nearly full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
def test_a_plan_that_cannot_be_written_leaves_the_earlier_one(planned: tuple[Path, Outcome], copied: Path) -> None:
    """The larger model's graph is not written whole, and what belongs to it neither; nor is a folder left for it."""
    before = tree(copied.parent)
    room = (copied.parent / "plan.graph.json").stat().st_size
    larger = ("plan", *small(layers=24), "--cluster", "local-cpu:1x1", "--batch", 2)
    for output in (copied, copied.parent / "a" / "b" / "plan.yaml"):
        with room_for(room):
            outcome = run(*larger, "-o", output)
        assert outcome.code == 2 and f"{output}: cannot be written (File too large)" in outcome.error
        assert tree(copied.parent) == before
    assert run("check", copied, "--json").json["predicted"] == planned[1].json["predicted"]


def test_a_plan_that_is_not_found_leaves_no_folder(tmp_path: Path) -> None:
    wrong = ("--cluster", "local-cpu:1x1", "--batch", 2, "--pin", "tensor=2")
    outcome = run("plan", *SMALL, *wrong, "-o", tmp_path / "a" / "plan.yaml")
    assert outcome.code in (2, 3) and "error: " in outcome.err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_program_that_cannot_be_written_leaves_the_earlier_one(
    planned: tuple[Path, Outcome], split: tuple[Path, Outcome], tmp_path: Path
) -> None:
    program = tmp_path / "program"
    assert run("emit", planned[0], "-o", program).code == 0
    for name in ("checkpoints/1/state.pt", "run.jsonl", "text.tokens"):
        (program / name).parent.mkdir(parents=True, exist_ok=True)
        (program / name).write_text(f"the user's {name}")
    before = tree(program)
    for output in (program, tmp_path / "another" / "program"):
        for room in (2_000, 8_000, 16_000):
            with room_for(room):
                outcome = run("emit", split[0], "-o", output)
            assert outcome.code == 2 and f"--output {output}: cannot be written (File too large)" in outcome.error
            assert tree(program) == before and [path.name for path in tmp_path.iterdir()] == ["program"]
    assert run("emit", split[0], "-o", program).code == 0
    after = tree(program)
    assert after["plan.yaml"] == split[0].read_bytes() and after["run.jsonl"] == b"the user's run.jsonl"
    assert set(after) == set(before)
