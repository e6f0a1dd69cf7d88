"""Predicted against measured step time on this machine's own cores: profile it, plan ten small jobs, run them.

    python benchmarks/step_time.py

Everything is pinned, so a plan is a prediction. The profile of each number of ranks is measured right before the jobs that use
it. Needs torch and Shardwright; eight minutes on two quiet cores. Writes ``results/step_time.json`` beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
WARM_UP = 4
"""Steps that do not count: the first ones fill the allocator and, under ZeRO, the buffers."""
GPT, LLAMA = "examples/gpt.py:gpt", "examples/llama.py:llama"


@dataclass(frozen=True)
class Job:
    """``shape``: keyword arguments of the model; ``pins``: everything that a plan decides."""

    name: str
    model: str
    shape: Mapping[str, int]
    sequence: int
    batch: int
    ranks: int
    pins: Mapping[str, str | int]


def _gpt(hidden: int, layers: int) -> dict[str, int]:
    return {"layers": layers, "hidden": hidden, "heads": hidden // 32, "vocab": 1024}


def _llama(hidden: int, layers: int) -> dict[str, int]:
    return {
        "layers": layers, "hidden": hidden, "heads": hidden // 64, "kv_heads": hidden // 128, "ffn_hidden": hidden * 11 // 4,
        "vocab": 1024,
    }


JOBS = (
    Job("gpt", GPT, _gpt(256, 4), 256, 8, 1, {"microbatch": 4, "recompute": "none", "zero": 0}),
    Job("gpt recompute", GPT, _gpt(384, 4), 128, 16, 1, {"microbatch": 4, "recompute": "full", "zero": 0}),
    Job("llama", LLAMA, _llama(384, 4), 256, 8, 1, {"microbatch": 2, "recompute": "none", "zero": 0}),
    Job("llama wide", LLAMA, _llama(768, 2), 128, 8, 1, {"microbatch": 4, "recompute": "selective", "zero": 0}),
    Job("gpt tensor 2", GPT, _gpt(512, 3), 256, 8, 2, {"tensor": 2, "microbatch": 4, "recompute": "none", "zero": 0}),
    Job("gpt pipeline 2", GPT, _gpt(384, 6), 256, 16, 2, {
        "pipeline": 2, "microbatch": 2, "schedule": "1f1b", "recompute": "none", "zero": 0}),
    Job("llama data 2 zero 3", LLAMA, _llama(384, 4), 256, 16, 2, {
        "data": 2, "microbatch": 4, "recompute": "none", "zero": 3}),
    Job("llama tensor 2 selective", LLAMA, _llama(512, 3), 256, 8, 2, {
        "tensor": 2, "microbatch": 2, "recompute": "selective", "zero": 0}),
    Job("gpt tensor 2 data 2 zero 1", GPT, _gpt(384, 3), 256, 16, 4, {
        "tensor": 2, "data": 2, "microbatch": 4, "recompute": "none", "zero": 1}),
    Job("llama pipeline 2 data 2 zero 2", LLAMA, _llama(384, 4), 256, 16, 4, {
        "pipeline": 2, "data": 2, "microbatch": 1, "schedule": "1f1b", "recompute": "none", "zero": 2}),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """One job. ``measured_s``: the median of the steady steps; ``least_s``: the quickest; ``error_pct``: of the prediction
    against the median."""

    name: str
    ranks: int
    predicted_s: float
    measured_s: float
    least_s: float
    error_pct: float
    steps: int
    breakdown_s: Mapping[str, float]


def main() -> None:
    """Run the jobs and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, help="use this profile for all jobs instead of measuring")
    parser.add_argument("--jobs", help="names of jobs, separated by commas (default: all)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of steady steps for each job, about")
    parser.add_argument("--output", type=Path, default=RESULTS / "step_time.json")
    options = parser.parse_args()
    chosen = [job for job in JOBS if options.jobs is None or job.name in options.jobs.split(",")]
    if not chosen:
        parser.error(f"--jobs {options.jobs}: use some of {', '.join(job.name for job in JOBS)}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    outcomes: list[Outcome] = []
    print(f"{'job':32} {'ranks':>5} {'predicted':>10} {'measured':>10} {'least':>8} {'error':>8}")
    with tempfile.TemporaryDirectory(prefix="step-time-") as folder:
        for ranks in sorted({job.ranks for job in chosen}):
            profile = options.profile or measure_profile(ranks, options.output.parent)
            for job in chosen:
                if job.ranks == ranks:
                    outcomes.append(run_job(job, profile, Path(folder) / str(len(outcomes)), options.seconds))
                    print(line(outcomes[-1]), flush=True)
    report = summary(outcomes, load, os.getloadavg()[0])
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"mean absolute error {report['mean_abs_error_pct']:.1f}%, worst {report['worst_abs_error_pct']:.1f}%; "
          f"load average {load:.1f} before, {report['load_after']:.1f} after; wrote {options.output}")  # fmt: skip


