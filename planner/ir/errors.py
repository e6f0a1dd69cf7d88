"""The one tree of errors.

Every message names the file or field, says what is wrong and what would be right; the command line prints it as one
line and leaves with ``exit_code``. Nothing else may reach a user as an exception.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ShardwrightError(Exception):
    """Root of the tree. ``where`` is the file, field or flag; ``wrong`` what it holds; ``right`` what would be right."""

    exit_code = 2

    def __init__(self, where: str, wrong: str, right: str = "") -> None:
        self.where, self.wrong, self.right = where, wrong, right
        super().__init__(f"{where}: {wrong}" + (f"; {right}" if right else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        """Into another process, whatever else a kind of error is made of."""
        return _made_again, (type(self), str(self), vars(self))


class InputError(ShardwrightError):
    """What the user gave is wrong (exit 2)."""


class JobError(InputError):
    """A flag, a job file or a batch that cannot be."""


class ModelError(InputError):
    """The model cannot be loaded, traced, or initialised faithfully."""


class ProfileError(InputError):
    """A hardware profile or cluster that is unknown or malformed."""


class PlanFileError(InputError):
    """A plan file that is mangled, or was made for another model, cluster or batch."""


class PinError(InputError):
    """A pin that is unknown, contradictory or impossible."""


class NoPlanFits(ShardwrightError):
    """No plan satisfies the limits (exit 3). The message names the binding limit, by how much, and a remedy."""

    exit_code = 3


class Disagreement(ShardwrightError):
    """``check`` or ``rehearse`` found that two derivations part (exit 1)."""

    exit_code = 1


class InternalError(ShardwrightError):
    """A pass broke the form that the verifier requires: our defect, not the user's."""

    exit_code = 70


def _made_again(kind: type[ShardwrightError], message: str, state: Mapping[str, Any]) -> ShardwrightError:
    error = kind.__new__(kind, message)
    vars(error).update(state)
    return error
