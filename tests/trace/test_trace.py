"""The traced graph means what the model means: same loss, same weight, same gradients, at float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from planner.ir.errors import ModelError
from planner.ir.graph import ModelGraph
from planner.trace import load_model, trace_model
from planner.trace.export import _untraceable
from planner.trace.flat import CONSTANT
from planner.trace.interpret import run
from planner.trace.lines import users_line
from planner.trace.source import ModelSource
from tests.torch_versions import line_of_assert

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = {"hidden": 32, "heads": 4, "vocab": 48, "layers": 3}
GPT2 = {"model_type": "gpt2", "n_layer": 3, "n_embd": 32, "n_head": 4, "vocab_size": 48, "n_positions": 32,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
LLAMA = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 48,
         "num_attention_heads": 4, "num_key_value_heads": 2}

MEANINGLESS = """
class Q(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 24), nn.Linear(24, 16)
    def forward(self, z):
        zz = torch.tanh(self.a(z)) + z
        return self.c(F.relu(self.b(zz))) + zz

class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(48, 16)
        self.one, self.two, self.three = Q(), Q(), Q()
        self.o = nn.Linear(16, 48)
    def forward(self, input_ids):
        z = self.e(input_ids)
        return self.o(self.three(self.two(self.one(z))))

def make():
    return M()
"""

IN_PLACE = """
        y = self.c(self.b(zz))
        y.mul_(2.0)
        y += zz
        return F.relu_(y)
"""

ATTENTION = """
        scores = (self.a(z) @ z.transpose(-2, -1)).masked_fill(self.m, float("-inf"))
        zz = scores.softmax(-1) @ z
"""

PARAMETER_LIST = """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(48, 16)
        self.w = nn.ParameterList(nn.Parameter(torch.randn(16, 16) * 0.1) for _ in range(4))
        self.g = nn.ParameterList(nn.Parameter(torch.ones(16)) for _ in range(4))
    def forward(self, input_ids):
        x = self.e(input_ids)
        for w, g in zip(self.w, self.g):
            h = F.rms_norm(x, (16,), g)
            x = x + F.silu(h @ w)
        return x @ self.e.weight.T

def make():
    return M()
