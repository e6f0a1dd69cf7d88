"""The least memory of a chain whose ranks own several stages, as an integer program.

Variables    x[b, s, r], w[b, s, z] in {0, 1}: block b on virtual stage s with recomputation r, and with ZeRO stage z;
             c[b, s] >= 0: stage s begins with block b; P[s] and g[s], the largest transient and gathered share of a stage,
             and L[s], the most that it leaves while others run; Z[r], the largest of these on a rank; M, the largest rank.
Constraints  every block is on one stage, and both count the same blocks; every stage has one; a block is on no earlier stage
             than the one before it; for each rank and instant, persistent bytes + live micro-batches x (saved bytes,
             context and what is sent) + what the waiting ones keep beyond that + gradients, where there are any yet, +
             receive buffers + Z[r] are at most M; P[s] is at least each transient, g[s] each gathered share; Z[r] at least
             each of its stages' P[s] + g[s] with the others' L.
Objective    M, least.
"""

from __future__ import annotations

import math

import pulp

from planner.ir.plan import BlockDecision, StagePlan
from planner.search.ranges import Option
from planner.search.thrifty import Answer, Thrift
from planner.solver import Problem, solve

Picked = dict[tuple[int, int], list[tuple[pulp.LpVariable, Option]]]
"""By block and stage: a variable for each choice."""


def thriftiest(thrift: Thrift, time_limit_s: float) -> Answer:
    """The proven bound of the largest rank's bytes (reserve left out), and the stages of the best solution found."""
    model = _Model(thrift)
    solution = solve(model.problem, time_limit_s=time_limit_s, gap=1e-9)
    bound = max(solution.bound, 0.0) * model.unit if math.isfinite(solution.bound) else 0.0
    if solution.status == "infeasible":
        return math.inf, None
    # The solver's tolerances are relative to numbers near 1.
    return bound * (1 - 1e-6), model.stages() if solution.found else None


