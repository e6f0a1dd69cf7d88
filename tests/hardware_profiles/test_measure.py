"""A measured profile has the form of every other, and its curves give back the machine that the seconds came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hardware_profiles import cluster_from_yaml, cluster_to_yaml, describe, resolve_cluster
from hardware_profiles.measure import Machine, Measurement, Observation, Probe, Settings
from hardware_profiles.measure.document import profile_text
from hardware_profiles.measure.fits import (
    attention_flops,
    block_products_s,
    fit_attention,
    fit_link,
    fit_products,
    fit_stream,
    non_negative,
)
from hardware_profiles.measure.probes import compute_probes, exchange_probes

CPU, CUDA = Settings(4, "cpu"), Settings(8, "cuda")
RATE, HALF_DIM, START_S, IRREGULAR, SLOWER_S = 90e9, 12.0, 3e-6, 0.3, 20.0
BYTES_S, LATENCY_S, CALL_S = 2e9, 40e-6, 25e-6


def seconds_of(probe: Probe) -> float:
    """A machine whose every call follows the forms exactly."""
    if probe.subject == "gemm":
        m, n, k = probe.sizes
        return 2.0 * m * n * k * (1 + HALF_DIM / min(m, n, k)) / RATE + START_S
    if probe.subject in ("attention", "attention_backward"):
        flops = attention_flops(Observation(probe, 0.0), 512)
        return flops * (1 + 16 / probe.sizes[3]) / (0.8 * RATE)
    if probe.subject == "stream":
        return 12 * probe.sizes[0] / 40e9 + START_S
    if probe.subject == "irregular":
        return 8 * probe.sizes[0] / (IRREGULAR * 40e9)  # Two tensors, where a stream's three take 12.
    if probe.subject == "function":
        return START_S + 0.5e-9 * probe.sizes[0]
    if probe.subject in ("launch", "hook"):
        return START_S
    if probe.subject == "host":
        return 32 * START_S
    if probe.subject in ("burst", "sustained"):
        return 1.0 if probe.subject == "burst" else 1.0 + SLOWER_S
    size, ranks = probe.sizes
    hops, wire = {
        "all_reduce": (2 * (ranks - 1), 2 * (ranks - 1) / ranks * size),
        "reduce_scatter": (2 * (ranks - 1), 2 * (ranks - 1) / ranks * size),
        "all_gather": (ranks - 1, (ranks - 1) * size),
        "all_to_all": (1, (ranks - 1) / ranks * size),
        "send": (1, size),
    }[probe.subject]
    return CALL_S + hops * LATENCY_S + wire / BYTES_S


def machine(settings: Settings) -> Machine:
    on_cpu = settings.device == "cpu"
    return Machine(
        chip="a processor: with a colon" if on_cpu else "a GPU", device=settings.device, ranks=settings.ranks,
        cores=2.0 if on_cpu else 0.0, memory_bytes=6 << 30, reserve_bytes=300 << 20,
        training_dtype="float32" if on_cpu else "bfloat16", torch_version="2.13.0", date="2026-01-02",
    )


def measured(settings: Settings, seconds: Callable[[Probe], float] = seconds_of) -> Measurement:
    probes = (*compute_probes(settings), *exchange_probes(settings))
    return Measurement(machine(settings), tuple(Observation(probe, seconds(probe)) for probe in probes))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    CPU, CUDA, Settings(1, "cpu"), Settings(1, "cuda"), Settings(3, "cpu", quick=True), Settings(2, "cpu", quick=True),
    Settings(8, "cuda", quick=True),
])  # fmt: skip
def test_the_profile_is_read_by_the_normal_reader(settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(profile_text(measured(settings), "machine"), encoding="utf-8")
    cluster = resolve_cluster(str(path))
    assert (cluster.name, cluster.devices) == ("machine", settings.ranks)
    assert resolve_cluster(f"{path}:1x1").devices == 1
    rows = describe(str(path))
    assert {row.kind for row in rows} == {"measured"}
    assert all("2026-01-02" in row.source and "torch 2.13.0" in row.source for row in rows)
    assert cluster.chip.reserve_bytes < cluster.chip.memory_bytes


def test_the_profile_gives_back_the_machine(tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(profile_text(measured(CPU), "machine"), encoding="utf-8")
    cluster = resolve_cluster(str(path))
    chip, link = cluster.chip, cluster.levels[0].link
    curve = chip.gemm["float32"]
    assert curve.tile == 1
    assert chip.peak("float32") * curve.maximum == pytest.approx(RATE, rel=2e-3)
    assert curve.half_dim == pytest.approx(HALF_DIM, rel=1e-2)
    assert chip.memory_bandwidth * chip.memory_efficiency == pytest.approx(40e9, rel=2e-3)
    assert chip.launch_s == pytest.approx(START_S)
    assert chip.hook_s == pytest.approx(START_S)
    assert chip.functions["gelu_backward"] == pytest.approx(0.5e-9, rel=1e-3)
    assert (chip.attention_tile, chip.attention_half_head) == (512, 16)
    assert link.reduce_scatter == "all_reduce"
    assert link.rate(2) == pytest.approx(BYTES_S, rel=2e-3)
    assert link.latency_s == pytest.approx(LATENCY_S, rel=1e-2)
    assert link.start_s == pytest.approx(CALL_S, rel=1e-2)


def test_kernels_that_read_views_are_a_gpus_own_number(tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    for settings, share in ((CUDA, IRREGULAR), (CPU, 1.0)):
        path.write_text(profile_text(measured(settings), "machine"), encoding="utf-8")
        assert resolve_cluster(str(path)).chip.memory_irregular == pytest.approx(share, rel=1e-2)


@pytest.mark.slow
def test_a_gpus_products_are_those_of_a_chip_without_a_rest(tmp_path: Path) -> None:
    """What a block takes longer when it goes on is its products', in all dtypes and in attention alike."""
    path = tmp_path / "machine.yaml"
    whole = measured(CUDA)
    sizes = whole.of("sustained")[0].probe.sizes
    chips = {}
    for slower_s in (SLOWER_S, 0.0, -0.5):
        items = tuple(
            replace(item, seconds=1.0 + slower_s) if item.probe.subject == "sustained" else item for item in whole.observations
        )
        path.write_text(profile_text(replace(whole, observations=items), "machine"), encoding="utf-8")
        chips[slower_s] = resolve_cluster(str(path)).chip
    rested, worked = chips[0.0], chips[SLOWER_S]
    assert chips[-0.5] == rested
    products = fit_products([item for item in whole.of("gemm") if item.probe.dtype == "bfloat16"], START_S)
    attention = fit_attention(whole.of("attention", "attention_backward"), products.best_flops_s)
    batch, tokens, hidden, _, inner = sizes
    flops = 6.0 * batch * tokens * hidden * (4 * hidden + 2 * inner)
    products_s = block_products_s(sizes, products, attention)
    assert flops / RATE < products_s < 1.2 * flops / RATE
    clock = products_s / (products_s + SLOWER_S)
    for dtype, curve in rested.gemm.items():
        assert worked.gemm[dtype].maximum == pytest.approx(curve.maximum * clock, rel=1e-3)
    assert worked.attention_backward == pytest.approx(rested.attention_backward * clock, rel=1e-3)
    assert (worked.peak_flops, worked.memory_efficiency) == (rested.peak_flops, rested.memory_efficiency)


