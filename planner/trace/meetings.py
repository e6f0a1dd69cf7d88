"""Where samples meet: each value is followed with the dim that holds the samples, from the batch's inputs to the loss.

An operation is fine where every sample's result depends on that sample alone. Refused is what is known to do otherwise:
what works along the dim of the samples, joins that dim with itself, or reads one sample's place for another. What an unknown
operation does, or an index that the data decides, is not known: it passes, and the dim that grows with the batch is taken
to hold the samples of its result, in an order not known.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.ir.body import Node
from planner.ir.errors import ModelError
from planner.ir.inlining import DRAWN
from planner.ir.types import Argument, BatchMultiple, Ref, TensorType
from planner.trace.additive import added_up, is_additive
from planner.trace.along import along, contracted
from planner.trace.dtypes import CONSTANT
from planner.trace.export import BATCH
from planner.trace.flat import FlatGraph, place
from planner.trace.order import PLAIN, Order, batch_dims, factor, orders, reshaped, sliced
from planner.trace.positions import Positions

ALONE = "compute every sample by itself until the loss adds them up"
BY_PLACE = frozenset({"arange", "eye", "linspace", "logspace", "range", "tril_indices", "triu_indices"})
"""Their elements differ by place."""
READS = {"embedding": "indices", "gather": "index", "index": "indices", "index_select": "index"}
WRITES = {
    "index_add": "index", "index_copy": "index", "index_put": "indices", "index_reduce": "index", "scatter": "index",
    "scatter_add": "index", "scatter_reduce": "index",
}
"""Operations that read or write where an argument says."""
RANKS = frozenset({"argsort", "cumsum", "sort", "topk"})
"""Of whole numbers they say where tokens go, as in a mixture of experts, which brings them back."""
COMPARISONS = frozenset({"ge", "gt", "le", "lt"})
SPLITS = frozenset({"chunk", "split", "split_with_sizes", "tensor_split"})
NEAR = (-2, -1, 1, 2)
POOLS: Mapping[Argument, str] = {0: "sum", 1: "mean", 2: "amax"}
"""What ``embedding_bag`` does with the rows of a bag, by its number of the mode."""


class Kind(enum.Enum):
    """What a value depends on: nothing of the batch; samples' places alone; samples; several samples, to say where one goes."""

    FREE = enum.auto()
    PLACE = enum.auto()
    SAMPLES = enum.auto()
    ROUTE = enum.auto()


@dataclass(frozen=True, slots=True)
class Followed:
    """``order``: of the samples in the dim that grows with the batch; None: not known, or there is none."""

    kind: Kind
    order: Order | None = None

    @property
    def of_samples(self) -> bool:
        return self.kind in (Kind.SAMPLES, Kind.ROUTE)


def refuse_meetings(graph: FlatGraph) -> None:
    """Raise ModelError, naming the line, for an operation by which one sample's result depends on another sample."""
    _Walk(graph).walk()


