"""One process that rehearses many programs, because importing torch costs more than most of them."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.ledger import RankLedger


class Server:
    """A process that answers one program at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def rehearse(
        self, directory: Path, ranks: Sequence[int], *, ways: Sequence[bool] = (False,), kernels: str = "cpu"
    ) -> list[RankLedger]:
        """The ledgers of some ranks of a program; of each by short steps, by every micro-batch (True), or both: ``ways``;
        ``kernels``: whose, "cpu" or "cuda".
        Raises AssertionError with what went wrong where its step fails."""
        from planner.ledger import Call, RankLedger

        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(directory.resolve()), list(ranks), list(ways), kernels]) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert isinstance(answer, list), answer
        return [
            RankLedger(
                item["rank"], item["stage"],
                {Call(row["kind"], row["axis"], row["group"], row["bytes"]): row["count"] for row in item["collectives"]},
                item["memory_bytes"], item["streams_bytes"], item["reserved_bytes"],
            )
            for item in answer
        ]

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def _answer(directory: str, ranks: Sequence[int], ways: Sequence[bool], kernels: str) -> object:
    """Rehearse with the program's own modules: every program has its own ``model``, ``train`` and ``runtime``."""
    import traceback

    for name in list(sys.modules):
        if name.split(".")[0] in ("model", "runtime", "train"):
            del sys.modules[name]
    sys.path[:] = [directory, *(path for path in sys.path if not (Path(path or ".") / "train.py").exists())]
    try:
        train, rehearsal = importlib.import_module("train"), importlib.import_module("runtime.rehearsal")
        return [ledger for rank in ranks for ledger in rehearsal.rehearse_ways(train, rank, ways, kernels)]
    except Exception:  # noqa: BLE001 - whatever a program raises is the answer
        return traceback.format_exc()


def _serve() -> None:
    import gc

    import torch
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.pipelining

    from tests.compiled import compile_once

    torch.set_num_threads(1)
    compile_once()
    gc.freeze()  # What torch's modules hold is not looked through before every step: a quarter of the time.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What torch prints before it raises is no answer.
    for line in sys.stdin:
        print(json.dumps(_answer(*json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    _serve()
