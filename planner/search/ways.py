"""All ways in which a rank can choose for its blocks, those that may be part of a step quicker than a limit."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.search.greedy import Numbers, Portion, Shares
from planner.search.linear import Floats, Indices
from planner.search.stream import Stream
from planner.search.tables import ONCE, OPTIMIZER, PASSES, pareto

MOST_WAYS = 50_000
"""Ranks that have more ways while not all their blocks have chosen are not told apart."""
ROUNDED = 1e-9
"""Sums are rounded by less than this part."""


@dataclass(frozen=True)
class Ways:
    """What a rank takes. ``counts`` [ways, portions, choices]; ``passes_s`` [ways, virtual stages, 3], of a micro-batch;
    ``tails_s`` [ways], once a step. ``split``: whether a backward pass is two actions."""

    counts: Numbers
    passes_s: Floats
    tails_s: Floats
    split: bool

    def part(self, which: NDArray[np.bool_] | Indices) -> Ways:
        return Ways(self.counts[which], self.passes_s[which], self.tails_s[which], self.split)

    def without_beaten(self) -> Ways:
        """Less those that another is as quick as in every action and once a step."""
        passes_s = self.passes_s
        if not len(passes_s):
            return self
        if not self.split:
            passes_s = np.stack([passes_s[..., 0], passes_s[..., 1] + passes_s[..., 2]], axis=-1)
        return self.part(pareto(np.column_stack([passes_s.reshape(len(passes_s), -1), self.tails_s])))


def ways_of(shares: Shares, stream: Stream, rank: int, limit_s: float) -> Ways | None:
    """Those that fit and take no longer than the limit with all the rank does in a step; None where there are too many."""
    found = _that_fit(shares, stream, rank, limit_s)
    if found is None:
        return None
    found = found[shares.excess(found, np.full(len(found), rank)) <= 0]
    return Ways(found, *shares.seconds(stream, found, np.full(len(found), rank)), shares.shape.splits_backward)


def _that_fit(shares: Shares, stream: Stream, rank: int, limit_s: float) -> Numbers | None:
    """[ways, portions, choices]: portion by portion, as far as the others leave bytes and seconds, transients aside."""
    mine, choices = shares.portions[rank], shares.sizes.shape[3]
    options = [_dealt(portion.blocks, len(portion.table.names), choices) for portion in mine]
    # [choices of the portion, instants] bytes and [choices of the portion] seconds.
    held = [each @ shares.sizes[rank, :, at].T for at, each in enumerate(options)]
    took = [
        each[:, : len(portion.table.names)] @ _least_s(portion, stream, shares)
        for portion, each in zip(mine, options, strict=True)
    ]
    bytes_left = shares.capacity_bytes[rank] * (1 + ROUNDED) - sum(each.min(axis=0) for each in held)
    seconds_left = limit_s * (1 + ROUNDED) - sum(each.min() for each in took)
    ways, more_bytes, more_s = np.zeros((1, 0), dtype=np.int64), np.zeros((1, len(bytes_left))), np.zeros(1)
    for size, seconds in zip(held, took, strict=True):
        if len(ways) * len(seconds) > 10 * MOST_WAYS:
            return None
        more_bytes = (more_bytes[:, None] + (size - size.min(axis=0))[None]).reshape(-1, len(bytes_left))
        more_s = np.add.outer(more_s, seconds - seconds.min()).ravel()
        ways = np.column_stack([np.repeat(ways, len(seconds), axis=0), np.tile(np.arange(len(seconds)), len(ways))])
        fit = (more_bytes <= bytes_left).all(axis=1) & (more_s <= seconds_left)
        ways, more_bytes, more_s = ways[fit], more_bytes[fit], more_s[fit]
        if len(ways) > MOST_WAYS:
            return None
    found = np.zeros((len(ways), shares.sizes.shape[2], choices), dtype=np.int64)
    for at, each in enumerate(options):
        found[:, at] = each[ways[:, at]]
    return found


def _least_s(portion: Portion, stream: Stream, shares: Shares) -> Floats:
    """[choices]: seconds a step of one block, at least."""
    sums, microbatches = portion.table.sums, shares.shape.microbatches
    if portion.kind == 0:
        return np.asarray(microbatches * sums[:, :PASSES].sum(axis=1))
    once_s = stream.gradients.floor * sums[:, ONCE] + sums[:, OPTIMIZER]
    return np.asarray(microbatches * stream.gathers.floor * sums[:, :PASSES].sum(axis=1) + once_s)


def _dealt(blocks: int, options: int, width: int) -> Numbers:
    """[ways, width]: all ways to deal blocks to the first ``options`` of the columns."""
    dealt = itertools.combinations_with_replacement(range(options), blocks)
    return np.array([np.bincount(each, minlength=width) for each in dealt], dtype=np.int64).reshape(-1, width)
