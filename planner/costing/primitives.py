"""A placed body as autograd sees it: primitive operations, what each keeps, and where each gradient comes from.

Most steps are one primitive, whose kept storages :mod:`planner.ops.saved` knows. Operations that torch composes of others
(``rms_norm``), the runtime's own functions (cross-entropy and embedding over a split vocabulary) and collectives that move
a dim are taken apart, because their parts live and die one by one. Sources: ``tools/autograd/derivatives.yaml`` and
``torch/csrc/autograd/FunctionsManual.cpp`` of torch 2.13 for the gradients, ``runtime/primitives.py``,
``runtime/collectives.py`` and ``runtime/vocabulary.py`` for the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import prod

from planner.costing.attention import ComposedAttention
from planner.costing.local import LocalBody, Step
from planner.costing.losses import cross_entropy, half_loss, vocabulary_loss
from planner.costing.norms import composed_rms_norm, cosine_similarity
from planner.costing.products import is_turned, passing_copies, turned_product
from planner.costing.softmax import SOFTMAXES, split_softmax
from planner.costing.tape import PART, PASS, ROWS, TURNED, Tape, needs_gradient
from planner.ir.halves import sums_half_logits
from planner.ir.placement import Placement
from planner.ir.types import DTYPE_BYTES
from planner.ops.attention import fused_attention
from planner.ops.call import Call
from planner.ops.einsums import batched_product
from planner.ops.families import CONVOLUTIONS, POINTWISE, RECURRENT, RESHAPES, VIEW_FAMILY
from planner.ops.fourier import FOURIER, forward_bytes, gradient_storage, turns_gradient
from planner.ops.layout import Layout
from planner.ops.results import PATCHES
from planner.ops.temporaries import all_gates, stepping_bytes, temporaries


def record(local: LocalBody) -> Tape:
    """The body's primitives in execution order."""
    tape, biased = Tape(local), _biased(local)
    # torch computes both at once for contiguous operands (aten/src/ATen/native/Linear.cpp, ``linear``).
    fused = {at: product for at, product in biased.items() if local.layouts[local.steps[product].operands[0]].contiguous}
    for tape.at, step in enumerate(local.steps):
        if tape.at in fused:
            _addmm(tape, local.steps[fused[tape.at]], step)
        elif tape.at not in fused.values():
            _EXPANSIONS.get(_kind(step), _single)(tape, step)
            if tape.at in biased:
                # One call of the text, which holds what it was given until it returns.
                tape.still_read(local.steps[biased[tape.at]].operands)
    return tape


def _biased(local: LocalBody) -> dict[int, int]:
    """Sums that the emitted text writes into a linear layer as its bias: position of the sum -> of the product."""
    parameters = {value.name for value in local.body.parameters}
    readers = Counter(value for step in local.steps for value in step.operands)
    makers = {step.outputs[0]: at for at, step in enumerate(local.steps) if step.node and step.node.base == "linear"}
    found: dict[int, int] = {}
    for at, step in enumerate(local.steps):
        if step.node is None or step.node.op != "add.Tensor" or len(step.operands) != 2 or step.node.argument("alpha") != 1:
            continue
        product, bias = step.operands
        maker = makers.get(product)
        if maker is None or readers[product] != 1 or product in local.outputs:
            continue
        if bias.split(" -> ")[0] in parameters and len(local.layouts[bias].sizes) == 1:
            found[at] = maker
    return found


def _addmm(tape: Tape, product: Step, total: Step) -> None:
    """A linear layer with its bias: one node, whose gradients are there together."""
    bias = total.operands[1]
    reads = [
        (operand, tape.gradient(operand, tape.bytes_of(operand)) if product.differentiable else None)
        for operand in product.operands
    ]
    reads.append((bias, tape.gradient(bias, tape.bytes_of(bias))))
    tape.add(reads, tape.outputs_of(total), product.kept, late=1, folds=_folds(tape, product), turns=_turns(tape, product))


def _folds(tape: Tape, step: Step) -> bool:
    """Whether several dims of the gradient become one."""
    base = step.node.base if step.node is not None else ""
    sizes = tape.local.layouts[step.outputs[0]].sizes
    return base in _FOLDED and sum(size > 1 for size in sizes[: -_FOLDED[base]]) > 1


