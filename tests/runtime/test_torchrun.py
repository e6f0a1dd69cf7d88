"""What programs do that users start with torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from platform import node

import pytest

from tests.matrix.workers import Workers
from tests.torchrun import HungError, Run, torchrun
from tests.wide import wide

ROOT = Path(__file__).parents[2]
EVERYTHING = {"pipeline": 2, "data": 2, "tensor": 2, "microbatches": 4, "zero": [2, 0, 1, 3, 2, 2]}


TRAIN = Path(__file__).with_name("toy_train.py")


def start(toy: dict[str, object], ranks: int, *arguments: str, program: Path = TRAIN) -> Run:
    environment = {"TOY": json.dumps(toy), "PYTHONPATH": str(ROOT)}
    appends = [Path(value) for name, value in pairwise(arguments) if name == "--metrics"]
    return torchrun(ranks, str(program), *arguments, environment=environment, directory=ROOT, appends=appends)


def metrics(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


AS_A_PROGRAM = """
import os, runpy, sys

os.environ["TOY"] = {toy!r}
sys.modules.pop("tests.runtime.toy_program", None)  # It holds the runtime of the program before.
runpy.run_path({train!r}, run_name="__main__")
"""


def work(workers: Workers, directory: Path, toy: dict[str, object], ranks: int, *arguments: str) -> str:
    """What rank 0 of the toy prints in processes that are there already: to start eight takes longer than what they do."""
    script = directory / "as_a_program.py"
    script.write_text(AS_A_PROGRAM.format(toy=json.dumps(toy), train=str(TRAIN)))
    outcomes = workers.run(directory, ranks, arguments, script=script)
    assert not any(outcome.code for outcome in outcomes), outcomes[0].error
    return outcomes[0].output


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp64", wide("bf16"), wide("fp16")])
def test_eight_ranks_train_like_one(workers: Workers, tmp_path: Path, precision: str) -> None:
    run = ["--steps", "4", "--learning-rate", "1e-2"]
    wide = "fp64" if precision == "fp64" else "fp32"
    work(workers, tmp_path, {"precision": wide}, 1, *run, "--metrics", str(tmp_path / "one"))
    toy = {**EVERYTHING, "precision": precision}
    assert "step 4/4  loss" in work(workers, tmp_path, toy, 8, *run, "--metrics", str(tmp_path / "eight"))
    tolerance = 1e-10 if precision == "fp64" else 2e-2
    for got, want in zip(metrics(tmp_path / "eight"), metrics(tmp_path / "one"), strict=True):
        assert list(got) == ["step", "loss", "grad_norm", "lr", "step_s", "tokens_per_s", "mfu", "memory_bytes"]
        assert got["loss"] == pytest.approx(want["loss"], rel=tolerance)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=5 * tolerance)


@pytest.mark.slow
def test_text_is_prepared_and_trained_on_or_refused_in_one_line(tmp_path: Path) -> None:
    text, tokens = tmp_path / "text.txt", tmp_path / "text.tokens"
    text.write_bytes(bytes(range(50)) * 40)
    prepare = [sys.executable, str(ROOT / "examples" / "prepare_text.py"), str(text), "-o", str(tokens)]
    subprocess.run(prepare, check=True, capture_output=True)
    done = start({"data": 2}, 2, "--steps", "3", "--data", str(tokens))
    assert done.returncode == 0, done.stderr
    text.write_bytes(b"letters are beyond the vocabulary")
    subprocess.run(prepare, check=True, capture_output=True)
    refused = start({"data": 2}, 2, "--data", str(tokens))
    assert refused.returncode != 0
    assert f"error: {tokens}: holds token 121; the model's vocabulary has 51 (0 to 50)" in refused.stderr
    assert refused.stderr.count("error: ") == 1
    assert "ProgramError" not in refused.stderr
    assert "exitcode  : 2" in refused.stderr


def test_prepared_text_is_never_written_over_its_own_file(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time")
    prepare = [sys.executable, str(ROOT / "examples" / "prepare_text.py"), str(text), "-o", f"{tmp_path}/./text.txt"]
    refused = subprocess.run(prepare, check=False, capture_output=True, text=True)
    assert refused.returncode == 2 and "is one of the files, and would be written over" in refused.stderr
    assert text.read_text() == "Once upon a time"


LATE = """
import os, time
from runtime.errors import ProgramError
from runtime.launch import main_guard

def main():
    time.sleep(0 if os.environ["RANK"] == "1" else 3)
    raise ProgramError("file", "is wrong")

main_guard(main)
"""


@pytest.mark.slow
def test_rank_0_says_why_though_another_is_refused_first(tmp_path: Path) -> None:
    program = tmp_path / "late.py"
    program.write_text(LATE)
    refused = start({}, 2, program=program)
    assert refused.stderr.count("error: file: is wrong") == 1


ALONE = """
import os, time
from runtime import launch
from runtime.errors import ProgramError

launch.LEAVES_AFTER_S = 1

def main():
    if os.environ["RANK"] == "0":
        time.sleep(200)
    raise ProgramError("file", "is wrong")

launch.main_guard(main)
"""


@pytest.mark.slow
def test_a_rank_that_is_refused_alone_says_why(tmp_path: Path) -> None:
    program = tmp_path / "alone.py"
    program.write_text(ALONE)
    refused = start({}, 2, program=program)
    assert [line for line in refused.stderr.splitlines() if "error: " in line] == [f"error: rank 1 on {node()}: file: is wrong"]


@pytest.mark.slow
def test_a_wrong_number_of_processes_is_refused() -> None:
    refused = start({"data": 2, "tensor": 2}, 2)
    assert "2 processes; this plan needs 4 (pipeline 1 x data 2 x tensor 2)" in refused.stderr
    assert "exitcode  : 2" in refused.stderr
    assert "ProgramError" not in refused.stderr


HANGS = """
import os, sys, time
from pathlib import Path

def stand_still():
    time.sleep(600)

if os.environ["RANK"] == "1":
    marks = Path(sys.argv[1])
    here = len(list(marks.iterdir()))
    (marks / str(here)).touch()
    if here < int(sys.argv[2]):
        stand_still()
print("through")
"""


@pytest.mark.slow
def test_a_hang_is_forgiven_once_and_says_where_it_was(tmp_path: Path) -> None:
    program, marks = tmp_path / "hangs.py", tmp_path / "marks"
    program.write_text(HANGS)
    marks.mkdir()
    with pytest.warns(UserWarning, match=r"(?s)run again: no end in 10 s\n.*in stand_still"):
        done = torchrun(2, str(program), str(marks), "1", timeout_s=10)
    assert done.returncode == 0 and done.stdout.count("through") == 2
    with pytest.warns(UserWarning, match="run again"), pytest.raises(HungError, match="in stand_still"):
        torchrun(2, str(program), str(marks), "4", timeout_s=10)
