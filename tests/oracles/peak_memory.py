"""Peak memory of an emitted program's real training step on the CPU: storages counted as they live.

Run as a script in a worker it is one rank of the program whose modules that worker imports: it prints the peak of a step as
JSON. :func:`measure` runs all ranks of a program.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from tests.matrix.workers import Workers

STEPS = 3
CATEGORIES = ("parameters", "working", "gradients", "optimizer", "receive", "rest")


@dataclass(frozen=True)
class Peak:
    """Bytes at the moment of the peak; where asked for, by category (``parameters``: masters; ``working``: what FSDP2 made of
    them for computing; ``gradients``: of autograd, accumulated or reduced; ``optimizer``: the moments; ``receive``: pipeline
    buffers; ``rest``: activations, their gradients, communication buffers, the batch), and of the rest by what made it."""

    total: int
    parts: Mapping[str, int] = field(default_factory=dict)
    owners: Mapping[str, int] = field(default_factory=dict)


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that are made or given while it is active, and what they are at the peak.

    ``categories``: yields (category, tensor) of what has a category now; the first name that a storage gets counts. They are
    asked at every new peak if ``trace``, which takes most of the time.
    """

    def __init__(self, categories: Callable[[], Iterator[tuple[str, Tensor]]], *, trace: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.categories, self.trace = categories, trace
        self.sizes: dict[int, int] = {}
        self.made_by: dict[int, str] = {}
        self._watched: list[weakref.finalize[Any, Any]] = []
        self.current = 0
        self.peak = Peak(0)

    def add(self, tensor: Tensor, maker: str) -> None:
        """Count a tensor's storage, once; its size anew where it was resized."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if tensor.device.type == "meta":
            return
        if key not in self.sizes:
            self._watched.append(weakref.finalize(storage, self._free, key))
            self.made_by[key] = maker
        self._resized(key, size)

    def _resized(self, key: int, size: int) -> None:
        self.current += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        if self.current > self.peak.total:
            self.peak = self._classify() if self.trace else Peak(self.current)

    def _free(self, key: int) -> None:
        self.current -= self.sizes.pop(key, 0)

    def _classify(self) -> Peak:
        left = dict(self.sizes)
        found = dict.fromkeys(CATEGORIES, 0)
        for category, tensor in self.categories():
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            found[category] += left.pop(local.untyped_storage()._cdata, 0)
        owners: dict[str, int] = {}
        for key, size in left.items():
            owners[self.made_by[key]] = owners.get(self.made_by[key], 0) + size
        found["rest"] += sum(left.values())
        return Peak(self.current, found, dict(sorted(owners.items(), key=lambda item: -item[1])[:40]))

    def __enter__(self) -> StorageTracker:
        self._resize = torch.UntypedStorage.resize_
        tracker, resize = self, torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in tracker.sizes:
                tracker._resized(storage._cdata, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *problem: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        for watched in self._watched:  # Python would hold them, and this, and the program whose storages they are, for ever.
            watched.detach()
        super().__exit__(*problem)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self.add(value, _site(func) if self.trace else "")
        return result


def _site(func: Any) -> str:
    """The operation and the innermost lines outside of torch's core that called it."""
    frame, names = sys._getframe(2), list[str]()
    while frame is not None and len(names) < 3:
        name = frame.f_code.co_filename
        if "torch/_" not in name and "torch/utils/_" not in name and "peak_memory" not in name:
            names.append(f"{Path(name).name}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return f"{func} {' '.join(names)}"


def _categories(trainer: Any, modules: Any) -> Iterator[tuple[str, Tensor]]:
    """What the parameters, gradients and moments of a rank are now."""
    from runtime.zero import parameter_groups  # The program's own, found beside its train.py.

    for module in modules:
        for child in module.modules():
            for group in parameter_groups(child) if isinstance(child, FSDPModule) else ():
                for item in group.fsdp_params:
                    yield "parameters", item._sharded_param_data
                    for tensor in getattr(item, "all_gather_outputs", ()):
                        yield "working", tensor
                    for gradient in _gradients(item):
                        yield "gradients", gradient
    for held in trainer.parameters:
        yield "parameters", held.parameter.detach()
        if held.parameter.grad is not None:
            yield "gradients", held.parameter.grad
    for shard in trainer.optimizer.shards:
        for tensor in trainer.optimizer.adamw.state[shard].values():
            yield "optimizer", tensor
    for stage in getattr(trainer.program.runner, "stages", ()):
        received = [*stage.args_recv_info.values(), *getattr(stage, "grad_recv_info", {}).values()]
        for info in (entry for entries in received for entry in entries):
            if isinstance(getattr(info, "buffer", None), Tensor):
                yield "receive", info.buffer.detach()


def _gradients(item: Any) -> Iterator[Tensor]:
    whole = getattr(item, "_unsharded_param", None)
    for tensor in (
        whole.grad if whole is not None else None, item.unsharded_accumulated_grad, item.sharded_param.grad,
    ):
        if tensor is not None:
            yield tensor


def _rank(*, trace: bool) -> Peak:
    """This rank's peak of a step once the optimizer has its moments: the lowest of ``STEPS``.

    gloo's threads let go of a finished call's tensors when they next run: on a busy machine that may be after the peak.
    """
    import torch.distributed as dist
    import train  # type: ignore[import-not-found]

    from runtime import launch
    from runtime.loop import Trainer

    dist.init_process_group("gloo")
    program = train.build("cpu")
    trainer = Trainer(program, launch.parse_options(["--steps", str(2 + STEPS)]))
    trainer.step()
    trainer.step()
    return min((_step(trainer, program.modules, trace=trace) for _ in range(STEPS)), key=lambda peak: peak.total)


def _step(trainer: Any, modules: Any, *, trace: bool) -> Peak:
    """The peak of the next step."""
    tracker = StorageTracker(lambda: _categories(trainer, modules), trace=trace)
    with tracker:
        for _, tensor in _categories(trainer, modules):
            tracker.add(tensor, "before")
        for module in modules:
            for buffer in module.buffers():
                tracker.add(buffer, "constant")
        trainer.step()
    return tracker.peak


def measure(workers: Workers, directory: Path, world: int, *, trace: bool = False) -> tuple[Peak, ...]:
    """The peaks of all ranks of the program in ``directory``. Raises AssertionError where a rank fails."""
    arguments = ["trace"] if trace else []
    outcomes = workers.run(directory.resolve(), world, arguments, script=Path(__file__).resolve(), timeout_s=600)
    for rank, outcome in enumerate(outcomes):
        assert outcome.code == 0, f"rank {rank}: {outcome.error}"
    return tuple(Peak(**json.loads(outcome.output.splitlines()[-1])) for outcome in outcomes)


if __name__ == "__main__":
    print(json.dumps(asdict(_rank(trace="trace" in sys.argv[1:]))))
