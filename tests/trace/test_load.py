"""What a user may get wrong in naming a model."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from planner.ir.errors import ModelError
from planner.trace import load_model, trace_model
from planner.trace.source import ModelSource

GPT = f"{Path(__file__).parents[2] / 'examples' / 'gpt.py'}:gpt"


@pytest.mark.parametrize(("spec", "said"), [
    ("missing.py:gpt", "no such file"),
    ("gpt", "names no callable"),
    (GPT.removesuffix("gpt") + "gtp", "is not defined"),
    (GPT.removesuffix("gpt") + "math", "is not callable"),
    ("hf:/nowhere", "no such file"),
])
def test_wrong_spec(spec: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        load_model(spec, {}, None)


def test_unknown_keyword() -> None:
    with pytest.raises(ModelError, match="takes no keyword 'depth'; it takes layers, hidden"):
        load_model(GPT, {"depth": 3}, None)


def test_sequence_is_the_seq_keyword() -> None:
    assert load_model(GPT, {"layers": 1}, 32).build().get_parameter("positions.weight").shape[0] == 32
    assert load_model(GPT, {"layers": 1, "seq": 64}, 32).build().get_parameter("positions.weight").shape[0] == 64


def test_a_file_is_run_anew_and_what_was_replaced_stays(model_file: Callable[[str], str]) -> None:
    source = load_model(model_file("HELD = []\ndef make():\n    HELD.append(0)\n    return nn.Linear(len(HELD), 2)\n"
                                   "def loss(outputs, batch):\n    return outputs.sum()"), {}, None)
    assert [source.build().in_features for _ in range(2)] == [1, 2]
    fresh, mine = source.anew(), replace(source, loss=len).anew()
    assert fresh.build().in_features == mine.build().in_features == fresh.anew().build().in_features == 1
    assert fresh.loss is not source.loss and mine.loss is len and (fresh.where, fresh.name) == (source.where, source.name)
    handmade = ModelSource("here", source.build, None, None, "made")
    assert handmade.anew() is handmade


def test_returns_no_module(model_file: Callable[[str], str]) -> None:
    with pytest.raises(ModelError, match=r"returned int; it must return a torch\.nn\.Module"):
        load_model(model_file("def make():\n    return 3"), {}, None).build()


def test_broken_file(model_file: Callable[[str], str]) -> None:
    with pytest.raises(ModelError, match=r"user_model.py:5: importing it failed: ZeroDivisionError"):
        load_model(model_file("\n1 / 0"), {}, None)


def test_every_function_of_a_file_imports_what_lies_beside_it(model_file: Callable[[str], str], tmp_path: Path) -> None:
    """As in a script, whatever folder the command runs in; afterwards nothing there is found any more."""
    names = ("made", "built", "run", "judged")
    for name in names:
        (tmp_path / f"beside_when_{name}.py").write_text("WIDTH, SCALE = 4, 2.0\n")
    before = list(sys.path)
    graph = trace_model(load_model(model_file("""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        from beside_when_built import WIDTH
        self.inner = nn.Linear(WIDTH, WIDTH)
    def forward(self, x):
        from beside_when_run import SCALE
        return self.inner(x) * SCALE

def make():
    return Net()

def example_inputs(batch, seq):
    from beside_when_made import WIDTH
    return {"x": torch.rand(batch, WIDTH)}

def loss(outputs, batch):
    from beside_when_judged import SCALE
    return outputs.square().mean() * SCALE
"""), {}, None), dtype="float32")
    assert graph.blocks and sys.path == before
    for name in names:
        del sys.modules[f"beside_when_{name}"]


def test_a_file_that_is_written_again_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same second, as long as before: Python's cache of modules does not tell the two apart. None is left either."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "mine.py"
    for width in (3, 5):
        path.write_text(f"from torch import nn\n\ndef make():\n    return nn.Linear({width}, 1)\n")
        os.utime(path, (10**9, 10**9))
        assert load_model(f"{path}:make", {}, None).build().get_parameter("weight").shape == (1, width)
    assert [each.name for each in tmp_path.iterdir()] == ["mine.py"]
