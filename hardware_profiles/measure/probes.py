"""What is timed on which device. Shapes span what training runs, from products of a few kilobytes to the largest that the
time allows."""

from __future__ import annotations

from .settings import DeviceKind, Probe, Settings, Subject

FUNCTIONS = (
    "gelu", "gelu_tanh", "silu", "tanh", "exp", "sigmoid", "softmax", "layer_norm", "rms_norm", "cross_entropy_loss",
    "sum",
)  # fmt: skip
"""Operations that are bound by arithmetic where vector units are narrow, timed forward and (all but the sum) backward."""
SMALL_FUNCTION = 1 << 11
"""Elements of a call that costs little but its start."""
COLLECTIVES: tuple[Subject, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")

_PRODUCTS: dict[DeviceKind, tuple[tuple[int, int, int], ...]] = {
    "cpu": (
        (64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (1024, 256, 256),
        (1024, 768, 256), (1024, 1024, 256), (512, 2048, 512), (2048, 512, 512), (1024, 32, 512), (1024, 512, 32),
        (24, 512, 512), (1000, 172, 260), (260, 700, 516),
    ),
    "cuda": (
        (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192),
        (4096, 2048, 2048), (8192, 5120, 5120), (4096, 12288, 4096), (16384, 4096, 4096), (8192, 28672, 4096),
        (4096, 4096, 128), (8192, 128, 4096), (2000, 2056, 2056), (1032, 1000, 4096), (4100, 3000, 3080),
    ),
}  # fmt: skip
_FEW_PRODUCTS: dict[DeviceKind, tuple[tuple[int, int, int], ...]] = {
    "cpu": ((128, 128, 128), (512, 512, 512), (1024, 512, 256), (1024, 32, 512), (260, 700, 516)),
    "cuda": (
        (512, 512, 512), (2048, 2048, 2048), (8192, 4096, 4096), (8192, 8192, 8192), (4096, 4096, 128), (2000, 2056, 2056),
    ),
}  # fmt: skip
_DTYPES: dict[DeviceKind, tuple[str, ...]] = {
    "cpu": ("float32", "bfloat16", "float64"), "cuda": ("bfloat16", "float16", "float32", "float64"),
}  # fmt: skip
_ATTENTION: dict[DeviceKind, tuple[tuple[int, ...], ...]] = {
    "cpu": (
        (2, 4, 128, 32, 1), (2, 4, 256, 32, 1), (2, 4, 256, 64, 1), (1, 4, 512, 64, 1), (1, 2, 1024, 64, 1),
        (1, 2, 768, 128, 1), (1, 2, 512, 64, 0),
    ),
    "cuda": (
        (8, 16, 1024, 64, 1), (4, 16, 2048, 64, 1), (8, 16, 1024, 128, 1), (4, 32, 2048, 128, 1), (2, 32, 4096, 128, 1),
        (1, 32, 8192, 128, 1), (2, 16, 4096, 128, 0),
    ),
}  # fmt: skip
_BLOCK = (4, 2048, 4096, 32, 16384)
"""A block of a model of 7 billion parameters: on an H200 it takes 15 ms."""
_STREAMS: dict[DeviceKind, tuple[int, ...]] = {
    "cpu": (1 << 15, 1 << 16, 1 << 17, 1 << 18, 1 << 19, 1 << 20, 1 << 21),
    "cuda": (1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28),
}
FUNCTION_ELEMENTS = 1 << 18
IRREGULAR_ELEMENTS = 1 << 25
"""Enough that the start of the kernel does not count."""
_MESSAGES: dict[DeviceKind, tuple[int, ...]] = {
    "cpu": (1 << 10, 1 << 16, 1 << 18, 1 << 20, 1 << 22), "cuda": (1 << 12, 1 << 18, 1 << 21, 1 << 24, 1 << 27, 1 << 29),
}  # fmt: skip


def compute_probes(settings: Settings) -> tuple[Probe, ...]:
    """What one rank does alone; every rank does it at the same time."""
    device, few = settings.device, settings.quick
    first, *others = _DTYPES[device]
    products = _FEW_PRODUCTS[device] if few else _PRODUCTS[device]
    probes = [Probe("gemm", shape, first) for shape in products]
    probes += [Probe("gemm", shape, dtype) for dtype in others for shape in _FEW_PRODUCTS[device]]
    for shape in _ATTENTION[device][1::2] if few else _ATTENTION[device]:
        probes += [Probe("attention", shape, first), Probe("attention_backward", shape, first)]
    probes += [Probe("stream", (size,), first) for size in (_STREAMS[device][::2] if few else _STREAMS[device])]
    probes.append(Probe("launch"))
    if device == "cuda":
        probes += [Probe("irregular", (IRREGULAR_ELEMENTS,), first), Probe("host"), Probe("hook")]
        probes += [Probe("burst", _BLOCK, first), Probe("sustained", _BLOCK, first)]
    if device == "cpu":
        names = [*FUNCTIONS, *(f"{name}_backward" for name in FUNCTIONS if name != "sum")]
        sizes = (SMALL_FUNCTION, FUNCTION_ELEMENTS)
        probes += [Probe("function", (size,), first, name) for name in names for size in sizes]
        probes.append(Probe("hook"))
    return tuple(probes)


def exchange_probes(settings: Settings) -> tuple[Probe, ...]:
    """Collectives among all ranks, and among pairs of neighbours that all exchange at the same time."""
    ranks, sizes = settings.ranks, _MESSAGES[settings.device]
    if ranks == 1:
        return ()
    groups = sorted({ranks} | ({2} if ranks % 2 == 0 else set()))
    subjects = COLLECTIVES if settings.device == "cuda" or not settings.quick else COLLECTIVES[:3] + COLLECTIVES[4:]
    return tuple(
        Probe(subject, (size, group)) for group in groups for subject in subjects
        for size in (sizes[::2] if settings.quick else sizes)
        if subject != "send" or group == 2
    )
