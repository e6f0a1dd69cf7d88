"""Space: the choices of one body, as vertices joined by values, each choice with its price.

A vertex is an operation (choices: its strategies), a block input, a buffer or a parameter (choices: placements), or a
block output (one choice for each boundary placement). A value has one writer and any number of reading slots. The space
knows no operation any more, only placements and prices, so that reductions and the ILP are about nothing else.

Prices are in *units*: the seconds of the whole body, every vertex at its dearest, are a million units. Beside its
seconds a choice carries small terms that only decide ties, in this order:

==============================  =============  ================================================================
term                            units          effect
==============================  =============  ================================================================
one collective                  1              of equally fast placements, the one with fewer collectives
an operation that is repeated   0.01           then the one that does fewer operations in full on every rank
order                           up to 0.0001   then a fixed one: a number drawn from the names of node and choice
==============================  =============  ================================================================

Time alone would often hold every weight whole and split the sequence: nothing is communicated but a gradient sum a
step. What that costs in memory is priced by ``state_price``: holding all matrices of the body whole costs so many times
the body's dearest seconds. 0 asks for the fastest placement; ``DIVIDED_STATE`` for the fastest of those that divide
what they can. Vectors (norms' weights, biases) are left out: they are small, and to divide them would cost a collective
each.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeAlias

from planner.ir.body import Body, Node
from planner.ir.placement import (
    REPLICATE,
    SHARED,
    Conversion,
    OpStrategy,
    Placement,
    conversion,
    even,
    local_type,
    transfers,
)
from planner.ir.types import BatchMultiple, TensorType
from planner.placement.pricing import Pricing

StrategyTable: TypeAlias = Mapping[str, Sequence[OpStrategy]]
Pick: TypeAlias = tuple[str, OpStrategy | Placement]

UNITS = 1e6
COLLECTIVE_UNITS = 1.0
REPEATED_UNITS = 1e-2
ORDER_UNITS = 1e-4
DIVIDED_STATE = 100.0


Activations = Literal["any", "whole", "split"]
"""What a block may do with activations that carry a gradient: ``whole`` ones stay so (classic tensor parallelism),
``split`` ones stay so (sequence parallelism), or any conversion that the algebra has."""


@dataclass(frozen=True, slots=True)
class Value:
    """What flows along an edge. ``type`` is the whole value's; a parameter is converted by slicing only. ``returned``: all that
    read it hand a gradient back."""

    type: TensorType
    differentiable: bool
    parameter: bool
    returned: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to place a vertex: ``reads``/``writes`` align with the vertex's, and are numbers of placements
    (:meth:`Known.number`: they are compared very often); ``picks`` is what it means."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    price: float
    picks: tuple[Pick, ...]


@dataclass(frozen=True, slots=True)
class Vertex:
    """``reads``: the value in each reading slot (repetitions kept); ``writes``: the values it produces."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Known:
    """What the spaces of one graph, degree and pricing share, filled as they ask. ``seconds``: of every node under every
    strategy, by body; ``conversions``: seconds and number of collectives of a conversion, None where it is illegal;
    ``placements``: by their numbers."""

    seconds: dict[str, Mapping[tuple[str, int], float]] = field(default_factory=dict)
    conversions: dict[tuple[Value, int, int], tuple[float, int] | None] = field(default_factory=dict)
    placements: list[Placement] = field(default_factory=list)
    numbers: dict[Placement, int] = field(default_factory=dict)

    def number(self, placement: Placement) -> int:
        """The number that stands for a placement and all that equal it."""
        number = self.numbers.setdefault(placement, len(self.placements))
        if number == len(self.placements):
            self.placements.append(placement)
        return number


