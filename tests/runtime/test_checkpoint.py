"""A checkpoint that is damaged is refused in one line, whatever its bytes have become."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime import checkpoint
from runtime.boxes import BoxedTensor
from runtime.checkpoint import load_plain, newest
from runtime.errors import ProgramError
from runtime.launch import parse_options, start
from runtime.loop import train
from tests.runtime.cases import refused_in_folders_of_their_own
from tests.runtime.group import ProcessPool
from tests.runtime.test_parts import token_file
from tests.runtime.toy_program import SEQUENCE, Toy, build

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
    ("data", {"tokens": 5}, 'data: is {"tokens": 5}; what its tokens'),
    ("data", {"tokens": "5", "dtype": "", "sampled": ""}, "data: is"),
    ("data", {"tokens": 5, "dtype": "", "sampled": "", "length": "8"}, "data: is"),
    ("model", 5, "model: is 5; what its model"),
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


@pytest.mark.slow
def test_one_process_that_reads_a_checkpoint_is_not_warned_of_being_one(alone: None, tmp_path: Path) -> None:
    """The plain model's user has no process group and wants none."""
    start, gradients = str(tmp_path / "start.pt"), str(tmp_path / "gradients.pt")
    run = ["--steps", "1", "--checkpoint", str(tmp_path), "--export-start", start, "--dump-gradients", gradients]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(build(Toy()), parse_options(run))
        load_plain(tmp_path / "step-00000001")
    assert not [str(item.message) for item in told if "torch.distributed" in str(item.message)]


@pytest.fixture
def kept(alone: None, tmp_path: Path) -> Path:
    """A directory of the checkpoints of steps 1 and 2."""
    run = ["--steps", "2", "--checkpoint", str(tmp_path / "kept"), "--checkpoint-every", "1"]
    train(build(Toy()), parse_options(run))
    return tmp_path / "kept"


@pytest.mark.slow
def test_the_newest_is_that_of_the_largest_step_however_many_digits_it_has(kept: Path) -> None:
    for name in ("step-99999999", "step-100000000", "step-1000000000.partial", "step-2000000"):
        shutil.copytree(kept / "step-00000001", kept / name)
    assert newest(kept) == kept / "step-100000000"


@pytest.mark.slow
@pytest.mark.parametrize(("file", "size", "said"), [
    ("training.json", 0, "training.json: missing or mangled"), ("training.json", None, "training.json: missing or mangled"),
    (".metadata", 0, "no complete checkpoint"), ("__0_0.distcp", None, "__0_0.distcp: is missing"),
    ("__0_0.distcp", 2000, "__0_0.distcp: ends after 2,000 of "),
])
def test_what_lacks_a_file_is_passed_over_and_none_begins_anew_where_all_do(
    kept: Path, capsys: pytest.CaptureFixture[str], file: str, size: int | None, said: str
) -> None:
    """As a power cut or a copy that was broken off leaves it."""
    def damage(step: str) -> None:
        if size is None:
            (kept / step / file).unlink()
        else:
            os.truncate(kept / step / file, size)

    damage("step-00000002")
    train(build(Toy()), parse_options(["--steps", "1", "--checkpoint", str(kept)]))
    printed = capsys.readouterr()
    assert "after step 1" in printed.out
    (line,) = printed.err.splitlines()
    assert line.startswith(f"warning: {kept / 'step-00000002'}") and said in line
    assert line.endswith("; passed over for step-00000001")
    damage("step-00000001")
    with pytest.raises(ProgramError) as refused:
        train(build(Toy()), parse_options(["--steps", "1", "--checkpoint", str(kept)]))
    assert said in str(refused.value) and "step-00000002" in str(refused.value)