def line(outcome: Outcome) -> str:
    """A row of the table."""
    return (
        f"{outcome.name:32} {outcome.ranks:>5} {outcome.predicted_s:>8.3f} s {outcome.measured_s:>8.3f} s "
        f"{outcome.least_s:>6.3f} s {outcome.error_pct:>+7.1f}%"
    )


def summary(outcomes: Sequence[Outcome], load_before: float, load_after: float) -> dict[str, Any]:
    """What is written down. The load average says how far the machine was ours: its own jobs make up to ``ranks`` of it."""
    errors = [abs(outcome.error_pct) for outcome in outcomes]
    return {
        "mean_abs_error_pct": statistics.mean(errors), "worst_abs_error_pct": max(errors), "load_before": load_before,
        "load_after": load_after, "jobs": [asdict(outcome) for outcome in outcomes],
    }


def measure_profile(ranks: int, folder: Path) -> Path:
    """`shardwright profile`, kept beside the results."""
    path = folder / f"step_time_profile_{ranks}.yaml"
    _shardwright("profile", "--device", "cpu", "--ranks", str(ranks), "-o", str(path), "--json")
    return path


def run_job(job: Job, profile: Path, folder: Path, seconds: float) -> Outcome:
    """Plan, emit and run one job."""
    folder.mkdir()
    plan, program, metrics = folder / "plan.yaml", folder / "program", folder / "metrics.jsonl"
    shape = [text for name, value in job.shape.items() for text in ("--set", f"{name}={value}")]
    pins = [text for name, value in job.pins.items() for text in ("--pin", f"{name}={value}")]
    predicted = json.loads(_shardwright(
        "plan", job.model, *shape, *pins, "--seq", str(job.sequence), "--batch", str(job.batch), "--precision", "fp32",
        "--cluster", f"{profile}:1x{job.ranks}", "-o", str(plan), "--json",
    ))["predicted"]  # fmt: skip
    _shardwright("emit", str(plan), "-o", str(program))
    steps = WARM_UP + max(6, min(20, round(seconds / predicted["step_s"])))
    _run(
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.ranks),
        str(program / "train.py"), "--steps", str(steps), "--metrics", str(metrics),
    )
    taken = [json.loads(text)["step_s"] for text in metrics.read_text(encoding="utf-8").splitlines()][WARM_UP:]
    measured = statistics.median(taken)
    return Outcome(
        job.name, job.ranks, predicted["step_s"], measured, min(taken), 100 * (predicted["step_s"] / measured - 1), len(taken),
        predicted["breakdown_s"],
    )


def _shardwright(*arguments: str) -> str:
    return _run(sys.executable, "-m", "planner", *arguments)


def _run(*command: str) -> str:
    """Standard output of a command in the repository, one thread a process. A failure ends the benchmark with its words."""
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\nexit {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
