"""Every category of a plan's memory against the rehearsal of its program: the very bytes. `benchmarks/ledger.py` does the same
over the whole matrix."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from codegen import emit
from hardware_profiles import resolve_cluster
from planner.costing import Pricing
from planner.evaluate.heap import CATEGORIES
from planner.evaluate.replay import peaks, replay
from planner.ir.graph import ModelGraph
from planner.ir.placement import BodyPlacement
from planner.ir.plan import DTYPES
from planner.placement import place_graph
from planner.placement.space import DIVIDED_STATE
from planner.trace import load_model, trace_model
from tests.matrix import regression
from tests.matrix.build import Row, label, make_plan
from tests.matrix.test_matrix import MODELS
from tests.rehearse.programs import parted_calls
from tests.rehearse.server import Server
from tests.torch_versions import flash_attention_keeps, has_no_idle_buffers, reductions_overlap, split_backward_holds
from tests.wide import wide

ROOT = Path(__file__).resolve().parent.parent.parent

CASES = [
    ("gpt", "bf16", Row()),
    wide("llama", "fp64", Row(pipeline=2, data=4, zero="mixed", recompute="full", accumulation=2)),
    wide("llama", "fp64", Row(data=4, tensor=2, sequence_parallel=True, zero=3, recompute="selective")),
    wide("llama", "fp64", Row(data=2, tensor=4, sequence_parallel=True, zero="mixed", recompute="mixed", accumulation=2)),
    ("gpt", "bf16", Row(pipeline=4, tensor=2, sequence_parallel=True, zero=2, recompute="full", accumulation=4)),
    wide("gpt", "bf16", Row(pipeline=2, data=2, tensor=2, schedule="gpipe", zero=1, recompute="selective", accumulation=2)),
    wide("gpt", "bf16", Row(pipeline=2, data=4, schedule="interleaved-1f1b", zero=3, recompute="mixed", accumulation=4)),
    wide("llama", "fp64", Row(
        pipeline=2, tensor=4, sequence_parallel=True, schedule="interleaved-zero-bubble", zero=1, accumulation=4,
    )),
    wide("llama", "fp32", Row(pipeline=2, schedule="zbv", accumulation=4, microbatch=2)),
    ("llama", "bf16", Row(data=4, zero=3, zero_group=2, accumulation=2, microbatch=2)),
    # Steps of many more micro-batches than are alive: receive buffers are taken in turns.
    ("gpt", "fp32", Row(pipeline=2, schedule="interleaved-1f1b", accumulation=16, microbatch=2)),
    wide("gpt", "bf16", Row(pipeline=4, schedule="interleaved-zero-bubble", zero=1, accumulation=24, microbatch=2)),
    wide("llama", "fp64", Row(pipeline=4, schedule="zbv", accumulation=24)),
    # More stages of a rank than torch's schedules would keep gathered.
    wide("gpt", "bf16", Row(pipeline=2, data=2, schedule="interleaved-1f1b", stages_of_rank=4, zero="mixed", accumulation=4)),
    wide("gpt", "bf16", Row(pipeline=2, data=2, schedule="interleaved-zero-bubble", stages_of_rank=4, zero=1, accumulation=4)),
    # Two moments hold equally much, and which comes first depends on the number of micro-batches.
    ("gpt", "bf16", Row(pipeline=2, schedule="zbv", accumulation=8, microbatch=2)),
    # Blocks that are not trained, parameters without dims or elements, names that mean nothing.
    ("hollow", "bf16", Row(data=2, zero=3, accumulation=2)),
    wide("frozen", "bf16", Row(pipeline=2, accumulation=2)),
    wide("frozen", "fp64", Row(data=2, zero=3, recompute="mixed", accumulation=2)),
    # Trained and frozen parameters in one block.
    ("adapted", "bf16", Row(data=2, zero=3, accumulation=2)),
    wide("adapted", "bf16", Row(pipeline=2, data=2, zero=1, accumulation=2)),
    wide("corners", "fp64", Row(tensor=2, pipeline=2, data=2, zero=1, accumulation=2)),
    ("nameless", "bf16", Row(
        tensor=2, pipeline=2, data=2, accumulation=2, zero="mixed", recompute="mixed", sequence_parallel=True,
    )),
    # Backward passes in two parts: values that are passed on, gradients in one storage, parameters without dims.
    wide("odd", "fp64", Row(tensor=2, pipeline=2, accumulation=2, schedule="zbv")),
    ("odd", "fp64", Row(tensor=2, pipeline=2, accumulation=2, schedule="interleaved-zero-bubble", microbatch=2)),
    wide("corners", "fp64", Row(pipeline=2, accumulation=4, schedule="zbv")),
    wide("corners", "fp64", Row(pipeline=2, data=2, zero=2, accumulation=2, schedule="interleaved-zero-bubble")),
    # A gradient that lies otherwise than its parameter, which is none until it is copied.
    wide("experts", "fp64", Row(pipeline=2, data=2, zero=1, accumulation=2)),
    # A peak that moves as micro-batches are added; a value that a stage's function holds to its end; tensors that lie askew.
    wide("corners", "bf16", Row(pipeline=4, tensor=2, sequence_parallel=True, schedule="gpipe", accumulation=8)),
    wide("odd", "fp64", Row(pipeline=2, accumulation=6, microbatch=2)),
    ("odd", "bf16", Row(pipeline=2, data=2, zero=3, accumulation=2, recompute="full")),
    # Blocks share a view of what the stage makes for every micro-batch.
    wide("averages", "fp32", Row(pipeline=2, data=2, accumulation=4)),
    wide("averages", "fp64", Row(pipeline=2, accumulation=4, schedule="interleaved-1f1b", recompute="mixed")),
    wide("averages", "fp64", Row(data=2, zero=3, accumulation=2, recompute="full")),
    # Backward passes in two parts of blocks whose first operations hold more in their backward pass than they return.
    wide("averages", "fp64", Row(pipeline=2, accumulation=4, schedule="zbv")),
    ("averages", "fp64", Row(pipeline=2, data=2, accumulation=4, schedule="interleaved-zero-bubble", microbatch=2)),
    wide("decays", "fp32", Row(pipeline=2, accumulation=4, schedule="zbv")),
    wide("decays", "fp64", Row(data=2, zero=2, accumulation=2, recompute="selective")),
    # Gradients that lie otherwise than their values, complex numbers, constants on the device, results that a block keeps.
    ("turned", "fp32", Row(pipeline=2, accumulation=4, schedule="zbv")),
    wide("turned", "fp64", Row(pipeline=2, accumulation=4)),
    wide("turned", "fp32", Row(data=2, zero=3, accumulation=2, recompute="selective")),
    wide("sideways", "fp64", Row(pipeline=2, accumulation=4, schedule="zbv")),
    wide("sideways", "fp32", Row(pipeline=2, accumulation=4, recompute="full")),
    # Several samples: gradients of turned values are copied where they are folded, or travel.
    ("sideways", "fp64", Row(tensor=2, pipeline=2, accumulation=4, microbatch=2, schedule="zbv")),
    wide("reading", "fp64", Row(pipeline=2, accumulation=4, microbatch=2)),
    wide("reading", "fp32", Row(pipeline=2, data=2, zero=2, accumulation=4, schedule="interleaved-1f1b")),
    wide("experts", "fp64", Row(pipeline=2, accumulation=4, microbatch=2, schedule="zbv")),
    # A bias waits for the gradient as it comes, turned by the product that follows, and the product before for a copy.
    ("soft_experts", "fp32", Row(pipeline=2, accumulation=4, microbatch=2, schedule="zbv")),
    wide("soft_experts", "fp64", Row(pipeline=2, accumulation=4, microbatch=2, schedule="interleaved-zero-bubble")),
    ("twice", "fp64", Row(data=2, zero=3, accumulation=2, recompute="selective")),
    wide("twice", "fp32", Row(pipeline=2, accumulation=4)),
    # Parameters that are read again further on, in the same block and in a later one.
    wide("scaled", "fp32", Row(pipeline=2, accumulation=4, microbatch=2, schedule="zbv")),
    wide("scaled", "fp64", Row(tensor=2, pipeline=2, accumulation=2, microbatch=2, schedule="interleaved-zero-bubble")),
    ("scaled", "bf16", Row(tensor=2, pipeline=2, data=2, zero=2, accumulation=4, schedule="zbv")),
    ("looped", "fp32", Row(pipeline=2, accumulation=4, microbatch=2, schedule="zbv")),
    # Gradients that lie in one memory, in what comes in, or over themselves are copied, by torch or behind its back.
    ("added", "fp32", Row(pipeline=2, accumulation=2, schedule="zbv")),
    wide("added", "fp32", Row(pipeline=2, accumulation=2, microbatch=2, schedule="interleaved-zero-bubble")),
    # What is drawn at random is like a value that is there, split as it is, and drawn again in recomputation.
    ("diffused", "bf16", Row(tensor=2, pipeline=2, sequence_parallel=True, accumulation=2, microbatch=2)),
    wide("diffused", "fp32", Row(pipeline=2, accumulation=4, microbatch=2, schedule="zbv")),
    wide("diffused", "fp32", Row(tensor=2, data=2, zero=2, recompute="selective", accumulation=2, microbatch=2)),
    wide("diffused", "bf16", Row(data=2, zero=3, accumulation=2, recompute="full", microbatch=2)),
    wide("summed", "fp64", Row(pipeline=2, accumulation=2, schedule="interleaved-zero-bubble")),
    ("summed", "fp64", Row(pipeline=2, accumulation=2, microbatch=2, schedule="zbv")),
    ("summed", "fp64", Row(pipeline=2, accumulation=4)),
    wide("summed", "fp64", Row(data=2, zero=1, accumulation=2)),
    # Several nodes of one block add to what waits of a later block's gradient.
    wide("unrolled", "fp32", Row(microbatch=2)),
    wide("unrolled", "fp32", Row(data=2, recompute="full", accumulation=2, microbatch=2)),
    ("unrolled", "fp32", Row(
        pipeline=2, accumulation=2, microbatch=2, schedule="interleaved-zero-bubble", stages_of_rank=1,
    )),
    wide("experts", "bf16", Row(pipeline=2, accumulation=4, microbatch=2)),
    wide("experts", "bf16", Row(data=2, zero=3, accumulation=2, recompute="full")),
    wide("translator", "fp32", Row(pipeline=4, accumulation=4)),
    ("translator", "fp32", Row(pipeline=2, data=2, zero=1, accumulation=4, schedule="interleaved-1f1b")),
    # What zbv's turn passes on lies in a receive buffer already; a unit's backward pass is over when its first block's is.
    ("reading", "fp64", Row(pipeline=2, accumulation=4, schedule="zbv")),
    wide("looped", "fp32", Row(data=2, zero=2, accumulation=2, recompute="selective")),
    # Learned matrices from the left, learned masks, complex numbers; gradients that are parts of others' storages.
    wide("mixing", "fp32", Row(pipeline=2, accumulation=4, microbatch=2)),
    ("mixing", "fp64", Row(pipeline=2, accumulation=4, schedule="zbv")),
    wide("mixing", "fp32", Row(data=2, zero=3, accumulation=2, recompute="selective", microbatch=2)),
    wide("mixing", "fp32", Row(tensor=2, accumulation=2, microbatch=2, recompute="selective")),
    ("stamped", "fp32", Row(data=2, zero=1, accumulation=2, recompute="selective")),
    wide("stamped", "fp32", Row(pipeline=2, accumulation=4)),
    wide("mirrored", "fp32", Row(data=2, zero=3, accumulation=2, recompute="full")),
    wide("mirrored", "fp64", Row(pipeline=2, accumulation=4)),
    # A unit without parameters reduces nothing, and leaves the buffer of the last reduction where it is.
    ("paired", "fp32", Row(data=2, zero=3, accumulation=2, recompute="full")),
    wide("paired", "fp32", Row(data=2, zero=2, accumulation=2, recompute="full")),
    # What is only detached gets a gradient of zeros, with which the blocks before it run.
    ("stopped", "fp32", Row(pipeline=2, accumulation=4, microbatch=2)),
    wide("stopped", "fp64", Row(data=2, zero=2, accumulation=2, recompute="full")),
    wide("stopped", "fp32", Row(data=2, zero=3, accumulation=2)),
    # What was gathered before is there until the next copies are made.
    ("probed", "fp32", Row(data=2, zero=3, accumulation=2)),
    # Blocks that read a parameter without a gradient: no part of its gradient comes from them, or waits for theirs.
    wide("looked", "fp32", Row(microbatch=2)),
    wide("looked", "fp32", Row(accumulation=2, recompute="full")),
    ("looked", "bf16", Row(data=2, zero=3, accumulation=2)),
    wide("taught", "fp32", Row()),
    ("taught", "fp32", Row(data=2, zero=2, accumulation=2, recompute="selective", microbatch=2)),
    wide("taught", "fp32", Row(data=2, zero=3, accumulation=2)),
    wide("taught_late", "fp32", Row()),
    wide("taught_late", "bf16", Row(data=2, zero=1, accumulation=2, recompute="full")),
    ("taught", "fp32", Row(
        pipeline=2, accumulation=2, microbatch=2, schedule="interleaved-zero-bubble", stages_of_rank=1,
    )),
    wide("taught_late", "fp32", Row(
        pipeline=2, accumulation=2, microbatch=2, schedule="interleaved-zero-bubble", stages_of_rank=1,
    )),
    # Recomputation stops where the last product has copied what it reads, or dropout has drawn what it multiplies by.
    ("dropped", "fp32", Row(recompute="full", microbatch=4)),
    wide("leaning", "fp32", Row(recompute="full", microbatch=4)),
    ("leaning", "bf16", Row(data=2, zero=3, recompute="full", accumulation=2, microbatch=4)),
]
SPLIT = Row(pipeline=2, accumulation=4, microbatch=2, schedule="zbv")
FIELDS = [
    # A gradient that leaves a block and that its weight part reads too.
    ("crossed", "fp32", SPLIT),
    # Operations that autograd records and forgets: no gradient comes back to them.
    wide("codes", "fp32", Row(pipeline=2, accumulation=4, microbatch=2)), ("codes", "fp32", SPLIT),
    wide("codes", "fp32", Row(tensor=2, pipeline=2, accumulation=2, microbatch=2)),
    # A recurrent cell taken apart, rows added up elsewhere.
    ("messages", "fp32", Row(pipeline=2, accumulation=4, microbatch=2)),
    wide("messages", "fp32", Row(data=2, zero=3, accumulation=2, recompute="full")),
    # A split backward pass whose group of nodes has a way between two that is not the last one's.
    ("recalled", "fp32", Row(pipeline=2, schedule="interleaved-zero-bubble", stages_of_rank=1, accumulation=1, microbatch=8)),
    # A way between two nodes of a group over nodes of others, whose weights are made of their parameters first.
    wide("recent:sphere", "fp32", SPLIT), wide("dynamics", "fp32", SPLIT),
    # A gradient that waits, and lies in memory otherwise than its value: a copy is sent back.
    ("diffusion:unet", "fp32", SPLIT),
    wide("state_space", "fp32", Row(pipeline=2, accumulation=4, microbatch=2)),
    wide("rendered", "fp32", SPLIT), wide("windows", "fp32", SPLIT),
    # What is written into a part of a spectrum.
    wide("spectrum", "fp32", Row(tensor=2, accumulation=2, microbatch=2)), wide("spectrum", "fp32", SPLIT),
    ("spectrum", "fp32", Row(data=2, zero=3, recompute="selective", accumulation=2, microbatch=2)),
    # A stream in float32 between blocks in half precision.
    wide("recent:wide_stream", "bf16", SPLIT),
    # Blocks that end in a norm: a weight part meets the hooks of their outputs, and gradients wait in half precision.
    wide("patches", "bf16", SPLIT), ("routed", "bf16", Row(
        pipeline=2, data=2, zero=2, schedule="interleaved-zero-bubble", accumulation=4, microbatch=2,
    )),
    # What the context makes on the way, and turns; gradients of blocks that come in another order; normalised weights; a batch
    # that is more than a late stage holds besides.
    wide("pictures:unfolded", "fp32", SPLIT), wide("pictures:nested", "fp32", SPLIT),
    wide("pictures:convolved", "fp32", SPLIT),
    ("pictures:funnel", "fp32", SPLIT), wide("pictures:funnel", "fp64", Row(pipeline=2, accumulation=4)),
    # Gradients that operations make row by row, of values whose dims lie otherwise; blocks that return a view.
    wide("pictures:heard", "fp32", SPLIT), wide("pictures:gridded", "fp32", SPLIT), wide("pictures:diffused", "fp32", SPLIT),
    wide("pictures:cut", "fp32", SPLIT),
    # A bias that torch adds after the product: what the product reads is there until then.
    ("drawn:1056", "fp32", Row(pipeline=2, schedule="interleaved-zero-bubble", accumulation=4, microbatch=2)),
    # The head shares a parameter with the embedding and another one with the layers: all of them are one unit.
    wide("drawn:3033", "fp32", Row(tensor=2, accumulation=4, microbatch=2, recompute="full")),
    # The most is alive while parts of a tensor are exchanged.
    wide("drawn:13", "bf16", Row(tensor=2, pipeline=2, sequence_parallel=True, schedule="gpipe", accumulation=2, microbatch=2)),
    # What goes into a recomputed region, or comes out, has a variable.
    ("recent:differential", "bf16", Row(
        tensor=2, data=2, zero=1, sequence_parallel=True, recompute="selective", accumulation=2, microbatch=2,
    )),
]


@cache
def graph_of(model: str, precision: str) -> ModelGraph:
    sequence = 20 if "gpt" in model else 24
    return trace_model(load_model(f"{MODELS}:{model}", {}, None), sequence=sequence, dtype=DTYPES[precision])


@pytest.mark.slow
@pytest.mark.parametrize(("model", "precision", "row"), CASES, ids=label)
def test_each_category_is_what_is_allocated(
    server: Server, model: str, precision: str, row: Row, tmp_path: Path
) -> None:
    if row.pipeline > 1:
        has_no_idle_buffers(model)
    compare(server, graph_of(model, precision), precision, row, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision", "row"), FIELDS, ids=label)
def test_models_of_other_fields(server: Server, name: str, precision: str, row: Row, tmp_path: Path) -> None:
    file, _, model = name.rpartition(":")
    source = load_model(f"{ROOT / 'benchmarks' / 'zoo' / (file or 'signals')}.py:make", {"name": model}, None)
    compare(server, trace_model(source, sequence=32, dtype=DTYPES[precision]), precision, row, tmp_path)


ZERO = Row(data=2, zero=3, recompute="selective", accumulation=2)
PARTED = Row(pipeline=2, schedule="zbv", accumulation=4, microbatch=2)
TENSOR = Row(tensor=2, data=2, sequence_parallel=True, zero=2, recompute="mixed", accumulation=2, microbatch=2)
KERNELS = [("gpt", "bf16", ZERO), ("llama", "fp32", PARTED), ("gpt", "bf16", TENSOR)]
MORE_KERNELS = [
    wide(model, precision, row)
    for row in (Row(microbatch=2), Row(pipeline=2, recompute="full", accumulation=4), ZERO, PARTED, TENSOR)
    for model, precision in itertools.product(("gpt", "llama"), ("bf16", "fp32")) if (model, precision, row) not in KERNELS
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "precision", "row"), [*KERNELS, *MORE_KERNELS], ids=label)
def test_an_accelerators_kernels(server: Server, model: str, precision: str, row: Row, tmp_path: Path) -> None:
    """Norms and dropout that are one kernel each, attention that keeps a seed of what it drops."""
    settings = {"hidden": 64, "heads": 4, "vocab": 512, "layers": 4} | ({"dropout": 0.1} if model == "gpt" else {})
    source = load_model(f"{ROOT / 'examples' / model}.py:{model}", settings, None)
    graph = trace_model(source, sequence=64, dtype=DTYPES[precision])
    assert {node.base for body in graph.on_accelerator.bodies for node in body.nodes if node.fused} == (
        {"layer_norm", "dropout", "scaled_dot_product_attention"} if model == "gpt"
        else {"rms_norm", "scaled_dot_product_attention"}
    )
    placements = divided(graph, row) if row.tensor > 1 else None
    compare(server, graph, precision, row, tmp_path, placements, kernels="cuda")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", wide("bf16")])
@pytest.mark.parametrize("row", [
    Row(accumulation=2, microbatch=2), Row(tensor=2, accumulation=2, microbatch=2), Row(data=2, zero=3, microbatch=3),
], ids=label)
def test_logits_of_many_pieces(server: Server, precision: str, row: Row, tmp_path: Path) -> None:
    """A vocabulary and a sequence that cross-entropy takes some rows of at a time."""
    source = load_model(f"{ROOT / 'examples' / 'gpt.py'}:gpt", {
        "vocab": 100004, "layers": 2, "hidden": 64, "heads": 2, "seq": 777,
    }, None)  # fmt: skip
    graph = trace_model(source, sequence=777, dtype=DTYPES[precision])
    compare(server, graph, precision, row, tmp_path, divided(graph, row) if row.tensor > 1 else None)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), [wide("capped", "fp32"), wide("capped", "fp64"), ("streams", "fp32")])
def test_logits_that_rule(server: Server, name: str, precision: str, tmp_path: Path) -> None:
    """The most is alive while cross-entropy over a split vocabulary has a copy of the logits."""
    row = Row(tensor=2, data=2, sequence_parallel=True, zero=1, accumulation=2, recompute="selective")
    source = load_model(f"{ROOT / 'benchmarks' / 'zoo' / 'recent.py'}:make", {"name": name}, None)
    graph = trace_model(source, sequence=32, dtype=DTYPES[precision])
    compare(server, graph, precision, row, tmp_path, divided(graph, row, split=True))


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "precision", "row"), [
    ("several", "fp32", Row(data=2, zero=3, recompute="full", accumulation=2, microbatch=3)),
    wide("several", "fp64", Row(accumulation=2)),
    wide("several", "bf16", Row(pipeline=2, accumulation=4, microbatch=2, schedule="zbv")),
    ("by_class", "fp32", Row(tensor=2, accumulation=2, microbatch=3)),
    wide("by_class", "fp64", Row(pipeline=2, data=2, accumulation=4, microbatch=2)),
], ids=label)
def test_averages_that_a_loss_adds(server: Server, loss: str, precision: str, row: Row, tmp_path: Path) -> None:
    """Each is scaled by a share, which is an input of the batch, and a weight of the step's all-reduce."""
    source = replace(load_model(f"{regression.__file__}:regression", {}, None), loss=getattr(regression, loss))
    graph = trace_model(source, dtype=DTYPES[precision])
    assert len(graph.shares) == 2
    compare(server, graph, precision, row, tmp_path)
    plan = make_plan(graph, row, precision=precision)
    for rehearsed in server.rehearse(tmp_path / "program", [plan.mesh.devices - 1]):
        assert not parted_calls(plan, graph, rehearsed)