@dataclass(frozen=True)
class Space:
    """``pinned`` vertices stay apart in reductions, because they will be restricted (boundary, tied parameters).
    ``activations``: see :data:`Activations`. ``prices`` remembers the conversions priced so far; all spaces
    made from this one share it; ``known``: see :class:`Known`."""

    degree: int
    values: Mapping[str, Value]
    vertices: tuple[Vertex, ...]
    pinned: frozenset[str]
    pricing: Pricing
    unit_s: float
    activations: Activations
    prices: dict[tuple[str, int, int], float | None] = field(
        default_factory=dict, repr=False, compare=False
    )
    known: Known = field(default_factory=Known, repr=False, compare=False)

    @cached_property
    def readers(self) -> Mapping[str, tuple[tuple[Vertex, int], ...]]:
        """The reading slots of each value."""
        table: dict[str, list[tuple[Vertex, int]]] = {}
        for vertex in self.vertices:
            for slot, value in enumerate(vertex.reads):
                table.setdefault(value, []).append((vertex, slot))
        return {value: tuple(slots) for value, slots in table.items()}

    @cached_property
    def writer(self) -> Mapping[str, tuple[Vertex, int]]:
        """The vertex that writes each value, and at which position."""
        return {value: (vertex, at) for vertex in self.vertices for at, value in enumerate(vertex.writes)}

    def conversion_price(self, name: str, source: int, target: int) -> float | None:
        """Units of converting a value once, forward and backward; None where it cannot be converted."""
        key = (name, source, target)
        if key not in self.prices:
            self.prices[key] = self._conversion_price(self.values[name], source, target)
        return self.prices[key]

    def _conversion_price(self, value: Value, source: int, target: int) -> float | None:
        placements = self.known.placements
        if _FORBIDDEN[self.activations](value, placements[source], placements[target]):
            return None
        key = (value, source, target)
        if key not in self.known.conversions:
            self.known.conversions[key] = self._conversion(value, placements[source], placements[target])
        known = self.known.conversions[key]
        if known is None or source == target:
            return None if known is None else 0.0
        return known[0] / self.unit_s + known[1] * COLLECTIVE_UNITS

    def _conversion(self, value: Value, source: Placement, target: Placement) -> tuple[float, int] | None:
        """Seconds and collectives, forward and backward; None where it cannot be done."""
        step = legal_conversion(value, source, target, self.degree)
        if step is None:
            return None
        count = sum(len(transfers(name, value.type, target, self.degree, 1)) for name in (step.forward, step.backward))
        return conversion_seconds(self.pricing, step, value), count

    def with_vertices(self, vertices: Sequence[Vertex]) -> Space:
        """The same space with other vertices (prices of conversions are kept)."""
        return replace(self, vertices=tuple(vertices))

    def restricted(self, placements: Mapping[str, Placement]) -> Space:
        """The space in which the given pinned vertices have the given placements only, pinned no more."""
        vertices = [
            replace(vertex, choices=tuple(c for c in vertex.choices if c.picks[0][1] == placements[vertex.name]))
            if vertex.name in placements and vertex.name in self.pinned else vertex
            for vertex in self.vertices
        ]
        return replace(self.with_vertices(vertices), pinned=self.pinned - set(placements))


def conversion_seconds(pricing: Pricing, step: Conversion, value: Value) -> float:
    """Forward, and backward where a gradient comes back for certain."""
    forward_s, backward_s = pricing.conversion_seconds(step, value.type)
    return forward_s + backward_s if value.returned else forward_s


def inner_seconds(pricing: Pricing, body: Body, node: Node, strategy: OpStrategy) -> float:
    """The collectives inside an operation, backward where a gradient comes to it."""
    forward_s, backward_s = pricing.strategy_comm_seconds(strategy, grows=grows(body, node))
    return forward_s + backward_s if node.name in body.asked else forward_s


def grows(body: Body, node: Node) -> bool:
    """Whether some operand or result of an operation has the batch."""
    types = (*(body.types[name] for name in node.operands), *node.types)
    return any(isinstance(extent, BatchMultiple) for type_ in types for extent in type_.shape)


def legal_conversion(value: Value, source: Placement, target: Placement, degree: int) -> Conversion | None:
    """The conversion of a value, or None. State is never moved between ranks in a step: a parameter is read as it lies,
    or its rank's part is cut out of the whole."""
    step = conversion(source, target, value.type, degree, differentiable=value.differentiable)
    if step is not None and value.parameter and source != target and step.forward not in ("identity", "slice"):
        return None
    if step is not None and value.parameter and source.state != target.state and step.forward == "identity":
        return None
    return step


def _cuts(value: Value, source: Placement, target: Placement) -> bool:
    """Whether an activation whose gradient is whole gets split, so that the gradient has to be gathered: how a block that
    is handed whole activations begins to split the sequence inside."""
    whole_gradient = source.state in ("replicate", "partial")
    return value.differentiable and not value.parameter and whole_gradient and target.state == "shard"


