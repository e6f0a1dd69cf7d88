"""The step of one pipeline rank replayed as bytes: every pass of every micro-batch, every gathering and reduction.

What a block's passes hold comes from :mod:`planner.costing.passes`, what ZeRO does around them from
:mod:`planner.evaluate.units` and :mod:`planner.evaluate.stage_replay`, the order of a rank's actions from
:mod:`cost_models.schedules`. This is the plan's side of the memory ledger: categories and moments as docs/memory.md has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from cost_models.memory import MASTER_BYTES, MOMENTS
from cost_models.receives import receive_slots
from cost_models.schedules import Action, actions, turn_length
from cost_models.sends import releases
from planner.evaluate.bodies import Bodies
from planner.evaluate.heap import CATEGORIES, STREAMS, Category, Heap, Peak
from planner.evaluate.stage_replay import StageReplay
from planner.ir.graph import ModelGraph
from planner.ir.plan import SPLIT_BACKWARD, Plan

SCALE_BYTES = 16
"""The weight of the step's terms and what losses are multiplied by: float64 (runtime/loop.py, ``gradients``)."""
SCALED_BYTES = 8
"""A loss times the scale, and the gradient of one that its backward pass begins with: float64, as the scale is."""
NO_LOSS_BYTES = 4
"""Of the zero that a rank without the last stage has for a loss (runtime/schedule.py, ``step``)."""
STEP_COUNTER_BYTES = 4
"""torch.optim.AdamW's step counter of every parameter, float32 (torch/optim/adam.py, ``_init_group``)."""


@dataclass(frozen=True)
class Peaks:
    """``at``: bytes by category when their sum was highest. ``held_bytes``: by how much what a step has sent and not waited
    for raises the peak. ``cached_bytes``: what the streams hold at most, each at its own moment, beyond that: blocks of torch's
    caching allocator serve the stream that they were made on, and no other."""

    at: Mapping[Category, int]
    held_bytes: int
    cached_bytes: int

    @property
    def total(self) -> int:
        return sum(self.at.values())


_Phases = tuple[Peak, ...]
"""The peak of each phase of a rank's step."""


def _of_all(phases: _Phases) -> Peaks:
    """The peak of the whole step."""
    highest = max(phases, key=lambda phase: phase.most)
    streams = sum(max(phase.streams[stream] for phase in phases) for stream in STREAMS)
    return Peaks(highest.at, max(phase.most_held for phase in phases) - highest.most, streams - highest.most)


def peaks(plan: Plan, graph: ModelGraph) -> tuple[Peaks, ...]:
    """The peak of every pipeline rank's step (of its data and tensor ranks, the one that holds the most).

    Once the pipeline is full, every further micro-batch (of the interleaved schedules: every further round) adds the same
    to what a moment of the step finds alive: a long step is known from two short ones. Which moment holds the most may change
    on the way (GPipe's activations overtake its last reduction), so its phases are followed each by itself: the first
    actions, the last ones, those between, and the optimizer.
    """
    count = plan.batch.accumulation
    short, more = _lengths(plan)
    lengths = (count,) if count <= short + more else (short, short + more)
    ranks = _replays(plan, graph, lengths)
    if len(lengths) == 1:
        return tuple(_of_all(phases) for phases, in ranks)
    return tuple(_of_all(_drawn(a, b, Fraction(count - short, more))) for a, b in ranks)


def _drawn(a: _Phases, b: _Phases, times: Fraction) -> _Phases:
    """The step that is ``times`` as far from ``a`` as ``b`` is."""
    def line(first: int, second: int) -> int:
        return int(first + times * (second - first))

    return tuple(
        Peak(
            {name: line(x.at[name], y.at[name]) for name in CATEGORIES}, line(x.most_held, y.most_held),
            {stream: line(x.streams[stream], y.streams[stream]) for stream in STREAMS},
        )
        for x, y in zip(a, b, strict=True)
    )


def _lengths(plan: Plan) -> tuple[int, int]:
    """Micro-batches of a step that is long enough to be like all longer ones, and of one repetition."""
    pipeline, count = plan.mesh.pipeline, plan.batch.accumulation
    if pipeline == 1 or plan.schedule.name == "gpipe":
        return 4, 1
    if plan.schedule.name in ("1f1b", "zbv"):
        return 2 * pipeline + 2, 1
    each = turn_length(pipeline, count)
    return 3 * each, each


