"""A plan as a person reads it in a terminal."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from hardware_profiles import ProfileRow
from planner.bundle import Bundle
from planner.ir.counting import counted
from planner.ir.graph import Block
from planner.ir.placement import REPLICATE, BodyPlacement, Placement
from planner.ir.plan import AXIS_ORDERS, Plan, Prediction, StageMemory, StagePlan
from planner.search import Certificate, Request

WIDTH = 140
"""Columns of a page that is read by no terminal."""
BAR = 30
"""Columns of a bar of the whole, where there is room."""
_UNITS = ("", "k", "M", "G", "T", "P", "E")


def seconds(value: float) -> str:
    """A duration in the unit that reads best."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} us"


def size(value: float) -> str:
    """Bytes in the unit that reads best."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= factor:
            return f"{value / factor:.2f} {unit}"
    return f"{value:.0f} B"


def rate(value: float) -> str:
    """FLOP/s in the unit that reads best."""
    power = max(index for index in range(len(_UNITS)) if index == 0 or value >= 1000**index)
    return f"{value / 1000**power:.4g} {_UNITS[power]}FLOP/s"


def render(bundle: Bundle) -> RenderableType:
    """The whole page: headline, stages, placements, where the step's time and memory go, warnings."""
    parts: list[RenderableType] = [_headline(bundle), Text(), _stages(bundle), Text()]
    if bundle.plan.mesh.tensor > 1:
        parts += [_placements(bundle), Text()]
    parts += [_breakdown(bundle.prediction), Text(), _memory(bundle)]
    own = (*_unsharded(bundle.plan), *_undivided(bundle.plan))
    warnings = dict.fromkeys((*own, *bundle.graph.warnings, *bundle.prediction.warnings))
    parts += [Text(f"warning: {warning}", style="yellow") for warning in warnings]
    return Group(*parts)


def _unsharded(plan: Plan) -> tuple[str, ...]:
    """What the plan's ZeRO stages seem to promise, and its groups do not keep."""
    stages = sorted({decision.zero for stage in plan.stages for decision in stage.decisions} - {0})
    if plan.zero_group > 1 or not stages:
        return ()
    where = "in groups of 1 rank" if plan.mesh.data > 1 else "over 1 data rank"
    return (f"ZeRO {', '.join(map(str, stages))} {where}: nothing is sharded",)


