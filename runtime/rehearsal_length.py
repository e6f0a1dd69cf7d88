"""How many micro-batches of a step have to be run to know the step of all.

A step fills the pipeline, repeats, and drains. Once the pipeline is full, a further micro-batch (of the interleaved
schedules: a further round of them) repeats what the one before did, from the same state to the same state: it adds the
same calls, the same entries to every list that a step keeps, and nothing to what is alive besides. So calls, and bytes at
any moment, are affine in the number of micro-batches from a small number on: ``ledger(m) = ledger(a) + (m - a) * slope``.
The moment when the most is alive may be another in long steps (under GPipe, what all micro-batches keep overtakes the last
reduction); moments at the beginning of the schedule, at its end, between and after it have a line each.

Two lengths give the line; a slope that is no whole number refuses it, and the whole step is run. Tests compare the line with
whole steps, exactly, over schedules, ZeRO stages and recomputation. ``--every-microbatch`` runs whole steps anyway.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import product
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
ROUNDS = ("interleaved-1f1b", "interleaved-zero-bubble")


def lengths(schedule: str, pipeline: int, microbatches: int) -> tuple[int, ...]:
    """The lengths to run for a step of ``microbatches``, ascending; that alone where it is too short to be worth less.

    1F1B is full with a micro-batch for every stage and one more in the buffers. Interleaving warms up for less than
    virtual + 1 rounds of one stage's forwards, and repeats after virtual of them: three rounds of all stages hold both.
    Zero bubble V is drawn for 2 x pipeline - 1 micro-batches at least; the moments of its middle repeat from three more on.
    Without a pipeline, and under GPipe, a step has a first, a last and equal ones between.
    """
    if schedule in ROUNDS and pipeline > 1:
        rounds = max(1, microbatches // pipeline)
        each = microbatches // rounds
        return (3 * each, 4 * each) if rounds > 4 else (microbatches,)
    full = 3 if pipeline == 1 or schedule == "gpipe" else pipeline + 1 if schedule == "1f1b" else 2 * pipeline + 2
    return (full, full + 1) if microbatches > full + 1 else (microbatches,)


def nearest(steps: Sequence[Sequence[Mapping[Key, int]]]) -> Sequence[Mapping[Key, int]]:
    """Of each step's moments that hold equally much, one: those of two steps that are most alike are the same moment."""
    if len(steps) == 1:
        return steps[0][:1]
    return min(product(*steps), key=lambda pair: sum(abs(pair[1][key] - pair[0][key]) for key in pair[0]))


def on_line(recorded: Sequence[int], values: Sequence[Mapping[Key, int]], at: int) -> dict[Key, int] | None:
    """The values at ``at`` on the line through those at the two ``recorded`` lengths (or at the one that is ``at``).

    None where a slope is no whole number. A key that is missing counts 0.
    """
    if recorded[-1] == at:
        return dict(values[-1])
    found: dict[Key, int] = {}
    for key in dict.fromkeys(key for item in values for key in item):
        row = [item.get(key, 0) for item in values]
        slope, rest = divmod(row[1] - row[0], recorded[1] - recorded[0])
        if rest:
            return None
        found[key] = row[0] + slope * (at - recorded[0])
    return found