def divided(graph: ModelGraph, row: Row, *, split: bool = False) -> Mapping[str, BodyPlacement]:
    """The quickest placement that divides the parameters; ``split``: and what passes between blocks."""
    pricing = Pricing(resolve_cluster("dgx-h100:1"), row.tensor, row.microbatch)
    return place_graph(graph, row.tensor, pricing, split=split, prices=(DIVIDED_STATE,))[0].placements


@pytest.mark.slow
def test_every_parameter_divided(server: Server, tmp_path: Path) -> None:
    """Also those whose turned weight is gathered: its gradient is a part that lies otherwise, and is copied."""
    row = Row(tensor=2, pipeline=2, accumulation=2, microbatch=2)
    source = load_model(f"{ROOT / 'benchmarks' / 'zoo' / 'signals.py'}:make", {"name": "recalled"}, None)
    graph = trace_model(source, sequence=32, dtype="float32")
    compare(server, graph, "fp32", row, tmp_path, divided(graph, row))


@pytest.mark.slow
def test_what_is_added_to_gradients_of_shared_parameters(server: Server, tmp_path: Path) -> None:
    """In the weight part of a split pass it stays until the next group's is made. The weights are most of what is alive."""
    row = Row(pipeline=2, accumulation=2, microbatch=2, schedule="interleaved-zero-bubble", stages_of_rank=1)
    source = load_model(f"{MODELS}:looped", {"width": 256, "vocab": 16, "bias": False}, None)
    compare(server, trace_model(source, sequence=24, dtype="float32"), "fp32", row, tmp_path)


