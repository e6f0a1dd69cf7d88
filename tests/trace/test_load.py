"""What a user may get wrong in naming a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from planner.ir.errors import ModelError
from planner.trace import load_model

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


def test_returns_no_module(model_file: Callable[[str], str]) -> None:
    with pytest.raises(ModelError, match=r"returned int; it must return a torch\.nn\.Module"):
        load_model(model_file("def make():\n    return 3"), {}, None).build()


def test_broken_file(model_file: Callable[[str], str]) -> None:
    with pytest.raises(ModelError, match=r"user_model.py:5: importing it failed: ZeroDivisionError"):
        load_model(model_file("\n1 / 0"), {}, None)


@pytest.mark.parametrize(("values", "said"), [
    ({}, "config.json: model_type: is missing"),
    ({"model_type": "nonsense"}, "config.json: model_type: 'nonsense' is unknown"),
    ({"model_type": "gpt2", "architectures": ["NoSuchModel"]}, "architectures: .* has no model class 'NoSuchModel'"),
    ({"model_type": "clip"}, "architectures: is missing, and 'clip' has no causal language model"),
])
def test_wrong_config(config_file: Callable[..., str], values: dict[str, object], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        load_model(config_file(**values), {}, None)


def test_architecture_decides(config_file: Callable[..., str]) -> None:
    spec = config_file(model_type="bert", architectures=["BertForMaskedLM"], num_hidden_layers=1, hidden_size=32,
                       num_attention_heads=4, intermediate_size=64, vocab_size=48)
    assert type(load_model(spec, {}, None).build()).__name__ == "BertForMaskedLM"