def _kind(step: Step) -> str:
    if step.node is None:
        return "conversion"
    split = step.strategy is not None and bool(step.strategy.forward)
    base = step.node.base
    if base == "cross_entropy_loss":
        return "vocabulary_loss" if split else "half_loss" if sums_half_logits(step.node) else "loss"
    if base == "embedding" and step.strategy is not None and step.strategy.outputs[0].state == "partial":
        return "vocabulary_embedding"
    return "split_softmax" if split and base in SOFTMAXES else base


def _single(tape: Tape, step: Step, *, passing: int = 0, storage: int = 0, inner: int = 0) -> None:
    """One autograd node. Views and sums hand gradients on (reduced where they were broadcast); others make their own.
    ``passing``: bytes that the operation holds while it runs; ``storage``, ``inner``: see :class:`Primitive`."""
    base = step.node.base if step.node is not None else ""
    reads, sums = list[tuple[str, int | None]](), []
    for at, operand in enumerate(step.operands):
        gradient = tape.gradient(operand, _made(tape, step, at)) if step.differentiable and not (at and base in _LIKE) else None
        reads.append((operand, gradient))
        if gradient is not None and 0 <= gradient < (whole := _whole(tape, step, at)):
            sums.append((operand, whole))  # Made whole, then summed (engine.cpp, validate_outputs).
    scratch = 0
    if step.differentiable and step.node is not None:
        layouts = tape.local.layouts
        operands, outputs = ([layouts[value] for value in values] for values in (step.operands, step.outputs))
        scratch = temporaries(step.node, operands, outputs, [made is not None for _, made in reads])
        if base in _PARTS:  # Zeros stand for the gradients of parts that nothing reads.
            scratch += sum(tape.bytes_of(value) for value in step.outputs if value not in tape.read)
    broadcast = {operand for operand, _ in sums}
    reads.sort(key=lambda read: read[0] in broadcast)
    keeps = step.kept if step.differentiable else ()
    tape.add(
        reads, tape.outputs_of(step), keeps, extra=step.extra_bytes, forward=passing, backward=scratch, late=len(sums),
        sums=sums, folds=_folds(tape, step), merges=base in _LAYS_OUT and _adds_dims(tape, step),
        follows=base in _FOLLOWS, turns=_turns(tape, step), permutes=base in _PERMUTES,
        cuts=base in _CUTS, storage=storage, patches=base in PATCHES, inner=inner, early=_keeps_early(step),
    )


def _keeps_early(step: Step) -> bool:
    """Whether what is kept beside operands and results is made before the results: copies to fold, and what is multiplied by
    where dropout is no kernel of its own (aten/src/ATen/native/Dropout.cpp)."""
    return step.node is not None and (step.node.base in _FOLDED or (step.node.base == "dropout" and not step.node.fused))


def _adds_dims(tape: Tape, step: Step) -> bool:
    operand, result = (tape.local.layouts[value] for value in (step.operands[0], step.outputs[0]))
    return len(operand.sizes) < len(result.sizes)


def _turns(tape: Tape, step: Step) -> list[str]:
    """Operands of which the gradient's dims lie in another order: products and what fills a tensor of zeros make theirs row by
    row, operations on elements as their result's."""
    base, layouts = step.node.base if step.node is not None else "", tape.local.layouts
    if base in FOURIER and step.node is not None:
        return [value for value in step.operands if turns_gradient(step.node, layouts[value])]
    if base in _ROW_MAJOR:
        return [value for value in step.operands if not layouts[value].in_order]
    if base in CONVOLUTIONS:
        return [] if layouts[step.operands[0]].in_order or not _has_patches(layouts[step.operands[1]]) else [step.operands[1]]
    if base not in _FOLLOWS:
        return []
    ordered = layouts[step.outputs[0]].in_order
    return [value for value in step.operands if layouts[value].in_order != ordered]


def _has_patches(weight: Layout) -> bool:
    """Whether a convolution's weight lies otherwise with its channels innermost, as those of the image then do
    (aten/src/ATen/native/ConvUtils.h, ``cudnn_conv_suggest_memory_format``)."""
    return weight.sizes[1] > 1 and any(size > 1 for size in weight.sizes[2:])


