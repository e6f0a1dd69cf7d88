"""`shardwright rehearse`: the contract's object, exit codes, and what it says of a program that was edited."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.commands import run, small

pytestmark = pytest.mark.slow

CATEGORIES = {"parameters", "gradients", "optimizer", "activations", "buffers"}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program whose tensors are split, on two stages of two tensor ranks."""
    directory = tmp_path_factory.mktemp("rehearsed")
    planned = run(
        "plan", *small(hidden=256, heads=4), "--seq", 128, "--cluster", "local-cpu:1x4", "--batch", 8, "--pin",
        "pipeline=2", "--pin", "tensor=2", "--pin", "schedule=1f1b", "--pin", "microbatch=2", "-o", directory / "plan.yaml",
    )
    assert planned.code == 0, planned.err
    assert run("emit", directory / "plan.yaml", "-o", directory / "program").code == 0
    assert "tp.all_reduce(" in (directory / "program" / "model.py").read_text()
    return directory / "program"


@pytest.fixture
def copied(program: Path, tmp_path: Path) -> Path:
    """The program, for a test to spoil."""
    return Path(shutil.copytree(program, tmp_path / "program"))


def test_json_is_the_contract(program: Path) -> None:
    outcome = run("rehearse", program, "--all", "--json")
    report = outcome.json
    assert set(report) == {"ranks", "predicted", "agree"}
    assert [(item["rank"], item["stage"]) for item in report["ranks"]] == [(0, 0), (2, 1)]
    assert outcome.code == (0 if report["agree"] else 1)
    for said, done in zip(report["predicted"], report["ranks"], strict=True):
        assert said["collectives"] == done["collectives"]
        assert set(said["memory_bytes"]) == set(done["memory_bytes"]) == CATEGORIES
        for row in done["collectives"]:
            assert set(row) == {"kind", "axis", "group", "bytes", "count"}
        kinds = {(row["kind"], row["axis"]) for row in done["collectives"]}
        assert {("send", "pipeline"), ("recv", "pipeline"), ("all_reduce", "tensor"), ("all_reduce", "world")} <= kinds


def test_a_removed_collective_parts(copied: Path) -> None:
    model = copied / "model.py"
    text = model.read_text()
    model.write_text(text.replace("tp.all_reduce(", "(", 1))
    outcome = run("rehearse", copied, "--json")
    assert outcome.code == 1
    report = outcome.json
    assert not report["agree"] and report["ranks"][0]["collectives"] != report["predicted"][0]["collectives"]


def test_a_step_that_fails_is_one_line(copied: Path) -> None:
    (copied / "model.py").write_text((copied / "model.py").read_text().replace("F.layer_norm(", "F.no_such_norm(", 1))
    outcome = run("rehearse", copied)
    assert outcome.code == 1 and "its step fails: AttributeError" in outcome.error
    assert "where it was changed since, emit it again" in outcome.error


def test_a_program_that_ends_as_if_it_had_succeeded_is_one_line(copied: Path) -> None:
    (copied / "train.py").write_text("print('nothing to do')\nraise SystemExit(0)\n")
    outcome = run("rehearse", copied)
    assert outcome.code == 1 and "its step fails: it ends Python before the step is over" in outcome.error


@pytest.mark.parametrize(("arguments", "words"), [
    (["--rank", "4"], "a rank from 0 to 3"), (["--rank", "1", "--all"], "together with --all"),
])
def test_wrong_ranks_are_refused(program: Path, arguments: list[str], words: str) -> None:
    outcome = run("rehearse", program, *arguments)
    assert outcome.code == 2 and words in outcome.error


def test_what_is_no_program_is_refused(tmp_path: Path) -> None:
    outcome = run("rehearse", tmp_path)
    assert outcome.code == 2 and "holds no plan.yaml" in outcome.error
    (tmp_path / "plan.yaml").touch()
    for path, words in ((tmp_path / "plan.yaml", "is no folder"), (tmp_path / "other", "is not there")):
        outcome = run("rehearse", path)
        assert outcome.code == 2 and words in outcome.error and "the folder that `shardwright emit` wrote" in outcome.error
