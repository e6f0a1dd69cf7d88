"""From a body and its placement to functions: every conversion a statement, every literal local."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from codegen.members import OF_BLOCKS, attribute_paths, spare
from codegen.naming import unique
from codegen.program import Compute, Convert, Function, LocalArgument, Repeat, Statement, Variable
from planner.ir.body import Body, Node
from planner.ir.errors import InternalError
from planner.ir.halves import sums_half_logits
from planner.ir.inlining import draws
from planner.ir.localize import localize
from planner.ir.placement import REPLICATE, BodyPlacement, OpStrategy, Placement, conversion, local_type
from planner.ir.types import Ref

_DRAWS = {
    "dropout": "rng.dropout", "native_dropout": "rng.dropout", "scaled_dot_product_attention": "rng.attention",
    "exponential": "rng.exponential", "rand_like": "rng.uniform", "randint_like": "rng.integers", "randn_like": "rng.normal",
}
"""Methods of the random stream in place of torch's own draws."""
_SUFFIX = {"copy": "shared", "all_reduce": "reduced", "all_gather": "gathered", "reduce_scatter": "scattered",
           "slice": "local", "all_to_all": "exchanged"}


@dataclass
class Builder:
    """Statements under construction. ``found``: variable by (value, placement); ``home``: the placement it was made in."""

    body: Body
    degree: int
    batch: int
    strategies: Mapping[str, OpStrategy]
    sites: Mapping[str, int]
    used: set[str]
    statements: list[Statement] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    found: dict[tuple[str, Placement], str] = field(default_factory=dict)
    home: dict[str, Placement] = field(default_factory=dict)
    random: bool = False

    def define(self, value: str, placement: Placement, name: str | None = None) -> str:
        """A variable that holds ``value`` as it is made."""
        name = name or unique(value, self.used)
        self.variables[name] = Variable(name, self.body.types[value], placement, value in self.body.differentiable)
        self.found[value, placement] = name
        self.home[value] = placement
        return name

    def read(self, value: str, wanted: Placement, module: str) -> str:
        """The variable that holds ``value`` as ``wanted``, converted (once) where it was made otherwise."""
        source = self.home[value]
        if self.degree == 1 or self._same(value, source, wanted):
            return self.found[value, source]
        if (value, wanted) not in self.found:
            self._convert(value, source, wanted, module)
        return self.found[value, wanted]

    def _same(self, value: str, source: Placement, wanted: Placement) -> bool:
        if source == wanted:
            return True
        whole = {"replicate", "shared"}
        if value not in self.body.differentiable and {source.state, wanted.state} <= whole:
            return True
        return self._attribute(value) and source.state == "shared" and wanted.state == "replicate"

    def _attribute(self, value: str) -> bool:
        return any(value == parameter.name for parameter in self.body.parameters)

    def _convert(self, value: str, source: Placement, wanted: Placement, module: str) -> None:
        whole = self.body.types[value]
        differentiable = value in self.body.differentiable
        step = conversion(source, wanted, whole, self.degree, differentiable=differentiable)
        name = self.found[value, source]
        if step is None:
            raise InternalError(
                f"{self.body.name}.{value}", f"no conversion from {source} to {wanted}", "a placement without this pair"
            )
        if step.forward == step.backward == "identity":
            self.found[value, wanted] = name
            return
        method, keywords = _call(source, wanted, differentiable)
        target = unique(f"{value.split('.')[-1]}_{_SUFFIX[method]}", self.used)
        size = 0 if method in ("copy", "slice") else local_type(whole, source, self.degree).size_bytes(self.batch)
        self.statements.append(Convert(name, target, method, keywords, size, module))
        self.variables[target] = Variable(target, whole, wanted, differentiable)
        self.found[value, wanted] = target

    def compute(self, node: Node) -> None:
        """Append one operation and what converts its operands."""
        strategy = self.strategies[node.name]
        names = [self.read(v, p, node.module) for v, p in zip(node.operands, strategy.operands, strict=True)]
        literals = self._localized(node, strategy)
        queue = iter(names)
        arguments = tuple((key, _renamed(argument, queue)) for key, argument in literals)
        call, extra = _special(node, strategy, self.body, self.sites, self.degree)
        self.random |= call.startswith("rng.")
        targets = tuple(
            self.define(value, strategy.outputs[at]) if value else "" for at, value in enumerate(self._results(node))
        )
        self.statements.append(Compute(node, arguments, targets, strategy, call, extra))

    def _localized(self, node: Node, strategy: OpStrategy) -> tuple[tuple[str, LocalArgument], ...]:
        if self.degree == 1 or not any(p.state == "shard" for p in (*strategy.operands, *strategy.outputs)):
            return node.arguments
        return localize(node, strategy, self.degree)

    def _results(self, node: Node) -> tuple[str, ...]:
        """The value that holds each output; those of several outputs are named by their ``getitem``."""
        items = {n.argument("index"): n.name for n in self.body.consumers.get(node.name, ()) if n.base == "getitem"}
        if len(node.types) == 1 and not items:
            return (node.name,)
        return tuple(items.get(at, "") for at in range(len(node.types)))

    def function(self, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Function:
        return Function(name, inputs, tuple(self.statements), outputs, dict(self.variables), attributes_of(self.body),
                        self.random, self.degree)


def _renamed(argument: LocalArgument, names: Iterator[str]) -> LocalArgument:
    if isinstance(argument, Ref):
        return Ref(next(names))
    if isinstance(argument, tuple):
        return tuple(_renamed(item, names) for item in argument)
    return argument


def _call(
    source: Placement, target: Placement, differentiable: bool
) -> tuple[str, tuple[tuple[str, int | str | tuple[int, ...]], ...]]:
    """Method of the tensor axis and its keywords for one conversion."""
    layout: list[tuple[str, int | str | tuple[int, ...]]] = []
    if target.state == "shard" and target.unit != 1:
        layout.append(("unit", target.unit))
    if target.state == "shard" and target.segments:
        layout.append(("segments", target.segments))
    match source.state, target.state:
        case "replicate", "shared":
            return "copy", ()
        case "partial", "replicate":
            return "all_reduce", ()
        case "partial", "shared":
            return "all_reduce", (("gradient", "all_reduce"),) if differentiable else ()
        case "shard", "shared":
            return "all_gather", (("dim", source.dim),)
        case "shard", "replicate":
            return "all_gather", (("dim", source.dim), ("gradient", "slice")) if differentiable else (("dim", source.dim),)
        case "partial", "shard":
            return "reduce_scatter", (("dim", target.dim),)
        case "replicate", "shard":
            return "slice", (("dim", target.dim), *layout)
        case "shared", "shard":
            return "slice", (("dim", target.dim), *((("gradient", "pad"),) if differentiable else ()), *layout)
        case "shard", "shard":
            return "all_to_all", (("split_dim", target.dim), ("concat_dim", source.dim))
    raise InternalError("conversion", f"{source} to {target}", "a pair of the placement table")


def _special(
    node: Node, strategy: OpStrategy, body: Body, sites: Mapping[str, int], degree: int
) -> tuple[str, tuple[tuple[str, LocalArgument], ...]]:
    """The runtime's own form of an operation, where torch's would be wrong on local tensors."""
    if node.name in sites:
        sharded = degree > 1 and strategy.outputs[0].state == "shard"
        extra = (("site", sites[node.name]), ("sharded", sharded))
        return _DRAWS[node.base], extra
    if degree == 1:
        return ("tp.cross_entropy", ()) if sums_half_logits(node) else ("", ())
    placements = dict(zip(node.operands, strategy.operands, strict=True))
    if node.base == "embedding":
        weight = node.operands[0]
        if placements[weight].state == "shard" and placements[weight].dim == 0:
            return "tp.embedding", (("vocabulary", body.types[weight].shape[0]),)
    if node.base == "cross_entropy_loss":
        logits = node.operands[0]
        rank = body.types[logits].rank
        if placements[logits].state == "shard" and placements[logits].dim == min(1, rank - 1):
            return "tp.cross_entropy", (("classes", body.types[logits].shape[min(1, rank - 1)]),)
        if sums_half_logits(node):
            return "tp.cross_entropy", ()
    if node.base in ("softmax", "_softmax", "log_softmax", "_log_softmax"):
        x = node.operands[0]
        dim = node.argument("dim")
        if placements[x].state == "shard" and isinstance(dim, int) and dim % body.types[x].rank == placements[x].dim:
            return f"tp.{node.base.lstrip('_')}", ()
    return "", ()


def attributes_of(body: Body) -> Mapping[str, str]:
    """Where its block has each parameter and buffer of a body."""
    return attribute_paths([value.name for value in (*body.parameters, *body.buffers)])


def random_sites(body: Body) -> Mapping[str, int]:
    """A number for every node that draws, by its order in the body."""
    names = [node.name for node in body.nodes if draws(node)]
    return {name: site for site, name in enumerate(names)}


def ordered(body: Body, regions: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """The nodes in an execution order in which every region is one contiguous group (others: groups of one)."""
    order = [node.name for node in body.nodes]
    for region in regions:
        inside = set(region)
        spots = [at for at, name in enumerate(order) if name in inside]
        first, last = spots[0], spots[-1]
        after: set[str] = set()
        for name in order[first : last + 1]:
            if name not in inside and (set(body.by_name[name].operands) & (after | inside)):
                after.add(name)
        window = order[first : last + 1]
        before = [name for name in window if name not in inside and name not in after]
        order[first : last + 1] = [*before, *region, *(name for name in window if name in after)]
    group_of = {name: region for region in regions for name in region}
    groups = [group_of.get(name, (name,)) for name in order]
    return tuple(dict.fromkeys(groups))


def lower_body(
    body: Body, placement: BodyPlacement, batch: int, outside: frozenset[str], regions: Sequence[tuple[str, ...]],
    sites: Mapping[str, int] | None = None,
) -> tuple[Function, tuple[Function, ...]]:
    """The forward function of a body, and one function per region that is recomputed.

    ``outside``: inputs that come replicated from the context or the batch, whatever the body wants of them. ``batch``:
    samples of one call, for the sizes in comments. ``sites``: of the body that this one is a part of.
    """
    strategies = {item.node: item.strategy for item in placement.nodes}
    used = {value.name.split(".")[0] for value in (*body.parameters, *body.buffers)}
    members = OF_BLOCKS | {path.split(".")[0] for path in attributes_of(body).values()}
    builder = Builder(body, placement.degree, batch, strategies, random_sites(body) if sites is None else sites, used)
    inputs = tuple(
        builder.define(value.name, REPLICATE if value.name in outside else lies)
        for value, lies in zip(body.inputs, placement.inputs, strict=True)
    )
    _attributes(builder, placement)
    methods: list[Function] = []
    for group in ordered(body, regions):
        if group in regions:
            name = spare("core" if len(regions) == 1 else f"core_{len(methods) + 1}", members)
            methods.append(_region(builder, group, name, placement))
        elif body.by_name[group[0]].base != "getitem":
            builder.compute(body.by_name[group[0]])
    outputs = tuple(
        builder.read(value, lies, "") for value, lies in zip(body.outputs, placement.outputs, strict=True)
    )
    return builder.function("forward", inputs, outputs), tuple(methods)


def _attributes(builder: Builder, placement: BodyPlacement) -> None:
    for value, lies in zip(builder.body.parameters, placement.parameters, strict=True):
        builder.define(value.name, lies, value.name)
    for value in builder.body.buffers:
        builder.define(value.name, REPLICATE, value.name)


def _region(builder: Builder, group: tuple[str, ...], name: str, placement: BodyPlacement) -> Function:
    """One recomputed region as a function, and the statement that calls it."""
    body, inside = builder.body, set(group)
    inner = Builder(body, builder.degree, builder.batch, builder.strategies, builder.sites, set(builder.used))
    _attributes(inner, placement)
    own = {value.name for value in (*body.parameters, *body.buffers)}
    arguments: dict[str, None] = {}
    for node in (body.by_name[member] for member in group if body.by_name[member].base != "getitem"):
        for value, wanted in zip(node.operands, builder.strategies[node.name].operands, strict=True):
            if value in inside or value in own:
                continue
            variable = builder.read(value, wanted, node.module)
            arguments[variable] = None
            inner.variables[variable] = builder.variables[variable]
            inner.found[value, wanted] = variable
            inner.found.setdefault((value, builder.variables[variable].placement), variable)
            inner.home.setdefault(value, builder.variables[variable].placement)
    for node in (body.by_name[member] for member in group if body.by_name[member].base != "getitem"):
        inner.compute(node)
    results = [
        member for member in group if member in inner.home
        and (member in body.outputs or any(user.name not in inside for user in body.consumers.get(member, ())))
    ]
    outputs = tuple(inner.found[member, inner.home[member]] for member in results)
    targets = tuple(builder.define(member, inner.home[member]) for member in results)
    builder.statements.append(Repeat(name, tuple(arguments), targets, inner.random))
    builder.random |= inner.random
    return inner.function(name, tuple(arguments), outputs)
