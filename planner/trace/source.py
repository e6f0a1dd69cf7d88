"""What a model is made of: how it is built, what it takes and what is trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn


@dataclass(frozen=True)
class ModelFile:
    """What a file has given, and how it is run once more (``load``)."""

    build: Callable[[], nn.Module]
    example_inputs: Callable[..., Any] | None
    loss: Callable[..., Any] | None
    load: Callable[[], ModelSource]


@dataclass(frozen=True)
class ModelSource:
    """How to make a model: ``where`` names it in messages, ``build`` constructs it (weights included).

    ``example_inputs(batch, seq)`` and ``loss(outputs, batch)`` are the model file's own, where it defines them.
    ``sequence``: tokens of a sample, as asked for, else the model's own default; None where it has none. ``file``: None
    where it comes from none.
    """

    where: str
    build: Callable[[], nn.Module]
    example_inputs: Callable[..., Any] | None
    loss: Callable[..., Any] | None
    name: str
    sequence: int | None = None
    file: ModelFile | None = None

    def anew(self) -> ModelSource:
        """The same with its file run again, for a model whose forward has changed what the file holds. What was put in the
        place of the file's own stays."""
        if self.file is None:
            return self
        parts, fresh = ("build", "example_inputs", "loss"), self.file.load()
        own = {part: getattr(fresh, part) for part in parts if getattr(self, part) is getattr(self.file, part)}
        return replace(self, **own, file=fresh.file)
