"""One rank of a measurement: a process that times every probe together with the others and reports each as it ends."""

from __future__ import annotations

import datetime
import gc
import resource
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

from .clock import burst_s, call_s, exchange_s, host_s, sustained_s
from .settings import Probe, Settings

Message = tuple[str, Any]
"""``("facts", ...)`` once, then (``"probe"``, (probe, seconds)) for each, then ``("done", None)``; or ``("error", line)``."""


def run(rank: int, settings: Settings, probes: tuple[Probe, ...], address: str, report: Connection) -> None:
    """The process's main function. ``address``: a file that the ranks meet at."""
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        device = _device(rank, settings)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", init_method=f"file://{address}", rank=rank,
            world_size=settings.ranks, timeout=datetime.timedelta(minutes=5),
        )
        report.send(("facts", _facts(device)))
        for probe, seconds in _rounds(settings, probes, device):
            report.send(("probe", (probe, seconds)))
        report.send(("done", None))
        dist.destroy_process_group()
    except Exception as error:  # whatever it is, the user sees one line of the parent's
        report.send(("error", f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from error


def _device(rank: int, settings: Settings) -> Any:
    import torch

    return torch.device("cuda", rank) if settings.device == "cuda" else torch.device("cpu")


def _facts(device: Any) -> dict[str, Any]:
    """What this process knows of its device."""
    import torch

    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        torch.ones(1, device=device)
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info(device)
        return {
            "chip": properties.name, "memory_bytes": total, "reserve_bytes": total - free, "torch": torch.__version__,
            "training_dtype": "bfloat16" if torch.cuda.is_bf16_supported() else "float16",
        }
    return {
        "chip": "", "memory_bytes": 0, "reserve_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "torch": torch.__version__, "training_dtype": "float32",
    }


def _rounds(settings: Settings, probes: tuple[Probe, ...], device: Any) -> Iterator[tuple[Probe, float]]:
    """Every probe once a round, so that a disturbance of some seconds spoils one of a probe's values only."""
    import torch
    import torch.distributed as dist

    from .exchanges import group_of
    from .kernels import synchronise

    groups = {size: group_of(size) for size in sorted({p.sizes[1] for p in probes if _exchanges(p)})}
    flag = torch.zeros((), device=device)

    def agree(value: float) -> float:
        flag.fill_(value)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return float(flag)

    for _ in range(settings.rounds):
        for probe in probes:
            agree(0.0)
            yield probe, _probe_s(probe, settings, device, groups, agree)
            gc.collect()
            synchronise(device)


def _probe_s(
    probe: Probe, settings: Settings, device: Any, groups: Mapping[int, Any], agree: Callable[[float], float]
) -> float:
    from .exchanges import prepare_exchange
    from .kernels import prepare

    if _exchanges(probe):
        call = prepare_exchange(probe, groups[probe.sizes[1]], device)
        return exchange_s(call, settings, agree) / (2 if probe.subject == "send" else 1)
    if probe.subject == "hook":
        return _hook_s(settings, device)
    if probe.subject in ("host", "burst", "sustained"):
        return _block_s(probe, settings, device)
    call, parts = prepare(probe, device)
    return call_s(call, settings) / parts


def _exchanges(probe: Probe) -> bool:
    return probe.subject in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def _block_s(probe: Probe, settings: Settings, device: Any) -> float:
    """``host``: of one block's passes, on the host; else one block's passes on the device."""
    from .block import SMALL_BLOCK, SMALL_BLOCKS, passes

    if probe.subject == "host":
        return host_s(passes(SMALL_BLOCK, SMALL_BLOCKS, device), settings) / SMALL_BLOCKS
    return (burst_s if probe.subject == "burst" else sustained_s)(passes(probe.sizes, 1, device), settings)


def _hook_s(settings: Settings, device: Any) -> float:
    """What a wrapped block's pass takes beside its kernels; on CUDA: of the host."""
    from torch.distributed.device_mesh import DeviceMesh

    from .kernels import hooks

    ranks = [[rank] for rank in range(settings.ranks)]
    mesh = DeviceMesh(device.type, ranks, mesh_dim_names=("rank", "alone"))["alone"]
    wrapped, plain, passes = hooks(mesh, device)
    once = host_s if device.type == "cuda" else call_s
    return max(0.0, once(wrapped, settings) - once(plain, settings)) / passes


