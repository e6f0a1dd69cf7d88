"""The models of ``benchmarks/zoo`` on one accelerator: two steps of each emitted program there, and of the same one on the CPU.

    python benchmarks/zoo_accelerator.py prepare RUN                   # here: emit every model for one rank into the folder RUN
    python benchmarks/zoo_accelerator.py run RUN -o FILE.json          # there: needs torch and nothing else of ours

Two micro-batches, a mixture of recomputation; in float64, in float32 where a model cannot be traced in that; dropout is
switched off, which a CPU and an accelerator draw differently. Compared are both losses and the first step's gradients, each by
its largest element or a thousandth of the model's. What a model itself computes in float32 differs by about 1e-7. Exits 1 where
one is further off than in ``benchmarks/zoo_gradients.py`` (2e-6, in float32 2e-3). `prepare` needs transformers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DTYPE_FILE = "dtype"
WORST = {"float64": 2e-6, "float32": 2e-3}
STEPS, CASE_LIMIT_S = 2, 60.0
DEVICES = ("cuda", "cpu")


def prepare(folder: Path) -> None:
    """Emit every model that can be traced."""
    sys.path.insert(0, str(ROOT))
    import torch
    import transformers

    from benchmarks.run_zoo import FILES, names_of
    from benchmarks.zoo_gradients import PRECISIONS, trace
    from codegen import emit
    from planner.ir.errors import ShardwrightError
    from tests.matrix.build import Row, make_plan

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    row = Row(accumulation=2, microbatch=2, recompute="mixed")
    folder.mkdir(parents=True, exist_ok=True)
    for file in FILES:
        for name in names_of(file):
            try:
                graph = trace(file, name).graph
            except ShardwrightError as error:
                print(f"{name}: {error}", flush=True)
                continue
            plan = make_plan(graph, row, precision=PRECISIONS[graph.dtype])
            emit(plan, graph, folder / name, prediction=None, plan_yaml="format: 1\n")
            (folder / name / DTYPE_FILE).write_text(graph.dtype)
            print(f"{name}: {graph.dtype}", flush=True)


def run(folder: Path, output: Path, processes: int) -> int:
    """Train every program on both devices, some at a time; write and print what differs."""
    with tempfile.TemporaryDirectory() as gradients:
        found = _train_all(folder, Path(gradients), processes)
        names = sorted({name for name, _ in found})
        results = {name: _compare(folder / name, {d: found[name, d] for d in DEVICES}, Path(gradients)) for name in names}
    output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    wrong = {name: result for name, result in results.items() if not result["right"]}
    print(f"{len(results)} models, {len(results) - len(wrong)} of them as on the CPU")
    for name, result in wrong.items():
        print(f"{name}: {result}")
    return 1 if wrong else 0


def _train_all(folder: Path, gradients: Path, processes: int) -> dict[tuple[str, str], Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.pipelining", "torch.utils.checkpoint"])
    programs = sorted(path.parent for path in folder.glob("*/train.py"))
    left = [(program, device) for program in programs for device in DEVICES]
    running: dict[Connection, tuple[tuple[str, str], BaseProcess, float]] = {}
    found: dict[tuple[str, str], Any] = {}
    while left or running:
        while left and len(running) < processes:
            program, device = left.pop(0)
            here, there = context.Pipe(duplex=False)
            process: BaseProcess = context.Process(target=_train, args=(program, device, gradients, there))
            process.start()
            there.close()
            running[here] = (program.name, device), process, time.monotonic()
        ready = wait(list(running), timeout=1.0)
        for here, (case, child, begin) in list(running.items()):
            if here in ready or time.monotonic() - begin > CASE_LIMIT_S:
                found[case] = _answer(here) if here in ready else {"failed": f"took more than {CASE_LIMIT_S:.0f} s"}
                child.terminate()
                child.join()
                del running[here]
    return found


def _answer(here: Connection) -> Any:
    try:
        return here.recv()
    except EOFError:
        return {"failed": "ended without an answer"}


def _train(program: Path, device: str, gradients: Path, answer: Connection) -> None:
    """Two steps in a process of its own; the first one's gradients go to a file."""
    sys.path.insert(0, str(program))
    try:
        import torch
        import train  # type: ignore[import-not-found]

        from runtime import launch, loop

        torch.set_num_threads(1)
        asked = ["--steps", str(STEPS), "--dump-gradients", str(gradients / f"{program.name}.{device}")]
        trainer = loop.Trainer(train.build(device), launch.parse_options(asked, **train.DEFAULTS))
        answer.send({"losses": [trainer.step()[0] for _ in range(STEPS)]})
    except Exception as error:  # noqa: BLE001 - whatever it is belongs to this program
        answer.send({"failed": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})


def _compare(program: Path, found: Mapping[str, Any], gradients: Path) -> dict[str, Any]:
    """The losses on both devices, and the gradient that is furthest off."""
    failed = {device: outcome for device, outcome in found.items() if "failed" in outcome}
    if failed:
        return {"right": False, **failed}
    import torch

    there, here = (torch.load(gradients / f"{program.name}.{device}", map_location="cpu") for device in DEVICES)
    largest = max(float(value.abs().max()) for value in here.values() if value.numel())
    off, parameter = max(
        (float((value.double() - there[name].double()).abs().max()) / max(float(value.abs().max()), 1e-3 * largest), name)
        for name, value in here.items() if value.numel()
    )
    dtype = (program / DTYPE_FILE).read_text()
    losses = {device: found[device]["losses"] for device in DEVICES}
    return {"dtype": dtype, "losses": losses, "gradient": off, "parameter": parameter, "right": off <= WORST[dtype]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("prepare", help="emit every model").add_argument("folder", type=Path)
    running = commands.add_parser("run", help="train every program on the accelerator and on the CPU")
    running.add_argument("folder", type=Path)
    running.add_argument("-o", "--output", type=Path, required=True)
    running.add_argument("--processes", type=int, default=14)
    options = parser.parse_args()
    if options.command == "prepare":
        prepare(options.folder)
        return 0
    return run(options.folder.resolve(), options.output, options.processes)


if __name__ == "__main__":
    sys.exit(main())
