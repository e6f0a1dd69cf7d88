"""Placements: how one value lies over mesh axes, forward and backward, and what it takes to convert between them.

Over a set of axes a value is in one of four states, each a pair (value, gradient):

=================  =============  ===================  ==========================================
state              value          gradient             example (tensor axis, Megatron-LM)
=================  =============  ===================  ==========================================
``replicate``      replicated     replicated           hidden states between blocks
``shared``         replicated     partial sums         input of a column-parallel linear
``shard``          split on dim   split on dim         heads; the sequence under sequence parallelism
``partial``        partial sums   replicated           output of a row-parallel linear
=================  =============  ===================  ==========================================

Every operation is linear in its gradient, so an operation that acts on replicated values only is valid both with
``replicate`` and with ``shared`` throughout; that is what lets one table of rules place the conjugate collectives
(Megatron-LM's f and g: Shoeybi et al. 2019, section 3; g-bar: Korthikanti et al. 2022, section 4.2.2).
A value without gradient knows only ``replicate`` and ``shard``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from planner.ir.types import BatchMultiple, Extent, TensorType

State = Literal["replicate", "shared", "shard", "partial"]
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "recv"]


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """A state over ``axes``.

    For ``shard``: the dim is made of ``segments`` (their sizes, in elements; empty: one segment, the whole dim), each
    split over the ranks in whole multiples of ``unit`` elements, as evenly as possible, the first ranks one unit more.
    (A fused QKV weight has three segments with the head size as unit; six heads over four ranks are 2, 2, 1, 1.)
    """

    state: State
    dim: int = -1
    segments: tuple[int, ...] = ()
    unit: int = 1
    axes: tuple[str, ...] = ("tensor",)

    def __str__(self) -> str:
        if self.state != "shard":
            return self.state
        extra = f", segments {'+'.join(map(str, self.segments))}" if self.segments else ""
        return f"shard({self.dim}{extra}{f', unit {self.unit}' if self.unit != 1 else ''})"


REPLICATE = Placement("replicate")
SHARED = Placement("shared")
PARTIAL = Placement("partial")


def shard(dim: int, segments: tuple[int, ...] = (), unit: int = 1) -> Placement:
    """The value is split on ``dim`` (non-negative) over the tensor axis."""
    return Placement("shard", dim, segments if len(segments) > 1 else (), unit)


def split_sizes(extent: int, degree: int, unit: int = 1) -> tuple[int, ...]:
    """Elements of one segment on each rank: multiples of ``unit``, as even as possible, larger ones first.

    Raises ValueError where ``unit`` does not divide the extent.
    """
    if extent % unit:
        raise ValueError(f"{extent} is no multiple of {unit}")
    whole, left = divmod(extent // unit, degree)
    return tuple((whole + (rank < left)) * unit for rank in range(degree))


def local_extent(extent: Extent, placement: Placement, degree: int, rank: int = 0) -> Extent:
    """Extent of the placed dim on one rank (rank 0 has the most)."""
    if isinstance(extent, BatchMultiple):
        if extent.factor % degree:
            raise ValueError(f"{extent} is not divisible by {degree}")
        return BatchMultiple(extent.factor // degree)
    unit = placement.unit
    if not placement.segments:
        whole, left = divmod(extent // unit, degree)
        return (whole + (rank < left)) * unit
    return sum((segment // unit // degree + (rank < segment // unit % degree)) * unit for segment in placement.segments)


def local_type(type_: TensorType, placement: Placement, degree: int, rank: int = 0) -> TensorType:
    """What one rank holds of a value."""
    if placement.state != "shard" or degree == 1:
        return type_
    shape = list(type_.shape)
    shape[placement.dim] = local_extent(shape[placement.dim], placement, degree, rank)
    return TensorType(tuple(shape), type_.dtype)


def even(type_: TensorType, placement: Placement, degree: int) -> bool:
    """Whether all ranks hold the same amount, in one segment: only such shards can be gathered or scattered."""
    if placement.state != "shard":
        return True
    extent = type_.shape[placement.dim]
    size = extent.factor if isinstance(extent, BatchMultiple) else extent
    return not placement.segments and size % (degree * placement.unit) == 0


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective: ``size_bytes`` is the input tensor's size on one rank, as the ledger counts it."""

    kind: CollectiveKind
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Conversion:
    """How a value in one placement is brought into another. ``forward``/``backward`` name the step of each pass:
    ``identity``, ``slice`` (keep the own part), ``pad`` (own part, zeros elsewhere), or a collective."""

    source: Placement
    target: Placement
    forward: str
    backward: str


