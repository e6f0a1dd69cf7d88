"""Plan: every decision, nothing derived. What it costs is :class:`Prediction`, which the one evaluator fills."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from planner.ir.costed import Recompute
from planner.ir.placement import BodyPlacement

AXES = ("pipeline", "data", "context", "expert", "tensor")
ScheduleName = Literal["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"]
SCHEDULES: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv")
SPLIT_BACKWARD: tuple[ScheduleName, ...] = ("interleaved-zero-bubble", "zbv")
"""Schedules that part the backward pass into input and weight gradients; they exclude ZeRO-3 and recomputation."""
AxisOrder = Literal[
    "pipeline-data-tensor", "data-pipeline-tensor", "pipeline-tensor-data", "tensor-pipeline-data", "data-tensor-pipeline",
    "tensor-data-pipeline",
]
AXIS_ORDERS: tuple[AxisOrder, ...] = get_args(AxisOrder)
"""How ranks are numbered over the axes, slowest to fastest: the last one's neighbours are nearest. The usual order first, then
the other one in which these are tensor ranks."""
_NEARER = {
    (order, axis): order.partition(axis)[2].strip("-").split("-") if not order.endswith(axis) else []
    for order in AXIS_ORDERS for axis in ("pipeline", "data", "tensor")
}
"""Axes whose neighbours are nearer than those of one."""
TensorAxis = tuple[int, int]
"""A tensor degree, and the ranks between neighbours of that axis."""
Precision = Literal["bf16", "fp16", "fp32", "fp64"]
DTYPES: dict[Precision, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
"""What each computes in, by torch's names."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Degrees of the axes. Devices = pipeline x data x context x tensor; expert divides data x context. ``order``: of the ranks
    over the topology; the context axis lies right behind the tensor axis, wherever that is."""

    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1
    order: AxisOrder = "pipeline-data-tensor"

    @property
    def devices(self) -> int:
        return self.pipeline * self.data * self.context * self.tensor

    @property
    def degrees(self) -> dict[str, int]:
        """By axis, in the order of :data:`AXES`."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def data_stride(self) -> int:
        """Ranks between neighbours of the data axis."""
        return self._stride("data")

    @property
    def pipeline_stride(self) -> int:
        """Ranks between neighbours of the pipeline axis."""
        return self._stride("pipeline")

    @property
    def tensor_stride(self) -> int:
        """Ranks between neighbours of the tensor axis."""
        return self._stride("tensor")

    @property
    def tensor_axis(self) -> TensorAxis:
        """Degree and stride of the tensor axis; of one rank, which has no neighbour, as of the usual order."""
        return self.tensor, 1 if self.tensor == 1 else self._stride("tensor")

    def _stride(self, axis: str) -> int:
        stride = 1
        for nearer in _NEARER[self.order, axis]:
            stride *= self.context * self.tensor if nearer == "tensor" else getattr(self, nearer)
        return stride

    def place(self, rank: int) -> tuple[int, int, int]:
        """A rank's coordinates on the pipeline, data and tensor axes."""
        return (
            rank // self.pipeline_stride % self.pipeline, rank // self.data_stride % self.data,
            rank // self.tensor_stride % self.tensor,
        )

    def rank(self, pipeline: int, data: int, tensor: int) -> int:
        """The rank at these coordinates."""
        return pipeline * self.pipeline_stride + data * self.data_stride + tensor * self.tensor_stride


@dataclass(frozen=True, slots=True)
class Batch:
    """In samples. ``accumulation`` = global / (data x micro) micro-batches a step on every data rank."""

    total: int
    micro: int
    accumulation: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """``virtual`` stages a rank."""

    name: ScheduleName
    virtual: int = 1


@dataclass(frozen=True, slots=True)
class BlockDecision:
    """What is decided for one block beside its placement. ``zero``: 0-3; ``recompute``: none, selective, full."""

    zero: int
    recompute: Recompute


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A virtual stage: blocks ``first`` to ``last`` (exclusive) of the chain, one decision each."""

    index: int
    first: int
    last: int
    decisions: tuple[BlockDecision, ...]


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW (Loshchilov & Hutter 2019) with global-norm clipping (0: none), linear warm-up and cosine decay.
    The emitted program takes these as the defaults of its flags."""

    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip: float = 1.0
    warmup_steps: int = 10


@dataclass(frozen=True)
class Plan:
    """Everything the emitted program follows. ``placements``: one per body of the graph, by its name.
    ``zero_group``: ranks that a ZeRO shard group spans (the data degree, or fewer: HSDP)."""

    model: str
    model_fingerprint: str
    cluster: str
    cluster_fingerprint: str
    precision: Precision
    sequence: int
    mesh: Mesh
    batch: Batch
    schedule: Schedule
    zero_group: int
    stages: tuple[StagePlan, ...]
    placements: Mapping[str, BodyPlacement]
    engine: str = "torch-eager"
    optimizer: OptimizerSettings = OptimizerSettings()

    def rank_of_stage(self, stage: int) -> int:
        """Pipeline rank that owns a virtual stage: round robin, or a V for zbv (Qi et al. 2024, section 6)."""
        pipeline = self.mesh.pipeline
        if self.schedule.name == "zbv" and stage >= pipeline:
            return 2 * pipeline - 1 - stage
        return stage % pipeline

    def stages_of_rank(self, pipeline_rank: int) -> tuple[StagePlan, ...]:
        return tuple(stage for stage in self.stages if self.rank_of_stage(stage.index) == pipeline_rank)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Peak bytes of one rank by category; ``total`` is their sum. ``cached``: what torch's caching allocator keeps beside that,
    where there is room."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    reserve: int
    cached: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers + self.reserve


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """Seconds of one micro-batch on one virtual stage (communication included), and the peak memory of its rank."""

    index: int
    forward_s: float
    backward_s: float
    memory: StageMemory


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Parts of the step time of the critical rank; they sum to the step time."""

    compute: float
    recompute: float
    tensor_comm: float
    expert_comm: float
    context_comm: float
    pipeline_comm: float
    pipeline_bubble: float
    data_comm: float
    optimizer: float


@dataclass(frozen=True)
class Prediction:
    """What the evaluator says of a plan. ``mfu``: model FLOPs (no recomputation) over peak."""

    step_s: float
    tokens_per_s: float
    model_flops_per_device_s: float
    mfu: float
    peak_memory_bytes: int
    memory_limit_bytes: int
    breakdown: Breakdown
    stages: tuple[StagePrediction, ...]
    warnings: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.peak_memory_bytes <= self.memory_limit_bytes

    def rate(self, samples: int) -> str:
        """Tokens a second, or samples, of which a step has so many, where they are no sequences of tokens."""
        return f"{self.tokens_per_s:,.0f} tokens/s" if self.tokens_per_s else f"{samples / self.step_s:,.0f} samples/s"
