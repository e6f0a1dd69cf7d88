"""The columns and rows of a candidate's program: where each variable lies, and what holds between them (see :mod:`counts`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cost_models.live import LIVE, WAITING
from cost_models.pipeline import CriticalPath
from planner.evaluate import last_passes, receive_buffer_bytes
from planner.ir.plan import BlockDecision, StagePlan
from planner.search.crossings import Crossings
from planner.search.linear import Floats, Indices, Program, Row
from planner.search.places import places_of
from planner.search.shape import Shape
from planner.search.stream import Stream
from planner.search.tables import AT_TIMES, AT_WAIT, ONCE, OPTIMIZER, PASSES, PERSISTENT
from planner.search.together import RankCosts
from planner.search.transients import Transients, least_transients
from planner.search.works import lower_hull

LENGTH, TAIL = 0, 1
"""T and R come first among the columns."""
MISSED_BYTES = 1.0
"""Sums of bytes are rounded by less."""


@dataclass
class Layout:
    """Columns: T, R, times [stages, passes], n [pairs], x and y [choices], b [breaks]; where the program is ``exact`` also the
    transients of ranks and what marks the choices that are in use. A pair is (stage, run), ``kind`` 0 recomputation, 1 ZeRO. It
    has ``fewest`` to ``most`` blocks [pairs]."""

    stream: Stream
    shape: Shape
    exact: bool = False
    crossings: Crossings = field(init=False)
    passes: int = field(init=False)
    size: int = field(init=False)
    fewest: Floats = field(init=False)
    most: Floats = field(init=False)

    def __post_init__(self) -> None:
        stream, shape = self.stream, self.shape
        self.passes = 3 if shape.splits_backward else 2
        self.rank_of, self.crossings = shape.ranks, stream.crossings(shape)
        self.least_transients = least_transients(stream, places_of(stream.spans, (shape,)))
        pairs = [
            (stage, run) for stage in range(shape.stages) for run in range(len(stream.runs))
            if stream.first_stage(run, shape.stages) <= stage <= stream.last_stage(run, shape.stages)
        ]
        self.pair_stage, self.pair_run = (np.array([pair[k] for pair in pairs]) for k in (0, 1))
        self.n_at = TAIL + 1 + self.passes * shape.stages + np.arange(len(pairs))
        tables = [stream.single[run][kind] for kind in (0, 1) for _, run in pairs]
        sizes = [len(table.names) for table in tables]
        self.pair = np.repeat(np.tile(np.arange(len(pairs)), 2), sizes)
        self.kind = np.repeat([0, 1], [sum(sizes[: len(pairs)]), sum(sizes[len(pairs) :])])
        self.vectors = np.concatenate([table.sums for table in tables])
        self.peaks = np.concatenate([table.peaks for table in tables])
        self.lasting = np.concatenate([table.lasting for table in tables])
        self.names = [name for table in tables for name in table.names]
        self.stage = self.pair_stage[self.pair]
        self.choice_at = int(self.n_at[-1]) + 1 + np.arange(len(self.pair))
        self.breaks = self._breaks()
        self.break_at = int(self.choice_at[-1]) + 1 + np.arange(len(self.breaks))
        self.size = int(self.choice_at[-1]) + 1 + len(self.breaks)
        counts = np.array([run.count for run in stream.runs])
        self.fewest = np.zeros(len(pairs))
        self.most = np.minimum(counts, stream.blocks - shape.stages + 1)[self.pair_run].astype(float)

    def _breaks(self) -> list[tuple[int, int]]:
        """(stage, run) where a run may have to end before the next begins."""
        stages = self.shape.stages
        return [
            (stage, run) for run in range(len(self.stream.runs) - 1) for stage in range(stages - 1)
            if self.stream.first_stage(run + 1, stages) <= stage < self.stream.last_stage(run, stages)
        ]

    def hold(self, blocks: Floats) -> None:
        """Pairs have just so many blocks: then it is known what crosses each cut."""
        self.fewest = self.most = blocks
        bounds = np.cumsum(np.bincount(self.pair_stage, blocks, self.shape.stages)).astype(int).tolist()
        self.crossings = self.stream.crossings(self.shape, (0, *bounds))

    def time_at(self, stage: int, k: int) -> int:
        return TAIL + 1 + stage * self.passes + k

    def members(self, run: int, rank: int) -> Indices:
        """The pairs of a run on a rank."""
        return np.flatnonzero((self.pair_run == run) & (self.rank_of[self.pair_stage] == rank))

    def blocks(self, values: Floats) -> tuple[float, ...]:
        """Blocks on every virtual stage."""
        return tuple(np.bincount(self.pair_stage, values[self.n_at], self.shape.stages).tolist())

    @property
    def whole_at(self) -> Indices:
        """Columns of whole numbers: how many blocks stages have, and where runs have ended."""
        return np.append(self.n_at, self.break_at)

    def laid(self, blocks: Indices) -> Floats:
        """The values of :attr:`whole_at` where stages have these blocks [runs, stages]."""
        ended = np.cumsum(blocks, axis=1) == blocks.sum(axis=1)[:, None]
        breaks = [float(ended[run, stage]) for stage, run in self.breaks]
        return np.append(blocks[self.pair_run, self.pair_stage], breaks)

    def times(self, values: Floats) -> Floats:
        """[stages, 3]: the evaluator's seconds of the passes under the chosen values."""
        chosen, stream, stages = values[self.choice_at], self.stream, self.shape.stages
        compute, traffic = (
            np.array([
                np.bincount(self.stage, chosen * self.vectors[:, k] * (self.kind == kind), stages) for k in range(PASSES)
            ], dtype=float).T
            for kind in (0, 1)
        )
        return stream.passes_s(compute, traffic, self.crossings.stopped_s)

    def stages(self, values: Floats) -> tuple[StagePlan, ...]:
        """What whole values say of the stages: counted choices are dealt to the blocks in order."""
        chosen = np.rint(values[self.choice_at]).astype(int)
        result, first = list[StagePlan](), 0
        for stage in range(self.shape.stages):
            decisions = list[BlockDecision]()
            for pair in np.flatnonzero(self.pair_stage == stage):
                levels, zeros = (
                    [self.names[c] for c in np.flatnonzero((self.pair == pair) & (self.kind == kind)) for _ in range(chosen[c])]
                    for kind in (0, 1)
                )
                decisions += [BlockDecision(z, r) for z, r in zip(zeros, levels, strict=True)]
            result.append(StagePlan(stage, first, first + len(decisions), tuple(decisions)))
            first += len(decisions)
        return tuple(result)

    def program(self) -> Program:
        """The columns and all rows but caps and paths."""
        counts = np.array([run.count for run in self.stream.runs], dtype=float)
        extra = Transients(self) if self.exact else None
        size = self.size + (extra.size if extra is not None else 0)
        cost, low, high = np.zeros(size), np.zeros(size), np.full(size, math.inf)
        cost[[LENGTH, TAIL]] = 1.0
        low[self.n_at], high[self.n_at] = self.fewest, self.most
        high[self.break_at] = 1.0
        integer = np.zeros(size, dtype=bool)
        integer[self.n_at] = integer[self.break_at] = True
        if extra is not None:
            integer[self.choice_at] = integer[extra.marks] = True
            high[extra.marks] = 1.0
        program = Program(cost, low, high, integer, precise=self.exact)
        program.add([*self._flow(counts), *self._order(counts), *self._times(), *self._tails()])
        memory = self._memory(extra)
        self.memory_rows = range(len(program.rows), len(program.rows) + len(memory))
        program.add(memory)
        if extra is not None:
            program.add(extra.rows())
        return program

    def _flow(self, counts: Floats) -> list[Row]:
        rows = []
        for pair in range(len(self.n_at)):
            for kind in (0, 1):
                members = self.choice_at[(self.pair == pair) & (self.kind == kind)]
                rows.append(Row(0.0, 0.0, np.append(members, self.n_at[pair]), np.append(np.ones(len(members)), -1.0)))
        for run, count in enumerate(counts):
            members = self.n_at[self.pair_run == run]
            rows.append(Row(float(count), float(count), members, np.ones(len(members))))
        for stage in range(self.shape.stages):
            members = self.n_at[self.pair_stage == stage]
            rows.append(Row(1.0, math.inf, members, np.ones(len(members))))
        return rows

    def _order(self, counts: Floats) -> list[Row]:
        """What is used of run i + 1 up to a stage is at most b times all of it; of run i, at least."""
        rows = []
        for (stage, run), at in zip(self.breaks, self.break_at, strict=True):
            for part, low, high in ((run, 0.0, math.inf), (run + 1, -math.inf, 0.0)):
                members = self.n_at[(self.pair_run == part) & (self.pair_stage <= stage)]
                rows.append(Row(low, high, np.append(members, at), np.append(np.ones(len(members)), -counts[part])))
        return rows

    def _times(self) -> list[Row]:
        """Each pass at least its compute and what it waits for of its traffic: both forms of the maximum."""
        rows = []
        gathers, context_s, stopped_s = self.stream.gathers, self.stream.context_s, self.crossings.stopped_s
        forms = [(0.0, gathers.floor)] + ([(gathers.hidden, 1.0)] if gathers.hidden > 0 and gathers.floor < 1 else [])
        compute = np.where(self.kind[:, None] == 0, self.vectors[:, :3], 0.0)
        traffic = np.where(self.kind[:, None] == 1, self.vectors[:, :2], 0.0)
        backward = compute[:, 1] + compute[:, 2]
        for stage in range(self.shape.stages):
            stopped = float(stopped_s[stage])
            mine = np.flatnonzero(self.stage == stage)
            for hidden, share in forms:
                forward = (1 - hidden) * compute[:, 0] + share * traffic[:, 0]
                rows.append(self._time_row(stage, 0, mine, forward, (1 - hidden) * context_s + stopped))
                own = compute[:, 1] if self.passes == 3 else backward
                rows.append(self._time_row(stage, 1, mine, own - hidden * backward + share * traffic[:, 1], stopped))
            if self.passes == 3:
                rows.append(self._time_row(stage, 2, mine, compute[:, 2], 0.0))
        return rows

    def _time_row(self, stage: int, k: int, mine: Indices, seconds: Floats, least: float) -> Row:
        used = mine[seconds[mine] != 0]
        columns = np.append(self.choice_at[used], self.time_at(stage, k))
        return Row(least, math.inf, columns, np.append(-seconds[used], 1.0))

    def _tails(self) -> list[Row]:
        gradients = self.stream.gradients
        behind = gradients.hidden * last_passes(self.shape.pipeline, self.shape.virtual, self.shape.microbatches)
        forms = [(0.0, gradients.floor)] + ([(behind, 1.0)] if behind > 0 and gradients.floor < 1 else [])
        backward = np.where(self.kind == 0, self.vectors[:, 1] + self.vectors[:, 2], 0.0)
        rows = []
        for hidden, share in forms:
            seconds = share * self.vectors[:, ONCE] + self.vectors[:, OPTIMIZER] - hidden * backward
            for rank in range(self.shape.pipeline):
                used = np.flatnonzero((self.rank_of[self.stage] == rank) & (seconds != 0))
                rows.append(Row(0.0, math.inf, np.append(self.choice_at[used], TAIL), np.append(-seconds[used], 1.0)))
        return rows

    def _memory(self, extra: Transients | None) -> list[Row]:
        """Bytes are divided by the capacity, so that the rows are scaled like the others."""
        rows = []
        for rank in range(self.shape.pipeline):
            members, sizes, free = self.memory_of(rank)
            for size, room in zip(sizes, free if extra is not None else free - self.least_transients[rank], strict=True):
                columns, values = self.choice_at[members], size / self.shape.capacity_bytes
                if extra is not None:
                    columns, values = np.append(columns, extra.rank_at[rank]), np.append(values, 1.0)
                rows.append(Row(-math.inf, float(room) / self.shape.capacity_bytes, columns, values))
        return rows

    def memory_of(self, rank: int) -> tuple[Indices, Floats, Floats]:
        """The choices of a rank's blocks; bytes of one block under each of them, [instants, choices]; and the bytes that are
        left for all blocks and what they hold transiently, [instants]."""
        shape, members = self.shape, np.flatnonzero(self.rank_of[self.stage] == rank)
        owned = np.flatnonzero(self.rank_of == rank)
        slot, instants = np.searchsorted(owned, self.stage[members]), shape.instants(rank).astype(float)
        times = instants[:, self.kind[members], slot]
        sizes = self.vectors[members, PERSISTENT] + times * self.vectors[members, AT_TIMES]
        sizes += instants[:, WAITING, slot] * self.vectors[members, AT_WAIT]
        kept = np.array([self._kept(owned, counts[LIVE]) for counts in instants])
        return members, sizes, shape.capacity_bytes - self._around(owned) - kept

    def room_of(self, run: int, rank: int) -> Floats:
        """[instants]: bytes for a rank's blocks of a run, beside the least that is held transiently and the least of those
        blocks of other runs that must lie there."""
        members, sizes, free = self.memory_of(rank)
        forced = places_of(self.stream.spans, (self.shape,)).forced[:, rank]
        room = free - self.least_transients[rank]
        for other in np.flatnonzero(forced):
            if other != run:
                of_run = self.pair_run[self.pair[members]] == other
                least = [sizes[:, of_run & (self.kind[members] == kind)].min(axis=1) for kind in (0, 1)]
                room = room - forced[other] * (least[0] + least[1])
        return np.asarray(room)

    def numbers(self, run: int, rank: int, caps: Indices) -> Indices:
        """Of how many blocks of a run a rank can have, where ranks have no more than ``caps`` of them."""
        count, mine = self.stream.runs[run].count, self.members(run, rank)
        fewest = max(count - int(caps.sum() - caps[rank]), int(self.fewest[mine].sum()), 0)
        return np.arange(fewest, min(int(caps[rank]), int(self.most[mine].sum())) + 1)

    def _around(self, owned: Indices) -> float:
        """A rank's batch and receive buffers, at least."""
        shape, sent = self.shape, self.crossings.sent_bytes
        return float(shape.microbatches * self.stream.batch_bytes + sum(
            receive_buffer_bytes(
                shape.schedule, stage, shape.stages, shape.microbatches, sent[stage], sent[stage + 1], shape.virtual
            )
            for stage in owned.tolist()
        ))

    def _kept(self, owned: Indices, live: Floats) -> float:
        """What live micro-batches keep beside the blocks' activations: the context's values and what is sent on; less what lies
        in receive buffers."""
        sent, received = self.crossings.size_bytes[owned + 1], self.crossings.received_bytes[owned]
        return float((live * (self.stream.context_bytes + sent - received)).sum())

    def work_rows(self, costs: RankCosts, most: Sequence[Indices]) -> list[Row]:
        """What a rank does in a step is at least what the whole blocks of a run on it need: edges of the lower convex hull over
        the counts that it can have."""
        rows = []
        for run, caps in enumerate(most):
            count = self.stream.runs[run].count
            for rank in range(self.shape.pipeline) if count > 1 else ():
                fewest, largest = max(0, count - int(caps.sum()) + int(caps[rank])), int(caps[rank])
                if largest < fewest:
                    continue
                counts = np.arange(fewest, largest + 1)
                own = np.append(costs.idle_s[run][rank], costs.seconds[run][rank] - costs.before_s[rank])
                corners = lower_hull(counts, own[counts])
                rows += [self.work_row(run, rank, *line) for line in corners]
        return rows

    def work_row(self, run: int, rank: int, slope: float, least: float) -> Row:
        """Seconds a step of all of a rank's work >= least + slope x its blocks of the run."""
        stages = np.flatnonzero(self.rank_of == rank)
        times = np.concatenate([self.time_at(int(stage), 0) + np.arange(self.passes) for stage in stages])
        taxed = np.flatnonzero((self.rank_of[self.stage] == rank) & (self.kind == 1))
        tails = self.stream.gradients.floor * self.vectors[taxed, ONCE] + self.vectors[taxed, OPTIMIZER]
        members = self.n_at[self.members(run, rank)]
        scale = 1.0 / self.shape.microbatches
        values = np.concatenate([np.ones(len(times)), scale * tails, np.full(len(members), -slope * scale)])
        return Row(least * scale, math.inf, np.concatenate([times, self.choice_at[taxed], members]), values)

    def path_row(self, path: CriticalPath) -> Row:
        """T is at least the length of the path."""
        counts = np.column_stack([path.forward, path.input_gradient, path.weight_gradient])[:, : self.passes].reshape(-1)
        used = np.flatnonzero(counts)
        columns = np.append(TAIL + 1 + used, LENGTH)
        values = np.append(-counts[used].astype(float), 1.0)
        return Row(float(path.transfers @ self.crossings.sends_s), math.inf, columns, values, False)