class _Walk:
    """Follows values in the graph's order; what is known so far is its fields."""

    def __init__(self, graph: FlatGraph) -> None:
        self.graph = graph
        self.positions = Positions(graph)
        self.added_up = added_up(graph)
        self.sized = {
            extent for name, type_ in graph.inputs.items() if not name.startswith("batch:") for extent in type_.shape
        }
        self.followed: dict[str, tuple[Followed, ...]] = {
            name: (Followed(Kind.SAMPLES, PLAIN) if name.startswith("batch:") else Followed(Kind.FREE),)
            for name in graph.inputs
        }

    def walk(self) -> None:
        for node in self.graph.nodes:
            self.followed[node.name] = tuple(self._follow(node))
            self._refuse_baked(node)

    def _follow(self, node: Node) -> Iterator[Followed]:
        if node.op == "getitem":
            at = node.argument("index")
            several = self.followed[node.operands[0]]
            yield several[at] if isinstance(at, int) and at < len(several) else several[0]
        elif node.base in CONSTANT:
            yield Followed(Kind.FREE)
        elif node.base in DRAWN:
            yield Followed(Kind.SAMPLES, self._order_of_drawn(node))
        elif not any(self.of(name).of_samples for name in node.operands):
            self._refuse_table(node)
            yield from (Followed(self._without_samples(node)) for _ in node.types)
        else:
            self._refuse_along(node)
            self._refuse_pairs(node)
            self._refuse_places(node)
            kinds = self._kinds(node)
            yield from (Followed(kind, self._order(node, type_)) for kind, type_ in zip(kinds, node.types, strict=True))

    def _order_of_drawn(self, node: Node) -> Order | None:
        """Which of the numbers that a node draws are a sample's: those in its place in what they are like, or in the batch."""
        name = node.operands[0]
        while (maker := self.graph.by_name.get(name)) is not None and maker.base in CONSTANT and maker.operands:
            name = maker.operands[0]
        if self.of(name).of_samples and self.type_of(name).shape == node.type.shape:
            return self.of(name).order
        if batch_dims(node.type) != [0] or factor(node.type, 0) != 1:
            wrong = f"which of the numbers that {node.base} draws are a sample's is not known"
            raise ModelError(place(node, self.graph.where), wrong, "draw [batch, ...], or like an activation (randn_like)")
        return PLAIN

    def of(self, name: str) -> Followed:
        return self.followed[name][0]

    def type_of(self, name: str) -> TensorType:
        return self.graph.type_of(name)

    def _without_samples(self, node: Node) -> Kind:
        """Whether a value differs by place, as far as one can tell: what is taken to is looked at before it is refused."""
        grows = any(isinstance(value, BatchMultiple) for _, value in node.arguments) or any(map(batch_dims, node.types))
        if any(self.of(name).kind is Kind.PLACE for name in node.operands) or (node.base in BY_PLACE and grows):
            return Kind.PLACE
        if node.base == "full":
            return Kind.PLACE if isinstance(node.argument("fill_value"), BatchMultiple) else Kind.FREE
        lost = any(batch_dims(self.type_of(name)) for name in node.operands) and not all(map(batch_dims, node.types))
        return Kind.PLACE if lost or self._works_along(node) else Kind.FREE

    def _works_along(self, node: Node) -> list[int]:
        """Dims of the first operand that grow with the batch and that the node works along."""
        if not node.operands:
            return []
        type_ = self.type_of(node.operands[0])
        growing = batch_dims(type_)
        return [dim for dim in along(node, type_.rank) if dim in growing] if growing else []

    # What is refused.

    def _refuse(self, node: Node, wrong: str, right: str = ALONE) -> ModelError:
        return ModelError(place(node, self.graph.where), f"{node.base} {wrong}", right)

    def _refuse_baked(self, node: Node) -> None:
        """A size next to the batch's, which the program would hold as a number."""
        given = [value for _, argument in node.arguments for value in _integers(argument)]
        extents = [extent for type_ in node.types for extent in type_.shape if isinstance(extent, int)]
        for number in (*given, *extents):
            if abs(number) > BATCH // 2 and number not in self.sized and any((number - by) % BATCH == 0 for by in NEAR):
                by = next(by for by in NEAR if (number - by) % BATCH == 0)
                times = BatchMultiple((number - by) // BATCH)
                raise self._refuse(node, f"computes with the batch size ({times} {'+' if by > 0 else '-'} {abs(by)})",
                                   "a plan divides the batch: work on all of it, by dims and numbers that do not depend on it")

    def _refuse_along(self, node: Node) -> None:
        first = self.of(node.operands[0])
        whole = not self.type_of(node.operands[0]).floating
        dims = self._works_along(node)
        if dims and first.of_samples and not (whole and node.base in RANKS):
            raise self._refuse(node, f"works along dim {dims[0]}, which holds the samples", ALONE)
        grows = any(map(batch_dims, node.types))
        for name, dim in contracted(node, self.type_of):
            if grows and self.of(name).of_samples and dim in batch_dims(self.type_of(name)):
                raise self._refuse(node, f"adds up over dim {dim}, which holds the samples", ALONE)

    def _refuse_pairs(self, node: Node) -> None:
        for type_ in node.types:
            dims = batch_dims(type_)
            if len(dims) > 1 or any(self._paired(node, factor(type_, dim)) for dim in dims):
                raise self._refuse(node, "pairs every sample with every other", ALONE)
        if node.base in READS or node.base in WRITES or self._joins(node):
            return
        known = self._fitting(node)
        if len({order.factor for order in known}) < len(known):
            first, second, *_ = sorted(map(str, known))
            raise self._refuse(node, f"reads samples in two orders, {first} and {second}",
                               "merge dims in one order: both [batch, sequence], or both [sequence, batch]")

    def _paired(self, node: Node, length: int) -> bool:
        """Whether so many positions a sample must be other samples: each pair once is half of the batch for every sample. A
        long sample has as many itself, and then they come from an operand that holds them."""
        if length <= BATCH // 4 or self._joins(node):
            return False
        types = [self.type_of(name) for name in node.operands if self.of(name).of_samples]
        if node.base in ("slice", "narrow", *SPLITS) and any(factor(types[0], dim) > length for dim in batch_dims(types[0])):
            return False
        return all(type_.elements() % length for type_ in types)

    def _joins(self, node: Node) -> bool:
        """Whether the node joins values along the dim of the samples."""
        if node.base not in ("cat", "concat", "concatenate"):
            return False
        dim = node.argument("dim")
        return isinstance(dim, int) and dim % node.type.rank in batch_dims(node.type)

    def _fitting(self, node: Node) -> list[Order]:
        """The orders of operands' samples, each once, where their dim is as long as the result's."""
        found = dict.fromkeys(self.of(name).order for name in node.operands if self.of(name).of_samples)
        wanted = {factor(type_, dim) for type_ in node.types for dim in batch_dims(type_)} if len(found) > 1 else None
        return [order for order in found if order is not None and (not wanted or order.factor in wanted)]

    def _refuse_places(self, node: Node) -> None:
        """A number that depends on a sample's place in the batch, or on how many there are, among the numbers themselves."""
        if node.base in READS or node.base in WRITES:
            return
        kinds = [self.of(name).kind for name in node.operands]
        if Kind.ROUTE in kinds and (node.type.floating or node.base in COMPARISONS):
            raise self._refuse(node, "computes with numbers counted or sorted over the samples", ALONE)
        if Kind.PLACE not in kinds or not any(type_.floating for type_ in node.types):
            return
        order = next(iter(self._fitting(node)), None)
        for name, kind in zip(node.operands, kinds, strict=True):
            counted = node.name in self.added_up and is_additive(self.graph, name)  # so much for each of the terms
            if kind is not Kind.PLACE or counted or self.positions.uniform(name, order) is not False:
                continue
            if node.base == "embedding_bag":
                wrong = "finds a sample's ids by offsets, which nn.EmbeddingBag makes of the number of samples"
                same = f"nn.Embedding(...)(ids).{POOLS[node.argument('mode')]}(1) is the same of ids [batch, n]"
                raise self._refuse(node, wrong, same)
            raise self._refuse(node, "computes with a sample's place in the batch, or with their number", ALONE)

    def _refuse_table(self, node: Node) -> None:
        """Parameters that are read by a sample's place in the batch."""
        if node.base not in READS or not node.type.floating or batch_dims(self.type_of(node.operands[0])):
            return
        if any(self.positions.uniform(name, PLAIN) is False for name in _named(node, READS[node.base])):
            raise self._refuse(node, "reads by a sample's place in the batch", ALONE)

    # What follows.

    def _kinds(self, node: Node) -> Iterator[Kind]:
        """Of each result. What is read at a route is a sample's again; what is sorted are samples, and a route to them."""
        index = READS.get(node.base)
        routed = any(self.of(name).kind is Kind.ROUTE for name in node.operands if name not in _named(node, index))
        ranked = node.base in RANKS and bool(self._works_along(node))
        for at, type_ in enumerate(node.types):
            route = routed or (ranked and at == len(node.types) - 1)
            yield Kind.ROUTE if route and not type_.floating else Kind.SAMPLES

    def _order(self, node: Node, type_: TensorType) -> Order | None:
        dims = batch_dims(type_)
        if not dims:
            return self._without_batch(node)
        plain = PLAIN if factor(type_, dims[0]) == 1 else None
        source = node.operands[0]
        order, before = self.of(source).order, self.type_of(source)
        if node.base in READS or node.base in WRITES:
            return self._at_indices(node, type_) or plain
        if node.base in RANKS and self._works_along(node):
            return plain
        if node.base == "reshape" and order is not None and batch_dims(before):
            return self._reshaped(node, order, before, type_)
        if self._joins(node):
            return self._joined(node) or plain
        if node.base in ("slice", "narrow", *SPLITS) and order is not None and self._dim(node, before) in batch_dims(before):
            return self._taken(node, order, before, type_)
        if node.base in ("repeat", "repeat_interleave") and order is not None:
            return self._repeated(node, order, factor(type_, dims[0])) or plain
        return plain or next((found for found in self._fitting(node) if found.factor == factor(type_, dims[0])), None)

    def _dim(self, node: Node, type_: TensorType) -> int:
        dim = dict(node.arguments).get("dim", 0)
        return dim % type_.rank if isinstance(dim, int) else -1

    def _without_batch(self, node: Node) -> Order | None:
        """Nothing holds samples any more; a part of the batch that is too large to be meant is refused."""
        before = self.type_of(node.operands[0])
        if node.base in ("slice", "narrow", *SPLITS) and (dim := self._dim(node, before)) in batch_dims(before):
            extent = node.type.shape[dim]
            if isinstance(extent, int) and extent > BATCH >> 10:
                raise self._refuse(node, f"takes a part of dim {dim}, which holds the samples", ALONE)
        return None

    def _reshaped(self, node: Node, order: Order, before: TensorType, after: TensorType) -> Order | None:
        if 0 in before.shape:
            return None
        found = reshaped(order, before, after)
        if found is None:
            shapes = (f"[{', '.join(map(str, type_.shape))}]" for type_ in (before, after))
            raise self._refuse(node, f"from {next(shapes)} to {next(shapes)} cuts through samples",
                               "keep dims in their order, the batch's too: transpose where another order is meant")
        return found

    def _joined(self, node: Node) -> Order | None:
        """One after the other, where the samples of all lie alike."""
        whole = batch_dims(node.type)[0]
        found = [self.of(name).order or (PLAIN if factor(self.type_of(name), whole) == 1 else None) for name in node.operands]
        known = [order for order in found if order is not None]
        if len(known) < len(found) or len({order.inner for order in known}) > 1:
            return None
        return Order(sum(order.outer for order in known), known[0].inner)

    def _taken(self, node: Node, order: Order, before: TensorType, after: TensorType) -> Order | None:
        """A part of the dim that holds the samples."""
        dim = self._dim(node, before)
        if before.shape == after.shape and node.base in ("slice", "narrow"):
            return order
        length = factor(after, dim)
        found: Order | None = None
        if node.base in SPLITS:
            found = sliced(order, 0, BatchMultiple(length), 1) if length else None
        elif node.base == "narrow":
            start = node.argument("start")
            found = sliced(order, start, _end(start, length), 1) if isinstance(start, (int, BatchMultiple)) else None
        else:
            arguments = dict(node.arguments)
            step = arguments.get("step", 1)
            start, stop = (_bound(arguments.get(key), order, default) for key, default in (("start", 0), ("end", None)))
            found = sliced(order, start, stop, step) if isinstance(step, int) else None
        if found is None:
            raise self._refuse(node, f"takes a part of dim {dim}, which holds the samples{_in(order)}", ALONE)
        return found

    def _repeated(self, node: Node, order: Order, after: int) -> Order | None:
        if after % order.factor:
            return None
        times = after // order.factor
        if node.base == "repeat":
            return Order(order.outer * times, order.inner)
        return Order(order.outer, order.inner * times) if isinstance(dict(node.arguments).get("repeats"), int) else None

    # Reading and writing at indices.

    def _at_indices(self, node: Node, type_: TensorType) -> Order | None:
        """The order of what is read or written where an index says, along the samples' dim or another."""
        source, index = self._indexed(node)
        if index is None:  # along another dim
            fitting = [self.of(name).order for name in (source, *node.operands) if self.of(name).of_samples]
            length = factor(type_, batch_dims(type_)[0])
            return next((order for order in fitting if order is not None and order.factor == length), None)
        if self.of(index).of_samples:
            return None
        writes = node.base in WRITES
        own = self.of(source).order
        length = factor(self.type_of(source), self._samples_dim(node, source))
        among = [own] if own is not None else [*orders(length)] if writes or length == 1 else []
        found = self.positions.picked(index, among) if among else None
        if found is None:
            return None
        values = self._written(node) if writes else None
        found = tuple(pair for pair in found if values is None or values.factor != pair[1].factor or pair[1] == values)
        if not found:
            verb = "writes into other samples" if writes else "reads other samples"
            raise self._refuse(node, f"{verb} along dim {self._samples_dim(node, source)}", ALONE)
        return found[0][0] if writes else found[0][1] if found[0][1].factor == factor(type_, batch_dims(type_)[0]) else None

    def _samples_dim(self, node: Node, source: str) -> int:
        dims = batch_dims(self.type_of(source))
        return dims[0] if dims else -1

    def _indexed(self, node: Node) -> tuple[str, str | None]:
        """What is read or written, and the index along the dim of its samples."""
        index = dict(node.arguments)[READS.get(node.base) or WRITES[node.base]]
        source = node.operands[0]
        dim = self._samples_dim(node, source)
        if dim < 0:
            return source, None
        if node.base in ("index", "index_put") and isinstance(index, tuple):
            along_it = index[dim] if dim < len(index) else None
            return source, along_it.name if isinstance(along_it, Ref) else None
        works = dim == 0 if node.base == "embedding" else dim == self._dim(node, self.type_of(source))
        return source, index.name if works and isinstance(index, Ref) else None

    def _written(self, node: Node) -> Order | None:
        """The order of the samples in the values written."""
        arguments = dict(node.arguments)
        values = next((arguments[key] for key in ("src", "source", "values") if key in arguments), None)
        if not isinstance(values, Ref) or not self.of(values.name).of_samples:
            return None
        return self.of(values.name).order


def _named(node: Node, argument: str | None) -> frozenset[str]:
    """Names in an argument."""
    found = dict(node.arguments).get(argument) if argument else None
    items = found if isinstance(found, tuple) else (found,)
    return frozenset(item.name for item in items if isinstance(item, Ref))


def _integers(argument: Argument) -> Iterator[int]:
    if isinstance(argument, tuple):
        for item in argument:
            yield from _integers(item)
    elif isinstance(argument, int) and not isinstance(argument, bool):
        yield argument


def _bound(value: Argument, order: Order, default: int | None) -> int | BatchMultiple:
    """A slice's bound from the front; the end of the dim where none is said."""
    if isinstance(value, BatchMultiple):
        return BatchMultiple(value.factor + order.factor if value.factor < 0 else min(value.factor, order.factor))
    if isinstance(value, int) and value < 1 << 62:
        return value
    return BatchMultiple(order.factor) if default is None or value is not None else default


def _end(start: int | BatchMultiple, length: int) -> BatchMultiple:
    return BatchMultiple(length + (start.factor if isinstance(start, BatchMultiple) else 0))


def _in(order: Order) -> str:
    return "" if order == PLAIN else f" as {order}"
