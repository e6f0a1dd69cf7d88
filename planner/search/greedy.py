"""A plan without solving: given cuts, every block begins with its quickest choices, and each rank that does not fit trades
the least time for the most bytes until it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.evaluate import receive_buffer_bytes
from planner.ir.plan import BlockDecision, StagePlan
from planner.search.chain import Chain
from planner.search.shape import Shape
from planner.search.tables import ONCE, OPTIMIZER, PASSES, PERSISTENT, SAVED, Floats, Table

MOST_TRADES = 400
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


def greedy_stages(chain: Chain, shape: Shape, bounds: Sequence[int]) -> tuple[StagePlan, ...] | None:
    """Stages between these bounds, each rank within its memory; None where some rank cannot be."""
    decisions: list[tuple[BlockDecision, ...]] = [()] * shape.stages
    for rank in range(shape.pipeline):
        owned = shape.owned(rank)
        filled = _fill(chain, shape, rank, owned, bounds)
        if filled is None:
            return None
        for stage in owned:
            decisions[stage] = filled[stage]
    return tuple(StagePlan(i, bounds[i], bounds[i + 1], decisions[i]) for i in range(shape.stages))


@dataclass
class _Portion:
    """The blocks of one run on one stage of a rank: how many take each choice. ``size``: bytes of each choice of one
    block while its micro-batches are alive; ``cost_s``: its seconds a step."""

    stage: int
    run: int
    kind: int
    table: Table
    counts: list[int]
    cost_s: Floats
    lives: Floats

    def sizes(self) -> Floats:
        """[profiles, choices]: bytes under each live profile."""
        return np.asarray(self.table.sums[:, PERSISTENT][None, :] + self.lives[:, None] * self.table.sums[:, SAVED][None, :])


def _fill(
    chain: Chain, shape: Shape, rank: int, owned: Sequence[int], bounds: Sequence[int]
) -> dict[int, tuple[BlockDecision, ...]] | None:
    portions = _portions(chain, shape, rank, owned, bounds)
    sizes = [portion.sizes() for portion in portions]
    capacity = shape.capacity_bytes - _around(chain, shape, rank, owned, bounds)
    states = chain.costed.states[chain.option]
    lasting = [{zero: state.lasting_bytes for zero, state in states[run.body].items()} for run in chain.runs]
    for _ in range(MOST_TRADES):
        loads = sum(size @ np.array(p.counts) for p, size in zip(portions, sizes, strict=True))
        worst = int(np.argmax(loads))
        excess = float(loads[worst]) + _transient(portions, owned, lasting) - capacity
        if excess <= 0:
            return _decided(portions, owned)
        best: tuple[float, int, int, int, float] | None = None
        for at, (portion, size) in enumerate(zip(portions, sizes, strict=True)):
            for old in (i for i, n in enumerate(portion.counts) if n):
                for new in range(len(portion.counts)):
                    saving = float(size[worst, old] - size[worst, new] + _peak_change(portion, old, new))
                    if new == old or saving <= 0:
                        continue
                    price = float(portion.cost_s[new] - portion.cost_s[old]) / saving
                    if best is None or price < best[0]:
                        best = (price, at, old, new, saving)
        if best is None:
            return None
        _, at, old, new, saving = best
        moved = min(portions[at].counts[old], max(1, int(np.ceil(excess / saving))))
        portions[at].counts[old] -= moved
        portions[at].counts[new] += moved
    return None


def _peak_change(portion: _Portion, old: int, new: int) -> float:
    """What the transients gain when the last block leaves a choice, as an estimate."""
    return float(portion.table.peaks[old] - portion.table.peaks[new]) if portion.counts[old] == 1 else 0.0


def _portions(
    chain: Chain, shape: Shape, rank: int, owned: Sequence[int], bounds: Sequence[int]
) -> list[_Portion]:
    profiles = shape.live(rank)
    result = []
    for slot, stage in enumerate(owned):
        lives = np.array([profile[slot] for profile in profiles], dtype=float)
        for run, piece in enumerate(chain.runs):
            count = min(bounds[stage + 1], piece.first + piece.count) - max(bounds[stage], piece.first)
            for kind, table in enumerate(chain.single[run]) if count > 0 else ():
                once_s = table.sums[:, ONCE] + table.sums[:, OPTIMIZER]
                cost_s = shape.microbatches * table.sums[:, :PASSES].sum(axis=1) + once_s
                counts = [0] * len(cost_s)
                counts[int(np.argmin(cost_s))] = count
                result.append(_Portion(stage, run, kind, table, counts, cost_s, lives))
    return result


def _around(chain: Chain, shape: Shape, rank: int, owned: Sequence[int], bounds: Sequence[int]) -> float:
    """What a rank holds beside its blocks: receive buffers, the batch, and of each live micro-batch the context's values and
    what is sent on, less what lies in receive buffers."""
    cuts = [bounds[cut] if 0 < cut < shape.stages else 0 for cut in range(shape.stages + 1)]
    begins = [next(run for run in reversed(chain.runs) if run.first <= cut) if cut else None for cut in cuts]
    crossing = [0 if run is None else run.crossing_bytes for run in begins]
    received = [0 if run is None else run.received_bytes for run in begins]
    total = shape.microbatches * chain.costed.batch_bytes
    for stage in owned:
        incoming, outgoing = (
            crossing[cut] if 0 < cut < shape.stages and shape.rank_of(cut - 1) != shape.rank_of(cut) else 0
            for cut in (stage, stage + 1)
        )
        total += receive_buffer_bytes(
            shape.schedule, stage, shape.stages, shape.microbatches, incoming, outgoing, shape.virtual
        )
    kept = [chain.costed.context_bytes + crossing[stage + 1] - received[stage] for stage in owned]
    return float(total + max(sum(n * size for n, size in zip(live, kept, strict=True)) for live in shape.live(rank)))


def _transient(portions: Sequence[_Portion], owned: Sequence[int], lasting: Sequence[Mapping[Any, int]]) -> float:
    """``lasting``: per run, what ZeRO's stages leave while other stages of the rank run."""
    worst = stays = 0.0
    for stage in owned:
        peak = gathered = left = 0.0
        for portion in portions:
            if portion.stage != stage:
                continue
            for choice, count in enumerate(portion.counts):
                top = float(portion.table.peaks[choice])
                if count and portion.kind == 0:
                    peak = max(peak, top)
                elif count:
                    gathered = max(gathered, top)
                    left = max(left, lasting[portion.run][portion.table.names[choice]])
        worst = max(worst, peak + gathered - left)
        stays += left
    return worst + stays


def _decided(portions: Sequence[_Portion], owned: Sequence[int]) -> dict[int, tuple[BlockDecision, ...]]:
    result: dict[int, tuple[BlockDecision, ...]] = {}
    for stage in owned:
        mine = [portion for portion in portions if portion.stage == stage]
        decisions: list[BlockDecision] = []
        for run in sorted({portion.run for portion in mine}):
            levels, zeros = (
                [p.table.names[i] for i, n in enumerate(p.counts) for _ in range(n)]
                for p in sorted((p for p in mine if p.run == run), key=lambda p: p.kind)
            )
            decisions += [BlockDecision(z, r) for z, r in zip(zeros, levels, strict=True)]
        result[stage] = tuple(decisions)
    return result
