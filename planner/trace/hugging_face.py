"""Models of Hugging Face transformers: ``hf:PATH``, built from a config alone."""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from planner.ir.errors import ModelError
from planner.ir.graph import Role
from planner.trace.lines import first_line
from planner.trace.source import LANGUAGE, ROLES, ModelSource

CLASSIFIED: Mapping[str, int] = {"input_ids": 2, "labels": 1}
TRANSLATED: Mapping[str, int] = {"input_ids": 2, "decoder_input_ids": 2, "labels": 2}
"""What classifiers of sequences and encoders with a decoder take, as LANGUAGE."""


def load_hugging_face(spec: str, settings: Mapping[str, object], sequence: int | None) -> ModelSource:
    """The model of the config that ``spec`` names, with ``settings`` in place of its fields. ``sequence``: as asked for, else
    as many positions as the model has. Raises ModelError where it cannot be read, or where the model takes no text."""
    path = Path(spec.removeprefix("hf:"))
    file = path / "config.json" if path.is_dir() else path
    try:
        import transformers
    except ImportError:
        raise ModelError(spec, "needs transformers", "pip install 'shardwright[huggingface]'") from None
    values = _read(file)
    config = _configured(transformers, file, values, settings)
    model_class = _model_class(transformers, file, values, config)
    part = config.sub_configs.get("text_config")
    if part is not None and getattr(model_class, "config_class", None) is part:
        config = config.get_text_config()  # as AutoModelForCausalLM gives a language model its part of several modalities'
    config.use_cache = False
    _without_dtype(config)
    config._attn_implementation = "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"

    def construct() -> nn.Module:
        try:
            model = model_class(config)
        except Exception as error:  # transformers raises many kinds for a config that does not fit together
            wrong = f"{model_class.__name__} refuses it: {type(error).__name__}: {first_line(error)}"
            raise ModelError(str(file), wrong) from error
        return model.train()

    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    around = f"transformers.{model_class.__name__}"
    remedy = f"write a model file with build, example_inputs and loss around {around} (docs/models.md)"
    inputs = _inputs(file, model_class, config, remedy)
    if inputs is CLASSIFIED and getattr(config.get_text_config(), "pad_token_id", None) is None:
        remedy = f"say which token pads (--set pad_token_id=0), or {remedy}"
    positions = functools.partial(_positions, config)
    return ModelSource(
        spec, construct, None, None, name, sequence, inputs=inputs, roles=_roles(model_class), remedy=remedy,
        layer_drop=tuple(_layer_drop(config)), positions=positions,
    )


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ModelError(str(file), "no such file", "hf:PATH is a config.json or the directory that holds one")
    try:
        values = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ModelError(str(file), f"cannot be read ({error.strerror})") from error
    except ValueError as error:  # malformed JSON, or no text
        raise ModelError(str(file), f"is no JSON ({error})", "it must be a transformers config.json") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ModelError(f"{file}: model_type", "is missing", "it must name a transformers model type, such as llama")
    return values


def _without_dtype(config: Any) -> None:
    """Leave the dtype to the job: a class around a model that it makes of its config would have that in the config's."""
    config.dtype = None
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None and not isinstance(part, dict):
            _without_dtype(part)


def _layer_drop(config: Any, within: str = "") -> Iterator[str]:
    """The probabilities of dropping a layer that a config and its parts have above 0, as ``--set`` names them."""
    for name, held in _fields(config).items():
        if hasattr(held, "to_dict"):
            yield from _layer_drop(held, f"{within}{name}.")
        elif name.endswith("layerdrop") and held:
            yield within + name


def _inputs(file: Path, model_class: type[nn.Module], config: Any, remedy: str) -> Mapping[str, int]:
    """What a model takes. Raises ModelError, with ``remedy`` as what is right, where that is no text, or a sequence is not
    of one of several classes."""
    name, main = model_class.__name__, getattr(model_class, "main_input_name", "input_ids")
    if main != "input_ids":
        raise ModelError(str(file), f"{name} takes {main}, not input_ids", remedy)
    if name.endswith("ForSequenceClassification"):
        if config.num_labels == 1 or config.problem_type not in (None, "single_label_classification"):
            wrong = f"has {config.num_labels} labels and problem_type {config.problem_type}, which cross-entropy is not for"
            raise ModelError(str(file), wrong, remedy)
        return CLASSIFIED
    return TRANSLATED if "decoder_input_ids" in inspect.signature(model_class.forward).parameters else LANGUAGE


def _roles(model_class: type[nn.Module]) -> Mapping[str, Role]:
    """Labels that are classes, of sequences or of tokens, are not the text a place on."""
    classes = model_class.__name__.endswith(("ForSequenceClassification", "ForTokenClassification"))
    return {name: role for name, role in ROLES.items() if role == "tokens" or not classes}


def _positions(config: Any, model: nn.Module) -> int | None:
    """The longest sequence that a config names and its model's tables of positions have room for: where such a table has a row
    for padding (RoBERTa's), positions begin behind it."""
    rows = [
        table.num_embeddings - table.padding_idx - 1 for name, table in model.named_modules()
        if isinstance(table, nn.Embedding) and table.padding_idx is not None and "position" in name.rpartition(".")[2]
    ]
    named = _named_positions(config)
    return min(rows + ([] if named is None else [named]), default=None)


