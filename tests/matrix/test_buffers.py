"""Buffers and parameters outside of every computation are in checkpoints and exports: the plain model loads them strictly."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner.trace import load_model
from runtime import checkpoint
from runtime.data import TokenFile
from tests.matrix.build import Row
from tests.matrix.programs import Emitted, emitted, losses, small_graph, write_tokens
from tests.matrix.reference import SEED
from tests.matrix.test_matrix import MODELS
from tests.matrix.workers import Workers

pytestmark = pytest.mark.slow
BATCH, SEQUENCE, VOCABULARY = 4, 20, 51
ROW = Row(pipeline=2, data=2, zero=1, accumulation=2)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    numbers = [(7 * index * index + index) % VOCABULARY for index in range(20 * SEQUENCE + 1)]
    return write_tokens(tmp_path_factory.mktemp("data") / "text.tokens", numbers)


@pytest.fixture
def program(tmp_path: Path) -> Emitted:
    return emitted(small_graph("buffered", layers=3), ROW, tmp_path / "program")


def _plain() -> nn.Module:
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        return load_model(f"{MODELS}:buffered", {"layers": 3}, None).build()
    finally:
        torch.set_default_dtype(torch.float32)


def _change(program: Emitted, key: str, dtype: torch.dtype) -> None:
    """Give the program another value of a constant."""
    path = program.directory / "constants.json"
    stored = json.loads(path.read_text())
    value = torch.frombuffer(bytearray(base64.b64decode(stored[key]["data"])), dtype=dtype).clone()
    value[0] = 1 - value[0] if dtype.is_floating_point else ~value[0]
    stored[key]["data"] = base64.b64encode(value.numpy().tobytes()).decode()
    path.write_text(json.dumps(stored))


def test_the_plain_model_loads_checkpoint_and_start_strictly(
    workers: Workers, program: Emitted, tokens: Path, tmp_path: Path
) -> None:
    run = ("--data", str(tokens), "--checkpoint", str(tmp_path / "kept"), "--export-start", str(tmp_path / "start.pt"))
    program.train(workers, 2, *run)
    following = losses(program.train(workers, 3, *run[:4]))
    plain = _plain()
    before = {name: value.clone() for name, value in plain.named_buffers(remove_duplicate=False)}
    start = torch.load(tmp_path / "start.pt")
    assert set(start) == set(plain.state_dict())
    plain.load_state_dict(start)
    plain.load_state_dict(checkpoint.load_plain(tmp_path / "kept" / "step-00000002"))
    for name, value in plain.named_buffers(remove_duplicate=False):
        assert value.dtype == before[name].dtype and torch.equal(value, before[name]), name
    assert torch.equal(plain.unused.weight, start["unused.weight"]) and start["unused.weight"].std() > 0.05
    samples = _samples(tokens, 2)
    loss = F.cross_entropy(plain(samples[:, :-1]).flatten(0, 1), samples[:, 1:].flatten())
    assert loss.item() == pytest.approx(following[0], rel=1e-10)


def _samples(tokens: Path, step: int) -> torch.Tensor:
    file = TokenFile(tokens, SEED, SEQUENCE)
    return torch.stack([file.sequence(step * BATCH + index, SEQUENCE + 1) for index in range(BATCH)])


@pytest.mark.parametrize("other", [ROW, Row(tensor=2, accumulation=2, microbatch=2)], ids=["same plan", "another plan"])
def test_a_resumed_run_has_the_checkpoints_buffers(workers: Workers, program: Emitted, tmp_path: Path, other: Row) -> None:
    """Not those of the program that resumes: here they differ, in the context (offsets) and in the blocks (gains)."""
    whole = losses(program.train(workers, 3))
    program.train(workers, 2, "--checkpoint", str(tmp_path / "kept"))
    second = emitted(small_graph("buffered", layers=3), other, tmp_path / "second")
    for key in ("offsets", "layers.0.gains"):
        _change(second, key, torch.float64)
        assert losses(second.train(workers, 3))[2] != pytest.approx(whole[2], rel=1e-7), "the values matter"
    assert losses(second.train(workers, 3, "--checkpoint", str(tmp_path / "kept"))) == pytest.approx(whole[2:], rel=1e-9)


def test_another_value_of_what_is_built_in_is_refused(workers: Workers, program: Emitted, tmp_path: Path) -> None:
    program.train(workers, 1, "--checkpoint", str(tmp_path / "kept"))
    _change(program, "layers.0.mask", torch.bool)
    outcomes = program.launch(workers, "--steps", "2", "--checkpoint", str(tmp_path / "kept"))
    assert {outcome.code for outcome in outcomes} == {2}
    (line,) = outcomes[0].error.splitlines()
    assert "layers.0.mask has another value than this program has built in" in line


def test_parameters_without_dims_go_from_plan_to_plan(workers: Workers, tmp_path: Path) -> None:
    graph, found = small_graph("corners"), []
    rows = (Row(data=3, zero=3, microbatch=4), Row(tensor=2, pipeline=2, accumulation=2, microbatch=6))
    programs = [emitted(graph, row, tmp_path / row.label) for row in rows]
    whole = losses(programs[0].train(workers, 3))
    for step, program in ((1, programs[0]), (2, programs[1]), (3, programs[0])):
        found += losses(program.train(workers, step, "--checkpoint", str(tmp_path / "kept")))
    assert found == pytest.approx(whole, rel=1e-9)
    plain = load_model(f"{MODELS}:corners", {}, None).build()
    plain.load_state_dict(checkpoint.load_plain(tmp_path / "kept" / "step-00000003"))
    assert plain.temperature.shape == () and 0.4 < plain.temperature.item() < 1.6
