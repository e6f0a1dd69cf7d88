"""RowJob: a row in the words of a plan, every decision pinned."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import planner
from cost_models.schedules import legal
from hardware_profiles import Chip, Cluster
from planner.ir.costed import Recompute
from planner.ir.counting import counted
from planner.ir.plan import DTYPES, Batch, Mesh, Precision, Schedule
from planner.validate.engines import engine_of
from planner.validate.machines import Unpredictable, chip_cautions, cluster_of
from planner.validate.recipes import LATENT, completed, head_dim, recomputed_layers
from planner.validate.rows import Row

Setting = bool | int | float
EXAMPLES = Path(planner.__file__).parent.parent / "examples"
REFERENCE = Path(__file__).parent / "reference.py"
VOCABULARY_UNIT = 128
"""Megatron pads the vocabulary to a multiple of this and the tensor degree (megatron/training/arguments.py,
``--make-vocab-size-divisible-by``)."""
PADDING = ("megatron", "megatron-core")
"""Engines, as tables of runs call them, that pad so."""
DROPOUT = 0.1
"""Default of Megatron-LM's ``--hidden-dropout`` and ``--attention-dropout`` (megatron/training/arguments.py)."""
UNTIED = ("Pythia", "NEMOTRON", "Nemotron")
"""Models with plain feed-forward networks whose head is not the embedding: ``no-weight-tying`` of pythia/models/*.yml,
``share_embeddings_and_output_weights: False`` of NeMo's Nemotron recipes."""


@dataclass(frozen=True)
class ModelShape:
    """What is traced: a callable of a model file, its keyword arguments without ``layers``, and the tokens that one rank
    has of a sample."""

    spec: str
    settings: tuple[tuple[str, Setting], ...]
    sequence: int


@dataclass(frozen=True)
class RowJob:
    """``sequence``: tokens of a sample; ``zero_group``: ranks of a shard group; ``recompute``: of the first
    ``recomputed_layers``, others keep everything; ``ends``: whether embedding and head count
    as layers when stages are filled; ``cautions``: what stands for something else."""

    row: Row
    shape: ModelShape
    layers: int
    sequence: int
    precision: Precision
    cluster: Cluster
    mesh: Mesh
    batch: Batch
    schedule: Schedule
    zero: int
    zero_group: int
    recompute: Recompute
    recomputed_layers: int
    sequence_parallel: bool
    engine: str
    ends: bool
    cautions: tuple[str, ...] = ()


def row_job(row: Row) -> RowJob:
    """Say a row as a job. Raises Unpredictable with what is missing or contradictory."""
    row = completed(row)
    absent = [
        name for name in ("layers", "hidden", "heads", "ffn_hidden", "vocab", "sequence", "devices", "tensor", "pipeline",
                          "data", "microbatch", "batch", "recompute")
        if getattr(row, name) is None
    ]
    unknown = [doubt for doubt in row.doubts if doubt.split(" ")[0] in absent]
    if unknown:
        raise Unpredictable("; ".join(unknown))
    if absent:
        raise Unpredictable(f"does not state {', '.join(absent)}{_why(row)}")
    assert row.tensor and row.pipeline and row.data and row.devices
    assert row.microbatch and row.batch and row.layers and row.sequence
    mesh = Mesh(row.pipeline, row.data, row.context, row.expert, row.tensor)
    if mesh.devices != row.devices:
        raise Unpredictable(f"pipeline x data x context x tensor = {mesh.devices}, not {counted(row.devices, 'device')}")
    accumulation, rest = divmod(row.batch, row.data * row.microbatch)
    if rest or not accumulation:
        raise Unpredictable(f"data {row.data} x micro-batch {row.microbatch} does not divide the batch of {row.batch}")
    stages = row.pipeline * row.virtual
    engine, cautions = engine_of(row)
    cluster = cluster_of(row)
    precision = _precision(row, cluster.chip)
    cautions = (*row.doubts, *chip_cautions(row), *cautions)
    if not row.configured:
        cautions = (*cautions, "its source does not say everything: predicted from what the row says")
    if DTYPES[precision] not in cluster.chip.peak_flops:
        raise Unpredictable(f"{cluster.chip.name} does not compute in {precision}")
    assert row.recompute is not None
    return RowJob(
        row=row, shape=shape_of(row), layers=row.layers, sequence=row.sequence, precision=precision,
        cluster=cluster, mesh=mesh, batch=Batch(row.batch, row.microbatch, accumulation),
        schedule=_schedule(row, accumulation), zero=row.zero, zero_group=_zero_group(row),
        recompute=row.recompute, recomputed_layers=min(recomputed_layers(row) or row.layers, row.layers),
        sequence_parallel=row.sequence_parallel and row.tensor > 1, engine=engine,
        ends=row.layers % stages != 0, cautions=cautions,
    )


