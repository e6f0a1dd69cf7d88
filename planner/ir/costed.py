"""CostedGraph: every choice of every distinct block, priced. Seconds, bytes and FLOPs of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from planner.ir.graph import ModelGraph
from planner.ir.placement import BodyPlacement

Recompute = Literal["none", "selective", "full"]
RECOMPUTE_LEVELS: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class BlockSeconds:
    """The seconds of one block under one placement, micro-batch and recomputation, on one rank, for one micro-batch.

    ``forward_s`` and ``backward_s`` hold compute only; ``recompute_s`` is the forward repeated in the backward pass.
    ``input_gradient_s`` and ``weight_gradient_s``: the parts of a backward pass that the schedule splits. They take
    ``backward_s`` together, or longer: each of them waits for its own launches.
    ``forward_comm_s``/``backward_comm_s``/``recompute_comm_s``: exposed tensor-axis communication; ``..._context_s`` and
    ``..._expert_s``: that of those axes, what recomputation repeats counted with the backward pass.
    """

    forward_s: float
    backward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    recompute_s: float
    forward_comm_s: float
    backward_comm_s: float
    recompute_comm_s: float
    forward_context_s: float
    backward_context_s: float
    forward_expert_s: float
    backward_expert_s: float

    def backward_parts_s(self, split: bool) -> tuple[float, float]:
        """The input and the weight part of the backward pass; of one that is not ``split`` all is in the first."""
        return (self.input_gradient_s, self.weight_gradient_s) if split else (self.backward_s, 0.0)


@dataclass(frozen=True, slots=True)
class BlockCost(BlockSeconds):
    """Its bytes too.

    ``saved_bytes``: what autograd keeps from forward to backward for one micro-batch (parameters left out);
    ``waiting_bytes``: what it keeps beyond that between the input and the weight part of a split backward pass;
    ``forward_peak_bytes``/``backward_peak_bytes``: the most that lives transiently besides what is kept; ``split_peak_bytes``:
    in either part of a split backward pass.
    ``parameter_elements``: trained elements this rank holds before ZeRO; ``buffer_bytes``: constants.
    ``flops``: model FLOPs of forward and backward of the WHOLE block (all ranks), without recomputation.
    """

    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    parameter_elements: int
    buffer_bytes: int
    flops: float
    waiting_bytes: int = 0
    split_peak_bytes: int = 0

    def peak_bytes(self, split: bool) -> int:
        """The most that lives transiently in any pass."""
        return max(self.forward_peak_bytes, self.backward_peak_bytes, self.split_peak_bytes if split else 0)


@dataclass(frozen=True, slots=True)
class StateCost:
    """Keeping and synchronising one block's parameters under one ZeRO stage, on one rank.

    ``persistent`` bytes live all step long, the working copy that ZeRO 0-2 keep counted as parameters; ``gather_bytes``:
    the transient copies and buffers of the block and of a neighbour as large, of which ``lasting_bytes`` stay between the
    passes of a stage (the buffer of its last reduction). ``once_comm_s``: per step (gradient
    reduction, the parameter gather of ZeRO-1, the sum over the tensor axis); ``forward_comm_s``/``backward_comm_s``: per
    micro-batch (ZeRO-2's reduce-scatter, ZeRO-3's gathers, accumulation). ``optimizer_s``: the update and the norm.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    gather_bytes: int
    once_comm_s: float
    forward_comm_s: float
    backward_comm_s: float
    optimizer_s: float
    lasting_bytes: int = 0


@dataclass(frozen=True)
class CostedGraph:
    """A graph with its prices for ONE candidate (mesh degrees, micro-batch, precision).

    ``placements[option][body]``: the tensor placements that were solved; an option fixes the boundary placement of the
    chain (sequence-parallel or not) and of tied parameters, so that any two blocks of one option fit together.
    ``blocks[option][body][recompute]``; ``states[option][body][zero]``; ``crossing_bytes[option][cut]``: bytes that one
    micro-batch sends over the cut before block ``cut``, on one rank, and ``received_bytes``: those of them that the block
    keeps at every level, which lie in a stage's receive buffers where it begins there. ``context_s``, ``context_bytes``: what
    every stage computes and holds for one micro-batch beside its blocks; ``batch_bytes``: the inputs of one micro-batch.
    """

    graph: ModelGraph
    degree: int
    microbatch: int
    placements: tuple[Mapping[str, BodyPlacement], ...]
    blocks: tuple[Mapping[str, Mapping[Recompute, BlockCost]], ...]
    states: tuple[Mapping[str, Mapping[int, StateCost]], ...]
    crossing_bytes: tuple[Mapping[int, int], ...]
    context_s: float = 0.0
    context_bytes: int = 0
    batch_bytes: int = 0
    warnings: tuple[str, ...] = field(default=())
    received_bytes: tuple[Mapping[int, int], ...] = ()

    def all_kept_twice(self, option: int, *, split: bool) -> Mapping[int, int]:
        """By cut: bytes of a micro-batch that the block after it keeps and a receive buffer too: the same memory. Where
        backward passes are ``split``, gradients that are sent back pile up meanwhile: they may have that room."""
        return self.received_bytes[option] if self.received_bytes and not split else {}

    def kept_twice(self, option: int, cut: int, *, split: bool) -> int:
        """Of one cut."""
        return self.all_kept_twice(option, split=split).get(cut, 0)
