"""Hugging Face models from their configs alone: the emitted program equals transformers' own model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from codegen import emit
from planner.ir.graph import ModelGraph
from planner.ir.placement import REPLICATE, shard
from planner.placement import place_graph
from planner.trace import load_model, trace_model
from tests.matrix.build import Row, label, make_plan
from tests.matrix.pricing import VolumePricing
from tests.matrix.reference import batches_of, build_in, give_start, train_plainly, worst_gradient
from tests.matrix.test_matrix import STEPS, run
from tests.matrix.workers import Workers
from tests.wide import wide

pytestmark = pytest.mark.slow
SEQUENCE = 20
CONFIGS = {
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 4, "n_embd": 32, "n_head": 4, "n_inner": 44,
        "vocab_size": 52, "n_positions": 24, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 32,
        "intermediate_size": 44, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 52,
        "max_position_embeddings": 24,
    },
    "bert": {
        "architectures": ["BertForSequenceClassification"], "model_type": "bert", "num_hidden_layers": 4, "hidden_size": 32,
        "intermediate_size": 44, "num_attention_heads": 4, "vocab_size": 52, "max_position_embeddings": 24,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "id2label": {"0": "a", "1": "b", "2": "c"},
    },
    "t5": {
        "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "num_layers": 2, "num_decoder_layers": 2,
        "d_model": 32, "d_ff": 44, "d_kv": 8, "num_heads": 4, "vocab_size": 52, "dropout_rate": 0.0,
    },
}
# transformers' Llama and T5 compute their norms, and Llama its rotary tables, in float32 even in a float64 model: a sum in
# another order, of which nothing remains in float64, can flip a rounding there (1e-7).
TOLERANCES = {"gpt2": 1.0, "llama": 1e3, "bert": 1.0, "t5": 1e3}
ROWS = (
    Row(tensor=2, sequence_parallel=True, recompute="selective"),
    Row(tensor=2, pipeline=2, accumulation=2, recompute="mixed"),
)
# The blocks of T5's decoder read two sequences, and split neither.
TRAINED = [(name, row) for name in CONFIGS for row in ROWS if not (name == "t5" and row.sequence_parallel)]


class Logits(nn.Module):
    """A model whose output is its logits; state keys as the inner model's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        named = dict(zip(("input_ids", "decoder_input_ids"), given, strict=False))
        logits: torch.Tensor = self.inner(**named).logits
        return logits


def built(folder: Path, graph: ModelGraph) -> Logits:
    """transformers' model with the start of the emitted program."""
    model = Logits(build_in(load_model(f"hf:{folder}", {}, SEQUENCE), torch.float64))
    give_start(model, graph, "inner.")
    return model


@pytest.mark.parametrize(("name", "row"), [case if at % 3 else wide(*case) for at, case in enumerate(TRAINED)], ids=label)
def test_program_equals_transformers(workers: Workers, name: str, row: Row, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    graph = trace_model(load_model(f"hf:{tmp_path}", {}, SEQUENCE), sequence=SEQUENCE, dtype="float64")
    boundary = shard(1) if row.sequence_parallel else REPLICATE
    option = next(o for o in place_graph(graph, row.tensor, VolumePricing(row.tensor)) if o.boundary == boundary)
    plan = make_plan(graph, row, placements=option.placements)
    emit(plan, graph, tmp_path / "program", prediction=None, plan_yaml="format: 1\n")
    losses, _, gradients = run(workers, tmp_path / "program", row.devices)

    batches = batches_of(graph, plan.batch.total)
    reference = train_plainly(built(tmp_path, graph), [batches.at(step) for step in range(STEPS)])
    expected = {name.removeprefix("inner."): gradient for name, gradient in reference.gradients.items()}
    parameter, error = worst_gradient(gradients, expected)
    assert error <= TOLERANCES[name], f"the gradient of {parameter} is {error:.3g} tolerances off"
    assert losses == pytest.approx(list(reference.losses), rel=1e-10 * TOLERANCES[name])
