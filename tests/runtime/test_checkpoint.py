"""A checkpoint that is damaged is refused in one line, whatever its bytes have become."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from runtime.checkpoint import load_plain, newest
from runtime.errors import ProgramError
from runtime.launch import parse_options, start
from runtime.loop import train
from tests.runtime.toy_program import Toy, build

PROGRESS = {"step": 3, "seed": 0, "updates": 3, "samples": 24, "loss_scale": None, "clean_steps": 0, "aliases": {}}


def refusal(directory: Path) -> str:
    with pytest.raises(ProgramError) as caught:
        load_plain(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("field", "value", "said"), [
    ("step", "2", 'step: is "2"; a whole number from 0 up'), ("step", None, "step: is null"), ("step", 2.5, "step: is 2.5"),
    ("step", -2, "step: is -2"), ("step", True, "step: is true"), ("samples", None, "samples: is null"),
    ("samples", 10**30, "samples: is 1000"), ("updates", [3], "updates: is [3]"), ("clean_steps", 0.0, "clean_steps: is 0.0"),
    ("seed", "a", 'seed: is "a"; a whole number'), ("loss_scale", "1", "loss_scale: is"), ("loss_scale", 0, "loss_scale: is 0"),
    ("loss_scale", float("nan"), "loss_scale: is NaN; a positive number or null"), ("aliases", ["a"], "aliases: is"),
    ("aliases", {"a": 1}, 'aliases: is {"a": 1}; names of parameters'), ("pace", 1, "missing or mangled"),
])
def test_progress_of_another_form_is_named(field: str, value: object, said: str, tmp_path: Path) -> None:
    (tmp_path / "training.json").write_text(json.dumps({**PROGRESS, field: value}))
    assert said in refusal(tmp_path) and "training.json" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, "[3]", "3", "{", "{}", "\x00"])
def test_progress_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "training.json").write_text(text)
    assert "training.json: missing or mangled; a complete checkpoint" in refusal(tmp_path)


@pytest.mark.parametrize("data", [
    b"cno_such_module\nx\n.",  # ModuleNotFoundError
    b"cbuiltins\nint\n((ltR.",  # TypeError
    b"cbuiltins\nbytearray\n(I4611686018427387904\ntR.",  # MemoryError
    b"cbuiltins\nbytearray\n(L99999999999999999999L\ntR.",  # OverflowError
    b"ctorch\ndevice\n(Vnowhere\ntR.",  # RuntimeError
    b"I3\n.", b"", b"\x80",
])
def test_a_list_of_tensors_that_is_none(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "training.json").write_text(json.dumps(PROGRESS))
    (tmp_path / ".metadata").write_bytes(data)
    assert "no complete checkpoint" in refusal(tmp_path)


def test_one_process_that_reads_a_checkpoint_is_not_warned_of_being_one(alone: None, tmp_path: Path) -> None:
    """The plain model's user has no process group and wants none."""
    start, gradients = str(tmp_path / "start.pt"), str(tmp_path / "gradients.pt")
    run = ["--steps", "1", "--checkpoint", str(tmp_path), "--export-start", start, "--dump-gradients", gradients]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(build(Toy()), parse_options(run))
        load_plain(tmp_path / "step-00000001")
    assert not [str(item.message) for item in told if "torch.distributed" in str(item.message)]


def test_the_newest_is_that_of_the_largest_step_however_many_digits_it_has(alone: None, tmp_path: Path) -> None:
    start(device="cpu")
    for name in ("step-99999999", "step-100000000", "step-1000000000.partial", "step-2000000"):
        (tmp_path / name).mkdir()
        for file in (".metadata", "training.json"):
            (tmp_path / name / file).touch()
    assert newest(tmp_path) == tmp_path / "step-100000000"
