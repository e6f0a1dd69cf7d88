"""Placing a whole graph: one option for each way the activations can lie between blocks.

Blocks of one option fit together, because all of them find and leave the chain's activation in the same placement and
hold tied parameters alike. Given the activation's placement, bodies that share no parameter are independent, and each is
solved once; those that share some are one problem.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import networkx as nx

from planner.ir.body import Body
from planner.ir.graph import ModelGraph, Slot
from planner.ir.placement import REPLICATE, SHARED, BodyPlacement, Placement, local_type, shard
from planner.placement.joint import apart, join
from planner.placement.model import cheapest_picks
from planner.placement.place import PlacedBody, place_body, placed_body
from planner.placement.pricing import Pricing
from planner.placement.reduce import contract, prune
from planner.placement.space import (
    DIVIDED_STATE,
    Activations,
    Known,
    Space,
    StrategyTable,
    asked_placements,
    build_space,
    held,
    output_vertex,
    splittable,
    with_parameter_prices,
)
from planner.placement.table import Rules, remembered, strategy_table

WORTH = 1.05
"""A slower option has to hold fewer parameters by this factor to be worth keeping."""
GAIN = 5e-4
"""An option that is slower with one micro-batch a step has to be quicker by this part with very many to be worth keeping."""

STATE_PRICES = (DIVIDED_STATE, 0.0)
"""Divided parameters, and time alone."""


@dataclass(frozen=True)
class Option:
    """A placement of every body. ``seconds``: forward and backward of one micro-batch over the whole chain, on ranks
    that hold all of it; ``once_s``: the part of it that is done once a step, however many micro-batches it has.
    ``boundary`` is how the chain's activation lies between blocks; ``state_elements`` what one tensor rank (that with
    most) holds of the model's parameters."""

    boundary: Placement
    placements: Mapping[str, BodyPlacement]
    seconds: float
    once_s: float
    state_elements: int

    @property
    def each_s(self) -> float:
        """What every micro-batch takes, of very many."""
        return self.seconds - self.once_s

    @property
    def sequence_parallel(self) -> bool:
        """Whether the activation is split between blocks."""
        return self.boundary.state == "shard"


def place_graph(
    graph: ModelGraph, degree: int, pricing: Pricing, *, rules: Rules = strategy_table, split: bool | None = None,
    prices: Sequence[float] = STATE_PRICES,
) -> tuple[Option, ...]:
    """The options that no other beats in seconds (with one micro-batch a step, of which ``pricing`` is, or with very many),
    parameters held and activations kept between blocks, fastest first.

    Every boundary is solved for time alone and with divided parameters. Activations are compared by whether the
    boundary is whole or split (a split one keeps a ``degree``-th of the bytes). Inside the blocks activations stay as the
    boundary has them, so that an option is classic tensor parallelism or sequence parallelism throughout. Empty where
    the degree fits no placement at all. ``split``: with sequence parallelism only, or without only; ``prices``: of the state
    that options are solved for.
    """
    if degree == 1:
        placed = {body.name: place_body(body, 1, {}, {}, pricing) for body in graph.bodies}
        whole = {name: p for name, p in placed.items() if p is not None}
        return (_option(graph, REPLICATE, whole, pricing),)
    plain = _Solver(graph, degree, pricing, remembered(rules), 0.0)
    options = [
        option
        for solver in (plain.with_price(price) for price in prices)
        for boundary in boundary_candidates(graph, degree)
        if split in (None, boundary.state == "shard")
        for option in _best_options(solver, boundary)
    ]
    return _undominated(options)


def _undominated(options: list[Option]) -> tuple[Option, ...]:
    kept: list[Option] = []
    for option in sorted(options, key=lambda option: (option.seconds, option.each_s, option.state_elements)):
        if not any(_beats(other, option) for other in kept):
            kept.append(option)
    return tuple(kept)


def _beats(quicker: Option, option: Option) -> bool:
    """Whether an option that is quicker with one micro-batch a step is as good with any number."""
    alike = quicker.sequence_parallel == option.sequence_parallel
    return alike and quicker.each_s <= option.each_s * (1 + GAIN) and quicker.state_elements <= WORTH * option.state_elements


def boundary_candidates(graph: ModelGraph, degree: int) -> tuple[Placement, ...]:
    """Whole, and split on the sequence: the dims as long as it, but for the last (features); where there is none, any dim
    but the batch's that divides evenly."""
    type_ = graph.chain_type
    if type_ is None:
        return (REPLICATE,)
    even_dims = [dim for dim in range(type_.rank) if splittable(type_, shard(dim), degree)]
    sequence = [dim for dim in graph.sequence_dims(type_) if dim in even_dims]
    return (REPLICATE, *(shard(dim) for dim in sequence or even_dims))


