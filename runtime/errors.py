"""The one error that a running program shows its user."""

from __future__ import annotations


class ProgramError(Exception):
    """Wrong input: ``where`` names the file, field or flag, ``wrong`` what it holds, ``right`` what would be right.

    Rank 0 prints it as one line and every rank leaves with ``exit_code``.
    """

    exit_code = 2

    def __init__(self, where: str, wrong: str, right: str = "") -> None:
        self.where, self.wrong, self.right = where, wrong, right
        super().__init__(f"{where}: {wrong}" + (f"; {right}" if right else ""))
