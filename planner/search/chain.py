"""The chain of blocks as runs of identical blocks, and the prices of their choices."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from hardware_profiles import Engine
from planner.evaluate import backward_seconds, forward_seconds
from planner.evaluate.stage import NO_STATE
from planner.ir.costed import BlockCost, BlockSeconds, CostedGraph, Recompute, StateCost
from planner.search.allowed import Allowed
from planner.search.tables import AT_TIMES, Table, table


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` identical blocks from ``first`` on, which may choose alike, with ``crossing_bytes`` over the cut before each
    of them, of which they keep ``received_bytes`` anyway."""

    body: str
    first: int
    count: int
    crossing_bytes: int
    received_bytes: int = 0

    def beats(self, other: Run) -> bool:
        """Whether it is of the same blocks, and no more crosses cuts."""
        alike = (self.body, self.first, self.count) == (other.body, other.first, other.count)
        return alike and self.crossing_bytes <= other.crossing_bytes


def run_at(runs: Sequence[Run], block: int) -> int:
    """The run that a block of the model belongs to."""
    return max(at for at, run in enumerate(runs) if run.first <= block)


Name = tuple[tuple[int, ...], int, Allowed]
"""A chain's ZeRO groups, option of placements, and what its blocks may choose."""


@dataclass(eq=False)
class Chain:
    """One option of a costed graph under the allowed choices. ``priced``: that graph with the prices of each of the
    ``zero_groups``, which differ in those of parameters only. Several are one as long as that says enough: then parameters cost
    no more of anything than under any of them."""

    priced: tuple[CostedGraph, ...]
    option: int
    allowed: Allowed
    zero_groups: tuple[int, ...]

    @property
    def name(self) -> Name:
        """No other chain of a candidate has it."""
        return self.zero_groups, self.option, self.allowed

    @property
    def costed(self) -> CostedGraph:
        """With the prices of the first ZeRO group: those of blocks are the same for all."""
        return self.priced[0]

    @property
    def zero_group(self) -> int:
        """Of a chain that has but one."""
        (group,) = self.zero_groups
        return group

    @cached_property
    def each(self) -> tuple[Chain, ...]:
        """The chain of each ZeRO group alone."""
        if len(self.zero_groups) == 1:
            return (self,)
        chains = (self._part(slice(at, at + 1)) for at in range(len(self.zero_groups)))
        return tuple(chain for chain in chains if chain.possible)

    @cached_property
    def parts(self) -> tuple[Chain, ...]:
        """Of several ZeRO groups, the chain of the first, and of the others."""
        parts = self._part(slice(1)), self._part(slice(1, None))
        return tuple(chain for chain in parts if chain.zero_groups and chain.possible)

    def _part(self, some: slice) -> Chain:
        return Chain(self.priced[some], self.option, self.allowed, self.zero_groups[some])

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        blocks, crossing = self.costed.graph.blocks, self.costed.crossing_bytes[self.option]
        twice = self.costed.all_kept_twice(self.option, split=self.allowed.split)
        cuts, zeros = range(len(blocks)), itertools.repeat(0)
        kinds = zip(
            (block.body for block in blocks), (-1, *map(crossing.get, cuts[1:], zeros)), map(twice.get, cuts, zeros),
            self.allowed.layers or itertools.repeat(None, len(blocks)), strict=True,
        )
        runs, first = [], 0
        for (body, size, received, _), group in itertools.groupby(kinds):
            count = len(list(group))
            runs.append(Run(body, first, count, max(size, 0), received))
            first += count
        return tuple(runs)

    @property
    def context_bytes(self) -> int:
        """Of each micro-batch in flight."""
        return self.costed.context_bytes

    @property
    def batch_bytes(self) -> int:
        """Of each micro-batch."""
        return self.costed.batch_bytes

    @cached_property
    def single(self) -> tuple[tuple[Table, Table], ...]:
        """Per run, the choices of one block: of recomputation and of ZeRO stages."""
        return tuple((self._recompute_choices(run), self._zero_choices(run)) for run in self.runs)

    @cached_property
    def repeated(self) -> tuple[object, ...]:
        """What the runs of several blocks can cost: chains that have it in common differ in single blocks only."""
        return tuple(
            (run, *(part.said for part in pair))
            for run, pair in zip(self.runs, self.single, strict=True) if run.count > 1
        )

    def beats(self, other: Chain) -> bool:
        """Whether each plan of another chain of the candidate has one of this that is as quick and as small at least, wherever
        its cuts are: with the same ZeRO groups, and for every choice of a block one that costs no more of anything. Only where
        nothing hides traffic: then a step and its memory grow with all that blocks cost."""
        alike = (self.zero_groups, self.allowed, self._tied_lie) == (other.zero_groups, other.allowed, other._tied_lie)
        runs = list(itertools.zip_longest(self.runs, other.runs))
        if not alike or any(two is None or one is None or not one.beats(two) for one, two in runs):
            return False
        # Of what a stage keeps, as much more than the other's as less of it lies in its receive buffers.
        more = [max(0, two.received_bytes - one.received_bytes) for one, two in runs]
        mine, others = self.single, other.single
        if not all(_covers(mine[at][0], others[at][0], size) for at, size in enumerate(more)):
            return False
        return [one.zero_groups for one in self.each] == [two.zero_groups for two in other.each] and all(
            _covers(mine[1], others[1], 0)
            for one, two in zip(self.each, other.each, strict=True)
            for mine, others in zip(one.single, two.single, strict=True)
        )

    @cached_property
    def _tied_lie(self) -> tuple[object, ...]:
        """How the bodies lie that share parameters, whose gradients are summed over stages."""
        graph, placements = self.costed.graph, self.costed.placements[self.option]
        bodies = dict.fromkeys(graph.blocks[at].body for _, owners in graph.tied for at in owners)
        return tuple(placements[body].parameters for body in bodies)

    @property
    def possible(self) -> bool:
        """Whether every block has a choice."""
        return all(len(part.names) for pair in self.single for part in pair)

    def _recompute_choices(self, run: Run) -> Table:
        costs: Mapping[Recompute, BlockCost] = self.costed.blocks[self.option][run.body]
        levels = self.allowed.of_block(run.first)[0]
        return _recompute_table(tuple((level, costs[level]) for level in levels if level in costs), self.allowed.split)

    def _zero_choices(self, run: Run) -> Table:
        fixed = dict(self.allowed.fixed_zero).get(run.body)
        zeros = self.allowed.of_block(run.first)[1] if fixed is None else (fixed,)
        groups = (costed.states[self.option][run.body] for costed in self.priced)
        return _zero_table(tuple(tuple((zero, states[zero]) for zero in zeros if zero in states) for states in groups))

    @cached_property
    def block_works(self) -> tuple[float, ...]:
        """The least seconds of a micro-batch in each block of the chain."""
        works = (sum(float(part.passes_s.min()) for part in pair) for pair in self.single)
        return tuple(work for run, work in zip(self.runs, works, strict=True) for _ in range(run.count))


