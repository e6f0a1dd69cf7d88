"""plan.yaml: a plan as a person reads and edits it, and back.

The file holds decisions only. What is predicted stands in comments and under ``certificate``, and is never believed
when the file is read: the evaluator costs the plan anew. Of the placements it holds the boundary and the parameters of
every block kind; the operations between are placed again, optimally, when the file is read.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError

from cost_models.schedules import legal
from hardware_profiles import Cluster
from hardware_profiles.problems import first_problem
from hardware_profiles.yaml_text import parse_mapping
from planner.consistency import check_consistency
from planner.constraints_text import parse_texts
from planner.costing import Pricing
from planner.fields import MOST, Count, Number, Record, of_kinds
from planner.ir.body import Body
from planner.ir.costed import RECOMPUTE_LEVELS
from planner.ir.counting import counted
from planner.ir.errors import PlanFileError
from planner.ir.graph import ModelGraph
from planner.ir.placement import PARTIAL, REPLICATE, SHARED, BodyPlacement, Placement, shard
from planner.ir.plan import (
    AXIS_ORDERS,
    DTYPES,
    AxisOrder,
    Batch,
    BlockDecision,
    Mesh,
    OptimizerSettings,
    Plan,
    Prediction,
    Schedule,
    StagePlan,
)
from planner.ir.serialize import fingerprint
from planner.placement.complete import complete
from planner.search.request import Certificate

FORMAT = 1
GIB = 2**30
SMALL_CALLS = range(1, 9)


class _Named(Record):
    name: str
    fingerprint: str


_One = Annotated[int, Field(ge=1, le=1)]
"""A degree that can be no other: a literal 1 would take ``true`` and 1.0 for it."""


class _Mesh(Record):
    pipeline: Count = 1
    data: Count = 1
    context: _One = 1
    expert: _One = 1
    tensor: Count = 1


class _Batch(Record):
    total: Count = Field(alias="global")
    micro: Count
    accumulation: Count


class _Schedule(Record):
    name: Literal["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"]
    virtual: Count = 1


class _Stage(Record):
    """``blocks``: "first - last", or one name. ``zero``, ``recompute``: one value, or a list of "value x count" in order."""

    blocks: str
    zero: Annotated[int | list[str], of_kinds('give 0, 1, 2 or 3, or a list of "value x count"')]
    recompute: Annotated[str | list[str], of_kinds('give none, selective or full, or a list of "value x count"')]


class _Placements(Record):
    boundary: dict[str, str] = Field(default_factory=dict)
    parameters: dict[str, str] = Field(default_factory=dict)


class _Optimizer(Record):
    learning_rate: Number = Field(gt=0)
    weight_decay: Number = Field(ge=0)
    beta1: Number = Field(ge=0, lt=1)
    beta2: Number = Field(ge=0, lt=1)
    epsilon: Number = Field(gt=0)
    clip: Number = Field(ge=0)
    warmup_steps: int = Field(ge=0, le=MOST)


class _Certificate(Record):
    batch: Count
    lower_bound_s: Number = Field(ge=0)
    candidates: int = Field(ge=0)
    solved: int = Field(ge=0)
    constraints: list[str] = Field(default_factory=list)
    seal: str = ""


class _File(Record):
    format: Literal[1]
    model: _Named
    cluster: _Named
    precision: Literal["bf16", "fp16", "fp32", "fp64"]
    engine: Literal["torch-eager"] = "torch-eager"
    sequence: int = Field(ge=0, le=MOST)
    batch: _Batch
    mesh: _Mesh
    axis_order: AxisOrder = AXIS_ORDERS[0]
    schedule: _Schedule
    zero_group: Count
    stages: list[_Stage] = Field(min_length=1)
    placed_for: Count
    placements: dict[str, _Placements]
    optimizer: _Optimizer
    certificate: _Certificate


def dump(
    plan: Plan, prediction: Prediction, graph: ModelGraph, certificate: Certificate, *, placed_for: int | None = None
) -> str:
    """The text of plan.yaml. ``placed_for``: samples of the call that the placements are the cheapest for (None: of a
    micro-batch), which :func:`load` needs to find them again."""
    parts: list[dict[str, Any]] = [
        {"format": FORMAT},
        {"model": {"name": plan.model, "fingerprint": plan.model_fingerprint},
         "cluster": {"name": plan.cluster, "fingerprint": plan.cluster_fingerprint}},
        {"precision": plan.precision, "engine": plan.engine, "sequence": plan.sequence},
        {"batch": {"global": plan.batch.total, "micro": plan.batch.micro, "accumulation": plan.batch.accumulation}},
        {"mesh": plan.mesh.degrees, "axis_order": plan.mesh.order},
        {"schedule": {"name": plan.schedule.name, "virtual": plan.schedule.virtual}, "zero_group": plan.zero_group},
    ]
    head = "".join(_yaml(part) for part in parts)
    stages = "stages:\n" + "".join(
        _stage_text(stage, graph, prediction, plan) for stage in plan.stages
    )
    placements = {body.name: _placement_texts(body, plan.placements[body.name]) for body in graph.bodies}
    optimizer = {name: getattr(plan.optimizer, name) for name in _Optimizer.model_fields}
    proof = {
        "batch": plan.batch.total, "lower_bound_s": certificate.lower_bound_s, "candidates": certificate.candidates,
        "solved": certificate.solved, **({"constraints": list(certificate.constraints)} if certificate.constraints else {}),
        "seal": certificate.seal(plan.batch.total, plan.model_fingerprint, plan.cluster_fingerprint),
    }
    note = "# What the solver proved of its own plan; edits of the plan do not change it. Edited, it proves nothing.\n"
    placed = "# Operations between these are placed as is cheapest for calls of so many samples.\n"
    placed += _yaml({"placed_for": placed_for or plan.batch.micro})
    tail = placed + _yaml({"placements": placements}) + _yaml({"optimizer": optimizer}) + note + _yaml({"certificate": proof})
    return _header(plan, prediction, certificate) + head + stages + tail


def _header(plan: Plan, prediction: Prediction, certificate: Certificate) -> str:
    lines = (
        f"{plan.model} on {counted(plan.mesh.devices, 'device')} of {plan.cluster}, {plan.precision}",
        f"predicted: {prediction.step_s:.6g} s a step, {prediction.rate(plan.batch.total)}, MFU {prediction.mfu:.1%},"
        f" peak memory {prediction.peak_memory_bytes / GIB:.2f} of {prediction.memory_limit_bytes / GIB:.2f} GiB,"
        f" at most {certificate.gap_of(prediction.step_s):.3%} from the best plan"
        + (" under the certificate's constraints" if certificate.constraints else ""),
        "Edit what you like; `shardwright check` costs it anew. Comments are not read.",
    )
    return "".join(f"# {line}\n" for line in lines)


def _yaml(value: object) -> str:
    text = str(yaml.safe_dump(value, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True))
    # PyYAML writes a mapping of scalars in braces, which is no line of a longer mapping.
    if isinstance(value, dict) and text.startswith("{"):
        return "".join(yaml.safe_dump({k: v}, default_flow_style=False, allow_unicode=True) for k, v in value.items())
    return text


def _stage_text(stage: StagePlan, graph: ModelGraph, prediction: Prediction, plan: Plan) -> str:
    blocks = graph.blocks[stage.first : stage.last]
    label = blocks[0].name if len(blocks) == 1 else f"{blocks[0].name} - {blocks[-1].name}"
    entry = {
        "blocks": label,
        "zero": _grouped([decision.zero for decision in stage.decisions]),
        "recompute": _grouped([decision.recompute for decision in stage.decisions]),
    }
    predicted = prediction.stages[stage.index]
    note = (
        f"# stage {stage.index}, rank {plan.rank_of_stage(stage.index)}: forward {predicted.forward_s * 1e3:.3g} ms,"
        f" backward {predicted.backward_s * 1e3:.3g} ms, {predicted.memory.total / GIB:.2f} GiB"
    )
    lines = _yaml([entry]).splitlines()
    return "".join(f"{line}\n" for line in (note, *lines))


def _grouped(values: Sequence[object]) -> object:
    """One value, or ``["1 x 10", "3 x 2"]`` in order of the blocks."""
    groups = [(value, len(list(group))) for value, group in itertools.groupby(values)]
    return groups[0][0] if len(groups) == 1 else [f"{value} x {count}" for value, count in groups]


def _placement_texts(body: Body, placement: BodyPlacement) -> dict[str, dict[str, str]]:
    parameters = zip((p.name for p in body.parameters), placement.parameters, strict=True)
    return {
        "boundary": {name: str(placed) for name, placed in _ends(body, placement).items()},
        "parameters": {name: str(placed) for name, placed in parameters},
    }


_SHARD = re.compile(r"shard\((\d+)(?:, segments (\d+(?:\+\d+)+))?(?:, unit (\d+))?\)", re.ASCII)
_WORDS = {"replicate": REPLICATE, "shared": SHARED, "partial": PARTIAL}


def parse_placement(text: str, where: str) -> Placement:
    """``replicate``, ``shared`` or ``shard(dim[, segments a+b][, unit n])``. Raises PlanFileError."""
    if text in _WORDS:
        return _WORDS[text]
    match = _SHARD.fullmatch(text)
    if match is None or match[3] == "0":
        raise PlanFileError(where, f"{text!r} is no placement", "replicate, shared or shard(dim), as in shard(0)")
    segments = tuple(int(part) for part in match[2].split("+")) if match[2] else ()
    return shard(int(match[1]), segments, int(match[3] or 1))


def load(text: str, where: str, graph: ModelGraph, cluster: Cluster) -> tuple[Plan, Certificate]:
    """Read a plan for this graph and cluster. ``where`` names the file in messages.

    Raises PlanFileError, naming the field and what would be right, for whatever is mangled, contradicts itself or was
    made for another model or cluster.
    """
    file = _parse(text, where)
    _check_origin(file, where, graph, cluster)
    mesh = Mesh(**file.mesh.model_dump(), order=file.axis_order)
    batch = Batch(file.batch.total, file.batch.micro, file.batch.accumulation)
    _check_numbers(file, mesh, batch, where, cluster)
    schedule = Schedule(file.schedule.name, file.schedule.virtual)
    stages = _stages(file, where, graph)
    placements = _placements(file, where, graph, cluster, mesh)
    plan = Plan(
        file.model.name, file.model.fingerprint, file.cluster.name, file.cluster.fingerprint, file.precision, file.sequence,
        mesh, batch, schedule, file.zero_group, stages, placements, file.engine,
        OptimizerSettings(**file.optimizer.model_dump()),
    )
    check_consistency(plan, graph, where)
    return plan, _certificate(file, where)


def _certificate(file: _File, where: str) -> Certificate:
    """What the file proves of a plan of its batch."""
    said = file.certificate
    found = Certificate(said.lower_bound_s, said.candidates, said.solved, tuple(said.constraints))
    edited = said.seal != found.seal(said.batch, file.model.fingerprint, file.cluster.fingerprint)
    # A bound on the step says nothing about a step of another batch.
    bound = 0.0 if edited or said.batch != file.batch.total else said.lower_bound_s
    constraints = parse_texts(said.constraints, f"{where}: certificate.constraints").written
    return replace(found, lower_bound_s=bound, constraints=constraints, edited=edited)


def _parse(text: str, where: str) -> _File:
    try:
        data = parse_mapping(text)
    except ValueError as error:
        raise PlanFileError(where, str(error), "give what `shardwright plan` wrote") from None
    if type(data.get("format")) is not int or data["format"] != FORMAT:
        wrong = f"is {data['format']!r}" if "format" in data else "is missing"
        raise PlanFileError(f"{where}: format", wrong, f"this version reads format {FORMAT}; plan again")
    try:
        return _File.model_validate(data)
    except ValidationError as error:
        field, wrong, right = first_problem(error)
        raise PlanFileError(f"{where}: {field}", wrong, f"{right} (see docs/plan.md)") from None


def _check_origin(file: _File, where: str, graph: ModelGraph, cluster: Cluster) -> None:
    for field, named, name, right in (
        ("model", file.model, graph.name, fingerprint(graph)), ("cluster", file.cluster, cluster.name, cluster.fingerprint),
    ):
        if named.fingerprint != right:
            raise PlanFileError(
                f"{where}: {field}.fingerprint", f"{named.fingerprint} was made for another {field}", f"{right}, or plan again"
            )
        if named.name != name:
            raise PlanFileError(f"{where}: {field}.name", f"is {named.name!r}", f"{name!r}: the name of what it was made for")
    if file.sequence != graph.sequence:
        raise PlanFileError(f"{where}: sequence", f"is {file.sequence}", f"the traced model has {graph.sequence}")
    traced = next(name for name, dtype in DTYPES.items() if dtype == graph.dtype)
    if file.precision != traced:
        raise PlanFileError(f"{where}: precision", f"is {file.precision}", f"the model was traced in {traced}; plan again")


def _check_numbers(file: _File, mesh: Mesh, batch: Batch, where: str, cluster: Cluster) -> None:
    if mesh.devices != cluster.devices:
        product = f"{mesh.pipeline} x {mesh.data} x {mesh.tensor} = {mesh.devices}"
        raise PlanFileError(f"{where}: mesh", f"spans {product} devices", f"the cluster has {cluster.devices}")
    if batch.micro * batch.accumulation * mesh.data != batch.total:
        samples = batch.micro * batch.accumulation * mesh.data
        factors = f"{batch.micro} x {batch.accumulation} x {mesh.data} data ranks"
        raise PlanFileError(
            f"{where}: batch", f"micro x accumulation = {factors} = {samples}, not global {batch.total}", "make them equal"
        )
    if mesh.data % file.zero_group:
        raise PlanFileError(f"{where}: zero_group", f"{file.zero_group} does not divide data {mesh.data}", "a divisor of it")
    reason = legal(file.schedule.name, mesh.pipeline, file.schedule.virtual, batch.accumulation)
    if reason is not None:
        raise PlanFileError(f"{where}: schedule", reason, "another schedule or accumulation")
    if len(file.stages) != mesh.pipeline * file.schedule.virtual:
        raise PlanFileError(
            f"{where}: stages", f"there are {len(file.stages)}",
            f"pipeline x virtual = {mesh.pipeline * file.schedule.virtual}",
        )


def _stages(file: _File, where: str, graph: ModelGraph) -> tuple[StagePlan, ...]:
    position = {block.name: index for index, block in enumerate(graph.blocks)}
    result, expected = [], 0
    for index, stage in enumerate(file.stages):
        field = f"{where}: stages.{index}"
        first, last = _range(stage.blocks, expected, position, f"{field}.blocks")
        if first != expected or last < first:
            right = f"begin with {graph.blocks[expected].name}" if expected < len(graph.blocks) else "remove the stage"
            raise PlanFileError(f"{field}.blocks", f"{stage.blocks!r} does not follow the stage before", right)
        expected = last + 1
        count = expected - first
        zeros = _ungrouped(stage.zero, ("0", "1", "2", "3"), count, f"{field}.zero")
        levels = _ungrouped(stage.recompute, RECOMPUTE_LEVELS, count, f"{field}.recompute")
        decisions = tuple(
            BlockDecision(int(zero), level)  # type: ignore[arg-type]
            for zero, level in zip(zeros, levels, strict=True)
        )
        result.append(StagePlan(index, first, expected, decisions))
    if expected != len(graph.blocks):
        raise PlanFileError(
            f"{where}: stages.{len(result) - 1}.blocks", f"{graph.blocks[expected].name} and what follows is in no stage",
            f"end with {graph.blocks[-1].name}",
        )
    return tuple(result)


def _range(text: str, expected: int, position: Mapping[str, int], field: str) -> tuple[int, int]:
    """Indices of the first block and the last. Names may hold " - " themselves: what begins with the ``expected`` block is
    meant, which leaves one reading."""
    parts = [name.strip() for name in text.split(" - ")]
    ends = [(text.strip(), text.strip()), *((" - ".join(parts[:at]), " - ".join(parts[at:])) for at in range(1, len(parts)))]
    found = [(position[first], position[last]) for first, last in ends if first in position and last in position]
    if found:
        return next((pair for pair in found if pair[0] == expected), found[0])
    if len(parts) > 2:
        raise PlanFileError(field, f"{text!r} names {len(parts)} blocks", 'give "first - last", or one name')
    name = next(name for name in parts if name not in position)
    raise PlanFileError(field, f"{name!r} is no block", f'"first - last" with names such as {next(iter(position))}')


def _ungrouped(value: int | str | list[str], known: Sequence[str], count: int, field: str) -> list[str]:
    groups = [f"{value} x {count}"] if isinstance(value, (int, str)) else value
    result: list[str] = []
    for group in groups:
        match = re.fullmatch(r"(\w+) x ([0-9]{1,6})", group)
        if match is None or match[1] not in known:
            raise PlanFileError(field, f"{group!r} is unknown", f'one of {", ".join(known)}, or "value x count"')
        result += [match[1]] * int(match[2])
    if len(result) != count:
        raise PlanFileError(field, f"counts {len(result)} blocks", f"the stage has {count}")
    return result


def _placements(file: _File, where: str, graph: ModelGraph, cluster: Cluster, mesh: Mesh) -> dict[str, BodyPlacement]:
    names = [body.name for body in graph.bodies]
    if set(file.placements) != set(names):
        wrong = ", ".join(sorted(set(file.placements) ^ set(names)))
        raise PlanFileError(f"{where}: placements", f"{wrong} is missing or unknown", f"one for each of {', '.join(names)}")
    pricing = Pricing(cluster, mesh.tensor, file.placed_for)
    result = {}
    for body in graph.bodies:
        part, field = file.placements[body.name], f"{where}: placements.{body.name}"
        boundary = {name: parse_placement(text, f"{field}.boundary.{name}") for name, text in part.boundary.items()}
        parameters = {name: parse_placement(text, f"{field}.parameters.{name}") for name, text in part.parameters.items()}
        try:
            result[body.name] = complete(body, file.mesh.tensor, boundary, parameters, pricing)
        except PlanFileError as error:
            raise PlanFileError(field, error.wrong, error.right) from None
    return result


def placed_for(plan: Plan, graph: ModelGraph, cluster: Cluster) -> int:
    """Samples of a call for which the plan's placements are the cheapest between their boundaries and parameters: the
    search places for a few small calls and prices the result for all. The plan's own micro-batch where none is found."""
    sizes = (plan.batch.micro, *(size for size in SMALL_CALLS if size != plan.batch.micro))
    pricings = (Pricing(cluster, plan.mesh.tensor, size) for size in sizes)
    return next((pricing.microbatch for pricing in pricings if _places(plan, graph, pricing)), sizes[0])


def _places(plan: Plan, graph: ModelGraph, pricing: Pricing) -> bool:
    """Whether all placements are found again at these prices."""
    for body in graph.bodies:
        placement = plan.placements[body.name]
        parameters = dict(zip((value.name for value in body.parameters), placement.parameters, strict=True))
        if complete(body, plan.mesh.tensor, _ends(body, placement), parameters, pricing) != placement:
            return False
    return True


def _ends(body: Body, placement: BodyPlacement) -> dict[str, Placement]:
    """Placements of a body's inputs and outputs by their names."""
    return {
        **dict(zip((value.name for value in body.inputs), placement.inputs, strict=True)),
        **dict(zip(body.outputs, placement.outputs, strict=True)),
    }
