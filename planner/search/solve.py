"""A candidate under one option of placements: which chains it has, and from stages to an evaluated plan."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass, replace

from hardware_profiles import Cluster, Engine
from planner.evaluate import evaluate, sums_seconds, tied_parameters, tied_sum_seconds
from planner.ir.costed import CostedGraph
from planner.ir.placement import local_type, sequence_parallel
from planner.ir.plan import Batch, Plan, Prediction, Schedule, StagePlan
from planner.search.allowed import Allowed
from planner.search.candidates import Candidate, allowed_choices, shape_of
from planner.search.chain import Chain
from planner.search.engine import ENGINE, planning_engine
from planner.search.request import Look, Request


@dataclass(frozen=True)
class Fingerprints:
    """What the plan is made for."""

    model: str
    model_fingerprint: str
    cluster: str
    cluster_fingerprint: str


@dataclass(frozen=True)
class Task:
    """One candidate and one chain (ZeRO groups, option and tied ZeRO stage)."""

    candidate: Candidate
    chain: Chain
    cluster: Cluster
    request: Request
    names: Fingerprints

    @property
    def engine(self) -> Engine:
        return planning_engine()

    @property
    def each(self) -> tuple[Task, ...]:
        """Of each ZeRO group alone."""
        return tuple(replace(self, chain=chain) for chain in self.chain.each)

    def has(self, stages: tuple[StagePlan, ...]) -> bool:
        """Whether the ZeRO stages of all blocks are priced in its chain."""
        states, blocks = self.chain.costed.states[self.chain.option], self.chain.costed.graph.blocks
        return all(
            decision.zero in states[blocks[at].body]
            for stage in stages for at, decision in enumerate(stage.decisions, stage.first)
        )

    def once_s(self, stages: tuple[StagePlan, ...]) -> float:
        """What the parameters of the busiest rank need once a step."""
        states, blocks = self.chain.costed.states[self.chain.option], self.chain.costed.graph.blocks
        shape, seconds = shape_of(self.candidate, self.cluster), [0.0] * self.candidate.mesh.pipeline
        for index, stage in enumerate(stages):
            each = (states[blocks[at].body][made.zero] for at, made in enumerate(stage.decisions, stage.first))
            seconds[shape.rank_of(index)] += sum(state.once_comm_s + state.optimizer_s for state in each)
        return max(seconds)

    def plan(self, stages: tuple[StagePlan, ...]) -> Plan:
        """Of a chain of one ZeRO group."""
        candidate, request, costed = self.candidate, self.request, self.chain.costed
        return Plan(
            self.names.model, self.names.model_fingerprint, self.names.cluster, self.names.cluster_fingerprint,
            request.precision, request.sequence, candidate.mesh,
            Batch(request.batch, candidate.micro, candidate.accumulation),
            Schedule(candidate.schedule, candidate.virtual), self.chain.zero_group, stages,
            costed.placements[self.chain.option], engine=ENGINE, optimizer=request.optimizer,
        )


def chains_of(priced: tuple[CostedGraph, ...], candidate: Candidate, request: Request) -> tuple[Chain, ...]:
    """One chain for each option and space of choices that the constraints leave, and each ZeRO stage that tied parameters
    can share. ``priced``: for each of the candidate's ZeRO groups, which allow the same."""
    constraints, chains, costed = request.constraints, list[Chain](), priced[0]
    ungathered = costed.graph.gradients.ungathered_by(candidate.mesh.pipeline)
    for option, placements in enumerate(costed.placements):
        parallel = sequence_parallel(placements)
        if not constraints.admits("sequence_parallel", parallel):
            continue
        for allowed in allowed_choices(candidate.first, constraints, costed.graph, parallel):
            sharded = max(candidate.groups) > 1
            fixed = dict.fromkeys(
                stages for each in priced for stages in _tied_stages(each, option, allowed, ungathered, sharded=sharded)
            )
            chains += [Chain(priced, option, replace(allowed, fixed_zero=stages), candidate.groups) for stages in fixed]
    return tuple(chains)


