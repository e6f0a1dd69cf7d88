"""What a user does wrong ends an emitted program in one line and exit code 2 on every rank."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from codegen import lower, verify
from planner.ir.errors import InternalError
from runtime.errors import ProgramError
from runtime.launch import parse_options
from tests.matrix.build import Row, make_plan
from tests.matrix.programs import Emitted, emitted, small_graph, write_tokens
from tests.matrix.workers import Outcome, Workers

pytestmark = pytest.mark.slow
BLOCKED = ("planner", "codegen", "pydantic", "pulp", "highspy", "jinja2", "yaml", "networkx", "typer", "rich", "transformers")

FULL = """    import errno, io, os
    from pathlib import Path
    program, plain = build(), Path.open

    class Full(io.FileIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def opened(path, mode="r", *rest, **others):
        if mode[0] not in "wa" or program.world.rank != {rank}:
            return plain(path, mode, *rest, **others)
        file = io.BufferedWriter(Full(path, mode[0]))
        return file if "b" in mode else io.TextIOWrapper(file)

    Path.open = opened
    try:
        train(program, options)
    finally:
        Path.open = plain
"""

OWN_COPY = """import os
from pathlib import Path

exec(Path(__file__).with_name(f"{os.environ['RANK']}.py").read_text())
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Emitted:
    return emitted(small_graph("gpt"), Row(data=2, zero=1), tmp_path_factory.mktemp("errors") / "program")


@pytest.fixture(scope="module")
def tabled(tmp_path_factory: pytest.TempPathFactory) -> Emitted:
    """One that has constants too."""
    return emitted(small_graph("buffered"), Row(data=2), tmp_path_factory.mktemp("tables") / "program")


def refused(outcomes: list[Outcome], *said: str) -> None:
    """Exit code 2 everywhere; rank 0 says it in one line, the others the same where torchrun does not end them meanwhile."""
    assert [outcome.code for outcome in outcomes] == [2] * len(outcomes), outcomes[0].error
    (line,) = [line for line in outcomes[0].error.splitlines() if "Warning" not in line and not line.startswith("  ")]
    assert line.startswith("error: ") and all(part in line for part in said), line
    for rank, outcome in enumerate(outcomes[1:], start=1):
        said_again = [text for text in outcome.error.splitlines() if "error: " in text]
        assert said_again == [line.replace("error: ", f"error: rank {rank} on {platform.node()}: ", 1)]
    assert not any("Traceback" in outcome.error for outcome in outcomes)


def test_a_wrong_number_of_processes(workers: Workers, program: Emitted) -> None:
    refused(program.launch(workers, ranks=1), "1 processes", "this plan needs 2 (pipeline 1 x data 2 x tensor 1)")


@pytest.mark.parametrize(("tokens", "cut", "said"), [
    (None, 0, "cannot be read (No such file or directory)"),
    (list(range(50)) * 2, 30, "truncated: 85 tokens"),
    ([7] * 300 + [51], 0, "holds token 51"),
    ([7] * 20, 0, "one sample needs 21"),
], ids=["missing", "truncated", "beyond the vocabulary", "too short"])
def test_wrong_data(
    workers: Workers, program: Emitted, tokens: list[int] | None, cut: int, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "text.tokens"
    if tokens is not None:
        write_tokens(path, tokens)
        path.write_bytes(path.read_bytes()[: path.stat().st_size - cut])
    refused(program.launch(workers, "--data", str(path)), str(path), said)


def test_data_that_is_no_token_file(workers: Workers, program: Emitted, tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("Dear Sir or Madam")
    refused(program.launch(workers, "--data", str(path)), "no token file")


@pytest.mark.parametrize("flags", [
    ("--steps", "none"), ("--steps", "0"), ("--checkpoint-every", "-1"), ("--learning-rate", "-1"),
    ("--learning-rate", "nan"), ("--weight-decay", "-0.1"), ("--clip", "-1"), ("--warmup", "-2"), ("--decay-steps", "-1"),
    ("--colour", "red"), *((name, "9" * 400) for name in ("--steps", "--warmup", "--decay-steps", "--checkpoint-every")),
], ids=lambda flags: " ".join(flags)[:30])
def test_a_bad_flag(flags: tuple[str, str]) -> None:
    with pytest.raises(ProgramError, match=flags[0]) as caught:
        parse_options(flags)
    assert "\n" not in str(caught.value)


def test_a_bad_flag_of_a_program(workers: Workers, program: Emitted) -> None:
    refused(program.launch(workers, "--learning-rate", "-1"), "--learning-rate")


@pytest.mark.parametrize("flag", ["--metrics", "--export-start", "--dump-gradients", "--checkpoint"])
def test_a_place_that_cannot_be_written(workers: Workers, program: Emitted, flag: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    refused(program.launch(workers, flag, str(tmp_path / "file" / "below")), flag, "cannot be written")
    if flag != "--checkpoint":
        refused(program.launch(workers, flag, str(tmp_path)), flag, "cannot be written")


@pytest.mark.parametrize(("flag", "rank"), [("--metrics", 0), ("--export-start", 0), ("--checkpoint", 0), ("--checkpoint", 1)])
def test_a_full_disk(workers: Workers, flag: str, rank: int, tmp_path: Path) -> None:
    """One rank finds out; all end, and none waits for it."""
    program, path = emitted(small_graph("gpt"), Row(data=2, zero=1), tmp_path / "program"), str(tmp_path / "kept")
    program.edit("train.py", "    train(build(), options)\n", FULL.format(rank=rank))
    refused(program.launch(workers, "--steps", "2", flag, path), path, "cannot be written (No space left on device)")


@pytest.mark.parametrize(("name", "text"), [
    ("initialization.json", None), ("initialization.json", ""), ("initialization.json", "{\n"), ("initialization.json", "[1]"),
    ("initialization.json", '{"tokens.weight": {}}'), ("constants.json", None), ("constants.json", ""),
    ("constants.json", '{"table": 3}'),
])
def test_a_table_that_a_program_lacks(
    workers: Workers, tabled: Emitted, name: str, text: str | None
) -> None:
    file = tabled.directory / name
    whole = file.read_text()
    file.unlink()
    if text is not None:
        file.write_text(text)
    said = "is missing" if text is None else "is damaged"
    refused(tabled.launch(workers), f"{file}: {said}; emit the program again")
    file.write_text(whole)


def test_a_start_that_is_no_checkpoint(workers: Workers, program: Emitted, tmp_path: Path) -> None:
    refused(program.launch(workers, "--init-from", str(tmp_path)), str(tmp_path), "no complete checkpoint")


def test_a_checkpoint_of_another_model(workers: Workers, program: Emitted, tmp_path: Path) -> None:
    other = emitted(small_graph("llama"), Row(), tmp_path / "other")
    other.train(workers, 1, "--checkpoint", str(tmp_path / "kept"))
    refused(program.launch(workers, "--checkpoint", str(tmp_path / "kept")), "tokens.weight is (53, 28)")


def test_a_checkpoint_of_more_layers(workers: Workers, tmp_path: Path) -> None:
    """Nothing that was trained is dropped silently."""
    deep, flat = (emitted(small_graph("gpt", layers=layers), Row(), tmp_path / str(layers)) for layers in (2, 1))
    deep.train(workers, 1, "--checkpoint", str(tmp_path / "kept"))
    refused(flat.launch(workers, "--steps", "2", "--checkpoint", str(tmp_path / "kept")), "holds blocks.1.", "this model lacks")
    flat.train(workers, 1, "--init-from", str(tmp_path / "kept"))


@pytest.mark.parametrize(("file", "size", "said"), [
    (".metadata", 300, "no complete checkpoint"), (".metadata", 0, "no complete checkpoint"),
    ("__0_0.distcp", 2000, "ends after 2,000 of "), ("training.json", 9, "missing or mangled"),
])
def test_a_mangled_checkpoint(workers: Workers, program: Emitted, file: str, size: int, said: str, tmp_path: Path) -> None:
    program.train(workers, 1, "--checkpoint", str(tmp_path))
    os.truncate(tmp_path / "step-00000001" / file, size)
    refused(program.launch(workers, "--steps", "2", "--checkpoint", str(tmp_path)), str(tmp_path), said)


@pytest.mark.parametrize(("file", "data", "said"), [
    (".metadata", b"cno_such_module\nx\n.", "no complete checkpoint"), (".metadata", b"I3\n.", "no complete checkpoint"),
    ("training.json", b'{"step": -2, "seed": 0, "updates": 1, "samples": 4, "loss_scale": 1, "clean_steps": 0}', "step: is -2"),
])
def test_a_checkpoint_of_another_form(
    workers: Workers, program: Emitted, file: str, data: bytes, said: str, tmp_path: Path
) -> None:
    program.train(workers, 1, "--checkpoint", str(tmp_path))
    (tmp_path / "step-00000001" / file).write_bytes(data)
    refused(program.launch(workers, "--steps", "2", "--checkpoint", str(tmp_path)), str(tmp_path), said)


@pytest.mark.parametrize("schedule", ["zbv", "interleaved-zero-bubble"])
@pytest.mark.parametrize("decision", [{"zero": 3}, {"recompute": "full"}, {"recompute": "selective"}], ids=str)
def test_a_split_backward_pass_takes_neither_zero_3_nor_recomputation(schedule: str, decision: dict[str, object]) -> None:
    graph = small_graph("gpt")
    row = Row(pipeline=2, schedule=schedule, accumulation=4, **decision)  # type: ignore[arg-type]
    with pytest.raises(InternalError, match=f"{schedule} parts the backward pass"):
        verify(lower(make_plan(graph, row), graph))


def test_a_program_is_of_one_length(workers: Workers, tmp_path: Path) -> None:
    """Nothing else in train.py says it, so no edit of train.py alone lets another one pass."""
    program = emitted(small_graph("gpt"), Row(data=2), tmp_path / "program")
    program.edit("train.py", "SEQUENCE = 20", "SEQUENCE = 40")
    assert "(20,)" not in (program.directory / "train.py").read_text()
    said = "train.py: SEQUENCE: is 40, and model.py takes input_ids of shape (20,); put it back"
    refused(program.launch(workers, "--steps", "1"), said)


@pytest.mark.parametrize(("file", "old", "own", "said"), [
    ("train.py", "EPSILON = (0.9, 0.95)", "EPSILON = (0.9, 0.99)",
     "train.py: BETAS: (0.9, 0.99) on rank 1, (0.9, 0.95) on rank 0; copy one program to all nodes"),
    ("train.py", 'MESH = {"pipeline": 1, "data": 2, "tensor": 1}', 'MESH = {"tensor": 1, "data": 2, "pipeline": 1}',
     "train.py: MESH: {'tensor': 1, 'data': 2, 'pipeline': 1} on rank 1, {'pipeline': 1, "),
    ("model.py", 'torch.int64, "tokens", 51', 'torch.int64, "tokens", 49', "model.py: rank 1 has another than rank 0; copy"),
])
def test_a_program_that_is_another_on_one_node(
    workers: Workers, file: str, old: str, own: str, said: str, tmp_path: Path
) -> None:
    program = emitted(small_graph("gpt"), Row(data=2), tmp_path / "program")
    copies = program.directory / "0.py", program.directory / "1.py"
    copies[0].write_text((program.directory / file).read_text())
    program.edit(file, old, own)
    copies[1].write_text((program.directory / file).read_text())
    (program.directory / file).write_text(OWN_COPY)
    refused(program.launch(workers), said)


@pytest.mark.parametrize("decision", [{"zero": 3}, {"recompute": "full"}, {"recompute": "selective"}], ids=str)
def test_a_program_changed_by_hand_is_refused_too(workers: Workers, decision: dict[str, object], tmp_path: Path) -> None:
    row = Row(pipeline=2, schedule="interleaved-1f1b", accumulation=4, **decision)  # type: ignore[arg-type]
    program = emitted(small_graph("gpt"), row, tmp_path / "program")
    program.edit("train.py", '"interleaved-1f1b"', '"interleaved-zero-bubble"')
    refused(program.launch(workers, "--steps", "1"), "train.py: ", "parts the backward pass; use another schedule")


def test_zero_3_written_into_a_program_of_a_model_that_cannot_have_it(workers: Workers, tmp_path: Path) -> None:
    program = emitted(small_graph("distilled"), Row(data=2, accumulation=2, zero=1), tmp_path / "program")
    program.edit("train.py", "[1] * 6", "[3] * 6")
    refused(program.launch(workers, "--steps", "1"), "train.py: STAGES: block ", "only detached, and has ZeRO 3; 0, 1 or 2")


def test_torch_is_all_that_a_program_needs(tmp_path: Path) -> None:
    """Every other package that the planner uses is blocked, this repository too."""
    program = emitted(small_graph("gpt"), Row(recompute="selective", accumulation=2), tmp_path / "program")
    starter = tmp_path / "start.py"
    starter.write_text(
        "import runpy, sys\n"
        "class Without:\n"
        "    def __init__(self, finder):\n"
        "        self.finder = finder\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        absent = name.split('.')[0] in {BLOCKED!r}\n"
        "        return None if absent else self.finder.find_spec(name, path, target)\n"
        "sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]\n"
        f"sys.path.insert(0, {str(program.directory)!r})\n"
        "sys.argv = ['train.py', '--steps', '2']\n"
        f"runpy.run_path({str(program.directory / 'train.py')!r}, run_name='__main__')\n"
    )
    bare = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-I", str(starter)], capture_output=True, text=True, timeout=600, cwd=tmp_path, env=bare, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "step 2/2  loss" in done.stdout
