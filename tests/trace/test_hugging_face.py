"""Models of Hugging Face configs: which class, of which fields."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from planner.ir.errors import ModelError
from planner.trace import load_model


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


def test_a_config_with_a_byte_order_mark(config_file: Callable[..., str]) -> None:
    """Notepad writes one."""
    spec = config_file(model_type="gpt2", n_layer=1)
    file = Path(spec.removeprefix("hf:")) / "config.json"
    file.write_bytes(file.read_bytes().decode().encode("utf-8-sig"))
    assert load_model(spec, {}, 8).name == "tiny"
