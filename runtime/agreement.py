"""Whether all ranks were told the same: every node starts its own copy of the program, by its own command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from .errors import ProgramError, raise_together

SHOWN = 60
"""Characters of the longest text that a line shows."""
OF_RANK_0 = frozenset({"metrics"})
"""Options that no other rank looks at."""


def flag(name: str) -> str:
    """An option as the command line has it."""
    return f"--{name.replace('_', '-')}"


def by_flag(options: Mapping[str, object]) -> dict[str, str]:
    """What the ranks have to be told alike by the command line, by flag. Of a path only whether it is given: nodes may keep a
    file at different places, and a checkpoint's folder has a check of its own (``claim.check_shared``)."""
    return {
        flag(name): "given" if isinstance(value, Path) else "not given" if value is None else repr(value)
        for name, value in options.items() if name not in OF_RANK_0
    }


def check_alike(told: Mapping[str, str], right: str) -> None:
    """Raise ProgramError, on every rank alike, for the first entry in which a rank was told another text than rank 0: it would
    train something else, or wait for the others where they do not come. Collective over the world; ``right``: what would be."""
    first = [dict(told)]
    dist.broadcast_object_list(first, src=0)
    raise_together(_difference(told, first[0], right))


def _difference(told: Mapping[str, str], first: Mapping[str, str], right: str) -> ProgramError | None:
    for name in {**told, **first}:
        own, other = told.get(name, "missing"), first.get(name, "missing")
        if own != other:
            long = max(len(own), len(other)) > SHOWN
            rank = dist.get_rank()
            wrong = f"rank {rank} has another than rank 0" if long else f"{own} on rank {rank}, {other} on rank 0"
            return ProgramError(name, wrong, right)
    return None
