"""The workers say which rank was ended and where it was, and forgive one crash."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.matrix.workers import HUNG, Workers

CRASHES = r"""
import os, signal, sys
from pathlib import Path
marks, times = Path(sys.argv[1]), int(sys.argv[2])
if os.environ["RANK"] == "0":
    with open(sys.argv[4], "a") as metrics:
        metrics.write("a line\n")
if os.environ["RANK"] == "1" and len(list(marks.iterdir())) < times:
    (marks / str(len(list(marks.iterdir())))).touch()
    os.kill(os.getpid(), signal.SIGSEGV)
print("through")
"""
HANGS = """
import os, time
def stand_still():
    time.sleep(60)
if os.environ["RANK"] == "0":
    stand_still()
"""
LEAVES = """
import os
if os.environ["RANK"] == "1":
    os.execvp("true", ["true"])
"""


@pytest.fixture
def two() -> Iterator[Workers]:
    workers = Workers(2)
    yield workers
    workers.stop(kill=True)


def test_a_crash_is_forgiven_once(two: Workers, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("before\n")
    wanted = ["--metrics", str(metrics)]
    (tmp_path / "train.py").write_text(CRASHES)
    with pytest.warns(UserWarning, match=r"run again: rank 1 of 2: its process ended with exit code -11\n.*Segmentation fault"):
        outcomes = two.run(tmp_path, 2, [str(marks), "1", *wanted])
    assert [(outcome.code, outcome.output) for outcome in outcomes] == [(0, "through\n")] * 2
    assert metrics.read_text() == "before\na line\n", "what a crashed run wrote is taken back"
    with pytest.warns(UserWarning, match="run again"):
        outcomes = two.run(tmp_path, 2, [str(marks), "3", *wanted])
    assert [outcome.code for outcome in outcomes] == [0, -signal.SIGSEGV]


@pytest.mark.slow
def test_a_rank_that_hangs_is_ended_and_says_where_it_was(two: Workers, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HANGS)
    hung, other = two.run(tmp_path, 2, [], timeout_s=2)
    assert (hung.code, other.code) == (HUNG, 0)
    assert hung.error.startswith("no answer in 2 s\n") and "in stand_still" in hung.error


def test_a_process_that_ends_without_a_word_is_no_success(two: Workers, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LEAVES)
    assert [outcome.code for outcome in two.run(tmp_path, 2, [])] == [0, 1]
    (tmp_path / "train.py").write_text("print('through')")
    assert [outcome.code for outcome in two.run(tmp_path, 2, [])] == [0, 0], "the group is started anew"