def _made(tape: Tape, step: Step, at: int) -> int:
    """What the gradient of an operand is made as: its bytes, or how it is handed on."""
    base = step.node.base if step.node is not None else ""
    operand, result = tape.local.layouts[step.operands[at]], tape.local.layouts[step.outputs[0]]
    made, alike = operand.size_bytes, operand.sizes == result.sizes and operand.dtype == result.dtype
    if base in _VIEW_GRADIENTS:
        if base in RESHAPES and not operand.contiguous and result.contiguous:
            return TURNED  # A copy in the order of its dims: so does the gradient lie.
        return _part(tape, step) if base in _JOINS else PASS
    if base == "sum" and operand.dtype != result.dtype:
        return made  # Spread, then whole in the operand's precision (engine.cpp, ``validate_outputs``).
    if base in _SPREADS or (at and base in PATCHES):
        return PART
    if base in _EXPANDS and alike:
        return PASS
    hands_on = (base in _HANDS_ON and (at == 0 or _scale(step) == 1)) or at == _HANDED_ON.get(base)
    hands_on |= base in _ADDED and at == 0 and _scale(step, "beta") == 1
    if not hands_on or not alike:
        return made  # Summed over dims that only the result has, even if each is one (ATen/ExpandUtils.h, ``sum_to``).
    return PASS if _lie_alike(operand, result) else TURNED


def _lie_alike(first: Layout, second: Layout) -> bool:
    """Whether two of one shape have their numbers in the same order in memory."""
    strides = [[stride for size, stride in zip(own.sizes, own.strides, strict=True) if size > 1] for own in (first, second)]
    return strides[0] == strides[1]


def _whole(tape: Tape, step: Step, at: int) -> int:
    """Bytes of an operand's gradient before it is summed over the dims along which the operand was broadcast; 0 where it never
    is whole."""
    base = step.node.base if step.node is not None else ""
    if base in _ADDED and at == 0:
        return 0 if _scale(step, "beta") == 1 else tape.bytes_of(step.outputs[0])
    if base in _PRODUCTS or (at and base in _HANDS_ON) or at != _HANDS_ONE_ON.get(base, at):
        return 0 if base in _HANDS_ON and _scale(step) == 1 else tape.bytes_of(step.outputs[0])
    first, second = (tape.local.layouts[value].sizes for value in step.operands) if base == "matmul" else ((), ())
    if min(len(first), len(second)) < 3:
        return 0
    own = tape.local.layouts[step.operands[at]]
    lead = tape.local.layouts[step.outputs[0]].sizes[:-2]
    return own.size_bytes // prod(own.sizes[:-2]) * prod(lead)


def _scale(step: Step, name: str = "alpha") -> object:
    """What a sum multiplies its second operand by; a sum with a product (``beta``) its first."""
    return dict(step.node.arguments).get(name, 1) if step.node is not None else 1


def _part(tape: Tape, step: Step) -> int:
    """How a part of what was joined lies: in one piece where nothing lies outside of the dim that it was joined along."""
    dim = step.node.argument("dim") if step.node is not None else 0
    sizes = tape.local.layouts[step.outputs[0]].sizes
    at = dim % len(sizes) if isinstance(dim, int) else 0
    if prod(sizes[:at]) == 1:
        return PASS
    return ROWS if at == len(sizes) - 1 else PART


_ROW_MAJOR = frozenset({
    "_upsample_bicubic2d_aa", "addmm", "baddbmm", "bmm", "channel_shuffle", "cumprod", "cumsum", "diagonal", "gather",
    "im2col", "index", "index_select", "layer_norm", "linear", "log_softmax", "matmul", "mean", "mm", "narrow",
    "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "repeat", "repeat_interleave", "replication_pad1d",
    "replication_pad2d", "replication_pad3d", "rms_norm", "roll", "select", "slice", "softmax", "sort", "topk", "tril", "triu",
    "unbind", "unfold", "upsample_bicubic2d",
})
"""Operations that make gradients in the order of their dims, however their operands and the incoming gradient lie."""
_FOLLOWS = POINTWISE - {"rms_norm"} | {
    "constant_pad_nd", "flip", "pad", "upsample_bilinear2d", "upsample_nearest2d", "_upsample_bilinear2d_aa",
    "_upsample_nearest_exact2d",
}
"""Operations that make gradients in the order in which the incoming one lies."""
_FOLDED = {"linear": 1, "matmul": 2}
"""Products of more than two dims, with the dims that the fold leaves as they are."""
_ADDED = frozenset({"addmm", "baddbmm"})
_HANDS_ON = frozenset({"add", "clone", "contiguous", "frac"})
_HANDS_ONE_ON = {**dict.fromkeys(("addcdiv", "addcmul", "fmod", "remainder", "sub"), 0), "rsub": 1}
"""Operations that hand the gradient on to one operand, with its position, and make the others'."""
_HANDED_ON = _HANDS_ONE_ON | dict.fromkeys(("index_add", "scatter_add"), 0)
_SPREADS = frozenset({"complex", "diag_embed", "sum"})
_PARTS = frozenset({"chunk", "split", "split_with_sizes"})
_LIKE = frozenset({"expand_as", "reshape_as", "view_as"})
_EXPANDS = frozenset({"expand", "expand_as"})
_PERMUTES = frozenset({"permute", "transpose"})
_LAYS_OUT = RESHAPES | {"view", "view_as"}
_PRODUCTS = frozenset({
    "mul", "div", "pow", "where", "maximum", "minimum", "atan2", "hypot", "remainder", "fmod", "lerp", "clamp", "clamp_max",
    "clamp_min", "masked_fill", "xlogy",
})
_JOINS = frozenset({"cat", "concat", "stack"})
_CUTS = VIEW_FAMILY - _EXPANDS | _JOINS
_VIEW_GRADIENTS = (VIEW_FAMILY - frozenset({
    "split", "split_with_sizes", "chunk", "slice", "select", "narrow", "expand", "expand_as", "unbind", "unfold", "diagonal",
})) | _JOINS


