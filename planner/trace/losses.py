"""Pass 6: the loss as a sum of terms and their weight, so that micro-batches and ranks add up exactly.

A plan divides the batch; an average of averages is not the average when ignored labels are spread unevenly. The step
therefore sums terms, sums weights, and divides once. A scalar loss is taken apart here, or refused with the reason.
"""

from __future__ import annotations

from dataclasses import replace

from planner.ir.body import Node
from planner.ir.errors import ModelError
from planner.ir.inlining import draws
from planner.ir.types import Argument, BatchMultiple, Dtype, Ref, TensorType, exact
from planner.ops.families import ELEMENTWISE_LOSSES, LABELLED_LOSSES
from planner.trace.additive import MEAN, SUM, added_up, is_additive, is_fixed, not_additive, scaled_by_fixed
from planner.trace.canonical import substitute
from planner.trace.constants import Constants
from planner.trace.divisors import GUARDS, divides_inside, inverse, of_the_batch, unguarded
from planner.trace.flat import FlatGraph, place
from planner.trace.halves import HALF, WIDE, wide_copy
from planner.trace.instead import ADVICE, instead
from planner.trace.shares import PREFIX
from planner.trace.unstack import unstack

SCALAR_INT = TensorType((), "int64")


def separate_loss(graph: FlatGraph) -> FlatGraph:
    """The graph with two outputs, sum and weight. Raises ModelError for a loss that does not decompose."""
    if graph.outputs and graph.outputs[0] in graph.by_name and not graph.by_name[graph.outputs[0]].differentiable:
        line = _place(graph, graph.outputs[0])
        raise ModelError(line, "the loss depends on no trained parameter", "compute it from what forward() returns")
    graph = unstack(graph)
    if len(graph.outputs) == 1:
        graph = _Separator(graph).separate()
    elif len(graph.outputs) == 2:
        graph = _counted(graph)
    else:
        raise ModelError(graph.where, f"loss() returned {len(graph.outputs)} values", ADVICE)
    total, *weights = graph.outputs
    graph = of_the_batch(graph, weights)
    said = ((total, "sum"), *((weight, "weight") for weight in weights))
    for name, what in said:
        if name not in graph.by_name or graph.by_name[name].type.shape != ():
            raise ModelError(_place(graph, name), f"the loss's {what} is no scalar that loss() computed", ADVICE)
    for weight in weights:
        if graph.by_name[weight].differentiable:
            wrong = "the loss's weight depends on parameters"
            raise ModelError(_place(graph, weight), wrong, "it must come from the batch alone")
    for name, what in said:
        culprit = not_additive(graph, name)
        if culprit is not None:
            raise _no_sum(graph, what, culprit)
    return graph


def _no_sum(graph: FlatGraph, what: str, culprit: Node) -> ModelError:
    """``what``: of the loss, sum or weight; ``culprit``: for which that does not add up."""
    wrong = f"the loss's {what} is no sum over the batch: it ends in {culprit.base}"
    guards = what == "weight" and culprit.base in GUARDS
    right = "leave it out: a step divides by no weight of zero" if guards else ADVICE
    return ModelError(place(culprit, graph.where), wrong, right)


def _place(graph: FlatGraph, name: str) -> str:
    """What an error names: the line that computes a value, else the model."""
    return place(graph.by_name[name], graph.where) if name in graph.by_name else graph.where


def _counted(graph: FlatGraph) -> FlatGraph:
    """The graph in which a fixed value times a number of samples, in the loss's sum, is that times a value that counts them."""
    nodes: list[Node] = []
    summed = added_up(graph, scaling=True)
    for node in graph.nodes:
        arguments = dict(node.arguments)
        value, count = arguments.get("self"), arguments.get("other")
        if node.op != "mul.Tensor" or node.name not in summed or not isinstance(count, BatchMultiple) or not (
            isinstance(value, Ref) and is_fixed(graph, value.name)
        ):
            nodes.append(node)
            continue
        nodes.append(_count_of(f"{node.name}_count", count, node))
        nodes += _times(graph, node, value.name, nodes[-1].name, (f"{node.name}_wide", node.name))
    return replace(graph, nodes=tuple(nodes))