def body_boundary(graph: ModelGraph, body: Body, boundary: Placement) -> Mapping[str, Placement]:
    """The placements of a body's inputs and outputs under a boundary of the chain: values of the chain's type that
    carry a gradient follow it, everything else is whole."""
    type_ = graph.chain_type
    return {
        name: boundary if body.types[name] == type_ and name in body.differentiable else REPLICATE
        for name in (*(value.name for value in body.inputs), *body.outputs)
    }


def _option(graph: ModelGraph, boundary: Placement, placed: Mapping[str, PlacedBody], pricing: Pricing) -> Option:
    repeats = Counter(block.body for block in graph.blocks)
    seconds = sum(count * placed[name].seconds for name, count in repeats.items())
    once_s = sum(
        count * pricing.parameter_seconds(parameter.type, lies)
        for name, count in repeats.items()
        for parameter, lies in zip(graph.body_of[name].parameters, placed[name].placement.parameters, strict=True)
    )
    held = 0
    for (name, at), count in graph.stands_for.items():
        each = placed[name].placement
        type_ = graph.body_of[name].parameters[at].type
        held += count * local_type(type_, each.parameters[at], each.degree).elements()
    return Option(boundary, {name: each.placement for name, each in placed.items()}, seconds, once_s, held)


@dataclass(frozen=True)
class _Solver:
    """Solves each body once for each boundary, with those that it shares parameters with. ``known`` and ``pruned`` (spaces
    without the price of state) are shared by all state prices. ``plain``: of time alone, where state has a price."""

    graph: ModelGraph
    degree: int
    pricing: Pricing
    rules: Rules
    state_price: float
    known: Known = field(default_factory=Known)
    pruned: dict[tuple[str, Activations], Space | None] = field(default_factory=dict)
    plain: _Solver | None = None

    def with_price(self, state_price: float) -> _Solver:
        """One of time alone with a price of state."""
        return replace(self, state_price=state_price, plain=self) if state_price else self

    @cached_property
    def tables(self) -> Mapping[str, StrategyTable]:
        """Strategies of every body."""
        return {body.name: self.rules(body, self.degree) for body in self.graph.bodies}

    @cached_property
    def groups(self) -> tuple[tuple[frozenset[Slot], tuple[Placement, ...]], ...]:
        """Groups of tied parameters with the placements that all their bodies can work with."""
        return tuple((group, self._candidates(group)) for group in self.graph.tied_slots)

    def _candidates(self, group: frozenset[Slot]) -> tuple[Placement, ...]:
        asked = [
            asked_placements(self.graph.body_of[body], self.tables[body], name)[0] for body, name in sorted(group)
        ]
        common = [placement for placement in asked[0] if all(placement in other for other in asked)]
        trained = all(name in self.graph.body_of[body].differentiable for body, name in group)
        whole = (REPLICATE, SHARED) if trained else (REPLICATE,)
        return tuple(dict.fromkeys((*whole, *common)))

    @cached_property
    def joined(self) -> tuple[tuple[Body, ...], ...]:
        """The bodies, those that share parameters together."""
        ties: nx.Graph[str] = nx.Graph()
        ties.add_nodes_from(body.name for body in self.graph.bodies)
        for group, _ in self.groups:
            nx.add_path(ties, sorted({owner for owner, _ in group}))
        return tuple(tuple(self.graph.body_of[name] for name in sorted(names)) for names in nx.connected_components(ties))

    def best(self, boundary: Placement, share: float) -> Option | None:
        """The cheapest way to place all bodies where a micro-batch has this share of what is done once a step."""
        placed: dict[str, PlacedBody] = {}
        for bodies in self.joined:
            found = self.solve(bodies, boundary, share if self._tied(bodies) else 1.0)
            if found is None:
                return None
            placed |= found
        return _option(self.graph, boundary, placed, self.pricing)

    def _tied(self, bodies: tuple[Body, ...]) -> bool:
        return any(owner == body.name for group, _ in self.groups for owner, _ in group for body in bodies)

    @cached_property
    def _solved(self) -> dict[tuple[str, Placement, float], dict[str, PlacedBody] | None]:
        return {}

    def solve(self, bodies: tuple[Body, ...], boundary: Placement, share: float) -> dict[str, PlacedBody] | None:
        """The cheapest placement of bodies that share parameters."""
        key = (bodies[0].name, boundary, share)
        if key not in self._solved:
            self._solved[key] = self._solve(bodies, boundary, share)
        return self._solved[key]

    def _solve(self, bodies: tuple[Body, ...], boundary: Placement, share: float) -> dict[str, PlacedBody] | None:
        """Bodies that share parameters at once: every combination of placements of these is in one problem, however many they
        are. What is quickest and holds no more than it must is cheapest whatever state costs."""
        if self.plain is not None:
            found = self.plain.solve(bodies, boundary, share)
            if found is None or all(self._holds_least(body, found[body.name].placement) for body in bodies):
                return found
        spaces = [self._space(body, boundary, share) for body in bodies]
        if None in spaces:
            return None
        number, repeats = {body.name: at for at, body in enumerate(bodies)}, Counter(block.body for block in self.graph.blocks)
        ties = [
            [(number[owner], name) for owner, name in group]
            for group, placements in self.groups if len(placements) > 1 and all(owner in number for owner, _ in group)
        ]
        joint = prune(join([space for space in spaces if space is not None], [repeats[body.name] for body in bodies], ties))
        picks = None if joint is None else cheapest_picks(contract(joint))
        if picks is None:
            return None
        pairs = zip(bodies, apart(picks, len(bodies)), strict=True)
        return {
            body.name: placed_body(body, self.degree, own, self.tables[body.name], self.pricing) for body, own in pairs
        }

    def _holds_least(self, body: Body, placed: BodyPlacement) -> bool:
        """Whether a rank can hold no less of any parameter."""
        pairs = zip(body.parameters, placed.parameters, strict=True)
        return all(held(p.type, lies, self.degree) <= self._least_held[body.name, p.name] for p, lies in pairs)

    @cached_property
    def _least_held(self) -> Mapping[Slot, int]:
        """Elements of every parameter on the rank that holds most of it, at least."""
        tied = {slot: placements for group, placements in self.groups for slot in group}
        found: dict[Slot, int] = {}
        for body in self.graph.bodies:
            for parameter in body.parameters:
                slot = body.name, parameter.name
                lies = tied[slot] if slot in tied else asked_placements(body, self.tables[body.name], parameter.name)[0]
                found[slot] = min((held(parameter.type, each, self.degree) for each in lies), default=0)
        return found

    def _space(self, body: Body, boundary: Placement, share: float) -> Space | None:
        """The reduced space of a body under one boundary, open in its tied parameters."""
        space = self._priced(body, boundary.state == "shard", share)
        if space is None:
            return None
        limits = dict(body_boundary(self.graph, body, boundary))
        limits |= {output_vertex(at): limits[name] for at, name in enumerate(body.outputs)}
        pruned = prune(space.restricted(limits))
        return None if pruned is None else contract(pruned)

    def _priced(self, body: Body, split: bool, share: float) -> Space | None:
        """The reduced space of a body under all whole or all split boundaries."""
        key = (body.name, split, share)
        if key not in self._spaces:
            pruned = self._unpriced(body, split)
            priced = None if pruned is None else with_parameter_prices(pruned, body, self.state_price, share)
            self._spaces[key] = None if priced is None else contract(priced)
        return self._spaces[key]

    @cached_property
    def _spaces(self) -> dict[tuple[str, bool, float], Space | None]:
        return {}

    def _unpriced(self, body: Body, split: bool) -> Space | None:
        candidates = [each for each in boundary_candidates(self.graph, self.degree) if (each.state == "shard") == split]
        boundaries = [body_boundary(self.graph, body, candidate) for candidate in candidates]
        # A block that no split activation comes to (one of a conditioning) has nothing to keep split: it is a plain one.
        handed_split = any(end.state == "shard" for ends in boundaries for end in ends.values())
        activations: Activations = "split" if handed_split else "whole"
        key = (body.name, activations)
        if key not in self.pruned:
            boundary = {name: tuple(dict.fromkeys(b[name] for b in boundaries)) for name in boundaries[0]}
            tied = {name: placements for group, placements in self.groups for owner, name in group if owner == body.name}
            table, known = self.tables[body.name], self.known
            self.pruned[key] = prune(
                build_space(body, self.degree, table, boundary, tied, self.pricing, activations=activations, known=known)
            )
        return self.pruned[key]


def _best_options(solver: _Solver, boundary: Placement) -> list[Option]:
    """The cheapest for one micro-batch a step, for very many, and where these two are as quick: a sum of gradients once a step
    is worth more, the more micro-batches there are. Only bodies with tied parameters differ, which makes single blocks (the
    two ends) of most chains, so that they hardly cost the search anything."""
    few, many = solver.best(boundary, 1.0), solver.best(boundary, 0.0)
    if few is None or many is None:
        return []
    more_once_s = many.once_s - few.once_s
    share = (few.each_s - many.each_s) / more_once_s if more_once_s else 0.0
    between = solver.best(boundary, share) if 0 < share < 1 else None
    return [few, many] if between is None else [few, many, between]
