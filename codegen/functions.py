"""A function's statements as lines of Python: what is named, what is inlined, what is fused back together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from codegen.expressions import Scope, Text, render_compute
from codegen.naming import escaped
from codegen.program import Compute, Convert, Function, LocalArgument, Repeat, Statement
from planner.ir.errors import InternalError
from planner.ir.inlining import PARAMETER, VALUE, expression_size, inlined
from planner.ir.placement import local_type
from planner.ir.types import BatchMultiple, Ref, references

WIDTH = 110
_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')


def render_function(function: Function, *, method: bool, annotations: str = "") -> list[str]:
    """Lines of ``def``, indented from column 0 (methods too). ``annotations``: text between the head and the statements."""
    writer = _Writer(function, method)
    for statement in function.statements:
        writer.write(statement)
    outputs = [writer.texts[name].text for name in function.outputs]
    parameters = [*(("self",) if method else ()), *function.inputs, *(("rng",) if function.random else ())]
    head = wrap(f"def {function.name}({', '.join(parameters)}):", 0)
    lines = [*head, *([f"    {annotations}"] if annotations else [])]
    if "tp" in writer.scope.asked:
        lines.append("    tp = self.tensor")
    if "batch" in writer.scope.asked:
        lines.append(f"    batch = {_batch_text(function)}")
    return [*lines, *writer.lines, *wrap(f"return {', '.join(outputs)}", 4)]


def _scalar(function: Function, name: str) -> str:
    """A parameter without dims is kept as one element, which FSDP2 can shard."""
    return "" if name not in function.variables or function.variables[name].type.rank else ".squeeze()"


class _Writer:
    """Walks the statements of one function in order."""

    def __init__(self, function: Function, method: bool) -> None:
        self.function = function
        self.lines: list[str] = []
        self.texts: dict[str, Text] = {name: Text(name) for name in function.variables}
        if method:
            self.texts |= {name: Text(f"self.{path}{_scalar(function, name)}") for name, path in function.attributes.items()}
        device = f"{function.inputs[0]}.device" if function.inputs else "self.tensor.device"
        self.scope = Scope(self.texts, "batch", device, set())
        self.uses = Counter(name for s in function.statements for name in _reads(s)) + Counter(function.outputs)
        self.consumer = {name: s for s in function.statements for name in _reads(s)}
        self.sizes = {name: PARAMETER if name in function.attributes else VALUE for name in function.variables}
        self.linears: dict[str, Compute] = {}
        self.module = ""

    def write(self, statement: Statement) -> None:
        match statement:
            case Convert():
                self._convert(statement)
            case Repeat():
                self._repeat(statement)
            case Compute():
                self._compute(statement)

    def _line(self, text: str, module: str, comment: str = "") -> None:
        if module and module != self.module:
            self.lines.append(f"    # {escaped(module)}")
            self.module = module
        suffix = f"  # {comment}" if comment else ""
        first, *following = wrap(text, 4, WIDTH - len(suffix))
        self.lines += [first + suffix, *following]

    def _convert(self, statement: Convert) -> None:
        keywords = "".join(
            f', {name}="{value}"' if isinstance(value, str) else f", {name}={value}" for name, value in statement.keywords
        )
        source = self.texts[statement.source].text
        comment = _size(statement.size_bytes) if statement.size_bytes else ""
        self.scope.asked.add("tp")
        self._line(f"{statement.target} = tp.{statement.method}({source}{keywords})", statement.module, comment)

    def _repeat(self, statement: Repeat) -> None:
        arguments = [self.texts[name].text for name in statement.arguments]
        items = [f"self.{statement.method}", *arguments, *(("rng",) if statement.random else ()), "use_reentrant=False"]
        self._line(f"{', '.join(statement.targets)} = checkpoint({', '.join(items)})", "")

    def _compute(self, statement: Compute) -> None:
        if not any(self.uses[target] for target in statement.targets):
            return
        text = self._text(statement)
        if len(statement.targets) > 1 or len(statement.node.types) > 1:
            names = [target if self.uses[target] else "_" for target in statement.targets]
            left = f"{names[0]}," if len(names) == 1 else ", ".join(names)
            self._line(f"{left} = {text.text}", statement.node.module)
            return
        (target,) = statement.targets
        if self.function.outputs == (target,) and self.uses[target] == 1 and statement is self.function.statements[-1]:
            self.texts[target] = text
            return
        size = expression_size(self.sizes[name] for name in _reads(statement))
        if self._inlined(statement, target, size):
            self.texts[target], self.sizes[target] = text, size
            if statement.node.base == "linear" and dict(statement.arguments).get("bias") is None:
                self.linears[target] = statement
            return
        self._line(f"{target} = {text.text}", statement.node.module)

    def _text(self, statement: Compute) -> Text:
        """The statement's expression; a bias that is added to a linear goes back into it."""
        if _adds_bias(statement, self.function):
            arguments = dict(statement.arguments)
            source = arguments["self"]
            if isinstance(source, Ref) and source.name in self.linears:
                linear = self.linears[source.name]
                fused = tuple((k, arguments["other"] if k == "bias" else v) for k, v in linear.arguments)
                return render_compute(Compute(linear.node, fused, statement.targets), self.scope)
        return render_compute(statement, self.scope)

    def _inlined(self, statement: Compute, target: str, size: int) -> bool:
        if self.uses[target] != 1 or target in self.function.outputs or statement.call:
            return False
        consumer = self.consumer[target]
        if not isinstance(consumer, Compute):
            return isinstance(consumer, Convert) and inlined(statement.node, None, size, leads=True, bias=False)
        leads, bias = _first(consumer) == target, _adds_bias(consumer, self.function)
        return inlined(statement.node, consumer.node, size, leads=leads, bias=bias)


