"""The one error that a running program shows its user."""

from __future__ import annotations

import torch.distributed as dist


class ProgramError(Exception):
    """Wrong input: ``where`` names the file, field or flag, ``wrong`` what it holds, ``right`` what would be right.

    Rank 0 prints it as one line and every rank leaves with ``exit_code``.
    """

    exit_code = 2

    def __init__(self, where: str, wrong: str, right: str = "") -> None:
        self.where, self.wrong, self.right = where, wrong, right
        super().__init__(f"{where}: {wrong}" + (f"; {right}" if right else ""))


def raise_together(error: ProgramError | None) -> None:
    """Raise on every rank the error of the first rank that has one. Collective over the world."""
    own = None if error is None else (error.where, error.wrong, error.right)
    found: list[tuple[str, str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    for parts in found:
        if parts is not None:
            raise ProgramError(*parts)
