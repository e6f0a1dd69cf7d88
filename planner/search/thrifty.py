"""The plan of least memory for one chain of one candidate, and a bound that no plan of it is below.

Memory of a rank: the sum over its stages of what their blocks keep, the worst instant of the schedule, and the largest
transient of one stage (:mod:`planner.evaluate.memory`). With one stage a rank the largest rank is made as small as
possible by dynamic programming over the cuts, exactly. With several stages a rank the ranks are weighted: the weighted mean
of the ranks is never above the largest, it is a sum over stages, and dynamic programming minimises it exactly. The weights
are raised where a rank is largest (subgradient steps); the plans met on the way are evaluated. What is left open is closed
by an integer program, where there is time (:mod:`planner.search.thrifty_integers`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cost_models.live import LIVE
from planner.evaluate import own_bytes, receive_buffer_bytes
from planner.ir.plan import BlockDecision, StagePlan
from planner.search.ranges import Ranges
from planner.search.shape import Shape
from planner.search.tables import Floats

STEPS = 12
"""Subgradient steps."""
Answer = tuple[float, tuple[StagePlan, ...] | None]
"""A lower bound of the largest rank's bytes, reserve left out, and stages that come near it."""


@dataclass(frozen=True)
class Thrift:
    """One chain under one candidate's shape."""

    ranges: Ranges
    shape: Shape

    @cached_property
    def mean_counts(self) -> Floats:
        """[3, stages]: a convex combination of what the rank's instants say, none of which is the worst for all."""
        counts = np.zeros((3, self.shape.stages))
        for rank in range(self.shape.pipeline):
            counts[:, self.shape.owned(rank)] = self.shape.instants(rank).mean(axis=0)
        return counts

    def quick_bound(self) -> float:
        """A lower bound of the largest rank: ranks are weighted by how few blocks they could hold, and each block lies where
        it weighs least."""
        counts = self.mean_counts
        distinct, of_stage = np.unique(counts.T, axis=0, return_inverse=True)
        sizes = np.array([self.ranges.least_of_blocks(*there) for there in distinct.tolist()])
        ranks = self.shape.ranks
        totals = np.zeros(self.shape.pipeline)
        np.add.at(totals, ranks, sizes.sum(axis=1)[of_stage] / self.shape.virtual)
        weights = 1.0 / np.maximum(totals, 1.0)
        weights /= weights.sum()
        least = np.full(sizes.shape[1], np.inf)
        for at in range(len(distinct)):
            weight = weights[ranks[of_stage == at]].min()
            np.minimum(least, weight * sizes[at], out=least)
        beside = float((weights[ranks] * counts[LIVE] * self._least_beside()).sum())
        return float(least.sum()) + beside + self.ranges.least_transient + self._batch_bytes

    def _least_beside(self) -> Floats:
        """[stages]: the least that a live micro-batch has beside what blocks keep: the context's values and what is sent on,
        less what lies in receive buffers."""
        sent, received = self.ranges.least_crossing, self.ranges.most_received
        stages = np.arange(self.shape.stages)
        inner = np.where(stages < self.shape.stages - 1, sent, 0) - np.where(stages > 0, received, 0)
        return np.asarray(inner + self.ranges.costed.context_bytes, dtype=float)

    def solve(self, enough: float) -> Answer:
        """The least memory of the largest rank; stops early where it is proven to exceed ``enough``."""
        if self.shape.virtual == 1:
            return self._exact()
        return self._weighted(enough)

    @property
    def _batch_bytes(self) -> int:
        return self.shape.microbatches * self.ranges.costed.batch_bytes

    def _exact(self) -> Answer:
        """One stage a rank: the largest rank is as small as it can be."""
        shape, count = self.shape, self.ranges.count
        state = self.ranges.states(1.0)
        lives = [float(shape.instants(rank)[:, LIVE].max()) for rank in range(shape.pipeline)]
        kept = {live: self.ranges.activations(live) for live in sorted(set(lives))}
        tables = [state + kept[live] + self._around(stage, live) for stage, live in enumerate(lives)]
        reached, cuts = np.full(count + 1, np.inf), []
        reached[0] = 0.0
        for table in tables:
            through = np.maximum(reached[:, None], table)
            cuts.append(np.argmin(through, axis=0))
            reached = through.min(axis=0)
        if not math.isfinite(reached[count]):
            return math.inf, None
        counts = np.array([lives, np.ones(len(lives)), np.zeros(len(lives))])
        return float(reached[count]) + self._batch_bytes, self._stages(self._bounds(cuts), counts, 1.0)

    def _weighted(self, enough: float) -> Answer:
        shape = self.shape
        ranks = shape.ranks
        share = 1.0 / shape.virtual
        counts = self.mean_counts
        there = [tuple(each) for each in counts.T.tolist()]
        kept = {each: self.ranges.activations(*each, share) for each in {(live, waiting) for live, _, waiting in there}}
        states = {begun: self.ranges.states(begun, share) for begun in {begun for _, begun, _ in there}}
        tables = [
            states[begun] + kept[live, waiting] + self._around(stage, live)
            for stage, (live, begun, waiting) in enumerate(there)
        ]
        weights = np.full(shape.pipeline, 1.0 / shape.pipeline)
        best, evenest, least = 0.0, [0], math.inf
        for step in range(STEPS):
            value, cuts = _shortest([weights[ranks[stage]] * table for stage, table in enumerate(tables)])
            if cuts is None:
                return math.inf, None
            best = max(best, value + self._batch_bytes)
            bounds = self._bounds(cuts)
            held = [table[bounds[stage], bounds[stage + 1]] for stage, table in enumerate(tables)]
            sizes = np.bincount(ranks, held, shape.pipeline)
            if sizes.max() < least:
                evenest, least = bounds, float(sizes.max())
            if best > enough or least <= value + 1:
                break
            weights = weights * (sizes / sizes.mean()) ** (2.0 / (1 + step))
            weights /= weights.sum()
        return best, self._stages(evenest, counts, share)

    def _around(self, stage: int, live: float) -> Floats:
        """[first, last]: bytes of a stage beside its blocks: receive buffers, and of each live micro-batch the context and
        what is sent on, less what lies in receive buffers."""
        costed, cuts = self.ranges.costed, range(self.ranges.count + 1)
        crossing = costed.crossing_bytes[self.ranges.option]
        sizes = np.array([crossing.get(cut, 0) if cut else 0 for cut in cuts], dtype=float)
        received = np.array([self.ranges.received(cut) for cut in cuts], dtype=float)
        inward, outward = self.buffers(stage)
        after = (outward + live) * sizes + live * costed.context_bytes
        return np.asarray((inward * sizes - live * received)[:, None] + after[None, :])

    def buffers(self, stage: int) -> tuple[int, int]:
        """How many messages a stage's receive buffers hold: of its input, and gradients of its output."""
        shape = self.shape
        inward, outward = (
            receive_buffer_bytes(shape.schedule, stage, shape.stages, shape.microbatches, *pair, shape.virtual)
            for pair in ((1, 0), (0, 1))
        )
        received = stage > 0 and shape.rank_of(stage - 1) != shape.rank_of(stage)
        returned = stage < shape.stages - 1 and shape.rank_of(stage + 1) != shape.rank_of(stage)
        return inward if received else 0, outward if returned else 0

    def sizes(self, stages: Sequence[StagePlan]) -> Floats:
        """Bytes of every rank under these stages, reserve left out, as the evaluator counts them."""
        # What an instant counts, by stage: a live micro-batch, gradients, a micro-batch that waits.
        always, each, gradients, waiting, tops, lasting = (np.zeros(self.shape.stages) for _ in range(6))
        states_of, blocks = self.ranges.costed.states[self.ranges.option], self.ranges.costed.graph.blocks
        crossing = self.ranges.costed.crossing_bytes[self.ranges.option]
        for stage in stages:
            levels, states = self.ranges.decided(stage)
            inward, outward = self.buffers(stage.index)
            before, after = (crossing.get(cut, 0) if cut else 0 for cut in (stage.first, stage.last))
            always[stage.index] = sum(c.always for c in (*levels, *states)) + inward * before + outward * after
            gradients[stage.index] = sum(choice.each for choice in states)
            waiting[stage.index] = sum(choice.waiting for choice in levels)
            kept = own_bytes(int(sum(choice.each for choice in levels)) + after, before, self.ranges.received(stage.first))
            each[stage.index] = kept + self.ranges.costed.context_bytes
            tops[stage.index] = max(c.transient for c in levels) + max(c.transient for c in states)
            lasting[stage.index] = max(
                states_of[blocks[at].body][decision.zero].lasting_bytes
                for at, decision in enumerate(stage.decisions, stage.first)
            )
        result = np.zeros(self.shape.pipeline)
        for rank in range(self.shape.pipeline):
            owned, found = self.shape.owned(rank), self.shape.instants(rank)
            most = float(np.einsum("iks,ks->i", found, np.array([each, gradients, waiting])[:, owned]).max())
            worst = owned[int((tops - lasting)[owned].argmax())]
            beside = lasting[owned].sum() - lasting[worst]
            result[rank] = always[owned].sum() + most + tops[worst] + beside + self._batch_bytes
        return result

    def _bounds(self, cuts: Sequence[Floats]) -> list[int]:
        """Where the stages begin, and the end, from the best beginning of each stage by its end."""
        bounds = [self.ranges.count]
        for cut in reversed(cuts):
            bounds.append(int(cut[bounds[-1]]))
        return bounds[::-1]

    def _stages(self, bounds: Sequence[int], counts: Floats, share: float) -> tuple[StagePlan, ...]:
        decisions: list[tuple[BlockDecision, ...]] = [
            self.ranges.choose(bounds[stage], bounds[stage + 1], live, begun, waiting, share)
            for stage, (live, begun, waiting) in enumerate(counts.T.tolist())
        ]
        return tuple(StagePlan(i, bounds[i], bounds[i + 1], chosen) for i, chosen in enumerate(decisions))


def _shortest(tables: Sequence[Floats]) -> tuple[float, list[Floats] | None]:
    """The least sum over stages that follow one another from the first block to the last; where each begins, by its end."""
    reached, cuts = np.full(len(tables[0]), np.inf), []
    reached[0] = 0.0
    for table in tables:
        through = reached[:, None] + table
        cuts.append(np.argmin(through, axis=0))
        reached = through.min(axis=0)
    return float(reached[-1]), cuts if math.isfinite(reached[-1]) else None
