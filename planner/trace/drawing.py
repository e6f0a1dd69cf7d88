"""Random draws in the few forms that programs repeat: numbers like a tensor that is there.

A program draws from a stream of its own at each place (runtime/random_stream.py), so that recomputation, tensor ranks and
resumed runs draw alike: normal, uniform, exponential and whole numbers. All other draws are written in these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from planner.ir.body import Node
from planner.ir.errors import InternalError
from planner.ir.inlining import DRAWN
from planner.ir.types import Argument, Dtype, Ref, TensorType
from planner.trace.regions import OTHER_DROPOUTS

_MADE = {"rand": "rand_like", "randint": "randint_like", "randn": "randn_like"}
FORMS = DRAWN | _MADE.keys() | {"bernoulli", "normal", "normal_functional", "random", "uniform"} | OTHER_DROPOUTS
"""The operations that :func:`drawn` takes."""
RIGHT = ("dropout, randn_like, rand_like, randint_like, bernoulli and the like: programs draw them again alike in "
         "recomputation, on every tensor rank and after a resume")
_SATURATION = 1.7580993408473766
"""Of SELU: scale x alpha (Klambauer et al. 2017, section 3), as torch has it."""
_WIDE = frozenset({"float32", "float64"})
"""Dtypes in which uniform numbers are fine enough to be compared with a probability."""


def undrawable(node: Node) -> tuple[str, str] | None:
    """What is wrong with a draw that has no canonical form, and what would be right."""
    if not node.type.batched:
        return (f"{node.base} draws random numbers once for all samples",
                "micro-batches and data ranks would each draw others: draw for every sample, [batch, ...]")
    said = dict(node.arguments)
    everything = node.base in OTHER_DROPOUTS and said["p"] == 1
    unbounded = isinstance(said.get("high"), Ref) or (node.base == "random" and not isinstance(said.get("to"), int))
    if everything or unbounded:
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
        if base in DRAWN | _MADE.keys():
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
        elif base in OTHER_DROPOUTS:
            whole = base.startswith("feature")
            self._dropout(self._first_of_channels() if whole else self.node.operands[0], 1 - _number(said["p"]))

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

    def _first_of_channels(self) -> str:
        """One number for each channel [batch, channels, ...]."""
        first, type_ = self.node.operands[0], self.node.type
        for dim in range(2, type_.rank):
            one = replace(type_, shape=(*type_.shape[:2], *(1,) * (dim - 1), *type_.shape[dim + 1:]))
            cut: dict[str, Argument] = {"self": Ref(first), "dim": dim, "start": 0, "end": 1, "step": 1}
            first = self._add(f"_first_{dim}", "slice.Tensor", one, cut, differentiable=self.node.differentiable)
        return first

    def _dropout(self, like: str, probability: float) -> None:
        """Values kept with a probability, and the others 0 or, by alpha dropout, such that mean and variance stay
        (aten/src/ATen/native/Dropout.cpp). ``like``: of the masks' shape."""
        type_, node = self.types[like], self.node
        if (wide := self._wide()) != type_.dtype:
            made: dict[str, Argument] = {"self": Ref(like), "dtype": Dtype(wide)}
            like = self._add("_template", "empty_like", replace(type_, dtype=wide), made)
        kept, alpha = self._kept(like, probability), _SATURATION if "alpha" in node.base else 0.0
        factor = 1 / math.sqrt((alpha**2 * (1 - probability) + 1) * probability) if alpha else 1 / probability
        scaled = self._add("_scaled", "mul.Tensor", type_, {"self": Ref(kept), "other": factor})
        product = self._add("_product" if alpha else "", "mul.Tensor", node.type,
                            {"self": Ref(node.operands[0]), "other": Ref(scaled)}, differentiable=node.differentiable)
        if alpha:  # What is kept is moved by a part of what dropped values become.
            moved = self._add("_moved", "mul.Tensor", type_, {"self": Ref(kept), "other": alpha * factor})
            filled = self._add("_filled", "add.Tensor", type_,
                               {"self": Ref(moved), "other": alpha * factor * -probability, "alpha": 1})
            self._add("", "add.Tensor", node.type, {"self": Ref(product), "other": Ref(filled), "alpha": 1},
                      differentiable=node.differentiable)

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