def _shortened(plan: Plan, count: int) -> Plan:
    batch = plan.batch
    return replace(plan, batch=replace(batch, total=batch.total // batch.accumulation * count, accumulation=count))


def _replays(plan: Plan, graph: ModelGraph, lengths: Sequence[int]) -> Iterator[list[_Phases]]:
    """By rank, steps of so many micro-batches."""
    bodies = Bodies(plan, graph)
    for rank in range(plan.mesh.pipeline):
        stages = _stages(bodies, rank)
        yield [_replay(_shortened(plan, length), graph, rank, stages, lengths[0]) for length in lengths]


def replay(plan: Plan, graph: ModelGraph, rank: int) -> Peaks:
    """The peak of one pipeline rank's whole step."""
    return _of_all(_replay(plan, graph, rank, _stages(Bodies(plan, graph), rank), plan.batch.accumulation))


def _stages(bodies: Bodies, rank: int) -> dict[int, StageReplay]:
    return {stage.index: StageReplay(bodies, stage) for stage in bodies.plan.stages_of_rank(rank)}


def _replay(plan: Plan, graph: ModelGraph, rank: int, stages: Mapping[int, StageReplay], short: int) -> _Phases:
    """``short``: micro-batches of a step whose first and last quarter of actions are phases of this one."""
    heap = Heap()
    for each in stages.values():
        each.begin(heap)
    _begin(plan, graph, heap, stages)
    count = plan.batch.accumulation
    if plan.mesh.pipeline == 1:
        (stage,) = stages.values()
        for micro in range(count):
            if micro in (short // 4, count - short // 4):
                heap.turn()
            stage.forward()
            heap.add("activations", SCALED_BYTES)
            _seed(stage)
            stage.backward(last=micro == count - 1)
            heap.add("activations", -2 * SCALED_BYTES)
    else:
        _pipeline(plan, heap, stages, rank, short)
    _optimizer_step(plan, heap, stages, count * graph_batch_bytes(plan, graph))
    heap.turn()
    return tuple(heap.phases)


def _seed(stage: StageReplay) -> None:
    """A gradient of one, and what becomes of it before it arrives at the stage's loss (runtime/schedule.py)."""
    heap, arriving = stage.heap, stage.loss_gradient_bytes
    heap.add("activations", SCALED_BYTES)
    heap.passing(activations=SCALED_BYTES + (arriving if arriving < SCALED_BYTES else 0))
    heap.add("activations", arriving)


def graph_batch_bytes(plan: Plan, graph: ModelGraph) -> int:
    """Of one micro-batch."""
    return sum(item.type.size_bytes(plan.batch.micro) for item in graph.batch_inputs)


def _begin(plan: Plan, graph: ModelGraph, heap: Heap, stages: Mapping[int, StageReplay]) -> None:
    """What a rank holds before its step."""
    master = MASTER_BYTES[plan.precision]
    for stage in stages.values():
        for unit in stage.root.units:
            heap.add("parameters", master * sum(parameter.shard for parameter in unit.parameters))
            moments = MOMENTS * master * sum(parameter.shard for parameter in unit.trained)
            heap.add("optimizer", moments + STEP_COUNTER_BYTES * len(unit.trained))
        for block in stage.blocks:
            for value in graph.body_of[block.body].buffers:
                heap.add("buffers", value.type.size_bytes(plan.batch.micro))
    constants = graph.constants_of([block for stage in stages.values() for block in stage.blocks])
    heap.add("buffers", sum(value.type.size_bytes() for value in graph.context.buffers if value.name in constants))
    if plan.mesh.pipeline > 1:
        heap.add("buffers", _receive_bytes(plan, stages))
    heap.add("buffers", plan.batch.accumulation * graph_batch_bytes(plan, graph))
    heap.passing(buffers=_sample_bytes(graph), activations=_loss_bytes(stages))
    heap.add("buffers", SCALE_BYTES)


def _loss_bytes(stages: Mapping[int, StageReplay]) -> int:
    """Of a step's loss on a rank."""
    return sum(stage.loss_bytes for stage in stages.values() if stage.is_last) or NO_LOSS_BYTES


def _sample_bytes(graph: ModelGraph) -> int:
    """What making one sample of a batch takes: its inputs, one after the other, each drawn and then cast (runtime/data.py)."""
    made = most = 0
    for item in (item for item in graph.batch_inputs if item.role != "share"):
        drawn = replace(item.type, dtype="float32" if item.type.floating else "int64")
        made += item.type.size_bytes()
        most = max(most, made + (drawn.size_bytes() if drawn != item.type else 0))
    return most


def _optimizer_step(plan: Plan, heap: Heap, stages: Mapping[int, StageReplay], batch_bytes: int) -> None:
    """What follows the schedule: partial gradients laid end to end, then torch's fused AdamW, which makes nothing."""
    master = MASTER_BYTES[plan.precision]
    loss = _loss_bytes(stages)
    heap.add("activations", loss - heap.now["activations"])
    heap.passing(buffers=master * sum(unit.partial_elements for stage in stages.values() for unit in stage.root.units))
    heap.held = 0
    heap.add("buffers", -batch_bytes - SCALE_BYTES)
    heap.turn()
    heap.add("activations", -loss)


def _pipeline(plan: Plan, heap: Heap, stages: Mapping[int, StageReplay], rank: int, short: int) -> None:
    """The actions of one rank in order (torch/distributed/pipelining/schedules.py)."""
    count, name = plan.batch.accumulation, plan.schedule.name
    order: Sequence[Action] = actions(name, plan.mesh.pipeline, plan.schedule.virtual, count)[rank]
    heap.add("activations", 4 * count)
    single = name in ("gpipe", "1f1b")
    silent = frozenset(index for index, stage in stages.items() if not stage.answered)
    let_go = {} if single else releases(name, plan.mesh.pipeline, plan.schedule.virtual, count, silent)[rank]
    left = Counter(action.stage for action in order)
    sent = 0
    apart = len(order) * short // count // 4
    for at, action in enumerate(order):
        if at in (apart, len(order) - apart):
            heap.turn()
        stage = stages[action.stage]
        for gone in let_go.get(action, ()):
            source = stages[gone.stage]
            heap.add("activations", -(source.answers - source.cloned if gone.kind == "F" else source.returned))
        left[action.stage] -= 1
        _act(plan, stages, action)
        if action.kind in "BI" and action.stage:
            if name == "1f1b":
                heap.add("activations", -sent)
            elif name == "gpipe":
                heap.add("activations", -stage.returned)
                heap.held += stage.returned
            sent = stage.returned
        if name == "1f1b" and action.kind == "B":
            heap.held = _last_warm_up_bytes(stage, len(plan.stages), count)
        if not left[action.stage]:
            stage.reduce()


def _act(plan: Plan, stages: Mapping[int, StageReplay], action: Action) -> None:
    """One action. What a stage makes for another lives until its own backward pass is over; so does the gradient that a stage
    of the same rank returns for it (which is done with the micro-batch before)."""
    stage, heap = stages[action.stage], stages[action.stage].heap
    local = stages.get(action.stage + 1)
    if action.kind == "F":
        stage.forward()
        if stage.is_last:
            if plan.schedule.name == "1f1b" and stage.finished:
                heap.add("activations", -stage.loss_bytes)  # A variable has held the one before until now.
            heap.add("activations", stage.loss_bytes + SCALED_BYTES)
        return
    kind = _KINDS[action.kind]
    if not stage.returns:
        if kind == "input":
            return
        kind = "full"
    if kind != "input":
        stage.finished += 1
    begins = stage.is_last and kind != "weight"
    if begins:
        _seed(stage)
    done = stage.finished == plan.batch.accumulation
    stage.backward(kind, last=done and plan.schedule.name not in SPLIT_BACKWARD, synchronise=done)
    if begins:
        heap.add("activations", -SCALED_BYTES - (0 if plan.schedule.name == "1f1b" else stage.loss_bytes))
    if kind != "input" and local is not None:
        heap.add("activations", -stage.makes - local.returned)
    elif kind != "input":
        # Schedules with several stages a rank let go of what they made when it has arrived; of what was passed on, now.
        single = plan.schedule.name in ("gpipe", "1f1b")
        gone = stage.makes if single else stage.makes - stage.answers + stage.cloned
        heap.add("activations", -gone)
        heap.held += gone if plan.schedule.name != "1f1b" else 0


def _last_warm_up_bytes(stage: StageReplay, stages: int, count: int) -> int:
    """What a variable of 1F1B holds, after a backward pass, of the last send of its warm-up that had a call of its own: until
    all forward passes are done (torch 2.13, torch/distributed/pipelining/schedules.py, Schedule1F1B, ``send_work``)."""
    warm_up = min(count, stages - stage.stage.index)
    return stage.sends if warm_up - 1 <= stage.finished <= count - warm_up and warm_up > 1 else 0


_KINDS: dict[str, Literal["full", "input", "weight"]] = {"B": "full", "I": "input", "W": "weight"}


def _receive_bytes(plan: Plan, stages: Mapping[int, StageReplay]) -> int:
    """The pipeline's receive buffers of a rank, in turns; a stage to which no gradient comes back receives into one for each
    micro-batch (runtime/schedule.py)."""
    count, total = plan.batch.accumulation, 0
    slots = receive_slots(plan.schedule.name, plan.mesh.pipeline, plan.schedule.virtual, count)
    for index, stage in stages.items():
        inputs, gradients = slots[index]
        if len(stages) > 1 and not stage.answered and inputs:
            inputs = count
        total += inputs * stage.receives + gradients * stage.answers
    return total