def _named_positions(config: Any) -> int | None:
    """The longest sequence that a config (its text part's) names, under whichever of the names it has."""
    for part in (config, config.get_text_config()):
        for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
            value = getattr(part, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _last_line(error: BaseException) -> str:
    """What libraries that wrap their errors say at the end."""
    return str(error).strip().splitlines()[-1].strip() if str(error).strip() else type(error).__name__


def _configured(transformers: ModuleType, file: Path, values: Mapping[str, Any], settings: Mapping[str, object]) -> Any:
    """The config of a file's values and of ``settings`` in their place, as if they were written there: what a config derives
    of a field (a head's size, the kinds of its layers) follows them. Raises ModelError naming the field or the setting."""
    kind = values["model_type"]
    if kind not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        raise ModelError(f"{file}: model_type", f"{kind!r} is unknown to transformers {transformers.__version__}")
    try:
        config = _config(transformers, values)
    except Exception as error:  # config classes validate with exceptions of several libraries
        raise ModelError(str(file), f"{first_line(error)} {_last_line(error)}", "correct the field") from error
    return _with_settings(transformers, config, values, settings) if settings else config


def _config(transformers: ModuleType, values: Mapping[str, Any]) -> Any:
    return transformers.AutoConfig.for_model(**copy.deepcopy(dict(values)))  # which fills what it is given with defaults


def _with_settings(transformers: ModuleType, config: Any, values: Mapping[str, Any], settings: Mapping[str, object]) -> Any:
    """``config``: of the values alone."""
    # What a class sets by other fields (num_labels by id2label) is no field of its own.
    through = {key: value for key, value in settings.items() if key not in values and _is_property(config, key)}
    merged = values
    for key, value in settings.items():
        if key not in through:
            merged = _merged(merged, config, key, value, whole=key)
    try:
        config = _config(transformers, merged)
        for key, value in through.items():
            setattr(config, key, value)
    except Exception as error:  # as of the values alone
        wrong = f"{'is' if len(settings) == 1 else 'are'} {', '.join(map(repr, settings.values()))}"
        raise ModelError(f"--set {', '.join(settings)}", f"{wrong}: {type(error).__name__}: {_last_line(error)}") from error
    for key, value in settings.items():
        _check_kept(config, key, value)
    return config


def _merged(values: Mapping[str, Any], part: Any, key: str, value: object, *, whole: str) -> dict[str, Any]:
    """The values of a config, or of a part of one, with ``key`` set, which dots lead to through parts. ``part``: what has been
    made of the values; ``whole``: the setting's key. Raises ModelError where there is no such field."""
    name, dot, rest = key.partition(".")
    aliases = getattr(part, "attribute_map", {})
    kept = aliases.get(name, name)
    others = {other: held for other, held in values.items() if aliases.get(other, other) != kept}
    written = next((held for other, held in values.items() if other not in others), None)
    if written is None and not _has(part, name):
        offered = ", ".join(_offered(part, name))
        right = f"it has {offered}" if offered else f"it is empty: write {whole.rpartition('.')[0]} into the file"
        raise ModelError(f"--set {whole}", f"{_kind(part)} has no field {name!r}", right)
    if not dot:
        return {**others, kept: value}
    made = _fields(part).get(kept)
    if not isinstance(written, dict):
        written = dict(made) if isinstance(made, dict) else {}
    made = written if made is None else made
    if not _is_part(made):
        raise ModelError(f"--set {whole}", f"{_kind(part)} has {name} {made!r}, which has no fields", f"it is set as {name}")
    return {**others, kept: _merged(written, made, rest, value, whole=whole)}


def _fields(part: Any) -> dict[str, Any]:
    """What a config, or a dict in one, holds."""
    held = part if isinstance(part, dict) else vars(part)
    return {name: value for name, value in held.items() if not name.startswith("_")}


def _has(part: Any, name: str) -> bool:
    if isinstance(part, dict):
        return name in part
    return not name.startswith("_") and hasattr(part, name) and not callable(getattr(type(part), name, None))


def _offered(part: Any, name: str) -> list[str]:
    """The fields called so in the parts of a config, else all of its own."""
    parts = {key: held for key, held in _fields(part).items() if _is_part(held)}
    return sorted(f"{key}.{name}" for key, held in parts.items() if _has(held, name)) or sorted(_fields(part))


def _is_part(value: object) -> bool:
    return isinstance(value, dict) or hasattr(value, "to_dict")


def _kind(part: Any) -> str:
    return "the dict" if isinstance(part, dict) else type(part).__name__


def _is_property(config: Any, key: str) -> bool:
    return isinstance(getattr(type(config), key, None), property)


def _check_kept(config: Any, key: str, value: object) -> None:
    """Refuse what the config's class has made another value of."""
    got = config
    for name in key.split("."):
        got = got.get(name, value) if isinstance(got, dict) else getattr(got, name, value)
    if got != value and isinstance(got, (bool, int, float, str, type(None))):
        raise ModelError(f"--set {key}", f"is {value!r}, and {type(config).__name__} makes it {got!r}",
                         "set the field that decides that")


def _model_class(transformers: ModuleType, file: Path, values: Mapping[str, Any], config: Any) -> type[nn.Module]:
    """``architectures[0]``, else the causal language model of the config's type."""
    architectures = values.get("architectures")
    if architectures:
        name = architectures[0] if isinstance(architectures, list) else architectures
        found = getattr(transformers, str(name), None)
        if not isinstance(found, type) or not issubclass(found, nn.Module):
            wrong = f"transformers {transformers.__version__} has no model class {name!r}"
            raise ModelError(f"{file}: architectures", wrong, "name one that it has")
        return found
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        wrong = f"is missing, and {values['model_type']!r} has no causal language model"
        raise ModelError(f"{file}: architectures", wrong, "name the class")
    causal: type[nn.Module] = mapping[type(config)]
    return causal
