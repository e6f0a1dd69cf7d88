"""Two ledgers side by side, as a person reads them in a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.ledger.calls import CATEGORIES, Call, RankLedger
from planner.ledger.compare import TOLERANCE, Difference
from planner.show import size


def render(
    predicted: Sequence[RankLedger], rehearsed: Sequence[RankLedger], reserve_bytes: Sequence[int],
    parted: Sequence[Difference],
) -> RenderableType:
    """One table of calls and one of memory for every rank; what parts is marked."""
    parts: list[RenderableType] = []
    for said, done, reserve in zip(predicted, rehearsed, reserve_bytes, strict=True):
        apart = {difference.what for difference in parted if difference.rank == said.rank}
        parts += [
            Text(f"rank {said.rank}, stage {said.stage}", style="bold"), _calls(said, done, apart),
            _memory(said, done, reserve, apart), Text(),
        ]
    verdict = Text(f"{len(parted)} rows part", style="red") if parted else Text("plan and program agree", style="green")
    return Group(*parts, verdict)


def _mark(apart: bool) -> Text:
    return Text("parts", style="red") if apart else Text("=", style="green")


def _calls(said: RankLedger, done: RankLedger, apart: Collection[Call | str]) -> Table:
    table = Table("calls a step", "axis", "ranks", "bytes each", "predicted", "rehearsed", "", box=box.SIMPLE)
    for column in table.columns[2:6]:
        column.justify = "right"
    for call in sorted({*said.calls, *done.calls}):
        table.add_row(
            call.kind.replace("_", "-"), call.axis, str(call.group), f"{call.size_bytes:,}",
            str(said.calls.get(call, 0)), str(done.calls.get(call, 0)), _mark(call in apart),
        )
    return table


def _memory(said: RankLedger, done: RankLedger, reserve: int, apart: Collection[Call | str]) -> Table:
    table = Table("memory at the peak", "predicted", "rehearsed", "ratio", "", box=box.SIMPLE)
    for column in table.columns[1:4]:
        column.justify = "right"
    rows = [(name, said.memory_bytes[name], done.memory_bytes[name], _mark(name in apart)) for name in CATEGORIES]
    total = sum(said.memory_bytes.values()), sum(done.memory_bytes.values())
    for name, one, other, mark in [*rows, ("total", *total, Text())]:
        table.add_row(name, size(one), size(other), f"{one / other:.4f}" if other else "", mark)
    if done.reserved_bytes is not None:
        ratio = f"{said.streams_bytes / done.reserved_bytes:.4f}"
        table.add_row("reserved by torch's allocator", size(said.streams_bytes), size(done.reserved_bytes), ratio, "")
        if done.flushes:
            table.add_row("  times that it gives memory back", "", str(done.flushes), "", "")
    table.add_row("reserve (modelled)", size(reserve), "", "", "")
    table.caption = f"agreement: calls exactly; memory from 0 to {TOLERANCE:.0%} above what is allocated"
    return table
