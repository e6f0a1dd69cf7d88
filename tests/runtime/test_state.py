"""Weights, optimizer and checkpoints: the same training under every plan, and across a change of plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime import checkpoint
from runtime.initialize import CHUNK, initial_value
from tests.runtime import cases
from tests.runtime.group import ProcessPool
from tests.runtime.toy_program import RECIPES, PlainModel, Toy
from tests.wide import wide

pytestmark = pytest.mark.slow

RUN = ["--learning-rate", "1e-2", "--warmup", "2", "--clip", "0.5", "--seed", "7"]
MIXED = (2, 0, 1, 3, 2, 2)
PLANS = {
    "one process": Toy(),
    "data 2": Toy(data=2, zero=(3, 0, 1, 3, 2, 3)),
    "tensor 2 x data 2": Toy(tensor=2, data=2, zero=(3, 0, 1, 3, 2, 3)),
    "pipeline 2 x data 2": Toy(pipeline=2, data=2, microbatches=4, zero=MIXED),
    "pipeline 2 x tensor 2, zbv": Toy(pipeline=2, tensor=2, microbatches=4, schedule="zbv", zero=(2, 0, 1, 1, 2, 2)),
    "hybrid": Toy(data=4, zero_group=2, zero=MIXED),
}


def ranks(toy: Toy) -> int:
    return toy.pipeline * toy.data * toy.tensor


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_starts_from_the_same_weights(pool: ProcessPool, name: str) -> None:
    assert max(pool.run(ranks(PLANS[name]), cases.start_of, PLANS[name], 5)) == 0.0


@pytest.mark.parametrize("name", PLANS)
def test_training_equals_the_plain_models(pool: ProcessPool, name: str) -> None:
    expected, _ = cases.plain_trajectory(4, 16, 7, 0.5)
    for reports in pool.run(ranks(PLANS[name]), cases.trajectory, PLANS[name], [*RUN, "--steps", "4"]):
        for got, want in zip(reports, expected, strict=True):
            assert got == pytest.approx(want, abs=1e-10)


@pytest.mark.parametrize(("first", "second"), [
    ("one process", "tensor 2 x data 2"), ("tensor 2 x data 2", "pipeline 2 x data 2"),
    wide("pipeline 2 x data 2", "pipeline 2 x tensor 2, zbv"), ("pipeline 2 x tensor 2, zbv", "hybrid"),
    wide("hybrid", "one process"),
])
def test_a_checkpoint_resumes_under_another_plan(pool: ProcessPool, tmp_path: Path, first: str, second: str) -> None:
    expected, model = cases.plain_trajectory(4, 16, 7, 0.5)
    run = [*RUN, "--checkpoint", str(tmp_path)]
    pool.run(ranks(PLANS[first]), cases.trajectory, PLANS[first], [*run, "--steps", "2"])
    (tmp_path / "step-00000009.partial").mkdir()
    for reports in pool.run(ranks(PLANS[second]), cases.trajectory, PLANS[second], [*run, "--steps", "4"]):
        assert len(reports) == 2
        for got, want in zip(reports, expected[2:], strict=True):
            assert got == pytest.approx(want, abs=1e-10)
    whole = checkpoint.load_plain(tmp_path / "step-00000004")
    for fqn, parameter in model.named_parameters():
        assert torch.allclose(whole[fqn], parameter, atol=1e-10, rtol=0)
    assert torch.equal(whole.pop("head.weight"), whole["embedding.weight"]), "the further name of the tied parameter"
    PlainModel().double().load_state_dict(whole)


def test_the_start_and_the_gradients_are_exported_for_the_plain_model(pool: ProcessPool, tmp_path: Path) -> None:
    toy = PLANS["pipeline 2 x data 2"]
    start, gradients = str(tmp_path / "start.pt"), str(tmp_path / "gradients.pt")
    pool.run(4, cases.exported, toy, gradients, ["--seed", "7", "--export-start", start, "--dump-gradients"])
    model = cases.plain(7)
    exported = torch.load(start)
    assert torch.equal(exported["head.weight"], exported["embedding.weight"])
    for fqn, parameter in model.named_parameters():
        assert torch.equal(exported[fqn], parameter)
    batch = cases.toy_batches(7, 16).at(0)
    (model(**batch) / batch["labels"].numel()).backward()
    dumped = torch.load(gradients)
    for fqn, parameter in model.named_parameters():
        assert torch.allclose(dumped[fqn], parameter.grad, atol=1e-12, rtol=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gradients.pt", "start.pt"]


@pytest.mark.parametrize(("saves", "clip", "begin"), [
    (False, "0", "begin again"), (True, "1", "go on from the checkpoint of step 1, or one before it,"),
])
def test_a_step_that_is_not_finite_ends_every_rank(
    pool: ProcessPool, saves: bool, clip: str, begin: str, tmp_path: Path
) -> None:
    """Only the second of two stages knows a loss."""
    run = ["--clip", clip, *(["--checkpoint", str(tmp_path)] if saves else [])]
    said = (
        f"step 2: its loss is nan and its gradient norm nan, and no update was kept; {begin} with a lower "
        "--learning-rate, another --clip or other data"
    )
    assert pool.run(2, cases.diverging, Toy(pipeline=2, microbatches=4, precision="fp32"), run) == [said] * 2


@pytest.mark.parametrize("toy", [Toy(data=2), Toy(pipeline=2, microbatches=4, precision="fp16")])
def test_a_token_file_that_is_cut_ends_every_rank(pool: ProcessPool, toy: Toy, tmp_path: Path) -> None:
    """Though one rank alone finds out, and the others wait for it in the step."""
    said = f"{tmp_path / 'tokens-1'}: became shorter while the run read it; a file that stays as it is while a run reads it"
    for loss, error in pool.run(2, cases.cut_data, toy, str(tmp_path)):
        assert loss > 0 and error == said


def test_training_starts_from_another_runs_parameters(pool: ProcessPool, tmp_path: Path) -> None:
    pool.run(1, cases.trajectory, Toy(), [*RUN, "--steps", "2", "--checkpoint", str(tmp_path)])
    whole = checkpoint.load_plain(tmp_path / "step-00000002")
    start = tmp_path / "start.pt"
    pool.run(4, cases.exported, PLANS["tensor 2 x data 2"], str(start), [
        "--steps", "1", "--init-from", str(tmp_path / "step-00000002"), "--export-start",
    ])
    for fqn, value in torch.load(start).items():
        assert torch.equal(value, whole["embedding.weight" if fqn == "head.weight" else fqn])


def test_chunks_make_one_tensor_and_cast_from_float32() -> None:
    shape = (3, CHUNK // 2)
    recipe = [("normal", 0.0, 0.02), ("shift", 1.0), ("zero_row", 1)]
    whole = initial_value("w", shape, torch.float32, recipe, 3)
    assert torch.equal(whole.bfloat16(), initial_value("w", shape, torch.bfloat16, recipe, 3))
    assert float(whole[1].abs().max()) == 0.0
    assert float(whole[2].mean()) == pytest.approx(1.0, abs=1e-3)
    assert not torch.equal(whole[0], initial_value("v", shape, torch.float32, recipe, 3)[0])
    assert not torch.equal(whole[0], initial_value("w", shape, torch.float32, recipe, 4)[0])


def test_a_value_is_kept_and_an_unknown_step_refused() -> None:
    import base64

    raw = base64.b64encode(torch.tensor([1.5, 2.5]).numpy().tobytes()).decode()
    assert initial_value("w", (2,), torch.float32, [("value", raw)], 0).tolist() == [1.5, 2.5]
    with pytest.raises(ValueError, match="unknown initialisation step"):
        initial_value("w", (2,), torch.float32, [("conjure",)], 0)


def test_every_recipe_of_the_toy_is_replayed() -> None:
    assert set(RECIPES) == {fqn for fqn, _ in PlainModel().named_parameters()}
