"""A model that is traced in a process of its own is the same graph, and its errors are the same errors."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from planner.ir.errors import ModelError, NoPlanFits
from planner.ir.serialize import to_json
from planner.search.refusal import MemoryTooSmall
from planner.tracing import Tracer, Wanted, trace_here
from planner.workers import start_process

FILE = """
import os
import signal
import torch
from torch import nn

print("importing")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)

    def forward(self, input_ids):
        return self.head(self.embedding(input_ids))


def net():
    print("building")
    return Net()


def ends():
    os._exit(7)


def killed(name):
    os.kill(os.getpid(), getattr(signal, name))


def interrupts():
    raise KeyboardInterrupt
"""


@pytest.fixture
def wanted(tmp_path: Path) -> Callable[[str], Wanted]:
    file = tmp_path / "models.py"
    file.write_text(FILE)
    return lambda name: Wanted(f"{file}:{name}", {}, 8, "float32")


@pytest.fixture
def tracer() -> Iterator[Tracer]:
    with closing(Tracer()) as tracer:
        yield tracer


@pytest.mark.slow
def test_a_model_that_interrupts_is_an_error_of_its_own(
    tracer: Tracer, wanted: Callable[[str], Wanted], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ModelError, match="interrupts: raises KeyboardInterrupt; it must not end Python"):
        tracer(wanted("interrupts"))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_the_graph_is_the_same(wanted: Callable[[str], Wanted], capfd: pytest.CaptureFixture[str]) -> None:
    with closing(Tracer()) as tracer:
        graph, heard = tracer(wanted("net")), capfd.readouterr()
    assert to_json(graph) == to_json(trace_here(wanted("net")))
    assert heard.out == "" and heard.err.splitlines() == ["importing", "building"], "a model file prints to standard error"


@pytest.mark.slow
def test_errors_are_the_same(tracer: Tracer, wanted: Callable[[str], Wanted]) -> None:
    with pytest.raises(ModelError) as there:
        tracer(wanted("nothing"))
    with pytest.raises(ModelError) as here:
        trace_here(wanted("nothing"))
    assert vars(there.value) | {"__notes__": []} == vars(here.value) | {"__notes__": []}
    assert str(there.value) == str(here.value) and "in _load_file" in there.value.__notes__[0]


@pytest.mark.slow
def test_a_process_that_ends_is_an_error_of_the_model(tracer: Tracer, wanted: Callable[[str], Wanted]) -> None:
    with pytest.raises(ModelError, match="the process that traces it ended with exit code 7"):
        tracer(wanted("ends"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "said"), [
    ("SIGKILL", r"the process that traces it was ended by signal 9 \(SIGKILL\); it must fit in memory without its weights"),
    ("SIGSEGV", r"torch crashed while tracing it, by signal 11 \(SIGSEGV\); find the operation that does it"),
])
def test_a_process_that_a_signal_ends_is_told_by_its_signal(
    tracer: Tracer, wanted: Callable[[str], Wanted], name: str, said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        tracer(replace(wanted("killed"), settings={"name": name}))


@pytest.mark.slow
def test_a_question_that_breaks_off_is_none(capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever asks was killed: a traceback of the process that is left would be the last thing said."""
    with start_process("planner.tracing", "serve", heard=True) as process:
        process.communicate(pickle.dumps([list(range(1000))])[:1000])
        assert process.returncode == 0
    assert capfd.readouterr().err == ""


def test_every_kind_of_error_travels() -> None:
    error = pickle.loads(pickle.dumps(MemoryTooSmall("nothing fits", "give it more", None)))
    assert isinstance(error, NoPlanFits) and (str(error), error.least) == ("memory: nothing fits; give it more", None)
