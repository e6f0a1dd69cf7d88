"""Predicted against measured step time and peak memory on one accelerator.

    python benchmarks/accelerator.py prepare RUN                        # here: plan and emit every case into the folder RUN
    python benchmarks/accelerator.py run RUN -o measured.json           # there: needs torch and nothing else of ours
    python benchmarks/accelerator.py report RUN measured.json           # here: predictions beside measurements

`run` measures the machine (the probes of `shardwright profile`), then trains every emitted program for some steps in a
process of its own, from parameters drawn on the device (the program's own initial values are drawn on the CPU, so that they are
the same anywhere, which takes longer than the steps). It stops before ``--limit`` seconds and goes on where it stopped when
the same output is given again. `report` writes the measured profile and ``results/accelerator.json``: predictions from the
profile that the plans were made with and from the measured one, the latter also beside the seconds of all kernels of a step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
WARM_UP, STEPS = 3, 8
GPT, LLAMA = "examples/gpt.py:gpt", "examples/llama.py:llama"
CASE_LIMIT_S = 240.0
"""What one program may take, its start and compilation included."""
KERNELS = 40
"""The kernels that are written down of a step, those that take longest."""


@dataclass(frozen=True)
class Case:
    """One program. ``shape``: keyword arguments of the model; cases that differ in ``compiled`` alone share a plan."""

    name: str
    model: str
    shape: Mapping[str, float]
    sequence: int
    batch: int
    micro: int
    recompute: str
    compiled: bool = False
    precision: str = "bf16"

    @property
    def plan(self) -> str:
        """The folder of its plan and its program."""
        return f"{self.name}-{self.recompute}"

    @property
    def key(self) -> str:
        return f"{self.plan}-{'compiled' if self.compiled else 'eager'}"


def _gpt(layers: int, hidden: int, heads: int) -> dict[str, int]:
    return {"layers": layers, "hidden": hidden, "heads": heads, "vocab": 50304}


def _llama(layers: int, hidden: int, kv_heads: int, ffn_hidden: int, vocab: int) -> dict[str, int]:
    return {
        "layers": layers, "hidden": hidden, "heads": hidden // 128, "kv_heads": kv_heads, "ffn_hidden": ffn_hidden,
        "vocab": vocab,
    }


def _cases() -> tuple[Case, ...]:
    """Half a billion to eight billion parameters; the most telling ones first, in case the time runs out."""
    half = ("gpt-0.5b", GPT, _gpt(24, 1280, 10), 1024, 16, 8)
    dropping = ("gpt-0.5b-dropout", GPT, {**_gpt(24, 1280, 10), "dropout": 0.1}, 1024, 16, 8)
    one = ("llama-1b", LLAMA, _llama(16, 2048, 8, 8192, 128256), 2048, 8, 4)
    three = ("gpt-2.7b", GPT, _gpt(32, 2560, 20), 2048, 8, 4)
    four = ("llama-3.6b", LLAMA, _llama(28, 3072, 8, 8192, 128256), 2048, 4, 2)
    seven = ("llama-6.7b", LLAMA, _llama(32, 4096, 32, 11008, 32000), 2048, 2, 1)
    eight = ("llama-8b", LLAMA, _llama(32, 4096, 8, 14336, 128256), 2048, 1, 1)
    return (
        Case(*one, "none"), Case(*seven, "full"), Case(*eight, "full"), Case(*three, "none"), Case(*half, "none"),
        Case(*four, "none"), Case(*three, "full"), Case(*one, "full"), Case(*four, "selective"), Case(*half, "full"),
        Case(*dropping, "none"), Case(*half, "none", True), Case(*one, "none", True), Case(*four, "none", True),
        Case(*seven, "full", True), Case(*one, "full", True), Case(*half, "selective"), Case(*dropping, "full"),
    )


CASES = _cases()
TINY = (
    Case("tiny", GPT, {"layers": 2, "hidden": 64, "heads": 2, "vocab": 64}, 32, 4, 2, "none", precision="fp32"),
    Case("tiny", GPT, {"layers": 2, "hidden": 64, "heads": 2, "vocab": 64}, 32, 4, 2, "full", precision="fp32"),
)
"""What a machine without an accelerator runs, to try the script itself."""


def main(arguments: list[str] | None = None) -> None:
    """One of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare", help="plan and emit every case")
    preparing.add_argument("folder", type=Path)
    preparing.add_argument("--cluster", default="dgx-h200:1x1", help="what the plans are made for")
    preparing.add_argument("--tiny", action="store_true", help="two small cases, to try the script")
    running = commands.add_parser("run", help="measure the machine and train every program")
    running.add_argument("folder", type=Path)
    running.add_argument("-o", "--output", type=Path, required=True)
    running.add_argument("--limit", type=float, default=540.0, help="seconds after which nothing new is started")
    running.add_argument("--quick", action="store_true", help="fewer probes and steps")
    reporting = commands.add_parser("report", help="compare with the predictions")
    reporting.add_argument("folder", type=Path)
    reporting.add_argument("measured", type=Path)
    reporting.add_argument("--output", type=Path, default=RESULTS / "accelerator.json")
    options = parser.parse_args(arguments)
    if options.command == "prepare":
        prepare(options.folder, options.cluster, TINY if options.tiny else CASES)
    elif options.command == "run":
        run(options.folder, options.output, options.limit, quick=options.quick)
    else:
        report(options.folder, options.measured, options.output)


