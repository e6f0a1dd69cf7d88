"""Python names for values, classes and functions."""

from __future__ import annotations

import builtins
import json
import keyword

from planner.ir.identifiers import as_identifier

RESERVED = frozenset({
    "self", "tp", "rng", "F", "torch", "nn", "math", "batch", "checkpoint", "core", "received", "alive", "block",
})
"""What emitted functions call things of their own."""


def escaped(text: str) -> str:
    """The inside of a string literal, on one line: for comments and docstrings too. A name of the user's may hold anything."""
    return quoted(text)[1:-1]


def quoted(text: str) -> str:
    """A string literal. Python reads JSON's escapes as JSON does, but for surrogate pairs, which there are none of here."""
    return json.dumps(text, ensure_ascii=False)


def identifier(text: str) -> str:
    """A valid Python name close to ``text``."""
    name = as_identifier(text).strip("_") or "value"
    return name if name.isidentifier() else f"value_{name}"


def unique(text: str, used: set[str]) -> str:
    """A name close to ``text`` that is neither used nor reserved; it is added to ``used``."""
    base = identifier(text)
    name, count = base, 2
    while name in used or name in RESERVED or keyword.iskeyword(name) or hasattr(builtins, name):
        name, count = f"{base}_{count}", count + 1
    used.add(name)
    return name