"""


def both(source: ModelSource, seq: int = 16, samples: int = 3) -> tuple[ModelGraph, float]:
    """Trace a language model, and the largest difference of its loss and gradients from the plain model's, absolute, or of
    the largest number of a gradient that is above 1 (kernels of processors sum in other orders)."""
    graph = trace_model(source, sequence=seq, dtype="float64")
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        model = source.build()
    finally:
        torch.set_default_dtype(torch.float32)
    ids, labels = torch.randint(0, 48, (2, samples, seq))
    labels[0, 3:7] = -100
    total, weight = run(graph, dict(model.named_parameters()), {"input_ids": ids, "labels": labels})
    logits = model(input_ids=ids)
    logits = getattr(logits, "logits", logits)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert weight.item() == (labels != -100).sum().item()
    ours = torch.autograd.grad(total, list(model.parameters()), materialize_grads=True)
    theirs = torch.autograd.grad(expected, list(model.parameters()), materialize_grads=True)
    worst = max((a - b).abs().max().item() / max(1, b.abs().max().item()) for a, b in zip(ours, theirs, strict=True))
    return graph, max(worst, abs(total.item() - expected.item()))


def example(name: str, **settings: object) -> ModelSource:
    return load_model(f"{EXAMPLES / name}.py:{name}", TINY | settings, 16)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"bias": False, "tied": False, "gelu": "none"}, {"ffn_hidden": 40}])
def test_gpt(settings: dict[str, object]) -> None:
    graph, error = both(example("gpt", **settings))
    assert error < 1e-12
    assert [block.body for block in graph.blocks] == ["Embedding", "Block", "Block", "Block", "Head"]
    assert graph.crossing(2) == graph.blocks[1].writes, "only the hidden states cross a cut"


@pytest.mark.parametrize("settings", [{}, {"tied": True, "kv_heads": 4}, {"heads": 3, "kv_heads": 1, "head_dim": 8}])
def test_llama(settings: dict[str, object]) -> None:
    graph, error = both(example("llama", **settings))
    assert error < 1e-12
    assert [block.name for block in graph.blocks] == ["embedding", "layers.0", "layers.1", "layers.2", "head"]
    assert len(graph.bodies) == 3 and (graph.loss, graph.weight) == ("loss", "weight")
    assert graph.blocks[1].reads[1:] == ("cos", "sin"), "the rotary tables are context, computed once"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize(("seq", "samples"), [(1, 3), (1, 1), (2, 1), (15, 2)])
def test_short_and_odd_sequences(name: str, seq: int, samples: int) -> None:
    graph, error = both(example(name, seq=seq), seq=seq, samples=samples)
    assert error < 1e-12
    assert len(graph.blocks) == 5 and graph.sequence == seq
    positions = [node.type.shape for node in graph.context.nodes if node.base == "arange"]
    assert positions and all(shape == (seq,) for shape in positions), "positions are the same whatever the batch"


@pytest.mark.slow
@pytest.mark.parametrize("values", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("seq", [1, 16, 19])
def test_hugging_face(config_file: Callable[..., str], values: dict[str, object], seq: int) -> None:
    graph, error = both(load_model(config_file(**values), {}, seq), seq=seq)
    assert error < 1e-12
    assert len(graph.blocks) == 5 and len(graph.bodies) == 3
    attention = [node for body in graph.bodies for node in body.nodes if node.base == "scaled_dot_product_attention"]
    assert attention[0].argument("is_causal") is (seq > 1) and attention[0].argument("attn_mask") is None
    assert all(type_.dtype != "bool" or type_.rank < 2 for node in graph.context.nodes for type_ in node.types)


def test_a_value_named_as_a_buffer(model_file: Callable[[str], str]) -> None:
    graph = trace_model(load_model(model_file("""
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)
                self.register_buffer("table", torch.arange(4.0))
            def forward(self, x):
                table = x.cos() * self.table
                return self.layer(x) + table
        def example_inputs(batch, seq):
            return {"x": torch.randn(batch, 4)}
        def loss(outputs, batch):
            return outputs.square().mean()
        make = Model
    """), {}, None), dtype="float32")
    assert [value.name for value in graph.context.buffers] == ["table"]
    assert "table_2" in graph.context.outputs


def test_names_without_meaning(model_file: Callable[[str], str]) -> None:
    graph, error = both(load_model(model_file(MEANINGLESS), {}, None))
    assert error < 1e-12
    assert [block.name for block in graph.blocks] == ["embedding", "one", "two", "three", "head"]
    assert len({block.body for block in graph.blocks[1:4]}) == 1


def test_parameter_list_loop(model_file: Callable[[str], str]) -> None:
    graph, error = both(load_model(model_file(PARAMETER_LIST), {}, None))
    assert error < 1e-12
    repeats = [block for block in graph.blocks if block.body == "Repeat"]
    assert len(repeats) == 4
    assert [dict(block.parameters)["w"] for block in repeats] == ["w.0", "w.1", "w.2", "w.3"]


NORM_IN_THE_LOOP = """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(48, 16)
        self.n = nn.ModuleList(nn.LayerNorm(16) for _ in range(4))
        self.f = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(4))
    def forward(self, input_ids):
        x = self.e(input_ids)
        for n, f in zip(self.n, self.f):
            x = x + f(n(x))
        return x @ self.e.weight.T

def make():
    return M()
"""


def test_what_the_loop_does_belongs_to_the_blocks(model_file: Callable[[str], str]) -> None:
    graph, error = both(load_model(model_file(NORM_IN_THE_LOOP), {}, None))
    assert error < 1e-12
    assert len(graph.bodies) == 3 and [block.name for block in graph.blocks[1:5]] == ["f.0", "f.1", "f.2", "f.3"]
    assert all(graph.crossing(index) == graph.blocks[index - 1].writes for index in range(1, 6))
    assert all(len(block.writes) == 1 for block in graph.blocks)


def test_module_called_many_times(model_file: Callable[[str], str]) -> None:
    source = MEANINGLESS.replace("self.three(self.two(self.one(z)))", "self.one(self.one(self.one(z)))")
    source = source.replace("self.one, self.two, self.three = Q(), Q(), Q()", "self.one = Q()")
    graph, error = both(load_model(model_file(source), {}, None))
    assert error < 1e-12
    assert graph.tied_blocks("one.a.weight") == (1, 2, 3)


@pytest.mark.slow
def test_no_grad_region_is_detached(model_file: Callable[[str], str]) -> None:
    region = """
        with torch.no_grad():
            size = z.abs().mean(-1, keepdim=True)
        zz = torch.tanh(self.a(z)) + z * size