def _group_norm(tape: Tape, step: Step) -> None:
    """It lines its input up first, where that lies otherwise, and keeps the copy (aten/src/ATen/native/group_norm.cpp)."""
    x = step.operands[0]
    if tape.local.layouts[x].contiguous:
        return _single(tape, step)
    lined, size = tape.name("lined"), tape.bytes_of(x)
    need = tape.gradient(x, size) if step.differentiable else None
    tape.add([(x, None if need is None else PASS)], [(lined, size)])
    reads = [(value, tape.gradient(value, tape.bytes_of(value))) for value in step.operands[1:]]
    keeps = dict.fromkeys(lined if value == tape.local.root[x] else value for value in step.kept)
    kept = tuple(keeps) if step.differentiable else ()
    tape.add([(lined, need), *reads], tape.outputs_of(step), kept, extra=step.extra_bytes)
    return None


def _rms_norm(tape: Tape, step: Step) -> None:
    """By an accelerator's kernel one node; else as torch composes it."""
    if step.node is not None and step.node.fused:
        return _single(tape, step)
    composed_rms_norm(tape, step)
    return None


def _attention(tape: Tape, step: Step) -> None:
    """By a fused kernel one node; else as torch composes it."""
    assert step.node is not None
    operands = [tape.local.layouts[value] for value in step.operands]
    if fused_attention(step.node, operands, len(operands) > 3 and needs_gradient(tape.local, step.operands[3])):
        return _single(tape, step)
    ComposedAttention(tape, step).record()
    return None


def _einsum(tape: Tape, step: Step) -> None:
    """Two folds and a batched product (:mod:`planner.ops.einsums`)."""
    assert step.node is not None
    found = batched_product(step.node, [tape.local.layouts[value] for value in step.operands])
    if found is None or not step.differentiable:
        return _single(tape, step)
    reads, keeps = list[tuple[str, int | None]](), []
    for at, (value, fold) in enumerate(zip(step.operands, (found.left, found.right), strict=True)):
        size, folded = tape.bytes_of(value), tape.name(f"fold {at}")
        need = tape.gradient(value, size)
        handed = PASS if fold.in_order and tape.local.layouts[value].in_order else TURNED
        tape.add([(value, None if need is None else handed)], [(folded, None if fold.view else size)])
        reads.append((folded, need))
        keeps.append(value if fold.view else folded)
    wanted = [keep for keep, (_, need) in zip(keeps, reversed(reads), strict=True) if need is not None]
    tape.add(reads, tape.outputs_of(step), wanted, folds=True)
    return None


def _matmul(tape: Tape, step: Step) -> None:
    if is_turned(tape, step):
        turned_product(tape, step)
    else:
        _single(tape, step, passing=passing_copies(tape, step))


def _where(tape: Tape, step: Step) -> None:
    """A number to choose from is a tensor while it runs."""
    number = step.node is not None and any(
        isinstance(step.node.argument(name), (int, float)) for name in ("self", "other")
    )
    _single(tape, step, passing=DTYPE_BYTES[tape.local.types[step.outputs[0]].dtype] if number else 0)