def _undivided(plan: Plan) -> tuple[str, ...]:
    """A small model can be quickest where a tensor axis only keeps devices from being data ranks."""
    bodies = plan.placements.values()
    ends = [end for body in bodies for end in (*body.inputs, *body.parameters, *body.outputs)]
    inner = [each for body in bodies for node in body.nodes for each in (*node.strategy.operands, *node.strategy.outputs)]
    if plan.mesh.tensor == 1 or any(each.state in ("shard", "partial") for each in (*ends, *inner)):
        return ()
    fewer = counted(plan.mesh.devices // plan.mesh.tensor, "device")
    return (f"the tensor axis divides nothing: its {plan.mesh.tensor} ranks all do the same, and {fewer} would do",)


def _headline(bundle: Bundle) -> Table:
    plan, prediction, certificate = bundle.plan, bundle.prediction, bundle.certificate
    mesh, batch, schedule = plan.mesh, plan.batch, plan.schedule
    virtual = f", {schedule.virtual} virtual stages a rank" if schedule.virtual > 1 else ""
    sharded = f", ZeRO groups of {plan.zero_group}" if plan.zero_group < mesh.data else ""
    of_tokens = f" of {counted(plan.sequence, 'token')}" if plan.sequence else ""
    order = f", ranks in the order {mesh.order.replace('-', ', ')}" if mesh.order != AXIS_ORDERS[0] else ""
    rows = {
        "model": f"{plan.model}, {bundle.graph.parameter_count:,} parameters, {plan.precision}",
        "cluster": f"{plan.cluster}, {counted(mesh.devices, 'device')}",
        "mesh": f"pipeline {mesh.pipeline} x data {mesh.data} x tensor {mesh.tensor}{sharded}{order}",
        "schedule": f"{schedule.name}{virtual}",
        "batch": f"{counted(batch.total, 'sample')}{of_tokens} = {counted(mesh.data, 'data rank')} x"
                 f" {counted(batch.accumulation, 'micro-batch')} of {batch.micro}",
        "predicted": f"{seconds(prediction.step_s)} a step, {prediction.rate(plan.batch.total)},"
                     f" MFU {prediction.mfu:.1%}, {rate(prediction.model_flops_per_device_s)} a device",
        "proof": _proof(certificate, prediction.step_s),
    }
    return _grid({name: Text(value) for name, value in rows.items()})


def _proof(certificate: Certificate, step_s: float) -> str:
    """How far from the best a plan can be, and what stands behind that. A file does not say which gap was asked for: one above
    the default is left by a search that was out of time, or was asked for no less."""
    if certificate.lower_bound_s <= 0:
        searched = certificate.candidates
        return "none: " + (
            "the certificate was edited" if certificate.edited else "an edit has left what was searched" if searched
            else "the time was over before the search found a plan of its own"
        )
    gap = certificate.gap_of(step_s)
    under = f" under {'; '.join(certificate.constraints)}" if certificate.constraints else ""
    proven = round(gap, 5) <= Request.gap  # As precisely as it is printed.
    rest = ", bounds excluded the rest" if proven else "; a longer --time-limit or a smaller --gap may narrow it"
    return (
        f"at most {gap:.3%} from the best plan{under}: none takes less than {seconds(certificate.lower_bound_s)}"
        f" ({certificate.candidates:,} candidates, {certificate.solved:,} solved{rest})"
    )


def _grid(rows: Mapping[str, Text]) -> Table:
    """Names in a column of one width, then what they mean."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, min_width=9)
    table.add_column()
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), value)
    return table


def _table(title: str, left: Sequence[str], right: Sequence[str] = ()) -> Table:
    """Columns with text to the left, then columns with numbers to the right."""
    table = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False,
                  padding=(0, 1, 0, 0), show_edge=False)
    for name in left:
        table.add_column(Text(name, no_wrap=True, overflow="ellipsis"), overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _stages(bundle: Bundle) -> Table:
    """A row a stage; runs of stages that differ in their memory alone share one."""
    plan, blocks = bundle.plan, bundle.graph.blocks
    interleaved = plan.schedule.virtual > 1
    table = _table("", ("stage", *(("rank",) if interleaved else ()), "blocks", "ZeRO", "recompute"),
                   ("forward", "backward", "memory"))
    rows = [(*_cells(bundle, stage), stage) for stage in plan.stages]
    for key, run in itertools.groupby(rows, key=lambda row: row[:3]):
        stages = [stage for *_, stage in run]
        (decisions, forward, backward), first, last = key, stages[0], stages[-1]
        ranks = sorted({plan.rank_of_stage(stage.index) for stage in stages})
        memory = [bundle.prediction.stages[stage.index].memory.total for stage in stages]
        each = f", {first.last - first.first} each" if len(stages) > 1 and first.last - first.first > 1 else ""
        table.add_row(
            _span(first.index, last.index), *((_span(ranks[0], ranks[-1]),) if interleaved else ()),
            _range(blocks[first.first : last.last]) + each, decisions[1], decisions[2], forward, backward,
            _extent(min(memory), max(memory)),
        )
    return table


def _cells(bundle: Bundle, stage: StagePlan) -> tuple[tuple[tuple[str, ...], str, str], str, str]:
    """What stages of one row have in common: kinds of blocks, ZeRO, recomputation, and the times as printed."""
    predicted = bundle.prediction.stages[stage.index]
    kinds = tuple(block.body for block in bundle.graph.blocks[stage.first : stage.last])
    zero = _mixture(str(decision.zero) for decision in stage.decisions)
    recompute = _mixture(decision.recompute for decision in stage.decisions)
    return (kinds, zero, recompute), seconds(predicted.forward_s), seconds(predicted.backward_s)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _extent(least: int, most: int) -> str:
    low, high = size(least), size(most)
    if low == high:
        return high
    return f"{low.split()[0] if low.split()[1] == high.split()[1] else low} - {high}"


def _range(blocks: Sequence[Block]) -> str:
    """``model.layers.0 - 39 (40)``: the last name without what it shares with the first."""
    if len(blocks) == 1:
        return blocks[0].name
    first, last = blocks[0].name, blocks[-1].name
    prefix = first.rpartition(".")[0] + "."
    return f"{first} - {last.removeprefix(prefix) if prefix != '.' else last} ({len(blocks)})"


def _mixture(values: Iterable[str]) -> str:
    counts = Counter(values)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{value} x{count}" for value, count in sorted(counts.items()))


def _placements(bundle: Bundle) -> Table:
    title = f"over the {bundle.plan.mesh.tensor} ranks of the tensor axis"
    table = _table(title, ("block", "inputs and outputs", "parameters"))
    for body in bundle.graph.bodies:
        placement = bundle.plan.placements[body.name]
        names = (*(value.name for value in body.inputs), *body.outputs)
        ends = dict(zip(names, (*placement.inputs, *placement.outputs), strict=True))
        table.add_row(body.name, _boundary(ends), _parameters(placement, [p.name for p in body.parameters]))
    return table


def _boundary(placed: Mapping[str, Placement]) -> str:
    split = [f"{name} {placement}" for name, placement in placed.items() if placement != REPLICATE]
    return "\n".join(split) or "replicate"


def _parameters(placement: BodyPlacement, names: list[str]) -> str:
    split = [f"{name} {p}" for name, p in zip(names, placement.parameters, strict=True) if p.state == "shard"]
    whole = len(names) - len(split)
    return "\n".join([*split, *([f"{whole} whole"] if whole else [])]) or "none"


def _breakdown(prediction: Prediction) -> Table:
    table = _table("where a step goes", ("part", ""), ("time", "share"))
    table.show_header = False
    parts = prediction.breakdown
    for label, value in (
        ("compute", parts.compute), ("recompute", parts.recompute), ("tensor traffic", parts.tensor_comm),
        ("expert traffic", parts.expert_comm), ("context traffic", parts.context_comm),
        ("pipeline traffic", parts.pipeline_comm), ("pipeline bubble", parts.pipeline_bubble),
        ("data traffic", parts.data_comm), ("optimizer", parts.optimizer),
    ):
        if value > 1e-9 * prediction.step_s:
            share = value / prediction.step_s
            table.add_row(Text(label, no_wrap=True), _Bar(share), seconds(value), f"{share:.1%}")
    return table


@dataclass(frozen=True)
class _Bar:
    """A share of a whole, as wide as there is room."""

    share: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(BAR, options.max_width)
        full = round(self.share * width)
        yield Text("█" * full + "·" * (width - full))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, min(BAR, options.max_width))


def _memory(bundle: Bundle) -> Table:
    """The peak, the rank that has it, what it is made of, and whether it fits."""
    prediction = bundle.prediction
    worst = max(prediction.stages, key=lambda stage: stage.memory.total)
    made_of = {field.name: int(getattr(worst.memory, field.name)) for field in fields(StageMemory)}
    cached = made_of.pop("cached")
    peak = Text(f"{size(worst.memory.total)} of {size(prediction.memory_limit_bytes)} at most, on the rank of stage"
                f" {worst.index}: ")
    peak.append(*("fits", "green") if prediction.fits else ("DOES NOT FIT", "bold red"))
    parts = ", ".join(f"{name} {size(value)}" for name, value in made_of.items() if value)
    beside = f"; torch's caching allocator keeps {size(cached)} beside, where there is room" if cached else ""
    return _grid({"memory": peak, "": Text(parts + beside)})


def profile_table(rows: Iterable[ProfileRow]) -> Table:
    """The numbers of a hardware profile with where they come from."""
    table = _table("", ("field", "value", "kind", "source"))
    for row in rows:
        table.add_row(row.field, f"{row.value:g} {row.unit}", row.kind, row.source)
    return table


def print_page(page: RenderableType) -> None:
    """To standard output. Where that is no terminal it is as wide as COLUMNS says, or wide enough for the tables, and no line
    ends in spaces."""
    said = os.environ.get("COLUMNS", "")
    width = int(said) if said.isdecimal() and int(said) > 0 else WIDTH
    plain = Console(highlight=False, markup=False, emoji=False)
    if plain.is_terminal:
        plain.print(page)
        return
    piped = Console(width=width, highlight=False, markup=False, emoji=False)
    with piped.capture() as printed:
        piped.print(page)
    print("\n".join(line.rstrip(" ") for line in printed.get().splitlines()))
