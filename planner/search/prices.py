"""What candidates cost, found out as late and as seldom as possible.

Placements are solved at two reference micro-batches of each tensor degree, for ranks that are nearest each other, and priced at
all others over the links that a tensor axis has. The prices of blocks depend on (tensor axis, micro-batch) only, those of
parameters on (data, tensor axis, ZeRO group) and on whether there are a pipeline and several micro-batches. Before a
candidate's blocks are priced, :meth:`Prices.bound` and :meth:`Prices.rough` say what they take at least
(:mod:`~planner.search.samples`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from cost_models.live import both_at_once
from cost_models.spans import span_of
from hardware_profiles import Cluster
from planner.costing import PlacedGraph, Pricing, as_run, price_graph
from planner.costing.graphs import LeastCosts, least_costs
from planner.costing.state_prices import ZERO_STAGES, StateCosts, StatePrices
from planner.ir.costed import RECOMPUTE_LEVELS, CostedGraph
from planner.ir.graph import ModelGraph
from planner.ir.placement import BodyPlacement
from planner.ir.plan import Mesh, ScheduleName, TensorAxis
from planner.placement import place_graph
from planner.placement.table import Rules, remembered, strategy_table
from planner.search.allowed import ONCE, Allowed, union_of
from planner.search.candidates import Candidate, Group, Groups, Kind, allowed_choices, shape_of
from planner.search.closed_form import Least, closed_form
from planner.search.engine import planning_engine
from planner.search.groups import seconds_and_bytes, with_copies, without_beaten
from planner.search.meshes import divisors
from planner.search.request import Request
from planner.search.samples import HUGE_MICROBATCH, Held, Sample, rough_stream, sample_table, state_table
from planner.search.stream import Stream
from planner.search.tables import Table

REFERENCE_STEP = 8
"""The second reference micro-batch is at most this many times the first."""
_SENT = ("graph", "cluster", "request", "_known", "_axes", "_micros", "_usual", "_counts", "_placed")
"""What other processes are told of prices."""
Placements = Mapping[str, BodyPlacement]
Axes = tuple[int, tuple[int, ...]]
"""Tensor axes of one degree: ranks, and how far apart they are."""
StateKey = tuple[int, int, TensorAxis, Groups, bool, bool]
"""What decides the prices of parameters: (data, its stride, tensor axis, ZeRO groups, whether there is a pipeline, and several
micro-batches)."""
Unit = tuple[int, int]
"""A tensor degree and a reference micro-batch."""


def _again(state: Mapping[str, Any]) -> Prices:
    prices = object.__new__(Prices)
    vars(prices).update(state)
    prices._begin()
    return prices


def placements_of(graph: ModelGraph, cluster: Cluster, unit: Unit, rules: Rules = strategy_table) -> tuple[Placements, ...]:
    """The placements of a graph that are best at one micro-batch."""
    tensor, micro = unit
    options = place_graph(graph, tensor, Pricing(cluster, tensor, micro), rules=rules)
    return tuple(option.placements for option in options)


def _usual_micros(graph: ModelGraph, cluster: Cluster, request: Request) -> dict[int, set[int]]:
    """By tensor degree, the micro-batches that a mesh has without any constraint."""
    found: dict[int, set[int]] = defaultdict(set)
    for pipeline in divisors(cluster.devices):
        for tensor in divisors(cluster.devices // pipeline) if pipeline <= len(graph.blocks) else ():
            samples, left = divmod(request.batch, cluster.devices // pipeline // tensor)
            found[tensor].update(() if left else divisors(samples))
    return found


class Prices:
    """Prices of the candidates of one search; everything is computed once, when it is asked for. ``known``: prices of another
    search, whose placements and prices of blocks are taken where they are the same."""

    def __init__(
        self, graph: ModelGraph, cluster: Cluster, request: Request, candidates: Sequence[Candidate | Kind],
        *, known: Prices | None = None,
    ) -> None:
        self.graph, self.cluster, self.request, self._known = as_run(graph, cluster.chip), cluster, request, known
        micros: dict[int, set[int]] = defaultdict(set)
        self._axes: dict[TensorAxis, TensorAxis] = {}
        for each in candidates:
            micros[each.mesh.tensor].add(each.micro)
        self._micros = micros
        self._usual = _usual_micros(graph, cluster, request)
        self._counts = Counter(block.body for block in graph.blocks)
        self._placed: dict[Unit, tuple[Placements, ...]] = {}
        self._begin()

    def _begin(self) -> None:
        """Nothing is known but placements."""
        self._rules = remembered(strategy_table)
        self._options: dict[int, tuple[Placements, ...]] = {}
        self._graphs: dict[int, PlacedGraph] = {}
        self._of_states = StatePrices(self.graph, self.cluster, self.request.precision)
        self._first: dict[tuple[TensorAxis, int, bool, bool], CostedGraph] = {}
        self._states: dict[StateKey, tuple[StateCosts, ...]] = {}
        self._samples: dict[tuple[Axes, tuple[str, ...]], dict[str, Sample]] = {}
        self._huge: dict[Axes, tuple[LeastCosts, ...]] = {}
        self._sample_tables: dict[tuple[TensorAxis, tuple[str, ...], bool], dict[str, Table]] = {}
        self._state_tables: dict[tuple[StateKey, tuple[int, ...]], dict[str, Table]] = {}
        self._unbeaten: dict[tuple[StateKey, tuple[int, ...]], Candidate] = {}
        self._least_held: dict[object, dict[str, Held]] = {}
        self._least: dict[object, list[Least]] = {}
        self._allowed: dict[tuple[ScheduleName, bool], Allowed] = {}
        self._costed: dict[Group, CostedGraph | None] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Of another process, with placements. (What is priced is found sooner than sent.)"""
        return _again, ({name: vars(self)[name] for name in _SENT},)

    def __call__(self, candidate: Candidate) -> CostedGraph | None:
        """The prices of a candidate of one ZeRO group; None where its tensor degree has no feasible placement."""
        if candidate.group not in self._costed:
            self._costed[candidate.group] = self._price(candidate)
        return self._costed[candidate.group]

    def _price(self, candidate: Candidate) -> CostedGraph | None:
        axis = self.axis(candidate.mesh)
        if not self.options(axis[0]):
            return None
        # What a reduction adds to a block's gradients is larger where a rank keeps all of them (:func:`reduction_copies`).
        # Gradients of shared parameters wait for each other where no pipeline parts their blocks.
        beside = bool(self.graph.tied) and candidate.mesh.pipeline == 1
        key = (axis, candidate.micro, candidate.zero_group == 1, beside)
        first = self._home_of(axis)._first
        if key not in first:
            counted = self._placed_graph(axis[0]).measure(candidate.micro)
            # States are those of the candidate's own data axis.
            first[key] = price_graph(
                counted, self.cluster, mesh=candidate.mesh, precision=self.request.precision, zero_group=candidate.zero_group,
                accumulation=candidate.accumulation, stages=(),
            )
        return replace(first[key], states=self.states(candidate))

    def axis(self, mesh: Mesh) -> TensorAxis:
        """Of a mesh: of those with the same links the first one."""
        axis = mesh.tensor_axis
        if axis[1] == 1:
            return axis
        if axis not in self._axes:
            alike = (other for other in ((axis[0], 1), *self._axes) if other[0] == axis[0])
            span = span_of(self.cluster, *axis)
            self._axes[axis] = next((other for other in alike if span_of(self.cluster, *other) == span), axis)
        return self._axes[axis]

    def _home(self, tensor: int) -> Prices:
        """The prices that placements of a tensor degree are kept with: ``known``, where they are the same there."""
        known = self._known
        if known is None or known.graph is not self.graph or known.request.precision != self.request.precision:
            return self
        if replace(known.cluster.chip, memory_bytes=self.cluster.chip.memory_bytes) != self.cluster.chip:
            return self
        if tensor not in known._micros or known._references(tensor) != self._references(tensor):
            return self
        return known._home(tensor) if span_of(known.cluster, tensor, 1) == span_of(self.cluster, tensor, 1) else self

    def _home_of(self, axis: TensorAxis) -> Prices:
        """The prices that what blocks cost over an axis is kept with."""
        home = self._home(axis[0])
        return home if axis[1] == 1 or home.cluster.levels == self.cluster.levels else self

    def _references(self, tensor: int) -> tuple[int, ...]:
        """The micro-batches that placements are solved at: those of the whole space, and those of what constraints leave."""
        found = set[int]()
        for micros in (self._usual.get(tensor, set()), self._micros[tensor]):
            smallest = min(micros, default=0)
            found.update({smallest, max(micro for micro in micros if micro <= REFERENCE_STEP * smallest)} if micros else ())
        return tuple(sorted(found))

    def options(self, tensor: int) -> tuple[Placements, ...]:
        """The distinct placements of a tensor degree."""
        home = self._home(tensor)
        if home is not self:
            return home.options(tensor)
        if tensor not in self._options:
            found: list[Placements] = []
            for micro in self._references(tensor):
                found += [placements for placements in self.placed((tensor, micro)) if placements not in found]
            self._options[tensor] = tuple(found)
        return self._options[tensor]

    def _placed_graph(self, tensor: int) -> PlacedGraph:
        """The graph under those, where it is measured at every micro-batch."""
        home = self._home(tensor)
        if tensor not in home._graphs:
            home._graphs[tensor] = PlacedGraph(self.graph, tensor, home.options(tensor))
        return home._graphs[tensor]

    def units(self, tensor: int) -> list[Unit]:
        """What is placed, as far as that takes time."""
        return [(tensor, micro) for micro in self._references(tensor)] if tensor > 1 and self._home(tensor) is self else []

    def placed(self, unit: Unit) -> tuple[Placements, ...]:
        """The placements that are best at one micro-batch."""
        if unit not in self._placed:
            self._placed[unit] = placements_of(self.graph, self.cluster, unit, self._rules)
        return self._placed[unit]

    def learn(self, unit: Unit, placed: tuple[Placements, ...]) -> None:
        """What :meth:`placed` is, found out elsewhere."""
        self._placed[unit] = placed

    def learn_from(self, other: Prices) -> None:
        """The placements that another one of the same candidates knows."""
        self._placed.update(other._placed)

    def states(self, candidate: Candidate) -> tuple[StateCosts, ...]:
        """What parameters cost under every option, in one ZeRO group."""
        states, key = self._states_beside(candidate.mesh.tensor), self._state_key(candidate)
        if key not in states:
            (states[key],) = self._states_of(candidate, ONCE if candidate.once_groups else ZERO_STAGES)
        return states[key]

    def _states_beside(self, tensor: int) -> dict[StateKey, tuple[StateCosts, ...]]:
        """Where what parameters cost beside tensor ranks is kept."""
        home = self._home(tensor)
        return home._states if home.cluster.levels == self.cluster.levels else self._states

    def _states_of(self, candidate: Candidate, stages: Sequence[int]) -> list[tuple[StateCosts, ...]]:
        """In each ZeRO group of a candidate."""
        options = self.options(candidate.mesh.tensor)
        return self._of_states.by_group(options, candidate.mesh, candidate.groups, candidate.accumulation, stages)

    def without_beaten(self, candidate: Candidate) -> Candidate:
        """Less the ZeRO groups that a larger one beats."""
        if len(candidate.groups) == 1 or not self.options(candidate.mesh.tensor):
            return candidate
        stages = self._allowed_to(candidate).zero
        key = self._state_key(candidate), stages
        if key not in self._unbeaten:
            self._price_groups(candidate)
            priced = [self.states(each) for each in candidate.each]
            self._unbeaten[key] = without_beaten(candidate, priced, stages, partial(seconds_and_bytes, planning_engine()))
        less = self._unbeaten[key]
        return candidate.with_groups(less.zero_groups, less.once_groups)

    def _allowed_to(self, candidate: Candidate) -> Allowed:
        """What the first of a candidate's ZeRO groups may choose, at most."""
        if self.request.constraints.forbidden:
            return union_of(allowed_choices(candidate.first, self.request.constraints, self.graph))
        key = candidate.schedule, not candidate.zero_groups
        if key not in self._allowed:
            self._allowed[key] = union_of(allowed_choices(candidate.first, self.request.constraints, self.graph))
        return self._allowed[key]

    def _price_groups(self, candidate: Candidate) -> None:
        """What parameters cost in each of its groups; where every rank has all of them, the same in all."""
        known, copies = self._states_beside(candidate.mesh.tensor), self.states(candidate.first)
        alone = [each for each in candidate.each if self._state_key(each) not in known]
        for stages in (ONCE, ZERO_STAGES):
            some = [each for each in alone if (stages is ONCE) == bool(each.once_groups)]
            if some:
                every = candidate.with_groups((), tuple(each.zero_group for each in some))
                for each, options in zip(some, self._states_of(every, stages[1:]), strict=True):
                    known[self._state_key(each)] = with_copies(options, copies)

    def _state_key(self, candidate: Candidate) -> StateKey:
        mesh, groups = candidate.mesh, (candidate.zero_groups, candidate.once_groups)
        return mesh.data, mesh.data_stride, self.axis(candidate.mesh), groups, mesh.pipeline > 1, candidate.accumulation > 1

    def bound(self, candidate: Candidate) -> float:
        """A lower bound of the step without the candidate's own prices; infinite where it cannot fit or be placed."""
        if not self.options(candidate.mesh.tensor):
            return float("inf")
        allowed = self._allowed_to(candidate)
        together = both_at_once(candidate.mesh.pipeline, candidate.virtual, candidate.accumulation)
        groups = candidate.zero_groups, candidate.once_groups
        key = (candidate.mesh, candidate.micro, groups, candidate.accumulation > 1, allowed, together)
        if key not in self._least:
            self._least[key] = self._least_blocks(candidate, allowed, together)
        return closed_form(self._least[key], 0.0, shape_of(candidate, self.cluster))

    def bound_over(self, axes: Axes) -> float:
        """The same of all candidates over tensor axes: every rank has a mean share of the work of all samples."""
        tensor, _ = axes
        if not self.options(tensor):
            return float("inf")
        samples = self._least_samples(axes, RECOMPUTE_LEVELS)
        sample_s = sum(count * samples[name].work_s for name, count in self._counts.items())
        return sample_s * self.request.batch * tensor / self.cluster.devices

    def _least_blocks(self, candidate: Candidate, allowed: Allowed, together: bool) -> list[Least]:
        """``allowed``: to the first of its ZeRO groups; ``together``: gradients are there beside live micro-batches."""
        tensor, stride = self.axis(candidate.mesh)
        samples = self._least_samples((tensor, (stride,)), allowed.recompute)
        held, blocks = self._least_states(candidate, allowed.zero, together), []
        for name, count in self._counts.items():
            sample, state = samples[name], held[name]
            blocks.append(Least(
                count, candidate.micro * sample.work_s + state.traffic_s, candidate.micro * sample.way_s, state.tail_s,
                state.size_bytes + candidate.micro * sample.saved_bytes,
            ))
        return blocks

    def _least_states(self, candidate: Candidate, stages: tuple[int, ...], together: bool) -> dict[str, Held]:
        """By body, the least over ZeRO groups, options and ZeRO stages."""
        key = (self._state_key(candidate), stages, together)
        if key not in self._least_held:
            states = [option for each in candidate.each for option in self.states(each)]
            bodies = {name: [option[name] for option in states] for name in self._counts}
            self._least_held[key] = {
                name: Held.of([each[zero] for each in held for zero in stages if zero in each], together)
                for name, held in bodies.items()
            }
        return self._least_held[key]

    def _least_samples(self, axes: Axes, levels: tuple[str, ...]) -> dict[str, Sample]:
        tensor, strides = axes
        home = self._home_of((tensor, strides[-1]))
        if (axes, levels) not in home._samples:
            huge = home._huge_of(axes)
            home._samples[axes, levels] = {name: Sample.of(name, huge, levels) for name in self._counts}
        return home._samples[axes, levels]

    def _huge_of(self, axes: Axes) -> tuple[LeastCosts, ...]:
        """What blocks cost in a huge micro-batch, of axes that have their home here; of several the quickest counts."""
        if axes not in self._huge:
            tensor, strides = axes
            pricing = Pricing(self.cluster, tensor, HUGE_MICROBATCH, strides)
            self._huge[axes] = least_costs(self._placed_graph(tensor), pricing)
        return self._huge[axes]

    def rough(self, candidate: Candidate) -> Stream | None:
        """What flows over its stages at least, without the candidate's own prices; None where it cannot be placed."""
        axis = self.axis(candidate.mesh)
        if not self.options(axis[0]):
            return None
        allowed = self._allowed_to(candidate)
        samples = self._sample_tables_of(axis, allowed.recompute, allowed.split)
        return rough_stream(self.graph, candidate.micro, samples, self._state_tables_of(candidate, allowed.zero))

    def _sample_tables_of(self, axis: TensorAxis, levels: tuple[str, ...], split: bool) -> dict[str, Table]:
        """By body."""
        home, key, (tensor, stride) = self._home_of(axis), (axis, levels, split), axis
        if key not in home._sample_tables:
            huge = home._huge_of((tensor, (stride,)))
            home._sample_tables[key] = {name: sample_table(name, huge, levels, split) for name in self._counts}
        return home._sample_tables[key]

    def _state_tables_of(self, candidate: Candidate, stages: tuple[int, ...]) -> dict[str, Table]:
        """By body, over ZeRO groups, options and ZeRO stages."""
        key = self._state_key(candidate), stages
        if key not in self._state_tables:
            states = [option for each in candidate.each for option in self.states(each)]
            self._state_tables[key] = {name: state_table(name, states, stages) for name in self._counts}
        return self._state_tables[key]
