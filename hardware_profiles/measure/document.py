"""A measurement as the text of a hardware profile, read back before anyone else sees it."""

from __future__ import annotations

from typing import Any

from hardware_profiles.reader import parse_yaml, read_document
from hardware_profiles.yaml_text import dump

from .fits import (
    AttentionFit,
    LinkFit,
    ProductFit,
    StreamFit,
    block_products_s,
    fit_attention,
    fit_clock,
    fit_function,
    fit_irregular,
    fit_link,
    fit_products,
    fit_stream,
)
from .settings import Machine, Measurement, Observation

_DIGITS = 4
BLOCK_OPERATIONS = 14 + 18
"""Of a :class:`hardware_profiles.measure.block.Block`, forward and backward, as the planner counts operations of a graph."""


def profile_text(measurement: Measurement, name: str) -> str:
    """The YAML of profile ``name``; every number is of kind ``measured`` and says by which command, when and on what."""
    machine = measurement.machine
    note = _Note(machine)
    launch_s = _only(measurement, "launch")
    content: dict[str, Any] = {
        "name": name, "description": _description(machine), "devices_per_node": machine.ranks, "nodes": 1,
        "chip": _chip(measurement, note, launch_s), "links": {"node": _link(measurement, note)},
    }
    text = dump(content, width=1000, default_flow_style=None, allow_unicode=True)
    read_document(parse_yaml(text, name), name)
    return text


def origin(machine: Machine) -> str:
    """What the source of every number begins with."""
    command = f"shardwright profile --ranks {machine.ranks}"
    return f"{command}, torch {machine.torch_version}, {machine.date}, {machine.chip}"


class _Note:
    """Writes a number with its unit and where it comes from."""

    def __init__(self, machine: Machine) -> None:
        self._origin = origin(machine)

    def __call__(self, value: float, unit: str, how: str) -> dict[str, object]:
        return {
            "value": float(f"{value:.{_DIGITS}g}"), "unit": unit, "kind": "measured", "source": f"{self._origin}: {how}",
        }


def _description(machine: Machine) -> str:
    if machine.device == "cuda":
        return f"{machine.ranks} x {machine.chip}, one process each"
    return (
        f"{machine.ranks} processes of one thread each on {machine.cores:g} cores; a device is one process on its share of them"
    )


def _only(measurement: Measurement, *subjects: Any) -> float:
    found = measurement.of(*subjects)
    return found[0].seconds if found else 0.0


def _chip(measurement: Measurement, note: _Note, launch_s: float) -> dict[str, Any]:
    machine = measurement.machine
    products = _by_dtype(measurement)
    curves = {dtype: fit_products(items, launch_s) for dtype, items in products.items()}
    first = next(iter(curves.values()))
    attention = fit_attention(measurement.of("attention", "attention_backward"), first.best_flops_s)
    stream = fit_stream(measurement.of("stream"), launch_s)
    clock = _clock(measurement, first, attention)
    share = "" if machine.device == "cuda" else ", its share of the cores"
    chip: dict[str, Any] = {
        "name": machine.chip,
        "memory": note(machine.memory_bytes / 2**30, "GiB", f"what the system has, for each of {machine.ranks}"
                       if machine.device == "cpu" else "the device's own"),
        "memory_bandwidth": note(stream.best_bytes_s / 1e9, "GB/s", f"best of x + y of any size{share}"),
        "training_dtype": machine.training_dtype,
        "peak": {dtype: note(fit.best_flops_s / 1e12, "TFLOP/s", f"quickest product, or what the curve tends to{share}")
                 for dtype, fit in curves.items()},
        "gemm": {dtype: _curve(fit, note, len(products[dtype]), clock) for dtype, fit in curves.items()},
        **_attention(attention, note, clock), **_stream(stream, note), **_irregular(measurement, stream, note),
        "launch": note(launch_s * 1e6, "us", "mean of 100 kernels of 64 elements, half of them in a backward pass"
                       if machine.device == "cpu" else "mean of 100 kernels of a captured graph"),
        "reserve": note(machine.reserve_bytes / 2**20, "MiB", "resident set of a process that has joined its group"
                        if machine.device == "cpu" else "memory in use before the first tensor"),
    }  # fmt: skip
    if measurement.of("hook"):
        how = "a pass of a block of 12 parameters with FSDP2, less one without"
        chip["hook"] = note(_only(measurement, "hook") * 1e6, "us", how)
    if measurement.of("host"):
        how = f"forward and backward of a transformer block of small tensors, {BLOCK_OPERATIONS} operations"
        chip["host"] = note(_only(measurement, "host") / BLOCK_OPERATIONS * 1e6, "us", how)
    functions = _functions(measurement, note)
    return {**chip, "functions": functions} if functions else chip


