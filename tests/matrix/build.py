"""Plans made by hand from a row of decisions, without the solver: every decision is legal, none need be good."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hardware_profiles import resolve_cluster
from planner.ir.body import Body
from planner.ir.graph import ModelGraph
from planner.ir.placement import REPLICATE, BodyPlacement, Placement, shard
from planner.ir.plan import AxisOrder, Batch, BlockDecision, Mesh, Plan, Schedule, StagePlan
from planner.ir.serialize import fingerprint
from planner.placement import place_body
from planner.placement.options import body_boundary
from planner.placement.space import Activations
from planner.rules.layout import canonical
from tests.matrix.pricing import VolumePricing

ZERO_MIXTURE = (3, 0, 2, 1)
RECOMPUTE_MIXTURE = ("full", "none", "selective")


@dataclass(frozen=True)
class Row:
    """One plan of the matrix, as decisions. ``zero`` and ``recompute`` may be ``mixed``: another value each block."""

    tensor: int = 1
    sequence_parallel: bool = False
    pipeline: int = 1
    schedule: str = "1f1b"
    data: int = 1
    zero: int | str = 0
    recompute: str = "none"
    accumulation: int = 1
    microbatch: int = 1
    zero_group: int | None = None
    stages_of_rank: int = 2
    order: AxisOrder = "pipeline-data-tensor"

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def virtual(self) -> int:
        several = self.schedule in ("interleaved-1f1b", "interleaved-zero-bubble", "zbv") and self.pipeline > 1
        return self.stages_of_rank if several else 1

    @property
    def label(self) -> str:
        sequence = "+sp" if self.sequence_parallel else ""
        stages = f"x{self.stages_of_rank}" if self.stages_of_rank != 2 else ""
        return (
            f"pp{self.pipeline}{stages}-{self.schedule}-dp{self.data}-tp{self.tensor}{sequence}-zero{self.zero}"
            f"-{self.recompute}-acc{self.accumulation}" + (f"-{self.order}" if self.order != "pipeline-data-tensor" else "")
        )


def label(value: object) -> str | None:
    """A row's name in a test's; pytest names other values itself."""
    return value.label if isinstance(value, Row) else None


def cuts(blocks: int, stages: int) -> list[int]:
    """Uneven on purpose where it can be: rounding gives the stages different numbers of blocks."""
    return [round(index * blocks / stages) for index in range(stages + 1)]


SPLITS: Mapping[str, tuple[int, tuple[int, ...], int]] = {
    # The split of Megatron-LM by the end of a parameter's name: dim, segments, unit (one key-value head's rows).
    "attention.qkv.weight": (0, (30, 30, 30), 5), "attention.query.weight": (0, (), 12),
    "attention.key.weight": (0, (), 6), "attention.value.weight": (0, (), 6), "feed_forward.up.weight": (0, (), 1),
    "feed_forward.gate.weight": (0, (), 1), "feed_forward.down.weight": (1, (), 1), "tokens.weight": (0, (), 1),
    "head.weight": (0, (), 1), "k0.weight": (0, (), 5), "k1.weight": (0, (), 5), "k2.weight": (0, (), 5),
    "k3.weight": (1, (), 5), "k4.weight": (0, (), 1), "k5.weight": (1, (), 1), "i.weight": (0, (), 1), "l.weight": (0, (), 1),
}


def _split(body: Body, name: str, degree: int) -> Placement | None:
    shape = body.types[name].sizes(1)
    if name == "attention.out.weight":
        dim, segments, unit = 1, (), 12 if shape[1] == 60 else 5
    elif name in SPLITS:
        dim, segments, unit = SPLITS[name]
    else:
        return None
    layout = canonical(segments or (shape[dim],), unit, degree)
    assert layout is not None, f"{name} cannot be split over {degree}"
    return layout.placement(dim)


def place_as_megatron(graph: ModelGraph, degree: int, boundary: Placement) -> Mapping[str, BodyPlacement]:
    """Matrices split as Megatron-LM does, unevenly where they do not divide; other parameters of several bodies whole; all else
    is left to the solver."""
    placements = {}
    tied = frozenset[tuple[str, str]]().union(*graph.tied_slots)
    for body in graph.bodies:
        splits = {p.name: _split(body, p.name, degree) for p in body.parameters} if degree > 1 else {}
        fixed = {name: split or REPLICATE for name, split in splits.items() if split or (body.name, name) in tied}
        around = body_boundary(graph, body, boundary) if degree > 1 else {}
        activations: Activations = "split" if boundary in around.values() and boundary != REPLICATE else "whole"
        placed = place_body(body, degree, around, fixed, VolumePricing(degree), activations=activations)
        assert placed is not None, f"{body.name} has no such placement"
        placements[body.name] = placed.placement
    return placements


def make_plan(
    graph: ModelGraph, row: Row, *, precision: str = "fp64", placements: Mapping[str, BodyPlacement] | None = None
) -> Plan:
    """The plan that a row says, for ``local-cpu``. ``placements``: others than Megatron-LM's."""
    cluster = resolve_cluster(f"local-cpu:1x{max(row.devices, 1)}")
    boundary = shard(1) if row.sequence_parallel else REPLICATE
    stages = row.pipeline * row.virtual
    bounds = cuts(len(graph.blocks), stages)
    tied = {i for p in graph.parameters if len(graph.tied_blocks(p.fqn)) > 1 for i in graph.tied_blocks(p.fqn)}

    def decision(index: int) -> BlockDecision:
        zero = row.zero
        if zero == "mixed":
            zero = 1 if index in tied else ZERO_MIXTURE[index % 4]
        recompute = RECOMPUTE_MIXTURE[index % 3] if row.recompute == "mixed" else row.recompute
        return BlockDecision(int(zero), recompute)  # type: ignore[arg-type]

    return Plan(
        model=graph.name, model_fingerprint=fingerprint(graph), cluster=cluster.name,
        cluster_fingerprint=cluster.fingerprint, precision=precision, sequence=graph.sequence,  # type: ignore[arg-type]
        mesh=Mesh(pipeline=row.pipeline, data=row.data, tensor=row.tensor, order=row.order),
        batch=Batch(row.data * row.microbatch * row.accumulation, row.microbatch, row.accumulation),
        schedule=Schedule(row.schedule, row.virtual),  # type: ignore[arg-type]
        zero_group=row.zero_group or row.data,
        stages=tuple(
            StagePlan(s, bounds[s], bounds[s + 1], tuple(decision(i) for i in range(bounds[s], bounds[s + 1])))
            for s in range(stages)
        ),
        placements=placements or place_as_megatron(graph, row.tensor, boundary),
    )


def rows_of(design: list[Mapping[str, object]]) -> list[Row]:
    return [Row(**{k: v if v != "none" or k == "recompute" else "1f1b" for k, v in row.items()}) for row in design]  # type: ignore[arg-type]
