"""One form for each meaning, whatever form export has left."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from planner.ir.body import Node
from planner.ir.errors import ModelError
from planner.ir.graph import ModelGraph
from planner.trace import load_model, trace_model

NET = """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.f = nn.Embedding(48, 16), nn.Linear(16, 16)
        self.a, self.b = nn.Parameter(torch.randn(16, 4)), nn.Parameter(torch.randn(4, 16))
    def forward(self, input_ids):
        x = self.e(input_ids)
        {forward}
        return x @ self.e.weight.T
{rest}
def make():
    return M()
"""
MIXTRAL = {
    "model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
}
FOREIGN = """
@torch.library.custom_op("stranger::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x
double.register_fake(lambda x: torch.empty_like(x))
double.register_autograd(lambda context, gradient: 2 * gradient)
"""


def traced(spec: str, dtype: str = "float64") -> ModelGraph:
    return trace_model(load_model(spec, {}, None), sequence=16, dtype=dtype)


def nodes(graph: ModelGraph) -> list[Node]:
    return [node for body in (graph.context, *graph.bodies) for node in body.nodes]


@pytest.mark.slow
def test_what_has_only_the_dtype_of_a_value_has_no_gradient(model_file: Callable[[str], str]) -> None:
    """A mask that is made of nothing, in the dtype of the scores, is the same for every layer: part of the context."""
    forward = """s = self.f(x) @ x.transpose(1, 2)
        x = (s + torch.triu(torch.zeros(16, 16).fill_(-9.0).type_as(s), 1)).softmax(-1) @ x"""
    graph = traced(model_file(NET.format(forward=forward, rest="")), "bfloat16")
    assert "triu" in {node.base for node in graph.context.nodes}
    assert not any(node.differentiable for node in graph.context.nodes)


@pytest.mark.slow
@pytest.mark.parametrize("called", ["x.double()", "x.type_as(self.a)", "x.contiguous()"])
def test_a_value_that_no_grad_hands_back_keeps_its_gradient(model_file: Callable[[str], str], called: str) -> None:
    """A cast to its own dtype is the value itself, for what is computed under ``no_grad`` and for what reads it after."""
    forward = f"x = self.f(x)\n        with torch.no_grad():\n            y = {called}.argmax(-1)\n        x = x * self.e(y)"
    found = nodes(traced(model_file(NET.format(forward=forward, rest=""))))
    detached = {node.name for node in found if node.op == "detach"}
    assert {node.base for node in found if detached & set(node.operands)} <= {"argmax"}
    (product,) = [node for node in found if node.base == "mul"]
    assert product.differentiable and not detached & set(product.operands)


@pytest.mark.slow
@pytest.mark.parametrize("called", [
    "F.dropout(x, 0.0)", "F.dropout2d(x, 0.0)", "F.alpha_dropout(x, 0.3, False)", "x.flatten(-1)", "torch.atleast_3d(x)",
    "x.real", "x.positive()", "torch.resolve_conj(x)", "x.conj_physical()",
])
def test_what_hands_back_its_operand_under_no_grad(model_file: Callable[[str], str], called: str) -> None:
    """The gradient of what reads it goes on."""
    forward = f"x = self.f(x)\n        with torch.no_grad():\n            x = {called}\n        x = x.sin()"
    found = nodes(traced(model_file(NET.format(forward=forward, rest=""))))
    assert "detach" not in {node.base for node in found}
    assert all(node.differentiable for node in found if node.base in ("linear", "sin"))


def test_what_makes_another_tensor_under_no_grad(model_file: Callable[[str], str]) -> None:
    under = "with torch.no_grad():\n            x = x.flatten(-2).unflatten(1, (16, 16))"
    forward = f"x = self.f(x)\n        {under}\n        x = x.sin()"
    found = nodes(traced(model_file(NET.format(forward=forward, rest=""))))
    assert "detach" in {node.base for node in found}
    assert not any(node.differentiable for node in found if node.base == "sin")


@pytest.mark.slow
@pytest.mark.parametrize(("forward", "base"), [
    ("x = self.f(x.float())", "linear"), ("x = (x.float() @ self.a) @ self.b.float()", "matmul"),
    ("x = F.layer_norm(x.float(), (16,), self.b[0]).to(x.dtype)", "layer_norm"),
    ("x = x.index_add(1, torch.arange(16), x.float())", "index_add"),
])
def test_what_torch_refuses_in_two_dtypes(model_file: Callable[[str], str], forward: str, base: str) -> None:
    """In half precision; in float32 it is one dtype."""
    spec = model_file(NET.format(forward=forward, rest=""))
    with pytest.raises(ModelError, match=rf"user_model.py:\d+: {base} is given \w+ and \w+; torch computes it in one dtype"):
        traced(spec, "bfloat16")
    assert base in {node.base for node in nodes(traced(spec, "float32"))}


@pytest.mark.parametrize(("called", "op"), [("torch.max(x, self.b[0])", "maximum"), ("x.min(self.b[0])", "minimum")])
def test_the_larger_of_two_is_no_reduction(model_file: Callable[[str], str], called: str, op: str) -> None:
    """What it keeps, holds and may be split along is that of an operation by element."""
    found = nodes(traced(model_file(NET.format(forward=f"x = {called}", rest=""))))
    assert op in {node.op for node in found} and not {"max", "min"} & {node.base for node in found}


def test_a_norm_may_have_wider_parameters(model_file: Callable[[str], str]) -> None:
    forward = "x = F.layer_norm(x, (16,), self.b[0].float(), self.a[:, 0].float())"
    assert "layer_norm" in {node.base for node in nodes(traced(model_file(NET.format(forward=forward, rest="")), "bfloat16"))}


@pytest.mark.slow
def test_copies_of_what_nothing_changes_are_left_out(model_file: Callable[[str], str]) -> None:
    """A step that changes something in place is exported with a copy for every dropout of probability 0."""
    forward = "x = F.dropout(self.f(x), 0.0).relu_()\n        x = x.transpose(1, 2).clone().transpose(1, 2) + x.clone()"
    graph = traced(model_file(NET.format(forward=forward, rest="")))
    assert not {"clone", "dropout"} & {node.base for node in nodes(graph)}


@pytest.mark.parametrize("called", ["softmax", "log_softmax"])
def test_a_softmax_in_another_precision_is_a_cast_first(model_file: Callable[[str], str], called: str) -> None:
    """As torch computes it; over a split dim the runtime's own takes no dtype."""
    forward = f"x = F.{called}(self.f(x), dim=-1, dtype=torch.float32).to(x.dtype) * F.{called}(x, -1, dtype=x.dtype)"
    graph = traced(model_file(NET.format(forward=forward, rest="")), "bfloat16")
    found = [node for node in nodes(graph) if node.base == called]
    assert [(node.argument("dtype"), node.type.dtype) for node in found] == [(None, "float32"), (None, "bfloat16")]
    made = {node.name: node for node in nodes(graph)}
    assert made[found[0].operands[0]].op == "to.dtype" and made[found[0].operands[0]].differentiable


@pytest.mark.slow
def test_dropout_of_a_step_that_export_made_functional(model_file: Callable[[str], str]) -> None:
    forward = "x = F.dropout(self.f(x), 0.25)\n        x[:, 0] = 0.0"
    found = nodes(traced(model_file(NET.format(forward=forward, rest=""))))
    assert [node.argument("p") for node in found if "dropout" in node.base] == [0.25]
    assert not any(node.base == "native_dropout" for node in found)


@pytest.mark.slow
@pytest.mark.parametrize(("called", "equations"), [
    ("'btd,dr,re->bte', x, self.a, self.b", ["btd,dr->btr", "btr,re->bte"]),
    ("'btd,dr,re', x, self.a, self.b", ["btd,dr->btr", "btr,re->bet"]),
    ("'...d,dr->...r', x, self.a @ self.b", ["abd,dr->abr"]),
    ("'btd,de->bte', x, self.f.weight", ["btd,de->bte"]),
])
def test_products_in_pairs(model_file: Callable[[str], str], called: str, equations: list[str]) -> None:
    graph = traced(model_file(NET.format(forward=f"x = torch.einsum({called})", rest="")))
    assert [node.argument("equation") for node in nodes(graph) if node.base == "einsum"] == equations


def test_products_that_are_named_alike(model_file: Callable[[str], str]) -> None:
    """What a product of four is made of takes no name that export has given."""
    called = "x = torch.einsum('btd,dr,re,ef->btf', x, self.a, self.b, self.f.weight)\n        " * 3
    graph = traced(model_file(NET.format(forward=called, rest="")))
    assert sum(node.base == "einsum" for block in graph.blocks for node in graph.body_of[block.body].nodes) == 9


def test_a_loss_that_broadcasts_nothing(model_file: Callable[[str], str]) -> None:
    rest = "\ndef loss(outputs, batch):\n    return F.mse_loss(outputs, F.one_hot(batch['labels'], 48).to(outputs.dtype))\n"
    found = {node.base for node in nodes(traced(model_file(NET.format(forward="x = self.f(x)", rest=rest))))}
    assert "broadcast_tensors" not in found and not {"getitem", "expand"} & found


@pytest.mark.slow
def test_a_grouped_product_of_another_library(config_file: Callable[..., str]) -> None:
    spec = config_file(**MIXTRAL)
    found = {node.base for node in nodes(traced(spec, "float32"))}
    assert "_grouped_mm" in found and not any("::" in base for base in found)
    with pytest.raises(ModelError, match="grouped_mm does not compute in float64; --precision bf16 or fp32"):
        traced(spec, "float64")


def test_operations_of_other_libraries(model_file: Callable[[str], str]) -> None:
    spec = model_file(FOREIGN + NET.format(forward="x = torch.ops.stranger.double(self.f(x))", rest=""))
    with pytest.raises(ModelError, match=r"stranger::double is no operation of torch's; the emitted program needs nothing but"):
        traced(spec)


@pytest.mark.parametrize("called", [
    "F.alpha_dropout(x, 0.3, False)", "F.feature_alpha_dropout(x, 0.3, False)", "F.dropout2d(x, 0.3, False)",
    "F.alpha_dropout(x, 0.0, True)", "nn.AlphaDropout(0.3).eval()(x)",
])
def test_what_drops_nothing_is_its_operand(model_file: Callable[[str], str], called: str) -> None:
    assert not any("dropout" in node.base for node in nodes(traced(model_file(NET.format(forward=f"x = {called}", rest="")))))


def test_a_part_that_is_the_whole_is_left_out(model_file: Callable[[str], str]) -> None:
    """A layer of adjustable width at its widest."""
    graph = traced(model_file(NET.format(forward="x = self.f(x).narrow(-1, 0, 16)", rest="")))
    assert "narrow" not in {node.base for node in nodes(graph)}


@pytest.mark.slow
@pytest.mark.parametrize("called", ["F.rrelu(x, 0.1, 0.4)", "nn.RReLU(0.1, 0.4, inplace=True).eval()(2 * x)"])
def test_a_slope_that_is_not_drawn_is_the_mean_one(model_file: Callable[[str], str], called: str) -> None:
    found = nodes(traced(model_file(NET.format(forward=f"x = {called}", rest=""))))
    (node,) = (node for node in found if "relu" in node.base)
    assert node.op == "leaky_relu" and node.argument("negative_slope") == 0.25


@pytest.mark.slow
@pytest.mark.parametrize(("called", "base"), [
    ("F.rrelu(x, training=True)", "rrelu"), ("F.rrelu_(2 * x, training=True)", "rrelu"),
    ("torch.poisson(x.exp()) * x", "poisson"), ("x * torch.empty_like(x).cauchy_()", "cauchy"),
])
def test_what_draws_random_numbers(model_file: Callable[[str], str], called: str, base: str) -> None:
    """In-place forms too: no two ranks would draw the same."""
    with pytest.raises(ModelError, match=f"{base} draws random numbers in forward; draw by dropout, "):
        traced(model_file(NET.format(forward=f"x = {called}", rest="")))


@pytest.mark.parametrize("called", [
    "F.embedding(input_ids, self.e.weight, sparse=True)", "torch.gather(x, 1, input_ids[..., None] // 8, sparse_grad=True)",
])
def test_gradients_are_dense(model_file: Callable[[str], str], called: str) -> None:
    found = nodes(traced(model_file(NET.format(forward=f"x = x + {called}", rest=""))))
    assert not any(argument and key in ("sparse", "sparse_grad") for node in found for key, argument in node.arguments)
    assert {"embedding", "gather"} & {node.base for node in found}
