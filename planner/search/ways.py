"""All ways in which a rank can lay blocks on its stages and choose for them, those that may be part of a step quicker than a
limit: stage by stage, as far as the others leave bytes and seconds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.search.greedy import Numbers, Shares
from planner.search.linear import Floats, Indices
from planner.search.stream import Stream
from planner.search.tables import pareto

MOST_WAYS, MOST_NUMBERS, INSTANTS = 50_000, 20_000_000, 10
"""Ranks that have more ways while not all their stages have chosen are not told apart, nor are those of which more would have
to be tried at once: as many numbers as instants, or as so many of them, for each; of a stage's options, as many as tell what
they hold."""
PATIENCE = 500
"""Options or ways that are held against all others; where hardly one was beaten by these, no more are."""
ROUNDED = 1e-9
"""Sums are rounded by less than this part."""
Range = tuple[int, int]
"""The fewest blocks and the most."""


@dataclass(frozen=True)
class Ways:
    """What a rank takes. ``counts`` [ways, portions, choices]; ``blocks`` [ways]; ``passes_s`` [ways, virtual stages, 3], of a
    micro-batch; ``tails_s`` [ways], once a step. ``split``: whether a backward pass is two actions."""

    counts: Numbers
    blocks: Indices
    passes_s: Floats
    tails_s: Floats
    split: bool

    def part(self, which: NDArray[np.bool_] | Indices) -> Ways:
        return Ways(self.counts[which], self.blocks[which], self.passes_s[which], self.tails_s[which], self.split)

    def without_beaten(self) -> Ways:
        """Less those that another of as many blocks is as quick as in every action and once a step."""
        actions_s = _actions(self.passes_s, self.split)
        columns = np.column_stack([actions_s.reshape(len(self.blocks), math.prod(actions_s.shape[1:])), self.tails_s])
        return self.part(_best(self.blocks, columns))


def _actions(passes_s: Floats, split: bool) -> Floats:
    """[..., 3 or 2]: seconds of what a schedule has as one action."""
    return passes_s if split else np.stack([passes_s[..., 0], passes_s[..., 1] + passes_s[..., 2]], axis=-1)


def _best(blocks: Indices, columns: Floats) -> Indices:
    """Less those that another of as many blocks beats or equals in every column, as far as that is soon found out."""
    kept = [members[pareto(columns[members], PATIENCE)] for members in (np.flatnonzero(blocks == n) for n in np.unique(blocks))]
    return np.sort(np.concatenate(kept)) if kept else np.zeros(0, dtype=np.int64)


def ways_of(
    shares: Shares, stream: Stream, rank: int, limit_s: float, ranges: Sequence[Range], blocks: Range
) -> Ways | None:
    """Those that fit and take no longer than the limit with all the rank does in a step, with so many blocks of each portion
    (``ranges``) and of all of them (``blocks``); none that another beats. None where there are too many."""
    slots = range(shares.shape.virtual)
    if any(_number(shares, rank, slot, ranges) * shares.sizes[rank].size > MOST_NUMBERS for slot in slots):
        return None
    every = [_options(shares, stream, rank, slot, ranges) for slot in slots]
    room = shares.capacity_bytes[rank] + ROUNDED * shares.shape.capacity_bytes
    # What fits nowhere is quickly found, and mostly leaves few to set against each other.
    options = [option.without_beaten() for option in _Joined(every, room, limit_s * (1 + ROUNDED), blocks).possible]
    joined = _Joined(options, room, limit_s * (1 + ROUNDED), blocks).ways
    if joined is None:
        return None
    counts, at = np.zeros((len(joined), *shares.sizes.shape[2:]), dtype=np.int64), np.full(len(joined), rank)
    for option, chosen in zip(options, joined.T, strict=True):
        counts[:, option.portions] = option.counts[chosen]
    fits = shares.excess(counts, at) <= 0
    counts, at = counts[fits], at[fits]
    number = counts[:, [place for place, portion in enumerate(shares.portions[rank]) if portion.kind == 0]].sum(axis=(1, 2))
    return Ways(counts, number, *shares.seconds(stream, counts, at), shares.shape.splits_backward).without_beaten()


@dataclass(frozen=True)
class _Options:
    """What one stage of a rank can have. ``portions``: which of the rank's; ``counts`` [options, portions, choices]; ``blocks``
    [options]; ``held`` [options, instants]: bytes; ``took`` [options]: seconds of a step, at least; ``columns`` [options,
    columns]: all that one can be worse in."""

    portions: Indices
    counts: Numbers
    blocks: Indices
    held: Floats
    took: Floats
    columns: Floats

    def part(self, which: Indices) -> _Options:
        return replace(
            self, counts=self.counts[which], blocks=self.blocks[which], held=self.held[which], took=self.took[which],
            columns=self.columns[which],
        )

    def without_beaten(self) -> _Options:
        """Less those that another of as many blocks beats."""
        return self.part(_best(self.blocks, self.columns))

    def least(self, size: int) -> tuple[Floats, Floats]:
        """Bytes [size, instants] and seconds [size] of so many blocks, at least; without end where no option has them."""
        held, took = np.full((size, self.held.shape[1]), np.inf), np.full(size, np.inf)
        for number in np.unique(self.blocks[self.blocks < size]):
            mine = self.blocks == number
            held[number], took[number] = self.held[mine].min(axis=0), self.took[mine].min()
        return held, took


def _options(shares: Shares, stream: Stream, rank: int, slot: int, ranges: Sequence[Range]) -> _Options:
    """Those of a stage."""
    mine = np.array([at for at, portion in enumerate(shares.portions[rank]) if portion.slot == slot])
    runs = [_dealt_both(shares, rank, int(at), ranges) for at in mine[::2]]
    chosen = np.array(list(itertools.product(*(range(len(run)) for run in runs)))).reshape(-1, len(runs))
    counts = np.concatenate([run[chosen[:, at]] for at, run in enumerate(runs)], axis=1)
    whole = np.zeros((len(counts), *shares.sizes.shape[2:]), dtype=np.int64)
    whole[:, mine] = counts
    ranks = np.full(len(counts), rank)
    compute, traffic = (each[:, slot] for each in shares.passes(whole, ranks))
    stage = shares.shape.owned(rank)[slot]
    stopped_s = stream.crossings(shares.shape, shares.bounds).stopped_s[stage]
    passes_s = stream.passes_s(compute, traffic, np.full(len(counts), stopped_s))
    once_s, optimizer_s = shares.once(whole, ranks)
    took = shares.shape.microbatches * passes_s.sum(axis=1) + stream.gradients.floor * once_s + optimizer_s
    # Gradients may hide behind what is computed: then more of it can be the better.
    hides = compute[:, 1:].sum(axis=1) * (-1.0 if stream.gradients.hidden > 0 else 0.0)
    held, transients = shares.loads(whole, ranks), [each[:, slot] for each in shares.transients(whole, ranks)]
    columns = np.column_stack([
        _actions(passes_s, shares.shape.splits_backward), once_s, optimizer_s, hides, held, *transients
    ])
    return _Options(mine, counts, counts[:, ::2].sum(axis=(1, 2)), held, took, columns)


def _number(shares: Shares, rank: int, slot: int, ranges: Sequence[Range]) -> int:
    """How many options a stage has."""
    portions = shares.portions[rank]
    mine = [at for at, portion in enumerate(portions) if portion.slot == slot]
    return math.prod(
        sum(
            math.prod(math.comb(blocks + len(portion.table.names) - 1, blocks) for portion in portions[at : at + 2])
            for blocks in range(ranges[at][0], ranges[at][1] + 1)
        )
        for at in mine[::2]
    )


def _dealt_both(shares: Shares, rank: int, at: int, ranges: Sequence[Range]) -> Numbers:
    """[cases, 2, choices]: all choices of recomputation and of ZeRO stages of the blocks of one run on one stage."""
    width, pair = shares.sizes.shape[3], shares.portions[rank][at : at + 2]
    found = []
    for number in range(ranges[at][0], ranges[at][1] + 1):
        levels, zeros = (_dealt(number, len(portion.table.names), width) for portion in pair)
        both = np.indices((len(levels), len(zeros))).reshape(2, -1)
        found.append(np.stack([levels[both[0]], zeros[both[1]]], axis=1))
    return np.concatenate(found)


def _dealt(blocks: int, options: int, width: int) -> Numbers:
    """[ways, width]: all ways to deal blocks to the first ``options`` of the columns."""
    dealt = itertools.combinations_with_replacement(range(options), blocks)
    return np.array([np.bincount(each, minlength=width) for each in dealt], dtype=np.int64).reshape(-1, width)


@dataclass(frozen=True)
class _Joined:
    """One option of every stage, together within ``room`` bytes [instants] and ``limit_s``, with so many ``blocks``."""

    options: Sequence[_Options]
    room: Floats
    limit_s: float
    blocks: Range

    @cached_property
    def ways(self) -> NDArray[np.int64] | None:
        """[ways, stages]; None where there are too many."""
        instants = self.options[0].held.shape[1]
        ways, used = np.zeros((1, 0), dtype=np.int64), np.zeros(1, dtype=np.int64)
        held, took = np.zeros((1, instants)), np.zeros(1)
        for at, option in enumerate(self.options):
            if len(ways) * len(option.blocks) * max(instants, INSTANTS) > MOST_NUMBERS:
                return None
            rest_bytes, rest_s = self._rest[at]
            numbers = np.add.outer(used, option.blocks).ravel()
            few = np.flatnonzero(numbers <= self.blocks[1])
            one, other = few // max(len(option.blocks), 1), few % max(len(option.blocks), 1)
            used = numbers[few]
            seconds = took[one] + option.took[other]
            quick = seconds + rest_s[used] <= self.limit_s
            one, other, used, took = one[quick], other[quick], used[quick], seconds[quick]
            held = held[one] + option.held[other]
            fit = (held + rest_bytes[used] <= self.room).all(axis=1)
            ways, used, held, took = np.column_stack([ways[one], other])[fit], used[fit], held[fit], took[fit]
            if len(ways) > MOST_WAYS:
                return None
        return ways

    @property
    def possible(self) -> list[_Options]:
        """Of every stage, the options that go with anything of the others."""
        (held, took), found = self._nothing, list[_Options]()
        for every, (rest_bytes, rest_s) in zip(self.options, self._rest, strict=True):
            option = every.part(np.flatnonzero(every.blocks <= self.blocks[1]))
            # Of all other stages, by the blocks of this one.
            others_bytes, others_s = _least_sums(held, took, rest_bytes, rest_s)
            fits = option.took + others_s[option.blocks] <= self.limit_s
            fits &= (option.held + others_bytes[option.blocks] <= self.room).all(axis=1)
            found.append(option.part(np.flatnonzero(fits)))
            held, took = _after(held, took, *option.least(len(took)))
        return found

    @property
    def _nothing(self) -> tuple[Floats, Floats]:
        """Bytes [blocks, instants] and seconds [blocks] of no stage: it has no blocks."""
        none = np.arange(self.blocks[1] + 1) == 0
        instants = self.options[0].held.shape[1]
        return np.where(none[:, None], np.zeros(instants), np.inf), np.where(none, 0.0, np.inf)

    @cached_property
    def _rest(self) -> list[tuple[Floats, Floats]]:
        """Behind each stage, by the blocks up to it: bytes [blocks, instants] and seconds [blocks] of the stages that follow,
        at least; without end where the number is none of the rank's."""
        least, most = self.blocks
        inside = (np.arange(most + 1) >= least) & (np.arange(most + 1) <= most)
        instants = self.options[0].held.shape[1]
        found = [(np.where(inside[:, None], np.zeros(instants), np.inf), np.where(inside, 0.0, np.inf))]
        for option in reversed(self.options[1:]):
            found.append(_least_sums(*option.least(most + 1), *found[-1]))
        return found[::-1]


def _least_sums(held: Floats, took: Floats, rest_bytes: Floats, rest_s: Floats) -> tuple[Floats, Floats]:
    """By the blocks before them: the least of something of any number of blocks, and of what has those and these before it."""
    bytes_, seconds = np.full_like(held, np.inf), np.full_like(took, np.inf)
    for number in np.flatnonzero(np.isfinite(took)):
        before = slice(0, len(took) - int(number))
        bytes_[before] = np.minimum(bytes_[before], rest_bytes[number:] + held[number])
        seconds[before] = np.minimum(seconds[before], rest_s[number:] + took[number])
    return bytes_, seconds


def _after(held: Floats, took: Floats, own_bytes: Floats, own_s: Floats) -> tuple[Floats, Floats]:
    """By the blocks in all: the least of two together."""
    bytes_, seconds = np.full_like(held, np.inf), np.full_like(took, np.inf)
    for number in np.flatnonzero(np.isfinite(own_s)):
        behind = slice(int(number), len(took))
        bytes_[behind] = np.minimum(bytes_[behind], held[: len(took) - number] + own_bytes[number])
        seconds[behind] = np.minimum(seconds[behind], took[: len(took) - number] + own_s[number])
    return bytes_, seconds
