"""How long `shardwright plan` takes as a whole command: cold, `--json`, import, tracing and search included.

    python benchmarks/plan_time.py [--job NAME]... [--date YYYY-MM-DD] [--time-limit SECONDS]

Every job is a process of its own; its wall and CPU seconds and peak memory are the operating system's (``wait4``). Wall seconds
mean something on an idle machine only, so the load is written down beside them. Prints a table and writes
``benchmarks/results/plan_time.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "plan_time.json"
VERSIONS = ("torch", "numpy", "highspy", "PuLP", "networkx", "pydantic")


@dataclass(frozen=True)
class Job:
    """One command of the table and its goal."""

    name: str
    words: str
    model: str
    settings: dict[str, int]
    cluster: str
    batch: int
    sequence: int
    goal_s: float

    def command(self, output: Path, time_limit_s: float) -> list[str]:
        return [
            sys.executable, "-m", "planner", "plan", self.model, *(f"--set={k}={v}" for k, v in self.settings.items()),
            f"--cluster={self.cluster}", f"--batch={self.batch}", f"--seq={self.sequence}",
            f"--time-limit={time_limit_s}", "--json", "-o", str(output),
        ]


LLAMA_8B = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden": 14336, "vocab": 128256}
LLAMA_405B = {"layers": 126, "hidden": 16384, "heads": 128, "kv_heads": 8, "ffn_hidden": 53248, "vocab": 128256}
GPT3 = {"layers": 96, "hidden": 12288, "heads": 96, "vocab": 51200}
GPT_1T = {"layers": 128, "hidden": 25600, "heads": 160, "vocab": 51200}
JOBS = (
    Job("llama3-8b", "Llama-3 8B, 256 x H100", "examples/llama.py:llama", LLAMA_8B, "dgx-h100:32", 512, 8192, 8.0),
    Job("gpt3-175b", "GPT-3 175B, 1,024 x A100", "examples/gpt.py:gpt", GPT3, "dgx-a100-80gb:128", 1536, 2048, 10.0),
    Job("gpt-1t", "GPT 1T, 3,072 x A100", "examples/gpt.py:gpt", GPT_1T, "dgx-a100-80gb:384", 3072, 2048, 15.0),
    Job("llama3-405b", "Llama-3 405B, 16,384 x H100", "examples/llama.py:llama", LLAMA_405B, "dgx-h100:2048", 2048, 8192, 20.0),
    Job("gpt-1t-98k", "GPT 1T, 98,304 x H100", "examples/gpt.py:gpt", GPT_1T, "dgx-h100:12288", 12288, 2048, 30.0),
)


def measure(job: Job, time_limit_s: float) -> dict[str, Any]:
    """Run one job cold and say what it took and answered."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        start = time.perf_counter()
        with out.open("w") as stream:
            process = subprocess.Popen(job.command(Path(folder) / "plan.yaml", time_limit_s), cwd=ROOT, stdout=stream)
            _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - start
        code = os.waitstatus_to_exitcode(status)
        process.returncode = code
        if code:
            return {"job": asdict(job), "exit_code": code, "wall_s": wall_s}
        answer = json.loads(out.read_text())
    search, mesh = answer["search"], answer["mesh"]
    return {
        "job": asdict(job), "exit_code": 0, "wall_s": wall_s, "cpu_s": usage.ru_utime + usage.ru_stime,
        # Linux counts in KiB, macOS in bytes.
        "peak_bytes": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "optimality_gap": search["optimality_gap"], "lower_bound_s": search["lower_bound_s"],
        "step_s": answer["predicted"]["step_s"], "candidates": search["candidates"], "solved": search["solved"],
        "seconds": search["seconds"], "mesh": mesh, "schedule": answer["schedule"], "batch": answer["batch"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [f"{'job':30}{'goal s':>8}{'wall s':>8}{'cpu s':>8}{'trace':>7}{'cost':>6}{'solve':>7}{'gap':>9}{'MiB':>7}"]
    for row in rows:
        name = row["job"]["words"]
        if row["exit_code"]:
            lines.append(f"{name:30} exit {row['exit_code']}")
            continue
        seconds = row["seconds"]
        lines.append(
            f"{name:30}{row['job']['goal_s']:8.0f}{row['wall_s']:8.1f}{row['cpu_s']:8.1f}{seconds['trace']:7.1f}"
            f"{seconds['cost']:6.1f}{seconds['solve']:7.1f}{row['optimality_gap']:9.3%}{row['peak_bytes'] / 2**20:7.0f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", action="append", choices=[job.name for job in JOBS], help="only these")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"), help="written into the results")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of solving, as the command's own default")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = []
    for job in JOBS:
        if options.job in (None, []) or job.name in options.job:
            rows.append(measure(job, options.time_limit))
            print(f"{job.name}: {rows[-1]['wall_s']:.1f} s", file=sys.stderr, flush=True)
    print(table(rows))
    document = {
        "date": options.date,
        "machine": {
            "system": platform.platform(), "processor": platform.machine(), "cpus": os.cpu_count(),
            "load_average": os.getloadavg(), "python": platform.python_version(),
        },
        "versions": {name: metadata.version(name) for name in VERSIONS},
        "time_limit_s": options.time_limit,
        "rows": rows,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