"""
    source = MEANINGLESS.replace("zz = torch.tanh(self.a(z)) + z", region)
    graph, error = both(load_model(model_file(source), {}, None))
    assert error < 1e-12
    assert any(node.op == "detach" for body in graph.bodies for node in body.nodes)


def test_tokens_under_another_name(model_file: Callable[[str], str]) -> None:
    source = MEANINGLESS.replace("input_ids", "i")
    graph = trace_model(load_model(model_file(source), {}, None), sequence=16, dtype="float32")
    assert [given.name for given in graph.batch_inputs] == ["input_ids", "labels"]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [
    "self, **inputs", "self, batch", "self, inputs: dict", "self, inputs: 'typing.Mapping[str, torch.Tensor]'",
])
def test_forward_of_all_inputs(model_file: Callable[[str], str], arguments: str) -> None:
    given = "inputs" if "inputs" in arguments else "batch"
    source = MEANINGLESS.replace("self, input_ids", arguments).replace("(input_ids", f"({given}['input_ids']")
    source += """
def example_inputs(batch, seq):
    return {"scale": torch.zeros(batch), "input_ids": torch.zeros(batch, seq, dtype=torch.int64),
            "labels": torch.zeros(batch, seq, dtype=torch.int64)}
"""
    sources = (load_model(model_file(each), {}, None) for each in (MEANINGLESS, source))
    plain, graph = (trace_model(each, sequence=16, dtype="float32") for each in sources)
    assert (graph.bodies, graph.blocks, graph.loss) == (plain.bodies, plain.blocks, plain.loss)


def test_equal_masks_of_all_layers_are_one(model_file: Callable[[str], str]) -> None:
    mask = "self.register_buffer('m', torch.ones(16, 16).tril() == 0)"
    source = MEANINGLESS.replace("nn.Linear(24, 16)\n", f"nn.Linear(24, 16)\n        {mask}\n", 1)
    source = source.replace("zz = torch.tanh(self.a(z)) + z", ATTENTION)
    graph, error = both(load_model(model_file(source), {}, None))
    assert error < 1e-12
    assert [buffer.fqn for buffer in graph.buffers] == ["one.m"] and len(graph.bodies) == 3


@pytest.mark.slow
def test_sequence_of_the_model_is_the_default(config_file: Callable[..., str]) -> None:
    source = load_model(f"{EXAMPLES / 'gpt.py'}:gpt", TINY, None)
    assert source.sequence == 128 and trace_model(source, dtype="float32").sequence == 128
    assert load_model(f"{EXAMPLES / 'gpt.py'}:gpt", {"seq": 64}, None).sequence == 64
    assert load_model(f"{EXAMPLES / 'gpt.py'}:gpt", {"seq": 64}, 32).sequence == 32
    assert trace_model(load_model(config_file(**GPT2), {}, None), dtype="float32").sequence == 32
    assert trace_model(load_model(config_file(**LLAMA), {"max_position_embeddings": 24}, None), dtype="float32").sequence == 24
    assert trace_model(load_model(config_file(**LLAMA), {}, 8), sequence=None, dtype="float32").sequence == 8


def test_no_sequence_anywhere(model_file: Callable[[str], str]) -> None:
    with pytest.raises(ModelError, match="--seq: is not given"):
        trace_model(load_model(model_file(MEANINGLESS), {}, None), dtype="float32")


def test_unused_parameter_is_told(model_file: Callable[[str], str]) -> None:
    source = MEANINGLESS.replace("self.o = nn.Linear(16, 48)", "self.o = nn.Linear(16, 48)\n        self.p = nn.Linear(2, 2)")
    graph = trace_model(load_model(model_file(source), {}, None), sequence=16, dtype="float32")
    assert graph.warnings == tuple(f"parameter p.{leaf} takes no part in the loss" for leaf in ("weight", "bias"))


@pytest.mark.slow
def test_parameters_that_no_gradient_reaches_are_not_trained(model_file: Callable[[str], str]) -> None:
    """torch's optimizers leave them as they are too; a program refuses a step without a gradient that it waits for."""
    source = MEANINGLESS.replace("nn.Linear(24, 16)\n", "nn.Linear(24, 16)\n        self.teacher = nn.Linear(16, 16)\n", 1)
    source = source.replace("return self.c(F.relu(self.b(zz))) + zz", """
        with torch.no_grad():
            y = self.teacher(zz)
        return self.c(F.relu(self.b(zz))) + zz - self.teacher(zz + y).detach()""")
    graph, error = both(load_model(model_file(source), {}, None))
    assert error < 1e-12
    kept = {p.fqn for p in graph.parameters if not p.trainable}
    assert kept == {f"{block}.teacher.{leaf}" for block in ("one", "two", "three") for leaf in ("weight", "bias")}
    assert graph.warnings == ("no gradient reaches 6 parameters (one.teacher.bias, one.teacher.weight, three.teacher.bias, "
                              "...): they stay as they start",)


