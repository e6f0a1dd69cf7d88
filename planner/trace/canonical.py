"""Pass 4: one form for each meaning: no aliases, no idle operations, biases apart from contractions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from planner.ir.body import Node
from planner.ir.errors import ModelError
from planner.ir.inlining import DRAWN
from planner.ir.types import Argument, Dtype, Ref, TensorType
from planner.ops.families import RECURRENT
from planner.trace.chance import RANDOM
from planner.trace.drawing import FORMS, RIGHT, drawn, undrawable
from planner.trace.einsums import in_pairs
from planner.trace.flat import FlatGraph, place
from planner.trace.regions import DROPOUTS, OTHER_DROPOUTS
from planner.trace.turns import TURNS, turned

ALIASES = frozenset({"alias", "lift_fresh", "lift_fresh_copy", "positive", "conj", "resolve_conj", "resolve_neg"})
RESHAPES = frozenset({"view", "_unsafe_view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "ravel"})
CASTS = frozenset({"to", "_to_copy", "type_as"})
COPIES = CASTS | {"clone"}
"""What is its operand where the type is the same: nothing here is changed in place."""
IDLE_AT_SAME_TYPE = frozenset({
    "atleast_1d", "atleast_2d", "atleast_3d", "expand", "expand_as", "flatten", "narrow", "real", "reshape", "slice",
    "to_dense", "view",
})
WRITES = {"copy": "src", "fill": "value"}
"""What stands for an assignment to all of a tensor, of which nothing is left, with the argument that holds what is written."""
SOFTMAXES = frozenset({"softmax", "log_softmax"})
ONE_DTYPE = frozenset({"addmm", "baddbmm", "bmm", "index_add", "layer_norm", "linear", "group_norm", "matmul", "mm", "mv"})
"""Operations that torch traces on several floating dtypes, and refuses to run."""
NORMS = {"batch_norm": "training", "instance_norm": "use_input_stats"}
"""With the argument by which they take the statistics of what they are given."""
SYNONYMS = {"transformers::grouped_mm_fallback": "_grouped_mm"}
"""Operations of other libraries that are one of torch's (transformers/integrations/moe.py, ``_grouped_mm``)."""
OVERLOADS = {"max.other": "maximum", "min.other": "minimum"}
"""Overloads that are another operation than others of their name, which are reductions."""
FIRST = {
    "native_dropout": "dropout", "max_pool2d_with_indices": "max_pool2d", "_native_batch_norm_legit": "batch_norm",
    "rrelu_with_noise_functional": "rrelu",
}
"""More results: the operation that has the first alone. (torch takes dropout apart to make a step functional.)"""
SHAPED = frozenset({"detach", "empty_like", "full_like", "ones_like", "zeros_like"})
"""What has its operand's shape, and none of its values for a draw: where the types are the same, that is like the operand."""
LOOKUPS = frozenset({"embedding", "embedding_bag"})


def canonicalise(graph: FlatGraph) -> FlatGraph:
    """Rewrite every node to its canonical form; drop those that nothing reads.

    Raises ModelError for an operation that draws random numbers as no program does again, or that is not torch's.
    """
    graph = _broadcast(_first_results(graph))
    renamed: dict[str, str] = {}
    types: dict[str, TensorType] = dict(graph.inputs)
    gradients = set(graph.trainable)
    shaped: dict[str, str] = {}
    nodes: list[Node] = []
    for original in graph.nodes:
        node = substitute(original, renamed)
        _check(node, types, graph.where)
        same_as = _idle(node, types, gradients)
        if same_as is not None:
            renamed[node.name] = same_as
            continue
        for made in _canonical_without_gradient(node, types, gradients):
            carries = made.differentiable and not gradients.isdisjoint(made.operands)
            types[made.name] = made.type
            if made.base in SHAPED and types[made.operands[0]] == made.type:
                shaped[made.name] = shaped.get(made.operands[0], made.operands[0])
            made = substitute(made, shaped) if made.base in DRAWN else made
            gradients |= {made.name} if carries else set()
            nodes.append(replace(made, differentiable=carries))
    outputs = tuple(renamed.get(name, name) for name in graph.outputs)
    return prune(replace(graph, nodes=tuple(nodes), outputs=outputs))