def prepare(folder: Path, cluster: str, cases: tuple[Case, ...]) -> None:
    """Plan and emit every case, and copy the measuring code beside them. A case that no plan fits is written down as that."""
    folder.mkdir(parents=True, exist_ok=True)
    refused: dict[str, str] = {}
    for case in {case.plan: case for case in cases}.values():
        plan, program = (str((folder / case.plan / name).resolve()) for name in ("plan.yaml", "program"))
        shape = [text for name, value in case.shape.items() for text in ("--set", f"{name}={value}")]
        done = _planner(
            "plan", case.model, *shape, "--cluster", cluster, "--seq", str(case.sequence), "--batch", str(case.batch),
            "--precision", case.precision, "--pin", f"microbatch={case.micro}", "--pin", f"recompute={case.recompute}",
            "--pin", "zero=0", "-o", plan,
        )  # fmt: skip
        if done.returncode == 3:
            refused[case.plan] = done.stderr.strip().splitlines()[-1]
        elif done.returncode == 0:
            done = _planner("emit", plan, "-o", program)
        if done.returncode not in (0, 3):
            sys.exit(f"{case.plan}: {done.stderr.strip()[-2000:]}")
        print(f"{case.plan}: {refused.get(case.plan, 'emitted')}", flush=True)
    shutil.copytree(
        REPOSITORY / "hardware_profiles" / "measure", folder / "measure", dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("__pycache__"),
    )  # fmt: skip
    content = {"cluster": cluster, "cases": [asdict(case) for case in cases], "refused": refused}
    (folder / "cases.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def run(folder: Path, output: Path, limit_s: float, *, quick: bool) -> None:
    """Measure the machine, then train every program that there is time for. ``output`` is written after every step."""
    begin = time.monotonic()
    measured: dict[str, Any] = {"machine": None, "observations": [], "runs": {}}
    if output.exists():
        measured = json.loads(output.read_text(encoding="utf-8"))
    if measured["machine"] is None:
        measured |= _measure(folder, quick=quick)
        _write(output, measured)
    prepared = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    for case in (Case(**fields) for fields in prepared["cases"]):
        if case.key in measured["runs"] or case.plan in prepared["refused"]:
            continue
        left = limit_s - (time.monotonic() - begin)
        if left < CASE_LIMIT_S / 4:
            print(f"{left:.0f} s are left: run again with the same output to go on", flush=True)
            break
        found = _train(folder / case.plan / "program", case, min(left, CASE_LIMIT_S), quick=quick)
        measured["runs"][case.key] = found
        print(f"{case.key}: {({name: value for name, value in found.items() if name != 'kernels'})}", flush=True)
        _write(output, measured)


def _measure(folder: Path, *, quick: bool) -> dict[str, Any]:
    """The observations of `shardwright profile`, by the copy of its code in ``folder``."""
    sys.path.insert(0, str(folder.resolve()))
    from measure import Settings, accelerators, measure  # type: ignore[import-not-found]

    settings = Settings(1, "cuda" if accelerators() else "cpu", quick)
    done = measure(settings, lambda count, total, what: None)
    return {"machine": asdict(done.machine), "observations": [asdict(item) for item in done.observations]}


def _train(program: Path, case: Case, limit_s: float, *, quick: bool) -> dict[str, Any]:
    """One program in a process of its own, which has imported torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.pipelining", "torch.utils.checkpoint"])
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=train_one, args=(program, 3 if quick else STEPS, case.compiled, there))
    begin = time.monotonic()
    process.start()
    there.close()
    try:
        found: dict[str, Any] = here.recv() if here.poll(limit_s) else {"failed": f"took more than {limit_s:.0f} s"}
    except EOFError:
        process.join()
        found = {"failed": f"ended with {process.exitcode}"}
    process.terminate()
    process.join()
    return {**found, "wall_s": time.monotonic() - begin}


def train_one(path: Path, steps: int, compiled: bool, answer: Connection) -> None:
    """Answer with the seconds of each of ``steps`` steady steps, the memory that they took and their kernels."""
    import torch

    try:
        answer.send(_steps(path, steps, compiled))
    except torch.OutOfMemoryError:
        answer.send({"out_of_memory": True})
    except Exception as error:  # noqa: BLE001 - whatever it is belongs to this case
        answer.send({"failed": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})


def _steps(path: Path, steps: int, compiled: bool) -> dict[str, Any]:
    sys.path.insert(0, str(path.resolve()))
    import torch
    import train  # type: ignore[import-not-found]

    from runtime import launch, loop

    program = replace(train.build(), recipes=None)
    device = program.world.device
    cuda = device.type == "cuda"
    trainer = loop.Trainer(program, launch.parse_options(["--steps", str(WARM_UP + steps)], **train.DEFAULTS))
    _draw((held.fqn, held.local) for held in trainer.parameters)
    if compiled:
        loop.compile_blocks(program.modules)
    seconds: list[float] = []
    losses: list[float] = []
    found: dict[str, Any] = {"step_s": [], "allocated_bytes": 0, "reserved_bytes": 0}
    for step in range(WARM_UP + steps):
        if step == WARM_UP and cuda:
            found["held_bytes"] = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        losses.append(trainer.step()[0])  # It waits for the gradients' norm: the update runs while the next step begins.
        seconds.append(time.perf_counter() - begin)
    found |= {"step_s": seconds[WARM_UP:], "first_step_s": seconds[0], "losses": losses}
    if cuda:
        free, total = torch.cuda.mem_get_info()
        found |= {
            "allocated_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved(),
            "device_bytes": total - free, **_kernels(trainer),
        }
    return found


def _draw(parameters: Iterable[tuple[str, Any]]) -> None:
    """Matrices as GPT-2 begins, norms one: what a product's elements are decides how much power it takes, and its clock."""
    import torch

    with torch.no_grad():
        for fqn, parameter in parameters:
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)
            else:
                parameter.fill_(0.0 if fqn.endswith("bias") else 1.0)


