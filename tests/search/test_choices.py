"""What ranks choose, told apart rank by rank: against every choice of every rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from cost_models.pipeline import lengths
from planner.evaluate import evaluate, send_seconds
from planner.ir.plan import Mesh, ScheduleName
from planner.search import choices as choices_module
from planner.search import ways as ways_module
from planner.search.candidates import Candidate, shape_of
from planner.search.choices import MOST_IN_VAIN, Cases, Choices, Chosen, choices_of
from planner.search.counted import Ranks
from planner.search.cuts import Cuts
from planner.search.engine import planning_engine
from planner.search.greedy import Numbers, Shares, even_cuts
from planner.search.paths import Paths
from planner.search.request import Request
from planner.search.rows import Layout
from planner.search.solve import Fingerprints, Task, certain_tied_seconds, chains_of
from planner.search.stream import Stream, stream_of
from planner.search.works import works
from tests.search.made import make_cluster, make_costed, make_graph

SHAPES: list[tuple[ScheduleName, int, int, int]] = [
    ("1f1b", 3, 1, 4), ("interleaved-1f1b", 2, 3, 4), ("interleaved-1f1b", 3, 2, 3), ("interleaved-zero-bubble", 2, 2, 4),
    ("zbv", 2, 2, 4),
]
ROOMY, UNEVEN = 10_000, (5, 9, 3)
NAMES = Fingerprints("made", "x", "made", "y")


class Leaf:
    """One block a stage, and another one beside the first; or other ``blocks`` between other ``cuts``."""

    def __init__(
        self, key: tuple[ScheduleName, int, int, int], seed: int, memory: int, *, blocks: str | None = None,
        cuts: Cuts | None = None, crossing: Sequence[int] = (5,),
    ) -> None:
        name, pipeline, virtual, microbatches = key
        graph = make_graph(blocks or "b" * (pipeline * virtual + 1))
        self.costed = make_costed(graph, seed, zeros=(0, 2), crossing=crossing)
        self.cluster = make_cluster(2 * pipeline, memory, bandwidth=20.0)
        candidate = Candidate(Mesh(pipeline=pipeline, data=2), 1, microbatches, name, virtual, ((2,),))
        request = Request(2 * microbatches, 4, "fp32")
        self.task = Task(candidate, chains_of((self.costed,), candidate, request)[0], self.cluster, request, NAMES)
        self.shape = shape_of(candidate, self.cluster)
        stream = stream_of([self.task.chain], candidate.mesh, self.cluster, planning_engine())
        assert stream is not None
        self.stream: Stream = stream
        self.cuts = cuts or even_cuts(self.task.chain.block_works, self.shape.stages)
        self.shares = Shares.of(stream, self.shape, self.cuts)
        self.layout = Layout(stream, self.shape, exact=True)
        starts = np.array([run.first for run in stream.runs])[:, None]
        ends = starts + np.array([run.count for run in stream.runs])[:, None]
        bounds = np.array(self.cuts)
        laid = np.minimum(bounds[1:], ends) - np.maximum(bounds[:-1], starts)
        self.layout.hold(self.layout.laid(np.maximum(laid, 0))[: len(self.layout.n_at)])

    def choices(self, target_s: float = math.inf) -> Choices | None:
        costs = Ranks(self.stream, self.shape, works(self.stream, self.shape.microbatches)).costs
        return choices_of(self.layout, Paths(self.shape), costs.before_s, target_s)

    def ways(self, rank: int) -> list[Numbers]:
        """Every choice of a rank that fits."""
        mine, found = self.shares.portions[rank], []
        rows = [
            [row for row in itertools.product(range(portion.blocks + 1), repeat=len(portion.table.names))
             if sum(row) == portion.blocks] for portion in mine
        ]
        for each in itertools.product(*rows):
            counts = np.zeros(self.shares.cost_s.shape[1:], dtype=np.int64)
            for at, row in enumerate(each):
                counts[at, : len(row)] = row
            if self.shares.excess(counts[None], np.array([rank]))[0] <= 0:
                found.append(counts)
        return found

    def steps(self) -> list[float]:
        """T + R of every choice of all ranks."""
        times, tails = [], []
        for rank in range(self.shape.pipeline):
            ways = np.array(self.ways(rank))
            if not len(ways):
                return []
            passes, once = self.shares.seconds(self.stream, ways, np.full(len(ways), rank))
            times.append(passes)
            tails.append(once)
        every = list(itertools.product(*(range(len(each)) for each in tails)))
        whole = np.empty((len(every), self.shape.stages, 3))
        for rank, passes in enumerate(times):
            whole[:, self.shape.owned(rank)] = passes[[one[rank] for one in every]]
        once = np.array([max(tail[way] for tail, way in zip(tails, one, strict=True)) for one in every])
        sizes = [self.costed.crossing_bytes[0][cut] for cut in self.cuts[1:-1]]
        sends = np.array([0.0, *(send_seconds(self.cluster, self.task.candidate.mesh, size) for size in sizes)])
        return [float(step) for step in lengths(*self.shape.timetable, whole, sends) + once]


class Told:
    """What is told, with a target that falls to it, or stays at a ``limit_s``."""

    def __init__(self, limit_s: float | None = None) -> None:
        self.limit_s, self.found = limit_s, list[Chosen]()

    def __call__(self, found: Chosen) -> float:
        self.found.append(found)
        return found.step_s if self.limit_s is None else self.limit_s


def memory_of(key: tuple[ScheduleName, int, int, int], seed: int, part: float) -> int:
    """What such a part of the choices of every rank need at most, about."""
    leaf = Leaf(key, seed, ROOMY, crossing=UNEVEN)
    excess = [leaf.shares.excess(np.array(leaf.ways(rank)), np.full(len(leaf.ways(rank)), rank)) for rank in range(key[1])]
    return ROOMY + math.ceil(max(float(np.quantile(each, part)) for each in excess))


def never() -> bool:
    return False


@pytest.mark.slow
@pytest.mark.parametrize("key", SHAPES, ids=str)
def test_nothing_quicker_is_left_out(key: tuple[ScheduleName, int, int, int]) -> None:
    most = [len(Leaf(key, seed, ROOMY, crossing=UNEVEN).steps()) for seed in range(4)]
    tight = 0
    for seed, part in itertools.product(range(4), (0.0, 0.02, 0.3, 0.7)):
        leaf = Leaf(key, seed, memory_of(key, seed, part), crossing=UNEVEN)
        steps, choices = leaf.steps(), leaf.choices()
        assert choices is not None
        told = Told()
        target_s, done = choices.go(math.inf, never, told)
        assert done and not choices.open
        if not steps:
            assert math.isinf(choices.least_s) and not told.found
            continue
        best = min(steps)
        assert target_s == choices.least_s == told.found[-1].step_s == pytest.approx(best, rel=1e-12)
        for limit_s, there in ((best * (1 - 1e-9), False), (best * (1 + 1e-9), True)):
            again, others = leaf.choices(limit_s), Told(limit_s)
            assert again is not None
            assert again.go(limit_s, never, others) == (limit_s, True)
            assert bool(others.found) == there
        tight += len(steps) < most[seed]
        plan = leaf.task.plan(leaf.shares.stages(told.found[-1].counts, leaf.cuts))
        prediction = evaluate(plan, leaf.costed, leaf.cluster, planning_engine())
        assert prediction.fits
        assert prediction.step_s == pytest.approx(best + certain_tied_seconds(leaf.task), rel=1e-12)
        values = told.found[-1].values(leaf.layout, leaf.shares)
        blocks = len(leaf.costed.graph.blocks)
        assert (values[leaf.layout.choice_at].sum(), values[leaf.layout.n_at].sum()) == (2 * blocks, blocks)
    assert tight > 6


@pytest.mark.slow
def test_it_goes_on_where_it_was_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """After every step, and with few cases at once."""
    monkeypatch.setattr(choices_module, "FEW", 3)
    leaf = Leaf(SHAPES[2], 1, ROOMY)
    choices, calls, target_s, done = leaf.choices(), itertools.count(), math.inf, False
    assert choices is not None
    rounds = 0
    while not done:
        target_s, done = choices.go(target_s, lambda: next(calls) % 2 == 1, Told())
        rounds += 1
    assert rounds > 3
    assert target_s == pytest.approx(min(leaf.steps()), rel=1e-12)


def test_what_is_in_vain_is_not_told_for_ever() -> None:
    """Plans that do not fit by a closer look lower no target; the bound still says that they are there."""
    leaf, told = Leaf(SHAPES[2], 1, ROOMY), Told(math.inf)
    choices = leaf.choices()
    assert choices is not None
    assert choices.go(math.inf, never, told) == (math.inf, True)
    assert len(told.found) == MOST_IN_VAIN < len(leaf.steps())
    assert choices.least_s == pytest.approx(min(leaf.steps()), rel=1e-12)


def test_too_many_ways_are_not_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    leaf = Leaf(SHAPES[1], 0, ROOMY)
    choices = leaf.choices()
    assert choices is not None
    choices.simulated, choices.most_actions = 1, 0
    assert choices.go(math.inf, never, Told()) == (math.inf, False)
    monkeypatch.setattr(choices_module, "MOST_WAYS", 0)
    assert leaf.choices() is None
    monkeypatch.setattr(ways_module, "MOST_WAYS", 5)
    assert leaf.choices() is None


def test_what_goes_on_too_slowly_is_given_up() -> None:
    """At the pace of what is done, once a twentieth of what is allowed was simulated."""
    choices = Leaf(SHAPES[2], 1, ROOMY).choices()
    assert choices is not None
    actions = choices.shares.shape.actions
    choices.most_actions = 1000 * actions
    left = choices.open[0].left
    for simulated, undone, given_up in ((49, 1.0, False), (200, 0.9, True), (200, 0.7, False), (1001, 0.0, True)):
        choices.simulated, choices.open = simulated, [Cases(left, np.array([undone]))]
        assert choices.too_many == given_up, (simulated, undone)


def test_what_is_parted_is_as_much_as_it_was() -> None:
    choices = Leaf(SHAPES[2], 1, ROOMY).choices()
    assert choices is not None
    (every,) = choices.open
    rank = next(rank for rank, each in enumerate(every.left) if each.sum() > 1)
    parts = every.parted(rank)
    assert len(parts) == every.left[rank].sum() > 1
    assert parts.share.sum() == pytest.approx(1.0) and len(set(parts.share.tolist())) == 1
    assert all((part[rank].sum(axis=1) == 1).all() for part in [parts.left])
    again = parts.part(np.arange(len(parts)) > 0)
    assert again.share.sum() == pytest.approx(1.0 - parts.share[0])


def test_options_are_counted_before_any_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage of many blocks has more options than a machine has memory for."""
    few, most = Leaf(("1f1b", 2, 1, 4), 0, ROOMY, blocks="bbbbb"), 0
    for rank in range(2):
        own = [(0, portion.blocks) for portion in few.shares.portions[rank]]
        made = len(ways_module._options(few.shares, few.stream, rank, 0, own).blocks)
        assert ways_module._number(few.shares, rank, 0, own) == made
        most = max(most, made)
    assert most == 70
    many = Leaf(("1f1b", 2, 1, 4), 0, ROOMY, blocks="b" * 2_000)
    monkeypatch.setattr(ways_module, "_options", lambda *_: pytest.fail("options were made"))
    assert many.choices() is None