def _by_dtype(measurement: Measurement) -> dict[str, list[Observation]]:
    found: dict[str, list[Observation]] = {}
    for item in measurement.of("gemm"):
        found.setdefault(item.probe.dtype, []).append(item)
    return found


def _clock(measurement: Measurement, products: ProductFit, attention: AttentionFit) -> float:
    """What products keep of their rates where the chip has no rest; 1 where that was not measured."""
    sustained = measurement.of("sustained")
    if not sustained:
        return 1.0
    products_s = block_products_s(sustained[0].probe.sizes, products, attention)
    return fit_clock(_only(measurement, "burst"), sustained[0].seconds, products_s)


def _kept(clock: float) -> str:
    return "" if clock == 1 else f", times {clock:.3f}: what products keep of it in a block's passes that go on without a rest"


def _curve(fit: ProductFit, note: _Note, count: int, clock: float) -> dict[str, object]:
    how = f"{count} shapes, forward and both gradients, within {fit.error:.1%} on average"
    return {
        "maximum": note(fit.maximum * clock, "ratio", how + _kept(clock)),
        "half_work": note(fit.half_work_flops / 1e9, "GFLOP", how),
        "half_dim": note(fit.half_dim, "elements", how), "tile": note(fit.tile, "elements", how),
    }


def _attention(fit: AttentionFit, note: _Note, clock: float) -> dict[str, object]:
    how = f"causal scaled_dot_product_attention, heads of 128, within {fit.error:.1%} on average"
    return {
        "attention_forward": note(fit.forward * clock, "ratio", how + _kept(clock)),
        "attention_backward": note(fit.backward * clock, "ratio", how + _kept(clock)),
        "attention_half_head": note(fit.half_head, "elements", how), "attention_tile": note(fit.tile, "elements", how),
    }


def _stream(fit: StreamFit, note: _Note) -> dict[str, object]:
    how = f"x + y into a new tensor, operands out of cache, within {fit.error:.1%} on average"
    return {
        "memory_efficiency": note(fit.efficiency, "ratio", how), "memory_half": note(fit.half_bytes / 1e3, "kB", how),
    }


def _irregular(measurement: Measurement, stream: StreamFit, note: _Note) -> dict[str, object]:
    found = measurement.of("irregular")
    if not found:
        return {}
    how = "[2, 16, tokens, 128] of which heads lie inside tokens, times [tokens, 128]"
    return {"memory_irregular": note(fit_irregular(found, stream), "ratio", how)}


def _functions(measurement: Measurement, note: _Note) -> dict[str, object]:
    names = dict.fromkeys(item.probe.name for item in measurement.of("function"))
    found = measurement.of("function")
    return {
        name: note(
            fit_function([item for item in found if item.probe.name == name]) * 1e9, "ns/element",
            "slope between a small call and a large one",
        )
        for name in names
    }


def _link(measurement: Measurement, note: _Note) -> dict[str, Any]:
    machine = measurement.machine
    observations = measurement.of("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
    gloo = machine.device == "cpu"
    sent = "sends to a neighbour and back, of what the collectives' form says"
    if not measurement.of("send"):
        sent = "no send was measured: as the collectives' form says"
    if observations:
        fit = fit_link(observations, scatter_is_sum=gloo)
        how = f"collectives of {machine.ranks} ranks and of pairs, within {fit.error:.0%} on average"
    else:
        stream = fit_stream(measurement.of("stream"), 0.0)
        fit, how = LinkFit(0.0, 0.0, stream.best_bytes_s * stream.efficiency, 1.0, 0.0), "one rank alone: its own memory"
    return {
        "technology": "gloo over loopback" if gloo else "NCCL between the GPUs of a node", "size": machine.ranks,
        "bandwidth": note(fit.bytes_s / 1e9, "GB/s", how), "latency": note(fit.latency_s * 1e6, "us", how),
        "efficiency": note(1.0, "ratio", "the bandwidth is what was reached"),
        "start": note(fit.start_s * 1e6, "us", how),
        "send": note(fit.send, "ratio", sent),
        "reduce_scatter": "all_reduce" if gloo else "ring",
    }
