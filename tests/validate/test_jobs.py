"""From a row to a job: meshes, schedules, shard groups, cuts, vocabularies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hardware_profiles import cluster_from_yaml, cluster_to_yaml, resolve_cluster
from planner.ir.plan import Mesh, Schedule
from planner.validate.jobs import RowJob, row_job
from planner.validate.machines import Unpredictable
from planner.validate.prepare import stage_plans
from tests.validate import tables


def _job(**changes: str) -> RowJob:
    return row_job(tables.row(**changes))


def _cuts(job: RowJob) -> list[int]:
    return [stage.last - stage.first for stage in stage_plans(job.layers + 2, job)]


def test_degrees_become_a_mesh_and_the_batch_its_accumulation() -> None:
    experts = {"ep": "4", "moe_experts": "8", "moe_topk": "2", "kv_heads": "2"}
    job = _job(n_gpus="64", tp="4", pp="2", dp="4", cp="2", global_batch_seqs="64", **experts)
    assert job.mesh == Mesh(pipeline=2, data=4, context=2, expert=4, tensor=4)
    assert (job.batch.micro, job.batch.accumulation) == (2, 8)
    assert dict(job.shape.settings)["held"] == 2
    assert job.shape.sequence == 16 and job.sequence == 32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tp": "2"}, "not 1 device$"), ({"global_batch_seqs": "5"}, "does not divide the batch"),
        ({"chip": "abacus"}, "abacus"), ({"layers": ""}, "does not state layers"),
        ({"hidden": "66"}, "no multiple"), ({"kv_heads": "3"}, "evenly"), ({"vpp": "2"}, "at least 2 pipeline ranks"),
        ({"chip": "TPUv4", "dtype": "fp16"}, "does not compute in fp16"),
        ({"recompute": "half"}, r"^recompute 'half' is not known \(one of none, selective, full\): taken as not stated$"),
        ({"moe_experts": "2", "moe_topk": "3"}, "^moe_topk 3 is more than its 2 experts$"),
        ({"moe_experts": "2"}, "^says no moe_topk of its 2 experts$"),
    ],
)
def test_what_cannot_be_predicted_says_why(changes: dict[str, str], why: str) -> None:
    with pytest.raises(Unpredictable, match=why):
        _job(**changes)


def test_fewer_microbatches_than_stages_run_forwards_first() -> None:
    shape = {"n_gpus": "4", "pp": "4", "micro_batch": "1"}
    assert _job(**shape, global_batch_seqs="4").schedule == Schedule("1f1b")
    assert _job(**shape, global_batch_seqs="2").schedule == Schedule("gpipe")
    assert _job(**shape, global_batch_seqs="8", layers="8", vpp="2").schedule == Schedule("interleaved-1f1b", 2)


@pytest.mark.parametrize(
    ("words", "group"),
    [("none", 64), ("zero1 within 8 ranks (replicated across nodes)", 8), ("zero3 within node x DP (HSDP)", 8),
     ("zero3 (FSDP 16 x DCN-DP 4)", 16), ("zero3 (FSDP 64)", 64), ("zero3 (FSDP2)", 64),
     ("zero3 (FSDP 16 ICI x 4 DCN)", 64), ("zero3 (FSDP 16 ICI x 2 DCN)", 32)],
)
def test_shard_groups_are_read_from_the_source_s_words(words: str, group: int) -> None:
    job = _job(n_gpus="64", dp="64", micro_batch="1", global_batch_seqs="64", zero_or_fsdp=words, zero="3")
    assert job.zero_group == group


def test_layers_that_stages_divide_leave_the_ends_beside_them() -> None:
    job = _job(n_gpus="4", pp="4", global_batch_seqs="16", layers="8")
    assert _cuts(job) == [3, 2, 2, 3]


def test_layers_that_stages_do_not_divide_count_embedding_and_head() -> None:
    """Llama 3.1 405B: 126 layers in 64 stages are one layer at both ends and two in each other."""
    job = _job(n_gpus="8", pp="8", vpp="8", micro_batch="1", global_batch_seqs="8", layers="126")
    assert _cuts(job) == [2] * 64
    ends = stage_plans(128, job)
    assert (ends[0].first, ends[-1].last) == (0, 128)


def test_what_remains_goes_to_the_first_stages() -> None:
    assert _cuts(_job(n_gpus="12", pp="12", micro_batch="1", global_batch_seqs="24", layers="78")) == [7] * 8 + [6] * 4


def test_too_many_stages_are_refused() -> None:
    job = _job(n_gpus="8", pp="8", micro_batch="1", global_batch_seqs="8", layers="4")
    with pytest.raises(Unpredictable, match="too few"):
        stage_plans(6, replace(job, ends=False))


def test_megatron_pads_the_vocabulary_over_the_tensor_ranks() -> None:
    plain = dict(_job(vocab="50257").shape.settings)
    padded = dict(_job(vocab="50257", engine="megatron", n_gpus="8", tp="8").shape.settings)
    assert (plain["vocab"], padded["vocab"]) == (50257, 51200)


def test_links_are_those_that_the_row_states() -> None:
    links = {"nic_GBps_per_gpu": "6.25", "fast_domain": "4"}
    levels = _job(n_gpus="16", dp="16", micro_batch="1", global_batch_seqs="16", **links).cluster.levels
    assert levels[0].size == 4
    assert levels[1].link.bandwidth_bytes_s == 6.25e9
    assert levels[1].link.start_s == resolve_cluster("dgx-a100-80gb:2").levels[1].link.start_s


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "domain", "sizes"), [
    (8, "8", [8]), (8, "16", [8]), (8, "", [8]), (8, "4", [4, 8]), (8, "1", [1, 8]), (6, "4", [3, 6]), (16, "4", [4, 16]),
])
def test_a_fast_domain_that_is_less_than_a_profile_s_node_is_joined_by_what_the_row_states(
    devices: int, domain: str, sizes: list[int]
) -> None:
    """A DGX A100's node has 8. Beyond its domains a run has the profile's fabric at its own speed, on one node too."""
    cluster = _job(n_gpus=str(devices), dp=str(devices), fast_domain=domain, global_batch_seqs="96").cluster
    node, *outer = cluster.levels
    assert [level.size for level in cluster.levels] == sizes
    assert node.link == resolve_cluster("dgx-a100-80gb:2").levels[0].link
    fabric = replace(resolve_cluster("dgx-a100-80gb:2").levels[1].link, bandwidth_bytes_s=25e9, peer_bytes_s=25e9)
    assert [level.link for level in outer] == [fabric] * len(outer)
    assert cluster_from_yaml(cluster_to_yaml(cluster)).fingerprint == cluster.fingerprint


def test_the_axes_of_a_torus_are_not_divided_by_a_fast_domain() -> None:
    stated = {"chip": "TPUv4", "n_gpus": "4", "dp": "4", "global_batch_seqs": "8"}
    assert _job(**stated, fast_domain="2").cluster.levels == resolve_cluster("tpu-v4:1").levels


def test_an_engine_without_data_is_predicted_as_its_like_and_says_so() -> None:
    job = _job(engine="abacus", compile_or_fp8="fp8")
    assert job.engine == "torchtitan-eager+fp8"
    assert job.cautions == ("torchtitan-eager stands for the engine abacus",)
    assert _job(engine="abacus", n_gpus="2", tp="2").engine == "megatron-core"
    assert _job(engine="", chip="TPUv4").engine == "xla"
    assert _job(engine="alpa", n_gpus="2", tp="2").engine == "xla"
    assert _job(engine="other", source="Alpa paper; Figure 7", n_gpus="2", tp="2").engine == "xla"
    assert _job(engine="deepspeed", zero="3").engine == "deepspeed-zero3"
    assert _job(engine="megatron-core", compile_or_fp8="fp8-cs").cautions == ()


def test_chips_are_known_however_they_are_spaced() -> None:
    assert _job(chip="TPU v4").cluster.chip.name == _job(chip="TPUv4").cluster.chip.name


def test_a_chip_without_a_profile_is_predicted_as_its_generation_and_says_so() -> None:
    job = _job(chip="H100-PCIE-94GB")
    assert job.cluster.chip.name.startswith("H100")
    assert job.cautions == (f"{job.cluster.chip.name} stands for the chip H100-PCIE-94GB",)


@pytest.mark.parametrize(("chip", "hardware", "stands"), [
    ("A100-PCIe-80GB", "", "A100-SXM-80GB"),
    ("H100 96GB at 500W", "", "H100-SXM-96GB-500W"),
    ("TPU v5litepod-256", "", "TPUv5e"),
    ("TPUv7x", "", "TPU7x"),
    ("", "8 nodes of NVIDIA V100 32GB SXM3", "V100-SXM3-32GB"),
])
def test_of_a_generation_the_chip_that_is_called_most_alike_stands_for_another(chip: str, hardware: str, stands: str) -> None:
    job = _job(chip=chip, hardware=hardware, dtype="")
    assert job.cluster.chip.name == stands
    assert len(job.cautions) == 1 and job.cautions[0].startswith(f"{stands} stands for the chip ")


def test_a_row_without_a_dtype_computes_in_what_its_chip_trains_in() -> None:
    assert _job(chip="V100-SXM2-32GB", dtype="").precision == "fp16"
    assert _job(chip="A100-SXM-80GB", dtype="").precision == "bf16"


def test_what_the_source_does_not_say_follows_from_recipes_and_defaults() -> None:
    experts = {"moe_experts": "8", "moe_topk": "2", "recompute": "", "full_config": "0"}
    job = _job(engine="megatron-core", model="Qwen3_30B", **experts)
    assert job.recompute == "none" and dict(job.shape.settings)["head_dim"] == 128
    assert any("recipes" in caution for caution in job.cautions)
    with pytest.raises(Unpredictable, match="latents"):
        _job(engine="megatron-core", model="DeepSeekV3", **experts)
    assert _job(engine="xla", recompute="", notes="MaxText: nothing printed").recompute == "full"


def test_some_layers_may_recompute() -> None:
    job = _job(recompute="", notes="recipe recomputes 3 of 4 layers fully")
    (stage,) = stage_plans(job.layers + 2, job)
    assert [decision.recompute for decision in stage.decisions] == ["none", "full", "full", "full", "none", "none"]


def test_layers_recompute_and_the_ends_do_not() -> None:
    (stage,) = stage_plans(6, _job(recompute="full"))
    assert [decision.recompute for decision in stage.decisions] == ["none", *["full"] * 4, "none"]


@pytest.mark.parametrize(
    ("changes", "engine"),
    [({"engine": "xla", "recompute": "full", "notes": "layer input offloaded"}, "xla+offload"),
     ({"engine": "xla", "recompute": "full"}, "xla"),
     ({"engine": "deepspeed", "zero": "3", "recompute": "full"}, "deepspeed-zero3+offload"),
     ({"engine": "megatron-core", "chip": "GB200-NVL72", "layers": "80", "zero": "3", "zero_or_fsdp": "zero3 (Megatron FSDP)",
       "compile_or_fp8": "fp8"}, "megatron-core+fp8+offload40of80")],
)
def test_activations_wait_in_the_host_s_memory_where_notes_or_recipes_say_so(changes: dict[str, str], engine: str) -> None:
    assert _job(**changes).engine == engine
