"""The chain of blocks as runs of identical blocks, and the prices of their choices."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from planner.evaluate import forward_seconds, input_gradient_seconds
from planner.ir.costed import BlockCost, CostedGraph, Recompute, StateCost
from planner.search.tables import TIMES, Floats, Table, choices, join, repeat

NO_STATE = StateCost(0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)
THINNING = 1e-4
"""Part of a stage's least times by which mixtures may differ and count as equal. The bound is lowered by as much."""
EXACT_BLOCKS = 8
"""Stages with no more blocks are tabulated exactly."""


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` identical blocks from ``first`` on, with ``crossing_bytes`` over the cut before each of them."""

    body: str
    first: int
    count: int
    crossing_bytes: int


@dataclass(frozen=True, slots=True)
class Allowed:
    """The choices that pins and schedule leave. ``fixed_zero``: bodies of tied parameters, whose blocks share a stage."""

    recompute: tuple[Recompute, ...]
    zero: tuple[int, ...]
    fixed_zero: tuple[tuple[str, int], ...] = ()


Key = tuple[int, ...]
"""How many blocks of each run a stage has."""


@dataclass
class Chain:
    """One option of a costed graph under the allowed choices; tables are made when asked for and kept."""

    costed: CostedGraph
    option: int
    allowed: Allowed
    _tables: dict[Key, tuple[Table, Table]] = field(default_factory=dict)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        crossing = self.costed.crossing_bytes[self.option]
        kinds = [(block.body, crossing.get(i, 0) if i else -1) for i, block in enumerate(self.costed.graph.blocks)]
        runs, first = [], 0
        for (body, size), group in itertools.groupby(kinds):
            count = len(list(group))
            runs.append(Run(body, first, count, max(size, 0)))
            first += count
        return tuple(runs)

    @property
    def blocks(self) -> int:
        return len(self.costed.graph.blocks)

    @cached_property
    def single(self) -> tuple[tuple[Table, Table], ...]:
        """Per run, the choices of one block: of recomputation and of ZeRO stages."""
        return tuple((self._recompute_choices(run.body), self._zero_choices(run.body)) for run in self.runs)

    def _recompute_choices(self, body: str) -> Table:
        costs: Mapping[Recompute, BlockCost] = self.costed.blocks[self.option][body]
        names = [level for level in self.allowed.recompute if level in costs]
        vectors = [
            (forward_seconds(c, NO_STATE), input_gradient_seconds(c, NO_STATE), c.weight_gradient_s, 0.0,
             c.buffer_bytes, c.saved_bytes)
            for c in (costs[name] for name in names)
        ]
        return choices(names, vectors, [max(costs[n].forward_peak_bytes, costs[n].backward_peak_bytes) for n in names], 1)

    def _zero_choices(self, body: str) -> Table:
        states = self.costed.states[self.option][body]
        fixed = dict(self.allowed.fixed_zero).get(body)
        names = [fixed] if fixed is not None else [zero for zero in self.allowed.zero if zero in states]
        vectors = [
            (s.forward_comm_s, s.backward_comm_s, 0.0, s.once_comm_s + s.optimizer_s,
             s.parameters_bytes + s.gradients_bytes + s.optimizer_bytes, 0.0)
            for s in (states[name] for name in names)
        ]
        return choices(names, vectors, [states[name].gather_bytes for name in names], 2)

    @cached_property
    def least(self) -> tuple[tuple[float, float, float], ...]:
        """Per run, the least of one block: seconds of a micro-batch (all passes), tail seconds, persistent bytes."""
        result = []
        for recompute, zero in self.single:
            work = recompute.sums[:, :3].sum(axis=1).min() + zero.sums[:, :3].sum(axis=1).min()
            tail = zero.sums[:, 3].min()
            result.append((float(work), float(tail), float(recompute.sums[:, 4].min() + zero.sums[:, 4].min())))
        return tuple(result)

    @cached_property
    def block_works(self) -> tuple[float, ...]:
        """The least seconds of a micro-batch in each block of the chain."""
        return tuple(least[0] for run, least in zip(self.runs, self.least, strict=True) for _ in range(run.count))

    def least_work(self, key: Key) -> float:
        """No stage with these blocks takes less for a micro-batch, forward and backward."""
        return sum(n * least[0] for n, least in zip(key, self.least, strict=True)) + self.costed.context_s

    def tolerance(self, key: Key) -> Floats:
        """Seconds per time that a table of ``key`` may thin away in one of its passes."""
        if sum(key) <= EXACT_BLOCKS:
            return np.zeros(TIMES)
        passes = 2 * sum(1 for n in key if n) + 1
        least = sum(n * (r.sums[:, :TIMES].min(axis=0) + z.sums[:, :TIMES].min(axis=0))
                    for n, (r, z) in zip(key, self.single, strict=True))
        return np.asarray(least * (THINNING / passes))

    def tables(self, key: Key) -> tuple[Table, Table]:
        """What recomputation and what ZeRO can cost for the blocks of ``key``."""
        if key not in self._tables:
            tolerance = self.tolerance(key)
            used = [i for i, n in enumerate(key) if n]
            if len(used) == 1:
                (i,) = used
                recompute, zero = (repeat(single, key[i], tolerance) for single in self.single[i])
            else:
                # The largest run is tabulated once and shared by all keys that have as many of it.
                largest = max(used, key=lambda i: key[i])
                alone = tuple(n if i == largest else 0 for i, n in enumerate(key))
                recompute, zero = self.tables(alone)
                rest = tuple(0 if i == largest else n for i, n in enumerate(key))
                others = self.tables(rest)
                recompute, zero = join(recompute, others[0], tolerance), join(zero, others[1], tolerance)
            self._tables[key] = (recompute, zero)
        return self._tables[key]

    def pick_order(self, key: Key) -> tuple[int, ...]:
        """The runs in the order in which a table's picks list them."""
        used = [i for i, n in enumerate(key) if n]
        if len(used) == 1:
            return tuple(used)
        largest = max(used, key=lambda i: key[i])
        return (largest, *self.pick_order(tuple(0 if i == largest else n for i, n in enumerate(key))))
