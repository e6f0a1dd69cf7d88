"""What a step says of itself."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.errors import ProgramError
from runtime.launch import parse_options
from runtime.loop import Trainer
from runtime.metrics import StepReport
from tests.runtime.toy_program import Toy, build


@pytest.mark.parametrize(("tokens", "said"), [(4096.0, "4,096 tokens/s"), (0.0, "32 samples/s")])
def test_the_rate_is_of_tokens_or_samples(tokens: float, said: str) -> None:
    line = StepReport(3, 2.5, 1.0, 1e-3, 0.25, tokens, 0.5, 2**30).line(10, 8)
    assert f"  {said}  " in line and line.startswith("step 3/10  loss 2.5")


def test_a_step_may_weigh_nothing_but_not_less(alone: None) -> None:
    """Weights that are data (importance, masks) may add up to zero: there is nothing to train on. Less has no mean."""
    weights = iter((4.0, 0.0, -0.75))
    program = replace(build(Toy(microbatches=1)), weigh=lambda **batch: (torch.tensor(next(weights)),))
    trainer = Trainer(program, parse_options([]))
    assert trainer.step()[0] > 0
    assert trainer.step()[1] == 0
    with pytest.raises(ProgramError, match=r"^loss: the total weight of step 3 is negative \(-0\.75\); weights that add"):
        trainer.step()


LAUNCHER = """
import subprocess, sys
held = b"x" * 2**30
code = "import torch; from runtime.metrics import peak_memory_bytes as most; print(most(torch.device('cpu')))"
subprocess.run([sys.executable, "-c", code], check=True)
"""


@pytest.mark.slow
def test_the_memory_is_not_that_of_whoever_starts_the_program() -> None:
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", LAUNCHER], cwd=root, capture_output=True, text=True, check=True)
    assert 2**26 < int(ran.stdout) < 2**30
