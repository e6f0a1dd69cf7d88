"""Row: one measured training run, as a table of runs states it."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import TypeVar

from hardware_profiles.files import text_of
from planner.ir.costed import RECOMPUTE_LEVELS, Recompute
from planner.ir.errors import JobError

_T = TypeVar("_T")
TRUSTED = ("A", "B")


@dataclass(frozen=True, slots=True)
class Row:
    """One run. Counts as printed by the source; ``None`` where it says nothing.

    ``virtual``: virtual stages a pipeline rank; ``experts``: 0 for a dense model; ``network_bytes_s``: one way, of one
    accelerator between fast domains; ``words``: the columns that are kept as text (``zero_or_fsdp``, ``compile_or_fp8``,
    ``notes`` and the rest; a column that the table lacks is empty), by name. ``step_s``, ``peak_bytes``: measured.
    ``doubts``: what the row says in words that are not known, and what was taken instead.
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
    doubts: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """What makes two rows the same configuration, however their cells are written."""
        return (
            plain_name(self.chip), *(_folded(self.words.get(column, "")) for column in TOLD),
            *(getattr(self, name) for name in DISTINCT), self.kv_heads or self.heads,
            self.precision if self.words.get("dtype", "").strip() else None, *self.doubts,
        )


DISTINCT = (
    "domain", "network_bytes_s", "layers", "hidden", "heads", "ffn_hidden", "vocab", "sequence", "gated", "experts",
    "active_experts", "devices", "tensor", "pipeline", "virtual", "data", "context", "expert", "zero", "microbatch", "batch",
    "recompute", "sequence_parallel",
)
"""What tells configurations apart beside the chip, key and value heads, the precision, :data:`TOLD` and words that are not
known: all that says what ran on what, and not who ran it or what the model is called."""
TOLD = ("hardware", "engine", "compile_or_fp8", "zero_or_fsdp")
"""Columns in the source's words that tell configurations apart."""
REQUIRED = (
    "layers", "hidden", "heads", "ffn_hidden", "vocab", "seq", "chip", "n_gpus", "tp", "pp", "dp", "micro_batch",
    "global_batch_seqs", "recompute",
)
"""Columns without which no row can be predicted."""
DEFAULTS = {"full_config": "1", "trust": "B"}
"""What a table says of all its rows that has no such column."""
OPTIONAL = (
    "row_id", "model", "kv_heads", "moe_experts", "moe_topk", "hardware", "fast_domain", "nic_GBps_per_gpu", "vpp", "cp", "ep",
    "zero_or_fsdp", "seq_parallel", "dtype", "compile_or_fp8", "step_time_s", "peak_mem_gib", "mlp_type", "full_config",
    "trust", "family", "zero", "engine", "notes", "source",
)
"""Columns that are read where a table has them."""
LARGEST = {
    "layers": 10_000, "hidden": 2**20, "heads": 2**16, "kv_heads": 2**16, "ffn_hidden": 2**22, "vocab": 2**24, "seq": 2**26,
    "moe_experts": 2**14, "moe_topk": 2**14, "fast_domain": 2**24, "n_gpus": 2**24, "tp": 2**24, "pp": 2**24, "vpp": 10_000,
    "dp": 2**24, "cp": 2**24, "ep": 2**24, "micro_batch": 2**20, "global_batch_seqs": 2**30,
}
"""Counts beyond these are slips of a pen: orders of magnitude above any run."""


def plain_name(name: str) -> str:
    """A chip's name however it is spaced and cased."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _folded(text: str) -> str:
    """A source's words however they are spaced and cased; ``none`` says as much as nothing."""
    words = " ".join(text.lower().split())
    return "" if words == "none" else words


