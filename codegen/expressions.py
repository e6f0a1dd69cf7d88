"""One operation as Python text, with the precedence of its outermost operator."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from codegen.forms import ANY, ATOM, BINARY, FORMS, INFINITE_END, UNARY, Form
from codegen.naming import quoted
from codegen.program import HALF, Compute, LocalArgument, RankSize
from planner.ir.types import BatchMultiple, Dtype, Ref


@dataclass(frozen=True, slots=True)
class Text:
    """Python text; ``level``: precedence of its outermost operator (``ATOM``: none)."""

    text: str
    level: int = ATOM

    def within(self, level: int) -> str:
        """The text as an operand of an operator of precedence ``level``."""
        return f"({self.text})" if self.level < level else self.text


@dataclass
class Scope:
    """What the names of a function's variables stand for, and how its batch and device are told.

    ``batch``: text of the batch size of one call; ``device``: text of the device. ``asked`` records which were used, and
    whether the tensor axis (``tp``) was.
    """

    texts: Mapping[str, Text]
    batch: str
    device: str
    asked: set[str]

    def literal(self, argument: LocalArgument) -> Text:
        """An argument as text."""
        match argument:
            case Ref(name):
                return self.texts[name]
            case Dtype(name):
                return Text(f"torch.{name}")
            case BatchMultiple(factor):
                self.asked.add("batch")
                return Text(self.batch) if factor == 1 else Text(f"{factor} * {self.batch}", 6)
            case RankSize(extent, unit, segments):
                self.asked.add("tp")
                parts = [str(extent)]
                if unit != 1 or segments:
                    parts.append(f"unit={unit}")
                if segments:
                    parts.append(f"segments={segments!r}")
                return Text(f"tp.size({', '.join(parts)})")
            case tuple():
                items = ", ".join(self.literal(item).text for item in argument)
                return Text(f"({items},)" if len(argument) == 1 else f"({items})")
            case float() if math.isinf(argument) or math.isnan(argument):
                return Text(f'float("{argument}")')
            case str():
                return Text(quoted(argument))
            case bool() | None:
                return Text(repr(argument))
            case int() | float() if argument < 0:
                return Text(repr(argument), UNARY)
        return Text(repr(argument))


def render_compute(compute: Compute, scope: Scope) -> Text:
    """The right-hand side of one operation."""
    arguments = dict(compute.arguments)
    if compute.call:
        return _runtime_call(compute, arguments, scope)
    op = compute.node.op
    if op in BINARY and arguments.get("alpha", 1) == 1 and isinstance(arguments.get("self"), Ref):
        return _binary(op, arguments, scope)
    if op in ("neg", "bitwise_not"):
        sign = "-" if op == "neg" else "~"
        return Text(f"{sign}{scope.literal(arguments['self']).within(UNARY)}", UNARY)
    if op in ("rsub.Scalar", "rsub.Tensor") and arguments.get("alpha", 1) == 1:
        return Text(f"{scope.literal(arguments['other']).within(5)} - {scope.literal(arguments['self']).within(6)}", 5)
    indexed = _indexed(compute, arguments, scope)
    if indexed is not None:
        return indexed
    if op == "cross_entropy_loss":
        return _cross_entropy(arguments, scope, wide=compute.node.type.dtype in HALF)
    form = FORMS.get(op)
    if form is None or not _shows(form, arguments):
        return _generic(op, arguments, scope)
    return _formed(form, compute, arguments, scope)


def _binary(op: str, arguments: Mapping[str, LocalArgument], scope: Scope) -> Text:
    sign, level = BINARY[op]
    names = [name for name in arguments if name != "alpha"]
    left, right = (scope.literal(arguments[name]) for name in names[:2])
    strict_left = level + 1 if level == 0 else level
    return Text(f"{left.within(strict_left)} {sign} {right.within(level + 1)}", level)


def _indexed(compute: Compute, arguments: Mapping[str, LocalArgument], scope: Scope) -> Text | None:
    """``x[..., a:b]``, ``x[:, 0]``, ``x[rows, columns]``."""
    op = compute.node.op
    if op not in ("slice.Tensor", "select.int", "index.Tensor"):
        return None
    x = scope.literal(arguments["self"]).within(ATOM)
    if op == "index.Tensor":
        indices = arguments["indices"]
        assert isinstance(indices, tuple)
        items = [":" if item is None else scope.literal(item).text for item in indices]
        return Text(f"{x}[{', '.join(items)}]")
    dim = arguments["dim"]
    assert isinstance(dim, int)
    rank = compute.node.type.rank + (op == "select.int")
    at = dim % rank
    if op == "select.int":
        item = scope.literal(arguments["index"]).text
    else:
        start, end, step = arguments["start"], arguments["end"], arguments["step"]
        item = ("" if start in (None, 0) else scope.literal(start).text) + ":"
        item += "" if end is None or end == INFINITE_END else scope.literal(end).text
        item += "" if step == 1 else f":{scope.literal(step).text}"
    if at == rank - 1 and rank > 1:
        return Text(f"{x}[..., {item}]")
    return Text(f"{x}[{', '.join([':'] * at + [item])}]")


def _cross_entropy(arguments: Mapping[str, LocalArgument], scope: Scope, *, wide: bool) -> Text:
    """``wide``: half precisions are computed in float32: a sum over a batch would overflow or lose its digits."""
    def floating(name: str) -> str:
        text = scope.literal(arguments[name])
        return f"{text.within(ATOM)}.float()" if wide else text.text

    reduction = {0: "none", 1: "mean", 2: "sum"}[int(arguments["reduction"])]  # type: ignore[arg-type]
    items = [floating("self"), scope.literal(arguments["target"]).text]
    if arguments["weight"] is not None:
        items.append(f"weight={floating('weight')}")
    for name, default in (("ignore_index", -100), ("label_smoothing", 0.0)):
        if arguments[name] != default:
            items.append(f"{name}={scope.literal(arguments[name]).text}")
    return Text(f'F.cross_entropy({", ".join(items)}, reduction="{reduction}")')


def _runtime_call(compute: Compute, arguments: Mapping[str, LocalArgument], scope: Scope) -> Text:
    """A method of the tensor axis or of the random stream."""
    shown: dict[str, tuple[tuple[str, ...], tuple[tuple[str, str, LocalArgument], ...]]] = {
        "tp.embedding": (("indices", "weight"), (("padding_idx", "padding_index", -1),)),
        "tp.cross_entropy": (("self", "target"), (("ignore_index", "ignore_index", -100),)),
        "tp.softmax": (("self", "dim"), ()),
        "tp.log_softmax": (("self", "dim"), ()),
        "rng.dropout": (("input", "p"), ()),
        "rng.normal": (("self",), ()),
        "rng.uniform": (("self",), ()),
        "rng.exponential": (("self",), (("lambd", "rate", 1.0),)),
        "rng.integers": (("self", "low", "high"), ()),
        "rng.attention": (
            ("query", "key", "value"),
            (("attn_mask", "attn_mask", None), ("dropout_p", "dropout_p", 0.0), ("is_causal", "is_causal", False),
             ("scale", "scale", None), ("enable_gqa", "enable_gqa", False)),
        ),
    }
    positional, keywords = shown[compute.call]
    scope.asked.add(compute.call.partition(".")[0])
    items = [scope.literal(arguments[name]).text for name in positional]
    items += [f"{k}={scope.literal(arguments[n]).text}" for n, k, default in keywords if arguments[n] != default]
    items += [f"{k}={scope.literal(v).text}" for k, v in compute.extra]
    return Text(f"{compute.call}({', '.join(items)})")


def _same(value: LocalArgument, default: LocalArgument) -> bool:
    return value == default and isinstance(value, bool) == isinstance(default, bool)


def _shows(form: Form, arguments: Mapping[str, LocalArgument]) -> bool:
    """Whether the form tells all that the arguments say."""
    told = set(form.positional) | {name for name, _, _ in form.keywords}
    hidden = dict(form.hidden)
    if any(name not in arguments for name in form.positional):
        return False
    rest = {name: value for name, value in arguments.items() if name not in told}
    return all(name in hidden and (hidden[name] == ANY or _same(value, hidden[name])) for name, value in rest.items())


def _formed(form: Form, compute: Compute, arguments: Mapping[str, LocalArgument], scope: Scope) -> Text:
    positional = [arguments[name] for name in form.positional]
    spread: tuple[LocalArgument, ...] = ()
    if form.star:
        last = positional.pop()
        spread = last if isinstance(last, tuple) else (last,)
        if compute.node.base in ("reshape", "view", "expand"):
            spread = _inferred(compute, spread)
    first = scope.literal(positional[0]).within(ATOM) if form.method else ""
    items = [scope.literal(item).text for item in (*positional[form.method :], *spread)]
    if form.text == "torch.arange" and len(items) == 3 and items[2] == "1":
        items = items[1:2] if items[0] == "0" else items[:2]
    skipped = False
    for name, keyword, default in form.keywords:
        if name not in arguments or _same(arguments[name], default):
            skipped = True
            continue
        bare = name in ("weight", "bias") and not skipped
        items.append(("" if bare else f"{keyword}=") + scope.literal(arguments[name]).text)
    if form.device:
        scope.asked.add("device")
        items.append(f"device={scope.device}")
    call = f"{form.text}({', '.join(items)})"
    return Text(f"{first}.{call}" if form.method else call)


def _inferred(compute: Compute, sizes: tuple[LocalArgument, ...]) -> tuple[LocalArgument, ...]:
    """Sizes with -1 in place of the batch: torch infers it (reshape), or keeps it (expand, where it is not stretched)."""
    symbolic = [at for at, size in enumerate(sizes) if isinstance(size, BatchMultiple)]
    if len(symbolic) != 1 or -1 in sizes:
        return sizes
    (at,) = symbolic
    if compute.node.base != "expand":
        return (*sizes[:at], -1, *sizes[at + 1 :])
    return sizes


def _generic(op: str, arguments: Mapping[str, LocalArgument], scope: Scope) -> Text:
    """The call that is right for every operation."""
    overload = op if "." in op.rpartition("::")[2] else f"{op}.default"
    items = [f"{name}={scope.literal(value).text}" for name, value in arguments.items()]
    if not any(isinstance(value, Ref | tuple) for value in arguments.values()):
        scope.asked.add("device")
        items.append(f"device={scope.device}")
    namespace, _, name = overload.rpartition("::")
    return Text(f"torch.ops.{namespace or 'aten'}.{name}({', '.join(items)})")
