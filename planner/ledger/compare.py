"""Where what was predicted and what was rehearsed part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.ledger.calls import CATEGORIES, Call, RankLedger

TOLERANCE = 0.02
"""By how much the prediction of a memory category may exceed what is allocated; it may never be less."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One row that parts. ``what``: a call (counts are compared) or a memory category (bytes)."""

    rank: int
    what: Call | str
    predicted: int
    rehearsed: int


def compare(predicted: RankLedger, rehearsed: RankLedger) -> tuple[Difference, ...]:
    """Every row in which two ledgers of one rank part: calls exactly, memory within :data:`TOLERANCE`."""
    return (*_calls(predicted, rehearsed), *_memory(predicted, rehearsed))


def _calls(predicted: RankLedger, rehearsed: RankLedger) -> Iterator[Difference]:
    for made in sorted({*predicted.calls, *rehearsed.calls}):
        counts = predicted.calls.get(made, 0), rehearsed.calls.get(made, 0)
        if counts[0] != counts[1]:
            yield Difference(predicted.rank, made, *counts)


def _memory(predicted: RankLedger, rehearsed: RankLedger) -> Iterator[Difference]:
    for category in CATEGORIES:
        said, taken = predicted.memory_bytes[category], rehearsed.memory_bytes[category]
        if not taken <= said <= (1 + TOLERANCE) * taken:
            yield Difference(predicted.rank, category, said, taken)