def compare(
    server: Server, graph: ModelGraph, precision: str, row: Row, tmp_path: Path,
    placements: Mapping[str, BodyPlacement] | None = None, kernels: str = "cpu",
) -> None:
    """Every category, of a rank of every stage. ``kernels``: whose operations keep what they keep."""
    split_backward_holds(row.schedule)
    reductions_overlap(precision)
    if any(node.base == "scaled_dot_product_attention" for body in graph.bodies for node in body.nodes):
        flash_attention_keeps(graph.dtype)
    plan = make_plan(graph, row, precision=precision, placements=placements)
    emit(plan, graph, tmp_path / "program", prediction=None, plan_yaml="format: 1\n")
    each = row.devices // row.pipeline
    rehearsed = server.rehearse(tmp_path / "program", [rank * each for rank in range(row.pipeline)], kernels=kernels)
    found = peaks(plan, graph if kernels == "cpu" else graph.on_accelerator)
    for rank, (predicted, measured) in enumerate(zip(found, rehearsed, strict=True)):
        for name in CATEGORIES:
            bytes_ = measured.memory_bytes[name]
            assert predicted.at[name] == bytes_, f"rank {rank}, {name}: predicted {predicted.at[name]}, rehearsed {bytes_}"
        streams = measured.streams_bytes - sum(measured.memory_bytes.values())
        assert predicted.cached_bytes == streams, f"rank {rank}: of streams predicted {predicted.cached_bytes}, is {streams}"


LONG = [("gpt", "bf16", row) for row in (
    Row(data=2, zero=3, accumulation=16), Row(pipeline=2, accumulation=16), Row(pipeline=2, schedule="gpipe", accumulation=16),
    Row(pipeline=2, schedule="interleaved-1f1b", accumulation=16),
    Row(pipeline=2, schedule="zbv", accumulation=16, data=2, zero=2),
    Row(pipeline=2, schedule="interleaved-zero-bubble", accumulation=16),
)] + [
    # Which moment holds the most changes on the way, and how long 1F1B holds what it has sent.
    ("corners", "bf16", Row(pipeline=4, tensor=2, sequence_parallel=True, schedule="gpipe", accumulation=16)),
    ("corners", "fp64", Row(pipeline=4, data=2, zero=2, accumulation=16, microbatch=3)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "precision", "row"), LONG, ids=label)
def test_a_long_step_is_what_two_short_ones_say(model: str, precision: str, row: Row) -> None:
    graph = graph_of(model, precision)
    plan = make_plan(graph, row, precision=precision)
    assert list(peaks(plan, graph)) == [replay(plan, graph, rank) for rank in range(row.pipeline)]
