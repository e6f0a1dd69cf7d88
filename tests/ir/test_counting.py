"""One of a thing is singular."""

from __future__ import annotations

import pytest

from planner.ir.counting import counted


@pytest.mark.parametrize(("number", "noun", "said"), [
    (1, "device", "1 device"), (0, "device", "0 devices"), (4, "data rank", "4 data ranks"),
    (1, "micro-batch", "1 micro-batch"), (2, "micro-batch", "2 micro-batches"),
    (1, "family", "1 family"), (2, "family", "2 families"),
])
def test_a_number_and_its_noun(number: int, noun: str, said: str) -> None:
    assert counted(number, noun) == said