def _why(row: Row) -> str:
    return ": it attends over latents, whose ranks no column says" if row.model.startswith(LATENT) else ""


def _precision(row: Row, chip: Chip) -> Precision:
    """A row that says nothing computed in what its chip trains in."""
    if not row.words["dtype"].strip():
        return "fp16" if chip.training_dtype == "float16" else "bf16"
    return "fp16" if row.precision == "fp16" else "bf16" if row.precision == "bf16" else "fp32"


def _schedule(row: Row, accumulation: int) -> Schedule:
    """Fewer micro-batches than stages run all forwards, then all backwards, under 1f1b as under gpipe. Raises Unpredictable
    where the schedule cannot run so."""
    assert row.pipeline is not None
    if row.virtual > 1:
        schedule = Schedule("interleaved-1f1b", row.virtual)
    else:
        schedule = Schedule("1f1b" if accumulation >= row.pipeline else "gpipe")
    reason = legal(schedule.name, row.pipeline, schedule.virtual, accumulation)
    if reason is not None:
        raise Unpredictable(reason)
    return schedule


def _zero_group(row: Row) -> int:
    """Ranks of a shard group: all, unless the source's words name fewer (``FSDP 16 x DCN-DP 4``; ``FSDP 256 ICI x 2 DCN``
    divides over both)."""
    assert row.data is not None
    words = row.words["zero_or_fsdp"]
    named = re.search(r"within (\d+) ranks|FSDP (\d+)(?: ICI x (\d+) DCN)?", words)
    group = int(named[1] or named[2]) * int(named[3] or 1) if named else row.data * row.context
    if "within node" in words:
        group = max(1, (row.domain or 8) // (row.tensor or 1))
    return group if group < row.data and row.data % group == 0 else row.data


def shape_of(row: Row) -> ModelShape:
    """The model file, and its keyword arguments. A rank's model has its share of the sequence and of the experts."""
    assert row.hidden and row.heads and row.ffn_hidden and row.vocab and row.sequence and row.tensor and row.data
    unit = VOCABULARY_UNIT * row.tensor if row.engine in PADDING else 1
    settings: dict[str, Setting] = {
        "hidden": row.hidden, "heads": row.heads, "ffn_hidden": row.ffn_hidden, "vocab": -(-row.vocab // unit) * unit,
    }
    kv_heads = row.kv_heads or row.heads
    own_dim = head_dim(row)
    if own_dim is None and row.hidden % row.heads:
        raise Unpredictable(f"its hidden size of {row.hidden} is no multiple of its {row.heads} heads, and it says no head_dim")
    if row.heads % kv_heads:
        raise Unpredictable(f"{row.heads} heads do not share {kv_heads} key and value heads evenly")
    sequence, rest = divmod(row.sequence, row.context)
    if rest:
        raise Unpredictable(f"context {row.context} does not divide the sequence of {row.sequence}")
    if own_dim is not None:
        settings["head_dim"] = own_dim
    if row.experts:
        if not 1 <= row.active_experts <= row.experts:
            stated = f"moe_topk {row.active_experts} is more than" if row.active_experts else "says no moe_topk of"
            raise Unpredictable(f"{stated} its {row.experts} experts")
        settings |= {"kv_heads": kv_heads, "experts": row.experts, "active": row.active_experts, "gated": row.gated}
        settings["held"], rest = divmod(row.experts, row.expert)
        if rest or row.data * row.context % row.expert:
            raise Unpredictable(f"expert {row.expert} divides not both the {row.experts} experts and data x context")
        spec = f"{REFERENCE}:decoder"
    elif row.gated:
        settings |= {"kv_heads": kv_heads, "tied": _tied(row)}
        spec = f"{EXAMPLES / 'llama.py'}:llama"
    elif kv_heads != row.heads or own_dim is not None:
        settings |= {"kv_heads": kv_heads, "tied": _tied(row), "gated": False}
        spec = f"{REFERENCE}:decoder"
    else:
        settings |= {"tied": _tied(row), "dropout": _dropout(row), "bias": not row.model.startswith("MPT")}
        spec = f"{EXAMPLES / 'gpt.py'}:gpt"
    return ModelShape(spec, tuple(sorted(settings.items())), sequence)


def _tied(row: Row) -> bool:
    """Plain models tie the head to the embedding unless they are known not to; gated ones where the source says so."""
    below = re.search(r"tied embeddings below (\d+)B", row.words["notes"])
    if below:
        return float(row.words.get("n_params_b") or "inf") < float(below[1])
    return not row.gated and not row.model.startswith(UNTIED)


def _dropout(row: Row) -> float:
    """Megatron-LM's default; models that were trained without it say so in their configurations."""
    return DROPOUT if row.engine == "megatron" and not row.model.startswith(("Pythia", "BLOOM")) else 0.0
