"""PreparedRow: everything of a row's prediction that depends on no rate, done once.

Distinct shapes are traced once, as two layers, and drawn out; placements are solved once for a shape, tensor degree and
micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hardware_profiles import Cluster, Engine
from hardware_profiles import engine as engine_called
from planner.costing import GraphWork, Pricing, measure_graph
from planner.ir.costed import RECOMPUTE_LEVELS
from planner.ir.errors import ShardwrightError
from planner.ir.graph import ModelGraph
from planner.ir.plan import DTYPES, BlockDecision, Plan, StagePlan
from planner.ir.repeat import repeat_blocks
from planner.placement import Option, place_graph
from planner.placement.space import DIVIDED_STATE
from planner.trace import load_model, trace_model
from planner.validate.jobs import ModelShape, RowJob, row_job
from planner.validate.machines import Unpredictable
from planner.validate.rows import Row

TRACED_LAYERS = 2


@dataclass(frozen=True)
class PreparedRow:
    """A row with its plan and what the plan does, counted."""

    job: RowJob
    plan: Plan
    counted: GraphWork

    @property
    def row(self) -> Row:
        return self.job.row


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that is not predicted, and why."""

    row: Row
    why: str


@dataclass(frozen=True)
class Prepared:
    rows: tuple[PreparedRow, ...]
    skipped: tuple[Skipped, ...]


@dataclass
class _Shelf:
    """What rows share."""

    traced: dict[tuple[ModelShape, str], ModelGraph] = field(default_factory=dict)
    graphs: dict[tuple[ModelShape, str, int], ModelGraph] = field(default_factory=dict)
    placed: dict[tuple[object, ...], Option] = field(default_factory=dict)
    counted: dict[tuple[object, ...], GraphWork] = field(default_factory=dict)


def prepare_rows(rows: Iterable[Row], progress: Callable[[int], None] = lambda done: None) -> Prepared:
    """Prepare every row; those that cannot be are skipped with the reason. ``progress`` hears how many are done."""
    shelf = _Shelf()
    prepared: list[PreparedRow] = []
    skipped: list[Skipped] = []
    for done, row in enumerate(rows, start=1):
        try:
            prepared.append(_prepare(row_job(row), shelf))
        except (Unpredictable, ShardwrightError) as error:
            skipped.append(Skipped(row, str(error)))
        progress(done)
    return Prepared(tuple(prepared), tuple(skipped))


def prepare_row(row: Row) -> PreparedRow:
    """One row. Raises Unpredictable, or what tracing and placing raise."""
    return _prepare(row_job(row), _Shelf())


def _prepare(job: RowJob, shelf: _Shelf) -> PreparedRow:
    graph = _graph(job, shelf)
    stages = stage_plans(len(graph.blocks), job)
    option = _option(job, graph, shelf)
    plan = Plan(
        job.row.model, "", job.cluster.name, "", job.precision, job.sequence, job.mesh, job.batch, job.schedule,
        job.zero_group, stages, option.placements, engine=job.engine,
    )
    engine = engine_called(job.engine)
    key = (
        job.shape, job.precision, job.layers, job.mesh.context, job.batch.micro, job.recompute, id(option), engine.keeps,
        engine.attention, engine.loss, engine.selective, engine.repeats, engine.offloaded, engine.matmul_dtype,
    )
    if key not in shelf.counted:
        shelf.counted[key] = measure_graph(
            graph, job.mesh.tensor, job.batch.micro, (option.placements,),
            tuple(level for level in RECOMPUTE_LEVELS if level in ("none", job.recompute)), job.mesh.context, engine,
        )
    return PreparedRow(job, plan, shelf.counted[key])


def _graph(job: RowJob, shelf: _Shelf) -> ModelGraph:
    dtype = DTYPES[job.precision]
    if (job.shape, dtype) not in shelf.traced:
        shelf.traced[job.shape, dtype] = trace_shape(job.shape, TRACED_LAYERS, dtype).on_accelerator
    key = (job.shape, dtype, job.layers)
    if key not in shelf.graphs:
        shelf.graphs[key] = repeat_blocks(shelf.traced[job.shape, dtype], job.layers)
    return shelf.graphs[key]


