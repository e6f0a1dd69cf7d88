"""Cross-entropy of half precisions: what float32 says, however many rows are computed at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from planner.costing import losses
from runtime import vocabulary

SHAPES = [((30, 12), (30,)), ((6, 11, 5), (6, 5)), ((1, 7), (1,)), ((11,), ()), ((0, 4), (0,))]


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize(("shape", "labels"), SHAPES, ids=str)
@pytest.mark.parametrize("at_once", [vocabulary.AT_ONCE, 64, 7, 1])
def test_half_cross_entropy(
    at_once: int, shape: tuple[int, ...], labels: tuple[int, ...], ignored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(1)
    logits = (5 * torch.randn(shape, generator=generator)).bfloat16().requires_grad_()
    target = torch.randint(shape[min(1, len(shape) - 1)], labels, generator=generator)
    if ignored and labels:
        target.view(-1)[::3] = -100
    wide = logits.detach().float().requires_grad_()
    expected = F.cross_entropy(wide, target, reduction="sum")
    loss = vocabulary.HalfCrossEntropy.apply(logits, target, -100)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    (0.3 * expected).backward()
    (0.3 * loss).backward()
    assert logits.grad is not None and wide.grad is not None
    torch.testing.assert_close(logits.grad, wide.grad.bfloat16(), rtol=2e-2, atol=2e-3)


def test_pieces_are_whole_rows_and_cover_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for at_once, rows in ((1, [1] * 5), (12, [2, 2, 1]), (30, [5]), (1000, [5])):
        monkeypatch.setattr(vocabulary, "AT_ONCE", at_once)
        logits, other = torch.arange(30).view(5, 6), torch.arange(5).view(5, 1)
        pieces = list(vocabulary._in_pieces(logits, other))
        assert [len(piece) for piece, _ in pieces] == [len(piece) for _, piece in pieces] == rows
        assert torch.equal(torch.cat([piece for piece, _ in pieces]), logits)


def test_the_plan_counts_the_pieces_that_the_program_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert losses.AT_ONCE == vocabulary.AT_ONCE
    for shape in ((5, 6), (3, 4, 5), (7,), (0, 4)):
        for at_once in (1, 12, 30, 1000):
            monkeypatch.setattr(losses, "AT_ONCE", at_once)
            monkeypatch.setattr(vocabulary, "AT_ONCE", at_once)
            largest = max(piece.numel() for piece, in vocabulary._in_pieces(torch.empty(shape)))
            assert losses.at_once(shape) == largest
