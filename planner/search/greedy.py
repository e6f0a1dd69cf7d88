"""A plan without solving: given cuts, every block begins with its quickest choices, and each rank that does not fit trades
the least time for the most bytes until it does. (:mod:`polish` then looks which stages of a rank had better be the slow
ones.)"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cost_models.live import LIVE, WAITING
from planner.evaluate import last_passes, receive_buffer_bytes
from planner.ir.plan import BlockDecision, StagePlan
from planner.search.chain import Chain, run_at
from planner.search.linear import Floats, Indices
from planner.search.shape import Shape
from planner.search.stream import Stream
from planner.search.tables import AT_TIMES, AT_WAIT, LASTING, ONCE, OPTIMIZER, PASSES, PEAK, PERSISTENT, Table

Numbers = NDArray[np.int64]
ALIKE = 1e-9
"""Prices that differ by no more than this part are alike."""
BISECTIONS = 30


def rounded_cuts(parts: Sequence[float], blocks: int) -> tuple[int, ...]:
    """Bounds of stages that hold as nearly ``parts`` blocks as whole blocks allow, one at least."""
    stages = len(parts)
    ends = np.rint(np.cumsum(parts) * (blocks / sum(parts))).astype(int)
    bounds = [0]
    for stage in range(stages):
        bounds.append(min(max(int(ends[stage]), bounds[-1] + 1), blocks - (stages - stage - 1)))
    return (*bounds[:-1], blocks)


def even_cuts(works: Sequence[float], stages: int) -> tuple[int, ...]:
    """Bounds of stages whose largest work is least, by bisection over that work."""
    low, high = max(max(works), sum(works) / stages), sum(works)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if _packed(works, stages, middle) else (middle, high)
    bounds = _packed(works, stages, high)
    assert bounds is not None
    return bounds


def _packed(works: Sequence[float], stages: int, most: float) -> tuple[int, ...] | None:
    """Fill each stage up to ``most`` work, but leave one block for each stage after it; None where blocks are left over."""
    bounds = [0]
    for stage in range(stages):
        at, filled = bounds[-1], 0.0
        while at < len(works) - (stages - stage - 1) and (at == bounds[-1] or filled + works[at] <= most * (1 + 1e-9)):
            filled += works[at]
            at += 1
        bounds.append(at)
    return tuple(bounds) if bounds[-1] == len(works) else None


@dataclass(frozen=True)
class Portion:
    """The blocks of one run on one stage of a rank, and one kind of choice: 0 recomputation, 1 ZeRO stage."""

    slot: int
    run: int
    kind: int
    table: Table
    blocks: int


@dataclass(frozen=True)
class Shares:
    """What ranks have between given cuts. Numbers of blocks by choice are [cases, portions, choices], each case of one of
    ``ranks`` [cases]; a rank's last portions and a portion's last choices are empty where others have more."""

    shape: Shape
    bounds: tuple[int, ...]
    portions: tuple[tuple[Portion, ...], ...]
    capacity_bytes: Floats
    """[ranks, instants]: what is left beside what does not depend on choices."""
    times: Floats
    """[ranks, instants, portions]: at an instant, so often a portion has what it has at times."""
    waits: Floats
    """[ranks, instants, portions]: micro-batches of it that wait for their weight part then."""

    @staticmethod
    def of(chain: Chain | Stream, shape: Shape, bounds: Sequence[int]) -> Shares:
        """Of all ranks."""
        portions = tuple(tuple(_portions(chain, shape, rank, bounds)) for rank in range(shape.pipeline))
        most, longest = max(map(len, portions)), max(len(shape.instants(rank)) for rank in range(shape.pipeline))
        times, waits = np.zeros((2, shape.pipeline, longest, most))
        capacity = np.zeros((shape.pipeline, longest))
        for rank, mine in enumerate(portions):
            found = shape.instants(rank)
            at = np.minimum(np.arange(longest), len(found) - 1)
            kinds, slots = [portion.kind for portion in mine], [portion.slot for portion in mine]
            times[rank, :, : len(mine)] = found[at][:, kinds, slots]
            waits[rank, :, : len(mine)] = found[at][:, WAITING, slots]
            capacity[rank] = shape.capacity_bytes - _around(chain, shape, rank, bounds)[at]
        return Shares(shape, tuple(bounds), portions, capacity, times, waits)

    @cached_property
    def _tables(self) -> Floats:
        """[ranks, portions, choices, 10]: a table's columns, not a number where there is no choice."""
        most = max(len(portion.table.names) for mine in self.portions for portion in mine)
        tables = np.full((*self.times.shape[::2], most, LASTING + 1), np.nan)
        for rank, mine in enumerate(self.portions):
            for at, portion in enumerate(mine):
                tables[rank, at, : len(portion.table.names)] = portion.table.columns
        return tables

    @cached_property
    def _columns(self) -> Floats:
        """The same, zero where there is no choice."""
        return np.nan_to_num(self._tables)

    @cached_property
    def cost_s(self) -> Floats:
        """[ranks, portions, choices]: seconds a step of one block, without end where there is no choice."""
        once_s = self._tables[..., ONCE] + self._tables[..., OPTIMIZER]
        cost_s = self.shape.microbatches * self._tables[..., :PASSES].sum(axis=-1) + once_s
        return np.where(np.isnan(cost_s), np.inf, cost_s)

    @cached_property
    def sizes(self) -> Floats:
        """[ranks, instants, portions, choices]: bytes of one block."""
        columns = self._columns[:, None]
        at_times = self.times[..., None] * columns[..., AT_TIMES] + self.waits[..., None] * columns[..., AT_WAIT]
        return np.asarray(columns[..., PERSISTENT] + at_times)

    @cached_property
    def _members(self) -> NDArray[np.bool_]:
        """[kinds, ranks, virtual stages, portions]: which portions are of a kind and on a stage."""
        members = np.zeros((2, self.shape.pipeline, self.shape.virtual, self.times.shape[2]), dtype=bool)
        for rank, mine in enumerate(self.portions):
            for at, portion in enumerate(mine):
                members[portion.kind, rank, portion.slot, at] = True
        return members

    def loads(self, counts: Numbers, ranks: Indices) -> Floats:
        """[cases, instants]: bytes of the blocks."""
        return np.asarray(np.einsum("cpo,clpo->cl", counts, self.sizes[ranks]))

    def excess(self, counts: Numbers, ranks: Indices) -> Floats:
        """[cases]: bytes that the rank lacks. Transient is the stage with the largest peak and share gathered, and what ZeRO's
        stages leave while others run."""
        peak, gathered, left = self.transients(counts, ranks)
        transient = (peak + gathered - left).max(axis=1) + left.sum(axis=1)
        return np.asarray((self.loads(counts, ranks) - self.capacity_bytes[ranks]).max(axis=1) + transient)

    def transients(self, counts: Numbers, ranks: Indices) -> tuple[Floats, Floats, Floats]:
        """[cases, virtual stages]: bytes of the largest peak of each stage, of the largest share that it gathers, and of what
        stays while other stages run."""
        used, columns = counts > 0, self._columns[ranks]
        tops = np.where(used, columns[..., PEAK], 0.0).max(axis=2)[:, None]
        stays = np.where(used, columns[..., LASTING], 0.0).max(axis=2)[:, None]
        recompute, zero = self._members[:, ranks]
        peak, gathered, left = (
            np.where(mine, size, 0.0).max(axis=2) for mine, size in ((recompute, tops), (zero, tops), (zero, stays))
        )
        return peak, gathered, left

    def passes(self, counts: Numbers, ranks: Indices) -> tuple[Floats, Floats]:
        """[cases, virtual stages, 3]: seconds of the passes of each stage, computed and of ZeRO's traffic."""
        seconds = (counts[..., None] * self._columns[ranks][..., :PASSES]).sum(axis=2)
        recompute, zero = self._members[:, ranks].astype(float) @ seconds
        return recompute, zero

    def once(self, counts: Numbers, ranks: Indices) -> tuple[Floats, Floats]:
        """[cases]: seconds once a step, of gradients' traffic and of the optimizer."""
        seconds = (counts[..., None] * self._columns[ranks][..., [ONCE, OPTIMIZER]]).sum(axis=(1, 2))
        return seconds[:, 0], seconds[:, 1]

    def seconds(self, stream: Stream, counts: Numbers, ranks: Indices) -> tuple[Floats, Floats]:
        """By the evaluator: seconds of the passes of each stage [cases, virtual stages, 3], and once a step [cases]."""
        compute, traffic = self.passes(counts, ranks)
        shape, gradients = self.shape, stream.gradients
        owned = np.argsort(shape.ranks, kind="stable").reshape(shape.pipeline, shape.virtual)
        passes = stream.passes_s(compute, traffic, stream.crossings(shape, self.bounds).stopped_s[owned[ranks]])
        behind = last_passes(shape.pipeline, shape.virtual, shape.microbatches) * compute[..., 1:].sum(axis=(1, 2))
        once, optimizer = self.once(counts, ranks)
        return passes, np.maximum(gradients.floor * once, once - gradients.hidden * behind) + optimizer

    def fill(self, *, late: bool) -> Numbers | None:
        """[ranks, portions, choices]: from the quickest choice of every block, trades until each rank fits, for the least
        seconds a byte: of stages that are alike the first ones, or the ``late`` ones. None where there is no way."""
        every = np.arange(self.shape.pipeline)
        counts = np.zeros(self.cost_s.shape, dtype=np.int64)
        for rank, mine in enumerate(self.portions):
            at = np.arange(len(mine))
            counts[rank, at, self.cost_s[rank, : len(mine)].argmin(axis=1)] = [portion.blocks for portion in mine]
        while True:
            excess = self.excess(counts, every)
            ranks = np.flatnonzero(excess > 0)
            if not ranks.size:
                return counts
            at, old, new, saving = self._trades(counts[ranks], ranks, late=late)
            if not np.isfinite(saving).all():
                return None
            moved = np.minimum(counts[ranks, at, old], np.maximum(1, np.ceil(excess[ranks] / saving).astype(np.int64)))
            counts[ranks, at, old] -= moved
            counts[ranks, at, new] += moved

    def _trades(self, counts: Numbers, ranks: Indices, *, late: bool) -> tuple[Indices, Indices, Indices, Floats]:
        """The best trade of each case: its portion, the choices that a block leaves and takes, and the bytes that it saves; not
        a number where there is none."""
        fullest = (self.loads(counts, ranks) - self.capacity_bytes[ranks]).argmax(axis=1)
        size = self.sizes[ranks, fullest]
        peaks, cost = self._columns[ranks][..., PEAK], self.cost_s[ranks]
        # What the transients gain when the last block leaves a choice is an estimate: that of its portion.
        used = np.where(counts > 0, peaks, -np.inf)
        others = np.where(np.eye(counts.shape[2], dtype=bool), -np.inf, used[..., None, :]).max(axis=3)
        after = np.maximum(others[..., :, None], peaks[..., None, :])
        alone = np.where((counts == 1)[..., None], used.max(axis=2)[..., None, None] - after, 0.0)
        saving = size[..., :, None] - size[..., None, :] + alone
        slower = np.isfinite(cost)[..., None, :] & (cost[..., None, :] > cost[..., :, None])
        smaller = (cost[..., None, :] == cost[..., :, None]) & (size[..., None, :] < size[..., :, None])
        there = (counts > 0)[..., None] & (saving > 0) & (slower | smaller)  # Never back, so that trades end.
        with np.errstate(invalid="ignore", divide="ignore"):
            price = np.where(there, (cost[..., None, :] - cost[..., :, None]) / saving, np.inf).reshape(*counts.shape[:2], -1)
        least = price.min(axis=2)
        lowest = least.min(axis=1, keepdims=True)
        near = least <= lowest + ALIKE * np.abs(lowest)
        cases = np.arange(len(counts))
        at = near.shape[1] - 1 - near[:, ::-1].argmax(axis=1) if late else near.argmax(axis=1)
        old, new = np.unravel_index(price[cases, at].argmin(axis=1), (counts.shape[2],) * 2)
        return at, old, new, np.where(np.isfinite(lowest[:, 0]), saving[cases, at, old, new], np.nan)

    def stages(self, counts: Numbers, bounds: Sequence[int]) -> tuple[StagePlan, ...]:
        """The plan's stages."""
        decisions: dict[int, list[BlockDecision]] = {stage: [] for stage in range(self.shape.stages)}
        for rank, mine in enumerate(self.portions):
            owned = self.shape.owned(rank)
            named = [
                [name for name, number in zip(portion.table.names, row, strict=False) for _ in range(number)]
                for portion, row in zip(mine, counts[rank].tolist(), strict=False)
            ]
            for recompute in range(0, len(mine), 2):
                pairs = zip(named[recompute + 1], named[recompute], strict=True)
                decisions[owned[mine[recompute].slot]] += [BlockDecision(*pair) for pair in pairs]
        return tuple(StagePlan(at, bounds[at], bounds[at + 1], tuple(made)) for at, made in decisions.items())


