"""What a step says of itself."""

from __future__ import annotations

import pytest

from runtime.metrics import StepReport


@pytest.mark.parametrize(("tokens", "said"), [(4096.0, "4,096 tokens/s"), (0.0, "32 samples/s")])
def test_the_rate_is_of_tokens_or_samples(tokens: float, said: str) -> None:
    line = StepReport(3, 2.5, 1.0, 1e-3, 0.25, tokens, 0.5, 2**30).line(10, 8)
    assert f"  {said}  " in line and line.startswith("step 3/10  loss 2.5")
