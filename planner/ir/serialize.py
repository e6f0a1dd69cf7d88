"""The graph as JSON: exact, readable, without code. ``from_json(to_json(graph)) == graph``."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from planner.ir.body import Body, BodyValue, Node, Source
from planner.ir.errors import PlanFileError
from planner.ir.graph import BatchInput, Block, Buffer, InitStep, ModelGraph, Parameter
from planner.ir.types import DTYPE_BYTES, BatchMultiple, Dtype, Ref, TensorType

FORMAT = 1
_RECORDS: Mapping[str, type] = {
    kind.__name__: kind for kind in (BatchInput, Block, Body, BodyValue, Buffer, InitStep, ModelGraph, Node, Parameter)
}
_NUMBERS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def to_json(graph: ModelGraph) -> str:
    """One JSON object. Records carry their kind in ``"is"``; references are ``{"ref": name}``, types ``"float32[B, 4]"``."""
    return json.dumps({"format": FORMAT, "graph": _encode(graph)}, separators=(",", ":"), allow_nan=False)


def from_json(text: str) -> ModelGraph:
    """The graph of :func:`to_json`. Raises PlanFileError where the text is mangled or of another format."""
    try:
        read = json.loads(text)
        if not isinstance(read, dict) or read.get("format") != FORMAT:
            raise PlanFileError("graph", f"is not of format {FORMAT}", "plan again with this version")
        graph = _decode(read["graph"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PlanFileError("graph", f"is mangled ({type(error).__name__}: {error})", "plan again") from None
    if not isinstance(graph, ModelGraph):
        raise PlanFileError("graph", "holds no graph", "plan again")
    return graph


def fingerprint(graph: ModelGraph) -> str:
    """16 hex digits that tell graphs apart; the same wherever the model's files lie and whatever lines they have."""
    return hashlib.sha256(json.dumps(_encode(graph, sources=False), sort_keys=True).encode()).hexdigest()[:16]


def _encode(value: Any, sources: bool = True) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"number": str(value)}
    if isinstance(value, tuple):
        return [_encode(item, sources) for item in value]
    if isinstance(value, Ref):
        return {"ref": value.name}
    if isinstance(value, Dtype):
        return {"dtype": value.name}
    if isinstance(value, BatchMultiple):
        return {"batch": value.factor}
    if isinstance(value, TensorType):
        return {"type": str(value)}
    if isinstance(value, Source):
        return {"source": [value.file, value.line, value.code]} if sources else None
    if dataclasses.is_dataclass(value):
        fields = {field.name: _encode(getattr(value, field.name), sources) for field in dataclasses.fields(value)}
        return {"is": type(value).__name__} | fields
    raise TypeError(f"a graph holds no {type(value).__name__}")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    if "is" in value:
        kind = _RECORDS[value["is"]]
        known = {field.name for field in dataclasses.fields(kind)}
        return kind(**{name: _decode(item) for name, item in value.items() if name in known})
    (tag, content), = value.items()
    if tag == "ref":
        return Ref(content)
    if tag == "dtype":
        return Dtype(content)
    if tag == "batch":
        return BatchMultiple(int(content))
    if tag == "type":
        return _type(content)
    if tag == "source":
        return Source(*content)
    if tag == "number":
        return _NUMBERS[content]
    raise ValueError(f"unknown tag {tag}")


def _type(text: str) -> TensorType:
    dtype, bracket, extents = text.partition("[")
    if not bracket or not extents.endswith("]") or dtype not in DTYPE_BYTES:
        raise ValueError(f"no tensor type: {text}")
    return TensorType(tuple(_extent(extent) for extent in extents[:-1].split(", ") if extent), dtype)


def _extent(text: str) -> int | BatchMultiple:
    return BatchMultiple(int(text[:-1] or 1)) if text.endswith("B") else int(text)
