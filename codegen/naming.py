"""Python names for values, classes and functions."""

from __future__ import annotations

import builtins
import keyword
import re

RESERVED = frozenset({"self", "tp", "rng", "F", "torch", "nn", "math", "batch", "checkpoint", "core", "received"})


def identifier(text: str) -> str:
    """A valid Python name close to ``text``."""
    name = re.sub(r"\W", "_", text).strip("_") or "value"
    return f"value_{name}" if name[0].isdigit() else name


def unique(text: str, used: set[str]) -> str:
    """A name close to ``text`` that is neither used nor reserved; it is added to ``used``."""
    base = identifier(text)
    name, count = base, 2
    while name in used or name in RESERVED or keyword.iskeyword(name) or hasattr(builtins, name):
        name, count = f"{base}_{count}", count + 1
    used.add(name)
    return name