class _Model:
    def __init__(self, thrift: Thrift) -> None:
        self.thrift, self.shape, self.ranges = thrift, thrift.shape, thrift.ranges
        self.unit = max(self.ranges.least_sum / self.shape.pipeline, 1.0)
        self.problem = Problem("thrifty", pulp.LpMinimize)
        self.largest = self.problem.add_variable("M", 0)
        self.problem += self.largest
        self.levels = self._choices("x", self.ranges.levels)
        self.zeros = self._choices("w", self.ranges.stages)
        self.held = {key: pulp.lpSum(v for v, _ in picked) for key, picked in self.levels.items()}
        self._flow()
        self._transients()
        self._memory()

    def _choices(self, name: str, blocks: tuple[tuple[Option, ...], ...]) -> Picked:
        """No block is before the stage of its own number, nor after the one that leaves a block for each stage behind it."""
        stages, count = self.shape.stages, self.ranges.count
        return {
            (b, s): [(self.problem.add_variable(f"{name}_{b}_{s}_{i}", cat="Binary"), choice) for i, choice in enumerate(block)]
            for b, block in enumerate(blocks) for s in range(max(0, b - count + stages), min(stages, b + 1))
        }

    def _flow(self) -> None:
        stages, count = self.shape.stages, self.ranges.count
        for b in range(count):
            self.problem += pulp.lpSum(self.held[b, s] for s in range(stages) if (b, s) in self.held) == 1
            for s in range(stages - 1):
                before = [self.held[b - 1, t] for t in range(s + 1) if (b - 1, t) in self.held]
                here = [self.held[b, t] for t in range(s + 1) if (b, t) in self.held]
                if b and here:
                    self.problem += pulp.lpSum(here) <= pulp.lpSum(before)
        for key, picked in self.zeros.items():
            self.problem += pulp.lpSum(v for v, _ in picked) == self.held[key]
        for s in range(stages):
            self.problem += pulp.lpSum(self.held[b, s] for b in range(count) if (b, s) in self.held) >= 1
        self.begins = {}
        for b, s in self.held:
            if b and s:
                self.begins[b, s] = self.problem.add_variable(f"c_{b}_{s}", 0)
                self.problem += self.begins[b, s] >= self.held[b, s] - self.held.get((b - 1, s), 0)
        for s in range(1, stages):
            self.problem += pulp.lpSum(at for (_, stage), at in self.begins.items() if stage == s) == 1

    def _transients(self) -> None:
        self.tops = [self.problem.add_variable(f"Z_{rank}", 0) for rank in range(self.shape.pipeline)]
        states, blocks = self.ranges.costed.states[self.ranges.option], self.ranges.costed.graph.blocks
        stages = range(self.shape.stages)
        peaks, shared, left = ([self.problem.add_variable(f"{name}_{s}", 0) for s in stages] for name in "PgL")
        for b, s in self.held:
            stays: dict[object, int] = {zero: state.lasting_bytes for zero, state in states[blocks[b].body].items()}
            self.problem += peaks[s] >= pulp.lpSum(choice.transient / self.unit * v for v, choice in self.levels[b, s])
            self.problem += shared[s] >= pulp.lpSum(choice.transient / self.unit * v for v, choice in self.zeros[b, s])
            self.problem += left[s] >= pulp.lpSum(stays[choice.decision] / self.unit * v for v, choice in self.zeros[b, s])
        for s in stages:
            rank = self.shape.rank_of(s)
            others = pulp.lpSum(left[other] for other in self.shape.owned(rank) if other != s)
            self.problem += self.tops[rank] >= peaks[s] + shared[s] + others

    def _memory(self) -> None:
        costed = self.ranges.costed
        for rank in range(self.shape.pipeline):
            owned = self.shape.owned(rank)
            for live, begun, waiting in self.shape.instants(rank).tolist():
                parts = [self._kept(*counts) for counts in zip(owned, live, begun, waiting, strict=True)]
                fixed = sum(live) * costed.context_bytes + self.shape.microbatches * costed.batch_bytes
                self.problem += pulp.lpSum(parts) + fixed / self.unit + self.tops[rank] <= self.largest

    def _kept(self, s: int, live: int, begun: int, waiting: int) -> pulp.LpAffineExpression:
        """What stage ``s`` keeps with so many live micro-batches, of which so many wait for their weight parts, and gradients
        or none; transients and context left out."""
        crossing = self.ranges.costed.crossing_bytes[self.ranges.option]
        inward, outward = self.thrift.buffers(s)
        terms = [
            choice.held(*times) / self.unit * v
            for table, times in ((self.levels, (live, waiting)), (self.zeros, (begun, 0))) for b in range(self.ranges.count)
            for v, choice in table.get((b, s), ())
        ]
        for b in range(1, self.ranges.count):
            size = crossing.get(b, 0) / self.unit
            received = self.ranges.received(b) / self.unit
            if (b, s) in self.begins:
                terms.append((inward * size - live * received) * self.begins[b, s])
            if (b, s + 1) in self.begins:
                terms.append((outward + live) * size * self.begins[b, s + 1])
        return pulp.lpSum(terms)

    def stages(self) -> tuple[StagePlan, ...]:
        """The solution as stages."""
        found: list[list[BlockDecision]] = [[] for _ in range(self.shape.stages)]
        for b in range(self.ranges.count):
            s = max((s for s in range(self.shape.stages) if (b, s) in self.held), key=lambda s: self.held[b, s].value())
            level, zero = (
                max(table[b, s], key=lambda item: item[0].value())[1].decision for table in (self.levels, self.zeros)
            )
            found[s].append(BlockDecision(zero, level))  # type: ignore[arg-type]
        firsts = [sum(map(len, found[:s])) for s in range(self.shape.stages)]
        return tuple(StagePlan(s, first, first + len(found[s]), tuple(found[s])) for s, first in enumerate(firsts))
