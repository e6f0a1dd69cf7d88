"""Finding the user's model: ``path/file.py:callable`` or ``hf:PATH``."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, UnionType
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from planner.ir.errors import ModelError
from planner.trace.hugging_face import load_hugging_face
from planner.trace.lines import first_line, users_line
from planner.trace.source import ModelFile, ModelSource, folder_of


def load_model(spec: str, settings: Mapping[str, object], sequence: int | None) -> ModelSource:
    """The model that ``spec`` names, built with the keyword arguments ``settings``.

    A callable with a ``seq`` keyword receives ``sequence`` unless ``settings`` give it. Without ``sequence`` the model's
    own is meant: the value of that keyword, or the positions of a Hugging Face model. Raises ModelError where the file,
    the callable, a keyword or a config field is not there or of the wrong kind.
    """
    if spec.startswith("hf:"):
        return load_hugging_face(spec, settings, sequence)
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
        ModelFile(Path(path), construct, example_inputs, loss, lambda: _load_file(spec, settings, sequence)),
    )


def _default_sequence(maker: Callable[..., Any], keywords: Mapping[str, object]) -> int | None:
    """The value of the maker's ``seq`` keyword."""
    parameter = inspect.signature(maker).parameters.get("seq")
    value = keywords.get("seq", parameter.default if parameter else None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


class _AsWritten(SourceFileLoader):
    """Reads the file itself: to Python's cache a file that was rewritten within a second, as long as before, is the old one."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _import(path: Path) -> ModuleType:
    """Run a Python file as a module, its folder importable meanwhile."""
    name = f"shardwright_model_{path.stem}"
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None:
        raise ModelError(str(path), "is no Python file", "write path/file.py:callable")
    if isinstance(specification.loader, SourceFileLoader):
        specification.loader = _AsWritten(name, str(path))
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    with _running(path, "importing it"):
        specification.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _running(path: Path, doing: str) -> Iterator[None]:
    """Run the user's code: its folder importable, what it prints on stderr, whatever it raises an error of the model."""
    try:
        with folder_of(path), contextlib.redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:  # a model file is user code: any exception in it is an input error
        where = users_line(error, path.parent) or str(path)
        if isinstance(error, DataDependentOutputException):
            wrong = f"{doing} looks at the values of weights ({error.func}), which are not computed while planning"
            raise ModelError(where, wrong, "do without; torch's orthogonal() takes use_trivialization=False") from error
        raise ModelError(where, f"{doing} failed: {type(error).__name__}: {first_line(error)}") from error


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
