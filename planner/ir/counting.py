"""How many of what, in words."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """``1 device``, ``4 devices``: a number and its noun, given as for one, whose plural ends in -s, -ches or -ies."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{number} {noun.removesuffix('y')}ies"
    return f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"
