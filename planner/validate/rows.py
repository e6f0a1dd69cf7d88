"""Row: one measured training run, as a table of runs states it."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

from planner.ir.costed import RECOMPUTE_LEVELS, Recompute
from planner.ir.errors import JobError

_T = TypeVar("_T")
TRUSTED = ("A", "B")


@dataclass(frozen=True, slots=True)
class Row:
    """One run. Counts as printed by the source; ``None`` where it says nothing.

    ``virtual``: virtual stages a pipeline rank; ``experts``: 0 for a dense model; ``network_bytes_s``: one way, of one
    accelerator between fast domains; ``words``: the columns that are kept as text (``zero_or_fsdp``, ``compile_or_fp8``,
    ``notes`` and the rest), by name. ``step_s``, ``peak_bytes``: measured.
    """

    row_id: str
    model: str
    family: str
    engine: str
    chip: str
    hardware: str
    trust: str
    configured: bool
    layers: int | None
    hidden: int | None
    heads: int | None
    kv_heads: int | None
    ffn_hidden: int | None
    vocab: int | None
    sequence: int | None
    gated: bool
    experts: int
    active_experts: int
    domain: int | None
    network_bytes_s: float | None
    devices: int | None
    tensor: int | None
    pipeline: int | None
    virtual: int
    data: int | None
    context: int
    expert: int
    zero: int
    microbatch: int | None
    batch: int | None
    recompute: Recompute | None
    sequence_parallel: bool
    precision: str
    step_s: float | None
    peak_bytes: float | None
    words: Mapping[str, str]

    @property
    def key(self) -> tuple[str, ...]:
        """What makes two rows the same configuration."""
        return tuple(self.words[column] for column in DISTINCT)


DISTINCT = (
    "hardware", "engine", "compile_or_fp8", "layers", "hidden", "heads", "ffn_hidden", "vocab", "seq", "moe_experts", "n_gpus",
    "tp", "pp", "vpp", "dp", "cp", "ep", "zero_or_fsdp", "micro_batch", "global_batch_seqs", "recompute", "seq_parallel",
)
"""Columns that tell configurations apart."""
REQUIRED = (
    "row_id", "model", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq", "moe_experts", "moe_topk",
    "hardware", "chip", "fast_domain", "nic_GBps_per_gpu", "n_gpus", "tp", "pp", "vpp", "dp", "cp", "ep", "zero_or_fsdp",
    "micro_batch", "global_batch_seqs", "recompute", "seq_parallel", "dtype", "compile_or_fp8", "step_time_s", "peak_mem_gib",
    "mlp_type", "full_config", "trust", "family", "zero", "engine",
)
"""Columns that a table of runs has."""


def scored_rows(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Fully configured, trusted, with a step time; of equal configurations the last."""
    found = {row.key: row for row in rows if row.configured and row.trust in TRUSTED and row.step_s is not None}
    return tuple(found.values())