def _undoes(value: Value, source: Placement, target: Placement) -> bool:
    """Whether an activation is made whole with a whole gradient: a block that is handed split activations would then keep
    whole ones again, and splitting the sequence would save nothing. (Whole for one operation is ``shared``.)"""
    activation = value.differentiable and not value.parameter and value.type.rank > 0
    return activation and source.state in ("shard", "partial") and target.state == "replicate"


_FORBIDDEN: Mapping[Activations, Callable[[Value, Placement, Placement], bool]] = {
    "any": lambda value, source, target: False, "whole": _cuts, "split": _undoes,
}


def output_vertex(index: int) -> str:
    """Name of the vertex of a block output (no value can have it)."""
    return f"output {index}"


def build_space(
    body: Body,
    degree: int,
    strategies: StrategyTable,
    boundary: Mapping[str, Sequence[Placement]],
    parameters: Mapping[str, Sequence[Placement]],
    pricing: Pricing,
    state_price: float = 0.0,
    activations: Activations = "any",
    known: Known | None = None,
) -> Space:
    """The space of a body. ``boundary`` gives the candidates of block inputs and outputs (``replicate`` where it says
    nothing); ``parameters`` those of parameters that are fixed or tied: the others take what their readers ask. ``known``: of
    this graph, degree and pricing."""
    values = body_values(body)
    known = Known() if known is None else known
    if body.name not in known.seconds:
        known.seconds[body.name] = _node_seconds(body, strategies, pricing)
    seconds = known.seconds[body.name]
    dearest: dict[str, float] = {}
    for (name, _), price in seconds.items():
        dearest[name] = max(price, dearest.get(name, 0.0))
    unit_s = sum(dearest.values()) / UNITS or 1.0 / UNITS
    vertices = [
        *(_source(known, v.name, boundary.get(v.name, (REPLICATE,))) for v in body.inputs),
        *(_source(known, buffer.name, (REPLICATE,)) for buffer in body.buffers),
        *(
            _parameter(known, parameter.name, {
                placed: pricing.parameter_seconds(parameter.type, placed) / unit_s
                for placed in _candidates(body, strategies, parameter.name, parameters)
            })
            for parameter in body.parameters
        ),
        *(
            _operation(known, body, node, strategies[node.name],
                       [seconds[node.name, at] / unit_s for at in range(len(strategies[node.name]))])
            for node in body.nodes
            if node.base != "getitem"
        ),
        *(
            Vertex(output_vertex(at), (name,), (), tuple(
                Choice((known.number(placement),), (), 0.0, ((output_vertex(at), placement),))
                for placement in boundary.get(name, (REPLICATE,))
            ))
            for at, name in enumerate(body.outputs)
        ),
    ]
    undecided = {v.name for v in body.inputs} | {output_vertex(at) for at in range(len(body.outputs))} | set(parameters)
    pinned = frozenset(v.name for v in vertices if v.name in undecided and len(v.choices) > 1)
    space = Space(degree, values, tuple(vertices), pinned, pricing, unit_s, activations, known=known)
    return with_parameter_prices(space, body, state_price)


def with_parameter_prices(space: Space, body: Body, state_price: float, share: float = 1.0) -> Space:
    """The same space where parameters cost what they hold as well, and this ``share`` of what they cost once a step."""
    types = {parameter.name: parameter.type for parameter in body.parameters}
    matrices = sum(type_.elements() for type_ in types.values() if type_.rank > 1)
    each = state_price * UNITS / matrices if matrices else 0.0
    if not each and share == 1:
        return space

    def priced(name: str, choice: Choice) -> Choice:
        placement = space.known.placements[choice.writes[0]]
        less = (1 - share) * space.pricing.parameter_seconds(types[name], placement) / space.unit_s
        return replace(choice, price=choice.price - less + each * held(types[name], placement, space.degree))

    return space.with_vertices([
        replace(vertex, choices=tuple(priced(vertex.name, choice) for choice in vertex.choices))
        if vertex.name in types else vertex
        for vertex in space.vertices
    ])


def _node_seconds(body: Body, strategies: StrategyTable, pricing: Pricing) -> Mapping[tuple[str, int], float]:
    """Of every node and strategy, collectives inside operations included."""
    return {
        (node.name, at): sum(pricing.node_seconds(body, node, strategy)) + inner_seconds(pricing, body, node, strategy)
        for node in body.nodes
        if node.base != "getitem"
        for at, strategy in enumerate(strategies[node.name])
    }


