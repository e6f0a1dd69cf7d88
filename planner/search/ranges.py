"""The least memory of every range of blocks on one stage, exactly.

A stage needs, for its blocks, the sum of what each keeps (state, constants, and its activations of every live
micro-batch), the largest transient peak of one of them, and the largest transient share of ZeRO. What recomputation
decides and what ZeRO decides add up, so the two are minimised apart. Where the largest transient is at most a threshold,
each block takes its cheapest choice under that threshold: the least over all thresholds is the least over all choices,
because every choice has some largest transient. Prefix sums give this for all ranges at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from planner.ir.costed import CostedGraph
from planner.ir.plan import BlockDecision, StagePlan
from planner.search.allowed import Allowed, Choice
from planner.search.tables import Floats

NEVER = 2.0**52
"""Bytes of a choice that a threshold excludes: more than any real sum, and exact in floating point beside all of them."""


class Option(NamedTuple):
    """One block's choice: bytes ``always``; ``each`` time (of recomputation for each live micro-batch, of ZeRO gradients once
    there are any) and, beyond these, of each micro-batch ``waiting`` for the weight part of its backward pass; ``transient``
    bytes; and the ``decision`` that this is."""

    always: float
    each: float
    waiting: float
    transient: float
    decision: object

    def held(self, times: float, waiting: float) -> float:
        """Bytes with so many of both."""
        return self.always + times * self.each + waiting * self.waiting


@dataclass(frozen=True)
class Ranges:
    """The blocks of one option of a costed graph, with the choices that each is allowed."""

    costed: CostedGraph
    option: int
    allowed: Allowed

    @property
    def count(self) -> int:
        return len(self.costed.graph.blocks)

    @cached_property
    def levels(self) -> tuple[tuple[Option, ...], ...]:
        """Per block, its recomputation levels."""
        costs, split = self.costed.blocks[self.option], self.allowed.split

        def options(body: str, allowed: Choice) -> tuple[Option, ...]:
            return tuple(
                Option(cost.buffer_bytes, cost.saved_bytes, cost.waiting_bytes, cost.peak_bytes(split), level)
                for level, cost in costs[body].items() if level in allowed[0]
            )

        return self._of_each(options)

    @cached_property
    def stages(self) -> tuple[tuple[Option, ...], ...]:
        """Per block, its ZeRO stages."""
        fixed, states = dict(self.allowed.fixed_zero), self.costed.states[self.option]

        def options(body: str, allowed: Choice) -> tuple[Option, ...]:
            open_ = (fixed[body],) if body in fixed else allowed[1]
            return tuple(
                Option(state.parameters_bytes + state.optimizer_bytes, state.gradients_bytes, 0.0, state.gather_bytes, zero)
                for zero, state in states[body].items() if zero in open_
            )

        return self._of_each(options)

    def _of_each(self, options: Callable[[str, Choice], tuple[Option, ...]]) -> tuple[tuple[Option, ...], ...]:
        """Per block, what its body has under what it is allowed; of those that have the same, one tuple."""
        keys = [(block.body, self.allowed.of_block(index)) for index, block in enumerate(self.costed.graph.blocks)]
        known = {key: options(*key) for key in dict.fromkeys(keys)}
        return tuple(known[key] for key in keys)

    @cached_property
    def least_crossing(self) -> int:
        """Bytes of a micro-batch over any cut, at least."""
        return min(self.costed.crossing_bytes[self.option].values(), default=0)

    def received(self, cut: int) -> int:
        """Bytes of a micro-batch that the block after a cut keeps and a receive buffer too."""
        return self.costed.kept_twice(self.option, cut, split=self.allowed.split)

    @cached_property
    def most_received(self) -> int:
        """Of them, what the block after the cut keeps anyway, at most."""
        return max((self.received(cut) for cut in range(1, self.count)), default=0)

    @property
    def possible(self) -> bool:
        """Whether every block has a choice."""
        return all(self.levels) and all(self.stages)

    def least_of_blocks(self, live: float, begun: float, waiting: float = 0.0) -> Floats:
        """Per block, the least that it adds to a stage with so many live micro-batches, of which so many wait for the weight
        part of their backward passes, and part of its gradients, transients left out."""
        return _cheapest(self.levels, live, waiting, NEVER) + _cheapest(self.stages, begun, 0.0, NEVER)

    @cached_property
    def least_sum(self) -> float:
        """The least that all blocks keep together, each with one live micro-batch and its gradients."""
        return float(self.least_of_blocks(1.0, 1.0).sum())

    @cached_property
    def least_apart(self) -> float:
        """The same, each with one of both only."""
        return max(float(self.least_of_blocks(*counts).sum()) for counts in ((1.0, 0.0), (0.0, 1.0)))

    @cached_property
    def least_transient(self) -> float:
        """No stage has less of it."""
        return min(min(choice.transient for choice in block) for block in self.levels)

    def activations(self, live: float, waiting: float = 0.0, share: float = 1.0) -> Floats:
        """[first, last]: the least of constants, activations and ``share`` of the largest peak; infinite where empty."""
        return self._least(self.levels, live, waiting, share)

    def states(self, begun: float, share: float = 1.0) -> Floats:
        """[first, last]: the least of the state, part of the gradients, and ``share`` of the largest gathered share; infinite
        where empty."""
        return self._least(self.stages, begun, 0.0, share)

    def _least(self, blocks: Sequence[Sequence[Option]], times: float, waiting: float, share: float) -> Floats:
        best = np.full((self.count + 1, self.count + 1), np.inf)
        for threshold in _thresholds(blocks):
            total = _ranges(_cheapest(blocks, times, waiting, threshold)) + share * threshold
            np.minimum(best, np.where(total < NEVER / 2, total, np.inf), out=best)
        return best

    def decided(self, stage: StagePlan) -> tuple[list[Option], list[Option]]:
        """The levels and the ZeRO stages that the blocks of a stage have."""
        pairs = list(enumerate(stage.decisions, stage.first))
        levels = [next(c for c in self.levels[index] if c.decision == decision.recompute) for index, decision in pairs]
        return levels, [next(c for c in self.stages[index] if c.decision == decision.zero) for index, decision in pairs]

    def choose(
        self, first: int, last: int, live: float, begun: float, waiting: float = 0.0, share: float = 1.0
    ) -> tuple[BlockDecision, ...]:
        """Decisions of the blocks of one stage that need what :meth:`activations` and :meth:`states` say together."""
        levels = _chosen(self.levels[first:last], live, waiting, share)
        stages = _chosen(self.stages[first:last], begun, 0.0, share)
        return tuple(BlockDecision(zero, level) for zero, level in zip(stages, levels, strict=True))  # type: ignore[arg-type]


def _thresholds(blocks: Sequence[Sequence[Option]]) -> list[float]:
    return sorted({float(choice.transient) for block in _distinct(blocks).values() for choice in block})


def _distinct(blocks: Sequence[Sequence[Option]]) -> dict[int, Sequence[Option]]:
    """By identity: to compare tuples of options takes longer than to look at them."""
    return {id(block): block for block in blocks}


def _cheapest(blocks: Sequence[Sequence[Option]], times: float, waiting: float, threshold: float) -> Floats:
    """Per block, the least bytes among the choices whose transient is at most ``threshold``."""
    known = {
        key: min((choice.held(times, waiting) for choice in block if choice.transient <= threshold), default=NEVER)
        for key, block in _distinct(blocks).items()
    }
    return np.array([known[id(block)] for block in blocks])


def _ranges(values: Floats) -> Floats:
    """[first, last]: the sums of all ranges that are not empty; huge elsewhere."""
    # Excluded choices would drown the other bytes where many add up: they are counted apart.
    never = values >= NEVER
    ends = np.concatenate([[0.0], np.cumsum(np.where(never, 0.0, values))])
    excluded = np.concatenate([[0], np.cumsum(never)])
    sums = ends[None, :] - ends[:, None] + NEVER * (excluded[None, :] - excluded[:, None])
    return np.where(np.triu(np.ones(sums.shape, dtype=bool), 1), sums, 4 * NEVER)


def _chosen(blocks: Sequence[Sequence[Option]], times: float, waiting: float, share: float) -> list[object]:
    """The best choice of each block of one range."""
    best: tuple[float, list[object]] = (np.inf, [])
    for threshold in _thresholds(blocks):
        picks = [_pick(block, times, waiting, threshold) for block in blocks]
        size = sum(bytes_ for bytes_, _ in picks) + share * threshold
        if size < best[0]:
            best = size, [decision for _, decision in picks]
    return best[1]


def _pick(block: Sequence[Option], times: float, waiting: float, threshold: float) -> tuple[float, object]:
    within = [(choice.held(times, waiting), at) for at, choice in enumerate(block) if choice.transient <= threshold]
    if not within:
        return NEVER, None
    size, at = min(within)
    return size, block[at].decision
