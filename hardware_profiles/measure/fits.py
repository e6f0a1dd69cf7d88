"""From seconds to the parameters of the cost models' forms. Every form is affine in work, so that a larger call never takes
less time; coefficients are least squares of relative errors with none below zero."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import geometric_mean

import numpy
from numpy.typing import NDArray

from .settings import Observation, Probe, Subject

_TILES = (1, 4, 8, 16, 32, 64, 128, 256)
_ATTENTION_TILES = (1, 32, 64, 128, 256, 512)
_HALF_HEADS = (0.0, 4.0, 8.0, 16.0, 22.0, 32.0, 48.0, 64.0, 96.0, 128.0)
REFERENCE_HEAD = 128
"""Head size at which the share of the peak that attention reaches is stated."""
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5
"""Matrix products of fused attention (Dao 2022, algorithms 1 and 4)."""
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_TENSORS = 3
"""x, y and their sum: what a stream moves."""
_IRREGULAR_TENSORS = 2
"""What is read and what is written; the table that it is multiplied by is small."""


@dataclass(frozen=True, slots=True)
class ProductFit:
    """``best_flops_s``: the quickest product, or what the curve tends to; the rest as in
    :class:`~hardware_profiles.chip.EfficiencyCurve`; ``error``: mean relative error of the form over its products."""

    best_flops_s: float
    maximum: float
    half_work_flops: float
    half_dim: float
    tile: int
    error: float


@dataclass(frozen=True, slots=True)
class AttentionFit:
    """Shares of the peak with heads of 128, the head size whose softmax costs as much as its products, the keys that a causal
    kernel computes at once."""

    forward: float
    backward: float
    half_head: float
    tile: int
    error: float


@dataclass(frozen=True, slots=True)
class StreamFit:
    """``best_bytes_s``: the quickest size; ``efficiency``: what of it large tensors reach; ``half_bytes``; ``error``."""

    best_bytes_s: float
    efficiency: float
    half_bytes: float
    error: float


@dataclass(frozen=True, slots=True)
class LinkFit:
    """``start_s``: of a call; ``latency_s``: of a step between two ranks; ``bytes_s`` one way; ``send``: what a send takes of
    what the form says."""

    start_s: float
    latency_s: float
    bytes_s: float
    send: float
    error: float


def non_negative(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[tuple[float, ...], float]:
    """Coefficients >= 0 of ``columns`` that give ``seconds`` (all > 0) with the least sum of squared relative errors, and the
    mean of the absolute ones. The best of all sets of columns is found by trying them (there are at most four columns)."""
    times = numpy.asarray(seconds, dtype=float)
    scaled = numpy.asarray(columns, dtype=float) / times
    best: tuple[float, NDArray[numpy.float64]] | None = None
    for count in range(1, len(columns) + 1):
        for chosen in combinations(range(len(columns)), count):
            part, *_ = numpy.linalg.lstsq(scaled[list(chosen)].T, numpy.ones(len(times)), rcond=None)
            if part.min() < 0:
                continue
            whole = numpy.zeros(len(columns))
            whole[list(chosen)] = part
            residual = float(numpy.sum((whole @ scaled - 1) ** 2))
            if best is None or residual < best[0] * (1 - 1e-9):
                best = residual, whole
    assert best is not None, "a single positive column always has a coefficient"
    return tuple(float(value) for value in best[1]), float(numpy.mean(numpy.abs(best[1] @ scaled - 1)))


def fit_products(observations: Sequence[Observation], launch_s: float) -> ProductFit:
    """The efficiency curve of one dtype's products. Of what a call takes to start, the part beyond the launch counts."""
    best = max(2.0 * _volume(item.probe.sizes) / item.seconds for item in observations)
    fits = [_products_with_tile(observations, launch_s, tile, best) for tile in _TILES]
    return min(fits, key=lambda fit: (round(fit.error, 3), fit.tile))