def _check(node: Node, types: Mapping[str, TensorType], where: str) -> None:
    """Raise ModelError for an operation that no plan can run, or not under every plan alike."""
    arguments = dict(node.arguments)
    if _draws(node):
        wrong, right = f"{node.base} draws random numbers in forward", f"draw by {RIGHT}"
    elif node.base in FORMS and not _draws_nothing(node) and (found := undrawable(node)):
        wrong, right = found
    elif "::" in node.base and node.base not in SYNONYMS and not node.base.startswith("prims::"):
        wrong = f"{node.base} is no operation of torch's"
        right = "the emitted program needs nothing but torch: write it in torch's own operations"
    elif node.base in ONE_DTYPE and (others := _other_dtypes(node, types)):
        wrong = f"{node.base} is given {types[node.operands[0]].dtype} and {' and '.join(others)}"
        right = ("torch computes it in one dtype alone, and parameters are in the job's, whatever the model makes them: cast "
                 "one of them (x.to(weight.dtype)), or choose another --precision")
    elif node.base in LOOKUPS and node.differentiable and arguments["scale_grad_by_freq"]:
        wrong = f"{node.base} divides its gradients by how often a call has each id (scale_grad_by_freq=True)"
        right = "a statistic over the batch: it differs between micro-batches and plans; leave it out"
    elif "grouped_mm" in node.base and node.type.dtype == "float64":
        wrong, right = "torch's grouped_mm does not compute in float64", "--precision bf16 or fp32"
    elif "batch_norm" in node.base and arguments.get("training", arguments.get("train")) and not _is_of_one(node, types):
        wrong = f"{node.base} normalises by statistics over the batch"
        right = "they differ between micro-batches and plans; use a norm over each sample"
    else:
        return
    raise ModelError(place(node, where), wrong, right)


def _draws(node: Node) -> bool:
    """Whether it draws random numbers in none of the ways that programs repeat."""
    if node.base == "rrelu":
        return bool(node.argument("training"))
    return drops_between(node) or (node.base in RANDOM and node.base not in FORMS)


def drops_between(node: Node) -> bool:
    """Whether a recurrent network drops values between its layers, within one call."""
    several = node.base in RECURRENT and node.argument("num_layers") != 1
    return several and bool(node.argument("train")) and bool(node.argument("dropout"))


def _draws_nothing(node: Node) -> bool:
    return node.base in OTHER_DROPOUTS and _drops_nothing(node)


def _drops_nothing(node: Node) -> bool:
    return node.argument("p") == 0 or not node.argument("train")


def _other_dtypes(node: Node, types: Mapping[str, TensorType]) -> list[str]:
    """Floating dtypes of the operands other than the first's. Norms take parameters that are wider than what they norm."""
    first, *others = (types[name] for name in node.operands)
    found = dict.fromkeys(type_.dtype for type_ in others if type_.floating and type_.dtype != first.dtype)
    wider = node.base.endswith("_norm") and first.dtype in ("bfloat16", "float16") and [*found] == ["float32"]
    return [] if wider or not first.floating else [*found]


def _is_of_one(node: Node, types: Mapping[str, TensorType]) -> bool:
    """Whether a batch norm is given a "batch" of one: a weight, as weight standardisation is written (Brock et al. 2021)."""
    return types[node.operands[0]].shape[0] == 1


def _first_results(graph: FlatGraph) -> FlatGraph:
    """The operations of :data:`FIRST` where nothing reads the second result."""
    seconds = {node.operands[0] for node in graph.nodes if node.op == "getitem" and node.argument("index") == 1}
    apart = {node.name: FIRST[node.base] for node in graph.nodes if node.base in FIRST and node.name not in seconds}
    renamed: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op == "getitem" and node.operands[0] in apart:
            renamed[node.name] = node.operands[0]
            continue
        made = substitute(node, renamed)
        nodes.append(replace(made, op=apart[node.name], types=made.types[:1]) if node.name in apart else made)
    return replace(graph, nodes=tuple(nodes), outputs=tuple(renamed.get(name, name) for name in graph.outputs))


def _broadcast(graph: FlatGraph) -> FlatGraph:
    """The operands of ``broadcast_tensors`` (which ``mse_loss`` calls), stretched where they are smaller, in place of it."""
    given = {node.name: node.operands for node in graph.nodes if node.base == "broadcast_tensors"}
    renamed: dict[str, str] = {}
    nodes: list[Node] = []
    for original in graph.nodes:
        node = substitute(original, renamed)
        if node.op == "getitem" and node.operands[0] in given:
            index = node.argument("index")
            operand = given[node.operands[0]][index] if isinstance(index, int) else ""
            operand = renamed.get(operand, operand)
            if graph.type_of(operand) == node.type:
                renamed[node.name] = operand
                continue
            stretched = (("self", Ref(operand)), ("size", node.type.shape), ("implicit", False))
            node = replace(node, op="expand", arguments=stretched)
        if node.name not in given:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes), outputs=tuple(renamed.get(name, name) for name in graph.outputs))


