"""Blocks that end in a view, as reshapes do."""

from __future__ import annotations

import warnings

import pytest
from torch import Tensor

from runtime.launch import parse_options
from runtime.loop import train
from tests.runtime import toy_program
from tests.runtime.toy_program import Toy, build


def test_nobody_is_warned_of_a_block_that_returns_a_view(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = toy_program.Layer._body

    def ending_in_a_view(layer: toy_program.Layer, x: Tensor, rng: object) -> Tensor:
        return plain(layer, x, rng).flatten().view(x.shape)  # type: ignore[arg-type]

    monkeypatch.setattr(toy_program.Layer, "_body", ending_in_a_view)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(build(Toy()), parse_options(["--steps", "1"]))
    assert not [str(item.message) for item in told if "view" in str(item.message)]
