"""What engines that fuse kernels keep, against the formulas of their papers."""

from __future__ import annotations

import pytest

from hardware_profiles import Engine, resolve_cluster
from planner.costing import Pricing
from planner.costing.engine_states import flat_state, gathered_one_by_one
from planner.costing.kept import Keeping, loss_operands
from planner.costing.local import localise
from planner.costing.measured import measure_block
from planner.ir.body import Body
from planner.ir.costed import Recompute, StateCost
from planner.ir.graph import ModelGraph
from planner.ir.plan import Precision
from planner.placement import place_graph
from planner.placement.place import whole_placement
from planner.placement.space import DIVIDED_STATE
from planner.trace import load_model, trace_model

HIDDEN, HEADS, TOKENS, BATCH, VOCAB = 64, 4, 32, 2, 96
STEP = BATCH * TOKENS * HIDDEN
PAIRS = BATCH * HEADS * TOKENS * TOKENS
STATISTICS = 4 * BATCH * HEADS * TOKENS


def _traced(dropout: float) -> ModelGraph:
    settings = {"layers": 2, "hidden": HIDDEN, "heads": HEADS, "vocab": VOCAB, "dropout": dropout}
    return trace_model(load_model("examples/gpt.py:gpt", settings, TOKENS), sequence=TOKENS, dtype="float16")


def _layer(dropout: float) -> Body:
    graph = _traced(dropout)
    return graph.body_of[graph.blocks[1].body]


def _kept(body: Body, level: Recompute, engine: Engine) -> int:
    return Keeping(localise(body, whole_placement(body), BATCH), engine).saved_bytes(level)


def test_a_megatron_layer_keeps_what_korthikanti_counts() -> None:
    """34 s b h + 5 a s^2 b bytes (Korthikanti et al. 2022, equation 1)."""
    kept = _kept(_layer(0.1), "none", Engine(keeps="fused", attention="unfused"))
    assert kept == 34 * STEP + 5 * PAIRS


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 4])
def test_sequence_parallelism_divides_all_of_it(degree: int) -> None:
    """Korthikanti et al. 2022, equation 4; what a scatter leaves of a sum is a part of it, too. (Of a model that is so large
    that this split is the quickest.)"""
    hidden, heads, tokens = 4096, 32, 2048
    settings = {"layers": 2, "hidden": hidden, "heads": heads, "vocab": VOCAB, "dropout": 0.1, "seq": tokens}
    graph = trace_model(load_model("examples/gpt.py:gpt", settings, tokens), sequence=tokens, dtype="bfloat16")
    engine, body = Engine(keeps="fused", attention="unfused"), graph.body_of[graph.blocks[1].body]
    pricing = Pricing(resolve_cluster("dgx-h100:1"), degree, 1, engine=engine)
    (option, *_) = place_graph(graph, degree, pricing, split=True, prices=(DIVIDED_STATE,))
    kept = Keeping(localise(body, option.placements[body.name], 1), engine).saved_bytes("none")
    assert kept == (34 * tokens * hidden + 5 * heads * tokens**2) // degree


def test_an_rms_norm_keeps_its_input() -> None:
    """Norms of any kind do (Transformer Engine, LayerNormLinear)."""
    settings = {"layers": 2, "hidden": HIDDEN, "heads": HEADS, "kv_heads": HEADS, "ffn_hidden": 2 * HIDDEN, "vocab": VOCAB}
    source = load_model("examples/llama.py:llama", settings, TOKENS)
    graph = trace_model(source, sequence=TOKENS, dtype="bfloat16").on_accelerator
    # Inputs of both norms; q, k, v, what is attended, what goes into three products, and what the two wide ones give.
    kept = _kept(graph.body_of[graph.blocks[1].body], "none", Engine(keeps="fused"))
    assert kept == 2 * STEP * (2 + 3 + 1 + 2 + 2 + 2 + 2) + STATISTICS


def test_selective_recomputation_drops_the_pairs() -> None:
    engine, body = Engine(keeps="fused", attention="unfused"), _layer(0.1)
    assert _kept(body, "none", engine) - _kept(body, "selective", engine) >= 5 * PAIRS


def test_full_recomputation_keeps_the_input() -> None:
    assert _kept(_layer(0.1), "full", Engine(keeps="fused")) == 2 * STEP


@pytest.mark.slow
def test_flash_attention_keeps_its_statistics() -> None:
    unfused, flash = (_kept(_layer(0.0), "none", Engine(keeps="fused", attention=kind)) for kind in ("unfused", "flash"))
    assert unfused - flash == 2 * PAIRS - STATISTICS