def test_a_gpus_host_is_a_number_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    for settings, host_s in ((CUDA, START_S), (CPU, None)):
        path.write_text(profile_text(measured(settings), "machine"), encoding="utf-8")
        chip = resolve_cluster(str(path)).chip
        assert chip.host_s == (None if host_s is None else pytest.approx(host_s))
        assert chip.hook_s == pytest.approx(START_S)
        assert chip.is_host == (settings is CPU)
        assert cluster_from_yaml(cluster_to_yaml(resolve_cluster(str(path)))).chip == chip


def test_products_in_whole_tiles_are_recognised() -> None:
    def seconds(probe: Probe) -> float:
        m, n, k = probe.sizes
        return 2.0 * (-(-m // 16) * 16) * (-(-n // 16) * 16) * k / RATE

    items = [Observation(probe, seconds(probe)) for probe in compute_probes(CPU) if probe.subject == "gemm"]
    fit = fit_products([item for item in items if item.probe.dtype == "float32"], 0.0)
    assert fit.tile == 16
    assert fit.maximum * fit.best_flops_s == pytest.approx(RATE, rel=1e-3)


def test_noise_leaves_every_curve_monotone() -> None:
    noisy = measured(CPU, lambda probe: seconds_of(probe) * (1 + 0.3 * ((hash(probe.sizes) % 7) / 7 - 0.5)))
    products = fit_products([item for item in noisy.of("gemm") if item.probe.dtype == "float32"], START_S)
    assert products.half_work_flops >= 0
    assert products.half_dim >= 0
    assert 0 < products.maximum <= 1
    attention = fit_attention(noisy.of("attention", "attention_backward"), products.best_flops_s)
    assert 0 < attention.backward <= 1
    stream = fit_stream(noisy.of("stream"), START_S)
    assert stream.half_bytes >= 0
    assert 0 < stream.efficiency <= 1
    link = fit_link(noisy.of("all_reduce", "all_gather", "send"), scatter_is_sum=True)
    assert min(link.start_s, link.latency_s) >= 0
    assert link.bytes_s > 0


def test_sends_take_their_own_share_of_what_collectives_take() -> None:
    """They are no part of the fit: three times as quick, they would halve what every collective is said to take."""
    plain = fit_link(measured(CPU, seconds_of).of("all_reduce", "all_gather", "send"), scatter_is_sum=True)
    third = measured(CPU, lambda probe: seconds_of(probe) / (3 if probe.subject == "send" else 1))
    link = fit_link(third.of("all_reduce", "all_gather", "send"), scatter_is_sum=True)
    assert (link.start_s, link.latency_s, link.bytes_s) == (plain.start_s, plain.latency_s, plain.bytes_s)
    assert link.send == pytest.approx(plain.send / 3)
    assert plain.send == pytest.approx(1.0, rel=1e-3)


def test_the_best_non_negative_coefficients_are_found() -> None:
    coefficients, error = non_negative(([1.0, 2.0, 3.0], [1.0, 1.0, 1.0]), [3.0, 5.0, 7.0])
    assert coefficients == pytest.approx((2.0, 1.0))
    assert error == pytest.approx(0.0, abs=1e-12)
    coefficients, _ = non_negative(([1.0, 2.0, 3.0], [1.0, 1.0, 1.0]), [1.0, 3.0, 5.0])
    assert min(coefficients) >= 0


def test_every_probe_is_named_once() -> None:
    for settings in (CPU, CUDA, Settings(1, "cpu"), Settings(2, "cuda", quick=True)):
        probes = (*compute_probes(settings), *exchange_probes(settings))
        assert len(set(probes)) == len(probes)
    assert not exchange_probes(Settings(1, "cuda"))
    assert {probe.sizes[1] for probe in exchange_probes(CPU)} == {2, 4}
    assert {probe.sizes[1] for probe in exchange_probes(Settings(3, "cpu"))} == {3}
