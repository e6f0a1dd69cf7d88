"""Tables of runs for tests: one row with every column, and variations of it."""

from __future__ import annotations

import csv
from pathlib import Path

from planner.validate.rows import OPTIONAL, REQUIRED, Row, parse_rows

STATED = {
    "row_id": "toy", "model": "Toy", "layers": "4", "hidden": "64", "heads": "4", "kv_heads": "4", "ffn_hidden": "256",
    "vocab": "512", "seq": "32", "hardware": "A100", "chip": "A100-SXM-80GB", "fast_domain": "8", "nic_GBps_per_gpu": "25",
    "n_gpus": "1", "tp": "1", "pp": "1", "vpp": "1", "dp": "1", "cp": "1", "zero_or_fsdp": "none", "micro_batch": "2",
    "global_batch_seqs": "4", "recompute": "none", "seq_parallel": "False", "dtype": "bf16", "step_time_s": "0.01",
    "mlp_type": "plain", "full_config": "1", "trust": "A", "family": "toys", "zero": "0", "engine": "torch-eager", "notes": "",
}


def text(*changes: dict[str, str]) -> str:
    """A CSV with one line for each set of changes."""
    columns = [*REQUIRED, *OPTIONAL]
    lines = [dict.fromkeys(columns, "") | STATED | change for change in changes]
    return "\n".join([",".join(columns), *(",".join(line[column] for column in columns) for line in lines)]) + "\n"


def row(**changes: str) -> Row:
    """The one row, changed."""
    return parse_rows(text(changes), "runs.csv")[0]


def write(path: Path, *changes: dict[str, str]) -> Path:
    path.write_text(text(*changes), encoding="utf-8")
    assert list(csv.DictReader(path.read_text().splitlines()))
    return path
