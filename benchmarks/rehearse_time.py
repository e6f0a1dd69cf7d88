"""How long `shardwright rehearse --all` takes for GPT-3 175B on 1,024 devices, and that plan and program agree.

    python benchmarks/rehearse_time.py [--date YYYY-MM-DD] [--keep DIRECTORY]

Plans with eight pipeline stages (the planner chooses the rest), emits the program, and rehearses one rank of every stage in as
many processes as there are processors. Wall seconds mean something on an idle machine only: CPU seconds and load are written
down beside them. Writes ``benchmarks/results/rehearse_time.json``. ``--keep``: where the program lies; it is taken from there
where it is there already.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "rehearse_time.json"
GOAL_S = 120.0
PLAN = (
    "plan", "examples/gpt.py:gpt", "--set=layers=96", "--set=hidden=12288", "--set=heads=96", "--set=vocab=51200",
    "--cluster=dgx-a100-80gb:128", "--batch=1536", "--seq=2048", "--pin=pipeline=8",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a rehearsal of GPT-3 175B on 1,024 devices.")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = options.keep or Path(directory)
        if not (folder / "program").exists():
            _run(*PLAN, "-o", str(folder / "plan.yaml"))
            _run("emit", str(folder / "plan.yaml"), "-o", str(folder / "program"))
        load = os.getloadavg()[0]
        before = os.times()
        report = json.loads(_run("rehearse", str(folder / "program"), "--all", "--json"))
        after = os.times()
    result = {
        "date": options.date, "python": platform.python_version(), "processors": os.cpu_count(), "load_before": round(load, 1),
        "load_after": round(os.getloadavg()[0], 1), "goal_s": GOAL_S, "wall_s": round(after.elapsed - before.elapsed, 1),
        "cpu_s": round(sum(after[2:4]) - sum(before[2:4]), 1), "ranks": [item["rank"] for item in report["ranks"]],
        "agree": report["agree"], "equal_calls": _equal(report, "collectives"), "equal_memory": _equal(report, "memory_bytes"),
    }
    print(json.dumps(result, indent=1))
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


def _run(*arguments: str) -> str:
    command = [sys.executable, "-m", "planner", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode not in (0, 1):
        sys.exit(done.returncode)
    return done.stdout


def _equal(report: dict[str, Any], part: str) -> int:
    """Ranks of which both sides say the very same."""
    return sum(said[part] == done[part] for said, done in zip(report["predicted"], report["ranks"], strict=True))


if __name__ == "__main__":
    main()
