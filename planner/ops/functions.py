"""Names that a chip's ``functions`` may have: operations that a step may run as memory-bound work, and their gradients."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from functools import lru_cache

from planner.ir.errors import ProfileError
from planner.ops.families import ATTENTION, CREATIONS, GEMMS, VIEW_FAMILY

BACKWARD = "_backward"
"""Ends the name of an operation's gradient for its operand (:func:`planner.ops.work.backward_work`)."""
_FORMS = frozenset({"gelu_tanh"})
"""Operations that an argument makes another function (:func:`planner.ops.work.work`)."""


@lru_cache(maxsize=1)
def function_names() -> frozenset[str]:
    """Forward names: torch's schema names without overloads, as in traces. Products, attention, views and constants have a
    price of their own, whatever a chip says of their names."""
    import torch

    spaces = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    names = {name.partition(".")[0] for space, _, name in spaces if space == "aten"}
    # Traces hold no operation that writes in place (``gelu_``); ``__and__`` is none.
    known = {name for name in names if not name.endswith(BACKWARD) and (not name.endswith("_") or name.endswith("__"))} | _FORMS
    return frozenset(known) - VIEW_FAMILY - CREATIONS - GEMMS - {ATTENTION}


def check_functions(names: Iterable[str], where: str) -> None:
    """Refuse a function that no operation asks for, as a misspelt one is. Raises ProfileError that names it and
    the file ``where``."""
    for name in names:
        if name.removesuffix(BACKWARD) not in function_names():
            known = sorted(function_names())
            close = get_close_matches(name.removesuffix(BACKWARD), known) or ["gelu"]
            end = BACKWARD if name.endswith(BACKWARD) else ""
            alike = " or ".join(f"{found}{end}" for found in close)
            right = f"write {alike}, or another operation that is no product and no view"
            raise ProfileError(f"{where}: chip.functions.{name}", "is no operation whose elements take seconds", right)
