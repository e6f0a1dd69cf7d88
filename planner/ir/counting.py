"""How many of what, in words."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """``1 device``, ``4 devices``: a number and its noun, given as for one, whose plural ends in -s, or in -es after -ch."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"
