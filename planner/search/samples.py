"""What the blocks of a candidate take at least, before they are priced.

Blocks are priced per sample of a huge micro-batch: what a kernel or a collective takes for one sample never grows with the
micro-batch, because latencies and starts are shared, larger kernels are more efficient and the last, partly filled tile weighs
less. Every block has the choices of all placements; nothing crosses cuts, and nothing lives beside blocks or transiently. (What
stages keep of what they have received lies in buffers that are at least as large.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cost_models.overlap import Overlap
from planner.costing.graphs import LeastCosts
from planner.costing.state_prices import StateCosts
from planner.evaluate import backward_seconds, forward_seconds
from planner.evaluate.stage import NO_STATE
from planner.ir.costed import StateCost
from planner.ir.graph import ModelGraph
from planner.search.chain import Run, recompute_sums, zero_sums
from planner.search.crossings import NO_SEND
from planner.search.engine import planning_engine
from planner.search.stream import Stream
from planner.search.tables import Table, table

HUGE_MICROBATCH = 4096
"""A power of two, so that it fills the tiles of every product."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The least that one sample of a huge micro-batch takes in a block: seconds of all passes, those of the forward pass and of
    the part of a split backward pass that the stage before waits for, saved bytes."""

    work_s: float
    way_s: float
    saved_bytes: float

    @staticmethod
    def of(name: str, options: Sequence[LeastCosts], levels: tuple[str, ...]) -> Sample:
        """A body's, under every option and some recomputation levels."""
        costs = [cost for option in options for level, cost in option[name].items() if level in levels]
        return Sample(
            min(forward_seconds(c, NO_STATE) + sum(backward_seconds(c, NO_STATE, split=False)) for c, _ in costs)
            / HUGE_MICROBATCH,
            min(forward_seconds(c, NO_STATE) + backward_seconds(c, NO_STATE, split=True)[0] for c, _ in costs)
            / HUGE_MICROBATCH,
            min(saved for _, saved in costs) / HUGE_MICROBATCH,
        )


@dataclass(frozen=True, slots=True)
class Held:
    """The least that a block's parameters take: seconds of a micro-batch, seconds once a step, bytes all the time."""

    traffic_s: float
    tail_s: float
    size_bytes: int

    @staticmethod
    def of(held: Sequence[StateCost], together: bool) -> Held:
        """Of some stages; ``together``: gradients are there beside live micro-batches."""
        engine = planning_engine()
        return Held(
            min(engine.gathers_floor * (state.forward_comm_s + state.backward_comm_s) for state in held),
            min(engine.gradients_floor * state.once_comm_s + state.optimizer_s for state in held),
            min(s.parameters_bytes + together * s.gradients_bytes + s.optimizer_bytes for s in held),
        )


def sample_table(name: str, options: Sequence[LeastCosts], levels: tuple[str, ...], split: bool) -> Table:
    """A body's choices of placement and recomputation in a huge micro-batch."""
    return _table({
        recompute_sums(cost, saved, split=split): level
        for option in options for level, (cost, saved) in option[name].items() if level in levels
    })


def state_table(name: str, states: Iterable[StateCosts], stages: tuple[int, ...]) -> Table:
    """A body's choices of placement, ZeRO group and stage."""
    return _table({zero_sums(state): zero for option in states for zero, state in option[name].items() if zero in stages})


def _table(rows: Mapping[tuple[float, ...], object]) -> Table:
    return table(list(rows.values()), list(rows), [0.0] * len(rows)).without_beaten()


def rough_stream(graph: ModelGraph, micro: int, samples: Mapping[str, Table], states: Mapping[str, Table]) -> Stream:
    """What flows over stages at least. By body: ``samples``, of a huge micro-batch; ``states``, of parameters."""
    engine, runs, first = planning_engine(), [], 0
    for body, group in itertools.groupby(block.body for block in graph.blocks):
        runs.append(Run(body, first, len(list(group)), 0))
        first += runs[-1].count
    shrunk = {name: replace(each, sums=micro / HUGE_MICROBATCH * each.sums) for name, each in samples.items()}
    return Stream(
        tuple(runs), tuple((shrunk[run.body], states[run.body]) for run in runs), 0.0, 0, 0, (NO_SEND,) * len(runs),
        Overlap(engine.gathers_hidden, engine.gathers_floor), Overlap(engine.gradients_hidden, engine.gradients_floor),
    )