def _count_of(name: str, count: BatchMultiple, origin: Node) -> Node:
    """The node that is a number of samples, or of their parts."""
    fill = (("size", ()), ("fill_value", count), ("dtype", Dtype("int64")))
    return Node(name, "full", fill, (SCALAR_INT,), origin.module)


def _times(graph: FlatGraph, origin: Node, value: str, count: str, names: tuple[str, str]) -> tuple[Node, ...]:
    """The product of a fixed value and a count: in float32 at least, since halves do not count that far. ``names``: of the
    value as that, where it is a half, and of the product."""
    made: tuple[Node, ...] = ()
    type_, carries = graph.type_of(value), graph.differentiable(value)
    if type_.dtype in HALF:
        made = (wide_copy(graph, value, names[0], origin),)
        value, type_ = made[0].name, made[0].type
    product = (("self", Ref(value)), ("other", Ref(count)))
    return (*made, Node(names[1], "mul.Tensor", product, (type_,), origin.module, None, carries))


class _Separator:
    """Walks from a scalar loss to its last reduction."""

    def __init__(self, graph: FlatGraph) -> None:
        self.graph = graph
        self.constants = Constants(graph)
        self.added: list[Node] = []
        self.shares: dict[str, tuple[TensorType, str]] = {}
        """By name, of averages over weights that the batch decides, the weight."""
        self.guarded = set[str]()
        """Weights that the loss keeps from zero: averages over them are numbers also where there are no terms."""

    def separate(self) -> FlatGraph:
        total, weight = self.parts(loss := self.graph.outputs[0])
        if self.shares:  # They are of the number of samples, which an average over more in each may have changed to that.
            total, weight = self._of_samples(self._node(loss), total, weight)
        nodes = (*self.graph.nodes, *self.added)
        inputs = {**self.graph.inputs, **{name: type_ for name, (type_, _) in self.shares.items()}}
        outputs = (total, weight, *(average for _, average in self.shares.values()))
        return replace(self.graph, nodes=nodes, inputs=inputs, outputs=outputs)

    def parts(self, name: str) -> tuple[str, str]:
        """Names of the sum and the weight whose ratio is the scalar ``name``."""
        node = self.graph.by_name.get(name)
        if node is None or node.type.shape != ():
            raise ModelError(_place(self.graph, name), "loss() returned no scalar", ADVICE)
        arguments = dict(node.arguments)
        if self._sums(node, arguments):
            raise self._refused_sum(node)
        if node.base in LABELLED_LOSSES:
            return self._labelled(node, arguments)
        if node.base in ELEMENTWISE_LOSSES and arguments["reduction"] == MEAN:
            count = self._count(self._whole(node, arguments), node)
            return self._again(node, reduction=SUM), count
        if node.op in ("mean", "sum") and isinstance(arguments["self"], Ref):
            return self._reduced(node, arguments["self"].name)
        if node.op in ("div.Tensor", "mul.Tensor"):
            node = self._by_number(node)
            arguments = dict(node.arguments)
        if node.op in ("detach", "div.Tensor", "mul.Tensor", "neg", "to.dtype") and isinstance(arguments["self"], Ref):
            return self._scaled(node, arguments["self"].name, arguments.get("other"))
        if node.base in ("add", "sub", "rsub"):
            return self._added(node, arguments)
        raise self._refuse(node, f"it ends in {node.base}", instead(node.base))

    def _sums(self, node: Node, arguments: dict[str, Argument]) -> bool:
        """Whether the node sums many terms into the scalar."""
        operand = arguments.get("self")
        scalar = isinstance(operand, Ref) and self.graph.type_of(operand.name).shape == ()
        return arguments.get("reduction") == SUM or (node.base == "sum" and not scalar)

    def _labelled(self, node: Node, arguments: dict[str, Argument]) -> tuple[str, str]:
        target = arguments["target"]
        assert isinstance(target, Ref)
        if arguments["reduction"] != MEAN:
            raise self._refuse(node, "it is reduced in no known way")
        if self.graph.type_of(target.name).floating:
            logits = arguments["self"]
            assert isinstance(logits, Ref)
            shape = self.graph.type_of(logits.name).shape
            return self._again(node, reduction=SUM), self._count((shape[0], *shape[2:]), node)
        labels = self.graph.type_of(target.name)
        counted = self._add("counted", "ne.Scalar", (("self", target), ("other", arguments["ignore_index"])),
                            TensorType(labels.shape, "bool"), node)
        weights, type_ = counted, SCALAR_INT
        if isinstance(arguments["weight"], Ref):
            weights = self._by_class(arguments["weight"].name, target.name, counted, node)
            type_ = replace(type_, dtype=self._node(weights).type.dtype)
        weight = self._add("weight", "sum", (("self", Ref(weights)), ("dtype", None)), type_, node)
        return self._again(node, reduction=SUM), weight

    def _by_class(self, classes: str, target: str, counted: str, node: Node) -> str:
        """The weight of every label's class, by which torch divides what classes have weights for; none of what is ignored,
        which may be no class."""
        labels = replace(self.graph.type_of(target), dtype="int64")
        if self.graph.type_of(target) != labels:  # bytes would be a mask
            cast = (("self", Ref(target)), ("dtype", Dtype("int64")), ("non_blocking", False), ("copy", False))
            target = self._add("labels", "to.dtype", cast, labels, node)
        row = self._add("class", "mul.Tensor", (("self", Ref(target)), ("other", Ref(counted))), labels, node)
        type_ = replace(labels, dtype=self.graph.type_of(classes).dtype)
        found = self._add("class_weight", "index.Tensor", (("self", Ref(classes)), ("indices", (Ref(row),))), type_, node)
        return self._add("weighed", "mul.Tensor", (("self", Ref(found)), ("other", Ref(counted))), type_, node)

    def _whole(self, node: Node, arguments: dict[str, Argument]) -> tuple[Argument, ...]:
        first, second = (self.graph.type_of(name).shape for name in node.operands[:2])
        if first != second:
            raise self._refuse(node, "its operands have different shapes")
        return first

    def _reduced(self, node: Node, operand: str) -> tuple[str, str]:
        if self.graph.type_of(operand).shape == ():
            return self.parts(operand)
        count = self._count(self.graph.type_of(operand).shape, node)
        dtype = dict(node.arguments).get("dtype")
        total = self._add("sum", "sum", (("self", Ref(operand)), ("dtype", dtype)), node.type, node, node.differentiable)
        return total, count

    def _scaled(self, node: Node, operand: str, other: Argument) -> tuple[str, str]:
        scaled = scaled_by_fixed(self.graph, node)
        if scaled is not None and (node.base == "mul" or not is_additive(self.graph, operand)):
            total, weight = self.parts(scaled)
            product = substitute(node, {scaled: total}).arguments
            return self._add("scaled", node.op, product, node.type, node, node.differentiable), weight
        if node.op == "div.Tensor" and isinstance(other, Ref):
            return self._quotient(node, operand, other.name)
        if node.op == "div.Tensor" and isinstance(other, BatchMultiple):
            if not is_additive(self.graph, operand):
                raise self._divides_no_sum(node, operand)
            return operand, self._count((other,), node)
        for value, factor in ((operand, other), (other.name, Ref(operand))) if isinstance(other, Ref) else ():
            found = inverse(self.graph, factor.name)
            if found is not None:
                total, weight = self._quotient(node, value, found[0])
                return self._times_number(node, total, found[1]), weight
        if isinstance(other, (Ref, BatchMultiple)):
            raise self._refuse(node, f"it ends in {node.base} by a computed value")
        total, weight = self.parts(operand)
        arguments = tuple((key, Ref(total) if key == "self" else value) for key, value in node.arguments)
        return self._add("scaled", node.op, arguments, node.type, node, node.differentiable), weight

    def _quotient(self, node: Node, operand: str, divisor: str) -> tuple[str, str]:
        """A sum over a weight; or an average over an average of as many terms, which is the one's sum over the other's."""
        if is_additive(self.graph, operand):
            if is_fixed(self.graph, divisor):
                raise self._plain_sum(node)
            return operand, self._divisor(divisor)
        below = self.graph.by_name.get(divisor)
        if below is None or below.type.shape != () or is_additive(self.graph, divisor):
            raise self._divides_no_sum(node, operand)
        if below.base in ("clamp", "clamp_min"):
            raise _no_sum(self.graph, "weight", below)
        (total, weight), (other, its_weight) = self.parts(operand), self.parts(divisor)
        if self._proportion(its_weight, weight) is None:
            total, weight = self._of_samples(node, total, weight)
        proportion = self._proportion(its_weight, weight)
        if proportion is None or self._is_scaled_by_shares(other):
            raise self._refuse(node, "it divides by an average over a number of terms that the batch decides")
        return self._times_number(node, total, proportion), other

    def _is_scaled_by_shares(self, name: str) -> bool:
        """Whether a value is made of shares, which are known only once all weights are."""
        made = {node.name: node for node in self.added}
        return name in self.shares or (name in made and any(map(self._is_scaled_by_shares, made[name].operands)))

    def _times_number(self, node: Node, total: str, number: float) -> str:
        if number == 1:
            return total
        made = self._node(total)
        scale = (("self", Ref(total)), ("other", number))
        return self._add("scaled", "mul.Tensor", scale, made.type, node, made.differentiable)

    def _by_number(self, node: Node) -> Node:
        """A product with a constant, or a quotient of an average by one, as that by a number."""
        arguments = dict(node.arguments)
        for key, factor in (("self", "other"), ("other", "self"))[: 2 if node.base == "mul" else 1]:
            value, number = arguments[key], arguments[factor]
            if not isinstance(value, Ref) or not isinstance(number, Ref) or self.graph.type_of(value.name) != node.type:
                continue
            found = self._constant(number.name)
            if found is not None and (node.base == "mul" or not_additive(self.graph, value.name) is not None):
                return replace(node, arguments=(("self", value), ("other", found)))
        return node

    def _constant(self, name: str) -> float | None:
        """The number that a value without dims is, whatever the batch."""
        pending, seen = [name], set[str]()
        while pending:
            node = self.graph.by_name.get(current := pending.pop())
            if node is not None and current not in seen:
                extents = (extent for type_ in node.types for extent in type_.shape)
                if any(isinstance(value, BatchMultiple) for value in (*extents, *dict(node.arguments).values())):
                    return None
                seen.add(current)
                pending.extend(node.operands)
        found = self.constants.value(name) if self.graph.type_of(name).shape == () else None
        return None if found is None else float(found)

    def _divisor(self, weight: str) -> str:
        """The weight that an average divides by."""
        bare = unguarded(self.graph, weight)
        if bare != weight:
            self.guarded.add(bare)
        return bare

    def _added(self, node: Node, arguments: dict[str, Argument]) -> tuple[str, str]:
        """Two averages: the second's terms are scaled to the first's weight where both are known to be in proportion. A number
        is the average of as many terms as the other has."""
        first, second = arguments["self"], arguments["other"]
        if node.base == "rsub":
            first, second = second, first
        alpha = arguments.get("alpha", 1)
        assert isinstance(alpha, (int, float))
        op, sign = ("add.Tensor", alpha) if node.base == "add" else ("sub.Tensor", -alpha)
        if isinstance(first, Ref) and isinstance(second, (int, float)):
            return self._shifted(node, first.name, 1, sign * second)
        if isinstance(second, Ref) and isinstance(first, (int, float)):
            return self._shifted(node, second.name, sign, first)
        if not isinstance(first, Ref) or not isinstance(second, Ref):
            raise self._refuse(node, "it adds a number of samples")
        if is_fixed(self.graph, second.name):
            return self._shifted(node, first.name, 1, sign, second.name)
        if is_fixed(self.graph, first.name):
            return self._shifted(node, second.name, sign, 1, first.name)
        (total, weight), (other, its_weight) = self.parts(first.name), self.parts(second.name)
        proportion = self._proportion(weight, its_weight)
        if proportion is None:
            (total, weight), (other, _) = self._of_samples(node, total, weight), self._of_samples(node, other, its_weight)
            proportion = 1
        if proportion != 1:
            scale = (("self", Ref(other)), ("other", proportion))
            other = self._add("scaled", "mul.Tensor", scale, node.type, node, self._node(other).differentiable)
        both = (("self", Ref(total)), ("other", Ref(other)), ("alpha", alpha))
        return self._add("added", op, both, node.type, node, node.differentiable), weight

    def _of_samples(self, node: Node, total: str, weight: str) -> tuple[str, str]:
        """The sum scaled so that its weight is the number of samples, and that."""
        count = dict(self._node(weight).arguments).get("fill_value")
        made = self._node(total)
        if isinstance(count, BatchMultiple) and count.factor == 1:
            return total, weight
        type_ = made.type
        factor: Argument
        if isinstance(count, BatchMultiple):
            factor = 1 / count.factor
        else:
            type_ = replace(type_, dtype=WIDE) if type_.dtype in HALF else type_
            factor = Ref(self._share(type_, weight))
        scaled = self._add("scaled", "mul.Tensor", (("self", Ref(total)), ("other", factor)), type_, node, made.differentiable)
        return scaled, self._count((BatchMultiple(1),), node)

    def _share(self, type_: TensorType, weight: str) -> str:
        """The name of what a sum over this weight is scaled by: one and the same for sums over one weight."""
        for name, (known, other) in self.shares.items():
            if known == type_ and self._alike(weight, other):
                return name
        bare = f"loss_share_{len(self.shares) + 1}"
        while f"batch:{bare}" in self.graph.inputs:
            bare += "_"
        self.shares[PREFIX + bare] = (type_, weight)
        return PREFIX + bare

    def _shifted(
        self, node: Node, average: str, factor: float, number: float, times: str | None = None
    ) -> tuple[str, str]:
        """``factor * average + number``: each of the average's terms is more by the number, or each sample's where it is there
        without terms too. ``times``: what multiplies that."""
        total, weight = self.parts(average)
        differentiable = self._node(total).differentiable
        if factor != 1:
            scale = (("self", Ref(total)), ("other", factor))
            total = self._add("scaled", "mul.Tensor", scale, node.type, node, differentiable)
        if number == 0:  # Python's sum() begins with it.
            return total, weight
        if weight in self.guarded:
            total, weight = self._of_samples(node, total, weight)
        terms = weight if times is None else self._often(times, weight, node)
        arguments = (("self", Ref(total)), ("other", Ref(terms)), ("alpha", number))
        return self._add("shifted", "add.Tensor", arguments, node.type, node, node.differentiable), weight

    def _often(self, value: str, weight: str, node: Node) -> str:
        """A fixed value once for each term."""
        made = _times(self.graph, node, value, weight, (self._unique("wide"), self._unique("times")))
        self.added.extend(made)
        return made[-1].name

    def _proportion(self, first: str, second: str) -> float | None:
        """How many times the second weight the first is, whatever the batch; None where that is not known."""
        if self._alike(first, second):
            return 1
        counts = [dict(self._node(name).arguments).get("fill_value") for name in (first, second)]
        one, other = (count.factor if isinstance(count, BatchMultiple) else None for count in counts)
        return None if one is None or other is None else one / other

    def _alike(self, first: str, second: str) -> bool:
        """Whether two values are computed alike."""
        if first == second:
            return True
        if first in self.graph.inputs or second in self.graph.inputs:
            return False
        one, other = self._node(first), self._node(second)
        renamed = dict(zip(other.operands, one.operands, strict=False))
        return (
            len(one.operands) == len(other.operands) and one.op == other.op and not draws(one)
            and [(key, exact(value)) for key, value in substitute(other, renamed).arguments]
            == [(key, exact(value)) for key, value in one.arguments]
            and all(map(self._alike, one.operands, other.operands))
        )

    def _node(self, name: str) -> Node:
        return self.graph.by_name.get(name) or next(node for node in self.added if node.name == name)

    def _again(self, node: Node, **changed: Argument) -> str:
        arguments = tuple((key, changed.get(key, value)) for key, value in node.arguments)
        return self._add("sum", node.op, arguments, node.type, node, node.differentiable)

    def _count(self, shape: tuple[Argument, ...], origin: Node) -> str:
        """A weight that is the number of elements of a shape, over which ``origin`` averages."""
        number, batches = 1, 0
        for extent in shape:
            assert isinstance(extent, (int, BatchMultiple))
            batches += isinstance(extent, BatchMultiple)
            number *= extent.factor if isinstance(extent, BatchMultiple) else extent
        if batches != 1:
            raise ModelError(place(origin, self.graph.where), "the loss averages over no dim of the batch", ADVICE)
        self.added.append(_count_of(self._unique("weight"), BatchMultiple(number), origin))
        return self.added[-1].name

    def _add(
        self, name: str, op: str, arguments: tuple[tuple[str, Argument], ...], type_: TensorType, origin: Node,
        differentiable: bool = False,
    ) -> str:
        unique = self._unique(name)
        self.added.append(Node(unique, op, arguments, (type_,), origin.module, origin.source, differentiable))
        return unique

    def _unique(self, name: str) -> str:
        unique = f"loss_{name}"
        while unique in self.graph.by_name or any(unique == node.name for node in self.added):
            unique += "_"
        return unique

    def _divides_no_sum(self, node: Node, operand: str) -> ModelError:
        culprit = not_additive(self.graph, operand) if operand in self.graph.by_name else None
        ends = f": that ends in {culprit.base}" if culprit is not None else ""
        return self._refuse(node, f"it divides what is no sum{ends}", instead(culprit.base) if culprit is not None else ADVICE)

    def _plain_sum(self, node: Node) -> ModelError:
        return ModelError(place(node, self.graph.where), "the loss is a plain sum, whose gradient grows with the batch",
                          "return (loss_sum, weight) from loss(): a step divides the one by the other")

    def _refused_sum(self, node: Node) -> ModelError:
        """A sum of many terms that no weight divides; or of a vector's elements, which may be averages; or of terms that are
        divided each."""
        vector = self.graph.by_name.get(node.operands[0])
        if vector is None or node.base != "sum" or vector.base == "sum":
            return self._plain_sum(node)
        if not vector.type.batched:
            return self._refuse(node, f"it adds up a vector that ends in {vector.base}", instead(vector.base))
        if divides_inside(self.graph, vector.name):
            return self._refuse(node, "it adds up terms that are divided by a total", "divide the sum: (l * m).sum() / m.sum()")
        return self._plain_sum(node)

    def _refuse(self, node: Node, reason: str, right: str = ADVICE) -> ModelError:
        return ModelError(place(node, self.graph.where), f"the loss does not decompose into terms: {reason}", right)
