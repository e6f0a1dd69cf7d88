"""Every conversion and vocabulary-parallel operation on 2 and 4 ranks against the whole, forward and backward."""

from __future__ import annotations

import pytest
import torch

from runtime.collectives import TensorAxis
from tests.runtime import conversion_cases as cases
from tests.runtime.group import ProcessPool

RANKS = (2, 4)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", cases.CONVERSIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["real", "complex"])
def test_conversion_moves_value_and_gradient(pool: ProcessPool, name: str, ranks: int, dtype: torch.dtype) -> None:
    for forward, backward in pool.run(ranks, cases.conversion_errors, name, dtype):
        assert forward < 1e-14
        assert backward < 1e-14


@pytest.mark.parametrize("ranks", RANKS)
def test_what_lies_end_to_end_is_not_copied(pool: ProcessPool, ranks: int) -> None:
    for found in pool.run(ranks, cases.conversions_of_one_sample):
        assert len(found) == 2
        for forward, backward, copies in found:
            assert max(forward, backward) < 1e-14 and copies == 0


@pytest.mark.parametrize("ranks", RANKS)
def test_integers_convert_without_gradient(pool: ProcessPool, ranks: int) -> None:
    assert all(pool.run(ranks, cases.integer_conversions))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("vocabulary", "padding"), [(12, None), (11, None), (11, 3), (11, -1)])
def test_embedding_of_own_rows_sums_to_the_whole(
    pool: ProcessPool, vocabulary: int, padding: int | None, ranks: int
) -> None:
    for forward, gradient in pool.run(ranks, cases.embedding_errors, vocabulary, padding):
        assert forward < 1e-14
        assert gradient < 1e-14


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("shape", "dtype", "tolerance"), [
    ((30, 12), torch.float64, 1e-12), ((30, 11), torch.float64, 1e-12), ((6, 11, 5), torch.float64, 1e-12),
    ((30, 11), torch.bfloat16, 2e-3),
])
def test_cross_entropy_over_split_classes(
    pool: ProcessPool, shape: tuple[int, ...], dtype: torch.dtype, tolerance: float, ranks: int
) -> None:
    for loss, gradient in pool.run(ranks, cases.cross_entropy_errors, shape, dtype):
        assert loss < tolerance
        assert gradient < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("shape", "dtype", "tolerance"), [
    ((30, 11), torch.float64, 1e-12), ((6, 11, 5), torch.float64, 1e-12), ((30, 11), torch.bfloat16, 2e-3),
])
def test_cross_entropy_over_split_classes_some_rows_at_a_time(
    pool: ProcessPool, shape: tuple[int, ...], dtype: torch.dtype, tolerance: float, ranks: int
) -> None:
    for at_once in (1, 70):
        for loss, gradient in pool.run(ranks, cases.cross_entropy_in_pieces, shape, dtype, at_once):
            assert loss < tolerance
            assert gradient < tolerance


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("logarithm", "dim"), [(False, 1), (True, 1), (False, -1), (True, -1)])
def test_softmax_over_a_split_dim(pool: ProcessPool, logarithm: bool, dim: int, ranks: int) -> None:
    for forward, backward in pool.run(ranks, cases.softmax_errors, logarithm, dim):
        assert forward < 1e-14
        assert backward < 1e-13


def test_degree_one_is_the_plain_operation() -> None:
    tp = TensorAxis(None, 0, 1)
    x = torch.randn(4, 6)
    for result in (tp.copy(x), tp.all_reduce(x), tp.all_gather(x, 0), tp.reduce_scatter(x, 0), tp.all_to_all(x, 0, 1)):
        assert result is x
    assert torch.equal(tp.slice(x, dim=1), x)
    assert tp.size(10, unit=5) == 10
    assert torch.equal(tp.softmax(x, 1), x.softmax(1))


def test_an_uneven_gather_is_refused() -> None:
    class Group:
        group_name = "none"

    tp = TensorAxis(Group(), 0, 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not divide over 4 ranks"):
        tp.reduce_scatter(torch.randn(6, 2), 0)
    with pytest.raises(ValueError, match="does not divide over 4 ranks"):
        tp.slice(torch.randn(6, 2, requires_grad=True), 0)
