"""What engines that fuse kernels keep from forward to backward, where :mod:`planner.costing.activations` says what torch's
autograd keeps operation by operation.

Work between products (norms, activations, rotations, residual sums, dropout) is cheap to repeat. A fused kernel keeps what
it started from, not what it made on the way, so a storage that cheap work made counts as the storages that it was made from:

- ``fused``: products keep what they read, as they are given it (Megatron-LM and Transformer Engine: the input of every
  linear layer; Korthikanti et al. 2022, section 4.1), gathered over the tensor axis or not: the shard is kept and gathered
  again (section 4.2.2). All else keeps what it started from. Dropout keeps a byte an element;
- ``compiled``: what products read is made again too (torch's min-cut partitioner, torch/_functorch/partitioners.py; XLA's
  rematerialisation), and masks are drawn again.

Products in a narrower dtype keep what they read in that dtype, beside whatever else keeps it (Transformer Engine,
transformer_engine/pytorch/module/linear.py: ``ctx.save_for_backward`` of the quantised input; four-bit blocks of 16 elements
have a scale of a byte each).

Selective recomputation of every other product (``alternate``) keeps, of a block, its inputs, what attention gives, what every
other product gives and what a reduce-scatter gives; all else runs again (torchtitan, distributed/activation_checkpoint.py:
``_get_default_save_ops`` and the count of products in ``SelectiveAC``).

Unfused attention keeps the softmax and, under dropout, its mask and result: 5 bytes a pair of half precision (Korthikanti et
al. 2022, equation 1), 2 without dropout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from hardware_profiles import Engine
from planner.costing.local import LocalBody, Step
from planner.ir.costed import Recompute
from planner.ir.regions import recompute_region
from planner.ir.types import DTYPE_BYTES
from planner.ops.families import ATTENTION, GEMMS

_LOSS = "cross_entropy_loss"
_NARROW_BYTES = {"float8": 1.0, "float4": 0.5 + 1 / 16}
"""Of an element that a product keeps, its share of a block's scale included."""
_PAIR_BYTES, _DROPPED_PAIR_BYTES = 2, 5


