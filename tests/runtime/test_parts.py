"""Dropout, data, learning rate, loss scale, options: what needs no second process."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from runtime import launch
from runtime.block import Block
from runtime.collectives import TensorAxis
from runtime.data import Batches, BatchInput, SyntheticTokens, TokenFile, made_up, make_batches
from runtime.errors import ProgramError
from runtime.initialize import decode_constant, initialize
from runtime.optimizer import LearningRate, LossScale, Optimizer, clip_factor
from runtime.parameters import held_by, require_gradients
from runtime.random_stream import RandomStream
from runtime.schedule import split_batch, stages_of_rank

STREAM = RandomStream(seed=1, step=2, microbatch=3, data_rank=4, tensor_rank=5)
CPU = torch.device("cpu")


def test_masks_depend_on_the_place_alone() -> None:
    x = torch.ones(1000)
    here = STREAM.block("layers.1").dropout(x, 0.25, site=0, sharded=False)
    before = torch.random.get_rng_state()
    assert torch.equal(here, STREAM.block("layers.1").dropout(x, 0.25, site=0, sharded=False))
    assert torch.equal(before, torch.random.get_rng_state())
    assert float(here.mean()) == pytest.approx(1.0, abs=0.1)
    elsewhere = [
        STREAM.block("layers.2").dropout(x, 0.25, site=0, sharded=False),
        STREAM.block("layers.1").dropout(x, 0.25, site=1, sharded=False),
        STREAM.block("layers.1").dropout(x, 0.25, site=0, sharded=True),
        RandomStream(1, 2, 4, 4, 5).block("layers.1").dropout(x, 0.25, site=0, sharded=False),
    ]
    assert not any(torch.equal(here, other) for other in elsewhere)


def test_only_sharded_sites_see_the_tensor_rank() -> None:
    x, other = torch.ones(1000), RandomStream(1, 2, 3, 4, 6)
    assert torch.equal(STREAM.dropout(x, 0.5, 0, sharded=False), other.dropout(x, 0.5, 0, sharded=False))
    assert not torch.equal(STREAM.dropout(x, 0.5, 0, sharded=True), other.dropout(x, 0.5, 0, sharded=True))


@pytest.mark.parametrize(("draw", "mean", "square"), [
    (lambda stream, like, **at: stream.normal(like, **at), 0.0, 1.0),
    (lambda stream, like, **at: stream.uniform(like, **at), 1 / 2, 1 / 3),
    (lambda stream, like, **at: stream.exponential(like, rate=2.0, **at), 1 / 2, 1 / 2),
    (lambda stream, like, **at: stream.integers(like, 2, 5, **at), 3.0, 29 / 3),
], ids=["normal", "uniform", "exponential", "integers"])
def test_numbers_depend_on_the_place_alone(draw: Callable[..., torch.Tensor], mean: float, square: float) -> None:
    like = torch.ones(100, 1000, dtype=torch.float64, requires_grad=True)
    before = torch.random.get_rng_state()
    here = draw(STREAM.block("layers.1"), like, site=0, sharded=False)
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(here, draw(STREAM.block("layers.1"), like, site=0, sharded=False))
    assert torch.equal(here, draw(replace(STREAM, tensor_rank=6).block("layers.1"), like, site=0, sharded=False))
    others = (draw(STREAM, like, site=0, sharded=False), draw(STREAM.block("layers.1"), like, site=1, sharded=False),
              draw(STREAM.block("layers.1"), like, site=0, sharded=True))
    assert not any(torch.equal(here, other) for other in others)
    assert here.shape == like.shape and here.dtype == like.dtype and not here.requires_grad
    assert here.mean().item() == pytest.approx(mean, abs=0.02)
    assert here.square().mean().item() == pytest.approx(square, rel=0.03)


def test_recomputation_drops_the_same_elements() -> None:
    x = torch.randn(64, dtype=torch.float64, requires_grad=True)

    def body(value: torch.Tensor, rng: RandomStream) -> torch.Tensor:
        return rng.dropout(value.sin(), 0.5, site=0, sharded=False).square()

    (kept,) = torch.autograd.grad(body(x, STREAM).sum(), x)
    (again,) = torch.autograd.grad(checkpoint(body, x, STREAM, use_reentrant=False).sum(), x)
    assert torch.equal(kept, again)


def test_attention_without_dropout_is_torchs() -> None:
    query, key, value = torch.randn(3, 2, 4, 8, 16).unbind(0)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.equal(STREAM.attention(query, key, value, is_causal=True, site=1), expected)
    dropped = STREAM.attention(query, key, value, dropout_p=0.5, site=1)
    assert torch.equal(dropped, STREAM.attention(query, key, value, dropout_p=0.5, site=1))
    assert not torch.equal(dropped, STREAM.attention(query, key, value, dropout_p=0.5, site=2))


INPUTS = (
    BatchInput("input_ids", (6,), torch.int64, "tokens", 90), BatchInput("labels", (6,), torch.int64, "targets", 90),
    BatchInput("image", (3, 2), torch.float32, "other"),
)


def test_what_a_token_file_does_not_feed_is_named() -> None:
    assert made_up(INPUTS) == ("image",) and made_up(INPUTS[:2]) == ()
    classes = BatchInput("labels", (), torch.int64, "targets", 5)
    assert made_up((INPUTS[0], classes)) == ("labels",)


def test_any_data_degree_sees_the_same_global_batch() -> None:
    whole = Batches(INPUTS, SyntheticTokens(3, 90), 3, 12, 0, 1, CPU).at(5)
    for data in (2, 3, 4):
        parts = [Batches(INPUTS, SyntheticTokens(3, 90), 3, 12, rank, data, CPU).at(5) for rank in range(data)]
        for name, tensor in whole.items():
            assert torch.equal(torch.cat([part[name] for part in parts]), tensor)
    assert torch.equal(whole["input_ids"][:, 1:], whole["labels"][:, :-1])
    assert int(whole["input_ids"].max()) < 90


def test_another_batch_goes_on_with_the_next_sample() -> None:
    """After three steps of four samples the fourth, of six, begins with the thirteenth."""
    every = Batches(INPUTS, SyntheticTokens(3, 90), 3, 18, 0, 1, CPU).at(0)
    later = Batches(INPUTS, SyntheticTokens(3, 90), 3, 6, 0, 1, CPU, before=3 * 4 - 3 * 6).at(3)
    assert all(torch.equal(later[name], values[12:]) for name, values in every.items())


def token_file(path: Path, tokens: list[int], dtype: str = "uint16", claimed: int | None = None) -> Path:
    width = {"uint16": 2, "uint32": 4}[dtype]
    header = {"format": "shardwright-tokens", "version": 1, "dtype": dtype, "tokens": claimed or len(tokens)}
    path.write_bytes(json.dumps(header).encode() + b"\n" + b"".join(t.to_bytes(width, "little") for t in tokens))
    return path


@pytest.mark.parametrize(("dtype", "top"), [("uint16", 65535), ("uint32", 2**32 - 1)])
def test_a_token_file_is_read_whole_and_shuffled_every_epoch(tmp_path: Path, dtype: str, top: int) -> None:
    tokens = [*range(100), top]
    file = TokenFile(token_file(tmp_path / "tokens", tokens, dtype), seed=1, length=10)
    assert file.windows == 10
    assert file.largest() == top
    assert max(file.largest(part, 4) for part in range(4)) == top
    epochs = [[file.sequence(epoch * 10 + index, 11).tolist() for index in range(10)] for epoch in range(2)]
    for epoch in epochs:
        assert sorted(epoch) == [tokens[at : at + 11] for at in range(0, 100, 10)]
    assert epochs[0] != epochs[1]


def test_a_file_that_is_wrong_says_what(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="cannot be read"):
        TokenFile(tmp_path / "none", 0, 4)
    (tmp_path / "text").write_text("Once upon a time")
    with pytest.raises(ProgramError, match=r"no token file; a token file, as examples/prepare_text\.py writes it"):
        TokenFile(tmp_path / "text", 0, 4)
    for dtype, told in ("int64", '"int64"'), (None, "null"), (["uint16"], r'\["uint16"\]'):
        header = {"format": "shardwright-tokens", "version": 1, "dtype": dtype, "tokens": 1}
        (tmp_path / "wide").write_text(json.dumps(header) + "\n")
        with pytest.raises(ProgramError, match=rf"wide: its tokens are of dtype {told}; write them as uint16 or uint32$"):
            TokenFile(tmp_path / "wide", 0, 4)
    with pytest.raises(ProgramError, match="truncated: 5 tokens; its header says 9"):
        TokenFile(token_file(tmp_path / "short", [1, 2, 3, 4, 5], claimed=9), 0, 4)
    with pytest.raises(ProgramError, match=r"long: 10 bytes of tokens; its header says 4 of uint16, 8 bytes$"):
        TokenFile(token_file(tmp_path / "long", [1, 2, 3, 4, 5], claimed=4), 0, 3)
    with pytest.raises(ProgramError, match="5 tokens; one sample needs 9"):
        TokenFile(token_file(tmp_path / "few", [1, 2, 3, 4, 5]), 0, 8)


def test_tokens_without_a_known_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Synthetic ones are as the example inputs', a file's are any."""
    for name, alone in (("get_rank", lambda: 0), ("get_world_size", lambda: 1)):
        monkeypatch.setattr(f"torch.distributed.{name}", alone)
    monkeypatch.setattr("runtime.data.raise_together", lambda error: None)
    monkeypatch.setattr("runtime.data.check_alike", lambda told, right: None)
    file = token_file(tmp_path / "tokens", [*range(1000, 1020)])
    for shown, below in ((0, 2), (1, 2), (300, 300)):
        inputs = [
            BatchInput("input_ids", (6,), torch.int64, "tokens", 0, shown),
            BatchInput("image", (99,), torch.int32, "other", 0, shown),
        ]
        made = [make_batches(inputs, path, 3, 50, 0, 1, CPU).at(0) for path in (None, file)]
        assert below // 2 <= int(made[0]["input_ids"].max()) < below <= 1000 <= int(made[1]["input_ids"].min())
        assert int(made[0]["image"].max()) == below - 1