_STEPS: dict[tuple[State, State], tuple[str, str]] = {
    ("replicate", "shared"): ("identity", "all_reduce"),
    ("replicate", "shard"): ("slice", "all_gather"),
    ("shared", "shard"): ("slice", "pad"),
    ("partial", "replicate"): ("all_reduce", "identity"),
    ("partial", "shared"): ("all_reduce", "all_reduce"),
    ("partial", "shard"): ("reduce_scatter", "all_gather"),
    ("shard", "replicate"): ("all_gather", "slice"),
    ("shard", "shared"): ("all_gather", "reduce_scatter"),
}


def conversion(
    source: Placement, target: Placement, type_: TensorType, degree: int, *, differentiable: bool
) -> Conversion | None:
    """The conversion between two placements of a value of (whole) type ``type_``, or None where there is none."""
    if source == target:
        return Conversion(source, target, "identity", "identity")
    if not (even(type_, source, degree) and even(type_, target, degree)):
        # An uneven part can be cut out of the whole without communication, when no gradient has to be gathered back.
        uneven_slice = source.state in ("replicate", "shared") and target.state == "shard"
        if not (uneven_slice and (source.state == "shared" or not differentiable)):
            return None
    if source.state == target.state == "shard":
        if source.dim == target.dim:
            return Conversion(source, target, "identity", "identity")
        return Conversion(source, target, "all_to_all", "all_to_all")
    steps = _STEPS.get((source.state, target.state))
    if steps is None:
        return None
    forward, backward = steps
    return Conversion(source, target, forward, backward if differentiable else "identity")


def transfers(
    step: str, whole: TensorType, placement: Placement, degree: int, batch: int, dtype: str | None = None
) -> tuple[Transfer, ...]:
    """The collectives of one step of a conversion. ``whole`` is the value's whole type; ``placement`` the sharded side
    (or any other where nothing is sharded)."""
    if degree == 1 or step in ("identity", "slice", "pad"):
        return ()
    type_ = whole if dtype is None else TensorType(whole.shape, dtype)
    size = type_.size_bytes(batch)
    if step in ("all_gather", "all_to_all"):
        size //= degree
    return (Transfer(step, size),)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class OpStrategy:
    """One legal way to run an operation over an axis.

    ``operands`` aligns with ``Node.operands``; ``outputs`` with ``Node.types``. ``forward``/``backward`` are collectives
    inside the operation itself (a vocabulary-parallel cross-entropy), for one call. ``share`` is the part of the whole
    operation's work that one rank does, ``replicated`` = 1.
    """

    name: str
    operands: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    forward: tuple[Transfer, ...] = ()
    backward: tuple[Transfer, ...] = ()


@dataclass(frozen=True)
class NodePlacement:
    """What was decided for one node: the strategy that it runs."""

    node: str
    strategy: OpStrategy


@dataclass(frozen=True)
class BodyPlacement:
    """What was decided for one body at one tensor degree.

    ``inputs`` and ``outputs`` are the placements at the block's boundary, ``parameters`` those of its state, in the body's
    order; ``nodes`` in execution order. A value produced in one placement and read in another is converted, once per
    (value, target placement).
    """

    body: str
    degree: int
    inputs: tuple[Placement, ...]
    parameters: tuple[Placement, ...]
    nodes: tuple[NodePlacement, ...]
    outputs: tuple[Placement, ...]


def sequence_parallel(placements: Mapping[str, BodyPlacement]) -> bool:
    """Whether some block is handed an activation in parts. (Not all that it is handed: a conditioning of the whole sample is
    whole beside hidden states that are split, and may come first.)"""
    return any(end.state == "shard" for placement in placements.values() for end in placement.inputs)
