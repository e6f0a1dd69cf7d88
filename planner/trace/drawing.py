"""Random draws in the few forms that programs repeat: numbers like a tensor that is there.

A program draws from a stream of its own at each place (runtime/random_stream.py), so that recomputation, tensor ranks and
resumed runs draw alike: normal, uniform, exponential and whole numbers. All other draws are written in these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planner.ir.body import Node
from planner.ir.errors import InternalError
from planner.ir.inlining import NUMBERS
from planner.ir.types import Argument, BatchMultiple, Dtype, Ref, TensorType

_MADE = {"rand": "rand_like", "randint": "randint_like", "randn": "randn_like"}
FORMS = NUMBERS | _MADE.keys() | {"bernoulli", "feature_dropout", "normal", "normal_functional", "random", "uniform"}
"""The operations that :func:`drawn` takes."""
RIGHT = ("dropout, dropout2d, randn_like, rand_like, randint_like, bernoulli and the like: programs draw them again alike in "
         "recomputation, on every tensor rank and after a resume")
_WIDE = frozenset({"float32", "float64"})
"""Dtypes in which uniform numbers are fine enough to be compared with a probability."""


def undrawable(node: Node) -> tuple[str, str] | None:
    """What is wrong with a draw that has no canonical form, and what would be right."""
    if not any(isinstance(extent, BatchMultiple) for extent in node.type.shape):
        return (f"{node.base} draws random numbers once for all samples",
                "micro-batches and data ranks would each draw others: draw for every sample, [batch, ...]")
    said = dict(node.arguments)
    whole = node.base == "feature_dropout" and said["p"] == 1
    if whole or (node.base in ("random", "randint", "randint_like") and not isinstance(said.get("to", said.get("high")), int)):
        return f"{node.op} draws random numbers in a way that no program repeats", RIGHT
    return None


def drawn(node: Node, types: Mapping[str, TensorType]) -> list[Node]:
    """A draw's canonical form, unless it is :func:`undrawable`."""
    draw = _Draw(node, types)
    draw.write()
    if not draw.made:
        raise InternalError(node.name, f"is a draw by {node.op}", f"one of {', '.join(sorted(FORMS))}")
    return draw.made


class _Draw:
    """The nodes that stand for a draw, the last under its name."""

    def __init__(self, node: Node, types: Mapping[str, TensorType]) -> None:
        self.node, self.types, self.said = node, dict(types), dict(node.arguments)
        self.made: list[Node] = []

    def write(self) -> None:
        said, base, dtype = self.said, self.node.base, self.node.type.dtype
        if base in NUMBERS | _MADE.keys():
            self._numbers(_MADE.get(base, base), self._template(dtype), last=True)
        elif base == "uniform":
            low, high = _number(said["from"]), _number(said["to"])
            self._moved(self._numbers("rand_like", self._template(dtype)), high - low, low)
        elif base in ("normal", "normal_functional"):
            self._moved(self._numbers("randn_like", self._template(dtype)), said["std"], said["mean"])
        elif base == "random":
            self.said = {"high": said["to"]}
            self._numbers("randint_like", self._template(dtype), last=True)
        elif base == "bernoulli":
            self._kept(self._template(self._wide()), said.get("p", Ref(self.node.operands[0])), last=True)
        elif base == "feature_dropout":
            self._channels(1 - _number(said["p"]))

    def _numbers(self, base: str, like: str, *, last: bool = False) -> str:
        arguments: dict[str, Argument] = {"self": Ref(like)}
        if base == "exponential":
            arguments["lambd"] = self.said["lambd"]
        elif base == "randint_like":
            arguments |= {"low": self.said.get("low", 0), "high": self.said["high"], "dtype": None}
        else:
            arguments["dtype"] = None
        op = f"{base}.low_dtype" if base == "randint_like" else base
        return self._add("" if last else "_drawn", op, self.types[like], arguments)

    def _template(self, dtype: str) -> str:
        """The operand, where it has the shape and the dtype; else what has nothing but them."""
        wanted = replace(self.node.type, dtype=dtype)
        alike = [name for name in self.node.operands if self.types[name].shape == wanted.shape]
        if any(self.types[name] == wanted for name in alike):
            return next(name for name in alike if self.types[name] == wanted)
        if alike:
            return self._add("_template", "empty_like", wanted, {"self": Ref(alike[0]), "dtype": Dtype(dtype)})
        return self._add("_template", "empty.memory_format", wanted, {"size": wanted.shape, "dtype": Dtype(dtype)})

    def _wide(self) -> str:
        return self.node.type.dtype if self.node.type.dtype in _WIDE else "float32"

    def _moved(self, value: str, factor: Argument, offset: Argument) -> None:
        """``value`` times ``factor`` plus ``offset``, under the draw's name."""
        type_ = self.types[value]
        value = self._add("_scaled", "mul.Tensor", type_, {"self": Ref(value), "other": factor})
        self._add("", "add.Tensor", type_, {"self": Ref(value), "other": offset, "alpha": 1})

    def _kept(self, like: str, probability: Argument, *, last: bool = False) -> str:
        """1 with a probability, else 0, in the draw's dtype."""
        uniform = self._numbers("rand_like", like)
        operation = "lt.Tensor" if isinstance(probability, Ref) else "lt.Scalar"
        below = self._add("_below", operation, replace(self.types[like], dtype="bool"),
                          {"self": Ref(uniform), "other": probability})
        type_ = replace(self.types[like], dtype=self.node.type.dtype)
        cast: dict[str, Argument] = {"self": Ref(below), "dtype": Dtype(type_.dtype), "non_blocking": False, "copy": False}
        return self._add("" if last else "_kept", "to.dtype", type_, cast)

    def _channels(self, probability: float) -> None:
        """Whole channels [batch, channels, ...] kept with a probability (aten/src/ATen/native/Dropout.cpp)."""
        values, type_ = self.node.operands[0], self.node.type
        first = values
        for dim in range(2, type_.rank):
            one = replace(type_, shape=(*type_.shape[:2], *(1,) * (dim - 1), *type_.shape[dim + 1:]))
            cut: dict[str, Argument] = {"self": Ref(first), "dim": dim, "start": 0, "end": 1, "step": 1}
            first = self._add(f"_first_{dim}", "slice.Tensor", one, cut, differentiable=self.node.differentiable)
        if (wide := self._wide()) != type_.dtype:
            made: dict[str, Argument] = {"self": Ref(first), "dtype": Dtype(wide)}
            first = self._add("_template", "empty_like", replace(self.types[first], dtype=wide), made)
        kept = self._kept(first, probability)
        scaled = self._add("_scaled", "div.Tensor", self.types[kept], {"self": Ref(kept), "other": probability})
        self._add("", "mul.Tensor", type_, {"self": Ref(values), "other": Ref(scaled)},
                  differentiable=self.node.differentiable)

    def _add(
        self, suffix: str, op: str, type_: TensorType, arguments: Mapping[str, Argument], *, differentiable: bool = False
    ) -> str:
        name = f"{self.node.name}{suffix}"
        made = replace(self.node, name=name, op=op, arguments=tuple(arguments.items()), types=(type_,),
                       differentiable=differentiable)
        self.made.append(made)
        self.types[name] = type_
        return name


def _number(value: Argument) -> float:
    assert isinstance(value, (int, float)), value
    return value