@pytest.mark.slow
@pytest.mark.parametrize("line", [
    "F.embedding(zz.detach().argmax(-1), self.w).view_as(zz)", "self.w[zz.detach().argmax(-1)].reshape_as(zz)",
    "self.w[0].expand_as(zz)", "self.w[0].type_as(zz)",
])
def test_no_gradient_comes_of_a_shape(model_file: Callable[[str], str], line: str) -> None:
    """A result that has but another's shape reads none of its values: nothing of what made these gets a gradient."""
    made = "nn.Linear(24, 16)\n        self.w = nn.Parameter(torch.ones(16, 16))\n"
    source = MEANINGLESS.replace("nn.Linear(24, 16)\n", made, 1)
    source = source.replace("return self.c(F.relu(self.b(zz))) + zz", f"return self.c(F.relu(self.b({line} + z.detach()))) + z")
    graph, error = both(load_model(model_file(source), {}, None))
    assert error < 1e-12
    kept = {p.fqn for p in graph.parameters if not p.trainable}
    assert kept == {f"{block}.a.{leaf}" for block in ("one", "two", "three") for leaf in ("weight", "bias")}


def test_a_detached_value_of_anothers_shape_is_detached(model_file: Callable[[str], str]) -> None:
    source = MEANINGLESS.replace("self.b(zz)", "self.b(zz + zz[:, :1].detach().expand_as(zz))")
    graph, error = both(load_model(model_file(source), {}, None))
    assert error < 1e-12
    made = [node.differentiable for body in graph.bodies for node in body.nodes if node.base == "expand"]
    assert made == [False]


@pytest.mark.slow
def test_tied_parameters_appear_in_each_block() -> None:
    graph = trace_model(example("gpt"), sequence=16, dtype="float32")
    assert graph.tied_blocks("tokens.weight") == (0, 4)
    assert graph.parameter_of["tokens.weight"].aliases == ("head.weight",)


def test_batch_inputs_and_decay() -> None:
    graph = trace_model(example("gpt"), sequence=16, dtype="bfloat16")
    assert [(given.name, given.role, given.high) for given in graph.batch_inputs] == [
        ("input_ids", "tokens", 48), ("labels", "targets", 48)]
    assert {p.decay for p in graph.parameters if p.type.rank == 1} == {False}
    assert {p.type.dtype for p in graph.parameters} == {"bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize(("sample", "dtype", "role"), [
    ("seq", "torch.int64", "tokens"), ("2, seq", "torch.int64", "other"), ("seq, 16", "torch.float32", "other"),
])
def test_tokens_are_one_sequence(model_file: Callable[[str], str], sample: str, dtype: str, role: str) -> None:
    """Pictures' codes and several sequences a sample are no pieces of a text, whatever their name."""
    read = "z = input_ids" if role == "other" and "16" in sample else "z = self.e(input_ids).flatten(1, -2)"
    source = MEANINGLESS.replace("z = self.e(input_ids)", read) + f"""
def example_inputs(batch, seq):
    return {{"input_ids": torch.zeros(batch, {sample}, dtype={dtype})}}

def loss(outputs, batch):
    return outputs.square().mean()
"""
    graph = trace_model(load_model(model_file(source), {}, 8), sequence=8, dtype="float32")
    assert [given.role for given in graph.batch_inputs] == [role]


def test_dropout_stays_where_it_acts() -> None:
    graph = trace_model(example("gpt", dropout=0.1), sequence=16, dtype="float32")
    nodes = graph.body_of["Block"].nodes
    assert [node.argument("p") for node in nodes if node.op == "dropout"] == [0.1, 0.1]
    assert [node.argument("dropout_p") for node in nodes if node.base.startswith("scaled")] == [0.1]


