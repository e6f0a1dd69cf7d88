"""A backward pass that the program would not run is refused by its line; one that autograd derives as well is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from planner.ir.errors import ModelError
from planner.trace import load_model, trace_model
from tests.trace.test_trace import both

MODEL = """
from torch.utils.checkpoint import checkpoint

class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return {forward}
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return {backward}

class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.a, self.o = nn.Embedding(48, 16), nn.Linear(16, 16), nn.Linear(16, 48)
        {built}
    def forward(self, input_ids):
        x = self.a(self.e(input_ids))
        {line}
        return self.o(x)

def make():
    return M()
"""
NOT_RUN = "the program would not run it: "
FORWARD, BUILT = 24, 21  # lines of the file


def model(built: str = "pass", line: str = "pass", forward: str = "x.sin()", backward: str = "g * x.cos()") -> str:
    return MODEL.format(built=built, line=line, forward=forward, backward=backward)


def refusal(spec: str) -> str:
    with pytest.raises(ModelError) as error:
        trace_model(load_model(spec, {}, 16), sequence=16, dtype="float32")
    return str(error.value).replace(str(Path(spec.rpartition(":")[0])), "model")


@pytest.mark.parametrize(("forward", "backward"), [
    ("torch.round(4 * x) / 4", "g"), ("x.view_as(x)", "-0.5 * g"), ("x.view_as(x)", "g.clamp(-100, 100)"),
    ("x.sin()", "None"),
    # no number beyond one, and next to nothing near zero
    ("(1 - (x @ x.mT).acos() / torch.pi) ** 19", "9.5 * ((v := g * (1 - (x @ x.mT).acos() / torch.pi) ** 19) + v.mT) @ x"),
])
def test_a_function_of_another_gradient(model_file: Callable[[str], str], forward: str, backward: str) -> None:
    said = refusal(model_file(model(line="x = Own.apply(x)", forward=forward, backward=backward)))
    assert said.startswith(f"model:{FORWARD}: Own.backward is not the derivative of its forward; {NOT_RUN}")


@pytest.mark.parametrize(("forward", "backward"), [
    ("(x * x + 2).acos()", "g * x"),  # never a number
    ("1e-9 * x", "2e-9 * g"),  # no more than rounding
])
def test_a_function_of_which_nothing_is_told(model_file: Callable[[str], str], forward: str, backward: str) -> None:
    said = refusal(model_file(model(line="x = Own.apply(x)", forward=forward, backward=backward)))
    assert said.startswith(f"model:{FORWARD}: Own.backward could not be checked: on the values tried, its gradients are ")
    assert said.endswith(f"{NOT_RUN}write what autograd derives; x + (f(x) - x).detach() is f(x) with the gradient of x")


def test_a_function_of_another_gradient_near_zero(model_file: Callable[[str], str]) -> None:
    """Such as RecurrentGemma's, however many values it is tried on."""
    line = "x = Own.apply(x.repeat(1, 1, 64))[..., :16]"
    spec = model_file(model(line=line, forward="x.sqrt()", backward="g / (4 * x).clip(min=1e-6).sqrt()"))
    trace_model(load_model(spec, {}, 16), sequence=16, dtype="float32")


def test_a_function_by_another_name(model_file: Callable[[str], str]) -> None:
    """Which the model has taken before anything is traced."""
    said = refusal(model_file(model(built="self.own = Own.apply", line="x = self.own(x)", backward="2 * g")))
    assert said.startswith(f"model:{FORWARD}: Own.backward is not the derivative of its forward; {NOT_RUN}")


def test_a_function_that_cannot_be_tried(model_file: Callable[[str], str]) -> None:
    said = refusal(model_file(model(line="x = Own.apply(x)", backward="g * x.cos() + 0 * unknown")))
    assert said.startswith(f"model:{FORWARD}: Own.backward could not be tried on a few values (NameError: name 'unknown'")


def test_a_function_whose_forward_asks_which_gradients_are_needed(model_file: Callable[[str], str]) -> None:
    spec = model_file(model(line="x = Own.apply(x)", forward="x.sin() if ctx.needs_input_grad == (True,) else 2 * x"))
    assert both(load_model(spec, {}, None))[1] < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("line", ["x = Top.apply(x)[0]", "y, top = Top.apply(x); x = y * top"])
def test_a_result_that_is_not_differentiable(model_file: Callable[[str], str], line: str) -> None:
    """Is left out, and a constant to what uses it."""
    own = """
class Top(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y, top = x.sigmoid(), x.amax(-1, keepdim=True)
        ctx.mark_non_differentiable(top)
        ctx.save_for_backward(y)
        return y, top
    @staticmethod
    def backward(ctx, g, _):
        (y,) = ctx.saved_tensors
        return g * y * (1 - y){more}
"""
    spec = model_file(own.format(more="") + model(line=line))
    assert both(load_model(spec, {}, None))[1] < 1e-12
    said = refusal(model_file(own.format(more=" * 2") + model(line=line)))
    assert "Top.backward is not the derivative of its forward" in said


@pytest.mark.slow
@pytest.mark.parametrize(("forward", "backward"), [
    ("x.view(-1, 16, 16).mT.sin().mT.reshape(x.shape)", "g * x.cos()"),  # as large as it is
    ("x + torch.zeros(16)", "g.clone()"),  # of the default dtype
    ("x.acosh()", "g * (x * x - 1).rsqrt()"),  # a number for some values alone
])
def test_functions_that_take_some_values_alone(model_file: Callable[[str], str], forward: str, backward: str) -> None:
    spec = model_file(model(line="x = Own.apply(x)", forward=forward, backward=backward))
    trace_model(load_model(spec, {}, 16), sequence=16, dtype="float32")