def test_a_finished_checkpoint_outlasts_a_power_cut(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files and their names are on the disk before it has its own name, which is there before training goes on."""
    done, partial = [], tmp_path / "step-00000001.partial"
    plain = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(os.readlink(f"/proc/self/fd/{file}")), plain[0](file)))
    monkeypatch.setattr(Path, "rename", lambda old, new: (done.append(f"{new} is named"), plain[1](old, new))[1])
    train(build(Toy()), parse_options(["--steps", "1", "--checkpoint", str(tmp_path)]))
    named = done.index(f"{tmp_path / 'step-00000001'} is named")
    assert done[named - 1] == str(partial) and done[named + 1 :] == [str(tmp_path)]
    assert {str(partial / name) for name in ("__0_0.distcp", ".metadata.tmp", "training.json")} <= set(done[:named])


def test_what_is_saved_has_its_name_only_where_all_of_it_is_there(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node may have written it to a disk of its own."""
    plain = checkpoint._write
    monkeypatch.setattr(checkpoint, "_write", lambda path, state: (plain(path, state), (path / "__0_0.distcp").unlink()))
    with pytest.raises(ProgramError, match=r"__0_0.distcp: is missing, of what was saved; give a folder that all nodes share"):
        train(build(Toy()), parse_options(["--steps", "1", "--checkpoint", str(tmp_path)]))
    assert not (tmp_path / "step-00000001").exists()


def test_no_rank_makes_a_folder_to_write_into(alone: None, tmp_path: Path) -> None:
    """It would be one of its own node's."""
    start(device="cpu")
    with pytest.raises(ProgramError, match=r"gone: cannot be written .* not on this node"):
        checkpoint._write(tmp_path / "gone", {"x": BoxedTensor((2,), torch.zeros(2), (((0,), (2,), (0,)),))})
    assert not (tmp_path / "gone").exists()


@pytest.mark.slow
@pytest.mark.parametrize("seeing", [0, 1])
@pytest.mark.parametrize("start", ["kept", "kept/step-00000001"])
def test_a_start_that_one_rank_does_not_see_is_no_hang(
    pool: ProcessPool, alone: None, seeing: int, start: str, tmp_path: Path
) -> None:
    """A folder of checkpoints and a checkpoint are read by other collectives: one rank says for all which it is."""
    (tmp_path / str(1 - seeing)).mkdir()
    train(build(Toy()), parse_options(["--steps", "1", "--checkpoint", str(tmp_path / str(seeing) / "kept")]))
    found = "kept" if seeing and start == "kept" else "kept/step-00000001"
    refusals = pool.run(2, refused_in_folders_of_their_own, Toy(data=2), str(tmp_path), ["--init-from", start])
    assert refusals == [f"{found}: no complete checkpoint; a directory that --checkpoint wrote"] * 2


OTHERS = (
    "warning: --data: not the tokens that the run was trained on until now: {}, now {}; "
    "samples may be repeated or left out\n"
)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after", "said"), [
    (None, None, ""), (range(2000), range(2000), ""),
    (None, range(2000), OTHERS.format("made-up ones", "2,000 tokens of uint16")),
    (range(2000), range(2500), OTHERS.format("2,000 tokens of uint16", "2,500 tokens of uint16")),
    (range(2000), range(1, 2001), OTHERS.format("2,000 tokens of uint16", "as many others")),
])
def test_other_data_than_until_now_is_told(
    alone: None, before: range | None, after: range | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps, numbers in enumerate((before, after), start=1):
        data = [] if numbers is None else ["--data", str(token_file(tmp_path / "data", [number % 51 for number in numbers]))]
        train(build(Toy()), parse_options(["--steps", str(steps), "--checkpoint", str(tmp_path / "kept"), *data]))
    assert capsys.readouterr().err == said


@pytest.mark.slow
@pytest.mark.parametrize(("length", "said"), [
    (SEQUENCE, ""), (None, ""),
    (16, f"warning: --data: in windows of 16 tokens until now, now of {SEQUENCE}; samples may be repeated or left out\n"),
])
def test_windows_of_another_length_than_until_now_are_told(
    alone: None, length: int | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan of another sequence length goes on from the checkpoint. One that does not say it may have had the same."""
    data = token_file(tmp_path / "data", [number % 51 for number in range(2000)])
    run = ["--checkpoint", str(tmp_path / "kept"), "--data", str(data)]
    train(build(Toy()), parse_options([*run, "--steps", "1"]))
    file = tmp_path / "kept" / "step-00000001" / "training.json"
    progress = json.loads(file.read_text())
    assert progress["data"]["length"] == SEQUENCE
    others = {name: value for name, value in progress["data"].items() if name != "length"}
    file.write_text(json.dumps({**progress, "data": others | ({} if length is None else {"length": length})}))
    train(build(Toy()), parse_options([*run, "--steps", "2"]))
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(("before", "after", "tells"), [("one", "one", False), ("", "one", False), ("one", "other", True)])
def test_another_model_than_until_now_is_told(
    alone: None, before: str, after: str, tells: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six heads in place of four have the same tensors."""
    for steps, model in enumerate((before, after), start=1):
        options = parse_options(["--steps", str(steps), "--checkpoint", str(tmp_path / "kept")])
        train(replace(build(Toy()), model=model), options)
    assert capsys.readouterr().err == (
        f"warning: {tmp_path / 'kept'}: not the model that the run trained until now (one, now other): its code or settings, "
        "its loss, --seq, --precision or torch are others; its tensors fit\n" if tells else ""
    )


def test_made_up_tokens_have_no_windows(alone: None, tmp_path: Path) -> None:
    train(build(Toy()), parse_options(["--steps", "1", "--checkpoint", str(tmp_path)]))
    progress = json.loads((tmp_path / "step-00000001" / "training.json").read_text())
    assert progress["data"] == {"tokens": 0, "dtype": "", "sampled": ""}


@pytest.mark.slow
def test_data_that_is_forgotten_is_asked_for_where_steps_are_left(alone: None, tmp_path: Path) -> None:
    data, run = token_file(tmp_path / "data", [number % 51 for number in range(2000)]), ["--checkpoint", str(tmp_path / "kept")]
    train(build(Toy()), parse_options([*run, "--steps", "1", "--data", str(data)]))
    train(build(Toy()), parse_options([*run, "--steps", "1", "--export-start", str(tmp_path / "trained.pt")]))
    with pytest.raises(ProgramError) as refused:
        train(build(Toy()), parse_options([*run, "--steps", "2"]))
    assert str(refused.value) == (
        "--data: is not given, and the run was trained on 2,000 tokens of uint16 until now; "
        "give the file, or begin a run on made-up tokens with --init-from and another --checkpoint"
    )