@pytest.mark.slow
@pytest.mark.parametrize("values", [GPT2], ids=["hugging-face"])
def test_short_position_table(config_file: Callable[..., str], values: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=r"wpe.weight, which has 32 rows; give --seq 32 or less"):
        trace_model(load_model(config_file(**values), {}, 33), sequence=33, dtype="float32")
    with pytest.raises(ModelError, match="which has 8 rows"):
        trace_model(example("gpt", seq=8), sequence=16, dtype="float32")


def test_a_buffer_assigned_to_itself(model_file: Callable[[str], str]) -> None:
    """What moving it to the device that it is on makes of it."""
    spec = model_file("""
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.register_buffer("places", torch.randn(16, 16))
    def forward(self, x):
        self.places = self.places.to(x.device)
        return x + torch.tanh(self.a(x) + self.places)

class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.o = nn.Embedding(48, 16), nn.Linear(16, 48)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.register_buffer("places", torch.randn(16, 16))
    def forward(self, input_ids):
        self.places = self.places.to(input_ids.device)
        x = self.e(input_ids) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.o(x)

def make():
    return M()
""")
    assert both(load_model(spec, {}, 16))[1] < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(("forward", "said"), [
    ("if x.sum() > 0:\n            x = x + 1", r"depends on tensor values: if x.sum\(\) > 0:"),
    ("x = x * x.sum().item()", r"user_model\.py:\d+: .* depends on tensor values: x = x \* x.sum\(\).item\(\); the traced"),
    ("n = x.sum().item()\n        assert n < 5\n        x = x * n", r"depends on tensor values: n = x.sum\(\).item\(\)"),
    ("assert input_ids.max().item() < 48\n        x = x * (1 / x.shape[0])", "computed from the number of samples"),
    ("assert input_ids.max().item() < 48\n        x = x if x.shape[0] > 64 else 2 * x", "depends on the number of samples"),
    ("dropped = torch.rand(2) < 0.1\n        if not dropped[0]:\n            x = self.s(x)",
     r"user_model\.py:\d+: control flow or a Python number depends on random numbers: if not dropped\[0\]:; choose by torch"),
    ("x = x if torch.rand(1).item() < 0.1 else 2 * x",
     r"depends on random numbers: .*\(layerdrop=0.0 of transformers' configs\)"),
    ("x = self.n(x.transpose(1, 2)).transpose(1, 2)", "changes buffer n.running_mean in place; statistics over a batch"),
    ("self.n.running_var.add_(1)", "changes buffer n.running_var in place"),
    ("x = x + nn.functional.embedding(input_ids, self.e.weight, max_norm=1.0)",
     r"user_model\.py:\d+: forward changes parameter e.weight \(max_norm of an embedding\) in place; .*: leave max_norm out"),
    ("x = self.s(x)", r"\.py:\d+: forward changes buffer s.parametrizations.* \(spectral_norm\) in place; its power"),
    ("x = self.t(x)", r"\.py:\d+: forward changes buffer t.weight_u \(spectral_norm\) in place; .* or use .*weight_norm"),
    ("self.n.running_mean = x.detach().mean((0, 1))",
     r"user_model\.py:\d+: forward replaces buffer n.running_mean; keep what a pass computes in a local .* statistics"),
    ("self.n.running_mean = self.n.running_mean.double()", "forward replaces buffer n.running_mean; keep what a pass computes"),
    ("x = F.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2)", "statistics over the batch"),
    ("self.e.weight.data.clamp_(-1, 1)", "forward changes the data of a tensor in place; a step's micro-batches would"),
    ("self.e.weight.data[0].zero_()", "changes the data of a tensor in place"),
    ("with torch.no_grad():\n            self.n.running_mean.data.mul_(2)", "changes the data of a tensor in place"),
    ("x.data.clamp_(-1, 1)", "changes the data of a tensor in place"),
    ("self.places.add_(1)", "changes the data of a tensor in place"),
    ("x = x + torch.rand(16)", "rand draws random numbers once for all samples; .*: draw for every sample"),
    ("x = x * (1 / x.shape[0])", "computed from the number of samples"),
    ("x = x / x.shape[0] ** 0.5", "computed from the number of samples"),
    ("x = x * x.shape[0]", "mul computes with the batch size"),
    ("x = x - x.mean(0, keepdim=True)", "sub blends samples: it reads a statistic over the batch"),
    ("x = x / x.norm()", "div blends samples"),
    ("with torch.autocast('cpu', dtype=torch.bfloat16):\n            x = x @ self.e.weight.T @ self.e.weight",
     r"user_model\.py:\d+: forward chooses a precision by itself \(torch.autocast\); leave it out: --precision bf16"),
    ("x = x.unknown()", "has no attribute 'unknown'"),
    ("x = torch.cond(input_ids.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))",
     r"user_model\.py:\d+: torch's operations that take functions .* not supported: x = torch.cond.* torch.where of both"),
])
def test_untraceable(model_file: Callable[[str], str], forward: str, said: str) -> None:
    source = f"""
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.n = nn.Embedding(48, 16), nn.BatchNorm1d(16)
        self.s = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
        self.t = nn.utils.spectral_norm(nn.Linear(16, 16))
        self.places = torch.ones(16)
    def forward(self, input_ids):
        x = self.e(input_ids)
        {forward}
        return x @ self.e.weight.T

def make():
    return M()
"""
    where = r"user_model.py:\d+$"
    if "n = x.sum().item()" in forward:
        said, where = line_of_assert(said)
    with pytest.raises(ModelError, match=said) as raised:
        trace_model(load_model(model_file(source), {}, None), sequence=16, dtype="float32")
    assert re.search(where, raised.value.where)