@dataclass(frozen=True)
class Keeping:
    """One rank's body under an engine's bookkeeping."""

    local: LocalBody
    engine: Engine

    def saved_bytes(self, recompute: Recompute) -> int:
        """Bytes kept from forward to backward under a recomputation level; state and what blocks share left out."""
        local = self.local
        if recompute == "full":
            kept = {value.name for value in local.body.inputs}
            return sum(local.storage_bytes(root) for root in kept - self._apart)
        if recompute == "selective" and self.engine.selective == "alternate":
            return self._alternate_bytes()
        region = set(recompute_region(local.body)) if recompute == "selective" else set()
        inside = {value for step in local.steps if step.node and step.node.name in region for value in step.outputs}
        roots: set[str] = set()
        cast: set[str] = set()
        extra = 0
        for step in local.steps:
            if step.node is not None and step.node.name in region:
                outside = [local.root[value] for value in step.operands if value not in inside]
                roots |= self._sources(outside)
                continue
            given = self.engine.keeps == "fused" and step.node is not None and not _cheap(step)
            kept = self._given(step) if given else self._sources(self._read(step))
            if given and self._narrow_bytes and _weighted(local, step):
                cast |= kept
            else:
                roots |= kept
            extra += self._extra_bytes(step)
        extra += round(sum(self._narrow_bytes * self._elements(root) for root in cast - self._apart))
        return extra + sum(local.storage_bytes(root) for root in roots - self._apart)

    def _alternate_bytes(self) -> int:
        """Inputs, and results of attention, of every other product and of reduce-scatters."""
        repeated = {step for step, _ in enumerate(self.local.steps)} - set(self._kept_steps)
        values = [value for at, step in enumerate(self.local.steps) if at not in repeated for value in step.outputs]
        roots = {self.local.root[value] for value in values} | {value.name for value in self.local.body.inputs}
        statistics = sum(self._extra_bytes(step) for step in self.local.steps if _base(step) == ATTENTION)
        return statistics + sum(self.local.storage_bytes(root) for root in roots - self._apart)

    @cached_property
    def _kept_steps(self) -> tuple[int, ...]:
        """Steps whose results ``alternate`` keeps, by place. Products are counted from the block's first; the odd ones stay."""
        found, products = [], 0
        for at, step in enumerate(self.local.steps):
            if _base(step) in GEMMS and _weighted(self.local, step):
                products += 1
                if products % 2:
                    found.append(at)
            elif _base(step) == ATTENTION or (step.conversion is not None and step.conversion.forward == "reduce_scatter"):
                found.append(at)
        return tuple(found)

    def repeated(self) -> tuple[frozenset[str], frozenset[str]]:
        """Nodes that ``alternate`` runs again; and those of them whose operands, if collectives bring them, are brought again:
        not what a reduce-scatter gave."""
        steps = [step for at, step in enumerate(self.local.steps) if at not in self._kept_steps]
        scattered = {
            value for at in self._kept_steps for value in self.local.steps[at].outputs if self.local.steps[at].node is None
        }
        return (
            frozenset(step.node.name for step in steps if step.node is not None),
            frozenset(step.node.name for step in steps if step.node is not None and not scattered.intersection(step.operands)),
        )

    @cached_property
    def _narrow_bytes(self) -> float:
        """Of an element that a product with a parameter keeps; 0: as it is given. The head's products stay wide."""
        head = any(_base(step) == _LOSS for step in self.local.steps)
        return 0.0 if head or self.engine.matmul_dtype is None else _NARROW_BYTES[self.engine.matmul_dtype]

    def _elements(self, root: str) -> int:
        return self.local.storage_bytes(root) // DTYPE_BYTES[self.local.types[root].dtype]

    def _read(self, step: Step) -> tuple[str, ...]:
        """Storages that a step's backward pass reads. Attention reads its operands, and fused also its result, whatever
        its plain form on a CPU keeps."""
        if step.node is None or step.node.base != ATTENTION:
            return step.kept
        result = () if self.engine.attention == "unfused" else step.outputs
        return tuple(self.local.root[value] for value in (*step.operands[:3], *result))

    def _given(self, step: Step) -> set[str]:
        """What a product was given; of what was gathered, the shard that it was gathered from."""
        kept = set()
        for root in self._read(step):
            maker = self._maker.get(root)
            gathered = maker is not None and maker.conversion is not None and maker.conversion.forward == "all_gather"
            kept.add(self.local.root[maker.operands[0]] if maker is not None and gathered else root)
        return kept

    @cached_property
    def _maker(self) -> dict[str, Step]:
        """The step that made each storage."""
        root = self.local.root
        return {root[value]: step for step in reversed(self.local.steps) for value in step.outputs if root[value] == value}

    @cached_property
    def _apart(self) -> set[str]:
        """State, and inputs that all blocks of a stage share."""
        body = self.local.body
        named = {value.name for value in (*body.parameters, *body.buffers)}
        named |= {value.name for value in body.inputs if not value.differentiable}
        return named | {key for key in self.local.types if " -> " in key and key.split(" -> ")[0] in named}

    def _sources(self, roots: Iterable[str]) -> set[str]:
        """The storages that cheap work made these from."""
        found: set[str] = set()
        waiting, seen = list(roots), set(roots)
        while waiting:
            root = waiting.pop()
            maker = self._maker.get(root)
            if maker is None or not _cheap(maker) or _sums(maker):
                found.add(root)
                continue
            for value in maker.operands:
                source = self.local.root[value]
                if source not in seen:
                    seen.add(source)
                    waiting.append(source)
        return found

    def _extra_bytes(self, step: Step) -> int:
        """Masks of dropout and statistics of attention; what norms and losses keep beside is made again."""
        if step.node is None:
            return 0
        if step.node.base == ATTENTION:
            return self._attention_bytes(step)
        if step.node.base in ("dropout", "native_dropout") and self.engine.keeps == "fused":
            return self.local.types[step.outputs[0]].elements(self.local.batch)
        return 0

    def _attention_bytes(self, step: Step) -> int:
        assert step.node is not None
        sizes = self.local.types[step.operands[0]].sizes(self.local.batch)
        keys = self.local.types[step.operands[1]].sizes(self.local.batch)[-2]
        rows = 1
        for extent in sizes[:-1]:
            rows *= extent
        if self.engine.attention != "unfused":
            return 4 * rows  # The log of the sum of exponentials in float32 (Dao 2022, algorithm 2).
        dropped = bool(dict(step.node.arguments).get("dropout_p", 0.0))
        return (_DROPPED_PAIR_BYTES if dropped else _PAIR_BYTES) * rows * keys


def _base(step: Step) -> str:
    return "" if step.node is None else step.node.base


def _weighted(local: LocalBody, step: Step) -> bool:
    """Whether a product has a parameter for a factor."""
    named = {value.name for value in local.body.parameters}
    return _base(step) in GEMMS and any(value.split(" -> ")[0] in named for value in step.operands)


def _cheap(step: Step) -> bool:
    """Whether a fused kernel repeats this rather than keep its result."""
    return step.node is None or step.node.base not in GEMMS | {ATTENTION, _LOSS, "embedding"}


def _sums(step: Step) -> bool:
    """Whether a step adds up what several ranks have: only they know the sum, of which each may get a part."""
    return step.conversion is not None and step.conversion.forward in ("all_reduce", "reduce_scatter")


def loss_operands(local: LocalBody) -> tuple[int, int] | None:
    """Elements and bytes of the logits that a rank's loss reads; None for a body without one."""
    for step in local.steps:
        if step.node is not None and step.node.base == _LOSS:
            logits = local.types[step.operands[0]]
            return logits.elements(local.batch), logits.size_bytes(local.batch)
    return None
