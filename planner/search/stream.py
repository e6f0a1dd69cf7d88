"""What flows over the virtual stages of a candidate: runs of identical blocks, the choices of one block of each, and what lies
around the blocks; everything at least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from cost_models.overlap import NO_OVERLAP, Overlap
from hardware_profiles import Cluster, Engine
from planner.evaluate import send_seconds
from planner.ir.plan import Mesh
from planner.search.chain import Chain, Run, run_at
from planner.search.crossings import NO_SEND, Crossings, Send
from planner.search.places import Spans
from planner.search.shape import Shape
from planner.search.tables import AT_WAIT, Floats, Table, union


@dataclass(frozen=True)
class Stream:
    """``single``: per run, the choices of one block: of recomputation and of ZeRO stages. ``context_bytes`` of each micro-batch
    in flight, ``batch_bytes`` of each micro-batch. ``sends``: per run, a transfer over a cut before one of its blocks.
    ``gathers``, ``gradients``: what hides of ZeRO's traffic of a micro-batch and of a step."""

    runs: tuple[Run, ...]
    single: tuple[tuple[Table, Table], ...]
    context_s: float
    context_bytes: int
    batch_bytes: int
    sends: tuple[Send, ...]
    gathers: Overlap = NO_OVERLAP
    gradients: Overlap = NO_OVERLAP

    @cached_property
    def blocks(self) -> int:
        return sum(run.count for run in self.runs)

    @cached_property
    def spans(self) -> Spans:
        return tuple((run.first, run.count) for run in self.runs)

    @cached_property
    def send(self) -> Send:
        """Over every cut, at least."""
        return min((send for run, send in zip(self.runs, self.sends, strict=True) if run.first), default=NO_SEND)

    @cached_property
    def crossing_bytes(self) -> int:
        """Over every cut, at least."""
        return min((run.crossing_bytes for run in self.runs if run.first), default=0)

    @cached_property
    def waiting_bytes(self) -> float:
        """Of a micro-batch that waits for the weight part of its backward pass, on any stage but the first: one of its blocks'
        at least."""
        later = [pair for run, pair in zip(self.runs, self.single, strict=True) if run.first or run.count > 1]
        return min((float(compute.sums[:, AT_WAIT].min()) for compute, _ in later), default=0.0)

    @cached_property
    def received_bytes(self) -> int:
        """Of what crosses a cut, the most that the block after it keeps in any case: it lies in a receive buffer."""
        return max((run.received_bytes for run in self.runs), default=0)

    def crossings(self, shape: Shape, bounds: Sequence[int] | None = None) -> Crossings:
        """What crosses the cuts of stages between these bounds; the least anywhere where these are not known."""
        if bounds is None:
            each = [(self.send, self.crossing_bytes, self.received_bytes)] * (shape.stages - 1)
        else:
            runs = [run_at(self.runs, cut) for cut in bounds[1 : shape.stages]]
            each = [(self.sends[at], self.runs[at].crossing_bytes, self.runs[at].received_bytes) for at in runs]
        return Crossings(shape, tuple(each))

    def passes_s(self, compute: Floats, traffic: Floats, stopped_s: Floats) -> Floats:
        """[..., 3]: the evaluator's seconds of the passes of stages, of their blocks' ``compute`` and ZeRO's ``traffic``
        [..., 3] where passes stop for ``stopped_s`` [...] (:func:`planner.evaluate.evaluate` sums block by block)."""
        forward, backward = compute[..., 0] + self.context_s, compute[..., 1] + compute[..., 2]
        hide, floor = self.gathers.hidden, self.gathers.floor
        waits = [
            np.maximum(floor * traffic[..., k], traffic[..., k] - hide * behind) for k, behind in enumerate((forward, backward))
        ]
        return np.stack([forward + waits[0] + stopped_s, compute[..., 1] + waits[1] + stopped_s, compute[..., 2]], axis=-1)

    def first_stage(self, run: int, stages: int) -> int:
        """The first virtual stage that can have blocks of a run: each stage after it has a block too."""
        return max(0, self.runs[run].first - (self.blocks - stages))

    def last_stage(self, run: int, stages: int) -> int:
        """The last one: each stage before it has a block too."""
        return min(stages - 1, self.runs[run].first + self.runs[run].count - 1)


def stream_of(chains: Sequence[Chain], mesh: Mesh, cluster: Cluster, engine: Engine) -> Stream | None:
    """Every block may have the choices of any of the chains: a bound of this is a bound of all of them. None where their
    runs differ."""
    runs = list(chains[0].runs)
    for chain in chains[1:]:
        if [(run.body, run.first, run.count) for run in chain.runs] != [(run.body, run.first, run.count) for run in runs]:
            return None
        runs = [
            replace(
                one, crossing_bytes=min(one.crossing_bytes, other.crossing_bytes),
                received_bytes=max(one.received_bytes, other.received_bytes),
            )
            for one, other in zip(runs, chain.runs, strict=True)
        ]
    # More compute on a rank that has time can hide more of its gradients: only then may recomputation worse in all help.
    keep = engine.gradients_hidden > 0
    single = tuple(
        (_joined(_each(chains, at, 0), keep), _joined(_each(chains, at, 1), keep=False))
        for at in range(len(runs))
    )
    costed = chains[0].costed
    return Stream(
        tuple(runs), single, costed.context_s, costed.context_bytes, costed.batch_bytes,
        tuple(_send(run.crossing_bytes, mesh, cluster, engine) for run in runs),
        Overlap(engine.gathers_hidden, engine.gathers_floor), Overlap(engine.gradients_hidden, engine.gradients_floor),
    )


def _send(size: int, mesh: Mesh, cluster: Cluster, engine: Engine) -> Send:
    # A tensor rank that sends its own part only sends no less than an even share.
    least = -(-size // mesh.tensor) if engine.sends_scattered else size
    send_s = engine.sends_exposed * send_seconds(cluster, mesh, least)
    return Send((1 - engine.sends_blocking) * send_s, engine.sends_blocking * send_s)


def _each(chains: Sequence[Chain], run: int, part: int) -> tuple[Table, ...]:
    """The tables of a run that the chains have, once each."""
    return tuple(dict.fromkeys(chain.single[run][part] for chain in chains))


@lru_cache(maxsize=4096)
def _joined(tables: tuple[Table, ...], keep: bool) -> Table:
    joined = union(tables)
    return _distinct(joined) if keep else joined.without_beaten()


def _distinct(table: Table) -> Table:
    _, index = np.unique(table.columns, axis=0, return_index=True)
    return table.rows(np.sort(index))