def trace_shape(shape: ModelShape, layers: int, dtype: str) -> ModelGraph:
    """Trace a model of so many layers."""
    source = load_model(shape.spec, {**dict(shape.settings), "layers": layers}, shape.sequence)
    return trace_model(source, sequence=shape.sequence, dtype=dtype)


def _option(job: RowJob, graph: ModelGraph, shelf: _Shelf) -> Option:
    """The placement that divides the parameters, with or without sequence parallelism: Megatron's."""
    mesh, split = job.mesh, job.sequence_parallel
    key = (job.shape, job.precision, job.layers, mesh.tensor, job.batch.micro, split, _node(job.cluster))
    if key not in shelf.placed:
        pricing = Pricing(job.cluster, mesh.tensor, job.batch.micro, engine=Engine())  # The same split under every engine.
        found = place_graph(graph, mesh.tensor, pricing, split=split if mesh.tensor > 1 else None, prices=(DIVIDED_STATE,))
        if not found:
            kind = "with" if split else "without"
            raise Unpredictable(f"no placement over tensor={mesh.tensor} {kind} sequence parallelism")
        shelf.placed[key] = found[0]
    return shelf.placed[key]


def _node(cluster: Cluster) -> object:
    """What of a cluster decides placements."""
    return cluster.chip.name, tuple((level.size, level.link.bandwidth_bytes_s) for level in cluster.levels)


def _balanced(layers: int, job: RowJob) -> list[int]:
    """nanotron's stages: blocks go to the next one where their summed cost passes its share, with a layer's products, the
    head's, and nothing for the embedding (nanotron/models/base.py, ``build_model``; models/llama.py,
    ``get_block_compute_costs``)."""
    row, stages = job.row, job.mesh.pipeline * job.schedule.virtual
    assert row.hidden and row.ffn_hidden and row.vocab
    layer = 4 * row.hidden * row.hidden + 3 * row.ffn_hidden * row.hidden
    costs = [0, *[layer] * layers, row.vocab * row.hidden]
    sizes, passed, stage = [0] * stages, 0, 0
    for cost in costs:
        passed += cost
        while stage < stages - 1 and passed * stages > sum(costs) * (stage + 1):
            stage += 1
        sizes[stage] += 1
    return sizes


def stage_plans(blocks: int, job: RowJob) -> tuple[StagePlan, ...]:
    """Even shares of the layers for every virtual stage, embedding and head beside them; where they do not divide, the two
    count as layers (Megatron-LM, ``--account-for-embedding-in-pipeline-split`` and ``--account-for-loss-in-pipeline-split``)
    and the first stages are filled first. Raises Unpredictable where there are more stages than that."""
    stages = job.mesh.pipeline * job.schedule.virtual
    layers = blocks - 2
    ends = 1 if job.ends else 0
    share, rest = divmod(layers + 2 * ends, stages)
    if share == 0:
        raise Unpredictable(f"{layers} layers are too few for {stages} stages")
    sizes = [share + (1 if stage < rest else 0) for stage in range(stages)]
    if not ends:
        sizes[0] += 1
        sizes[-1] += 1
    if job.engine.partition("+")[0] == "nanotron" and stages > 1:
        sizes = _balanced(layers, job)
    # Engines recompute layers: not the embedding before them nor the head after.
    again, kept = BlockDecision(job.zero, job.recompute), BlockDecision(job.zero, "none")
    decisions = [kept, *(again if layer < job.recomputed_layers else kept for layer in range(layers)), kept]
    plans, first = [], 0
    for index, size in enumerate(sizes):
        plans.append(StagePlan(index, first, first + size, tuple(decisions[first : first + size])))
        first += size
    return tuple(plans)