def scored_rows(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Fully configured, trusted, with a step time; of equal configurations the last."""
    return tuple({row.key: row for row in comparable_rows(rows)}.values())


def comparable_rows(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Fully configured, trusted, with a step time: what would be scored, were it the last of its configuration."""
    return tuple(row for row in rows if row.configured and row.trust in TRUSTED and row.step_s is not None)


def read_rows(path: Path) -> tuple[Row, ...]:
    """Read a table of runs. Raises JobError naming the file, the row and the column."""
    try:
        text = text_of(path)
    except (OSError, UnicodeDecodeError) as error:
        wrong = f"cannot be read ({getattr(error, 'strerror', None) or 'it is not text'})"
        raise JobError(str(path), wrong, "give a CSV file in the form of docs/validation.md") from error
    return parse_rows(text, str(path))


def parse_rows(text: str, where: str) -> tuple[Row, ...]:
    """The rows of a CSV text. Raises JobError as :func:`read_rows`."""
    reader = csv.DictReader(StringIO(text))
    columns = [column.strip() for column in reader.fieldnames or ()]
    reader.fieldnames = columns
    twice = next((column for column in columns if column and columns.count(column) > 1), None)
    if twice is not None:
        raise JobError(where, f"has the column {twice} twice", "leave one of them out")
    missing = [column for column in REQUIRED if column not in columns]
    if missing:
        raise JobError(where, f"has no column {missing[0]}", f"a table of runs has the columns {', '.join(REQUIRED)}")
    absent = {column: DEFAULTS.get(column, "") for column in OPTIONAL if column not in columns}
    rows, named = [], dict[str, int]()
    for line, stated in enumerate(_lines(reader, where), start=2):
        if None in stated or None in stated.values():
            raise JobError(f"{where}: line {line}", "has another number of cells than the header", f"give {len(columns)} cells")
        values = absent | stated
        name = values["row_id"] = values["row_id"].strip() or f"line {line}"
        if named.setdefault(name, line) != line:
            wrong = f"has the row_id {name!r} of line {named[name]} again"
            raise JobError(f"{where}: line {line}", wrong, "give every run a row_id of its own")
        rows.append(_row(values, f"{where}: row {name}"))
    return tuple(rows)


def _lines(reader: csv.DictReader[str], where: str) -> Iterator[dict[str, str]]:
    try:
        yield from reader
    except csv.Error as error:
        raise JobError(f"{where}: line {reader.line_num}", f"is no CSV ({error})", "give a CSV file") from error


def read_failures(path: Path) -> tuple[Row, ...]:
    """Runs that ran out of memory: a shorter table, of plain decoders under Megatron-DeepSpeed. Raises JobError as above."""
    try:
        lines = list(csv.DictReader(StringIO(text_of(path))))
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(str(path), "cannot be read", "give a CSV file in the form of docs/validation.md") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        stated = {column: line.get(column, "") or "" for column in (*REQUIRED, *OPTIONAL)}
        hidden = line.get("hidden", "")
        stated |= {
            "row_id": f"out_of_memory_{number}", "engine": "megatron", "chip": stated["hardware"].split(" ")[0], "cp": "1",
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
    doubts: list[str] = field(default_factory=list)

    def read(self, column: str, form: Callable[[str], _T], right: str) -> _T | None:
        text = self.values[column].strip()
        if not text:
            return None
        try:
            return form(text)
        except ValueError as error:
            raise JobError(f"{self.where}, column {column}", f"is {text!r}", right) from error

    def count(self, column: str) -> int | None:
        most = LARGEST[column]
        right = f"give a positive whole number of at most {most:,}, or nothing"
        return self.read(column, lambda text: _count(text, most), right)

    def number(self, column: str) -> float | None:
        return self.read(column, _positive, "give a positive number, or nothing")

    def word(self, column: str, allowed: Mapping[str, _T], otherwise: _T | None = None) -> _T | None:
        """A word's meaning, however it is cased; an unknown one is doubted, and means the known one in it or ``otherwise``."""
        text = self.values[column].strip().lower()
        if not text or text in allowed:
            return allowed[text] if text else None
        inside = next((word for word in allowed if word in text), None)
        meant = otherwise if inside is None else allowed[inside]
        kept = next((word for word, meaning in allowed.items() if meaning == meant), "not stated")
        self.doubts.append(f"{column} {text!r} is not known (one of {', '.join(allowed)}): taken as {kept}")
        return meant

    def trust(self) -> str:
        """A, B or C, or empty; an unknown word earns none: the letters are in too many words to be looked for."""
        text = self.values["trust"].strip().upper()
        if text in ("", "A", "B", "C"):
            return text
        self.doubts.append(f"trust {self.values['trust'].strip()!r} is not known (one of A, B, C): taken as C")
        return "C"


_TRUTHS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False, "yes": True, "no": False}


def _row(values: dict[str, str], where: str) -> Row:
    cells = _Cells(values, where)
    network, memory = cells.number("nic_GBps_per_gpu"), cells.number("peak_mem_gib")
    zero = cells.word("zero", {f"{stage}{end}": stage for stage in range(4) for end in (".0", "")}, 0)
    if zero is None:
        named = re.search(r"zero-?([0-3])", values["zero_or_fsdp"].lower())
        zero = int(named[1]) if named else 0
    return Row(
        row_id=values["row_id"], model=values["model"], family=_family(values),
        engine=values["engine"],
        chip=values["chip"], hardware=values["hardware"], trust=cells.trust(),
        configured=bool(cells.word("full_config", _TRUTHS, False)),
        layers=cells.count("layers"), hidden=cells.count("hidden"), heads=cells.count("heads"),
        kv_heads=cells.count("kv_heads"), ffn_hidden=cells.count("ffn_hidden"), vocab=cells.count("vocab"),
        sequence=cells.count("seq"), gated=cells.word("mlp_type", {"plain": False, "gated": True}, False) or False,
        experts=cells.count("moe_experts") or 0, active_experts=cells.count("moe_topk") or 0,
        domain=cells.count("fast_domain"), network_bytes_s=None if network is None else network * 1e9,
        devices=cells.count("n_gpus"), tensor=cells.count("tp"), pipeline=cells.count("pp"),
        virtual=cells.count("vpp") or 1, data=cells.count("dp"), context=cells.count("cp") or 1, expert=cells.count("ep") or 1,
        zero=zero,
        microbatch=cells.count("micro_batch"), batch=cells.count("global_batch_seqs"),
        recompute=cells.word("recompute", {level: level for level in RECOMPUTE_LEVELS}),
        sequence_parallel=cells.word("seq_parallel", _TRUTHS, False) or False,
        precision=cells.word("dtype", {name: name for name in ("bf16", "fp16", "fp32")}, "bf16") or "bf16",
        step_s=cells.number("step_time_s"), peak_bytes=None if memory is None else memory * 2**30,
        words=dict(values), doubts=tuple(cells.doubts),
    )


def _family(values: Mapping[str, str]) -> str:
    """What a table without families says of a run: its engine and its chip, as far as it says them."""
    if values["family"].strip():
        return values["family"]
    said = (values["engine"].strip(), values["chip"].strip() or values["hardware"].strip())
    return "|".join(part for part in said if part) or "no family"


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def _count(text: str, most: int) -> int:
    value = _positive(text)
    if value != int(value) or value > most:
        raise ValueError(text)
    return int(value)