@pytest.mark.slow
def test_a_function_of_places(model_file: Callable[[str], str]) -> None:
    """Right where no two are the same, as those of experts' tokens are."""
    code = MODEL
    for told, said in (("(ctx, x)", "(ctx, x, at)"), ("save_for_backward(x)", "save_for_backward(at)"), ("(x,) =", "(at,) =")):
        code = code.replace(told, said)
    code = code.format(
        built="pass", line="x = Own.apply(x.mT, torch.arange(15, -1, -1)).mT", forward="x.index_select(1, at)",
        backward="torch.empty_like(g).index_copy_(1, at, g), None",
    )
    trace_model(load_model(model_file(code), {}, 16), sequence=16, dtype="float32")


@pytest.mark.slow
def test_a_function_that_is_told_its_sizes(model_file: Callable[[str], str]) -> None:
    """It is tried on short tensors, but for the extents that its whole numbers fit."""
    own = """
class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, width):
        ctx.width = width
        ctx.save_for_backward(x)
        a, b = x.split([width, width], -1)
        return a.sin() * b
    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors[0].split(ctx.width, -1)
        return torch.cat((g * b * a.cos(), {second}), -1), None
"""
    line = "x = Gate.apply(x.repeat(1, 64, 32), 256).view(-1, 64, 16, 256).mean(1)[..., :16]"
    spec = model_file(own.format(second="g * a.sin()") + model(line=line))
    trace_model(load_model(spec, {}, 16), sequence=16, dtype="float32")
    said = refusal(model_file(own.format(second="g * a") + model(line=line)))
    assert "Gate.backward is not the derivative of its forward" in said


def test_a_function_in_a_checkpoint_leaves_what_follows_its_gradients(model_file: Callable[[str], str]) -> None:
    line = "x = checkpoint(lambda z: Own.apply(self.a(z)), x, use_reentrant=False); x = self.a(x)"
    graph = trace_model(load_model(model_file(model(line=line)), {}, 16), sequence=16, dtype="float32")
    assert all(parameter.trainable for parameter in graph.parameters)


@pytest.mark.slow
def test_what_the_model_compiles_itself(model_file: Callable[[str], str]) -> None:
    """Is traced, and never run on tensors that hold nothing."""
    spec = model_file(model(built="self.a = torch.compile(self.a)", line="x = torch.compile(lambda z: 2 * z)(x)"))
    trace_model(load_model(spec, {}, 16), sequence=16, dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize(("forward", "backward"), [
    ("x.sin()", "g * x.cos()"), ("0.5 * x * x", "g * x"), ("x.abs().sqrt()", "g * x.sign() / (2 * x.abs().sqrt())"),
])
def test_a_function_of_the_same_gradient(model_file: Callable[[str], str], forward: str, backward: str) -> None:
    spec = model_file(model(line="x = Own.apply(x)", forward=forward, backward=backward))
    assert both(load_model(spec, {}, None))[1] < 1e-12


def test_gradients_straight_through(model_file: Callable[[str], str]) -> None:
    """What the refusal advises."""
    spec = model_file(model(line="x = x + (torch.round(4 * x) / 4 - x).detach()"))
    assert both(load_model(spec, {}, None))[1] < 1e-12


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_of_a_tensor(model_file: Callable[[str], str], name: str) -> None:
    tensor = "x" if name == "register_hook" else "self.a.weight"
    said = refusal(model_file(model(line=f"{tensor}.{name}(lambda g: 2 * g)")))
    assert said.startswith(f"model:{FORWARD}: a hook changes the gradient of a tensor; {NOT_RUN}")


@pytest.mark.parametrize(("built", "what"), [
    ("self.a.weight.register_hook(lambda g: 2 * g)", "parameter a.weight"),
    ("self.a.weight.register_post_accumulate_grad_hook(lambda p: None)", "parameter a.weight"),
    ("self.a.register_full_backward_hook(lambda m, i, o: (2 * i[0],))", "module a"),
    ("self.a.register_full_backward_pre_hook(lambda m, o: (2 * o[0],))", "module a"),
    ("self.register_backward_hook(lambda m, i, o: None)", "the model"),
])
def test_hooks_of_the_constructor(model_file: Callable[[str], str], built: str, what: str) -> None:
    said = refusal(model_file(model(built=built)))
    assert said.startswith(f"model:{BUILT}: {what} has a hook that changes its gradient; {NOT_RUN}")


def test_a_hook_that_forward_gives_a_module(model_file: Callable[[str], str]) -> None:
    said = refusal(model_file(model(line="self.o.register_full_backward_pre_hook(lambda m, o: (2 * o[0],))")))
    assert "a hook that changes its gradient" in said


def test_hooks_of_the_forward_pass_are_traced(model_file: Callable[[str], str]) -> None:
    built = ("self.e.register_forward_hook(lambda m, i, o: 3 * o); self.a.register_forward_hook(lambda m, i, o: o * o); "
             "self.a.register_forward_pre_hook(lambda m, i: (i[0].sin(),))")
    assert both(load_model(model_file(model(built=built)), {}, None))[1] < 1e-12


def test_checkpoints(model_file: Callable[[str], str]) -> None:
    said = refusal(model_file(model(line="x = checkpoint(self.a, x, use_reentrant=True)")))
    assert said.startswith(f"model:{FORWARD}: a reentrant checkpoint hides what it computes from the trace; give checkpoint ")
    spec = model_file(model(line="x = checkpoint(self.a, x, use_reentrant=False)"))
    assert both(load_model(spec, {}, None))[1] < 1e-12
