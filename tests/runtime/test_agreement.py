"""Every node has its own copy of the program and its own command line: what they contradict one another in is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from runtime.agreement import by_flag
from runtime.launch import parse_options
from runtime.settings import by_variable
from tests.runtime.cases import refusal_of_run, refusal_when_told
from tests.runtime.group import ProcessPool
from tests.runtime.test_parts import token_file
from tests.runtime.test_settings import GOOD
from tests.runtime.toy_program import Toy


@pytest.mark.slow
@pytest.mark.parametrize(("own", "said"), [
    ("--learning-rate 0.1", "--learning-rate: 0.1 on rank 1, 0.0003 on rank 0; give all nodes the same"),
    ("--steps 11", "--steps: 11 on rank 1, 10 on rank 0; give"), ("--seed 7", "--seed: 7 on rank 1, 0 on rank 0; give"),
    ("--warmup 1", "--warmup: 1 on"), ("--decay-steps 3", "--decay-steps: 3 on"),
    ("--weight-decay 0", "--weight-decay: 0.0 on"),
    ("--clip 0", "--clip: 0.0 on"), ("--compile", "--compile: True on rank 1, False on rank 0; give"),
    ("--checkpoint {0}/kept", "--checkpoint: given on rank 1, not given on rank 0; give all nodes the same"),
    ("--data {0}/none", "--data: given on"), ("--init-from {0}/none", "--init-from: given on"),
    ("--export-start {0}/a", "--export-start: given on"), ("--dump-gradients {0}/a", "--dump-gradients: given on"),
])
def test_other_options_on_one_node_are_refused_on_all(pool: ProcessPool, own: str, said: str, tmp_path: Path) -> None:
    """Nothing is trained or written, and no rank waits for another."""
    refusals = pool.run(2, refusal_of_run, Toy(data=2), [[], own.format(tmp_path).split()])
    assert len(set(refusals)) == 1 and refusals[0].startswith(said)
    assert not list(tmp_path.iterdir())


def test_another_tokens_file_on_one_node_is_refused(pool: ProcessPool, tmp_path: Path) -> None:
    files = [token_file(tmp_path / str(first), [first, *range(40)]) for first in (1, 2)]
    refusals = pool.run(2, refusal_of_run, Toy(data=2), [["--data", str(file)] for file in files])
    assert refusals == ["--data: rank 1 has another than rank 0; give all nodes the same file"] * 2


def test_what_one_rank_looks_at_and_where_a_file_lies_may_differ(pool: ProcessPool, tmp_path: Path) -> None:
    files = [token_file(tmp_path / name, list(range(40))) for name in ("a", "b")]
    arguments = [["--steps", "1", "--data", str(file)] for file in files]
    arguments[0] += ["--metrics", str(tmp_path / "metrics")]
    assert pool.run(2, refusal_of_run, Toy(data=2), arguments) == ["", ""]


def test_every_option_is_told_but_that_of_rank_0() -> None:
    options = vars(parse_options([]))
    assert set(by_flag(options)) == {f"--{name.replace('_', '-')}" for name in options if name != "metrics"}


def test_the_order_of_the_axes_is_told() -> None:
    turned = replace(GOOD, mesh=dict(reversed(GOOD.mesh.items())))
    assert turned == GOOD
    assert [k for k, text in by_variable(turned).items() if by_variable(GOOD)[k] != text] == ["train.py: MESH"]


@pytest.mark.parametrize(("own", "said"), [
    ({"a": "1", "b": "2"}, ""), ({"a": "1", "b": "3"}, "b: 3 on rank 1, 2 on rank 0; right"),
    ({"a": "0", "b": "3"}, "a: 0 on rank 1, 1 on rank 0; right"), ({"a": "1"}, "b: missing on rank 1, 2 on rank 0; right"),
    ({"a": "1", "b": "2", "c": "4"}, "c: 4 on rank 1, missing on rank 0; right"),
    ({"a": "1", "b": "x" * 61}, "b: rank 1 has another than rank 0; right"),
])
def test_the_first_difference_is_said_on_all_ranks(pool: ProcessPool, own: dict[str, str], said: str) -> None:
    assert pool.run(2, refusal_when_told, [{"a": "1", "b": "2"}, own]) == [said, said]
