"""Parameters: the numbers of chips, links and engines that a fit may move, and what a trial of them looks like.

A parameter is one number wherever its class uses it: the ceiling of products on every Hopper chip, the efficiency of every
InfiniBand network, the fused share of pointwise traffic of one engine with all its recipes. Few and physical: what the tables
of runs cannot tell apart is not fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hardware_profiles import Chip, Cluster, Engine, Link, engine
from hardware_profiles.engine import fitted_numbers, origin

MATMULS: Mapping[str, tuple[str, ...]] = {
    "gemm": ("bfloat16", "float16"), "gemm_float8": ("float8",), "gemm_float4": ("float4",),
}  # fmt: skip
CHIP_CLASSES: Mapping[str, tuple[str, ...]] = {
    "volta": ("V100-SXM2-16GB", "V100-SXM2-32GB", "V100-SXM3-32GB"),
    "ampere": ("A100-SXM-40GB", "A100-SXM-80GB", "A800-SXM-80GB"),
    "hopper": ("H100-SXM-80GB", "H800-SXM-80GB", "H200-SXM-141GB", "H100-SXM-96GB-500W"),
    "blackwell": ("B200-SXM-180GB", "GB200-NVL72", "B200-SXM-180GB-capped"),
    "blackwell-ultra": ("B300-SXM-288GB", "GB300-NVL72"),
    "tpu": ("TPUv3", "TPUv4", "TPUv5e", "TPUv5p"),
    "tpu-v6": ("TPUv6e", "TPU7x"),
}
"""Chips that share their fitted numbers, by class."""
CAPPED: Mapping[str, tuple[str, ...]] = {
    "hopper-500w": ("H100-SXM-96GB-500W",),
    "blackwell-capped": ("B200-SXM-180GB-capped",),
}
"""Chips of a class whose power is limited: products and attention run at a share of the class's rates, their clock's."""
MACHINES: Mapping[str, tuple[str, ...]] = {
    "gpu": ("volta", "ampere", "hopper", "blackwell", "blackwell-ultra"),
    "tpu": ("tpu", "tpu-v6"),
}
"""Classes that share what is neither a product nor attention."""
CLOCKED = (*MATMULS, "attention")
"""A chip's rates that follow its clock."""
NETWORKS: Mapping[str, tuple[str, ...]] = {
    "infiniband": ("InfiniBand HDR", "InfiniBand NDR", "InfiniBand XDR", "InfiniBand EDR", "RoCE"),
    "omni-path": ("Omni-Path",),
    "pcie": ("PCIe 4",),
    "torus": ("ICI, a ring of the torus, both ways",),
    "data-centre network": ("data-centre network",),
}
"""Links between nodes (and of tori) that share their efficiency, by technology."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """``subject``: a class of chips or links, or an engine's document (``NAME`` or ``NAME+RECIPE``); ``field``: what of it;
    ``expected``: what one would say without any run; ``spread``: how far it may plausibly lie from there, as a logarithm;
    ``low``, ``high``: what is physical. What the files have now is no part of it."""

    kind: str
    subject: str
    field: str
    expected: float
    spread: float
    low: float
    high: float

    @property
    def name(self) -> str:
        return f"{self.subject}.{self.field}"


_ENGINES: Mapping[str, tuple[float, float, float, float]] = {
    "attention_speed": (1.0, 0.25, 0.3, 1.3), "matmul_speed": (1.0, 0.4, 0.2, 1.3), "grouped_speed": (0.8, 0.3, 0.2, 1.2),
    "cast_passes": (1.5, 0.4, 0.2, 6.0), "pointwise_traffic": (0.8, 0.5, 0.1, 4.0), "host_s": (1e-5, 0.8, 1e-6, 2e-4),
    "gathers_floor": (0.4, 0.5, 0.02, 1.0), "gradients_floor": (0.4, 0.5, 0.02, 1.0), "collective_speed": (1.0, 0.8, 0.05, 1.5),
    "tensor_exposed": (0.8, 0.5, 0.05, 2.0), "sends_exposed": (0.8, 0.5, 0.05, 3.0), "step_s": (1e-2, 0.7, 2e-4, 0.05),
}  # fmt: skip
"""Of an engine's number: expected, spread, lowest, highest: the same for every engine. Others are not fitted."""
_CHIPS: Mapping[str, tuple[float, float, float, float]] = {
    "gemm": (0.72, 0.2, 0.2, 0.95), "gemm_float8": (0.6, 0.2, 0.2, 0.95), "gemm_float4": (0.45, 0.2, 0.2, 0.95),
    "attention": (0.55, 0.25, 0.1, 0.7), "attention_portable": (1.0, 0.25, 0.1, 1.0),
}  # fmt: skip
"""The same of a chip's, whatever its class."""
_FORMER = {"hopper": 0.5, "blackwell": 0.25, "blackwell-ultra": 0.25}
"""Expected of attention by a kernel that was written for Ampere, over one for the chip: with Ampere's instructions a
multiprocessor does its 2,048 FLOP a clock on later chips too, where Hopper's own do 4,096 and Blackwell's 8,192 (the peaks of
their datasheets over multiprocessors and clock; Shah 2024, FlashAttention-3, section 1, on FlashAttention-2 on an H100)."""
_CLOCK = ((500 / 700) ** (1 / 3), 0.1, 0.5, 1.0)
"""Of a chip with limited power: what switching takes grows with the clock and the square of a voltage that rises with it
(Weste and Harris 2011, CMOS VLSI Design, section 5.2), so the clock falls with the third root: of 500 of 700 W here; a limit
that nobody states is expected to be like it."""
_MACHINES: Mapping[str, tuple[float, float, float, float]] = {
    "memory_efficiency": (0.8, 0.1, 0.4, 0.95), "half_dim": (64.0, 0.6, 8.0, 512.0), "launch": (3e-6, 0.5, 2e-7, 2e-5),
}  # fmt: skip
_LINK = (0.75, 0.25, 0.1, 1.0)
_FILLING_S = {"tpu": 2e-6, "tpu-v6": 2e-6}
"""Seconds at its best rate that filling and draining a chip costs a product, where they are not a GPU's."""
_FILLING_GPU_S = 4e-6
BACKWARD_ATTENTION = 0.63 / 0.73
"""Rate of fused attention's backward pass over that of its forward pass: shares of an A100's peak (Dao 2023,
FlashAttention-2, section 4.1)."""


