"""Plans between cuts: filled, between cuts near them as long as that is quicker, then polished."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.search.chain import Chain
from planner.search.greedy import Shares
from planner.search.patterns import Patterns
from planner.search.polish import SHORTER, Polish
from planner.search.shape import Shape

Cuts = tuple[int, ...]
"""Where stages begin, and the last one ends."""
POLISHED, WORTH_POLISHING = 2, 1.06
"""So many filled plans are polished, the most promising ones; where they are no slower than this many times the target.
(Polishing makes a step up to 5% quicker.)"""
TRIED, WORTH_MOVING = 8, 1.02
"""Of moves of a block between stages, so many are filled at a time, those of the least bounds; where the plan that they begin
with is no slower than this many times the target."""


@dataclass(frozen=True)
class Cutter:
    """Makes plans of a chain on a shape; ``patterns`` of its chains."""

    chain: Chain
    shape: Shape
    patterns: Patterns

    def quickest(self, cuts: Sequence[Cuts], limit_s: float, *, moving: int) -> tuple[Polish, Cuts] | None:
        """What makes the shortest step between one of the cuts, or near the best of them where ``moving`` blocks may simulate
        so many actions at a time, each rank within its memory; None where some rank cannot be under any."""
        begun = self._filled(cuts)
        if moving and begun and self.patterns.possible and begun[0][0].step_s <= WORTH_MOVING * limit_s:
            begun = [self._moved(begun[0], moving), *begun]
        for polish, _ in begun[:POLISHED] if math.isfinite(limit_s) else ():  # What comes first is seldom what stays.
            if polish.step_s <= WORTH_POLISHING * limit_s:
                polish.go()
        return min(begun[:POLISHED], key=lambda pair: pair[0].step_s, default=None)

    def _filled(self, cuts: Sequence[Cuts]) -> list[tuple[Polish, Cuts]]:
        """Between each of the cuts, those of the shortest steps first."""
        begun: list[tuple[Polish, Cuts]] = []
        for each in cuts:
            shares = Shares.of(self.chain, self.shape, each)
            for late in (False, True) if self.shape.virtual > 1 else (False,):
                counts = shares.fill(late=late)
                if counts is not None:
                    begun.append((Polish(shares, self.patterns.stream, counts), each))
        Polish.simulate([polish for polish, _ in begun])
        return sorted(begun, key=lambda pair: pair[0].step_s)

    def _moved(self, begun: tuple[Polish, Cuts], most: int) -> tuple[Polish, Cuts]:
        """After moving one block at a time from a stage to another, as long as that makes a shorter step."""
        for best in self._ever_shorter(begun, most):
            begun = best
        return begun

    def _ever_shorter(self, begun: tuple[Polish, Cuts], most: int) -> Iterator[tuple[Polish, Cuts]]:
        while True:
            step_s, near = begun[0].step_s, self._near(self.patterns.counts_of(begun[1]), most)
            if not len(near):
                return
            seconds = self.patterns.seconds(near, step_s)
            order = np.argsort(seconds, kind="stable")[:TRIED]
            found = self._filled([self.patterns.cuts(near[at]) for at in order if seconds[at] < step_s])
            if not found or found[0][0].step_s >= step_s * (1 - SHORTER):
                return
            begun = found[0]
            yield begun

    def _near(self, counts: NDArray[np.int64], most: int) -> NDArray[np.int64]:
        """[moves, virtual stages]: blocks of the long run on each stage, one of them elsewhere."""
        stages = len(counts)
        if stages**2 * self.shape.actions > most:
            return np.zeros((0, stages), dtype=np.int64)
        source, goal = np.nonzero(~np.eye(stages, dtype=bool) & (counts > self.patterns.fewest)[:, None])
        moves = np.arange(len(source))
        near = np.tile(counts, (len(source), 1))
        near[moves, source] -= 1
        near[moves, goal] += 1
        return near
