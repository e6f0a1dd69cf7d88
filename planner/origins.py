"""Where a job's values stand. Errors name the flag; where a job file stands in for it, they are told to name its field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from planner.ir.errors import InputError

Origins = Mapping[str, str]
"""What errors name, and what is to be named in its place: ``--seq`` and ``job.yaml: seq``."""


@contextmanager
def named_by(origins: Origins) -> Iterator[None]:
    """Errors of the input that come out name what ``origins`` has for what they name."""
    try:
        yield
    except InputError as error:
        if error.where not in origins:
            raise
        raise type(error)(origins[error.where], error.wrong, error.right) from error