def parameters(chips: frozenset[str], engines: frozenset[str], links: frozenset[str]) -> tuple[Parameter, ...]:
    """The parameters that runs on these chips, engines and link technologies can tell something of."""
    from hardware_profiles import profile_names, resolve_cluster

    known: dict[str, Chip] = {}
    for name in profile_names():
        cluster = resolve_cluster(f"{name}:4096")
        known.setdefault(cluster.chip.name, cluster.chip)
    found: list[Parameter] = []
    for group, names in CHIP_CLASSES.items():
        if used := [known[name] for name in names if name in chips]:
            found += _chip_parameters(group, used[0])
    found += [Parameter("clock", group, "clock", *_CLOCK) for group, names in CAPPED.items() if chips.intersection(names)]
    for group, groups in MACHINES.items():
        if any(name in chips for part in groups for name in CHIP_CLASSES[part]):
            # One compiled program a step: what starts a kernel on a TPU hardly shows.
            fields = [field for field in _MACHINES if not (group == "tpu" and field == "launch")]
            found += [Parameter("machine", group, field, *_MACHINES[field]) for field in fields]
    for group, technologies in NETWORKS.items():
        if links.intersection(technologies):
            found.append(Parameter("link", group, "efficiency", *_LINK))
    for subject in sorted({origin(name, field) for name in engines for field in _ENGINES} - {None}, key=str):
        assert subject is not None
        for field in fitted_numbers(subject):
            if field in _ENGINES and any(origin(name, field) == subject for name in engines):
                found.append(Parameter("engine", subject, field, *_ENGINES[field]))
    return tuple(found)