def test_the_learning_rate_warms_up_and_decays() -> None:
    rate = LearningRate(1.0, warmup=4, decay_steps=14)
    assert [rate.at(step) for step in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert rate.at(9) == pytest.approx(0.55)
    assert rate.at(14) == rate.at(99) == pytest.approx(0.1)
    assert LearningRate(2.0).at(1) == LearningRate(2.0).at(1000) == 2.0


def test_the_loss_scale_halves_on_overflow_and_grows_back() -> None:
    scale = LossScale(True, 8.0, interval=2)
    scale.update(True)
    assert scale.value == 4.0
    scale.update(False)
    scale.update(False)
    assert scale.value == 8.0
    off = LossScale(False)
    off.update(True)
    assert off.value == 1.0


def test_clipping_is_torchs() -> None:
    norms = {value: torch.tensor(value, dtype=torch.float64) for value in (4.0, 0.5, math.inf)}
    assert float(clip_factor(norms[4.0], 1.0)) == pytest.approx(1 / (4 + 1e-6))
    assert float(clip_factor(norms[0.5], 1.0)) == 1.0
    assert float(clip_factor(norms[math.inf], 0.0)) == 1.0


def test_stages_lie_round_robin_or_in_a_v() -> None:
    assert [stages_of_rank("interleaved-1f1b", 2, rank, 3) for rank in (0, 1)] == [(0, 2, 4), (1, 3, 5)]
    assert [stages_of_rank("zbv", 3, rank, 2) for rank in (0, 1, 2)] == [(0, 5), (1, 4), (2, 3)]


def test_batches_split_in_order() -> None:
    chunks = split_batch({"a": torch.arange(6)}, 3)
    assert [chunk["a"].tolist() for chunk in chunks] == [[0, 1], [2, 3], [4, 5]]


def test_wrong_arguments_are_program_errors() -> None:
    for arguments in (["--steps", "0"], ["--steps", "many"], ["--unknown"], ["--checkpoint-every", "-1"]):
        with pytest.raises(ProgramError):
            launch.parse_options(arguments)
    assert launch.parse_options([], steps=7).steps == 7


def test_steps_between_checkpoints_need_a_place_for_them() -> None:
    with pytest.raises(ProgramError, match=r"^--checkpoint-every: there is no --checkpoint; give the directory$"):
        launch.parse_options(["--checkpoint-every", "5"])
    assert launch.parse_options(["--checkpoint-every", "5", "--checkpoint", "kept"]).checkpoint_every == 5
    assert launch.parse_options([], checkpoint_every=5).checkpoint is None


def test_a_decay_ends_behind_the_warm_up() -> None:
    said = r"^--decay-steps: 3 ends within the warm-up; more than the 3 steps of --warmup, or 0$"
    with pytest.raises(ProgramError, match=said):
        launch.parse_options(["--decay-steps", "3"], warmup=3)
    assert launch.parse_options(["--decay-steps", "4"], warmup=3).decay_steps == 4
    assert launch.parse_options(["--decay-steps", "0", "--warmup", "9"]).warmup == 9


@pytest.mark.parametrize(("name", "value", "said"), [
    ("warmup", None, "is None; a whole number"), ("warmup", 1.5, "is 1.5; a whole number"), ("warmup", True, "is True; a"),
    ("clip", None, "is None; a number"), ("clip", -1, "-1; 0 or more"), ("compile", 1, "is 1; True or False"),
    ("data", 5, "is 5; a path"), ("warmup_steps", 10, "is no option; one of steps, data, "),
])
def test_a_wrong_default_is_named(name: str, value: object, said: str) -> None:
    with pytest.raises(ProgramError) as refused:
        launch.parse_options([], **{name: value})
    assert str(refused.value).startswith(f'train.py: DEFAULTS["{name}"]: {said}')
    launch.parse_options([], clip=0, compile=True, data="text.tokens", warmup=3)




def test_constants_are_filled_after_the_meta_device() -> None:
    constants = {"k": torch.arange(3.0)}

    class Table(Block):
        def __init__(self) -> None:
            super().__init__("table", TensorAxis(None, 0, 1), {"a.weight": "x.weight"}, constants)
            self.declare("a.weight", (2, 2))
            self.constant("rotary.table", "k")

    with torch.device("meta"):
        block = Table()
    assert block.rotary.table.is_meta
    initialize([block], {"x.weight": [("constant", 3.0)]}, 0, CPU)
    assert block.rotary.table.tolist() == [0.0, 1.0, 2.0]
    assert block.a.weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert block.declarations["a.weight"].fqn == "x.weight"
    assert list(block.state_dict()) == ["a.weight"]


def test_a_constant_is_decoded_from_its_bytes() -> None:
    raw = base64.b64encode(bytes([1, 0, 0, 0, 2, 0, 0, 0])).decode()
    assert decode_constant(raw, torch.int32, (2, 1)).tolist() == [[1], [2]]
    assert decode_constant("", torch.float32, (0,)).numel() == 0


def test_the_optimizer_has_its_state_before_the_first_step() -> None:
    """So that the first step takes the memory of every other; the updates are those of torch's AdamW."""
    block = Block("b", TensorAxis(None, 0, 1))
    block.declare("weight", (3, 2))
    block.declare("frozen", (2,), trainable=False)
    nn.init.normal_(block.weight)
    plain = nn.Parameter(block.weight.detach().clone())
    held = held_by([block])
    optimizer = Optimizer(held, LearningRate(0.1), 0.1, {}, (0.9, 0.95), 1e-8)
    reference = torch.optim.AdamW([plain], lr=0.1, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
    assert [value.tolist() for value in optimizer.state()["exp_avg_sq"]] == [[[0.0, 0.0]] * 3]
    assert len(optimizer.adamw.state) == 1
    for step in (1, 2, 3):
        block.weight.grad, plain.grad = torch.full((3, 2), 0.5 * step), torch.full((3, 2), 0.5 * step)
        optimizer.step(step, torch.ones(()))
        reference.step()
        torch.testing.assert_close(block.weight.detach(), plain.detach())


def test_a_lost_gradient_is_noticed() -> None:
    block = Block("b", TensorAxis(None, 0, 1))
    block.declare("kept", (2,))
    block.declare("lost", (2,))
    block.declare("frozen", (2,), trainable=False)
    block.kept.sum().backward()
    with pytest.raises(RuntimeError, match=r"no gradient reached lost \(1 in all\)"):
        require_gradients(held_by([block]))
