"""Attention without a fused kernel, as torch composes it (aten/src/ATen/native/transformers/attention.cpp,
``_scaled_dot_product_attention_math``, torch 2.13)."""

from __future__ import annotations

from math import prod

from planner.costing.local import Step
from planner.costing.tape import PASS, Tape
from planner.ir.types import DTYPE_BYTES, HALF
from planner.ops.layout import Layout, computed
from planner.ops.saved import folds


class ComposedAttention:
    """Records one call. Half precisions are computed in float32; query and key are scaled, keys and values of fewer heads are
    repeated, what a product cannot fold by strides is copied. ``held``: the function's own variables, which live to its
    end; ``lies``: by view that is no operand itself, the value whose storage autograd keeps."""

    def __init__(self, tape: Tape, step: Step) -> None:
        assert step.node is not None
        self.tape, self.step = tape, step
        self.arguments = dict(step.node.arguments)
        self.query, self.key, self.value = (tape.local.layouts[name] for name in step.operands[:3])
        self.dtype = "float32" if self.query.dtype in HALF else self.query.dtype
        self.held: list[str] = []
        self.lies: dict[str, str] = {}
        self.heads = prod(self.query.sizes[:-2])
        self.scores = self.heads * self.query.sizes[-2] * self.key.sizes[-2] * DTYPE_BYTES[self.dtype]

    def record(self) -> None:
        """The whole of it."""
        query, key, value = (self._wide(at) for at in range(3))
        query = self._scaled(query, self.query)
        self.held.append(query)
        repeats = bool(self.arguments.get("enable_gqa")) and self.key.sizes[-3] != self.query.sizes[-3]
        if repeats:
            key, value = self._repeated(key, self.key), self._repeated(value, self.value)
        mask = self._mask()
        key = self._scaled(key, self.key, repeated=repeats)
        lying = self._folded(query, computed(self.query)), self._folded(key, computed(self.key), repeated=repeats)
        weights = self._weights(*lying, mask)
        weights = self._dropped(weights)
        if self.query.dtype in HALF:
            self.held.append(self._make("narrow", self.scores // 2, weights))  # The weights are a result too.
        lies = computed(self.value) if self.value.dtype in HALF else self.value
        self._result(weights, self._folded(value, lies, repeated=repeats))

    def _bytes(self, layout: Layout, *, whole: bool = False) -> int:
        """Of an operand as it is computed with; ``whole``: with as many heads as the query has."""
        elements = self.heads * prod(layout.sizes[-2:]) if whole else layout.elements
        return elements * DTYPE_BYTES[self.dtype]

    def _make(self, name: str, size: int, *reads: str) -> str:
        """A value that autograd does not follow."""
        made = self.tape.name(name)
        self.tape.add([(value, None) for value in reads], [(made, size)])
        return made

    def _step(self, name: str, size: int | None, value: str, gradient: int, *keeps: str, beside: str | None = None) -> str:
        """A value made of another (and of one ``beside`` it without a gradient), or (no ``size``) a view of it; ``keeps``:
        "result" is the value itself."""
        made = self.tape.name(name)
        reads = [(value, gradient if self.step.differentiable else None), *([(beside, None)] if beside else [])]
        kept = [made if keep == "result" else keep for keep in keeps]
        self.tape.add(reads, [(made, size)], kept if self.step.differentiable else [])
        return made

    def _wide(self, at: int) -> str:
        """An operand in the dtype of the computation."""
        name, layout = self.step.operands[at], (self.query, self.key, self.value)[at]
        if layout.dtype not in HALF:
            return name
        made = self.tape.name(f"wide{at}")
        self.tape.add([(name, self.tape.gradient(name, layout.size_bytes))], [(made, self._bytes(layout))])
        self.held.append(made)
        return made

    def _scaled(self, name: str, layout: Layout, *, repeated: bool = False) -> str:
        size = self._bytes(layout, whole=repeated)
        return self._step(f"scaled {name}", size, name, size)

    def _repeated(self, name: str, layout: Layout) -> str:
        """``repeat_interleave`` of the heads."""
        made = self._step(f"repeated {name}", self._bytes(layout, whole=True), name, self._bytes(layout))
        self.held.append(made)
        return made

    def _mask(self) -> str | None:
        """What is added to the scores: of a causal or a boolean mask a tensor of numbers."""
        item = DTYPE_BYTES[self.dtype]
        if self.arguments.get("is_causal"):
            mask = self._make("mask", self.query.sizes[-2] * self.key.sizes[-2] * item)
        elif len(self.step.operands) > 3:
            mask = self.step.operands[3]
            layout = self.tape.local.layouts[mask]
            mask = self._make("mask", layout.elements * DTYPE_BYTES[self.query.dtype], mask) if layout.dtype == "bool" else mask
        else:
            return None
        self.held.append(mask)
        return mask

    def _bias(self, mask: str) -> int | None:
        """The gradient of a mask that is learned: that of the scores, or summed over the dims along which it was broadcast."""
        if mask != self.step.operands[-1]:
            return None
        layout = self.tape.local.layouts[mask]
        alike = layout.sizes == (*self.query.sizes[:-1], self.key.sizes[-2]) and layout.dtype == self.dtype
        return self.tape.gradient(mask, PASS if alike else layout.size_bytes)

    def _folded(self, name: str, layout: Layout, *, repeated: bool = False) -> str:
        """An operand of a batched product, with as many heads as the query: a view where its strides allow one, or a copy."""
        size, whole = self._bytes(layout), self._bytes(layout, whole=True)
        lies = folds(layout, self.query.sizes[:-2])
        if repeated or (lies and size == whole):
            return name
        folded = self._step(f"folded {name}", None if lies else whole, name, PASS if size == whole else size)
        self.lies |= {folded: name} if lies else {}
        return folded

    def _weights(self, query: str, key: str, mask: str | None) -> str:
        """The product of queries and keys, masked, and its softmax."""
        tape, scores, size = self.tape, self.tape.name("scores"), self.scores
        need = self.step.differentiable
        sizes = self._bytes(self.query), self._bytes(self.key, whole=True)
        reads = [(value, made if need else None) for value, made in zip((query, key), sizes, strict=True)]
        tape.add(reads, [(scores, size)], [query, key] if need else [])
        if mask is not None:
            masked, bias = tape.name("masked"), self._bias(mask)
            tape.add([(scores, PASS if need else None), (mask, bias)], [(masked, size)])
            scores = masked
        return self._step("weights", size, scores, size, "result")

    def _dropped(self, weights: str) -> str:
        if not self.arguments.get("dropout_p"):
            return weights
        noise = self._make("noise", self.scores)
        return self._step("dropped", self.scores, weights, self.scores, noise, beside=noise)

    def _result(self, weights: str, value: str) -> None:
        tape, need = self.tape, self.step.differentiable
        narrow = self.query.dtype in HALF
        (output,) = self.step.outputs
        size = self._bytes(tape.local.layouts[output])
        product = tape.name("product") if narrow else output
        held = [(name, None) for name in self.held]
        gradients = self.scores, self._bytes(self.value, whole=True)
        reads = [(name, made if need else None) for name, made in zip((weights, value), gradients, strict=True)]
        tape.add([*reads, *held], [(product, size)], [weights, self.lies.get(value, value)] if need else [])
        if narrow:
            tape.add([(product, size if need else None), *held], [(output, tape.bytes_of(output))])