def _chip_parameters(group: str, chip: Chip) -> list[Parameter]:
    found = [
        Parameter("chip", group, field, *_CHIPS[field])
        for field, dtypes in MATMULS.items() if any(dtype in chip.gemm for dtype in dtypes)
    ]
    if group in ("tpu", "tpu-v6", "volta"):
        found = [item for item in found if item.field == "gemm"]
    found.append(Parameter("chip", group, "attention", *_CHIPS["attention"]))
    if chip.attention_portable < 1:
        expected, *limits = _CHIPS["attention_portable"]
        found.append(Parameter("chip", group, "attention_portable", expected * _FORMER[group], *limits))
    return found


def half_work(subject: str, peak: float, maximum: float) -> float:
    """FLOPs of a product that takes as long to fill and drain the chip as to compute."""
    return _FILLING_S.get(subject, _FILLING_GPU_S) * peak * maximum


def product_dtypes(item: Parameter) -> tuple[str, ...]:
    """The dtypes whose products a parameter is of."""
    narrow = ("float8",) if item.field == "gemm" and item.subject.startswith("tpu") else ()
    return (*MATMULS[item.field], *narrow)


def clock_of(chip: str, values: Mapping[Parameter, float]) -> float:
    """The clock of a chip whose power is limited, over that of its class; else 1."""
    return next((value for item, value in values.items() if item.kind == "clock" and chip in CAPPED[item.subject]), 1.0)


@dataclass(frozen=True)
class Trial:
    """Values of all parameters, as the predictor takes them."""

    values: Mapping[Parameter, float]

    def change(self, cluster: Cluster) -> Cluster:
        """The cluster with the trial's numbers."""
        chip, clock = cluster.chip, clock_of(cluster.chip.name, self.values)
        levels = list(cluster.levels)
        for parameter, value in self.values.items():
            if parameter.kind == "chip" and chip.name in CHIP_CLASSES[parameter.subject]:
                chip = _with_rate(chip, parameter, value * (clock if parameter.field in CLOCKED else 1.0))
            elif parameter.kind == "machine" and any(chip.name in CHIP_CLASSES[part] for part in MACHINES[parameter.subject]):
                chip = _with_machine(chip, parameter, value)
            elif parameter.kind == "link":
                met = NETWORKS[parameter.subject]
                levels = [
                    replace(level, link=_at_efficiency(level.link, value)) if level.link.name in met else level
                    for level in levels
                ]
        return replace(cluster, chip=chip, levels=tuple(levels))

    def engine(self, name: str) -> Engine:
        """The engine called ``name`` with the trial's numbers."""
        changes: dict[str, Any] = {
            parameter.field: value for parameter, value in self.values.items()
            if parameter.kind == "engine" and origin(name, parameter.field) == parameter.subject
        }
        return replace(engine(name), **changes)


def _at_efficiency(link: Link, value: float) -> Link:
    """The link as its file says it with another efficiency: the same ``half_message``, so a quicker rate starts sooner."""
    return replace(link, efficiency=value, start_s=link.start_s * link.efficiency / value)


def _with_rate(chip: Chip, parameter: Parameter, value: float) -> Chip:
    if parameter.field == "attention":
        return replace(chip, attention_forward=value, attention_backward=value * BACKWARD_ATTENTION)
    if parameter.field == "attention_portable":
        return replace(chip, attention_portable=value)
    dtypes = product_dtypes(parameter)
    curves = {
        dtype: replace(curve, maximum=value, half_work_flops=half_work(parameter.subject, chip.peak(dtype), value))
        if dtype in dtypes else curve
        for dtype, curve in chip.gemm.items()
    }
    return replace(chip, gemm=curves)


def _with_machine(chip: Chip, parameter: Parameter, value: float) -> Chip:
    if parameter.field == "memory_efficiency":
        return replace(chip, memory_efficiency=value)
    if parameter.field == "launch":
        return replace(chip, launch_s=value)
    return replace(chip, gemm={dtype: replace(curve, half_dim=value) for dtype, curve in chip.gemm.items()})
