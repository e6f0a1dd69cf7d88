"""Rehearsal: the program's real training step, as any rank of its real world, on fake tensors and a fake process group.

    python -m runtime.rehearsal --rank 0 --rank 640        # in the program's directory; prints one JSON object

Nothing is computed, sent or allocated: tensors are torch's fake ones (shapes, dtypes and storages without memory, on the
CPU), and the process group is torch's ``fake`` backend, which answers at once whatever the world's size. All else is the
program itself: its stages, FSDP2, torch's pipeline schedule, AdamW. What it asks the process groups for and what it
allocates is recorded over its second step, which is like every later one: the optimizer's state exists, FSDP2's and the
schedule's buffers too. ``--kernels cuda``: what norms, dropout and attention keep is what they keep there
(runtime/rehearsal_kernels.py).

Every number that the program reads from a fake tensor (the weight, the loss, the norm) is 1.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor, debug
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from . import launch
from .data import make_batches
from .loop import Program, Trainer
from .rehearsal_kernels import accelerator_kernels
from .rehearsal_length import lengths, nearest, on_line
from .rehearsal_memory import StorageLog
from .rehearsal_traffic import NAMESPACES, Call, Traffic
from .rehearsal_watch import claim_state, hold_constants, mark_calls, mark_passes, watch, watch_groups
from .schedule import PipelineRunner, PlainRunner, ScheduleName

_READ, _WAIT = torch.ops.aten._local_scalar_dense.default, torch.ops._c10d_functional.wait_tensor.default
_DEVICE, _GROUPED = torch.ops.prim.device.default, torch.ops.aten._grouped_mm.default


class Recorder(TorchDispatchMode):
    """Shows every operation to a traffic and a storage log; both look at this rank alone."""

    def __init__(self, traffic: Traffic, storages: StorageLog) -> None:
        super().__init__()
        self.traffic, self.storages = traffic, storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # Asked twice for every operation: the long way takes most of the time.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func is _READ:
            return 1
        if func.namespace in NAMESPACES:
            self.traffic.see(func, args)
            if func is _WAIT:
                return args[0]
        if func is _GROUPED and args[0].dtype is not torch.bfloat16:
            result: Any = _grouped_product(*args[:3])
        elif args and args[0] is None and func._schema.arguments[0].name == "grad_out":
            result = (None,) * len(func._schema.returns)  # as attention's kernels do; fake ones make gradients of none
        else:
            result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.storages.see(result)
        elif isinstance(result, (tuple, list)):
            for value in result:
                if isinstance(value, Tensor):
                    self.storages.see(value)
        return result


def _grouped_product(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """What ``grouped_mm`` or its weight's gradient returns: on fake tensors torch knows that of bfloat16 alone."""
    groups = () if right.dim() == 3 else (len(ends),)
    return left.new_empty((*groups, left.shape[0], right.shape[-1]))


def rehearse(
    train: Any, rank: int, *, every: bool = False, kernels: str = "cpu", capacity: int | None = None
) -> dict[str, Any]:
    """What ``rank`` does in a step of the program whose ``train`` module is given. ``every``: run every micro-batch;
    ``kernels``: whose, "cpu" or "cuda"; ``capacity``: bytes that torch's allocator can have of the device.

    ``{"rank", "stage", "collectives": [{"kind", "axis", "group", "bytes", "count"}], "memory_bytes": {category: bytes},
    "streams_bytes", "reserved_bytes", "flushes"}``. The last are of an accelerator: the most that each stream's storages take,
    each at its own moment, what torch's caching allocator reserves, and how often a step it has to give memory back for that
    (:mod:`runtime.rehearsal_allocator`).
    """
    (ledger,) = rehearse_ways(train, rank, (every,), kernels, capacity)
    return ledger


def rehearse_ways(
    train: Any, rank: int, ways: Sequence[bool], kernels: str = "cpu", capacity: int | None = None
) -> list[dict[str, Any]]:
    """The same by one program, one step after another: by short steps, or (True) by every micro-batch."""
    dist.init_process_group("fake", rank=rank, world_size=math.prod(train.MESH.values()), store=FakeStore())
    try:
        with Rehearsal(train, kernels, capacity) as rehearsal:
            steps = [(*rehearsal.step(every=every), *rehearsal.beside()) for every in ways]
            stage = rehearsal.trainer.world.pipeline_rank
    finally:
        dist.destroy_process_group()
        debug._clear_sharding_prop_cache()  # It returns the mesh of an earlier rank, whose groups are gone.
    return [
        {
            "rank": rank, "stage": stage, "collectives": _rows(calls), "memory_bytes": memory,
            "streams_bytes": sum(memory.values()) + apart, "reserved_bytes": sum(memory.values()) + cached,
            "flushes": flushes,
        }
        for calls, memory, apart, cached, flushes in steps
    ]


def _rows(calls: Mapping[Call, int]) -> list[dict[str, Any]]:
    return [
        {"kind": call.kind, "axis": call.axis, "group": call.group, "bytes": call.size_bytes, "count": count}
        for call, count in sorted(calls.items()) if count
    ]


