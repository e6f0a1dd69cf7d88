"""What Fourier transforms keep and hold: exactly torch's bytes."""

from __future__ import annotations

import pytest

from planner.costing.activations import saved_bytes
from planner.costing.local import localise
from planner.ir.body import Body, BodyValue, Node
from planner.ir.types import Ref, TensorType
from tests.ops.interpret import peaks_by_torch, saved_by_torch
from tests.ops.test_saved import Arguments
from tests.ops.test_temporaries import predicted

WHOLE, HALF, ROWS = (24, 48), (24, 25), (13, 48)
REAL, COMPLEX = "float32", "complex64"
CASES = [
    *((base, kind, WHOLE, WHOLE, COMPLEX, {"dim": dim})
      for base, kind in (("fft", REAL), ("fft", COMPLEX), ("ifft", REAL), ("ifft", COMPLEX)) for dim in (-1, 0)),
    ("rfft", REAL, WHOLE, HALF, COMPLEX, {"dim": -1}), ("rfft", REAL, WHOLE, ROWS, COMPLEX, {"dim": 0}),
    ("ihfft", REAL, WHOLE, HALF, COMPLEX, {"dim": -1}), ("hfft", COMPLEX, HALF, WHOLE, REAL, {"dim": -1, "n": 48}),
    ("irfft", COMPLEX, HALF, WHOLE, REAL, {"dim": -1, "n": 48}), ("irfft", COMPLEX, ROWS, WHOLE, REAL, {"dim": 0, "n": 24}),
    # Cut, or filled up with zeros.
    *(("fft", kind, WHOLE, (24, n), COMPLEX, {"dim": -1, "n": n}) for kind in (REAL, COMPLEX) for n in (32, 96)),
    *(("rfft", REAL, WHOLE, (24, n // 2 + 1), COMPLEX, {"dim": -1, "n": n}) for n in (32, 96)),
    *(("irfft", COMPLEX, HALF, (24, n), REAL, {"dim": -1, "n": n}) for n in (32, 96)),
    *((base, kind, WHOLE, WHOLE, COMPLEX, {"dim": (-2, -1)})
      for base, kind in (("fft2", REAL), ("fft2", COMPLEX), ("fftn", REAL), ("ifftn", COMPLEX), ("ifft2", REAL))),
    ("rfft2", REAL, WHOLE, HALF, COMPLEX, {"dim": (-2, -1)}), ("rfftn", REAL, WHOLE, HALF, COMPLEX, {"dim": (-2, -1)}),
    ("irfft2", COMPLEX, HALF, WHOLE, REAL, {"dim": (-2, -1), "s": WHOLE}),
    ("irfftn", COMPLEX, HALF, WHOLE, REAL, {"dim": (-2, -1), "s": WHOLE}),
]


def body_of(case: tuple[str, str, tuple[int, ...], tuple[int, ...], str, dict[str, object]]) -> Body:
    base, given, shape, output, made, extra = case
    length = "s" if isinstance(extra["dim"], tuple) else "n"
    arguments: Arguments = (
        ("self", Ref("a")), (length, extra.get(length)), ("dim", extra["dim"]), ("norm", None),  # type: ignore[assignment]
    )
    node = Node("out", f"fft_{base}", arguments, (TensorType(output, made),), differentiable=True)  # type: ignore[arg-type]
    return Body("Case", (BodyValue("a", TensorType(shape, given), True),), (), (), (node,), ("out",))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[5]}")
def test_transform(case: tuple[str, str, tuple[int, ...], tuple[int, ...], str, dict[str, object]]) -> None:
    body = body_of(case)
    assert predicted(body) == peaks_by_torch(body, 1)
    assert saved_bytes(localise(body, None, 1)) == saved_by_torch(body, 1)[0]