def _portions(chain: Chain | Stream, shape: Shape, rank: int, bounds: Sequence[int]) -> Iterator[Portion]:
    """Stage by stage and run by run, recomputation before the ZeRO stage."""
    for slot, stage in enumerate(shape.owned(rank)):
        for run, piece in enumerate(chain.runs):
            count = min(bounds[stage + 1], piece.first + piece.count) - max(bounds[stage], piece.first)
            for kind, table in enumerate(chain.single[run]) if count > 0 else ():
                yield Portion(slot, run, kind, table, count)


def _around(chain: Chain | Stream, shape: Shape, rank: int, bounds: Sequence[int]) -> Floats:
    """[instants]: what a rank holds beside its blocks: receive buffers, the batch, and of each live micro-batch the context's
    values and what is sent on, less what lies in receive buffers."""
    cuts = [bounds[cut] if 0 < cut < shape.stages else 0 for cut in range(shape.stages + 1)]
    begins = [chain.runs[run_at(chain.runs, cut)] if cut else None for cut in cuts]
    crossing = [0 if run is None else run.crossing_bytes for run in begins]
    received = [0 if run is None else run.received_bytes for run in begins]
    total, owned = shape.microbatches * chain.batch_bytes, shape.owned(rank)
    for stage in owned:
        incoming, outgoing = (
            crossing[cut] if 0 < cut < shape.stages and shape.rank_of(cut - 1) != shape.rank_of(cut) else 0
            for cut in (stage, stage + 1)
        )
        total += receive_buffer_bytes(
            shape.schedule, stage, shape.stages, shape.microbatches, incoming, outgoing, shape.virtual
        )
    kept = [chain.context_bytes + crossing[stage + 1] - received[stage] for stage in owned]
    return np.asarray(total + shape.instants(rank)[:, LIVE] @ np.array(kept))