def _first(statement: Compute) -> str:
    value = statement.arguments[0][1]
    return value.name if isinstance(value, Ref) else ""


def _adds_bias(statement: Statement, function: Function) -> bool:
    """Whether the statement adds a one-dimensional parameter."""
    if not isinstance(statement, Compute) or statement.node.op != "add.Tensor":
        return False
    arguments = dict(statement.arguments)
    other = arguments["other"]
    if arguments.get("alpha", 1) != 1 or not isinstance(other, Ref) or other.name not in function.attributes:
        return False
    return function.variables[other.name].type.rank == 1


def _reads(statement: Statement) -> tuple[str, ...]:
    match statement:
        case Convert():
            return (statement.source,)
        case Repeat():
            return statement.arguments
    return tuple(name for _, argument in statement.arguments for name in _names(argument))


def _names(argument: LocalArgument) -> tuple[str, ...]:
    if isinstance(argument, tuple):
        return tuple(name for item in argument for name in _names(item))
    return references(argument) if isinstance(argument, Ref) else ()


def _batch_text(function: Function) -> str:
    """The batch size of the call, from the shape of an input."""
    for name in function.inputs:
        variable = function.variables[name]
        shape = local_type(variable.type, variable.placement, function.degree).shape
        for dim, extent in enumerate(shape):
            if isinstance(extent, BatchMultiple):
                return f"{name}.shape[{dim}]" + (f" // {extent.factor}" if extent.factor != 1 else "")
    raise InternalError(function.name, "needs the batch size, but no input has it", "an input with a batch dim")


def _size(size_bytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.4g} {unit}"
    return f"{size_bytes} bytes"


def wrap(text: str, indent: int, width: int = WIDTH) -> list[str]:
    """The line, broken at the commas of its last outermost bracket where it is longer than ``width``."""
    pad = " " * indent
    if len(pad + text) <= width:
        return [pad + text]
    opened = _outermost(text)
    if opened is None:
        return [pad + text]
    start, end = opened
    items = split_top(text[start + 1 : end])
    closing = pad + text[end:]
    lines, line = [pad + text[: start + 1]], ""
    for at, item in enumerate(items):
        piece = item + ("," if at < len(items) - 1 or len(items) > 1 else "")
        if line and len(pad) + 4 + len(line) + 1 + len(piece) > WIDTH:
            lines.append(f"{pad}    {line}")
            line = ""
        line = f"{line} {piece}" if line else piece
    lines.append(f"{pad}    {line}")
    if closing.strip() == "):" and lines[-1].endswith(","):
        return [*lines, closing]
    return [*lines, closing]


def _masked(text: str) -> str:
    """The text with nothing to be seen of what its string literals hold."""
    return _LITERAL.sub(lambda literal: "_" * len(literal[0]), text)


def _outermost(text: str) -> tuple[int, int] | None:
    """The widest top-level bracket that is not empty."""
    depth, start, best = 0, -1, None
    for at, character in enumerate(_masked(text)):
        if character in "([{":
            if depth == 0:
                start = at
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth == 0 and (best is None or at - start > best[1] - best[0]):
                best = (start, at)
    return best if best and best[1] - best[0] > 1 else None


def split_top(text: str) -> Sequence[str]:
    """Parts between the commas outside of brackets and strings."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(_masked(text)):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    return [part for part in (*parts, text[start:].strip()) if part]


__all__ = ["render_function", "split_top", "wrap"]