def _call(tape: Tape, step: Step) -> Call:
    assert step.node is not None
    layouts = tape.local.layouts
    operands, outputs = ([layouts[value] for value in values] for values in (step.operands, step.outputs))
    return Call.of(step.node, operands, outputs, [needs_gradient(tape.local, value) for value in step.operands])


def _fourier(tape: Tape, step: Step) -> None:
    call = _call(tape, step)
    _single(tape, step, passing=forward_bytes(call), storage=gradient_storage(call))


def _recurrent(tape: Tape, step: Step) -> None:
    call = _call(tape, step)
    # What is kept grows while it runs.
    _single(tape, step, passing=stepping_bytes(call) + step.extra_bytes, inner=all_gates(call))


def _vocabulary_embedding(tape: Tape, step: Step) -> None:
    """``TensorAxis.embedding``: local ids and a mask, a lookup, and zeros where another rank owns the row."""
    weight = step.operands[0]
    ids = next(value for value in step.operands[1:] if value != weight)
    count = tape.local.layouts[ids].elements
    size = tape.local.storage_bytes(step.outputs[0])
    own, local, rows = tape.name("own"), tape.name("ids"), tape.name("rows")
    made = tape.gradient(weight, tape.bytes_of(weight))
    tape.add([(ids, None)], [(own, count), (local, 8 * count)], forward=8 * count)
    tape.add([(weight, made), (local, None)], [(rows, size)], [local] if made is not None else [])
    need = None if made is None else size
    tape.add([(rows, need), (own, None), (local, None)], tape.outputs_of(step), [own] if need else [])


def _conversion(tape: Tape, step: Step) -> None:
    """A collective: gathers and scatters along a dim that is not the outermost with an extent copy once more
    (runtime/primitives.py)."""
    conversion, source, target = step.conversion, step.operands[0], step.outputs[0]
    assert conversion is not None
    # What a collective makes lies row by row, and so does its gradient.
    turned = [] if tape.local.layouts[source].in_order else [source]
    if tape.local.root[target] != target:
        made = PASS if conversion.backward != "all_reduce" else tape.bytes_of(source)
        lines = conversion.backward == "all_reduce"
        tape.add([(source, tape.gradient(source, made))], tape.outputs_of(step), lines=lines, turns=turned)
        return
    before, after = tape.bytes_of(source), tape.bytes_of(target)
    sizes, dim = tape.local.layouts[target].sizes, _sharded(step).dim
    inner = prod(sizes[:dim]) > 1
    forward = _copies(conversion.forward, before, after, inner)
    back = {"identity": PASS, "all_reduce": before, "slice": PASS}.get(conversion.backward, before)
    if conversion.backward == "slice" and prod(sizes[:dim]) > 1:
        back = ROWS if dim == len(sizes) - 1 and not turned else PART
    elif back == PASS and turned:
        back = TURNED
    backward = _copies(conversion.backward, after, before, inner)
    tape.add(
        [(source, tape.gradient(source, back))], [(target, after)], forward=forward,
        backward=backward if needs_gradient(tape.local, source) else 0,
        lines=conversion.backward in ("all_reduce", "all_gather") or (conversion.backward == "reduce_scatter" and not inner),
        turns=turned,
    )


def _sharded(step: Step) -> Placement:
    """Of a conversion's two placements, the one that is split."""
    assert step.conversion is not None
    return step.conversion.source if step.conversion.source.state == "shard" else step.conversion.target


def _copies(kind: str, before: int, after: int, inner: bool) -> int:
    """Bytes of the copies that a collective makes beside its result."""
    if kind == "all_gather":
        return after if inner else 0
    if kind == "reduce_scatter":
        return before if inner else 0
    if kind == "all_to_all":
        return before  # The parts that are sent beside what arrives, then that beside the result.
    return 0


_EXPANSIONS: dict[str, Callable[[Tape, Step], None]] = {
    "conversion": _conversion, "cosine_similarity": cosine_similarity, "einsum": _einsum, "group_norm": _group_norm,
    "half_loss": half_loss, "loss": cross_entropy, "matmul": _matmul, "rms_norm": _rms_norm,
    "scaled_dot_product_attention": _attention, "split_softmax": split_softmax, "vocabulary_embedding": _vocabulary_embedding,
    "vocabulary_loss": vocabulary_loss, "where": _where,
    **dict.fromkeys(FOURIER, _fourier), **dict.fromkeys(RECURRENT, _recurrent),
}
