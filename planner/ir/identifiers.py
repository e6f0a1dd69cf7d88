"""Identifiers of Python, made of what a user calls things."""

from __future__ import annotations

import unicodedata


def as_identifier(text: str) -> str:
    """The text as Python reads a name (NFKC), with underscores for what stands in none. It may begin with a digit."""
    return "".join(c if f"_{c}".isidentifier() else "_" for c in unicodedata.normalize("NFKC", text))
