"""The one error of the profile reader."""

from __future__ import annotations


class ProfileFormatError(Exception):
    """A profile or a cluster that cannot be read. ``where``: file or field; ``wrong``: what it holds; ``right``."""

    def __init__(self, where: str, wrong: str, right: str = "") -> None:
        self.where, self.wrong, self.right = where, wrong, right
        super().__init__(f"{where}: {wrong}" + (f"; {right}" if right else ""))
