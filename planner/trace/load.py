"""Finding the user's model: ``path/file.py:callable`` or ``hf:PATH``."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any

from torch import nn

from planner.ir.errors import ModelError
from planner.trace.lines import first_line, users_line


@dataclass(frozen=True)
class ModelFile:
    """What a file has given, and how it is run once more (``load``)."""

    build: Callable[[], nn.Module]
    example_inputs: Callable[..., Any] | None
    loss: Callable[..., Any] | None
    load: Callable[[], ModelSource]


@dataclass(frozen=True)
class ModelSource:
    """How to make a model: ``where`` names it in messages, ``build`` constructs it (weights included).

    ``example_inputs(batch, seq)`` and ``loss(outputs, batch)`` are the model file's own, where it defines them.
    ``sequence``: tokens of a sample, as asked for, else the model's own default; None where it has none. ``file``: None
    where it comes from none.
    """

    where: str
    build: Callable[[], nn.Module]
    example_inputs: Callable[..., Any] | None
    loss: Callable[..., Any] | None
    name: str
    sequence: int | None = None
    file: ModelFile | None = None

    def anew(self) -> ModelSource:
        """The same with its file run again, for a model whose forward has changed what the file holds. What was put in the
        place of the file's own stays."""
        if self.file is None:
            return self
        parts, fresh = ("build", "example_inputs", "loss"), self.file.load()
        own = {part: getattr(fresh, part) for part in parts if getattr(self, part) is getattr(self.file, part)}
        return replace(self, **own, file=fresh.file)


def load_model(spec: str, settings: Mapping[str, object], sequence: int | None) -> ModelSource:
    """The model that ``spec`` names, built with the keyword arguments ``settings``.

    A callable with a ``seq`` keyword receives ``sequence`` unless ``settings`` give it. Without ``sequence`` the model's
    own is meant: the value of that keyword, or the positions of a Hugging Face config. Raises ModelError where the file,
    the callable, a keyword or a config field is not there or of the wrong kind.
    """
    if spec.startswith("hf:"):
        return _load_hugging_face(spec, settings, sequence)
    return _load_file(spec, settings, sequence)


def _load_file(spec: str, settings: Mapping[str, object], sequence: int | None) -> ModelSource:
    path, colon, name = spec.rpartition(":")
    if not colon or not path or not name:
        raise ModelError("MODEL", f"{spec!r} names no callable", "write path/file.py:callable or hf:PATH")
    if not Path(path).is_file():
        wrong = "is a directory" if Path(path).is_dir() else "no such file"
        raise ModelError(path, wrong, "write path/file.py:callable or hf:PATH")
    module = _import(Path(path))
    maker = getattr(module, name, None)
    if not callable(maker):
        offered = sorted(key for key, value in vars(module).items() if _defined_here(value, module))
        wrong = "is not callable" if hasattr(module, name) else "is not defined"
        raise ModelError(spec, f"{name} {wrong} in {path}", f"callables there: {', '.join(offered) or 'none'}")
    keywords = _keywords(spec, maker, settings, sequence)

    def construct() -> nn.Module:
        with _running(Path(path), "building the model"):
            model = maker(**keywords)
        if not isinstance(model, nn.Module):
            raise ModelError(spec, f"{name} returned {type(model).__name__}", "it must return a torch.nn.Module")
        compiled = getattr(model, "_orig_mod", None)  # of torch.compile: programs compile by --compile
        return compiled if isinstance(compiled, nn.Module) else model

    example_inputs, loss = getattr(module, "example_inputs", None), getattr(module, "loss", None)
    for key, value in (("example_inputs(batch, seq)", example_inputs), ("loss(outputs, batch)", loss)):
        if value is not None and not callable(value):
            raise ModelError(path, f"defines {key.partition('(')[0]} as {type(value).__name__}", f"define {key}")
    return ModelSource(
        spec, construct, example_inputs, loss, name, sequence or _default_sequence(maker, keywords),
        ModelFile(construct, example_inputs, loss, lambda: _load_file(spec, settings, sequence)),
    )


def _default_sequence(maker: Callable[..., Any], keywords: Mapping[str, object]) -> int | None:
    """The value of the maker's ``seq`` keyword."""
    parameter = inspect.signature(maker).parameters.get("seq")
    value = keywords.get("seq", parameter.default if parameter else None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _import(path: Path) -> ModuleType:
    """Run a Python file as a module, its folder importable meanwhile."""
    name = f"shardwright_model_{path.stem}"
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None:
        raise ModelError(str(path), "is no Python file", "write path/file.py:callable")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    with _running(path, "importing it"):
        specification.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _running(path: Path, doing: str) -> Iterator[None]:
    """Run the user's code: its folder importable, what it prints on stderr, whatever it raises an error of the model."""
    folder = str(path.parent.resolve())
    sys.path.insert(0, folder)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:  # a model file is user code: any exception in it is an input error
        where = users_line(error, path.parent) or str(path)
        raise ModelError(where, f"{doing} failed: {type(error).__name__}: {first_line(error)}") from error
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _defined_here(value: object, module: ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _keywords(
    spec: str, maker: Callable[..., Any], settings: Mapping[str, object], sequence: int | None
) -> dict[str, object]:
    """Keyword arguments of the maker; unknown ones are refused with the accepted ones."""
    try:
        parameters = inspect.signature(maker).parameters
    except ValueError:
        raise ModelError(spec, "has no readable signature", "write a function that returns the module") from None
    named = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    free = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key in settings:
        if key not in named and not free:
            raise ModelError(f"--set {key}", f"{spec} takes no keyword {key!r}", f"it takes {', '.join(named) or 'none'}")
        _check_kind(spec, key, maker, settings[key])
    keywords = dict(settings)
    if "seq" in named and sequence is not None:
        keywords.setdefault("seq", sequence)
    for parameter in parameters.values():
        if parameter.name in named and parameter.default is parameter.empty and parameter.name not in keywords:
            raise ModelError(spec, f"needs the keyword {parameter.name!r}", f"give --set {parameter.name}=VALUE")
    return keywords


def _check_kind(spec: str, key: str, maker: Callable[..., Any], value: object) -> None:
    """Refuse a value that the maker's annotation of ``key`` excludes; annotations of other than plain values allow all."""
    try:
        hint = typing.get_type_hints(maker).get(key)
    except (NameError, TypeError, AttributeError):  # an annotation that cannot be evaluated says nothing
        return
    kinds = typing.get_args(hint) if isinstance(hint, UnionType) or typing.get_origin(hint) is typing.Union else (hint,)
    if not set(kinds) <= {int, float, bool, str, type(None)}:
        return
    allowed = {*kinds, *({int} if float in kinds else ())}
    if type(value) not in allowed:
        names = " or ".join("none" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ModelError(f"--set {key}", f"is {value!r} ({type(value).__name__})", f"{spec} takes {names}")


def _load_hugging_face(spec: str, settings: Mapping[str, object], sequence: int | None) -> ModelSource:
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