def substitute(node: Node, renamed: dict[str, str]) -> Node:
    """The node with its operands renamed."""
    if not any(name in renamed for name in node.operands):
        return node
    return replace(node, arguments=tuple((key, _renamed(value, renamed)) for key, value in node.arguments))


def _renamed(value: Argument, renamed: dict[str, str]) -> Argument:
    if isinstance(value, Ref):
        return Ref(renamed.get(value.name, value.name))
    if isinstance(value, tuple):
        return tuple(_renamed(item, renamed) for item in value)
    return value


def prune(graph: FlatGraph) -> FlatGraph:
    """Without the nodes whose values reach no output."""
    wanted = set(graph.outputs)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node.name in wanted:
            wanted.update(node.operands)
            kept.append(node)
    return replace(graph, nodes=tuple(reversed(kept)))


def _idle(node: Node, types: dict[str, TensorType], gradients: set[str]) -> str | None:
    """The operand that the node merely repeats."""
    arguments = dict(node.arguments)
    operand = node.operands[0] if node.operands else ""
    if operand not in types:
        return None
    same = types[operand] == node.type
    if node.base == "cat":
        (first, *others) = _filled(node, types)
        repeats = not others and types[first] == node.type and node.differentiable == (first in gradients)
        return first if repeats else None
    if node.base in ALIASES or (node.base == "detach" and operand not in gradients):
        return operand
    if node.base in WRITES and isinstance(source := arguments[WRITES[node.base]], Ref) and types[source.name] == node.type:
        return source.name
    if node.base in COPIES and same and node.differentiable == (operand in gradients):
        return operand
    if node.base in DROPOUTS | OTHER_DROPOUTS and _drops_nothing(node):
        return operand
    if node.base in IDLE_AT_SAME_TYPE and same and node.differentiable == (operand in gradients):
        return operand if node.base != "slice" or arguments.get("step", 1) == 1 else None
    return None


def _canonical_without_gradient(node: Node, types: dict[str, TensorType], gradients: set[str]) -> Iterable[Node]:
    """The canonical form; what was computed under ``no_grad`` reads detached values, so that the graph says so itself."""
    carrying = [name for name in dict.fromkeys(node.operands) if name in gradients]
    reads_none = node.base in DRAWN | {"detach", "getitem"}
    if node.differentiable or reads_none or not node.type.floating or not carrying:
        yield from _canonical(node, types)
        return
    detached = {name: f"{node.name}_operand_{index}" for index, name in enumerate(carrying)}
    for name, made in detached.items():
        yield replace(node, name=made, op="detach", arguments=(("self", Ref(name)),), types=(types[name],))
    yield from _canonical(substitute(node, detached), types | {name: types[was] for was, name in detached.items()})


def _canonical(node: Node, types: Mapping[str, TensorType]) -> Iterable[Node]:
    arguments = dict(node.arguments)
    if node.base in RESHAPES and node.types and Dtype not in map(type, arguments.values()):
        yield replace(node, op="reshape", arguments=(("self", Ref(node.operands[0])), ("shape", node.type.shape)))
    elif node.base == "expand_as":  # Of the other its shape alone: a mask does not depend on what is trained.
        stretched = (("self", Ref(node.operands[0])), ("size", node.type.shape), ("implicit", False))
        yield replace(node, op="expand", arguments=stretched)
    elif node.base in CASTS:
        cast = (("self", Ref(node.operands[0])), ("dtype", Dtype(node.type.dtype)), ("non_blocking", False),
                ("copy", False))
        yield replace(node, op="to.dtype", arguments=cast)
    elif node.base in WRITES and isinstance(source := arguments[WRITES[node.base]], Ref):
        yield from _written(node, source, types)
    elif node.base in ("fill", "zero"):
        yield replace(node, op="full", arguments=(
            ("size", node.type.shape), ("fill_value", arguments.get("value", 0)), ("dtype", Dtype(node.type.dtype)),
        ))
    elif node.base == "linear" and arguments["bias"] is not None:
        product = replace(node, name=f"{node.name}_product",
                          arguments=(("input", arguments["input"]), ("weight", arguments["weight"]), ("bias", None)))
        yield product
        yield _sum(node, product.name, arguments["bias"])
    elif node.base == "addmm" and arguments["beta"] == arguments["alpha"] == 1:
        product = replace(node, op="mm", name=f"{node.name}_product",
                          arguments=(("self", arguments["mat1"]), ("mat2", arguments["mat2"])))
        yield product
        yield _sum(node, product.name, arguments["self"])
    elif node.base in TURNS and not (node.base in ("adjoint", "matrix_H") and node.type.dtype.startswith("complex")):
        yield turned(node, node.type.rank)
    elif node.base == "einsum":
        yield from in_pairs(node, types)
    elif node.base in NORMS and arguments[NORMS[node.base]]:
        yield _group_norm(node)
    elif node.base == "cat":
        yield replace(node, arguments=(("tensors", tuple(map(Ref, _filled(node, types)))), ("dim", arguments["dim"])))
    elif node.base in LOOKUPS:  # FSDP2 reduces dense gradients alone; a table that is divided has none.
        yield with_arguments(node, scale_grad_by_freq=False, sparse=False)
    elif node.base == "gather":
        yield with_arguments(node, sparse_grad=False)
    elif node.base in SOFTMAXES and arguments["dtype"] is not None:
        yield from _cast_first(node, types)
    elif node.base == "as_strided":  # of a tensor that lay row by row: what made it so (a clone) may have been left out
        rows = f"{node.name}_operand"
        yield replace(node, name=rows, op="contiguous", arguments=node.arguments[:1], types=(types[node.operands[0]],))
        yield replace(node, arguments=(("self", Ref(rows)), *node.arguments[1:]))
    elif node.base in FORMS:
        yield from drawn(node, types)
    elif node.base == "rrelu":
        yield replace(node, op="leaky_relu", arguments=(("self", arguments["self"]), ("negative_slope", _mean_slope(node))))
    elif node.op in OVERLOADS:
        yield replace(node, op=OVERLOADS[node.op])
    elif node.base in SYNONYMS:
        operands = zip(("self", "mat2", "offs"), node.operands, strict=True)
        said = (*((name, Ref(operand)) for name, operand in operands), ("bias", None), ("out_dtype", None))
        yield replace(node, op=SYNONYMS[node.base], arguments=said)
    else:
        yield node