def _kernels(trainer: Any) -> dict[str, Any]:
    """One step's kernels: (name, calls, seconds), and the seconds of all."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        trainer.step()
        torch.cuda.synchronize()
    calls: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for event in watched.events():
        if event.device_type.name == "CUDA":
            calls[event.name] += 1
            seconds[event.name] += event.time_range.elapsed_us() / 1e6
    return {
        "kernels": [[name[:200], calls[name], taken] for name, taken in seconds.most_common(KERNELS)],
        "kernels_s": seconds.total(), "kernel_count": calls.total(),
    }


def report(folder: Path, path: Path, output: Path) -> None:
    """Evaluate every plan under both profiles and write predictions beside measurements."""
    from hardware_profiles import resolve_cluster
    from hardware_profiles.measure import Machine, Measurement, Observation, Probe
    from hardware_profiles.measure.document import profile_text

    measured = json.loads(path.read_text(encoding="utf-8"))
    prepared = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    observations = tuple(
        Observation(Probe(**{**item["probe"], "sizes": tuple(item["probe"]["sizes"])}), item["seconds"])
        for item in measured["observations"]
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    profile = output.with_name(f"{output.stem}_profile.yaml")
    profile.write_text(
        profile_text(Measurement(Machine(**measured["machine"]), observations), output.stem), encoding="utf-8"
    )
    rows = [
        _row(folder, Case(**fields), measured["runs"], prepared["refused"], resolve_cluster(f"{profile}:1x1"))
        for fields in prepared["cases"]
    ]
    content = {"machine": measured["machine"], "planned_for": prepared["cluster"], **_means(rows), "cases": rows}
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _table(rows)
    print(f"mean absolute error: {_means(rows)}; wrote {output} and {profile}")


def _row(folder: Path, case: Case, runs: Mapping[str, Any], refused: Mapping[str, str], cluster: Any) -> dict[str, Any]:
    """One case: what was predicted, what was measured, the errors in percent."""
    row: dict[str, Any] = {"case": case.key, "parameters": None}
    if case.plan in refused:
        return {**row, "refused": refused[case.plan]}
    from planner.bundle import read
    from planner.evaluate import evaluate_plan

    bundle = read(folder / case.plan / "plan.yaml")
    plan = replace(bundle.plan, engine="torch-compiled" if case.compiled else "torch-eager")
    packaged, own = (evaluate_plan(plan, bundle.graph, chosen) for chosen in (bundle.cluster, cluster))
    memory = packaged.stages[0].memory
    row |= {
        "parameters": bundle.graph.parameter_count, "predicted_step_s": {"packaged": packaged.step_s, "measured": own.step_s},
        "predicted_allocated_bytes": memory.total - memory.reserve,
        "predicted_reserved_bytes": memory.total - memory.reserve + memory.cached,
        "predicted_total_bytes": memory.total + memory.cached,
    }
    found = runs.get(case.key, {"failed": "was not run"})
    if "step_s" not in found:
        return {**row, **found}
    step_s = statistics.median(found["step_s"])
    row |= {"measured_step_s": step_s, **{name: found[name] for name in ("allocated_bytes", "reserved_bytes")}}
    row["error_pct"] = {name: 100 * (value / step_s - 1) for name, value in row["predicted_step_s"].items()}
    if found["allocated_bytes"]:
        row |= {name: found[name] for name in ("kernels_s", "kernel_count", "device_bytes", "first_step_s")}
        row["error_pct"]["kernels"] = 100 * (own.step_s / found["kernels_s"] - 1)
        row["error_pct"]["allocated"] = 100 * (row["predicted_allocated_bytes"] / found["allocated_bytes"] - 1)
        row["error_pct"]["reserved"] = 100 * (row["predicted_reserved_bytes"] / found["reserved_bytes"] - 1)
        row["error_pct"]["device"] = 100 * (row["predicted_total_bytes"] / found["device_bytes"] - 1)
    return row


def _means(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Mean absolute errors over the cases that ran."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.get("error_pct", {}).items():
            errors.setdefault(f"{name}_error_pct", []).append(abs(value))
    return {name: statistics.mean(values) for name, values in errors.items()}


def _table(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if "error_pct" not in row:
            wrong = row.get("refused") or row.get("failed") or "out of memory"
            print(f"{row['case']:28} {wrong}")
            continue
        errors = "  ".join(f"{name} {value:+.1f}%" for name, value in row["error_pct"].items())
        print(f"{row['case']:28} measured {row['measured_step_s']:.4f} s  {errors}")


def _planner(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "planner", *arguments)
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
