"""A whole program against the plain model in one process: every gradient, the loss and the norm, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.runtime.cases import collectives_of_a_step, first_loss, gradient_error, receive_buffers
from tests.runtime.group import ProcessPool
from tests.runtime.toy_program import Toy

pytestmark = pytest.mark.slow

MIXED = (2, 0, 1, 3, 2, 2)
CASES = {
    "alone": Toy(),
    "data 2, zero mixed": Toy(data=2, zero=(3, 0, 1, 3, 2, 3)),
    "tensor 2": Toy(tensor=2),
    "tensor 4": Toy(tensor=4, zero=(1,) * 6),
    "data 2 x tensor 2, zero mixed": Toy(data=2, tensor=2, zero=(3, 0, 1, 3, 2, 3)),
    "hybrid 2 x 2": Toy(data=4, zero_group=2, zero=(2, 0, 1, 3, 2, 2)),
    "pipeline 2, 1f1b": Toy(pipeline=2, microbatches=4),
    "pipeline 2 x data 2, 1f1b, zero mixed": Toy(pipeline=2, data=2, microbatches=4, zero=MIXED),
    "pipeline 2 x data 2, gpipe, zero mixed": Toy(pipeline=2, data=2, microbatches=4, schedule="gpipe", zero=MIXED),
    "pipeline 2 x tensor 2, interleaved": Toy(
        pipeline=2, tensor=2, microbatches=4, schedule="interleaved-1f1b", virtual=2, zero=MIXED
    ),
    "pipeline 2 x data 2, interleaved zero-bubble": Toy(
        pipeline=2, data=2, microbatches=4, schedule="interleaved-zero-bubble", virtual=2, zero=(2, 0, 1, 1, 2, 2)
    ),
    "data 2, recomputed, zero mixed": Toy(data=2, zero=(3, 0, 1, 3, 2, 3), recompute=True),
    "pipeline 2 x data 2, recomputed, zero 3": Toy(
        pipeline=2, data=2, microbatches=4, zero=(3,) * 6, recompute=True
    ),
    "pipeline 4": Toy(pipeline=4, microbatches=8, batch=16),
    "hybrid, zero 3": Toy(pipeline=1, data=4, zero_group=2, zero=(3,) * 6, microbatches=4),
    "pipeline 2 x data 2, zbv": Toy(pipeline=2, data=2, microbatches=4, schedule="zbv", zero=(2, 0, 1, 1, 2, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_loss_and_norm_equal_the_plain_models(pool: ProcessPool, name: str) -> None:
    toy = CASES[name]
    for gradient, loss, norm in pool.run(toy.pipeline * toy.data * toy.tensor, gradient_error, toy):
        assert gradient < 1e-12
        assert loss < 1e-12
        assert norm < 1e-12


@pytest.mark.parametrize(("plan", "same"), [
    (Toy(dropout=True), Toy(dropout=True, recompute=True)),
    (Toy(tensor=2, dropout=True), Toy(tensor=2, dropout=True, recompute=True)),
    (Toy(data=2, dropout=True), Toy(data=2, dropout=True, zero=(3,) * 6, recompute=True)),
    (Toy(microbatches=4, dropout=True), Toy(pipeline=2, microbatches=4, dropout=True)),
    (
        Toy(microbatches=4, dropout=True),
        Toy(pipeline=2, microbatches=4, dropout=True, schedule="interleaved-zero-bubble", virtual=2),
    ),
])
def test_dropout_is_the_same_under_recomputation_and_pipelining(pool: ProcessPool, plan: Toy, same: Toy) -> None:
    one, other = (pool.run(toy.pipeline * toy.data * toy.tensor, first_loss, toy)[0] for toy in (plan, same))
    assert one == pytest.approx(other, abs=1e-12)
    undropped = pool.run(plan.data * plan.tensor, first_loss, replace(plan, dropout=False))[0]
    assert one[0] != pytest.approx(undropped[0], abs=1e-3)


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize(("zero", "gathers", "scatters", "reduces"), [(0, 0, 0, 1), (1, 1, 1, 0), (2, 1, 4, 0), (3, 8, 4, 0)])
def test_traffic_of_each_zero_stage(
    pool: ProcessPool, zero: int, gathers: int, scatters: int, reduces: int, pipeline: int
) -> None:
    toy = Toy(pipeline=pipeline, data=2, microbatches=4, zero=(zero,) * 6, schedule="gpipe")
    for counts in pool.run(2 * pipeline, collectives_of_a_step, toy):
        units = 5 if pipeline == 1 else 3
        calls = {kind: counts.get(kind, (0, 0))[0] / units for kind in ("allgather", "reduce_scatter", "allreduce")}
        assert calls == {"allgather": gathers, "reduce_scatter": scatters, "allreduce": reduces}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_receive_buffers_are_taken_in_turns(pool: ProcessPool, schedule: str) -> None:
    toy = Toy(pipeline=4, microbatches=16, schedule=schedule)
    kept = pool.run(4, receive_buffers, toy)
    assert [forward for forward, _ in kept] == ([0, 4, 3, 2] if schedule == "1f1b" else [0, 16, 16, 16])
    assert [gradients for _, gradients in kept] == [2, 2, 2, 0]
    for report in pool.run(4, gradient_error, toy):
        assert max(report) < 1e-12