def _products_with_tile(observations: Sequence[Observation], launch_s: float, tile: int, best: float) -> ProductFit:
    flops, by_dim = [], []
    for item in observations:
        m, n, k = item.probe.sizes
        rows, columns = -(-m // tile) * tile, -(-n // tile) * tile
        flops.append(2.0 * rows * columns * k)
        by_dim.append(flops[-1] / min(rows, columns, k))
    seconds = [item.seconds for item in observations]
    (rate, dim, start), error = non_negative((flops, by_dim, [1.0] * len(flops)), seconds)
    rate = rate or dim / max(max(item.probe.sizes) for item in observations) or 1 / best
    best = max(best, 1 / rate)
    maximum = 1 / (rate * best)
    return ProductFit(best, maximum, max(0.0, start - launch_s) / rate, dim / rate, tile, error)


def _volume(sizes: Sequence[int]) -> float:
    return float(numpy.prod([float(size) for size in sizes]))


def fit_attention(observations: Sequence[Observation], peak: float) -> AttentionFit:
    """Shares, half head and causal tile that agree best with forward and backward together."""
    trials = [_attention_with(observations, peak, tile, half) for tile in _ATTENTION_TILES for half in _HALF_HEADS]
    return min(trials, key=lambda fit: (round(fit.error, 3), fit.tile, fit.half_head))


def _attention_with(observations: Sequence[Observation], peak: float, tile: int, half_head: float) -> AttentionFit:
    shares: dict[Subject, float] = {}
    errors: list[float] = []
    for subject in ("attention", "attention_backward"):
        needed, taken = [], []
        for item in observations:
            if item.probe.subject == subject:
                head = item.probe.sizes[3]
                needed.append(attention_flops(item, tile) * (1 + half_head / head) / (1 + half_head / REFERENCE_HEAD) / peak)
                taken.append(item.seconds)
        (inverse,), error = non_negative((needed,), taken)
        shares[subject] = min(1.0, 1 / inverse)
        errors.append(error)
    return AttentionFit(shares["attention"], shares["attention_backward"], half_head, tile, sum(errors) / len(errors))


def attention_flops(item: Observation, tile: int) -> float:
    """FLOPs of one attention probe as executed: under a causal mask a query's keys up to the diagonal, in whole tiles."""
    batch, heads, length, head, causal = item.probe.sizes
    pairs: int = length * length
    if causal:
        pairs = sum(min(tile, length - first) * min(length, first + tile) for first in range(0, length, tile))
    products = FORWARD_PRODUCTS if item.probe.subject == "attention" else BACKWARD_PRODUCTS
    return 2.0 * products * batch * heads * head * pairs


def fit_stream(observations: Sequence[Observation], launch_s: float) -> StreamFit:
    """Memory bandwidth: a rate for large tensors and the bytes at half of it, beyond the launch."""
    moved = [float(_TENSORS * _BYTES[item.probe.dtype] * item.probe.sizes[0]) for item in observations]
    seconds = [item.seconds for item in observations]
    best = max(size / item.seconds for size, item in zip(moved, observations, strict=True))
    (rate, start), error = non_negative((moved, [1.0] * len(moved)), seconds)
    rate = rate or 1 / best
    best = max(best, 1 / rate)
    return StreamFit(best, 1 / (rate * best), max(0.0, start - launch_s) / rate, error)


def fit_irregular(observations: Sequence[Observation], stream: StreamFit) -> float:
    """Share of what large tensors reach that a kernel reaches whose operand does not lie side by side."""
    item = observations[0]
    rate = _IRREGULAR_TENSORS * _BYTES[item.probe.dtype] * item.probe.sizes[0] / item.seconds
    return min(1.0, rate / (stream.best_bytes_s * stream.efficiency))


def block_products_s(sizes: Sequence[int], products: ProductFit, attention: AttentionFit) -> float:
    """Seconds that the products of a block's passes and its attention take by their fits. ``sizes``: of a ``burst`` probe."""
    batch, tokens, hidden, heads, inner = sizes
    rows, rate = batch * tokens, products.best_flops_s * products.maximum
    seconds = 0.0
    for n, k in ((3 * hidden, hidden), (hidden, hidden), (inner, hidden), (hidden, inner)):
        seconds += 3 * (2.0 * rows * n * k * (1 + products.half_dim / min(rows, n, k)) + products.half_work_flops) / rate
    head = hidden // heads
    small = (1 + attention.half_head / head) / (1 + attention.half_head / REFERENCE_HEAD)
    subjects: tuple[tuple[Subject, float], ...] = (
        ("attention", attention.forward), ("attention_backward", attention.backward)
    )
    for subject, share in subjects:
        probe = Probe(subject, (batch, heads, tokens, head, 1))
        seconds += attention_flops(Observation(probe, 0.0), attention.tile) * small / (share * products.best_flops_s)
    return seconds


def fit_clock(burst_s: float, sustained_s: float, products_s: float) -> float:
    """Share of their short calls' rates that products keep where a chip has no rest: ``products_s`` of ``burst_s`` are theirs,
    and what ``sustained_s`` is more is too (what memory bounds keeps its rate)."""
    return min(1.0, products_s / max(products_s + sustained_s - burst_s, 1e-9))


def fit_function(observations: Sequence[Observation]) -> float:
    """Seconds an element: the slope between a small call and a large one."""
    small, large = sorted(observations, key=lambda item: item.probe.sizes[0])
    elements = large.probe.sizes[0] - small.probe.sizes[0]
    return max(large.seconds - small.seconds, 0.0) / elements


def fit_link(observations: Sequence[Observation], *, scatter_is_sum: bool) -> LinkFit:
    """One link for all collectives: a ring's steps and bytes on the wire (Thakur 2005); sends take a share of that.
    ``scatter_is_sum``: the library reduce-scatters by an all-reduce."""
    collectives = [item for item in observations if item.probe.subject != "send"]
    hops, wire = zip(*(_ring(item, scatter_is_sum) for item in collectives), strict=True)
    columns = ([1.0] * len(hops), hops, wire)
    (start, latency, inverse), error = non_negative(columns, [item.seconds for item in collectives])
    best = max(moved / item.seconds for moved, item in zip(wire, collectives, strict=True))
    rate = 1 / inverse if inverse else best
    sends = [item for item in observations if item.probe.subject == "send"]
    shares = [item.seconds / (start + latency + item.probe.sizes[0] / rate) for item in sends]
    return LinkFit(start, latency, rate, geometric_mean(shares) if shares else 1.0, error)


def _ring(item: Observation, scatter_is_sum: bool) -> tuple[float, float]:
    """(steps, bytes on the wire of one rank) of a collective whose input on one rank has the probe's bytes."""
    size, ranks = item.probe.sizes
    rings: dict[Subject, Callable[[], tuple[float, float]]] = {
        "all_reduce": lambda: (2.0 * (ranks - 1), 2 * (ranks - 1) / ranks * size),
        "all_gather": lambda: (ranks - 1.0, (ranks - 1.0) * size),
        "reduce_scatter": lambda: (ranks - 1.0, (ranks - 1) / ranks * size),
        "all_to_all": lambda: (1.0, (ranks - 1) / ranks * size),
        "send": lambda: (1.0, float(size)),
    }
    subject: Subject = item.probe.subject
    return rings["all_reduce" if subject == "reduce_scatter" and scatter_is_sum else subject]()