def read_rows(path: Path) -> tuple[Row, ...]:
    """Read a table of runs. Raises JobError naming the file, the row and the column."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        wrong = f"cannot be read ({getattr(error, 'strerror', None) or 'it is not text'})"
        raise JobError(str(path), wrong, "give a CSV file in the form of docs/validation.md") from error
    return parse_rows(text, str(path))


def parse_rows(text: str, where: str) -> tuple[Row, ...]:
    """The rows of a CSV text. Raises JobError as :func:`read_rows`."""
    reader = csv.DictReader(StringIO(text))
    missing = [column for column in REQUIRED if column not in (reader.fieldnames or ())]
    if missing:
        raise JobError(where, f"has no column {missing[0]}", f"a table of runs has the columns {', '.join(REQUIRED)}")
    rows = []
    for line, values in enumerate(reader, start=2):
        if None in values or None in values.values():
            count = len(reader.fieldnames or ())
            raise JobError(f"{where}: line {line}", "has another number of cells than the header", f"give {count} cells")
        rows.append(_row(values, f"{where}: row {values['row_id'] or line}"))
    return tuple(rows)


def read_failures(path: Path) -> tuple[Row, ...]:
    """Runs that ran out of memory: a shorter table, of plain decoders under Megatron-DeepSpeed. Raises JobError as above."""
    try:
        lines = list(csv.DictReader(StringIO(path.read_text(encoding="utf-8"))))
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(str(path), "cannot be read", "give a CSV file in the form of docs/validation.md") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        stated = {column: line.get(column, "") for column in REQUIRED}
        hidden = line.get("hidden", "")
        stated |= {
            "row_id": f"out_of_memory_{number}", "engine": "megatron", "chip": line["hardware"].split(" ")[0], "cp": "1",
            "ffn_hidden": str(4 * int(hidden)) if hidden.isdigit() else "", "mlp_type": "plain", "full_config": "1",
            "trust": "B", "vpp": "1", "zero": "1" if "zero1" in line.get("zero_or_fsdp", "") else "0",
            "notes": line.get("notes", ""), "family": line.get("model", ""),
        }
        rows.append(_row(stated, f"{path}: line {number + 1}"))
    return tuple(rows)


@dataclass(frozen=True)
class _Cells:
    """One line's texts, read by column."""

    values: Mapping[str, str]
    where: str

    def read(self, column: str, form: Callable[[str], _T], right: str) -> _T | None:
        text = self.values[column].strip()
        if not text:
            return None
        try:
            return form(text)
        except ValueError as error:
            raise JobError(f"{self.where}, column {column}", f"is {text!r}", right) from error

    def count(self, column: str) -> int | None:
        return self.read(column, _count, "give a positive whole number, or nothing")

    def number(self, column: str) -> float | None:
        return self.read(column, _positive, "give a positive number, or nothing")

    def word(self, column: str, allowed: Mapping[str, _T]) -> _T | None:
        return self.read(column, lambda text: _known(text, allowed), f"one of {', '.join(allowed)}, or nothing")


def _row(values: dict[str, str], where: str) -> Row:
    cells = _Cells(values, where)
    network, memory = cells.number("nic_GBps_per_gpu"), cells.number("peak_mem_gib")
    return Row(
        row_id=values["row_id"], model=values["model"], family=values["family"], engine=values["engine"],
        chip=values["chip"], hardware=values["hardware"], trust=values["trust"],
        configured=bool(cells.word("full_config", {"0": False, "1": True, "0.0": False, "1.0": True})),
        layers=cells.count("layers"), hidden=cells.count("hidden"), heads=cells.count("heads"),
        kv_heads=cells.count("kv_heads"), ffn_hidden=cells.count("ffn_hidden"), vocab=cells.count("vocab"),
        sequence=cells.count("seq"), gated=cells.word("mlp_type", {"plain": False, "gated": True}) or False,
        experts=cells.count("moe_experts") or 0, active_experts=cells.count("moe_topk") or 0,
        domain=cells.count("fast_domain"), network_bytes_s=None if network is None else network * 1e9,
        devices=cells.count("n_gpus"), tensor=cells.count("tp"), pipeline=cells.count("pp"),
        virtual=cells.count("vpp") or 1, data=cells.count("dp"), context=cells.count("cp") or 1, expert=cells.count("ep") or 1,
        zero=cells.word("zero", {f"{stage}{end}": stage for stage in range(4) for end in ("", ".0")}) or 0,
        microbatch=cells.count("micro_batch"), batch=cells.count("global_batch_seqs"),
        recompute=cells.word("recompute", {level: level for level in RECOMPUTE_LEVELS}),
        sequence_parallel=cells.word("seq_parallel", {"True": True, "False": False}) or False,
        precision=cells.word("dtype", {name: name for name in ("bf16", "fp16", "fp32")}) or "bf16",
        step_s=cells.number("step_time_s"), peak_bytes=None if memory is None else memory * 2**30,
        words=dict(values),
    )


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    value = _positive(text)
    if value != int(value):
        raise ValueError(text)
    return int(value)


def _known(text: str, allowed: Mapping[str, Any]) -> Any:
    if text not in allowed:
        raise ValueError(text)
    return allowed[text]