def body_values(body: Body) -> Mapping[str, Value]:
    """What the algebra has to know of every value of a body."""
    parameters = {parameter.name for parameter in body.parameters}
    return {
        name: Value(type_, name in body.differentiable and type_.floating, name in parameters, _returned(body, name))
        for name, type_ in body.types.items()
    }


def _returned(body: Body, name: str) -> bool:
    """Whether a value has a gradient, and every operation that reads it hands one back."""
    readers = body.consumers.get(name, ())
    return name in body.differentiable and all(reader.differentiable and reader.name in body.asked for reader in readers)


def _source(known: Known, name: str, candidates: Sequence[Placement]) -> Vertex:
    return Vertex(name, (), (name,), tuple(Choice((), (known.number(p),), 0.0, ((name, p),)) for p in candidates))


def _parameter(known: Known, name: str, prices: Mapping[Placement, float]) -> Vertex:
    return Vertex(name, (), (name,), tuple(
        Choice((), (known.number(placed),), price + _order(name, str(placed)), ((name, placed),))
        for placed, price in prices.items()
    ))


def held(type_: TensorType, placement: Placement, degree: int) -> int:
    """Elements of a matrix on the rank that holds most; vectors count nothing."""
    return local_type(type_, placement, degree).elements() if type_.rank > 1 else 0


def _candidates(
    body: Body, strategies: StrategyTable, name: str, parameters: Mapping[str, Sequence[Placement]]
) -> tuple[Placement, ...]:
    """What the readers of a parameter ask of it; for one with several readers also whole, for them to slice."""
    if name in parameters:
        return tuple(parameters[name])
    asked, slots = asked_placements(body, strategies, name)
    if slots == 0:
        return (REPLICATE,)
    whole = (REPLICATE, SHARED) if slots > 1 and name in body.differentiable else (REPLICATE,) if slots > 1 else ()
    return tuple(dict.fromkeys((*whole, *asked)))


def asked_placements(body: Body, strategies: StrategyTable, name: str) -> tuple[tuple[Placement, ...], int]:
    """The placements, without partial sums, in which nodes can read a value, and in how many slots they do."""
    slots = [
        (node, slot) for node in body.consumers.get(name, ()) for slot, operand in enumerate(node.operands)
        if operand == name
    ]
    asked = dict.fromkeys(
        strategy.operands[slot] for node, slot in slots for strategy in strategies[node.name]
        if strategy.operands[slot].state != "partial"
    )
    return tuple(asked), len(slots)


def _operation(
    known: Known, body: Body, node: Node, strategies: Sequence[OpStrategy], prices: Sequence[float]
) -> Vertex:
    writes, positions = _outputs(body, node)
    return Vertex(node.name, node.operands, writes, tuple(
        Choice(
            tuple(map(known.number, strategy.operands)),
            tuple(known.number(strategy.outputs[position]) for position in positions),
            price + _tie(node, strategy),
            ((node.name, strategy),),
        )
        for strategy, price in zip(strategies, prices, strict=True)
    ))


def _outputs(body: Body, node: Node) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names and positions of the outputs that something reads; those of several are named by their ``getitem``."""
    if len(node.types) == 1 and not any(c.base == "getitem" for c in body.consumers.get(node.name, ())):
        return (node.name,), (0,)
    items = [reader for reader in body.consumers.get(node.name, ()) if reader.base == "getitem"]
    return tuple(item.name for item in items), tuple(item_index(item) for item in items)


def item_index(node: Node) -> int:
    """Which output of its operand a ``getitem`` is."""
    index = node.argument("index")
    assert isinstance(index, int)
    return index


def _tie(node: Node, strategy: OpStrategy) -> float:
    collectives = len(strategy.forward) + len(strategy.backward)
    repeated = not any(p.state in ("shard", "partial") for p in (*strategy.operands, *strategy.outputs))
    order = _order(node.name, f"{strategy.name} {strategy.operands} {strategy.outputs}")
    return collectives * COLLECTIVE_UNITS + repeated * REPEATED_UNITS + order


def _order(name: str, choice: str) -> float:
    return zlib.crc32(f"{name} {choice}".encode()) / 2**32 * ORDER_UNITS


def splittable(type_: TensorType, placement: Placement, degree: int) -> bool:
    """Whether a value can lie so at a block's boundary: whole, or in equal parts of a dim that is not the batch."""
    if placement.state != "shard":
        return True
    inside = placement.dim < type_.rank
    return inside and isinstance(type_.shape[placement.dim], int) and even(type_, placement, degree)
