"""What only measured profiles say: functions bound by arithmetic, causal tiles, hooks, a library's own reduce-scatter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_models.collectives import collective_s
from cost_models.compute import attention_flops, attention_s, function_s
from cost_models.spans import span_of
from hardware_profiles import Cluster, resolve_cluster
from planner.ir.plan import Mesh
from tests.costing.states import cost_state


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return resolve_cluster("dgx-a100-80gb:1")


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (7, 3), (3, 7), (128, 128), (130, 1000), (1000, 130)])
@pytest.mark.parametrize("tile", [1, 2, 16, 512])
def test_a_causal_kernel_computes_whole_tiles_of_keys(queries: int, keys: int, tile: int) -> None:
    seen = [max(0, keys - queries + row + 1) for row in range(queries)]
    pairs = sum(min(keys, -(-count // tile) * tile) for count in seen)
    found = attention_flops(2, 3, queries, keys, 16, causal=True, backward=False, tile=tile)
    assert found == 2.0 * 2 * 2 * 3 * 16 * pairs


def test_a_tile_longer_than_the_sequence_saves_nothing(cluster: Cluster) -> None:
    chip = replace(cluster.chip, attention_tile=512)
    shape = (4, 8, 256, 256, 64)
    causal, whole = (
        attention_s(chip, *shape, causal=flag, dtype="bfloat16", backward=False) for flag in (True, False)
    )
    assert causal == whole
    assert attention_s(cluster.chip, *shape, causal=True, dtype="bfloat16", backward=False) < whole


def test_heads_of_the_reference_size_take_what_the_share_says(cluster: Cluster) -> None:
    slow = replace(cluster.chip, attention_half_head=64.0)
    times = {
        head: [attention_s(chip, 8, 16, 4096, 4096, head, causal=False, dtype="bfloat16", backward=True)
               for chip in (cluster.chip, slow)]
        for head in (32, 128)
    }  # fmt: skip
    assert times[128][0] == pytest.approx(times[128][1])
    assert times[32][0] < times[32][1]


def test_a_measured_function_costs_its_elements(cluster: Cluster) -> None:
    chip = replace(cluster.chip, functions={"gelu": 1e-9}, launch_s=3e-6)
    assert function_s(chip, "gelu", 1e6) == pytest.approx(1.003e-3)


@pytest.mark.parametrize("size", [1024, 1 << 22])
def test_gloo_reduce_scatters_by_an_all_reduce(cluster: Cluster, size: int) -> None:
    link = replace(cluster.levels[0].link, reduce_scatter="all_reduce")
    own = replace(cluster, levels=(replace(cluster.levels[0], link=link), *cluster.levels[1:]))
    assert collective_s("reduce_scatter", span_of(own, 4, 1), size) == collective_s("all_reduce", span_of(own, 4, 1), size)
    assert collective_s("reduce_scatter", span_of(cluster, 4, 1), size) < collective_s("all_reduce", span_of(own, 4, 1), size)


def test_hooks_count_once_a_pass_of_a_block(cluster: Cluster) -> None:
    mesh = Mesh(1, 8, 1, 1, 1)
    with_hooks = replace(cluster, chip=replace(cluster.chip, hook_s=1e-4))
    plain, hooked = (cost_state(1 << 20, 1, chosen, mesh, "bf16", 8) for chosen in (cluster, with_hooks))
    assert hooked.forward_comm_s - plain.forward_comm_s == pytest.approx(1e-4)
    assert hooked.backward_comm_s - plain.backward_comm_s == pytest.approx(1e-4)
    assert hooked.once_comm_s == plain.once_comm_s


@pytest.mark.parametrize(("reached", "backward_s"), [(True, 1e-4), (False, 0.0)])
def test_hooks_run_around_frozen_blocks_too(cluster: Cluster, reached: bool, backward_s: float) -> None:
    mesh = Mesh(1, 8, 1, 1, 1)
    with_hooks = replace(cluster, chip=replace(cluster.chip, hook_s=1e-4))
    plain, hooked = (
        cost_state(0, 1, chosen, mesh, "bf16", 8, frozen=1 << 20, reached=reached) for chosen in (cluster, with_hooks)
    )
    assert hooked.forward_comm_s - plain.forward_comm_s == pytest.approx(1e-4)
    assert hooked.backward_comm_s - plain.backward_comm_s == pytest.approx(backward_s)