def test_a_compiled_layer_keeps_products_alone() -> None:
    """Its input, query-key-value, the attended values, what is added to the input, and the wide product."""
    kept = _kept(_layer(0.1), "none", Engine(keeps="compiled"))
    assert kept == 2 * STEP * (1 + 3 + 1 + 1 + 4) + STATISTICS


def test_the_loss_holds_so_many_bytes_an_element() -> None:
    graph = _traced(0.0)
    head = graph.body_of[graph.blocks[-1].body]
    elements = BATCH * TOKENS * VOCAB
    assert loss_operands(localise(head, whole_placement(head), BATCH)) == (elements, 2 * elements)
    counted = measure_block(head, whole_placement(head), BATCH, ("none",), engine=Engine(keeps="compiled", loss=4.0))
    assert counted.levels["none"].memory.backward_peak_bytes == 2 * elements


@pytest.mark.parametrize(
    ("zero", "precision", "engine", "expected"),
    [
        (0, "bf16", Engine(keeps="fused"), (2 + 4, 4, 8)),
        (1, "bf16", Engine(keeps="fused"), (2 + 4 / 8, 4, 8 / 8)),
        (1, "fp16", Engine(keeps="fused", held_fp16=2), (2 + 4 / 8, 2, 8 / 8)),
        (1, "bf16", Engine(keeps="fused", held_bf16=6), (2 + 4 / 8, 6, 8 / 8)),
        (2, "bf16", Engine(keeps="fused"), (2 + 4 / 8, 4 / 8, 8 / 8)),
        (3, "bf16", Engine(keeps="fused"), ((2 + 4) / 8, 4 / 8, 8 / 8)),
        (0, "fp32", Engine(keeps="fused"), (4, 4, 8)),
    ],
)
def test_flat_buffers_hold_what_their_engines_document(
    zero: int, precision: Precision, engine: Engine, expected: tuple[float, ...]
) -> None:
    elements = 800
    state = flat_state(StateCost(0, 0, 0, 0, 1.0, 2.0, 3.0, 4.0), elements, 8, zero, precision, engine)
    held = (state.parameters_bytes, state.gradients_bytes, state.optimizer_bytes)
    assert held == tuple(round(each * elements) for each in expected)
    assert (state.once_comm_s, state.optimizer_s) == (1.0, 4.0)


def _gated() -> Body:
    settings = {"layers": 2, "hidden": HIDDEN, "heads": HEADS, "kv_heads": HEADS, "ffn_hidden": 2 * HIDDEN, "vocab": VOCAB}
    graph = trace_model(load_model("examples/llama.py:llama", settings, TOKENS), sequence=TOKENS, dtype="bfloat16")
    return graph.body_of[graph.blocks[1].body]


def test_every_other_product_is_kept_and_the_rest_runs_again() -> None:
    """Of the seven products the first, third, fifth and seventh: query, value, gate and down; attention; and the input."""
    body, engine = _gated(), Engine(keeps="compiled", selective="alternate")
    assert _kept(body, "selective", engine) == 2 * STEP * (1 + 1 + 1 + 2 + 1 + 1) + STATISTICS
    work = measure_block(body, whole_placement(body), BATCH, ("selective",), engine=engine)
    again = {item.base for item in work.operations if item.node in work.levels["selective"].repeated}
    assert "scaled_dot_product_attention" not in again
    products = [item for item in work.operations if item.weighted and item.base == "linear"]
    assert sum(item.node in work.levels["selective"].repeated for item in products) == 3


def test_narrow_products_keep_what_they_read_in_a_byte_an_element() -> None:
    """Read once more than in half precision by attention alone, which keeps its result as it is."""
    body = _gated()
    wide, narrow = (_kept(body, "none", Engine(keeps="fused", matmul_dtype=dtype)) for dtype in (None, "float8"))
    # Two norms' results and the activation's, which nothing else keeps, and the attended values, which attention keeps too.
    assert narrow - wide == -STEP * (1 + 1 + 2) + STEP


def test_what_waits_in_the_host_s_memory_is_not_kept() -> None:
    body = _gated()
    here, there = (
        measure_block(body, whole_placement(body), BATCH, ("full",), engine=engine).levels["full"].memory
        for engine in (Engine(keeps="fused"), Engine(keeps="fused", offloaded=1.0))
    )
    assert (here.saved_bytes, there.saved_bytes) == (2 * STEP, 0)
    assert there.backward_peak_bytes == here.backward_peak_bytes + 2 * STEP


def test_parameters_gathered_one_by_one_are_two_at_a_time() -> None:
    state = gathered_one_by_one(StateCost(0, 0, 0, 99, 1.0, 2.0, 3.0, 4.0), 800, 3, "bf16")
    assert state.gather_bytes == 2 * 1600
    assert gathered_one_by_one(state, 800, 1, "bf16") == state