def test_an_assert_that_torch_refuses_when_the_model_has_run(model_file: Callable[[str], str]) -> None:
    """As torch before 2.13 does, from within sympy, which is nobody's model."""
    source = load_model(model_file("def make():\n    return nn.Linear(2, 2)\n"), {}, None)
    sympys = compile("def fail(error):\n    raise error", "/usr/lib/python3/dist-packages/sympy/printing/printer.py", "exec")
    names: dict[str, Callable[[Exception], None]] = {}
    exec(sympys, names)
    with pytest.raises(AssertionError) as raised:
        names["fail"](AssertionError("Unknown symbol zuf0 created by constraints solver"))
    assert users_line(raised.value.with_traceback(raised.tb.tb_next)) is None
    assert "depends on tensor values: an assert on what .item() gave" in str(_untraceable(source, raised.value, {}, {}))


def test_asserts_on_values_are_no_part_of_a_program(model_file: Callable[[str], str]) -> None:
    """As XLM's on its lengths; nor is what only they read."""
    spec = model_file("""
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.n = nn.Embedding(48, 16), nn.Linear(16, 16)
    def forward(self, input_ids):
        lengths = (input_ids != 47).sum(dim=1).long()
        most = lengths.max().item()
        assert 2 * most <= 2 * input_ids.shape[1]
        x = self.e(input_ids) * (torch.arange(input_ids.shape[1]) < lengths[:, None])[..., None]
        return self.n(x) @ self.e.weight.T

def make():
    return M()
""")
    graph, difference = both(load_model(spec, {}, 16))
    assert difference < 1e-12
    assert not [node.op for body in (graph.context, *graph.bodies) for node in body.nodes if "max" in node.op]


@pytest.mark.slow
@pytest.mark.parametrize(("call", "flag"), [
    ("self.t(x, x, tgt_mask=mask", "tgt_is_causal=True"), ("self.t(x, x, src_mask=mask", "src_is_causal=True"),
    ("self.t.encoder(x, mask", "is_causal=True"), ("self.t.decoder(x, x, mask", "tgt_is_causal=True"),
])
def test_torch_is_told_that_a_mask_is_causal(model_file: Callable[[str], str], call: str, flag: str) -> None:
    """Its own transformer looks at the mask's values otherwise, which a trace does not have."""
    source = f"""
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.t = nn.Embedding(48, 16), nn.Transformer(16, 2, 1, 1, 32, 0.0, batch_first=True)
    def forward(self, input_ids):
        x, mask = self.e(input_ids), nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        return {call}, {flag}) @ self.e.weight.T

def make():
    return M()
"""
    trace_model(load_model(model_file(source), {}, None), sequence=16, dtype="float32")
    with pytest.raises(ModelError, match=f"to see whether it is causal.*{flag}") as raised:
        trace_model(load_model(model_file(source.replace(f", {flag}", "")), {}, None), sequence=16, dtype="float32")
    assert re.search(r"user_model.py:\d+$", raised.value.where)


