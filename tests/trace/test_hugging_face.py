"""Models of Hugging Face configs: which class, of which fields."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from planner.ir.errors import ModelError
from planner.ir.types import BatchMultiple
from planner.trace import load_model, trace_model

TINY = {"hidden_size": 32, "intermediate_size": 44, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 52}
GEMMA = {**TINY, "num_key_value_heads": 2, "head_dim": 8}


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


@pytest.mark.parametrize("named", [{}, {"architectures": ["Llama4ForCausalLM"]}])
def test_the_language_model_of_several_modalities(config_file: Callable[..., str], named: dict[str, list[str]]) -> None:
    text = {**TINY, "intermediate_size_mlp": 44, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2}
    spec = config_file(model_type="llama4", text_config=text, **named)
    model = load_model(spec, {"text_config.num_hidden_layers": 2}, 8).build()
    assert type(model).__name__ == "Llama4ForCausalLM" and type(model.config).__name__ == "Llama4TextConfig"
    assert model.config.num_hidden_layers == 2


def test_a_config_with_a_byte_order_mark(config_file: Callable[..., str]) -> None:
    """Notepad writes one."""
    spec = config_file(model_type="gpt2", n_layer=1)
    file = Path(spec.removeprefix("hf:")) / "config.json"
    file.write_bytes(file.read_bytes().decode().encode("utf-8-sig"))
    assert load_model(spec, {}, 8).name == "tiny"


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(("values", "settings", "written"), [
    ({"model_type": "llama", **TINY}, {"hidden_size": 64}, {"hidden_size": 64}),
    ({"model_type": "llama", **TINY}, {"num_attention_heads": 8}, {"num_attention_heads": 8}),
    ({"model_type": "llama", **TINY}, *[{"hidden_size": 60, "num_attention_heads": 6}] * 2),
    ({"model_type": "llama", **TINY, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
     {"max_position_embeddings": 64}, {"max_position_embeddings": 64}),
    ({"model_type": "gemma2", **GEMMA}, {"num_hidden_layers": 6}, {"num_hidden_layers": 6}),
    ({"model_type": "gemma3_text", **GEMMA}, {"num_hidden_layers": 7}, {"num_hidden_layers": 7}),
    ({"model_type": "llama", **TINY, "rope_theta": 1e4}, {"rope_theta": 5e5}, {"rope_theta": 5e5}),
    ({"model_type": "llama", **TINY}, {"rope_parameters.rope_theta": 5e5}, {"rope_theta": 5e5}),
    ({"model_type": "gpt2", "n_embd": 32, "n_head": 4}, {"hidden_size": 64}, {"n_embd": 64}),  # its other name
    ({"model_type": "gpt2", "hidden_size": 32, "n_head": 4}, {"n_embd": 64}, {"hidden_size": 64}),
    ({"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "vision_config": {
        "model_type": "clip_vision_model", **TINY, "image_size": 32, "patch_size": 8,
    }, "text_config": {"model_type": "llama", **TINY}}, {"text_config.hidden_size": 64},
     {"text_config": {"model_type": "llama", **TINY, "hidden_size": 64}}),
])
def test_settings_are_as_if_written_in_the_file(
    config_file: Callable[..., str], values: dict[str, object], settings: dict[str, object], written: dict[str, object],
) -> None:
    """What a config derives (head_dim, key and value heads, the kinds of its layers) follows them."""
    model = load_model(config_file(**values), settings, 8).build()
    expected = load_model(config_file(**{**values, **written}), {}, 8).build()
    plain = load_model(config_file(**values), {}, 8).build()
    given, like, unlike = (each.config.to_dict() for each in (model, expected, plain))
    assert given == like != unlike and shapes(model) == shapes(expected)


def test_settings_of_what_a_config_keeps_otherwise(config_file: Callable[..., str]) -> None:
    spec = config_file(model_type="bert", architectures=["BertForTokenClassification"], id2label={"0": "a", "1": "b"}, **TINY)
    assert shapes(load_model(spec, {"num_labels": 5}, None).build())["classifier.weight"] == (5, 32)


@pytest.mark.parametrize(("key", "value", "said"), [
    ("rope_theta", 5e5, "--set rope_theta: Qwen2Config has no field 'rope_theta'; it has rope_parameters.rope_theta"),
    ("rope_parameters.theta", 5e5, "--set rope_parameters.theta: the dict has no field 'theta'; it has rope_theta, rope_type"),
    ("hidden_size.a", 1, "--set hidden_size.a: Qwen2Config has hidden_size 32, which has no fields; it is set as hidden_size"),
    ("sliding_window", 8, "--set sliding_window: is 8, and Qwen2Config makes it None; set the field that decides that"),
])
def test_settings_that_would_do_nothing(config_file: Callable[..., str], key: str, value: object, said: str) -> None:
    with pytest.raises(ModelError) as error:
        load_model(config_file(model_type="qwen2", **TINY), {key: value}, None)
    assert str(error.value) == said


def test_a_field_of_nothing(config_file: Callable[..., str]) -> None:
    spec = config_file(model_type="llama", rope_scaling=None, **TINY)
    with pytest.raises(ModelError, match=r"the dict has no field 'factor'; it is empty: write rope_scaling into the file$"):
        load_model(spec, {"rope_scaling.factor": 3.0}, None)


def test_methods_and_several_wrong_settings(config_file: Callable[..., str]) -> None:
    spec = config_file(model_type="llama", **TINY)
    with pytest.raises(ModelError, match="--set to_dict: LlamaConfig has no field 'to_dict'; it has architectures, "):
        load_model(spec, {"to_dict": 3}, None)
    with pytest.raises(ModelError, match=r"--set hidden_size, num_attention_heads: are 30, 4: .* not a multiple"):
        load_model(spec, {"hidden_size": 30, "num_attention_heads": 4}, None)


T5 = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "num_layers": 1, "d_model": 16, "d_ff": 20, "d_kv": 4,
    "num_heads": 4, "vocab_size": 52,
}
TEXT, BATCH = (BatchMultiple(1), 6), (BatchMultiple(1),)


@pytest.mark.slow
@pytest.mark.parametrize(("values", "inputs"), [
    ({"model_type": "llama", **TINY}, {"input_ids": (TEXT, 52), "labels": (TEXT, 52)}),
    ({"model_type": "bert", "architectures": ["BertForSequenceClassification"], "num_labels": 3, **TINY},
     {"input_ids": (TEXT, 52), "labels": (BATCH, 3)}),
    ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"], "pad_token_id": 0, **TINY},
     {"input_ids": (TEXT, 52), "labels": (BATCH, 2)}),
    (T5, {"input_ids": (TEXT, 52), "decoder_input_ids": (TEXT, 52), "labels": (TEXT, 52)}),
])
def test_inputs_by_kind(config_file: Callable[..., str], values: dict[str, object], inputs: dict[str, object]) -> None:
    graph = trace_model(load_model(config_file(**values), {}, None), sequence=6, dtype="float32")
    assert {given.name: (given.type.shape, given.high) for given in graph.batch_inputs} == inputs


ROBERTA = {
    "model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "max_position_embeddings": 20, "pad_token_id": 1, **TINY,
}
OPT = {**TINY, "model_type": "opt", "ffn_dim": 44, "word_embed_proj_dim": 32, "max_position_embeddings": 18}


@pytest.mark.slow
@pytest.mark.parametrize(("values", "most"), [
    (ROBERTA, 18), ({**ROBERTA, "pad_token_id": 3}, 16),
    ({**ROBERTA, "model_type": "mpnet", "architectures": ["MPNetForMaskedLM"]}, 18),
    ({**ROBERTA, "model_type": "esm", "architectures": ["EsmForMaskedLM"], "mask_token_id": 5}, 18),
    ({**ROBERTA, "model_type": "bert", "architectures": ["BertForMaskedLM"]}, 20),
    (OPT, 18),
])
def test_positions_that_are_left(config_file: Callable[..., str], values: dict[str, object], most: int) -> None:
    """Those behind the row of a table that pads, in families that count from there."""
    assert trace_model(load_model(config_file(**values), {}, None), dtype="float32").sequence == most


@pytest.mark.slow
@pytest.mark.parametrize(("values", "table"), [(ROBERTA, "position_embeddings"), (OPT, "embed_positions")])
def test_more_than_the_positions_that_are_left(config_file: Callable[..., str], values: dict[str, object], table: str) -> None:
    with pytest.raises(ModelError, match=rf"position 20 is .*{table}\.weight, which has 20 rows; give --seq 18 or less"):
        trace_model(load_model(config_file(**values), {}, 19), dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "expected"), [
    ("BertForMaskedLM", [("tokens", 52), ("targets", 52)]), ("BertForTokenClassification", [("tokens", 52), ("other", 3)]),
    ("BertForSequenceClassification", [("tokens", 52), ("other", 3)]),
])
def test_labels_that_are_classes_are_no_text(config_file: Callable[..., str], name: str, expected: list[object]) -> None:
    """Nor do they bound the tokens that a text may hold."""
    spec = config_file(model_type="bert", architectures=[name], num_labels=3, **TINY)
    graph = trace_model(load_model(spec, {}, None), sequence=6, dtype="float32")
    assert [(given.role, given.high) for given in graph.batch_inputs] == expected


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dtype_is_the_jobs(config_file: Callable[..., str], dtype: str) -> None:
    """Whatever the file says that its weights are."""
    half = {"torch_dtype": "bfloat16", "architectures": ["LlamaForSequenceClassification"], "pad_token_id": 0, **TINY}
    graph = trace_model(load_model(config_file(model_type="llama", **half), {}, 6), dtype=dtype)
    assert {parameter.type.dtype for parameter in graph.parameters} == {dtype} and graph.dtype == dtype


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "said"), [
    ("vit", "ViTForImageClassification", "config.json: ViTForImageClassification takes pixel_values, not input_ids; {}"),
    ("wav2vec2", "Wav2Vec2ForCTC", "config.json: Wav2Vec2ForCTC takes input_values, not input_ids; {}"),
    ("whisper", "WhisperForConditionalGeneration", "takes input_features, not input_ids; {}"),
    ("bert", "BertForQuestionAnswering", "the model's output: is a QuestionAnsweringModelOutput; {}"),
    ("bert", "BertModel", "the model's output: is a BaseModelOutputWithPoolingAndCrossAttentions; {}"),
    ("bert", "BertForMultipleChoice", "shape '[-1, 6]' is invalid for input of size 1000003; {}"),
    ("bert", "BertForNextSentencePrediction", "the model's output: has 2 dims, the labels 2; {}"),
    ("llama", "LlamaForSequenceClassification", "say which token pads (--set pad_token_id=0), or {}"),
    ("t5", "T5Model", "the model's output: is a Seq2SeqModelOutput; {}"),
])
def test_other_kinds_need_a_model_file(config_file: Callable[..., str], kind: str, name: str, said: str) -> None:
    tiny = {**TINY, **T5, "max_source_positions": 8, "hidden_size": 16, "num_hidden_layers": 1}
    spec = config_file(**{**tiny, "model_type": kind, "architectures": [name]})
    with pytest.raises(ModelError) as error:
        trace_model(load_model(spec, {}, None), sequence=6, dtype="float32")
    right = f"write a model file with build, example_inputs and loss around transformers.{name} (docs/models.md)"
    assert said.format(right) in str(error.value)


@pytest.mark.slow
def test_layer_drop_is_refused_with_the_settings_that_switch_it_off(config_file: Callable[..., str]) -> None:
    spec = config_file(model_type="m2m_100", architectures=["M2M100ForConditionalGeneration"], vocab_size=52, d_model=16,
                       encoder_layers=2, decoder_layers=1, encoder_ffn_dim=24, decoder_ffn_dim=24, encoder_attention_heads=2,
                       decoder_attention_heads=2, max_position_embeddings=16, pad_token_id=0)
    said = (r"modeling_m2m_100.py:\d+: control flow or a Python number depends on random numbers: if dropout_probability < .*"
            r"switch off what drops layers at random \(--set encoder_layerdrop=0.0 --set decoder_layerdrop=0.0\)$")
    with pytest.raises(ModelError, match=said):
        trace_model(load_model(spec, {}, 6), dtype="float32")
    with pytest.raises(ModelError, match=r"at random \(--set decoder_layerdrop=0.0\)$"):
        trace_model(load_model(spec, {"encoder_layerdrop": 0.0}, 6), dtype="float32")
    trace_model(load_model(spec, {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}, 6), dtype="float32")


@pytest.mark.parametrize("settings", [{"num_labels": 1}, {"problem_type": "multi_label_classification"}])
def test_classifiers_that_cross_entropy_is_not_for(config_file: Callable[..., str], settings: dict[str, object]) -> None:
    spec = config_file(model_type="bert", architectures=["BertForSequenceClassification"], **TINY)
    with pytest.raises(ModelError, match=r"labels and problem_type .*, which cross-entropy is not for; write a model file"):
        load_model(spec, settings, None)


@pytest.mark.slow
def test_the_model_file_of_the_documentation(model_file: Callable[[str], str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    shown = text.split("```python\n")[1].split("```")[0]
    small = shown.replace("num_labels=1000", "num_labels=1000, num_hidden_layers=1")
    graph = trace_model(load_model(model_file(small + "\nmake = build\n"), {}, None), dtype="float32")
    assert {given.name: given.high for given in graph.batch_inputs} == {"pixel_values": 0, "labels": 1000}