def recompute_sums(
    cost: BlockSeconds, saved_bytes: int, buffer_bytes: int = 0, waiting_bytes: int = 0, *, split: bool
) -> tuple[float, ...]:
    """A choice of recomputation, as :attr:`Table.sums` has it."""
    passes = forward_seconds(cost, NO_STATE), *backward_seconds(cost, NO_STATE, split=split)
    return *passes, 0.0, 0.0, buffer_bytes, saved_bytes, waiting_bytes


def zero_sums(state: StateCost) -> tuple[float, ...]:
    """A ZeRO stage, as :attr:`Table.sums` has it."""
    return (
        state.forward_comm_s, state.backward_comm_s, 0.0, state.once_comm_s, state.optimizer_s,
        state.parameters_bytes + state.optimizer_bytes, state.gradients_bytes, 0.0,
    )


@lru_cache(maxsize=4096)
def _recompute_table(costs: tuple[tuple[Recompute, BlockCost], ...], split: bool) -> Table:
    """The choices of recomputation of one block. Many chains share them, and so do the data axes beside a tensor axis."""
    vectors = [recompute_sums(c, c.saved_bytes, c.buffer_bytes, c.waiting_bytes, split=split) for _, c in costs]
    return table([level for level, _ in costs], vectors, [c.peak_bytes(split) for _, c in costs])


@lru_cache(maxsize=4096)
def _zero_table(groups: tuple[tuple[tuple[int, StateCost], ...], ...]) -> Table:
    """The choices of ZeRO stages of one block; of several groups, each stage as good as under any of them."""
    states = list(dict.fromkeys(itertools.chain.from_iterable(groups)))
    every = table(
        [zero for zero, _ in states], [zero_sums(s) for _, s in states],
        [s.gather_bytes for _, s in states], [s.lasting_bytes for _, s in states],
    )
    return every.one_of_each() if len(groups) > 1 and states else every


@lru_cache(maxsize=65536)
def _covers(one: Table, other: Table, more_bytes: int) -> bool:
    """Whether each choice of another table has one here that costs no more of anything, with ``more_bytes`` kept besides."""
    costs = one.columns
    costs[:, AT_TIMES] += more_bytes
    return bool((costs[:, None] <= other.columns).all(axis=2).any(axis=0).all())


def without_beaten(chains: Sequence[Chain], engine: Engine) -> tuple[Chain, ...]:
    """Less those that another beats, the first of several that are the same."""
    if engine.gathers_hidden or engine.gradients_hidden or engine.sends_scattered:
        return tuple(chains)
    return tuple(
        chain for at, chain in enumerate(chains)
        if not any(other.beats(chain) and (i < at or not chain.beats(other)) for i, other in enumerate(chains) if i != at)
    )
