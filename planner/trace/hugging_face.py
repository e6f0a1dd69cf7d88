"""Models of Hugging Face transformers: ``hf:PATH``, built from a config alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from planner.ir.errors import ModelError
from planner.trace.lines import first_line
from planner.trace.source import ModelSource


def load_hugging_face(spec: str, settings: Mapping[str, object], sequence: int | None) -> ModelSource:
    path = Path(spec.removeprefix("hf:"))
    file = path / "config.json" if path.is_dir() else path
    try:
        import transformers
    except ImportError:
        raise ModelError(spec, "needs transformers", "pip install 'shardwright[huggingface]'") from None
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
    model_class, config = _hugging_face_class(transformers, file, values)
    for key, value in settings.items():
        if not hasattr(config, key):
            known = ", ".join(sorted(name for name in vars(config) if not name.startswith("_")))
            raise ModelError(f"--set {key}", f"{type(config).__name__} has no field {key!r}", f"it has {known}")
        try:
            setattr(config, key, value)
        except Exception as error:  # config classes validate with exceptions of several libraries
            raise ModelError(f"--set {key}", f"is {value!r}: {type(error).__name__}: {_last_line(error)}") from error
    config.use_cache = False
    config._attn_implementation = "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"

    def construct() -> nn.Module:
        try:
            model = model_class(config)
        except Exception as error:  # transformers raises many kinds for a config that does not fit together
            wrong = f"{model_class.__name__} refuses it: {type(error).__name__}: {first_line(error)}"
            raise ModelError(str(file), wrong) from error
        return model.train()

    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return ModelSource(spec, construct, None, None, name, sequence or _positions(config))


def _positions(config: Any) -> int | None:
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


def _hugging_face_class(transformers: ModuleType, file: Path, values: Mapping[str, Any]) -> tuple[type, Any]:
    """The model class (``architectures[0]``, else the causal language model of the type) and its config."""
    kind = values["model_type"]
    if kind not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        raise ModelError(f"{file}: model_type", f"{kind!r} is unknown to transformers {transformers.__version__}")
    try:
        config = transformers.AutoConfig.for_model(**values)
    except Exception as error:  # config classes validate with exceptions of several libraries
        raise ModelError(str(file), f"{first_line(error)} {_last_line(error)}", "correct the field") from error
    architectures = values.get("architectures")
    if architectures:
        name = architectures[0] if isinstance(architectures, list) else architectures
        found = getattr(transformers, str(name), None)
        if not isinstance(found, type) or not issubclass(found, nn.Module):
            wrong = f"transformers {transformers.__version__} has no model class {name!r}"
            raise ModelError(f"{file}: architectures", wrong, "name one that it has")
        return found, config
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        raise ModelError(f"{file}: architectures", f"is missing, and {kind!r} has no causal language model",
                         "name the class")
    return mapping[type(config)], config