@pytest.mark.slow
def test_in_place_operations_become_functional(model_file: Callable[[str], str]) -> None:
    source = MEANINGLESS.replace("return self.c(F.relu(self.b(zz))) + zz", IN_PLACE)
    graph, error = both(load_model(model_file(source), {}, None))
    assert error < 1e-12
    assert not any(node.base.endswith("_") for body in graph.bodies for node in body.nodes)


@pytest.mark.slow
@pytest.mark.parametrize("line", [
    "y[..., 0::2] = zz[..., :8].float()", "y[:, 1] = torch.ones(16, dtype=torch.float32)",
    "y[:, :3] = zz[:, :3].float().mean(1, keepdim=True)", "y[:, :, 0] = zz[:, 0, :1]",
    "y[:, 0] = 0.5", "y[:, 1:, 3:5] = 1", "y[:, 1] = self.b.bias.sum()", "y[:, 2].fill_(2)", "y[:, 3].zero_()",
    "y = torch.fill(y, 2.0) * zz", "y[..., 0] = self.b.bias.float().mean()",
])
def test_assignments_to_parts(model_file: Callable[[str], str], line: str) -> None:
    """What is written in another dtype or stretched goes there by operations that have a gradient; none keeps what is lost."""
    made = f"y = self.c(F.relu(self.b(zz))) + zz\n        {line}\n        return y"
    source = MEANINGLESS.replace("return self.c(F.relu(self.b(zz))) + zz", made)
    graph, error = both(load_model(model_file(source), {}, None))
    assert error < (1e-5 if "float" in line else 1e-12)
    assert not {"copy", "fill", "zero"} & {node.base for body in graph.bodies for node in body.nodes}


@pytest.mark.slow
@pytest.mark.parametrize("line", [
    "kept[:, :3] = y[:, :3] * weight", "kept[:, ::2] = y[:, 1::2].conj()", "kept[..., -1] = y[..., 0]", "kept[:, 2, 1:4] = 2j",
    "kept = y * weight; kept.real[:, 0] = y.imag[:, 1]", "kept = (y * 1).conj(); kept[:, 1:3] *= weight",
    "kept = y * 1; kept.diagonal(0, 1, 2).mul_(2)",
    "kept = y * 1; kept[:, torch.tensor([0, 2])] = y[:, torch.tensor([1, 3])]",
])
def test_assignments_to_parts_of_a_spectrum(model_file: Callable[[str], str], line: str) -> None:
    """torch differentiates no ``slice_scatter`` of complex numbers (a Fourier neural operator keeps some frequencies so)."""
    made = f"""y, weight = torch.fft.rfft(zz), torch.view_as_complex(self.b.weight[:2, :18].reshape(2, 9, 2))[:1]
        kept = torch.zeros_like(y)
        {line}
        return torch.fft.irfft(kept) + zz"""
    source = MEANINGLESS.replace("return self.c(F.relu(self.b(zz))) + zz", made).replace("(16, 24)", "(18, 24)")
    _, error = both(load_model(model_file(source), {}, None))
    assert error < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings", "seq"), [
    ("gpt", {"layers": 96, "hidden": 12288, "heads": 96, "vocab": 50257}, 2048),
    ("llama", {"layers": 126, "hidden": 25600, "heads": 200, "kv_heads": 8, "ffn_hidden": 102400}, 8192),
])
def test_giants(name: str, settings: dict[str, object], seq: int) -> None:
    source = load_model(f"{EXAMPLES / name}.py:{name}", settings, seq)
    graph = trace_model(source, sequence=seq, dtype="bfloat16")
    assert len(graph.bodies) == 3 and graph.parameter_count > 1.7e11


def test_no_gradient_goes_through_what_depends_on_no_value(model_file: Callable[[str], str]) -> None:
    source = """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(48, 16)
    def forward(self, input_ids):
        x = self.e(input_ids)
        y = torch.zeros_like(x) + x.new_ones(16)
        return (x + y) @ self.e.weight.T

def make():
    return M()
"""
    graph = trace_model(load_model(model_file(source), {}, None), sequence=16, dtype="float32")
    found = {node.base: node.differentiable for body in graph.bodies for node in body.nodes if node.base in CONSTANT}
    assert found == {"zeros_like": False, "new_ones": False}