def _written(node: Node, source: Ref, types: Mapping[str, TensorType]) -> Iterable[Node]:
    """What an assignment to a part of a tensor writes there: autograd has no rule for the copy that stands for it, and a fill
    would keep the part that it overwrites."""
    made = types[source.name]
    if made.dtype != node.type.dtype:
        name = node.name if made.shape == node.type.shape else f"{node.name}_source"
        made = replace(made, dtype=node.type.dtype)
        cast = (("self", source), ("dtype", Dtype(made.dtype)), ("non_blocking", False), ("copy", False))
        yield replace(node, name=name, op="to.dtype", arguments=cast, types=(made,))
        source = Ref(name)
    if made.shape != node.type.shape:
        stretched = (("self", source), ("size", node.type.shape), ("implicit", False))
        yield replace(node, op="expand", arguments=stretched)


def _mean_slope(node: Node) -> float:
    """By which ``rrelu`` multiplies what is negative where it draws nothing (aten/src/ATen/native/Activation.cpp)."""
    lower, upper = node.argument("lower"), node.argument("upper")
    assert isinstance(lower, (int, float)) and isinstance(upper, (int, float))
    return (lower + upper) / 2


def _group_norm(node: Node) -> Node:
    """A norm of each channel over its own elements."""
    given = dict(node.arguments)
    said = {"input": given["input"], "num_groups": node.type.shape[1], "weight": given["weight"], "bias": given["bias"],
            "eps": given["eps"], "cudnn_enabled": True}
    return replace(node, op="group_norm", arguments=tuple(said.items()))


def with_arguments(node: Node, **changed: Argument) -> Node:
    """The node with other values of some arguments."""
    return replace(node, arguments=tuple((key, changed.get(key, value)) for key, value in node.arguments))


def _filled(node: Node, types: Mapping[str, TensorType]) -> Sequence[str]:
    """The operands that have elements (or say what dtype the result has), or all where none has."""
    kept = [name for name in node.operands if 0 not in types[name].shape or types[name].dtype != node.type.dtype]
    return kept or node.operands


def _sum(node: Node, product: str, bias: Argument) -> Node:
    return replace(node, op="add.Tensor", arguments=(("self", Ref(product)), ("other", bias), ("alpha", 1)))


def _cast_first(node: Node, types: Mapping[str, TensorType]) -> Iterable[Node]:
    """A softmax in another precision, as torch takes it apart (aten/src/ATen/native/SoftMax.cpp, ``softmax``)."""
    operand, *others = node.arguments
    source = node.operands[0]
    if types[source].dtype != node.type.dtype:
        cast = (operand, ("dtype", Dtype(node.type.dtype)), ("non_blocking", False), ("copy", False))
        wide = replace(types[source], dtype=node.type.dtype)
        yield replace(node, name=f"{node.name}_operand", op="to.dtype", arguments=cast, types=(wide,))
        operand = (operand[0], Ref(f"{node.name}_operand"))
    yield replace(node, arguments=(operand, *((key, None if key == "dtype" else value) for key, value in others)))