class Rehearsal(ExitStack):
    """A rank of a program on fake tensors, and what watches it. The process group is joined already."""

    def __init__(self, train: Any, kernels: str, capacity: int | None) -> None:
        super().__init__()
        self.train, self.traffic, self.log = train, Traffic(train.MESH), StorageLog()
        self.kernels, self.capacity = kernels, capacity
        program: Program = train.build("cpu")
        try:
            self._begin(program)
        except BaseException:
            self.close()
            raise

    def _begin(self, program: Program) -> None:
        for mode in (FakeTensorMode(allow_non_fake_inputs=True), Recorder(self.traffic, self.log), self.log.watching_resizes()):
            self.enter_context(mode)
        if self.kernels == "cuda":
            self.enter_context(accelerator_kernels())
        self.callback(gc.enable)
        gc.disable()  # What a cycle holds would go at a moment that has to do with how many objects there are.
        hold_constants(program, self.log)
        options = launch.parse_options([], **self.train.DEFAULTS)
        self.trainer = Trainer(replace(program, recipes=None, idle={}), options)
        watch_groups(program, self.log)
        mark_passes(program.runner, self.log)
        mark_calls(self.trainer.optimizer, "step", self.log, "optimizer")
        if isinstance(program.runner, PlainRunner):
            watch(program.runner, "step", self.log, "activations")

    def step(self, *, every: bool) -> tuple[dict[Call, int], dict[str, int]]:
        """Calls with their counts, and bytes by category, of a step."""
        count = self.train.ACCUMULATION
        recorded = () if every else lengths(self.train.SCHEDULE, self.train.MESH["pipeline"], count)
        self._run(1)
        runs: list[tuple[dict[Call, int], dict[str, int]]] = []
        phases: list[list[list[dict[str, int]]]] = []
        first = 1
        for length in recorded:
            runs.append(self._run(length))
            first = first if phases else max(1, self.log.passes // 4)
            # Which phase holds the most may change with the number of micro-batches: each is drawn by itself.
            phases.append([self.log.peaks(*part) for part in self.log.phases(first)])
        calls = on_line(recorded, [run[0] for run in runs], count) if runs else None
        drawn = [on_line(recorded, nearest(each), count) for each in zip(*phases, strict=True)]
        memory = [sizes for sizes in drawn if sizes is not None]
        if calls is None or not memory or len(memory) < len(drawn):
            return self._run(count)
        return calls, max(memory, key=lambda sizes: sum(sizes.values()))

    def beside(self) -> tuple[int, int, int]:
        """What the streams of the last step have held at most, and what torch's caching allocator keeps, beyond its peak; how
        often a step makes it give memory back."""
        most, kept = sum(self.log.peak().values()), self.log.reserved(self.capacity)
        return self.log.of_streams() - most, kept.size_bytes - most, kept.flushes

    def _run(self, count: int) -> tuple[dict[Call, int], dict[str, int]]:
        """One step of ``count`` micro-batches."""
        self._resize(count)
        gc.collect()
        self.traffic.counted.clear()
        self.log.begin()
        self.trainer.step()
        claim_state(self.trainer, self.log)
        return dict(self.traffic.counted), self.log.peak()

    def _resize(self, count: int) -> None:
        """Let the next step have ``count`` micro-batches of the same size."""
        program, world = self.trainer.program, self.trainer.world
        runner = program.runner
        if isinstance(runner, PlainRunner):
            runner.microbatches = count
        elif runner.microbatches != count or not self.trainer.done:
            runner = PipelineRunner(self._schedule(count), runner.stages, count)
            watch(runner, "step", self.log, "activations")
            self._hush(runner.schedule)
        total = self.train.MICRO * count * world.data
        self.trainer.program = replace(program, runner=runner, microbatches=count, batch=total)
        self.trainer.batches = make_batches(
            program.inputs, None, self.trainer.seed, total, world.data_rank, world.data, world.device
        )

    def _schedule(self, count: int) -> ScheduleName:
        """The program's schedule; 1F1B has none for fewer micro-batches than stages, and is GPipe there."""
        name: ScheduleName = self.train.SCHEDULE
        return "gpipe" if name == "1f1b" and count < self.train.MESH["pipeline"] else name

    def _hush(self, schedule: Any) -> None:
        """A new schedule's first step makes itself known to its neighbours, which is no part of other steps, and makes the
        receive buffers."""
        for name in ("_initialize_stage", "_initialize_stages"):
            begin = getattr(schedule, name, None)
            if begin is not None:
                setattr(schedule, name, partial(self.traffic.uncounted, begin))
                watch(schedule, name, self.log, "buffers")


def main(arguments: Sequence[str] | None = None) -> None:
    """Rehearse the ranks that the command line names, one after another; print ``{"ranks": [...]}``."""
    parser = argparse.ArgumentParser(description="Record a step of this program on fake tensors.")
    parser.add_argument("--rank", type=int, action="append", required=True)
    parser.add_argument("--kernels", choices=("cpu", "cuda"), default="cpu", help="whose operations keep what they keep")
    parser.add_argument("--capacity", type=int, help="bytes that torch's allocator can have of the device")
    parser.add_argument("--every-microbatch", action="store_true", help="run all of a step, however long")
    options = parser.parse_args(arguments)
    sys.path.insert(0, "")
    torch.set_num_threads(1)
    train = importlib.import_module("train")
    ledgers = [
        rehearse(train, rank, every=options.every_microbatch, kernels=options.kernels, capacity=options.capacity)
        for rank in options.rank
    ]
    print(json.dumps({"ranks": ledgers}))


if __name__ == "__main__":
    main()