def _tied_stages(
    costed: CostedGraph, option: int, allowed: Allowed, ungathered: Collection[int], *, sharded: bool
) -> list[tuple[tuple[str, int], ...]]:
    """Assignments of ZeRO stages to bodies that share parameters, without those that another beats in all.
    ``ungathered``: blocks that cannot have ZeRO 3; ``sharded``: over several ranks."""
    graph = costed.graph
    groups: list[set[str]] = []
    for _, owners in tied_parameters(graph):
        bodies = {graph.blocks[index].body for index in owners}
        touching = [group for group in groups if group & bodies]
        groups = [group for group in groups if not group & bodies] + [bodies.union(*touching)]
    assignments: list[tuple[tuple[str, int], ...]] = [()]
    for group in groups:
        stages: list[int] = []
        members = [index for index, block in enumerate(graph.blocks) if block.body in group]
        gathers = not any(index in ungathered for index in members)
        priced = [
            zero for zero in allowed.stages_of(members)
            if (zero < 3 or gathers) and all(zero in costed.states[option][body] for body in group)
        ]
        vectors = {zero: _state_vector(costed, option, group, zero, sharded=sharded) for zero in priced}
        for zero, vector in vectors.items():
            beaten = any(
                all(a <= b for a, b in zip(other, vector, strict=True)) and (other != vector or rival < zero)
                for rival, other in vectors.items() if rival != zero
            )
            if not beaten:
                stages.append(zero)
        assignments = [
            (*known, *((body, zero) for body in sorted(group))) for known, zero in itertools.product(assignments, stages)
        ]
    return assignments


def _state_vector(
    costed: CostedGraph, option: int, bodies: set[str], zero: int, *, sharded: bool
) -> tuple[float, ...]:
    states = [costed.states[option][body][zero] for body in sorted(bodies)]
    return tuple(
        value for s in states for value in (
            s.parameters_bytes + s.gradients_bytes + s.optimizer_bytes, s.gather_bytes, s.forward_comm_s, s.backward_comm_s,
            s.once_comm_s + s.optimizer_s,
            # The sum of tied gradients over stages moves one shard from ZeRO 1 on.
            1.0 if zero == 0 and sharded else 0.0,
        )
    )


def try_stages(task: Task, stages: tuple[StagePlan, ...], report: Look) -> Prediction:
    """Evaluate stages, and report what fits; what is seen of them then."""
    plan = task.plan(stages)
    prediction = evaluate(plan, task.chain.costed, task.cluster, task.engine)
    return report(plan, prediction) if prediction.fits else prediction


def certain_tied_seconds(task: Task) -> float:
    """What is paid once a step wherever the cuts are, at least: sums of single numbers, and of tied gradients where the first
    and the last block are on different ranks."""
    candidate, chain = task.candidate, task.chain
    graph, last = chain.costed.graph, len(chain.costed.graph.blocks) - 1
    shape = shape_of(candidate, task.cluster)
    ends = (0, shape.rank_of(shape.stages - 1))
    total = sums_seconds(task.cluster, candidate.mesh) + task.engine.step_s
    for parameter, owners in tied_parameters(graph) if ends[0] != ends[1] else ():
        if owners != (0, last) or not parameter.trainable:
            continue
        block = graph.blocks[0]
        body = graph.body_of[block.body]
        local = next(name for name, bound in block.parameters if bound == parameter.fqn)
        index = [p.name for p in body.parameters].index(local)
        placement = chain.costed.placements[chain.option][body.name].parameters[index]
        elements = local_type(parameter.type, placement, candidate.mesh.tensor).elements()
        zero = dict(chain.allowed.fixed_zero)[block.body]
        total += min(
            tied_sum_seconds(task.cluster, candidate.mesh, task.request.precision, elements, zero, group, ends)
            for group in chain.zero_groups
        )
    return total

