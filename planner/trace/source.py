"""What a model is made of: how it is built, what it takes and what is trained on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from planner.ir.graph import Role

LANGUAGE: Mapping[str, int] = {"input_ids": 2, "labels": 2}
"""What a language model takes: whole numbers by their dims, [batch, seq]."""
ROLES: Mapping[str, Role] = {"input_ids": "tokens", "labels": "targets"}
"""What a text feeds, by name."""


@dataclass(frozen=True)
class ModelFile:
    """What a file has given, and how it is run once more (``load``)."""

    path: Path
    build: Callable[[], nn.Module]
    example_inputs: Callable[..., Any] | None
    loss: Callable[..., Any] | None
    load: Callable[[], ModelSource]


@dataclass(frozen=True)
class ModelSource:
    """How to make a model: ``where`` names it in messages, ``build`` constructs it (weights included).

    ``example_inputs(batch, seq)`` and ``loss(outputs, batch)`` are the model file's own, where it defines them.
    ``sequence``: tokens of a sample, as asked for, else what the model file says; None where neither does. ``file``: None
    where it comes from none. ``inputs``: what it takes where there is no ``example_inputs``, as LANGUAGE; of one dim are those
    of which a sample has one. ``remedy``: what is right where it cannot be trained so, if that is not to change its code.
    ``layer_drop``: settings of it with which layers are dropped at random. ``roles``: what a text feeds, as ROLES.
    ``positions``: the sequence of the model as built, where there is no other.
    """

    where: str
    build: Callable[[], nn.Module]
    example_inputs: Callable[..., Any] | None
    loss: Callable[..., Any] | None
    name: str
    sequence: int | None = None
    file: ModelFile | None = None
    inputs: Mapping[str, int] = field(default_factory=lambda: LANGUAGE)
    roles: Mapping[str, Role] = field(default_factory=lambda: ROLES)
    remedy: str = ""
    layer_drop: tuple[str, ...] = ()
    positions: Callable[[nn.Module], int | None] = lambda _: None

    def importable(self) -> contextlib.AbstractContextManager[None]:
        """Within, any function of its file may import what lies beside that, as in a script."""
        return folder_of(self.file.path) if self.file else contextlib.nullcontext()

    def anew(self) -> ModelSource:
        """The same with its file run again, for a model whose forward has changed what the file holds. What was put in the
        place of the file's own stays."""
        if self.file is None:
            return self
        parts, fresh = ("build", "example_inputs", "loss"), self.file.load()
        own = {part: getattr(fresh, part) for part in parts if getattr(self, part) is getattr(self.file, part)}
        return replace(self, **own, file=fresh.file)


@contextlib.contextmanager
def folder_of(path: Path) -> Iterator[None]:
    """Modules in the folder of a file can be imported within."""
    folder = str(path.parent.resolve())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
