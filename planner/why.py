"""Why a plan is as it is: what another decision would cost, and what more of the cluster would buy.

Each answer is a plan of its own, found by the same search under a changed job and scored by the same evaluator.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING

from hardware_profiles import Cluster
from planner.clusters import resized
from planner.constraints import Constraints, Limit
from planner.constraints_conflicts import check_contradictions
from planner.constraints_kept import broken_limit
from planner.constraints_text import parse_texts
from planner.decisions import decisions_of, largest_rank
from planner.evaluate import evaluate_plan
from planner.fitting import fitted
from planner.ir.errors import NoPlanFits, PinError, ProfileError
from planner.ir.plan import Plan, Prediction, StageMemory
from planner.remedies import Explanation, explain
from planner.search import Certificate, Request, SearchResult
from planner.search.prices import Prices
from planner.search.refusal import MemoryTooSmall

if TYPE_CHECKING:
    from planner.bundle import Bundle

GB = 10**9
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Part:
    """A part of the step (seconds) or of the largest rank's memory (bytes) under both plans."""

    name: str
    before: float
    after: float

    @property
    def more(self) -> float:
        return self.after - self.before


@dataclass(frozen=True)
class Answer:
    """A plan and what becomes of it under ``asked``. ``result``: the best plan then, None where none fits, for which
    ``explanation`` has the reason; ``refusal``: it in a line."""

    asked: Constraints
    before: tuple[Plan, Prediction]
    result: SearchResult | None
    explanation: Explanation | None = None
    refusal: str = ""

    @property
    def seconds(self) -> tuple[Part, ...]:
        """The step, term by term."""
        assert self.result is not None
        terms = [asdict(prediction.breakdown) for prediction in (self.before[1], self.result.prediction)]
        return tuple(Part(name, terms[0][name], terms[1][name]) for name in terms[0])

    @property
    def memory(self) -> tuple[Part, ...]:
        """The memory of each plan's largest rank, by category."""
        assert self.result is not None
        worst = [largest_rank(prediction) for prediction in (self.before[1], self.result.prediction)]
        return tuple(
            Part(field.name, getattr(worst[0], field.name), getattr(worst[1], field.name)) for field in fields(StageMemory)
        )

    @property
    def decisions(self) -> tuple[tuple[str, str, str], ...]:
        """(name, before, after) of every decision that changes."""
        assert self.result is not None
        both = decisions_of(self.before[0]), decisions_of(self.result.plan)
        return tuple((name, both[0][name], both[1][name]) for name in both[0] if both[0][name] != both[1][name])


@dataclass(frozen=True)
class Gain:
    """What a larger cluster would buy. ``result``: the best plan found on it, None where none was; ``broken``: a limit of the
    job that the plan itself does not keep there, so that it is not one of those."""

    change: str
    result: SearchResult | None
    refusal: str = ""
    broken: Limit | None = None


def request_of(bundle: Bundle, *, gap: float, time_limit_s: float | None) -> Request:
    """The job that a plan was made for, as its files have it."""
    plan = bundle.plan
    constraints = parse_texts(bundle.certificate.constraints, f"{bundle.path}: certificate.constraints")
    return Request(plan.batch.total, plan.sequence, plan.precision, constraints, gap, time_limit_s, plan.optimizer)


def ask(bundle: Bundle, asked: Constraints, request: Request, progress: Progress) -> Answer:
    """Solve a plan's job again under ``asked`` too, which overrides what it limits. The plan itself counts as found where it
    keeps that: a search that ends at its gap or its time limit may know less. Raises PinError."""
    constraints = request.constraints.replacing(asked)
    check_contradictions(constraints)
    before = (bundle.plan, bundle.prediction)
    changed = replace(request, constraints=constraints)
    deadline = time.perf_counter() + (math.inf if request.time_limit_s is None else request.time_limit_s)
    broken = broken_limit(constraints, bundle.plan, bundle.graph, bundle.cluster, bundle.prediction)
    counts = broken is None and bundle.prediction.fits
    try:
        found = fitted(bundle.graph, bundle.cluster, changed)
    except MemoryTooSmall as refusal:
        if counts:  # By sums of memory, or in its time, a search may find none where there is this one.
            return Answer(asked, before, SearchResult(*before, Certificate(0.0, 0, 0)))
        explanation = explain(refusal, bundle.graph, bundle.cluster, changed, progress, deadline=deadline)
        return Answer(asked, before, None, explanation, f"{explanation.shortage}; {explanation.advice}")
    if counts and bundle.prediction.step_s < found.prediction.step_s:
        bound_s = min(found.lower_bound_s, bundle.prediction.step_s)
        certificate = replace(found.certificate, lower_bound_s=bound_s)
        found = replace(found, plan=bundle.plan, prediction=bundle.prediction, certificate=certificate)
    return Answer(asked, before, found)


def sensitivity(bundle: Bundle, request: Request, progress: Progress) -> Iterator[Gain]:
    """The job as it is, then with one more GB on every device, each level's network twice as quick, one more node. Raises
    PinError where the job's constraints cannot hold."""
    known: Prices | None = None
    plans: tuple[Plan, ...] = (bundle.plan,)
    for change, larger in _larger(bundle.cluster):
        progress(f"solving: {change}")
        if isinstance(larger, str):
            yield Gain(change, None, larger)
            continue
        try:
            result = fitted(bundle.graph, larger, request, known=known)
            known = result.prices if known is None else known
            gain = _at_least(plans, bundle, larger, request, Gain(change, result))
            if larger is bundle.cluster and gain.result is not None and gain.result.plan != bundle.plan:
                plans = (bundle.plan, gain.result.plan)
            yield gain
        except (NoPlanFits, PinError) as refusal:
            if isinstance(refusal, PinError) and larger is bundle.cluster:
                raise  # The job itself cannot be: no cluster is to blame.
            yield Gain(change, None, str(refusal))


def _at_least(plans: Sequence[Plan], bundle: Bundle, cluster: Cluster, request: Request, found: Gain) -> Gain:
    """What was found, or the quickest of ``plans`` where that is quicker: a search that ends at its gap or its time limit may
    know less. The first of them is the file's own, which may have been edited; one that breaks the job's limits is none of the
    job's."""
    if cluster.devices != bundle.cluster.devices or found.result is None:
        return found
    broken, best = [], found.result
    for plan in plans:
        prediction = evaluate_plan(plan, bundle.graph, cluster)
        broken.append(broken_limit(request.constraints, plan, bundle.graph, cluster, prediction))
        if broken[-1] is None and prediction.fits and prediction.step_s < best.prediction.step_s:
            best = replace(best, plan=plan, prediction=prediction)
    return replace(found, result=best, broken=broken[0])


def _larger(cluster: Cluster) -> Iterator[tuple[str, Cluster | str]]:
    """Changes and the clusters that they make, or why that cannot be said."""
    chip = cluster.chip
    yield "as it is", cluster
    yield "1 GB more memory a device", replace(cluster, chip=replace(chip, memory_bytes=chip.memory_bytes + GB))
    for at, level in enumerate(cluster.levels):
        link = level.link
        quicker = replace(link, bandwidth_bytes_s=2 * link.bandwidth_bytes_s, peer_bytes_s=2 * link.peer_bytes_s)
        levels = (*cluster.levels[:at], replace(level, link=quicker), *cluster.levels[at + 1 :])
        yield f"twice the bandwidth of {level.name} ({link.name})", replace(cluster, levels=levels)
    try:
        yield "1 more node", resized(cluster, cluster.nodes + 1, cluster.devices_per_node)
    except ProfileError as error:
        yield "1 more node", str(error)
